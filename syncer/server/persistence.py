"""A run and its checkpoint: the lock, what is resumed from, and the saves that are asked for.

It must not decide when to save (core.scheduler does) and not know how (store does).

rule 1.10. What a process has served must be known to the next one, also when it dies before its
    first save: its epoch, and by how much it has raised steps. So this stands in the `.epoch` file
    before a learner is answered. Where the checkpoint cannot tell the sum, it is written first,
    and what stands beside it says before that of which step it will hold all: a start that comes no
    further has told nobody, and the next one must not add, and lose, as many steps again.
rule 1.11. A process that ends in order and whose file has its last step has told nobody more than
    that: the next one may go on with the same numbers, and what learners hold is what it has.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

import numpy as np

from syncer.checkpoint.atomic import AtomicFile, WriteError, check_space, written_anew
from syncer.checkpoint.epoch_file import EpochFile, write_epoch
from syncer.checkpoint.facts import Cut, Facts, NamedDims, optimizer_facts
from syncer.checkpoint.files import FILES, Files, Patient
from syncer.checkpoint.final_state import write_final_state
from syncer.checkpoint.lane import Lane
from syncer.checkpoint.lineage import Lineage, Origin
from syncer.checkpoint.lock import PathLock
from syncer.checkpoint.marker import write_marker
from syncer.checkpoint.reader import Loaded
from syncer.checkpoint.saver import Outcome, Saver
from syncer.checkpoint.tolerant import Tolerant
from syncer.checkpoint.trouble import PERMANENT, RETRY_PAUSE_S
from syncer.config import Config
from syncer.core import actions, events
from syncer.core.actions import SaveKind
from syncer.errors import CheckpointError
from syncer.merge.optimizers import OPTIMIZERS
from syncer.merge.versions import FragmentVersion
from syncer.server.log import Log
from syncer.server.resuming import (
    Resumption,
    check_replaceable,
    every_of,
    load_resumable,
    resumable_path,
)
from syncer.server.system import new_origin
from syncer.wire.hello import Hello
from syncer.wire.identity import Identity


class Persistence:
    """Everything about `--checkpoint-path` and `--resume` of one run; does nothing without them.

    Raises `ConfigError` when another process has the path, `CheckpointError` when the run cannot
    be resumed; nothing is left behind then.

    Large: what a run begins with, what it saves, and what it leaves, each in two or three steps.
    """

    def __init__(self, config: Config, log: Log, files: Files = FILES,
                 lane: Callable[[], Lane] = Lane, origin: Callable[[], Origin] = new_origin):
        self.config, self.log = config, log
        self.files = files = Tolerant(files, lambda text, fields: log.warning(text, **fields))
        self.optimizer = optimizer_facts(
            config.outer_optimizer, lr=config.outer_lr, momentum=config.outer_momentum,
            dn_period=config.dn_period, dn_activation=config.dn_activation)
        self.facts: Facts | None = None
        self.loaded: list[Loaded] = []
        born = origin()
        self.lineage = Lineage(epoch=1, instance=born.instance)
        """Who this process is, of which run; of a resumed one with its past."""
        self.names: tuple[NamedDims, ...] | None = None
        """What the parameters are called, as far as it is known: for each fragment."""
        self.lock: PathLock | None = None
        self.lane: Lane | None = None
        """Where files are written; None for a run that writes none."""
        self.saver: Saver | None = None
        path = config.checkpoint_path
        patient = Patient(files, config.checkpoint_retries, told=self._tried_again)
        self.resumption: Resumption | None = None
        self.beside: EpochFile | None = None
        """What stands in the `.epoch` file, once this process has written it."""
        found = resumable_path(config, patient) if config.resume else None
        if path is not None:
            self.lock = files.lock(path)
        try:
            if found is not None:
                resumption = load_resumable(found, config, self.optimizer, patient, born)
                self.facts, self.loaded = resumption.facts, resumption.loaded
                # whoever takes what was loaded is the last to hold it
                self.resumption = resumption._replace(loaded=[])
                self.names, self.lineage = self.facts.names, self.facts.lineage
            elif path is not None and not config.overwrite:
                check_replaceable(path, patient)
            self.lineage = self.lineage._replace(sends_changes=config.downlink != "whole")
            if config.run is not None:
                self.lineage = self.lineage._replace(run=config.run)
            if path is not None or config.final_state is not None:
                self.lane = lane()
            if path is not None:
                self.saver = Saver(
                    path, form=config.checkpoint_format, keep=config.checkpoint_keep,
                    retries=config.checkpoint_retries, direct=config.checkpoint_direct,
                    rate=config.checkpoint_rate, threads=max(1, config.merge_threads // 2),
                    files=files, lane=self.lane,
                    warn=lambda text, fields: log.warning(text, **fields),
                    first=None if self.resumption else self._write_epoch)
        except BaseException:
            self.close()
            raise

    def _tried_again(self, call: str, error: OSError) -> None:
        self.log.warning("a call for the checkpoint was tried again",
                         path=self.config.checkpoint_path, call=call, error=error.strerror)

    def begin(self) -> None:
        """The server listens: say where the run stands, and make durable that this process has
        served it. Raises `WriteError` if that, or a marker of an end that will not be one, cannot
        be written, or if no save could be written or would find the space it needs."""
        if self.saver is None:
            return
        facts, path, resumption = self.facts, self.saver.shown, self.resumption
        try:
            aside = self.saver.begin(None if resumption is None else resumption.file_step)
            if aside:
                self.log.warning("earlier checkpoints that are no past of this run were set aside",
                                 count=len(aside), steps=[step for step, _ in aside],
                                 path=aside[0].path)
        except OSError as error:
            self.log.warning("what an earlier server left could not be put in order",
                             path=self.saver.path, error=error.strerror)
        if self.config.checkpoint_direct:
            self._check_direct(path)
        step = 0 if facts is None else facts.step
        if step < self.total_steps:
            self.saver.unmark()
            if facts is not None:
                self.check_space(facts.numels)
        if facts is not None and resumption is not None:
            self.log.info("resumed from checkpoint", step=resumption.file_step, path=path,
                          fragments=len(facts.numels), elements=sum(facts.numels),
                          run=self.lineage.run, epoch=self.lineage.epoch)
            self._take_over(resumption, self.saver)
        elif self.files.exists(path):
            self.log.warning("the checkpoint that is there will be replaced", path=path)
        elif self.config.resume:
            self.log.info("there is no checkpoint yet: the run begins", path=path)
        if self.is_over:
            self._settle_end(step)

    @property
    def is_over(self) -> bool:
        """Started again by whoever does not look: there is no step left to do."""
        facts = self.facts
        return (facts is not None and self.config.resume == "auto"
                and facts.step - facts.lineage.renumbered >= self.config.total_steps)

    def _settle_end(self, step: int) -> None:
        """The process before may have died between its last checkpoint and what follows it."""
        config = self.config
        if config.mark_final_checkpoint and config.checkpoint_path is not None:
            checkpoint = config.checkpoint_path
            patient = Patient(self.files, config.checkpoint_retries, RETRY_PAUSE_S,
                              self._tried_again)
            written_anew(lambda files: write_marker(checkpoint, step, files), patient)
        if config.final_state is not None:
            self._put_final_state(step, [found.params for found in self.loaded])
            self.log.info("final state written", path=config.final_state, step=step)
        self.log.info("training is complete: whoever asks is given the final parameters",
                      step=step, seconds=config.linger_resolved_s)

    # rule 1.10
    def _take_over(self, resumption: Resumption, saver: Saver) -> None:
        """Nobody has heard of this process yet: what it will say must not be said by the next one
        again, whatever becomes of it. Raises `WriteError`."""
        facts, config = resumption.facts, self.config
        patient = Patient(self.files, config.checkpoint_retries, told=self._tried_again)
        if resumption.unfit:
            self.log.warning("learners of before may stand still: the format has no place for the "
                             "steps that would be added", steps=resumption.unfit,
                             added=resumption.raised, total_steps=config.total_steps)
        if resumption.behind is not None:
            self._put_beside(resumption.behind._replace(clean=facts.step), patient)
        if resumption.written_first:
            cut = Cut(replace(facts, profile_hash=config.saved_profile_hash,
                              optimizer=self.optimizer), list(self.loaded))
            saver.write_now(cut)
        self._write_epoch(facts.contract, patient)
        if resumption.raised:
            self.log.warning("the file may be behind what was broadcast: steps were raised",
                             by=resumption.raised, step=facts.step, last_step=self.total_steps,
                             short=resumption.raised if resumption.written_first else 0)

    def _write_epoch(self, contract: bytes, files: Files) -> None:
        """The `.epoch` file is that of this process. Raises `WriteError`."""
        beside = EpochFile(contract, self.lineage.epoch, self.lineage.instance,
                           self.lineage.renumbered, every_of(self.config))
        self._put_beside(beside, files)
        self.beside = beside

    def _put_beside(self, beside: EpochFile, files: Files) -> None:
        saver = self.saver
        assert saver is not None  # whose file it belongs to
        written_anew(lambda patient: write_epoch(saver.path, beside, patient), files)

    # rule 1.11
    def _settle(self, step: int) -> None:
        """The process ends in order, `step` was its last: if the file has it, the next process may
        go on with the same numbers. Otherwise it must not, and need not be told."""
        if self.config.downlink != "whole":  # rule 18.5
            return
        if self.saver is None or self.beside is None or self.saver.standing != step:
            return
        try:
            write_epoch(self.saver.path, self.beside._replace(clean=step), self.files)
        except CheckpointError as error:
            self.log.warning("the end in order could not be noted: a resumed run will count on "
                             "from a larger step", error=str(error))

    def _check_direct(self, path: str) -> None:
        """A file is begun as a save will begin it. Raises `WriteError` where the file system takes
        no direct writes: it would not after the training either."""
        try:
            AtomicFile(path, files=self.files, direct=True).abort()
        except WriteError as error:
            if error.number in PERMANENT:
                raise

    def check_space(self, numels: Sequence[int]) -> None:
        """A run of fragments of these sizes can be saved as things are. Raises `WriteError`: better
        now than after the steps that would be lost. Headers, a few KiB, are not counted."""
        elements = sum(numels)
        arrays = 1 + len(OPTIMIZERS[self.config.outer_optimizer].state)
        for path, size in ((self.config.checkpoint_path, 4 * elements * arrays),
                           (self.config.final_state, 4 * elements)):
            if path is not None:
                with suppress(OSError):  # a moment's trouble, or one that the save will name
                    check_space(path, size, self.files)

    # ------------------------------------------------------------------------------ the session
    @property
    def total_steps(self) -> int:
        """The step that ends the run."""
        return self.config.total_steps + self.lineage.renumbered

    @property
    def resumed(self) -> events.Resumed | None:
        """What the scheduler goes on from, None for a fresh run."""
        facts, resumption = self.facts, self.resumption
        return None if facts is None or resumption is None else events.Resumed(
            facts.step, len(facts.numels), facts.fingerprint,
            {learner: list(entry) for learner, entry in facts.ledger.items()}, self.is_over,
            self.lineage.renumbered, resumption.raised > 0 and not resumption.written_first)

    @cached_property
    def identity(self) -> Identity | None:
        """Of the session that was resumed, None for a fresh run."""
        facts = self.facts
        return None if facts is None else Identity(
            facts.fingerprint, facts.contract, facts.layout or facts.numels,
            step=facts.step).in_bytes()

    def take_run(self, name: str) -> None:
        """The run is called so if it has no name yet."""
        if not self.lineage.run:
            self.lineage = self.lineage._replace(run=name)

    def take_names(self, names: Sequence[NamedDims]) -> None:
        """A learner's names of the parameters, of this session: the first ones count."""
        if self.names is None:
            self.names = tuple(names)
        elif self.names != tuple(names):
            self.log.warning("other names of parameters are not used")

    def take_loaded(self) -> list[Loaded]:
        """The fragments that were resumed from, once: they belong to the caller now."""
        loaded, self.loaded = self.loaded, []
        return loaded

    # -------------------------------------------------------------------------------- the saves
    def save(self, action: actions.Save, versions: Sequence[FragmentVersion], session: Hello,
             done: Callable[[Outcome], None]) -> None:
        """Write these versions as a `Save` asks; `done(outcome)` on the lane, behind what is said
        about it. Without a checkpoint path nothing is written, and that at once."""

        def finished(outcome: Outcome) -> None:
            self._say(outcome)
            done(outcome)

        if action.kind is SaveKind.FINAL_STATE:
            assert self.lane is not None  # made for the path that is to be written
            self.lane.submit(lambda: finished(self._write_final_state(action, versions)))
        elif self.saver is None:
            done(Outcome(action.kind, action.step, 0, 0.0))
        else:
            cut = Cut.of(action.step, versions, action.ledger, fingerprint=session.fingerprint,
                         contract=session.contract, layout=session.layout,
                         optimizer=self.optimizer, profile_hash=self.config.saved_profile_hash,
                         lineage=self.lineage, names=self.names)
            mark = action.kind is SaveKind.FINAL and self.config.mark_final_checkpoint
            self.saver.save(action.kind, cut, finished, let_go=action.background, mark=mark)

    def hasten(self, action: actions.Hasten) -> None:
        """Another save waits for the one in the background."""
        if self.saver is not None:
            self.log.info("a checkpoint in the background gives way no longer, as another waits",
                          step=action.step)
            self.saver.hasten()

    def _write_final_state(self, action: actions.Save,
                           versions: Sequence[FragmentVersion]) -> Outcome:
        assert self.lane is not None
        begun_s, written, error, defect = self.lane.now_s(), 0, None, None
        try:
            written = self._put_final_state(action.step, [version.params for version in versions])
        except CheckpointError as problem:
            error = str(problem)
        except BaseException as problem:
            defect = problem
        seconds = self.lane.now_s() - begun_s
        return Outcome(action.kind, action.step, written, seconds, error, defect)

    def _put_final_state(self, step: int, params: Sequence[np.ndarray]) -> int:
        """These are the parameters in the file of --final-state. Raises `WriteError`."""
        path, lane = self.config.final_state, self.lane
        assert path is not None
        assert lane is not None  # made for this path
        patient = Patient(self.files, self.config.checkpoint_retries, RETRY_PAUSE_S,
                          self._final_state_tried_again, lane.pause)
        return written_anew(lambda files: write_final_state(path, params, files, names=self.names,
                                                            step=step), patient)

    def _final_state_tried_again(self, call: str, error: OSError) -> None:
        self.log.warning("final state write tried again", path=self.config.final_state, call=call,
                         error=error.strerror)

    def _say(self, outcome: Outcome) -> None:
        if outcome.defect is not None:
            for line in "".join(traceback.format_exception(outcome.defect)).splitlines():
                self.log.debug(line)
        if outcome.kind == SaveKind.FINAL_STATE:
            if outcome.problem is None:
                self.log.info("final state written", path=self.config.final_state,
                              step=outcome.step)
        elif outcome.problem is not None:
            self.log.error("checkpoint not written", kind=outcome.kind, step=outcome.step,
                           error=outcome.problem)
        else:
            committed = outcome.kind == SaveKind.ROUND
            self.log.info("checkpoint committed" if committed else "checkpoint written",
                          step=outcome.step, kind=outcome.kind,
                          path=self.config.checkpoint_path, bytes=outcome.bytes,
                          seconds=round(outcome.seconds, 3))

    def close(self, step: int | None = None) -> None:
        """Wait for a write that is under way, then give the path back. step: the last one of a run
        that has come to its end."""
        if self.saver is not None:
            self.saver.close()
        elif self.lane is not None:
            self.lane.close()
        if step is not None:
            self._settle(step)
        if self.lock is not None:
            self.lock.close()
