"""The numbers of the demo that belong together; must not import anything heavy.

Chosen on two shared cores: batch 128 takes 4 ms there. Outer step, blend and learning rate were
compared by held-out bits per byte after the same number of own steps (docs/demo.md has the table).
"""

from __future__ import annotations

from syncer.protocol import DTYPE_BF16, DTYPES

LEARNERS = 3
SECONDS = 60.0
SEED = 0
WIRE_DTYPES = tuple(DTYPES.values())
DTYPE = DTYPES[DTYPE_BF16]
ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Set to 1 in a learner: several share a machine, and more threads each would only get in each
other's way."""

BATCH = 128
"""Bytes that one own step predicts."""
LEARNING_RATE = 3e-3
TORCH_BATCH = 8
"""Rows of the GPT in one own step: 512 bytes that it predicts."""
TORCH_LEARNING_RATE = 2e-3
WARMUP_STEPS = 50
CONSTANT_STEPS = 500

FRAGMENTS = 4
NUM_STREAMS = 1
"""A fragment is below 300 kB: one data connection carries it."""
ALPHA = 0.5
"""Share of the learner's own value that survives a broadcast."""
OUTER_LR = 0.7
OUTER_MOMENTUM = 0.9

SYNC_INTERVAL_STEPS = 96
"""Own steps between two merges of one fragment, when steps set the pace."""
MERGE_INTERVAL_S = 0.25
"""Seconds between two merges, when a time budget sets the pace."""
MERGES_MIN = 12
"""A short time budget still merges every fragment a few times."""
PACED_SHARE = 0.95
"""Share of a time budget that merges are spread over; the rest is for the final cut."""
DEMO_PRESET = "local"
"""Quorum and grace: one machine, and steps of milliseconds."""
QUORUM_TIMEOUT_S = 30
FINAL_ACK_TIMEOUT_S = 60

EVALUATION_BYTES = 16384
GLANCE_BYTES = 4096
"""Held-out bytes predicted for a point of the curve: 30 ms, sampling error 0.03 bits per byte."""
GLANCE_FIRST_S = 0.5
GLANCE_INTERVAL_S = 2.0
"""Looks come at 0.5, 1, 2, 4 s and then every two seconds: most happens at the beginning."""
REPORT_INTERVAL_S = 0.5
REPORT_INTERVAL_READABLE_S = 2.0


def learning_rate(step: int, top: float = LEARNING_RATE) -> float:
    """Of own step `step` (from 1): linear warm-up, constant, then falling as 1/sqrt(step).

    Needs no planned end, since a learner does not know how many own steps a run will take.
    """
    falling = float((CONSTANT_STEPS / step) ** 0.5)
    return top * min(1.0, step / WARMUP_STEPS, falling)
