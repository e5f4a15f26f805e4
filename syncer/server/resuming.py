"""What `--resume` goes on from: a checkpoint that is there, whole, and of this run's settings.

It changes nothing, and judges before anything is bound or made.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from typing import Any

from syncer.checkpoint.facts import Facts
from syncer.checkpoint.files import Files
from syncer.checkpoint.reader import Checkpoint, Loaded
from syncer.checkpoint.resume import check_resumable
from syncer.config import Config
from syncer.errors import CheckpointError, CheckpointMismatch
from syncer.merge.optimizers import OPTIMIZERS
from syncer.wire.contracts import rl_contract


def resumable_path(config: Config, files: Files) -> str:
    """The checkpoint of a run with `--resume`. Raises `CheckpointError` if there is none."""
    path = config.checkpoint_path
    if path is None:
        raise CheckpointError("--resume has no checkpoint to read: name one with "
                              "--checkpoint-path")
    try:
        why = None if stat.S_ISREG(files.status(path).st_mode) else "it is no regular file"
    except OSError:
        why = "no such file"
    if why is not None:
        raise CheckpointError(f"--resume: {path} cannot be read: {why}")
    return path


def load_resumable(path: str, config: Config, optimizer: Mapping[str, Any],
                   files: Files) -> tuple[Facts, list[Loaded]]:
    """The whole cut of `path`, verified unless `--no-verify`, with its name made durable.

    optimizer: as `facts.optimizer_facts` gives it. Raises `CheckpointError` when the file cannot be
    read or is of another run.
    """
    with Checkpoint(path, files) as checkpoint:
        facts = checkpoint.facts
        check_resumable(facts, path, optimizer=optimizer,
                        state=OPTIMIZERS[config.outer_optimizer].state,
                        total_steps=config.total_steps)
        island = config.expected_island_contract
        if island is not None and facts.contract != rl_contract(facts.fingerprint, island):
            expected = rl_contract(facts.fingerprint, island).hex()
            raise CheckpointMismatch(
                f"{path}: session contract: expected {expected}, which --expected-island-contract "
                f"asks for, found {facts.contract.hex()}")
        loaded = checkpoint.load(verify=not config.no_verify)
    _settle_name(path, files)
    return facts, loaded


def _settle_name(path: str, files: Files) -> None:
    """The process before may have died between its rename and the fsync of the directory: what is
    read here could then still give way to the older file, after others have seen it."""
    try:
        files.sync_directory(os.path.dirname(files.real_path(path)) or ".")
    except OSError as error:
        raise CheckpointError(f"--resume: the directory of {path} cannot be made durable (fsync): "
                              f"{error.strerror}") from None
