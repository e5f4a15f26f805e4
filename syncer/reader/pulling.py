"""Cuts of a live run, one after the other: dials, reads, dials again; must not write a file.

One thread, one socket, and one cut in memory beside the one that comes in. It sends its HELLO and
nothing after it. A link that drops is dialed again after a random part of 3, 6, 12, 20, 20, ... s,
so that a server that comes back does not meet all at once. Whoever has the final cut is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from syncer.errors import ConfigError, RemoteProtocolError, SyncerError
from syncer.kernels import decode_bf16, encode_bf16
from syncer.learner.dialing import Dialer, backoff_s, fresh_generation, jitter
from syncer.protocol import DTYPE_BF16, DTYPE_F32, DTYPES, RunState
from syncer.reader.cut_session import (
    ReaderSession,
    ReceivedCut,
    Refused,
    ServerEnd,
)
from syncer.tls import Stream, TlsError, TlsPaths
from syncer.wire.extended import NoticeText, SessionLayout, Welcome

DIAL_S = 10.0
"""Longest single try, and"""
PAUSE_MAX_S = 20.0
"""longest time between two: so there is a line every 30 s at least."""
QUIET_S = 10.0
"""So long nothing comes before it is said what is waited for, and"""
SAY_AGAIN_S = 30.0
"""how often from then on."""
PULL_TIMEOUT_S = 60.0
"""Of who wants one cut; who follows has no limit."""
BULK_DTYPES = {name: code for code, name in DTYPES.items() if code in (DTYPE_F32, DTYPE_BF16)}


class PullFailed(SyncerError):
    """No cut, or no further one, is to be had; the text says why and what can be done."""


class Lost(Exception):
    """This connection is over, and another one may do better."""


class LiveCut(NamedTuple):
    """All parameters of a run after one step."""

    step: int
    tensors: tuple[memoryview, ...]
    """Per fragment, little-endian values in `dtype`."""
    dtype: int
    session: SessionLayout
    welcome: Welcome
    is_final: bool

    def parameters(self) -> dict[str, np.ndarray]:
        """By name, f32, in the shapes of the framework; `fragments.<p>.params`, flat, where the
        run does not know the names."""
        found = {}
        for index, tensor in enumerate(self.tensors):
            values = as_f32(tensor, self.dtype)
            if self.session.names is None:
                found[f"fragments.{index}.params"] = values
                continue
            at = 0
            for name, dims in self.session.names[index].tensors:
                count = int(np.prod(dims, dtype=np.int64))
                found[name] = values[at : at + count].reshape(dims)
                at += count
        return found


def as_f32(tensor: memoryview, dtype: int) -> np.ndarray:
    """The values of a tensor as it came."""
    if dtype == DTYPE_F32:
        return np.frombuffer(tensor, "<f4")
    values = np.empty(len(tensor) // 2, np.float32)
    decode_bf16(tensor, values, False)
    return values


def in_dtype(cut: ReceivedCut, dtype: int) -> tuple[memoryview, ...]:
    """The tensors in the dtype that was asked for: a final cut is f32 always."""
    if cut.dtype == dtype:
        return cut.tensors
    found = []
    for tensor in cut.tensors:
        encoded = memoryview(bytearray(len(tensor) // 2))
        encode_bf16(np.frombuffer(tensor, np.float32), encoded)
        found.append(encoded)
    return tuple(found)


class Pulling:
    """Iterates over the cuts of the run at an address: one, or all that are to be had.

    timeout_s: give up when nothing came for so long, also while no connection can be made; None:
    never. say(text): one line for people. progress(done, total): bytes of a cut. clock, pause: for
    tests. Raises `ConfigError` for what cannot be used, `PullFailed` while iterating.

    Large: half of it is what was asked for, the rest what was heard and when.
    """

    def __init__(self, address: str, *, dtype: str = "f32", follow: bool = False,
                 run: str | None = None, key: bytes | None = None, timeout_s: float | None = None,
                 tls: TlsPaths | None = None,
                 say: Callable[[str], object] = lambda text: None,
                 progress: Callable[[int, int], object] = lambda done, total: None,
                 clock: Callable[[], float] = time.monotonic,
                 pause: Callable[[float], object] = time.sleep):
        if dtype not in BULK_DTYPES:
            raise ConfigError(f"dtype {dtype!r} cannot be pulled: give one of "
                              f"{', '.join(BULK_DTYPES)}")
        self.address, self.dialer = address, Dialer(address, tls=tls)
        self.dtype, self.follow, self.run, self.key = BULK_DTYPES[dtype], follow, run, key
        self.timeout_s, self.say, self.progress = timeout_s, say, progress
        self.clock, self.pause = clock, pause
        self.heard = clock()
        """When something came last, other than word of what the run waits for."""
        self.said = self.heard
        self.attempt = 0
        self.last: LiveCut | None = None
        self.waits_for = "waiting for a connection"

    def __iter__(self) -> Iterator[LiveCut]:
        self.heard = self.said = self.clock()
        while True:
            try:
                with self.dialer.dial(self._patience(DIAL_S)) as sock:
                    for cut in self._connected(sock):
                        yield cut
                        if not self.follow:
                            return
                    return
            except TlsError as error:
                raise PullFailed(f"{self.address}: {error.strerror}") from None
            except (OSError, Lost) as error:
                if self.last is not None and self.last.is_final:
                    return
                self._again(str(error) if isinstance(error, Lost) or not error.strerror
                            else error.strerror)
            except RemoteProtocolError as error:
                raise PullFailed(f"{self.address} sends what no syncer sends: {error}") from None

    # ----------------------------------------------------------------------------- one connection
    def _connected(self, sock: Stream) -> Iterator[LiveCut]:
        """Its cuts, until the server says that there will be none. Raises Lost."""
        session = ReaderSession(self.dtype, follows=self.follow, run=self.run)
        sock.sendall(session.hello(fresh_generation(None), self.key))
        self.waits_for = "waiting for a word of the server"
        came = 0
        while True:
            count = self._receive(sock, session.buffer())
            came += count
            only_notices: bool | None = None
            for found in session.received(count):
                only_notices = isinstance(found, NoticeText) and only_notices is not False
                if isinstance(found, ReceivedCut):
                    came, cut = 0, self._cut(session, found)
                    if cut is not None:
                        yield cut
                        self.heard = self.said = self.clock()  # what was done with it took time
                elif isinstance(found, ServerEnd):
                    if self.last is None:
                        raise PullFailed(f"the run at {self.address} has ended, and no cut of it "
                                         "has come")
                    return
                else:
                    self._told(found)
            if not only_notices:
                self.heard = self.said = self.clock()
            if session.bytes_expected:
                self.progress(min(came, session.bytes_expected), session.bytes_expected)

    def _receive(self, sock: Stream, buffer: memoryview) -> int:
        while True:
            sock.settimeout(self._patience(1.0))
            try:
                count = sock.recv_into(buffer)
            except TimeoutError as error:
                if error.errno is not None:  # of the kernel, which has given the link up
                    raise
                self._quiet()
                continue
            if not count:
                raise Lost("the server closed the connection")
            return count

    def _told(self, found: Welcome | SessionLayout | NoticeText | Refused) -> None:
        if isinstance(found, Refused):
            self._refused(found.text)
        elif isinstance(found, NoticeText):
            self.waits_for = f"{self.address} says: {found.text}"
        elif isinstance(found, Welcome):
            self._check_welcome(found)
            self.attempt = 0
            named = f"run {found.run}" if found.run else "a run"
            self.waits_for = "waiting for " + (
                f"{named} to begin: its learners ({found.learners}) bring the model"
                if found.state is RunState.WAITING else
                f"a cut of {named} at step {found.global_step} of {found.total_steps}")
            self.say(f"connected to {self.address}: {named}, step {found.global_step} of "
                     f"{found.total_steps}, {found.state.name.lower()}")
        elif self.last is not None and found.fingerprint != self.last.session.fingerprint:
            raise PullFailed(f"the run at {self.address} has another model now (fingerprint "
                             f"{found.fingerprint.hex()}, it was "
                             f"{self.last.session.fingerprint.hex()})")

    def _refused(self, text: str) -> None:
        """Raises Lost for what may pass by, PullFailed for what will not."""
        if "try again later" in text:
            raise Lost(text)
        if text.startswith("invalid HELLO:"):
            text = f"it knows no readers, being older than this program ({text})"
        raise PullFailed(f"{self.address} refuses: {text}")

    def _check_welcome(self, found: Welcome) -> None:
        """A server that was there before the one that we know, or beside it, is none of its
        successors."""
        known = None if self.last is None else self.last.welcome
        if known is None or found.instance == known.instance or found.epoch > known.epoch:
            return
        raise PullFailed(
            f"another server answers at {self.address}: epoch {found.epoch} of its run, where "
            f"{known.epoch} was seen before; if that is meant, start this program again")

    def _cut(self, session: ReaderSession, found: ReceivedCut) -> LiveCut | None:
        """None if it is the one that was given last: a new connection begins with where the run
        is."""
        assert session.layout is not None  # no cut comes before them
        assert session.welcome is not None
        last = self.last
        self.waits_for = "waiting for the next cut"
        self.last = LiveCut(found.step, in_dtype(found, self.dtype), self.dtype, session.layout,
                        session.welcome, found.is_final)
        if last is not None and last.step == found.step and last.is_final >= found.is_final:
            return None
        if last is not None and found.step < last.step:
            self.say(f"the run has gone back from step {last.step} to step {found.step}")
        return self.last

    # -------------------------------------------------------------------------------- waiting
    def _patience(self, most_s: float) -> float:
        """How long the next wait may be. Raises PullFailed when there is no patience left."""
        if self.timeout_s is None:
            return most_s
        left_s = self.heard + self.timeout_s - self.clock()
        if left_s <= 0:
            raise PullFailed(f"nothing of a cut came from {self.address} for "
                             f"{self.timeout_s:g} s; {self.waits_for}")
        return min(most_s, left_s)

    def _quiet(self) -> None:
        """A second without a byte: now and then that is said."""
        now = self.clock()
        if now - self.said >= (QUIET_S if self.said == self.heard else SAY_AGAIN_S):
            self.said = now
            self.say(f"{self.waits_for}; nothing of a cut came for {now - self.heard:.0f} s")

    def _again(self, reason: str) -> None:
        """Wait a part of the back-off, and no longer than there is patience."""
        wait_s = jitter(min(3.0 * backoff_s(self.attempt), PAUSE_MAX_S))
        self.attempt += 1
        self.waits_for = f"waiting for a connection ({reason})"
        self.say(f"{self.address}: {reason}; dialing again in {wait_s:.1f} s{self._away()}")
        self.pause(self._patience(max(wait_s, 0.05)))

    def _away(self) -> str:
        """For whoever reads that it is dialing still: nobody tells it that a run is over."""
        away_s, last = self.clock() - self.heard, self.last
        if away_s < SAY_AGAIN_S or self.timeout_s is not None:
            return ""
        where = f" (the last cut is that of step {last.step})" if last is not None else ""
        return (f"; away for {away_s:.0f} s{where}: if its run is over, end this program; "
                "it gives up by itself with a limit (timeout_s, --timeout-s)")


def cuts(address: str, *, dtype: str = "f32", run: str | None = None, key: bytes | None = None,
         timeout_s: float | None = None, tls: TlsPaths | None = None) -> Iterator[LiveCut]:
    """Every cut of a live run that is to be had, from now to its end.

    address: "host:port" or "unix:/path". dtype: f32 or bf16, of the link and of `LiveCut.tensors`.
    run: its name, if it must have that one. key: of the island, if it has one. timeout_s: give up
    with `PullFailed` when nothing came for so long; None: never. The memory of a cut is the
    caller's as long as he keeps it. tls: as `Learner` takes it.
    """
    return iter(Pulling(address, dtype=dtype, follow=True, run=run, key=key, timeout_s=timeout_s,
                        tls=tls))


def pull(address: str, *, dtype: str = "f32", run: str | None = None, key: bytes | None = None,
         timeout_s: float | None = PULL_TIMEOUT_S, tls: TlsPaths | None = None) -> LiveCut:
    """One whole cut of a live run, as `cuts` gives them."""
    return next(iter(Pulling(address, dtype=dtype, run=run, key=key, timeout_s=timeout_s, tls=tls)))
