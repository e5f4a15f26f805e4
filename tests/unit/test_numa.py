"""Memory nodes: who they are, and what becomes of pages, threads and bits where they matter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from syncer import kernels, pages
from syncer.layout import RDA, FragmentLayout, Layout
from syncer.machine import Node, memory_nodes
from syncer.merge import FragmentStore
from syncer.merge.buffers import BufferPool
from syncer.server.numa import place
from tests.unit.test_machine import tree

CORES = os.sched_getaffinity(0)
FIRST = min(CORES)
TWO = {"sys/devices/system/node/has_memory": "0-1\n",
       "sys/devices/system/node/node0/cpulist": f"{FIRST}\n",
       "sys/devices/system/node/node1/cpulist": "4000-4031,4064\n"}


@pytest.fixture(autouse=True)
def as_before():
    yield
    pages.spread([])
    pages.keep_apart(False)
    kernels.set_places([])


@pytest.mark.parametrize(("files", "expected"), [
    ({}, []),
    ({"sys/devices/system/node/has_memory": "0\n",
      "sys/devices/system/node/node0/cpulist": "0-4095\n"}, [(0, CORES)]),
    (TWO, [(0, {FIRST}), (1, set())]),
    (TWO | {"proc/self/status": "Name:\tx\nMems_allowed_list:\t1\n"}, [(1, set())]),
    (TWO | {"proc/self/status": "Mems_allowed_list:\t0-63\n"}, [(0, {FIRST}), (1, set())]),
    ({"sys/devices/system/node/online": "0,2-3\n"}, [(0, set()), (2, set()), (3, set())]),
    ({"sys/devices/system/node/has_memory": "all\n"}, []),
])
def test_nodes_are_those_whose_memory_this_process_may_have(tmp_path, files, expected):
    nodes = memory_nodes(tree(tmp_path, files))
    assert [(node.number, set(node.cores)) for node in nodes] == expected


def test_one_node_needs_no_policy():
    one = [Node(0, frozenset(CORES))]
    assert place("off", one) == ""
    assert place("spread", one) == place("local", one) == "a machine with more than one memory node"


def test_a_system_that_refuses_is_named_and_changes_nothing():
    nodes = [Node(1022, frozenset()), Node(1023, frozenset())]
    assert place("spread", nodes).startswith("a system that allows mbind: ")
    assert place("spread", [Node(0, frozenset()), Node(5000, frozenset())]).startswith(
        "a system that allows mbind: ")
    assert place("local", nodes) == "cores on more than one memory node"
    assert len(BufferPool().take(1_000_000)) == 1_000_000


def test_pages_are_dealt_out_where_the_system_can():
    """By the system's own account of this process; on a machine of one node that is node 0."""
    pages.free_kept()
    try:
        pages.spread([0])
    except OSError as error:
        pytest.skip(f"no mbind here: {error}")
    array = np.frombuffer(memoryview(BufferPool().take(1_000_000)), np.float32)
    array[:] = 1
    try:
        lines = Path("/proc/self/numa_maps").read_text().splitlines()
    except OSError as error:
        pytest.skip(f"no account here: {error}")
    starts = {int(line.split()[0], 16): line for line in lines}
    at = max(start for start in starts if start <= array.ctypes.data)
    assert "interleave:0" in starts[at]


def test_lasting_blocks_have_pages_of_their_own():
    pages.free_kept()
    pages.keep_apart()
    messages, fragments = BufferPool(), BufferPool(lasting=True)
    first = np.frombuffer(memoryview(messages.take(1 << 20)), np.float32)
    was = first.ctypes.data
    del first
    lasting = np.frombuffer(memoryview(fragments.take(1 << 20)), np.float32)
    assert lasting.ctypes.data != was
    assert np.frombuffer(memoryview(messages.take(1 << 20)), np.float32).ctypes.data == was
    del lasting
    pages.free_kept()
    assert pages.kept_bytes() == 0


def merged(threads: int) -> bytes:
    layout = Layout((FragmentLayout(RDA, (300_000, *[1000] * 40, 70_000)),))
    store = FragmentStore(layout, lr=0.7, momentum=0.9, threads=threads, delta_correction="heloco")
    rng = np.random.default_rng(7)
    store.adopt(0, rng.standard_normal(layout.largest, np.float32))
    for step in (1, 2):
        prepared = store.prepare(0, step, [
            (learner, 1, 1.0, rng.standard_normal(layout.largest, np.float32))
            for learner in range(3)])
        version = store.publish(prepared)
    return version.params.tobytes()


@pytest.mark.parametrize("threads", [2, 3])
def test_places_change_no_bit(threads):
    """In a thread of its own: a place is for the life of a thread."""
    script = ("import sys; from syncer import kernels; from tests.unit.test_numa import merged\n"
              f"assert kernels.set_places([[{FIRST}], [{max(CORES)}]])\n"
              f"sys.stdout.buffer.write(merged({threads}))")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert done.stdout == merged(1)


PINNED = """
from pathlib import Path
from syncer import kernels
from tests.unit.test_numa import CORES, FIRST, merged
kernels.set_places([[FIRST], [max(CORES)]])
merged(2)
allowed = [line.split()[1] for task in Path("/proc/self/task").iterdir()
           for line in (task / "status").read_text().splitlines()
           if line.startswith("Cpus_allowed_list")]
print(*sorted(allowed))
"""


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
@pytest.mark.skipif(not kernels.describe()["openmp"], reason="built without OpenMP")
def test_a_thread_keeps_to_the_cores_of_its_place():
    done = subprocess.run([sys.executable, "-c", PINNED], capture_output=True, text=True,
                          check=True)
    assert {str(FIRST), str(max(CORES))} <= set(done.stdout.split())
