"""How much memory a run takes at most, part by part; must not take or measure any.

docs/server.md explains the parts. Every part is a bound of what honest learners can cause, rounded
up; the process itself, with its code, its threads and their working memory, comes on top.
"""

from __future__ import annotations

import heapq
from collections import Counter

from syncer.config import Config
from syncer.layout import ISO, Layout
from syncer.merge.optimizers import OPTIMIZERS
from syncer.protocol import DTYPE_F32, bulk_dtype, tensor_bytes
from syncer.server.ingest import DECODING_MAX
from syncer.server.log import LOG_BYTES_MAX
from syncer.server.tape import TAPE_BYTES_MAX

MIB = 1 << 20
ISO_F64_ARRAYS = 5
"""Copies of a matrix in f64 that its merge works with."""
SOCKET_BYTES = 128 << 10
"""Buffers and objects of one connection."""
HEADS_BYTES = 256
"""Of a message of a tensor: its header, its fields, and the alignment of what is behind them."""
RECEIVED_SPARE_MAX = 256 << 20
"""Freed blocks that the process keeps for the next messages: `wire.payload`'s limit."""


HUGE = 2 * MIB
"""Large pieces are whole pages of this size."""
INITIAL_AT_ONCE = DECODING_MAX + 1
"""Initial values of learner 0 that are being decoded, and the one behind them that comes."""


def in_pool(numel: int) -> int:
    """What a buffer of f32 values takes: small ones come in classes that are an eighth apart, of
    large ones only the pages that are written exist."""
    size = 4 * numel
    return size + size // 8 if size < 2 * HUGE else whole_pages(size)


def as_received(size: int) -> int:
    """What the message of a tensor of this size takes until it is decoded."""
    return size + HEADS_BYTES if size + HEADS_BYTES < HUGE else whole_pages(size + HEADS_BYTES)


def whole_pages(size: int) -> int:
    return -(-size // HUGE) * HUGE


def received_bytes(layout: Layout, dtype: int, learners: int, depth: int) -> int:
    """Messages that are complete or come, and freed ones that are kept for the next.

    A block that was freed is taken again by the next message that needs one of its size. So there
    are never more blocks of one size, in use or kept, than were in use at once: of each learner one
    for every fragment of that size that has a round in flight, and some initial values.
    """
    pushes, initial = ([as_received(tensor_bytes(fragment.numel, kind))
                        for fragment in layout.fragments] for kind in (dtype, bulk_dtype(dtype)))
    live = max(learners * sum(heapq.nlargest(depth, pushes)),
               sum(heapq.nlargest(INITIAL_AT_ONCE, initial)))
    sizes = Counter({size: learners * min(depth, count) * size
                     for size, count in Counter(pushes).items()})
    for size, count in Counter(initial).items():
        sizes[size] = max(sizes[size], min(INITIAL_AT_ONCE, count) * size)
    return min(sizes.total(), live + RECEIVED_SPARE_MAX)


def memory_parts(config: Config, layout: Layout, dtype: int) -> dict[str, int]:
    """Bytes at most, by part, for a session of this layout in this dtype."""
    in_f32 = [in_pool(fragment.numel) for fragment in layout.fragments]
    model, largest = sum(in_f32), max(in_f32)
    state = len(OPTIMIZERS[config.outer_optimizer].state)
    learners, fragments = config.learners, len(in_f32)
    depth = depth_of(config, fragments)
    encoded = bulk_dtype(dtype) != DTYPE_F32
    iso = max((numel for fragment in layout.fragments if fragment.merge_mode == ISO
               for numel in fragment.numels), default=0)
    copies = 1 + state if config.background_checkpoint else 0
    parked = as_received(tensor_bytes(layout.largest, dtype))
    return {
        "parameters": model,
        "optimizer": model * state,
        "merges": depth * (largest * (1 + state + (2 if config.fold != "batch" else 0))
                           + 8 * ISO_F64_ARRAYS * iso),
        "pushes": pushes_max(config, layout) + (
            learners * parked * fragments if config.late_carry else 0),
        "received": received_bytes(layout, dtype, learners, depth),
        "broadcasts": (model // 2 + largest * (learners + 1)) if encoded else largest * learners,
        "checkpoint": copies * model + (16 * MIB if config.checkpoint_path else 0),
        "queues": LOG_BYTES_MAX + TAPE_BYTES_MAX + SOCKET_BYTES * 5 * learners,
    }


def readers_max(config: Config, layout: Layout) -> int:
    """Beside these parts, when all the readers that may come are slow: of each fragment of a cut
    one version for each of them, and bf16 bytes of the one in hand."""
    in_f32 = [in_pool(fragment.numel) for fragment in layout.fragments]
    return config.max_readers * (sum(in_f32) + max(in_f32) // 2 + SOCKET_BYTES)


def depth_of(config: Config, fragments: int) -> int:
    """Rounds in flight at most."""
    return min(max(config.pipeline, 1), fragments)


def pushes_max(config: Config, layout: Layout) -> int:
    """Decoded pushes, and the buffers that are kept for the next ones: of each learner one for each
    round in flight, and one more."""
    in_f32 = [in_pool(fragment.numel) for fragment in layout.fragments]
    at_once = heapq.nlargest(depth_of(config, len(in_f32)), in_f32)
    return config.learners * sum(at_once) + max(in_f32)


def in_mib(parts: dict[str, int], readers: int) -> dict[str, int]:
    """The sum and the parts in MiB, rounded up, as they are told; and the sum with readers."""
    whole = {name: -(-size // MIB) for name, size in parts.items()}
    total = sum(whole.values())
    return {"mib": total, **whole, "with_readers": total - (-readers // MIB)}
