"""Merges on several threads at once, late decoding, and readers; must not time anything."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from syncer import kernels
from syncer.kernels import testing
from syncer.layout import AVG, ISO, RDA, FragmentLayout, Layout
from syncer.merge import FragmentStore
from syncer.protocol import tensor_bytes
from tests.golden import merge_reference as reference

F32 = np.float32
LAYOUT = Layout((
    FragmentLayout(AVG, (70_000, 3)), FragmentLayout(RDA, (40_000, 1, 30_003)),
    FragmentLayout(ISO, (12, 20), ((3, 4), (4, 5))), FragmentLayout(RDA, (5,) * 2000),
))
STEPS = 6


def new_store(threads: int) -> FragmentStore:
    store = FragmentStore(LAYOUT, lr=0.7, momentum=0.9, threads=threads, merge_stats=True,
                          delta_correction="heloco", clip_norm="median", robust=1)
    for p, fragment in enumerate(LAYOUT.fragments):
        store.adopt(p, reference.noise(100 + p, fragment.numel))
    return store


def run_fragment(store: FragmentStore, p: int) -> tuple[list[bytes], list]:
    """All commits of one fragment; holds every version as a slow reader would, then lets go."""
    n = LAYOUT.fragments[p].numel
    held = [store.current(p)]
    bits = []
    for step in range(1, STEPS + 1):
        grads = [reference.noise(1000 * p + 10 * step + i, n) for i in range(3)]
        prepared = store.prepare(p, step, [(i, 1, 1.0 + i, g) for i, g in enumerate(grads)])
        if step % 3 == 0:  # one that is thrown away first
            store.discard(prepared)
            prepared = store.prepare(p, step, [(i, 1, 1.0 + i, g) for i, g in enumerate(grads)])
        version = store.publish(prepared)
        bits.append(version.params.tobytes() + version.momentum.tobytes())
        held.append(version)
    return bits, held


@pytest.mark.parametrize("threads", [1, 3])
def test_fragments_merge_at_the_same_time(threads):
    serial = new_store(1)
    expected = [run_fragment(serial, p)[0] for p in range(len(LAYOUT.fragments))]
    store = new_store(threads)
    with ThreadPoolExecutor(len(LAYOUT.fragments)) as pool:
        results = list(pool.map(lambda p: run_fragment(store, p), range(len(LAYOUT.fragments))))
    for p, ((bits, held), wanted) in enumerate(zip(results, expected, strict=True)):
        if LAYOUT.fragments[p].merge_mode == ISO:  # exact to a tolerance, whatever the threads
            for got, want in zip(bits, wanted, strict=True):
                assert np.frombuffer(got, F32) == pytest.approx(np.frombuffer(want, F32),
                                                                rel=1e-4, abs=1e-6)
        else:
            assert bits == wanted
        for version, want in zip(held[1:], bits, strict=True):
            assert version.params.tobytes() + version.momentum.tobytes() == want
    del version, held
    results.clear()
    assert store.live_buffers == 2 * len(LAYOUT.fragments)


@pytest.mark.parametrize("dtype", [1, 2, 3])
@pytest.mark.parametrize("mode", [AVG, RDA])
def test_a_carried_delta_decoded_late_gives_the_same_bits(mode, dtype):
    n, lag, gamma = 1000, 2, 0.5
    wire = []
    for seed in (1, 2):
        values = reference.noise(seed, n)
        if dtype == 1:
            wire.append(values.tobytes())
        else:
            encoded = bytearray(tensor_bytes(n, dtype))
            (kernels.encode_bf16 if dtype == 2 else kernels.encode_q4)(values, encoded)
            wire.append(bytes(encoded))

    def decoded(source: bytes) -> np.ndarray:
        out = np.empty(n, F32)
        assert testing.decode(dtype, source, out, True) == -1
        return out

    def store() -> FragmentStore:
        made = FragmentStore(Layout((FragmentLayout(mode, (600, 400)),)), lr=0.7, momentum=0.9)
        made.adopt(0, np.ones(n, F32))
        return made

    queued = decoded(wire[1])  # at arrival
    early, late = store(), store()
    for made in (early, late):  # the round it missed
        made.publish(made.prepare(0, 1, [(0, 1, 1.0, decoded(wire[0]))]))
    discount = gamma ** lag
    versions = [
        made.publish(made.prepare(0, 2, [(0, 1, 1.0, decoded(wire[0])), (1, 1, discount, carried)]))
        for made, carried in ((early, queued), (late, decoded(wire[1])))
    ]
    assert versions[0].params.tobytes() == versions[1].params.tobytes()
    # half the weight of an equal push: two thirds and one third
    halves = store()
    halves.publish(halves.prepare(0, 1, [(0, 1, 8.0, np.full(n, 3, F32)),
                                         (1, 1, 8.0 * gamma, np.full(n, -3, F32))]))
    if mode == AVG:
        assert halves.current(0).momentum == pytest.approx(1.0, rel=1e-6)
