"""What the processes of one island say to each other: short messages, and values behind them.

Over a gloo group, between rank 0 and each of the others, in order. A rank that fails leaves a
sentence in the store of the process group: gloo ends all its connections with the first wait that
takes too long, and there is no other way left to say why. Must not know a model or a run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from enum import IntEnum
from typing import Any, NamedTuple, NoReturn

import torch

from syncer.errors import ConfigError, LocalProtocolError, RemoteProtocolError, SyncerError
from syncer.learner import ConnectionFailed, RunLost, RunMismatch

TAG = 29400
"""Of all messages, so that a group may be used for something else as well."""
AS_LONG_AS_IT_TAKES_S = 1e9
REASON_S = 5.0
"""How long a rank waits for the sentence of one that has gone."""
LAST_WORD_S = 1.0


class IslandBroken(SyncerError):
    """A rank of the island has gone, is late, or does something else than the others."""


KINDS = {kind.__name__: kind for kind in (
    ConfigError, ConnectionFailed, IslandBroken, LocalProtocolError, RemoteProtocolError, RunLost,
    RunMismatch, SyncerError)}
"""Errors that are the same at every rank."""


class Word(IntEnum):
    """What a message is about."""

    INTRODUCE = 1
    STEP = 2
    FINISH = 3
    STATE = 4
    DATA = 5
    FAILED = 6
    GO_ON = 10
    FRAGMENT = 11
    REBASE = 12
    RESTORE = 13
    OVERWRITE = 14
    VALUES = 15
    DELTA = 16
    KEEP = 17
    READ = 18
    COPY = 19


SAID = {Word.INTRODUCE: "joins", Word.STEP: "is at a step boundary", Word.FINISH: "is through",
        Word.STATE: "makes a state_dict", Word.DATA: "sends values"}


class Message(NamedTuple):
    """`size` bytes follow it."""

    word: Word
    first: int
    second: int
    size: int


class Ranks:
    """One end of the island's group, for as long as it is in a run.

    group: of gloo, with every process of the island; None: made of all processes that
    torch.distributed knows. timeout_s: how long a rank waits for another one that is to do the
    same at the same place of the loop. Raises `IslandBroken` when that is not so, from then on.
    """

    def __init__(self, group: Any, timeout_s: float):
        self.timeout_s = timeout_s
        distributed = torch.distributed
        self.rank, size = distributed.get_rank(group), distributed.get_world_size(group)
        self.others = [rank for rank in range(size) if rank != self.rank]
        scope = "world" if group is None else group.group_name
        store = distributed.PrefixStore(
            f"syncer-island/{scope}", distributed.distributed_c10d._get_default_store())
        number = store.add(f"joined/{self.rank}", 1)  # the same everywhere: all join each time
        self._store = distributed.PrefixStore(str(number), store)
        self._group: Any = self._made() if group is None else group
        self._sending: list[tuple[int, Any, torch.Tensor]] = []
        self._broken: SyncerError | None = None

    def _made(self) -> Any:
        self._store.set(f"here/{self.rank}", b"")
        try:
            return torch.distributed.new_group(
                backend="gloo", timeout=timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            missing = [rank for rank in self.others if not self._store.check([f"here/{rank}"])]
            if not missing:
                raise
            raise IslandBroken(f"rank {missing[0]} has not joined the island within "
                               f"{self.timeout_s:g} s") from error

    # --- messages --------------------------------------------------------------------------------

    def tell(self, rank: int, word: Word, first: int = 0, second: int = 0,
             payload: torch.Tensor | None = None) -> None:
        """Sends a message on its way. payload: any contiguous tensor of the host, which must stay
        as it is until `settle`."""
        data = None if payload is None or not payload.numel() else _bytes(payload)
        size = 0 if data is None else data.numel()
        self._send(rank, torch.tensor([word, first, second, size], dtype=torch.int64))
        if data is not None:
            self._send(rank, data)

    def settle(self) -> None:
        """Waits until everything was taken that is on its way."""
        sending, self._sending = self._sending, []
        for rank, work, _ in sending:
            self._wait(work, rank, "take what it is sent", self.timeout_s)

    def hear(self, rank: int, *words: Word, at: str, within_s: float | None = None) -> Message:
        """The next message of a rank; it must be one of these words, or `IslandBroken` says what
        that rank does instead. at: what all are about to do, for that sentence."""
        header = torch.empty(4, dtype=torch.int64)
        self._receive(rank, header, f"come to {at}", within_s)
        word, first, second, size = header.tolist()
        if word == Word.FAILED:
            self._fell_out(rank, None)
        if words and word not in words:
            raise self.broken(IslandBroken(
                f"rank {rank} of the island {SAID[Word(word)]}, and rank {self.rank} is at {at}: "
                "all ranks must make the same steps and calls"))
        return Message(Word(word), first, second, size)

    def receive(self, rank: int, into: torch.Tensor) -> None:
        """The bytes behind a message."""
        if into.numel():
            self._receive(rank, _bytes(into), "send what it has begun", None)

    def read_json(self, rank: int, message: Message) -> Any:
        data = torch.empty(message.size, dtype=torch.uint8)
        self.receive(rank, data)
        return json.loads(data.numpy().tobytes())

    # --- the end of an island --------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Tells all others why this rank goes on no longer."""
        if self._broken is None:
            self.broken(error if isinstance(error, SyncerError) else IslandBroken(
                f"rank {self.rank} has left the island: {type(error).__name__}"
                + (f": {error}" if str(error) else "")))
        for rank in self.others if self.rank == 0 else [0]:
            with suppress(RuntimeError):  # who does not hear it finds the connection closed
                farewell = torch.tensor([Word.FAILED, 0, 0, 0], dtype=torch.int64)
                self._group.send([farewell], rank, TAG).wait(timedelta(seconds=LAST_WORD_S))

    def broken(self, error: SyncerError) -> SyncerError:
        """Leaves the sentence where the others look for it; the first one stays."""
        if self._broken is None:
            self._broken = error
            kind = next(name for name, kind in KINDS.items() if kind in type(error).__mro__)
            with suppress(RuntimeError):
                self._store.set(f"failed/{self.rank}", json.dumps([kind, str(error)]))
        return self._broken

    def _fell_out(self, rank: int, error: RuntimeError | None) -> NoReturn:
        """Raises what a rank has said at its end, or that it has gone."""
        reason: SyncerError = IslandBroken(
            f"rank {rank} of the island has gone" + (
                ", and with it the connection to the server" if rank == 0 else ""))
        with suppress(RuntimeError):
            self._store.wait([f"failed/{rank}"], timedelta(seconds=REASON_S))
            kind, text = json.loads(self._store.get(f"failed/{rank}"))
            reason = KINDS[kind](text)
        raise self.broken(reason) from error

    # --- gloo ------------------------------------------------------------------------------------

    def _send(self, rank: int, data: torch.Tensor) -> None:
        work = self._checked(rank, lambda: self._group.send([data], rank, TAG))
        self._sending.append((rank, work, data))

    def _receive(self, rank: int, into: torch.Tensor, what: str, within_s: float | None) -> None:
        work = self._checked(rank, lambda: self._group.recv([into], rank, TAG))
        self._wait(work, rank, what, self.timeout_s if within_s is None else within_s)

    def _checked(self, rank: int, call: Callable[[], Any]) -> Any:
        if self._broken is not None:
            raise self._broken
        try:
            return call()
        except RuntimeError as error:
            self._fell_out(rank, error)

    def _wait(self, work: Any, rank: int, what: str, within_s: float) -> None:
        start = time.monotonic()
        try:
            work.wait(timedelta(seconds=within_s))
        except RuntimeError as error:
            if time.monotonic() - start < within_s:
                self._fell_out(rank, error)
            raise self.broken(IslandBroken(
                f"rank {rank} of the island did not {what} within {within_s:g} s, as rank "
                f"{self.rank} did")) from error


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def as_json(value: Any) -> torch.Tensor:
    """As a payload."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
