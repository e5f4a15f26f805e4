"""Which part of each tensor a rank of an island has, and whether all of them have one model.

Must not know how bytes come from one rank to another, or what a run does with them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from syncer.errors import ConfigError
from syncer.kernels import sha256

if TYPE_CHECKING:
    from syncer.torch.tensor_piece import Piece


class Span(NamedTuple):
    """Part of a tensor: [start, stop) of one dimension, and all of the others."""

    dim: int
    start: int
    stop: int


class Share(NamedTuple):
    """What one rank has of one tensor."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    span: Span | None
    """None: it has all of it."""
    is_read: bool
    """Whether this rank's values count: of several ranks that have the same, one's do."""
    is_copied: bool
    """Whether another rank has the same."""

    @property
    def numel(self) -> int:
        return int(self.of(torch.empty(self.shape, device="meta")).numel())

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Its part of memory for the whole tensor, which may be flat."""
        shaped = whole.view(self.shape)
        if self.span is None:
            return shaped
        return shaped.narrow(self.span.dim, self.span.start, self.span.stop - self.span.start)


class Seat(NamedTuple):
    """A process of an island."""

    rank: int = 0
    ranks: int = 1


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """[start, stop) of one of `parts`, as torch.chunk deals: the last ones may be short or empty.
    """
    each = -(-size // parts)
    return min(index * each, size), min((index + 1) * each, size)


def share_of(name: str, tensor: torch.Tensor, seat: Seat) -> Share:
    """Raises `ConfigError` for a placement that no island can read back."""
    shape = tuple(tensor.shape)
    mesh: Any = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return Share(shape, None, seat.rank == 0, seat.ranks > 1)
    placements = tuple(tensor.placements)
    words = f"{name!r} is placed as {placements} on a mesh of {tuple(mesh.shape)}"
    at = mesh.get_coordinate()
    if at is None:
        raise ConfigError(f"{words}, of which this process is no part")
    span, is_read, is_copied = None, True, False
    for size, index, placement in zip(mesh.shape, at, placements, strict=True):
        if placement.is_replicate():
            is_read, is_copied = is_read and index == 0, is_copied or size > 1
        elif placement.is_shard() and span is None and not hasattr(placement, "split_factor"):
            span = Span(placement.dim, *chunk(shape[placement.dim], size, index))
        else:
            raise ConfigError(f"{words}, as of tensor parallelism: expected one Shard at most, as "
                              "fully_shard makes it, and Replicate")
    share = Share(shape, span, is_read, is_copied)
    found = tuple(tensor.to_local().shape)
    expected = tuple(share.of(torch.empty(shape, device="meta")).shape)
    if found != expected:
        raise ConfigError(f"{words}, and this process has {list(found)} of it, expected "
                          f"{list(expected)}")
    if seat.ranks == 1 and expected != shape:
        raise ConfigError(f"{words}: it is sharded over processes that are not in this island")
    return share


def introduction(pieces: Mapping[str, Piece], shares: Mapping[str, Share]) -> list[Any]:
    """What a rank has, to be compared with the others': a text for each of its tensors, the span,
    and a digest of what must be equal, as nobody else would find out."""
    rows = []
    for name, piece in pieces.items():
        share, tensor = shares[name], piece.tensor
        kind = f"{str(tensor.dtype).removeprefix('torch.')} {list(share.shape)}" + (
            ", a buffer" if piece.statistic else "")
        digest = "" if piece.statistic or not share.is_copied else sha256(
            tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()).hex()
        rows.append([name, kind, share.span, share.is_read, share.is_copied, digest])
    return rows


def compared(rows: Sequence[Sequence[Any]], shares: Mapping[str, Share],
             ) -> list[Mapping[str, Share]]:
    """The shares of every rank, from the introductions of all of them; those of rank 0 are the
    model. Raises `ConfigError` naming the first rank and parameter that differ."""
    for rank, theirs in enumerate(rows):
        for ours, other in itertools.zip_longest(rows[0], theirs):
            if other is None or ours is None or other[0] != ours[0]:
                found, expected = (repr(row[0]) if row else "no more" for row in (other, ours))
                raise ConfigError(f"rank {rank} of the island has parameter {found} where rank 0 "
                                  f"has {expected}: all ranks must have one model")
            if other[1] != ours[1]:
                raise ConfigError(f"{ours[0]!r} is {other[1]} at rank {rank} of the island, and "
                                  f"{ours[1]} at rank 0")
    tables: list[Mapping[str, Share]] = [
        {name: Share(shares[name].shape, span and Span(*span), is_read, is_copied)
         for name, _, span, is_read, is_copied, _ in theirs} for theirs in rows]
    for place, (name, *_) in enumerate(rows[0]):
        _refuse_gaps(name, [table[name] for table in tables])
        known: dict[Span | None, tuple[int, str]] = {}
        for rank, theirs in enumerate(rows):
            first, digest = known.setdefault(tables[rank][name].span, (rank, theirs[place][-1]))
            if digest != theirs[place][-1]:
                raise ConfigError(
                    f"{name!r} has other values at rank {rank} of the island than at rank {first}: "
                    "what is not sharded must be equal everywhere at the start, as DDP makes it "
                    "(weights of tensor parallelism must be DTensors)")
    return tables


def _refuse_gaps(name: str, shares: Sequence[Share]) -> None:
    """Every element must be read at exactly one rank."""
    if not math.prod(shares[0].shape):
        return
    parts = [(rank, share) for rank, share in enumerate(shares) if share.is_read and share.numel]
    spans = sorted(share.span for _, share in parts if share.span is not None)
    if not spans or len(spans) < len(parts):
        whole = len(parts) == 1
    else:
        edges = [0, *(span.stop for span in spans)]
        whole = (len({span.dim for span in spans}) == 1
                 and edges[-1] == shares[0].shape[spans[0].dim]
                 and [span.start for span in spans] == edges[:-1])
    if not whole:
        spans_read = {f"rank {rank}": share.span and tuple(share.span) for rank, share in parts}
        raise ConfigError(f"the parts of {name!r} that the ranks of this island have are not the "
                          f"whole: (dimension, start, stop) are {spans_read}")
