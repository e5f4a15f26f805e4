"""What a learner that comes back costs: bytes of its return, against those of a whole catch-up.

Four learners of a 64 MiB model, on this machine. The link of one is away for 10 s: its connection
breaks, and nobody answers meanwhile. Then the server is stopped and goes on from its file, and all
four come back.

    python -m pytest benchmarks/bench_return.py -s
"""

from __future__ import annotations

from tests.e2e.returning import LEARNERS, MODEL_BYTES, measured

AWAY_S = 10.0


def test_a_drop_and_a_restart(tmp_path):
    whole, drop, restart = measured(tmp_path, AWAY_S)
    print(f"\n{MODEL_BYTES >> 20} MiB, {LEARNERS} learners: a catch-up is {whole:,} bytes; a "
          f"return after {AWAY_S:g} s {drop:,} ({100 * drop / whole:.4f} %), after a restart of "
          f"the server {restart:,} each ({100 * restart / whole:.4f} %)")
