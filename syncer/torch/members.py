"""One process of an island as `Diloco` sees it: with the learner, or beside the one that has it.

Rank 0 has the `Learner`; at each call all ranks come together, rank 0 does what its learner does,
and the others what rank 0 says until it says to go on. Must not count steps of an optimizer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol, Self

from syncer.errors import ConfigError, SyncerError
from syncer.learner import Learner, Status
from syncer.torch.ranks import AS_LONG_AS_IT_TAKES_S, Message, Ranks, Word, as_json
from syncer.torch.shares import compared, introduction
from syncer.torch.spread import RankParts, SpreadWeights, state_for
from syncer.torch.weights import Weights

CONNECTED = 1
FINISHED = 2
"""Flags of a status without news."""


class Joined(Protocol):
    """What `Diloco` needs of a learner. `Learner` says what each of these does."""

    @property
    def status(self) -> Status: ...

    @property
    def bytes_sent(self) -> int: ...

    @property
    def bytes_received(self) -> int: ...

    def step(self, tokens: int) -> Status: ...

    def finish(self) -> Status: ...

    def report(self, *, loss: float | None = None, tokens_per_s: float | None = None,
               lr: float | None = None, goodput: float | None = None) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def save_layout(self, path: str | os.PathLike[str]) -> None: ...

    def __enter__(self) -> Any: ...

    def __exit__(self, *raised: Any) -> None: ...


def alone(weights: Any, address: str, options: Mapping[str, Any]) -> Learner:
    """A learner that has begun: with the values of the run, if they are not its own."""
    learner = Learner(weights, address, **options)
    try:
        if not learner.resumed and not learner.brings_values:
            learner.adopt()
    except BaseException:
        learner.close()
        raise
    return learner


def join(weights: Weights, address: str, options: Mapping[str, Any], group: Any,
         timeout_s: float) -> Joined:
    """Joins the run, with all other ranks of the island."""
    if weights.seat.ranks == 1:
        return alone(weights, address, options)
    ranks = Ranks(group, timeout_s)
    if ranks.rank == 0:
        return Leader(weights, address, options, ranks)
    return Follower(weights, options, ranks)


class _Rank:
    """What both kinds of ranks do in the same way."""

    _status: Status

    def __init__(self, ranks: Ranks):
        self._ranks = ranks

    @property
    def status(self) -> Status:
        return self._status

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, *_: object) -> None:
        if kind is not None:
            self._ranks.fail(error or kind())
        with suppress(SyncerError):
            self._ranks.settle()
        self.close()

    def close(self) -> None:
        """Leaves nothing behind."""

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """An error in here is one of all ranks, and the end of the island."""
        try:
            yield
        except BaseException as error:
            self._ranks.fail(error)
            self.close()
            raise


class Leader(_Rank):
    """Rank 0 of an island of many processes: it has the learner."""

    def __init__(self, weights: Weights, address: str, options: Mapping[str, Any], ranks: Ranks):
        super().__init__(ranks)
        self._learner: Learner | None = None
        with self._telling():
            state_for(weights, options.get("state"))
            said = [[introduction(weights.pieces, weights.shares), _moment(options)]] + [
                ranks.read_json(rank, message)
                for rank, message in self._hear_all(Word.INTRODUCE, "the start")]
            tables = compared([rows for rows, _ in said], weights.shares)
            _refuse_other_moments([moment for _, moment in said])
            self._learner = alone(SpreadWeights(weights, ranks, tables), address, options)
            self._status = self._learner.status
        self._go_on(is_news=True)

    def step(self, tokens: int) -> Status:
        with self._telling():
            for _, message in self._hear_all(Word.STEP, f"step {self._status.step + 1}"):
                tokens += message.first
            self._status = self._joined().step(tokens)
        return self._go_on()

    def finish(self) -> Status:
        with self._telling():
            list(self._hear_all(Word.FINISH, "the end"))
            self._status = self._joined().finish()
        return self._go_on(is_news=True)

    @property
    def bytes_sent(self) -> int:
        return self._joined().bytes_sent

    @property
    def bytes_received(self) -> int:
        return self._joined().bytes_received

    def report(self, **figures: Any) -> None:
        self._joined().report(**figures)

    def state_dict(self) -> dict[str, Any]:
        with self._telling():
            list(self._hear_all(Word.STATE, "a state_dict"))
            state = self._joined().state_dict() | {"rank": 0}
        common = state | {"fragments": [record and {name: value for name, value in record.items()
                                                    if name != "kept"}
                                        for record in state["fragments"]]}
        self._go_on(common, is_news=True)
        return state

    def save_layout(self, path: str | os.PathLike[str]) -> None:
        self._joined().save_layout(path)

    def close(self) -> None:
        if self._learner is not None:
            self._learner.close()

    def _joined(self) -> Learner:
        assert self._learner is not None  # else there is no leader
        return self._learner

    def _hear_all(self, word: Word, at: str) -> Iterator[tuple[int, Message]]:
        """What every other rank says at this place of the loop."""
        for rank in self._ranks.others:
            yield rank, self._ranks.hear(rank, word, at=at)
        self._ranks.settle()

    def _go_on(self, state: Mapping[str, Any] | None = None, *, is_news: bool = False) -> Status:
        """The others go on training; with a payload if there is more than a step to tell."""
        status = self._status
        flags = CONNECTED * status.connected | FINISHED * status.finished
        is_news = is_news or bool(status.applied or status.answered)
        payload = as_json([status, state]) if is_news else None
        for rank in self._ranks.others:
            self._ranks.tell(rank, Word.GO_ON, status.step, flags, payload)
        return status


class Follower(_Rank):
    """Every other rank."""

    bytes_sent = bytes_received = 0
    """To and from the server."""

    def __init__(self, weights: Weights, options: Mapping[str, Any], ranks: Ranks):
        super().__init__(ranks)
        with self._telling():
            self._parts = RankParts(weights, ranks, state_for(weights, options.get("state")))
            ranks.tell(0, Word.INTRODUCE, payload=as_json(
                [introduction(weights.pieces, weights.shares), _moment(options)]))
            self._follow("the start", AS_LONG_AS_IT_TAKES_S)

    def step(self, tokens: int) -> Status:
        with self._telling():
            self._ranks.tell(0, Word.STEP, tokens)
            self._follow(f"step {self._status.step + 1}", 2 * self._ranks.timeout_s)
        return self._status

    def finish(self) -> Status:
        with self._telling():
            self._ranks.tell(0, Word.FINISH)
            self._follow("the end", AS_LONG_AS_IT_TAKES_S)
        return self._status

    def report(self, **figures: Any) -> None:
        """What rank 0 says is reported."""

    def state_dict(self) -> dict[str, Any]:
        with self._telling():
            self._ranks.tell(0, Word.STATE)
            state = self._follow("a state_dict", 2 * self._ranks.timeout_s)
            assert state is not None  # it answers STATE
            fragments = [record and record | {"kept": kept} for record, kept in zip(
                state["fragments"], self._parts.kept(), strict=True)]
        return state | {"fragments": fragments, "rank": self._ranks.rank}

    def save_layout(self, path: str | os.PathLike[str]) -> None:
        """Rank 0 writes it."""

    def _follow(self, at: str, within_s: float) -> dict[str, Any] | None:
        """Does what rank 0 says until it says to go on; the state, if that comes with it."""
        while (message := self._ranks.hear(0, at=at, within_s=within_s)).word is not Word.GO_ON:
            self._parts.obey(message)
        self._ranks.settle()
        state: dict[str, Any] | None = None
        if message.size:
            status, state = self._ranks.read_json(0, message)
            self._status = Status(*map(_tuples, status))
        else:
            self._status = Status(message.first, (), (), self._status.versions,
                                  bool(message.second & CONNECTED),
                                  bool(message.second & FINISHED))
        return state


def _tuples(value: Any) -> Any:
    """JSON knows lists alone."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _moment(options: Mapping[str, Any]) -> list[Any] | None:
    """What the states of all ranks must have in common."""
    state = options.get("state")
    return None if state is None else [
        state["fingerprint"], state["steps"],
        [record and record["version"] for record in state["fragments"]]]


def _refuse_other_moments(moments: list[Any]) -> None:
    for rank, moment in enumerate(moments):
        if moment != moments[0]:
            here, there = ("nothing" if each is None else f"a state of step {each[1]}"
                           for each in (moments[0], moment))
            raise ConfigError(f"rank {rank} of the island goes on from {there}, and rank 0 from "
                              f"{here}: all ranks must load what they saved together")
