"""Clipping and trimmed means against their golden values, bit by bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from syncer.layout import AVG, RDA, FragmentLayout, Layout
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
