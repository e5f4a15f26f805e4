"""Clipping and trimmed means against their golden values, bit by bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from syncer.layout import AVG, ISO, RDA, FragmentLayout, Layout
from syncer.merge import FragmentStore
from tests.golden import merge_reference, robust_reference

GOLDEN = json.loads(Path(__file__).with_name("robust_golden.json").read_text())
NUMELS = tuple(merge_reference.NUMELS)
GRADS = [merge_reference.G0, merge_reference.G1, robust_reference.G2, robust_reference.G3,
         robust_reference.G4]


def merged(mode, grads, threads=1, **options):
    """What mu = 0 leaves in the momentum. Adding +-0 can turn a -0 into +0: none is golden."""
    store = FragmentStore(Layout((FragmentLayout(mode, NUMELS),)), lr=1.0, momentum=0.0,
                          threads=threads, **options)
    store.adopt(0, np.zeros(6, np.float32), state={"momentum": merge_reference.MOM})
    contributions = [(i, 1, w, g) for i, (w, g) in
                     enumerate(zip(GOLDEN["weights"], grads, strict=False))]
    return merge_reference.bits(store.publish(store.prepare(0, 1, contributions)).momentum)


def test_generator_reproduces_the_file_exactly():
    text = json.dumps(robust_reference.golden(), indent=1)
    assert text == Path(__file__).with_name("robust_golden.json").read_text().rstrip("\n")


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("mode", [AVG, RDA])
@pytest.mark.parametrize("correction", ["none", "heloco"])
@pytest.mark.parametrize(("name", "limit"), [("median", "median"), ("value", 1.5)])
def test_clip(name, limit, correction, mode, threads):
    prefix = f"clip_{name}_heloco" if correction == "heloco" else f"clip_{name}"
    key = f"{prefix}_{'avg' if mode == AVG else 'rda'}"
    result = merged(mode, GRADS, threads, clip_norm=limit, delta_correction=correction)
    assert result == GOLDEN[key]


@pytest.mark.parametrize(("name", "robust", "count"), [
    ("trimmed_mean_0", 0, 5), ("trimmed_mean_1", 1, 5), ("trimmed_mean_2", 2, 5),
    ("median_of_five", "median", 5), ("median_of_four", "median", 4),
    ("median_of_two", "median", 2), ("median_of_two", 0, 2),
    # too few pushes for F = 2: as many are dropped as leave one
    ("median_of_five", 9, 5), ("median_of_four", 2, 4),
])
def test_trimmed_means(name, robust, count):
    assert merged(AVG, GRADS[:count], robust=robust) == GOLDEN[name]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("correction", ["none", "heloco"])
@pytest.mark.parametrize(("drop", "robust"), [(0, 0), (1, 1), (2, 2), (2, "median")])
def test_directions_and_lengths_without_outliers(drop, robust, correction, threads):
    name = f"rda_trimmed_{'heloco_' if correction == 'heloco' else ''}{drop}"
    found = merged(RDA, GRADS, threads, robust=robust, delta_correction=correction)
    assert found == GOLDEN[name]


def test_directions_that_cancel_are_averaged_as_they_are():
    grads = [GRADS[0], -GRADS[0], np.zeros(6, np.float32)]
    assert merged(RDA, grads, robust=0) == GOLDEN["rda_trimmed_cancelling"]


@pytest.mark.parametrize("mode", [RDA, ISO])
@pytest.mark.parametrize("robust", [1, "median"])
@pytest.mark.parametrize("wild", [1e30, -1e6, 0.0])
def test_one_of_five_rules_neither_direction_nor_length(mode, robust, wild):
    """The result stays near that of the honest four; the mean goes with the fifth."""
    rng = np.random.default_rng(5)
    common = rng.standard_normal(64)
    honest = [(common + 0.3 * rng.standard_normal(64)).astype(np.float32) for _ in range(4)]
    shapes = ((8, 8),) if mode == ISO else ()

    def result(grads, **options):
        store = FragmentStore(Layout((FragmentLayout(mode, (64,), shapes),)), lr=1.0, momentum=0.0,
                              **options)
        store.adopt(0, np.zeros(64, np.float32))
        prepared = store.prepare(0, 1, [(i, 1, 1.0, g) for i, g in enumerate(grads)])
        return prepared.result.params.astype(np.float64)

    wanted = result(honest)
    found = result([*honest[:2], (wild * common).astype(np.float32), *honest[2:]], robust=robust)
    lengths = np.linalg.norm(wanted), np.linalg.norm(found)
    assert wanted @ found / lengths[0] / lengths[1] > 0.9
    assert 0.8 < lengths[1] / lengths[0] < 1.25
