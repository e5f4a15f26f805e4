"""What a run begins from: a checkpoint that is there, whole, of this run's settings; or nothing.

It changes nothing, and judges before anything is bound or made. Whoever starts a run a second time
with the command line of the first must not lose the first: steps that are on disk are gone on from
(`--resume`), given up in so many words (`--overwrite`), or left alone with status 4.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from syncer.checkpoint.atomic import WriteError
from syncer.checkpoint.epoch_file import EpochFile, read_epoch
from syncer.checkpoint.facts import SAFETENSORS, Facts
from syncer.checkpoint.files import Files
from syncer.checkpoint.lineage import Origin
from syncer.checkpoint.reader import Checkpoint, Loaded
from syncer.checkpoint.renumbering import raise_of, scant_raise
from syncer.checkpoint.resume import check_resumable
from syncer.config import Config
from syncer.errors import CheckpointError, CheckpointMismatch
from syncer.merge.buffers import BufferPool
from syncer.merge.optimizers import OPTIMIZERS
from syncer.merge.versions import floats
from syncer.steps import version_at
from syncer.wire.contracts import rl_contract, run_contract

NOT_THERE = (FileNotFoundError, NotADirectoryError)
"""Errors of a name that nothing has."""


def resumable_path(config: Config, files: Files) -> str | None:
    """The checkpoint that a run with `--resume` goes on from; None: with `auto` there is none yet.

    Raises `CheckpointError` if there must be one, or if nobody can tell: what cannot be looked at
    is not begun anew.
    """
    path, auto = config.checkpoint_path, config.resume == "auto"
    if path is None:
        raise CheckpointError("--resume has no checkpoint to read: name one with "
                              "--checkpoint-path")
    try:
        why = None if stat.S_ISREG(files.status(path).st_mode) else "it is no regular file"
    except NOT_THERE:
        why = "no such file"
        if auto:
            _check_directory(path, files)
            _check_only_copy(path, files)
            return None
    except OSError as error:
        why = error.strerror if auto else "no such file"
    if why is not None:
        raise CheckpointError(f"--resume: {path} cannot be read: {why}")
    return path


def _check_directory(path: str, files: Files) -> None:
    """One that is not there may come back, with the checkpoint in it: another start can help."""
    directory = os.path.dirname(files.real_path(path)) or "."
    try:
        files.names(directory)
    except OSError as error:
        raise WriteError(f"--resume auto: the directory of {path} cannot be read: "
                         f"{error.strerror}; the run is not begun anew, since its checkpoint may "
                         "be there", error.errno, "names") from None


def _check_only_copy(path: str, files: Files) -> None:
    """A name that somebody took away, while an earlier file is left under its second name."""
    old = f"{files.real_path(path)}.old.tmp"
    if files.exists(old):
        raise CheckpointError(f"--resume auto: {path} is not there, but {old} is, which may be its "
                              f"only copy: rename it to {path} to go on from it, or remove it")


def check_replaceable(path: str, files: Files) -> None:
    """Nothing is lost if a run begins anew in this place: no file, an empty one, or version 0.

    Raises `CheckpointError`, which says what is there and what can be done.
    """
    try:
        if not files.status(path).st_size:
            return
        age = _ago(files.age_s(path))
    except NOT_THERE:
        return
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    try:
        with Checkpoint(path, files) as checkpoint:
            step, run = checkpoint.facts.step, checkpoint.facts.lineage.run
    except CheckpointError as error:
        raise CheckpointError(
            f"{path} is there and cannot be read as a checkpoint ({error}); it was written {age} "
            "and is not replaced: name another --checkpoint-path, or give --overwrite") from None
    if step > 0:
        raise CheckpointError(
            f"{path} is the checkpoint of step {step} of {f'the run {run}' if run else 'a run'}, "
            f"written {age}, and is not replaced: "
            "--resume auto goes on from it, --overwrite begins anew in its place")


def _ago(seconds: float) -> str:
    """An age in the unit that people would take."""
    count, unit = max(int(seconds), 0), "second"
    for size, larger in ((60, "minute"), (60, "hour"), (24, "day")):
        if count < 2 * size:
            break
        count, unit = count // size, larger
    return f"{count} {unit}{'s' * (count != 1)} ago"


class Resumption(NamedTuple):
    """What a run goes on from: the cut of a file, its steps raised as they have to be."""

    facts: Facts
    """As the run begins; its lineage is that of this process."""
    loaded: list[Loaded]
    file_step: int
    """Of the file itself."""
    written_first: bool = False
    """Whether a file of the raised steps must stand before anybody hears of them, and"""
    behind: EpochFile | None = None
    """what stands beside the file that they were raised for, as it may be behind."""
    unfit: int = 0
    """Added to the steps this would have been safe; the run has not so many left, and what was
    added is enough unless saves have failed."""

    @property
    def raised(self) -> int:
        return self.facts.step - self.file_step


def load_resumable(path: str, config: Config, optimizer: Mapping[str, Any], files: Files,
                   origin: Origin) -> Resumption:
    """The whole cut of `path`, verified unless `--no-verify`, with its name made durable.

    optimizer: as `facts.optimizer_facts` gives it. Raises `CheckpointError` when the file cannot be
    read or is of another run.
    """
    with Checkpoint(path, files) as checkpoint:
        facts = checkpoint.facts
        lasting = checkpoint.format == config.checkpoint_format == SAFETENSORS
        if not lasting:  # the other format has no place for what was added
            facts = replace(facts, lineage=facts.lineage._replace(renumbered=0))
        check_resumable(facts, path, optimizer=optimizer,
                        state=OPTIMIZERS[config.outer_optimizer].state,
                        total_steps=config.total_steps)
        check_contract(facts, path, config)
        beside = read_epoch(files.real_path(path), files)
        if beside is not None and beside.contract != facts.contract:
            beside = None
        resumption = _resumption(facts, beside, config, origin, lasting=lasting)
        pool = BufferPool(lasting=True)  # its memory is used again when a version is replaced
        loaded = checkpoint.load(verify=not config.no_verify,
                                 empty=lambda numel: floats(pool.take(numel)))
    _settle_name(path, files)
    return resumption._replace(loaded=[
        found._replace(version=version)
        for found, version in zip(loaded, resumption.facts.versions, strict=True)])


def _resumption(facts: Facts, beside: EpochFile | None, config: Config, origin: Origin, *,
                lasting: bool) -> Resumption:
    """Who this process is, and which step it is at.

    lasting: both the file and what this process writes can say by how much steps were raised.
    """
    if beside is not None and not lasting:
        beside = beside._replace(renumbered=0)
    found = raise_of(facts, beside, every=every_of(config), total_steps=config.total_steps,
                     wanted=config.renumber)
    by, unfit = found.by, 0
    if not lasting and facts.step + by >= config.total_steps:
        room = config.total_steps - facts.step - 1
        by, unfit = scant_raise(facts, beside, every_of(config), room, config.renumber), by
    lineage = facts.lineage.resumed(facts.step, 0 if beside is None else beside.epoch, origin)
    lineage = lineage.raised(by)
    if not lasting:
        lineage = lineage._replace(renumbered=0)
    step, count = facts.step + by, len(facts.versions)
    raised = replace(facts, step=step, lineage=lineage,
                     versions=tuple(version_at(step, p, count) for p in range(count)))
    written_first = by > 0 and not lasting
    return Resumption(raised, [], facts.step, written_first,
                      beside if written_first and config.renumber is None else None, unfit)


def every_of(config: Config) -> int:
    """The file of this process holds what it broadcasts but for so many steps; 1: all of it."""
    if config.goes_on_unsaved or config.downlink != "whole":
        return max(config.checkpoint_every, 2)
    return config.checkpoint_every


def check_contract(facts: Facts, path: str, config: Config) -> None:
    """Raises `CheckpointMismatch` unless the file is of the run that the settings name."""
    stored, island = facts.lineage.run, config.expected_island_contract
    if config.run and stored and config.run != stored:
        raise CheckpointMismatch(f"{path}: run: expected {config.run}, which --run asks for, found "
                                 f"{stored}; leave --run out, or resume a file of that run")
    if island is None and (stored or not config.run):
        return  # what a stored name is in is known from the file alone
    base = facts.fingerprint if island is None else rl_contract(facts.fingerprint, island)
    name = config.run or stored
    expected = run_contract(base, name) if name else base
    if facts.contract != expected:
        asks = " and ".join(flag for flag, given in (
            ("--run", config.run), ("--expected-island-contract", island)) if given)
        raise CheckpointMismatch(
            f"{path}: session contract: expected {expected.hex()}, which {asks} "
            f"ask{'' if ' and ' in asks else 's'} for, found {facts.contract.hex()}")


def _settle_name(path: str, files: Files) -> None:
    """The process before may have died between its rename and the fsync of the directory: what is
    read here could then still give way to the older file, after others have seen it."""
    try:
        files.sync_directory(os.path.dirname(files.real_path(path)) or ".")
    except OSError as error:
        raise CheckpointError(f"--resume: the directory of {path} cannot be made durable (fsync): "
                              f"{error.strerror}") from None
