"""A run and its checkpoint: the lock, what is resumed from, and the saves that are asked for.

It must not decide when to save (core.scheduler does) and not know how (store does).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from typing import Any

from syncer.checkpoint.facts import Cut, Facts, optimizer_facts
from syncer.checkpoint.files import FILES, Files
from syncer.checkpoint.lane import Lane
from syncer.checkpoint.lock import PathLock
from syncer.checkpoint.reader import Checkpoint, Loaded
from syncer.checkpoint.resume import check_resumable
from syncer.checkpoint.saver import Outcome, Saver
from syncer.config import Config
from syncer.core import actions, events
from syncer.errors import CheckpointError, CheckpointMismatch
from syncer.merge.optimizers import OPTIMIZERS
from syncer.server.log import Log
from syncer.wire.hello import Hello
from syncer.wire.identity import Identity, rl_contract


class Persistence:
    """Everything about `--checkpoint-path` and `--resume` of one run; does nothing without them.

    Raises `ConfigError` when another process has the path, `CheckpointError` when the run cannot
    be resumed; nothing is left behind then. `resumed` is the scheduler's state, None for a fresh
    run.
    """

    def __init__(self, config: Config, log: Log, files: Files = FILES,
                 lane: Callable[[], Lane] = Lane):
        self.config, self.log, self.files = config, log, files
        self.path = config.checkpoint_path
        self.lock: PathLock | None = None
        self.saver: Saver | None = None
        self.facts: Facts | None = None
        self.loaded: list[Loaded] = []
        self.resumed: events.Resumed | None = None
        self.optimizer = optimizer_facts(
            config.outer_optimizer, lr=config.outer_lr, momentum=config.outer_momentum,
            dn_period=config.dn_period, dn_activation=config.dn_activation)
        if self.path is None:
            if config.resume:
                raise CheckpointError("--resume has no checkpoint to read: name one with "
                                      "--checkpoint-path")
            return
        if config.resume:
            self._check_there()
        self.lock = files.lock(self.path)
        try:
            if config.resume:
                self._load()
            self.saver = Saver(
                self.path, form=config.checkpoint_format, keep=config.checkpoint_keep,
                retries=config.checkpoint_retries, direct=config.checkpoint_direct,
                files=files, lane=lane(),
                warn=lambda text, fields: log.warning(text, **fields))
        except BaseException:
            self.close()
            raise

    def _check_there(self) -> None:
        try:
            why = (None if stat.S_ISREG(self.files.status(self.path).st_mode)
                   else "it is no regular file")
        except OSError:
            why = "no such file"
        if why is not None:
            raise CheckpointError(f"--resume: {self.path} cannot be read: {why}")

    def _load(self) -> None:
        config = self.config
        with Checkpoint(self.path, self.files) as checkpoint:
            facts = checkpoint.facts
            check_resumable(facts, self.path, optimizer=self.optimizer,
                            state=OPTIMIZERS[config.outer_optimizer].state,
                            total_steps=config.total_steps)
            identity = config.expected_island_contract
            if identity is not None and facts.contract != rl_contract(facts.fingerprint, identity):
                raise CheckpointMismatch(
                    f"{self.path}: session contract: expected "
                    f"{rl_contract(facts.fingerprint, identity).hex()}, which "
                    f"--expected-island-contract asks for, found {facts.contract.hex()}")
            self.loaded = checkpoint.load(verify=not config.no_verify)
        self._settle_name()
        self.facts = facts
        self.resumed = events.Resumed(
            facts.step, len(facts.numels), facts.fingerprint,
            {learner: list(entry) for learner, entry in facts.ledger.items()})

    def _settle_name(self) -> None:
        """The process before may have died between its rename and the fsync of the directory: what
        is read here could then still give way to the older file, after others have seen it."""
        try:
            self.files.sync_directory(
                os.path.dirname(self.files.real_path(self.path)) or ".")
        except OSError as error:
            raise CheckpointError(f"--resume: the directory of {self.path} cannot be made durable "
                                  f"(fsync): {error.strerror}") from None

    def begin(self) -> None:
        """The server listens: say where the run stands. Raises `WriteError` if a marker of an end
        that will not be one cannot be removed."""
        if self.path is None:
            return
        step = 0 if self.facts is None else self.facts.step
        if step < self.config.total_steps:
            self.saver.unmark()
        if self.facts is not None:
            self.log.info("resumed from checkpoint", step=step, path=self.path,
                          fragments=len(self.facts.numels), elements=sum(self.facts.numels))
        elif self.files.exists(self.path):
            self.log.warning("the checkpoint that is there will be replaced; --resume would "
                             "continue it", path=self.path)

    # ------------------------------------------------------------------------------ the session
    @property
    def identity(self) -> Identity | None:
        """Of the session that was resumed, None for a fresh run."""
        facts = self.facts
        return None if facts is None else Identity(
            facts.fingerprint, facts.contract, facts.layout or facts.numels, step=facts.step)

    def take_loaded(self) -> list[Loaded]:
        """The fragments that were resumed from, once: they belong to the caller now."""
        loaded, self.loaded = self.loaded, []
        return loaded

    # -------------------------------------------------------------------------------- the saves
    def save(self, action: actions.Save, versions: Sequence[Any], session: Hello,
             done: Callable[[Outcome], None]) -> None:
        """Write these versions as the cut of a `Save`; `done` is called on the saver's thread."""
        cut = Cut.of(action.step, versions, action.ledger, fingerprint=session.fingerprint,
                     contract=session.contract, layout=session.layout, optimizer=self.optimizer,
                     profile_hash=self.config.saved_profile_hash)

        def finished(outcome: Outcome) -> None:
            self._say(outcome)
            done(outcome)

        self.saver.save(action.kind, cut, finished, let_go=action.background,
                        mark=(action.kind is actions.SaveKind.FINAL
                              and self.config.mark_final_checkpoint))

    def _say(self, outcome: Outcome) -> None:
        if outcome.error is not None:
            self.log.error("checkpoint not written", kind=outcome.kind, step=outcome.step,
                           error=outcome.error)
        elif outcome.defect is None:
            committed = outcome.kind == actions.SaveKind.ROUND
            text = "checkpoint committed" if committed else "checkpoint written"
            self.log.info(text, step=outcome.step, kind=outcome.kind, path=self.path,
                          bytes=outcome.bytes, seconds=round(outcome.seconds, 3))

    def close(self) -> None:
        """Wait for a write that is under way, then give the path back."""
        if self.saver is not None:
            self.saver.close()
        if self.lock is not None:
            self.lock.close()
