"""Blocks of memory: used again in any size, moved rather than faulted, and bounded."""

import random
import resource
import subprocess
import sys

import numpy as np
import pytest

from syncer import pages
from syncer.layout import RDA, FragmentLayout, Layout
from syncer.merge.buffers import BufferPool
from syncer.protocol import DTYPE_F32, Msg
from syncer.wire import encode
from syncer.wire.frames import FrameReader
from syncer.wire.limits import Limits

KIB, MIB = 1024, 1024 * 1024
PAGE, GRAIN = 2 * MIB, 64 * KIB
LIMITS = Limits.for_server(Layout((FragmentLayout(RDA, (128 * MIB,)),)), DTYPE_F32)


@pytest.fixture(autouse=True)
def nothing_kept():
    """Every test begins without free pages, and leaves the bound as it was."""
    pages.free_kept()
    assert pages.kept_bytes() == 0
    yield
    pages.keep_at_most(pages.KEPT_BYTES_MAX)


@pytest.fixture
def pool():
    return BufferPool()


def block(pool: BufferPool, size: int, zero: bool = False) -> np.ndarray:
    return np.frombuffer(memoryview(pool.take(size // 4, zero)), np.float32)


def place(array: np.ndarray) -> int:
    return array.ctypes.data


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def receive(reader: FrameReader, size: int) -> memoryview:
    """A bare INIT frame that is received without its bytes being written (they do not matter)."""
    [*_] = reader.feed(encode.frame_header(Msg.INIT_PARAMS, size))
    while True:
        for msg_type, payload in reader.received(len(reader.buffer())):
            assert msg_type == Msg.INIT_PARAMS
            return payload


def test_a_block_is_used_again_once_its_last_view_is_gone(pool):
    first = block(pool, 6 * MIB)
    was, part = place(first), first[100:200]
    del first
    held = block(pool, 6 * MIB)
    assert place(held) != was, "a view of the first is still there"
    del part
    assert place(block(pool, 6 * MIB - 40)) == was


def test_received_bytes_and_decoded_values_share_their_memory(pool):
    """They take turns, so that neither needs pages of its own."""
    reader = FrameReader(LIMITS)
    message = receive(reader, 8 * MIB)
    was = np.frombuffer(message, np.uint8).ctypes.data
    message.release()
    del message
    values = block(pool, 8 * MIB)
    assert place(values) == was
    assert pages.kept_bytes() == 0


def test_blocks_beside_each_other_become_one(pool):
    whole = block(pool, 16 * MIB)
    was = place(whole)
    del whole
    quarters = [block(pool, 4 * MIB) for _ in range(4)]
    assert sorted(map(place, quarters)) == [was + 4 * MIB * i for i in range(4)]
    del quarters[1], quarters[2]
    quarters.clear()
    assert place(block(pool, 16 * MIB)) == was
    assert pages.kept_bytes() == 16 * MIB


def test_free_pages_of_many_places_are_moved_into_one_and_not_faulted_again(pool):
    blocks = [block(pool, PAGE) for _ in range(32)]
    for each in blocks:
        each[:] = 1
    kept = blocks[::2]
    del blocks, each
    free = pages.kept_bytes()
    assert free == 16 * PAGE
    before = faults()
    whole = block(pool, 16 * PAGE)
    whole[:] = 2
    assert faults() - before < 64, "as many as a few objects of Python take"
    assert pages.kept_bytes() == 0
    assert all((each == 1).all() for each in kept)


def test_what_others_hold_is_never_written(pool):
    """Against a plain account of who owns which bytes; in any order, and in sizes of every kind."""
    seed = random.Random(4711)
    held: list[tuple[np.ndarray, float]] = []
    sizes = [4 * KIB, 60 * KIB, 64 * KIB, 100 * KIB, MIB, 2 * MIB, 3 * MIB + 4, 5 * MIB]
    most = 0
    for turn in range(400):
        if len(held) > 12 or (held and seed.random() < 0.5):
            array, value = held.pop(seed.randrange(len(held)))
            assert (array == value).all()
            del array
        else:
            zero = seed.random() < 0.2
            array = block(pool, seed.choice(sizes), zero)
            assert not zero or not array.any()
            array[:] = turn
            held.append((array, turn))
            del array
        most = max(most, pages.used_bytes())
        # of a page that is in use in part the rest cannot be moved
        assert pages.used_bytes() + pages.kept_bytes() <= most + 14 * PAGE
    for array, value in held:
        assert (array == value).all()


def test_zero_is_zero_also_in_memory_that_was_used(pool):
    first = block(pool, 3 * MIB)
    first[:] = 7
    del first
    assert not block(pool, 3 * MIB, zero=True).any()


def test_free_pages_are_bounded(pool):
    pages.keep_at_most(8 * MIB)
    blocks = [block(pool, 4 * MIB) for _ in range(5)]
    del blocks
    assert pages.kept_bytes() == 8 * MIB
    pages.keep_at_most(MIB)
    assert pages.kept_bytes() == MIB


def test_free_pages_go_when_memory_is_short(pool):
    held = block(pool, 5 * MIB)
    pages.free_kept()
    assert pages.kept_bytes() == 0
    del held
    assert pages.kept_bytes() >= 5 * MIB


def test_small_messages_and_messages_of_strangers_are_no_blocks():
    before = pages.used_bytes()
    small = receive(FrameReader(LIMITS), 32 * KIB)
    stranger = FrameReader(Limits.first_frame())
    [*_] = stranger.feed(encode.frame_header(Msg.HELLO, 16 * MIB))
    [(msg_type, payload)] = stranger.received(len(stranger.buffer()))
    assert (msg_type, len(payload), len(small)) == (Msg.HELLO, 16 * MIB, 32 * KIB)
    assert pages.used_bytes() == before


@pytest.mark.parametrize("numel", [1 << 46, (1 << 61) - 1])
def test_memory_that_is_not_there_is_said(pool, numel):
    with pytest.raises(MemoryError, match=f"no memory for a fragment buffer of {4 * numel} bytes"):
        pool.take(numel)


LIMITED = """
import resource
import numpy as np
from syncer import pages
from syncer.merge.buffers import BufferPool
pool = BufferPool()
space = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (space + (60 << 20),) * 2)
held = [pool.take(4 << 20) for _ in range(3)]
try:
    pool.take(4 << 20)
except MemoryError:
    print("none left")
del held
assert pages.kept_bytes() == 48 << 20
larger = np.frombuffer(memoryview(pool.take(13 << 20)), np.float32)
larger[:] = 1
print("from what was free")
"""


def test_free_pages_are_given_back_for_a_block_that_finds_no_room():
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True,
                          check=False)
    assert (done.stdout.split("\n")[:2], done.stderr) == (["none left", "from what was free"], "")
