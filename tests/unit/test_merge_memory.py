"""Peak memory of a merge, as the system sees it: a process of its own per case."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

MI = 1 << 20
PROGRAM = """
import sys
import numpy as np
from pathlib import Path
from syncer.layout import AVG, ISO, RDA, FragmentLayout, Layout
from syncer.merge import FragmentStore

def status(key):
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) * 1024

case, n, learners = sys.argv[1], 4 << 20, 3
mode = {"avg": AVG, "iso": ISO}.get(case.split()[0], RDA)
shapes = ((32, 32768),) * 4 if mode == ISO else ()
numels = tuple(r * c for r, c in shapes) or (n - 5, 5)
options = {"delta_correction": "heloco"} if "heloco" in case else {}
store = FragmentStore(Layout((FragmentLayout(mode, numels, shapes),)), lr=0.7, momentum=0.9,
                      threads=2, merge_stats="stats" in case,
                      robust=1 if "robust" in case else None,
                      clip_norm=1.0 if "clip" in case else None, **options)
store.adopt(0, np.full(n, 0.5, np.float32), state={"momentum": np.full(n, 0.25, np.float32)})
rng = np.random.default_rng(0)
gradients = [rng.standard_normal(n, dtype=np.float32) for _ in range(learners)]
small = FragmentStore(Layout((FragmentLayout(mode, (4,), ((2, 2),) if shapes else ()),)), lr=0.7,
                      momentum=0.9, threads=2)
small.adopt(0, np.zeros(4, np.float32))
small.publish(small.prepare(0, 1, [(0, 1, 1.0, np.ones(4, np.float32))]))  # what loads once
Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
before = status("VmRSS")
if "fold" in case:
    fold = store.fold(0, "streaming")
    for i, g in enumerate(gradients):
        fold.add(i, 1, 1.0, g)
    held = status("VmHWM") - before
    store.publish(store.prepare_fold(1, fold))
else:
    held = 0
    store.publish(store.prepare(0, 1, [(i, 1, 1.0, g) for i, g in enumerate(gradients)]))
print(held / n, (status("VmHWM") - before) / n, store.live_bytes / n)
"""
# bytes per parameter: most for the merge beyond its inputs, and for the fold before it
CASES = {
    "avg robust": (8, 0), "rda heloco clip stats": (8, 0),
    "avg fold": (12, 4), "rda fold heloco clip": (16, 8),
    "iso": (8 + 16, 0),  # two of the four tensors at a time: 32 of theirs
}
SLACK = 6 * MI / (4 * MI)
"""Thread stacks, arenas and huge pages at the ends of three arrays."""


@pytest.mark.parametrize("case", CASES)
def test_a_merge_takes_no_more_than_its_table_says(case):
    done = subprocess.run([sys.executable, "-c", PROGRAM, case], capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr
    held, peak, live = (float(x) for x in done.stdout.split())
    merge_max, fold_max = CASES[case]
    assert peak <= merge_max + SLACK
    assert held <= fold_max + SLACK
    assert peak >= 8 - SLACK  # a result was really written
    assert live == 8  # and nothing but the current version is held
