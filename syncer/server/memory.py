"""How much memory a run takes at most, part by part; must not take or measure any.

docs/server.md explains the parts. Every part is a bound of what honest learners can cause, rounded
up; the process itself, with its code, its threads and their working memory, comes on top.
"""

from __future__ import annotations

from syncer.config import Config
from syncer.layout import ISO, Layout
from syncer.merge.optimizers import OPTIMIZERS
from syncer.protocol import DTYPE_F32, bulk_dtype
from syncer.server.log import LOG_BYTES_MAX
from syncer.server.tape import TAPE_BYTES_MAX
from syncer.wire.limits import Limits

MIB = 1 << 20
ISO_F64_ARRAYS = 5
"""Copies of a matrix in f64 that its merge works with."""
SOCKET_BYTES = 128 << 10
"""Buffers and objects of one connection."""
RECEIVED_SPARE_MAX = 256 << 20
"""Freed blocks that the process keeps for the next messages: `wire.payload`'s limit."""


def rounded(size: int) -> int:
    """What a pool takes for it: classes are an eighth apart, large pieces whole huge pages."""
    return size + size // 8 + 2 * MIB


def memory_parts(config: Config, layout: Layout, dtype: int) -> dict[str, int]:
    """Bytes at most, by part, for a session of this layout in this dtype."""
    model, largest = 4 * layout.numel, rounded(4 * layout.largest)
    state = len(OPTIMIZERS[config.outer_optimizer].state)
    learners = config.learners
    depth = min(max(config.pipeline, 1), len(layout.fragments))
    encoded = bulk_dtype(dtype) != DTYPE_F32
    limits = Limits.for_server(layout, dtype)
    wire = rounded(limits.inner_bytes_max)
    iso = max((numel for fragment in layout.fragments if fragment.merge_mode == ISO
               for numel in fragment.numels), default=0)
    copies = 1 + state if config.background_checkpoint else 0
    received = wire * (learners * depth + 4)     # learner 0 sends four initial values at once
    return {
        "parameters": model,
        "optimizer": model * state,
        "merges": depth * (largest * (1 + state + (2 if config.fold != "batch" else 0))
                           + 8 * ISO_F64_ARRAYS * iso),
        "pushes": largest * (learners * depth + 1) + (
            learners * wire * len(layout.fragments) if config.late_carry else 0),
        "received": received + min(received, RECEIVED_SPARE_MAX),
        "broadcasts": (model // 2 + largest * (learners + 1)) if encoded else largest * learners,
        "checkpoint": copies * model + (16 * MIB if config.checkpoint_path else 0),
        "queues": LOG_BYTES_MAX + TAPE_BYTES_MAX + SOCKET_BYTES * 5 * learners,
    }


def in_mib(parts: dict[str, int]) -> dict[str, int]:
    """The sum and the parts in MiB, rounded up, as they are told."""
    whole = {name: -(-size // MIB) for name, size in parts.items()}
    return {"mib": sum(whole.values()), **whole}
