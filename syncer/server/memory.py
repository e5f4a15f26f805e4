"""How much memory a run takes at most, part by part; must not take or measure any.

docs/server.md explains the parts and the formula. What takes turns shares its memory (pages.pyx),
so the parts are those of the moment at which a round takes most. The process itself, with its code
and its threads, comes on top.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from syncer.config import Config
from syncer.layout import ISO, RDA, Layout
from syncer.merge.optimizers import OPTIMIZERS
from syncer.protocol import DTYPE_F32, DTYPE_Q4, bulk_dtype, tensor_bytes
from syncer.server.log import LOG_BYTES_MAX
from syncer.server.tape import TAPE_BYTES_MAX

MIB = 1 << 20
ISO_F64_ARRAYS = 5
"""Copies of a matrix in f64 that its merge works with."""
SOCKET_BYTES = 128 << 10
"""Buffers and objects of one connection."""
HEADS_BYTES = 256
"""Of a message of a tensor: its header, its fields, and the alignment of what is behind them."""
BLOCK = 64 << 10
"""Large pieces are whole ones of these: `pages`' grain."""
WORKING_BYTES = 16 * MIB
"""Working memory of merges, stacks of teams and what the interpreter keeps; and"""
PAGE = 2 * MIB
"""for each piece that comes and goes a huge page that is in use in part."""
SAVING_BYTES = 16 * MIB
"""What a checkpoint is written through."""


def in_blocks(size: int) -> int:
    """What a piece of so many bytes takes."""
    return size if size < BLOCK else -(-size // BLOCK) * BLOCK


def as_received(size: int) -> int:
    """What the message of a tensor of this size takes until it is decoded; in f32, its values."""
    return in_blocks(size + HEADS_BYTES)


def depth_of(config: Config, fragments: int) -> int:
    """Rounds in flight at most."""
    return min(max(config.pipeline, 1), fragments)


class Sizes:
    """What the parts are made of, in bytes."""

    def __init__(self, config: Config, layout: Layout, dtype: int):
        self.apart = config.numa == "local"
        """Messages leave their memory to no result."""
        self.in_place = dtype == DTYPE_F32
        """Values stay where they were received."""
        self.in_f32 = [(as_received if self.in_place else in_blocks)(4 * fragment.numel)
                       for fragment in layout.fragments]
        self.depth = depth_of(config, len(self.in_f32))
        self.learners = config.learners
        self.model, self.largest = sum(self.in_f32), max(self.in_f32)
        self.at_once = self._at_once(self.in_f32)
        """Of the fragments that are in flight at most."""
        pushes = [as_received(tensor_bytes(fragment.numel, dtype)) for fragment in layout.fragments]
        self.sent = self._at_once(pushes)
        """Of their pushes of one learner, as received."""
        self.sent_max, self.sent_all = max(pushes), sum(pushes)
        self.encoded = bulk_dtype(dtype) != DTYPE_F32
        self.state = len(OPTIMIZERS[config.outer_optimizer].state)
        self.sums = 0 if config.fold == "batch" else (
            2 if any(fragment.merge_mode == RDA for fragment in layout.fragments) else 1)
        self.matrix = max((numel for fragment in layout.fragments if fragment.merge_mode == ISO
                           for numel in fragment.numels), default=0)

    def _at_once(self, sizes: list[int]) -> int:
        return sum(heapq.nlargest(self.depth, sizes))

    def rounds(self) -> int:
        """Pushes, results and sums of the rounds in flight.

        A round has all its pushes decoded when its result is computed, and none of their bytes as
        received; before that it has no result. A fold has let go of its pushes by then. The bytes
        of initial values, of which no more than five are there, take less.
        """
        result = (1 + self.state) * self.at_once + self.depth * 8 * ISO_F64_ARRAYS * self.matrix
        decoded = self.learners * self.at_once
        received = 0 if self.in_place else self.learners * self.sent
        if self.apart:
            return self.sums * self.at_once + result + decoded + received
        if self.sums:
            return self.sums * self.at_once + max(result, decoded + received)
        return decoded + max(result, received)


def anchors_of(config: Config, layout: Layout, dtype: int) -> list[int]:
    """By fragment, what learners hold of a version and its change."""
    if config.downlink == "whole":
        return []
    return [sum(in_blocks(tensor_bytes(fragment.numel, kind))
                for kind in (bulk_dtype(dtype), DTYPE_Q4)) for fragment in layout.fragments]


def memory_parts(config: Config, layout: Layout, dtype: int) -> dict[str, int]:
    """Bytes at most, by part, for a session of this layout in this dtype, while everybody reads
    what is sent."""
    sizes = Sizes(config, layout, dtype)
    optimizer = sizes.state * sizes.model
    rounds, anchors = sizes.rounds(), anchors_of(config, layout, dtype)
    broadcasts = sizes.at_once // 2 if sizes.encoded else 0
    # the next anchors, and the bytes of parameters that were not changed yet
    broadcasts += 2 * sum(heapq.nlargest(sizes.depth, anchors))
    late = 0
    if config.quorum < config.learners:  # it comes when its round has closed
        late = sizes.largest + (0 if sizes.in_place else sizes.sent_max)
    if config.late_carry:
        late += config.learners * sizes.sent_all
    return {
        "parameters": sizes.model,
        "optimizer": optimizer,
        "rounds": rounds,
        "broadcasts": broadcasts,
        "anchors": sum(anchors),
        "late": late,
        "checkpoint": ((1 + sizes.state) * sizes.model if config.background_checkpoint else 0)
        + (SAVING_BYTES if config.checkpoint_path else 0),
        "working": WORKING_BYTES + PAGE * sizes.depth * (sizes.learners + 1 + sizes.state),
    }


def moving_bytes(parts: dict[str, int]) -> int:
    """Of these parts: what comes and goes with the rounds."""
    return parts["rounds"] + parts["broadcasts"] + parts["late"]


def kept_max(parts: dict[str, int]) -> int:
    """Free memory that stays with the process: what rounds use, with what a checkpoint in the
    background keeps alive meanwhile, and some more so that none of it is given back and faulted in
    again. What slow readers have held is."""
    return moving_bytes(parts) * 5 // 4 + parts["checkpoint"] + WORKING_BYTES


def slow_learners_max(config: Config, layout: Layout, dtype: int) -> int:
    """Beside these parts, when all learners are slow to read: versions that they are in the middle
    of and the bytes of the newest ones, and what queues for log, tape and connections."""
    sizes = Sizes(config, layout, dtype)
    versions = sizes.largest * sizes.learners
    return (versions + sizes.model // 2 if sizes.encoded else versions) + (
        LOG_BYTES_MAX + TAPE_BYTES_MAX + SOCKET_BYTES * 5 * sizes.learners)


def readers_max(config: Config, layout: Layout) -> int:
    """Beside these parts, when all the readers that may come are slow: of each fragment of a cut
    one version for each of them, and bf16 bytes of the one in hand."""
    in_f32 = [in_blocks(4 * fragment.numel) for fragment in layout.fragments]
    return config.max_readers * (sum(in_f32) + max(in_f32) // 2 + SOCKET_BYTES)


class Formula(NamedTuple):
    """The parts that grow with the model, as bytes per parameter."""

    text: str
    parameters: int
    in_flight: int


def formula_of(config: Config, layout: Layout, parts: dict[str, int]) -> Formula:
    """`8 P + 18 G`: P parameters in all, G in the fragments that are in flight at most."""
    numels = [fragment.numel for fragment in layout.fragments]
    in_flight = sum(heapq.nlargest(depth_of(config, len(numels)), numels))
    kept = sum(parts[name] for name in ("parameters", "optimizer", "anchors", "checkpoint"))
    each = [f"{size / count:.3g} {name}" for size, count, name in (
        (kept, sum(numels), "P"), (moving_bytes(parts), in_flight, "G"))]
    return Formula(" + ".join(each), sum(numels), in_flight)


def in_mib(parts: dict[str, int], *beside: int) -> dict[str, int]:
    """The sum and the parts in MiB, rounded up, as they are told; and the sum with slow learners,
    and with slow readers as well."""
    whole = {name: -(-size // MIB) for name, size in parts.items()}
    total = sum(whole.values())
    slow, readers = (-(-size // MIB) for size in beside)
    return {"mib": total, **whole, "with_slow_learners": total + slow,
            "with_readers": total + slow + readers}
