"""How bytes go into a file: in aligned pieces, past the cache without copies where that can be."""

from __future__ import annotations

import errno
import mmap
import os

import numpy as np
import pytest

from syncer.checkpoint import pieces
from syncer.checkpoint.files import Behind, Files
from syncer.checkpoint.pieces import CALL_BYTES, PIECE_BYTES
from syncer.checkpoint.reader import Checkpoint
from syncer.checkpoint.writer import write_checkpoint
from syncer.layout import FragmentLayout, Layout
from tests.checkpoint.cuts import LARGE, Cached, Faulty, failure_of, make_cut, names_in


def test_short_writes_are_continued(tmp_path):
    class Short(Files):
        def write(self, descriptor, buffers, offset):
            first = memoryview(buffers[0])
            return super().write(descriptor, [first[: max(1, len(first) // 3)]], offset)

    cut = make_cut(4, layout=LARGE)
    write_checkpoint(tmp_path / "whole", cut)
    write_checkpoint(tmp_path / "short", cut, files=Short())
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "short").read_bytes()


class Watching(Files):
    """Notes what was written where, and what the kernel was asked to write back."""

    def __init__(self, number: int | None = None):
        self.writes, self.written_back, self.number = [], [], number

    def write(self, descriptor, buffers, offset):
        self.writes.append((offset, sum(map(len, buffers))))
        return super().write(descriptor, buffers, offset)

    def begin_writeback(self, descriptor, offset, length):
        self.written_back.append((offset, length))
        if self.number is not None:
            raise OSError(self.number, os.strerror(self.number))
        super().begin_writeback(descriptor, offset, length)


def test_pieces_are_large_and_aligned(tmp_path):
    files = Watching()
    write_checkpoint(tmp_path / "c", make_cut(4, layout=LARGE), files=files)
    body = files.writes[:-1]
    assert all(at % CALL_BYTES == 0 for at, _ in body)
    assert all(size == CALL_BYTES for _, size in body[:-1])
    assert files.writes[-1] == (0, 4096), "the header is filled in last"


@pytest.mark.parametrize("number", [None, errno.EINVAL, errno.EIO])
def test_the_disk_has_work_while_a_file_is_written(tmp_path, number):
    """Not only at the fsync; a kernel that takes no such advice does what it does."""
    files = Watching(number)
    write_checkpoint(tmp_path / "c", make_cut(4, layout=LARGE), files=files)
    size = (tmp_path / "c").stat().st_size
    assert files.written_back == [(at, PIECE_BYTES)
                                  for at in range(0, size - PIECE_BYTES + 1, PIECE_BYTES)]
    with Checkpoint(tmp_path / "c") as checkpoint:
        checkpoint.load()


def test_one_write_call_takes_no_more_buffers_than_the_system_does():
    assert os.sysconf("SC_IOV_MAX") >= pieces.BUFFERS_MAX
    assert PIECE_BYTES % pieces.BLOCK_BYTES == 0


# --------------------------------------------------------------------------- past the cache
def test_direct_writes_give_the_same_file(tmp_path):
    """On a file system that takes them; one that does not says so in a sentence."""
    cut = make_cut(4, layout=LARGE)
    write_checkpoint(tmp_path / "cached", cut)
    error = failure_of(tmp_path / "direct", cut, Files(), direct=True)
    if error is not None:
        assert error.number == errno.EINVAL
        assert "leave --checkpoint-direct out" in str(error)
    else:
        assert (tmp_path / "direct").read_bytes() == (tmp_path / "cached").read_bytes()


def test_a_header_of_more_than_one_piece_is_rewritten_in_pieces(tmp_path, monkeypatch):
    """22,000 fragments have one; with direct writes each piece goes through one small buffer."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 8192)
    monkeypatch.setattr(pieces, "CALL_BYTES", 4096)
    fragments = tuple(FragmentLayout(0, (40,)) for _ in range(100))
    cut = make_cut(4, layout=Layout(fragments))
    write_checkpoint(tmp_path / "cached", cut)

    write_checkpoint(tmp_path / "direct", cut, files=Cached(), direct=True)
    assert (tmp_path / "direct").read_bytes() == (tmp_path / "cached").read_bytes()
    with Checkpoint(tmp_path / "direct") as checkpoint:
        checkpoint.load()
        assert min(checkpoint.places.values()) > 2 * 8192


class Picky(Behind):
    """A file in the cache that takes what a device for direct writes takes: whole blocks, out of
    memory that is aligned to `block` bytes. `copied`: the writes whose memory is a copy."""

    def __init__(self, block: int, files: Files | None = None):
        super().__init__(files or Files())
        self.block, self.direct, self.refused, self.sizes = block, True, 0, []

    def create(self, path, *, direct=False):
        return super().create(path)

    def write(self, descriptor, buffers, offset):
        if self.direct:
            assert offset % pieces.BLOCK_BYTES == 0
            assert sum(map(len, buffers)) % pieces.BLOCK_BYTES == 0
            if any((pieces.address(buffer) | len(buffer)) % self.block for buffer in buffers):
                self.refused += 1
                raise OSError(errno.EINVAL, "memory")
        self.sizes.append((offset, [pieces.address(buffer) for buffer in buffers]))
        return super().write(descriptor, buffers, offset)

    def end_direct(self, descriptor):
        self.direct = False


def aligned(cut, to: int):
    """The cut with parameters and momentum that begin `to` bytes behind a page."""
    for version in cut.fragments:
        for name, array in [("params", version.params), *version.state.items()]:
            memory = mmap.mmap(-1, array.nbytes + to)
            copy = np.frombuffer(memory, np.float32, array.size, to)
            copy[:] = array
            if name == "params":
                version.params = copy
            else:
                version.state[name] = copy
    return cut


@pytest.mark.parametrize(("begin", "block", "refused"), [
    (0, 512, 0), (512, 512, 0), (512, 4096, 1), (4, 512, 0)])
def test_direct_writes_copy_only_what_is_not_aligned(tmp_path, begin, block, refused):
    """Memory aligned as the file is goes to the disk as it is, where the device takes it; the bytes
    are those of a write through the cache in any case."""
    layout = Layout((FragmentLayout(0, (5 * PIECE_BYTES // 4,)), FragmentLayout(0, (1_000_001,))))
    cut = aligned(make_cut(4, layout=layout), begin)
    write_checkpoint(tmp_path / "cached", cut)
    picky = Picky(block)
    write_checkpoint(tmp_path / "direct", cut, files=picky, direct=True)
    assert (tmp_path / "direct").read_bytes() == (tmp_path / "cached").read_bytes()
    assert picky.refused == refused
    params = cut.fragments[0].params
    first = params.ctypes.data
    inside = [at for _, addresses in picky.sizes for at in addresses
              if first <= at < first + params.nbytes]
    assert bool(inside) == (begin % block == 0)


@pytest.mark.parametrize("begin", [0, 4])
@pytest.mark.parametrize("fail_at", range(6))
def test_a_direct_write_that_fails_aside_is_told(tmp_path, begin, fail_at):
    """Whichever piece it was, and whoever wrote it: there is the old file, and nothing else."""
    write_checkpoint(tmp_path / "c", make_cut(3))
    layout = Layout((FragmentLayout(0, (2 * PIECE_BYTES // 4 + 77,)),))
    cut = aligned(make_cut(4, layout=layout), begin)
    faulty = Faulty(fail_at, only="write", number=errno.ENOSPC)
    error = failure_of(tmp_path / "c", cut, Picky(512, faulty), direct=True)
    assert error is not None
    assert (error.number, error.call) == (errno.ENOSPC, "write")
    assert names_in(tmp_path) == {"c"}
    with Checkpoint(tmp_path / "c") as checkpoint:
        assert checkpoint.facts.step == 3
