"""What a merge counts as read and written: by hand for each kind of round, and for every cut."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import merge_round
from syncer.layout import AVG, RDA
from syncer.merge import engine
from syncer.merge.buffers import BufferPool
from syncer.merge.plan import Plan

HAND = {
    # gradients, momentum, parameters, sum, result, new momentum: arrays read, arrays written
    "avg": ((4, 0), (1, 0), (1, 0), (0, 0), (0, 1), (0, 1)),
    "avg, HeLoCo keeps all": ((8, 0), (2, 0), (1, 0), (0, 0), (0, 1), (0, 1)),
    "rda": ((8, 0), (1, 0), (1, 0), (0, 0), (1, 2), (0, 1)),
    "rda, kept": ((8, 0), (2, 0), (1, 0), (0, 0), (1, 2), (0, 1)),
    "rda, mixed": ((8 + 1 + 2, 0), (5, 0), (1, 0), (0, 0), (1, 2), (0, 1)),
    "rda, turned": ((8 + 2 + 4, 0), (5, 0), (1, 0), (0, 0), (1, 2), (0, 1)),
    "close of a fold, avg": ((0, 0), (1, 0), (1, 0), (1, 0), (0, 1), (0, 1)),
    "close of a fold, rda": ((0, 0), (1, 0), (1, 0), (2, 0), (0, 1), (0, 1)),
}


@pytest.mark.parametrize("kind", merge_round.ROUNDS, ids=lambda kind: kind.name)
def test_a_round_moves_what_its_passes_must(kind):
    found = dict.fromkeys(engine.ARRAYS, (0.0, 0.0))
    for (_, array), (read, written) in merge_round.moved(kind).items():
        found[array] = (found[array][0] + read / 4, found[array][1] + written / 4)
    assert tuple(found.values()) == HAND[kind.name]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_element_counts_once_whoever_takes_it(threads):
    """Shared tensors, whole ones, ragged ends: bytes are those of all elements, to the last."""
    numels = [100_000, 7, 40_001, 1, 300, 65_536]
    n = sum(numels)
    plan, pool, counts = Plan(numels, threads), BufferPool(), {}
    x = np.random.default_rng(3).standard_normal((3, n), dtype=np.float32)
    engine.run(plan, mode=RDA, gradients=list(x), weights=[1.0] * 3, params=pool.take(n, zero=True),
               state=(), params_out=pool.take(n), state_out=(), outer=engine.STEP_SGD,
               scalars=(0.7, 0.0, 1.0, 0.0), moved=counts)
    assert counts == {
        ("measure", "gradients"): (12 * n, 0), ("direction", "gradients"): (12 * n, 0),
        ("direction", "result"): (0, 4 * n), ("step", "parameters"): (4 * n, 0),
        ("step", "result"): (4 * n, 4 * n),
    }


def test_what_is_merged_without_a_step_is_read_and_written_once():
    n = 20_000
    plan, pool, counts = Plan([n], 1), BufferPool(), {}
    x = np.ones((2, n), np.float32)
    engine.run(plan, mode=AVG, gradients=list(x), weights=[1.0, 1.0],
               params=pool.take(n, zero=True), state=(), params_out=pool.take(n), state_out=(),
               outer=engine.STEP_NONE, scalars=(0.0, 0.0, 1.0, 0.0), moved=counts)
    assert counts == {("step", "gradients"): (8 * n, 0), ("step", "result"): (0, 4 * n)}
