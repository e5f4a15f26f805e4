"""How a learner introduces itself, and what it makes of the server that answers (wire 19).

Knows names, the run, and the last server process; must not know connections or tensors.
"""

from __future__ import annotations

import platform

from syncer import __version__
from syncer.errors import ConfigError
from syncer.learner.failures import ConnectionFailed, NotUnderstood, RunLost, RunMismatch, refusal
from syncer.protocol import DTYPE_Q4, RUN_NAME_RULE
from syncer.wire.contracts import is_run_name, run_contract
from syncer.wire.extended import Welcome
from syncer.wire.extension import CLIENT_BYTES_MAX, Extension, Held, RunClaim
from syncer.wire.names import Names

RESEED = "reseed"
NOT_A_HELLO = "invalid HELLO: "
"""What a server that knows no introductions says to one."""


def client_text(part: str = "") -> str:
    """Library and version, which part of it, and the host, for people."""
    text = f"syncer {__version__}{part} on {platform.node() or 'an unnamed host'}"
    printable = "".join(character for character in text if character.isprintable())
    return printable.encode("utf-8", "replace")[:CLIENT_BYTES_MAX].decode("utf-8", "ignore")


class Introduction:
    """What one learner says of itself over all its connections, and whom it has met.

    base: the session contract without a name of the run, 32 bytes. run: that name, or None. names:
    those of learner 0's parameters, None for the others. on_lost_run: None, or "reseed" to go on
    with a server that begins anew. wants_fates: whether it asks what becomes of its pushes. Raises
    `ConfigError` for other values.
    """

    def __init__(self, base: bytes, *, run: str | None = None, names: Names | None = None,
                 on_lost_run: str | None = None, wants_fates: bool = False):
        if run is not None and not (isinstance(run, str) and is_run_name(run)):
            raise ConfigError(f"run must be {RUN_NAME_RULE}, found {run!r}")
        if on_lost_run not in (None, RESEED):
            raise ConfigError(f"on_lost_run must be None or {RESEED!r}, found {on_lost_run!r}")
        self.names = names
        self.wants_fates = wants_fates
        self.silent = False
        """Whether it is left out, since the server does not understand it."""
        self._base, self._run = base, run
        self._on_lost_run = on_lost_run
        self.known: tuple[int, int] | None = None
        """(epoch, instance) of the last server that was followed."""

    @property
    def contract(self) -> bytes:
        """The session contract: that of the named run, if it has a name."""
        return self._base if self._run is None else run_contract(self._base, self._run)

    def extension(self, held: tuple[Held | None, ...]) -> Extension | None:
        """The block of the next HELLO; None: without one."""
        if self.silent:
            return None
        run = None if self._run is None else RunClaim(self._base, self._run)
        return Extension(client_text(), held, self.names, run=run, changes=(DTYPE_Q4,),
                         fates=self.wants_fates)

    def refused(self, text: str) -> ConnectionFailed:
        """What the ERROR means that answers an introduction."""
        if not text.startswith(NOT_A_HELLO):
            return refusal(text)
        if self.known is not None:
            return RunMismatch(
                "a server that speaks protocol 4 alone answers, where this learner was in a run "
                f"whose server introduced itself ({text}): stop that server, or start this learner "
                "again to join its run")
        self.silent = True
        return NotUnderstood(text)

    def meet(self, welcome: Welcome, newest: int, *, may_forget: bool) -> bool:
        """Judges the server that has answered; True: what was merged before is to be forgotten.

        newest: the highest version that this learner holds. Raises `RunLost`, `RunMismatch`.
        """
        forget = False
        if self.known is not None and newest > 0:
            epoch, instance = self.known
            another = welcome.instance != instance
            if another and welcome.global_step == 0:
                forget = may_forget and self._on_lost_run == RESEED
                if not forget:
                    raise RunLost(
                        f"the run is lost: another server answers, which begins at step 0, and "
                        f"this learner holds version {newest}. If there is a checkpoint, stop that "
                        "server and start it with --checkpoint-path and --resume auto; else start "
                        "the learners again to begin anew, or give them on_lost_run=\"reseed\", "
                        "with which learner 0 brings what it has")
            elif welcome.epoch < epoch or (another and welcome.epoch == epoch):
                raise RunMismatch(
                    f"an older server of this run answers: its epoch is {welcome.epoch}, and this "
                    f"learner has followed epoch {epoch}. Stop the one that should not run; after "
                    "a wanted return to an older checkpoint start the learners again")
        self.known = welcome.epoch, welcome.instance
        return forget
