"""Fragments of an island of many processes: each rank works on its part, rank 0 sees the whole.

Rank 0 says what is done, and every rank does it to what it has: a `RankPart`. Values go to rank 0
and back in f32, one fragment at a time. Must not know rounds, versions or sockets, or when it is.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from syncer.errors import ConfigError
from syncer.kernels import decode_bf16, encode_bf16, encode_q4
from syncer.learner.fragment import Floats, Packed
from syncer.learner.holding import LocalFragment
from syncer.protocol import DTYPE_BF16, DTYPE_F32, bulk_dtype
from syncer.torch.ranks import Message, Ranks, Word, as_json
from syncer.torch.shares import Share
from syncer.torch.weights import Weights

Table: TypeAlias = Mapping[str, Share]
"""What of each tensor one rank has."""


def bytes_of(values: torch.Tensor) -> memoryview:
    """Of f32 values of the host."""
    return memoryview(values.numpy()).cast("B")


class RankPart:
    """What one rank has of one fragment.

    A tensor that several ranks have is read at one of them and copied to the others, so that they
    stay equal to the bit. `own` is all that is read here: it has the anchor. None: nothing is.
    """

    def __init__(self, weights: Weights, names: Sequence[str], dtype: int):
        shares, pieces = weights.shares, weights.pieces
        read = read_names(names, shares)
        self.own: LocalFragment | None = weights.fragment(read, dtype) if read else None
        self.numel = sum(pieces[name].numel for name in read)
        self._read = [pieces[name] for name in names_to_copy(names, shares)]
        self._copies = [pieces[name] for name in names_copied(names, shares)]
        self._weights = weights

    def packed(self, *, delta: bool) -> torch.Tensor:
        """The f32 values of what is read here, or what they differ from the anchor."""
        out = self._weights.buffer(4 * self.numel)
        if self.own is not None and delta:
            underway = self.own.pack_delta(out)
            if underway is not None:
                underway.wait()
        elif self.own is not None:
            self.own.pack_values(out)
        return torch.from_numpy(out).view(torch.float32)

    def keep(self, values: Mapping[str, Floats]) -> torch.Tensor:
        """As `LocalFragment.keep`."""
        return (torch.empty(0) if self.own is None
                else torch.from_numpy(np.array(self.own.keep(values))))

    def values_to_copy(self) -> torch.Tensor:
        """What the other ranks that have the same shall have."""
        with torch.no_grad():
            flats = []
            for piece in self._read:
                flat = torch.empty(piece.numel, dtype=torch.float32, device=piece.tensor.device)
                piece.read(flat)
                flats.append(flat.cpu())
            return torch.cat([torch.empty(0), *flats])

    def copy(self, values: torch.Tensor, *, statistics: bool) -> None:
        """Takes such values."""
        self._weights.check()
        start = 0
        with torch.no_grad():
            for piece in self._copies:
                part = values[start:start + piece.numel]
                start += piece.numel
                if statistics or not piece.statistic:
                    piece.write(part.to(piece.tensor.device))


def read_names(names: Sequence[str], shares: Table) -> list[str]:
    """Of which a rank's values count."""
    return [name for name in names if shares[name].is_read and shares[name].numel]


def names_to_copy(names: Sequence[str], shares: Table) -> list[str]:
    """Those of them that other ranks have as well."""
    return [name for name in read_names(names, shares) if shares[name].is_copied]


def names_copied(names: Sequence[str], shares: Table) -> list[str]:
    """Of which a rank has what is read at another one."""
    return [name for name in names if not shares[name].is_read and shares[name].numel]


class SpreadPlan:
    """Where the values of one fragment are: its part in each rank, and its place in the whole."""

    def __init__(self, names: Sequence[str], tables: Sequence[Table]):
        self.names, self.tables = list(names), tables
        self._places: dict[str, tuple[int, int]] = {}
        self.numel = 0
        for name in names:
            size = torch.Size(tables[0][name].shape).numel()
            self._places[name] = self.numel, self.numel + size
            self.numel += size
        self.readers = [rank for rank, table in enumerate(tables) if read_names(names, table)]
        self.sources = [rank for rank, table in enumerate(tables) if names_to_copy(names, table)]
        self.holders = [rank for rank, table in enumerate(tables) if names_copied(names, table)]

    def pick(self, whole: torch.Tensor, rank: int, names: Sequence[str]) -> torch.Tensor:
        """A new flat tensor of what a rank has of these."""
        parts = [part.reshape(-1) for part in self._parts(whole, rank, names)]
        return torch.cat(parts) if parts else torch.empty(0)

    def place(self, whole: torch.Tensor, rank: int, names: Sequence[str],
              values: torch.Tensor) -> None:
        """Puts what `pick` gives back to where it belongs."""
        start = 0
        for part in self._parts(whole, rank, names):
            part.copy_(values[start:start + part.numel()].view(part.shape))
            start += part.numel()

    def _parts(self, whole: torch.Tensor, rank: int, names: Sequence[str],
               ) -> Iterator[torch.Tensor]:
        for name in names:
            begin, end = self._places[name]
            yield self.tables[rank][name].of(whole[begin:end])


class Exchange:
    """At rank 0: f32 memory of the host for the values of one fragment, since one is worked on at a
    time, and how they come there from all ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._values = torch.empty(0)

    def whole(self, plan: SpreadPlan) -> torch.Tensor:
        """The memory; contents undefined unless something has just been put there."""
        if self._values.numel() < plan.numel:
            self._values = torch.empty(plan.numel)
        return self._values[:plan.numel]

    def collect(self, plan: SpreadPlan, mine: torch.Tensor, others: Sequence[int],
                which: Callable[[Sequence[str], Table], list[str]]) -> torch.Tensor:
        """Puts there what this rank and others have of the names that `which` says."""
        whole, here = self.whole(plan), self.ranks.rank
        plan.place(whole, here, which(plan.names, plan.tables[here]), mine)
        for rank in others:
            message = self.ranks.hear(rank, Word.DATA, at="a fragment")
            values = torch.empty(message.size // 4)
            self.ranks.receive(rank, values)
            plan.place(whole, rank, which(plan.names, plan.tables[rank]), values)
        return whole


class Spread:
    """At rank 0: a fragment of which other ranks have parts; a `LocalFragment` with the same bits.

    part: that of rank 0, in f32.
    """

    def __init__(self, index: int, plan: SpreadPlan, part: RankPart, dtype: int,
                 exchange: Exchange):
        self._index, self._plan, self._part, self._dtype = index, plan, part, dtype
        self._exchange, self._ranks = exchange, exchange.ranks
        self._others = [rank for rank in plan.readers if rank != self._ranks.rank]

    def rebase(self, tensor: memoryview, alpha: float) -> None:
        whole: Floats = self._exchange.whole(self._plan).numpy()
        if bulk_dtype(self._dtype) == DTYPE_F32:
            np.copyto(whole, np.frombuffer(tensor, "<f4"))
        else:
            decode_bf16(tensor, whole, False)
        [bits] = struct.unpack("<q", struct.pack("<d", alpha))
        mine = self._scatter(Word.REBASE, bits)
        if self._part.own is not None:
            self._part.own.rebase(bytes_of(mine), alpha)
        self._ranks.settle()

    def restore(self) -> None:
        for rank in self._others:
            self._ranks.tell(rank, Word.RESTORE, self._index)
        if self._part.own is not None:
            self._part.own.restore()

    def overwrite(self, tensor: memoryview) -> None:
        np.copyto(self._exchange.whole(self._plan).numpy(), np.frombuffer(tensor, "<f4"))
        mine = self._scatter(Word.OVERWRITE, 0)
        if self._part.own is not None:
            self._part.own.overwrite(bytes_of(mine))
        self._ranks.settle()

    def pack_values(self, out: Packed) -> None:
        _encode(self._gather(Word.VALUES), bulk_dtype(self._dtype), out)

    def pack_delta(self, out: Packed) -> None:
        _encode(self._gather(Word.DELTA), self._dtype, out)

    def feed_back(self) -> None:
        raise ConfigError("error_feedback needs each fragment in one process, and this model is "
                          "sharded: leave it out, or use DistributedDataParallel")

    def forget_error(self) -> None:
        """There is none."""

    def kept(self) -> dict[str, Floats]:
        """The part of rank 0: the others keep theirs."""
        return {} if self._part.own is None else self._part.own.kept()

    def keep(self, values: Mapping[str, Floats]) -> Floats:
        for rank in self._others:
            self._ranks.tell(rank, Word.KEEP, self._index)
        return self._collect(self._part.keep(values))

    def _scatter(self, word: Word, argument: int) -> torch.Tensor:
        """Each rank gets the values of what is read there; those of rank 0 come back."""
        for rank in self._others:
            self._ranks.tell(rank, word, self._index, argument, self._picked(rank))
        return self._picked(self._ranks.rank)

    def _picked(self, rank: int) -> torch.Tensor:
        return self._plan.pick(self._exchange.whole(self._plan), rank, read_names(
            self._plan.names, self._plan.tables[rank]))

    def _gather(self, word: Word) -> Floats:
        for rank in self._others:
            self._ranks.tell(rank, word, self._index)
        return self._collect(self._part.packed(delta=word is Word.DELTA))

    def _collect(self, mine: torch.Tensor) -> Floats:
        """The whole, from what is read here and in every other rank."""
        whole: Floats = self._exchange.collect(
            self._plan, mine, self._others, read_names).numpy()
        return whole


def _encode(values: Floats, dtype: int, out: Packed) -> None:
    if dtype == DTYPE_F32:
        np.copyto(out.view("<f4"), values)
    else:
        (encode_bf16 if dtype == DTYPE_BF16 else encode_q4)(values, out)


class Copied:
    """At rank 0: a fragment some of whose tensors several ranks have, which get what one has."""

    def __init__(self, inner: LocalFragment, index: int, plan: SpreadPlan, part: RankPart,
                 exchange: Exchange):
        self._inner, self._index, self._plan, self._part = inner, index, plan, part
        self._exchange = exchange
        self.pack_values, self.pack_delta = inner.pack_values, inner.pack_delta
        self.kept, self.keep = inner.kept, inner.keep
        self.feed_back, self.forget_error = inner.feed_back, inner.forget_error

    def rebase(self, tensor: memoryview, alpha: float) -> None:
        self._inner.rebase(tensor, alpha)
        self._copy(statistics=False)

    def restore(self) -> None:
        self._inner.restore()
        self._copy(statistics=True)

    def overwrite(self, tensor: memoryview) -> None:
        self._inner.overwrite(tensor)
        self._copy(statistics=True)

    def _copy(self, *, statistics: bool) -> None:
        ranks, plan = self._exchange.ranks, self._plan
        sources = [rank for rank in plan.sources if rank != ranks.rank]
        for rank in sources:
            ranks.tell(rank, Word.READ, self._index)
        whole = self._exchange.collect(plan, self._part.values_to_copy(), sources, names_to_copy)
        known: tuple[list[tuple[str, Share]], torch.Tensor] | None = None
        for rank in plan.holders:
            names = names_copied(plan.names, plan.tables[rank])
            places = [(name, plan.tables[rank][name]) for name in names]
            if known is None or known[0] != places:  # nearly always the same for all
                known = places, plan.pick(whole, rank, names)
            if rank == ranks.rank:
                self._part.copy(known[1], statistics=statistics)
            else:
                ranks.tell(rank, Word.COPY, self._index, statistics, known[1])
        ranks.settle()


class SpreadWeights:
    """At rank 0: the weights of an island of many processes, as one `Holding`."""

    def __init__(self, weights: Weights, ranks: Ranks, tables: Sequence[Table]):
        self._weights, self._ranks, self._tables = weights, ranks, tables
        self._exchange = Exchange(ranks)
        self._count = 0

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._weights.shapes

    def buffer(self, size: int) -> Packed:
        return self._weights.buffer(size)

    def fragment(self, names: Sequence[str], dtype: int) -> LocalFragment:
        """As `Weights.fragment`; the other ranks make their parts."""
        index, self._count = self._count, self._count + 1
        for rank in self._ranks.others:
            self._ranks.tell(rank, Word.FRAGMENT, index, payload=as_json(list(names)))
        self._ranks.settle()
        plan = SpreadPlan(names, self._tables)
        is_here = plan.readers == [self._ranks.rank]
        part = RankPart(self._weights, names, dtype if is_here else DTYPE_F32)
        if not plan.holders and is_here and part.own is not None:
            return part.own
        inner: LocalFragment = (part.own if is_here and part.own is not None else
                                Spread(index, plan, part, dtype, self._exchange))
        return Copied(inner, index, plan, part, self._exchange) if plan.holders else inner


class RankParts:
    """At every other rank: does what rank 0 says, with its parts of the fragments."""

    def __init__(self, weights: Weights, ranks: Ranks, kept: Sequence[Mapping[str, Floats] | None]):
        self._weights, self._ranks, self._state = weights, ranks, kept
        self._parts: list[RankPart] = []

    def obey(self, message: Message) -> None:
        if message.word is Word.FRAGMENT:
            names = self._ranks.read_json(0, message)
            self._parts.append(RankPart(self._weights, names, DTYPE_F32))
            return
        part = self._parts[message.first]
        values = torch.empty(message.size // 4)
        self._ranks.receive(0, values)
        if message.word is Word.COPY:
            part.copy(values, statistics=bool(message.second))
        elif message.word is Word.READ:
            self._send(part.values_to_copy())
        elif message.word in (Word.VALUES, Word.DELTA):
            self._send(part.packed(delta=message.word is Word.DELTA))
        elif message.word is Word.KEEP:
            self._send(part.keep(self._state[message.first] or {}))
        elif part.own is not None and message.word is Word.REBASE:
            [alpha] = struct.unpack("<d", struct.pack("<q", message.second))
            part.own.rebase(bytes_of(values), alpha)
        elif part.own is not None and message.word is Word.RESTORE:
            part.own.restore()
        elif part.own is not None and message.word is Word.OVERWRITE:
            part.own.overwrite(bytes_of(values))

    def kept(self) -> list[dict[str, Floats]]:
        """Of every fragment what is here beside the model."""
        return [{} if part.own is None else part.own.kept() for part in self._parts]

    def _send(self, values: torch.Tensor) -> None:
        self._ranks.tell(0, Word.DATA, payload=values)
        self._ranks.settle()


def state_for(weights: Weights, state: Mapping[str, Any] | None,
              ) -> Sequence[Mapping[str, Floats] | None]:
    """What a state has beside each fragment; raises `ConfigError` for one of another rank."""
    if state is None:
        return []
    rank, here = state.get("rank", 0), weights.seat.rank
    if rank != here and any(share.is_read for share in weights.shares.values()):
        raise ConfigError(f"the state is of rank {rank} of an island, and this is rank {here}: "
                          "each rank goes on from its own")
    return [record and record["kept"] for record in state["fragments"]]
