"""The anchors of a run whose broadcasts go down as changes."""

from __future__ import annotations

import numpy as np
import pytest

from syncer.layout import AVG, FragmentLayout, Layout
from syncer.merge import FragmentStore
from syncer.protocol import DTYPE_BF16, DTYPE_F32, Msg
from syncer.server.downlink import Downlink
from tests.golden.change_reference import as_bulk, change_of, changed
from tests.golden.merge_reference import bf16_encode

F32 = np.float32
NUMEL = 140_001
"""More than is done on the loop's thread."""


class Run:
    """One fragment, merged by plain addition of what is pushed."""

    def __init__(self, dtype: int, threads: int = 1, start: np.ndarray | None = None):
        layout = Layout((FragmentLayout(AVG, (NUMEL,)),))
        self.store = FragmentStore(layout, lr=1.0, momentum=0.0, outer_optimizer="sgd",
                                   bf16=dtype == DTYPE_BF16)
        self.downlink = Downlink(dtype, threads)
        self.dtype = dtype
        if start is None:
            start = np.random.default_rng(3).standard_normal(NUMEL).astype(F32)
        self.store.adopt(0, start)
        self.expected = as_bulk(start, dtype)

    @property
    def params(self) -> np.ndarray:
        return self.store.current(0).params

    def merge(self, delta: np.ndarray):
        """One step; its anchor, which is published with it."""
        step = self.store.current(0).version + 1
        prepared = self.store.prepare(0, step, [(0, 1, 1.0, -delta)])
        anchor = self.downlink.next(prepared.base, prepared.result)
        self.store.publish(prepared)
        self.downlink.publish(0, anchor)
        return anchor

    def as_sent(self, values: np.ndarray) -> bytes:
        return values.tobytes() if self.dtype == DTYPE_F32 else bf16_encode(values).tobytes()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [DTYPE_F32, DTYPE_BF16])
def test_an_anchor_is_the_one_before_and_a_change_towards_the_parameters(dtype, threads):
    run = Run(dtype, threads)
    rng = np.random.default_rng(4)
    for step in range(1, 5):
        anchor = run.merge((0.01 * rng.standard_normal(NUMEL)).astype(F32))
        change = change_of(run.params, run.expected)
        run.expected = changed(run.expected, change, dtype)
        assert (anchor.kind, anchor.fragment, anchor.version) == (Msg.BCAST_FRAGMENT, 0, step)
        assert bytes(anchor.body) == run.as_sent(run.expected)
        assert (anchor.change.kind, anchor.change.version) == (Msg.BCAST_CHANGE, step)
        assert anchor.change.base == step - 1
        assert bytes(anchor.change.body) == change
        assert run.downlink.anchor_of(run.store.current(0)) is anchor


@pytest.mark.parametrize("dtype", [DTYPE_F32, DTYPE_BF16])
def test_what_a_change_would_make_infinite_is_whole(dtype):
    """Three quarters of a block's largest number are told as all of it."""
    start = np.zeros(NUMEL, F32)
    start[:2] = -1.7e38, 0.9e38
    run = Run(dtype, start=start)
    delta = np.zeros(NUMEL, F32)
    delta[:2] = 3.4e38, 2.45e38
    assert run.merge(delta) is None
    assert run.downlink.anchor_of(run.store.current(0)) is None
    run.expected = as_bulk(run.params, dtype)
    anchor = run.merge(np.full(NUMEL, 0.5, F32))
    change = change_of(run.params, run.expected)
    assert (anchor.change.base, bytes(anchor.change.body)) == (1, change)
    assert bytes(anchor.body) == run.as_sent(changed(run.expected, change, dtype))


@pytest.mark.parametrize("dtype", [DTYPE_F32, DTYPE_BF16])
def test_without_memory_a_version_is_whole(dtype, monkeypatch):
    run = Run(dtype)
    run.merge(np.ones(NUMEL, F32))

    def none_left(numel, dtype):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(run.downlink, "_take", none_left)
        assert run.merge(np.ones(NUMEL, F32)) is None
    assert run.merge(np.ones(NUMEL, F32)).change.base == 2


def test_of_an_anchor_nothing_is_kept_but_the_current_one():
    run = Run(DTYPE_BF16)
    for _ in range(5):
        run.merge(np.ones(NUMEL, F32))
    assert run.downlink.pool.live == 2, "it and its change"
