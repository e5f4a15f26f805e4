"""A checkpoint that several threads read: the same arrays, and the first damage of the file."""

from __future__ import annotations

import errno
import threading

import numpy as np
import pytest

from syncer.checkpoint.files import Files
from syncer.checkpoint.reader import Checkpoint
from syncer.checkpoint.writer import write_checkpoint
from syncer.errors import CheckpointError, CheckpointFormatError
from syncer.layout import FragmentLayout, Layout
from tests.checkpoint.cuts import make_cut

MANY = Layout(tuple(FragmentLayout(0, (n,)) for n in (300_000, 1_100_001, 7, 450_000, 299_999, 64)))
ONE = Layout((FragmentLayout(0, (1_400_001,)),))
THREADS = (1, 2, 3, 8)


@pytest.mark.parametrize("layout", [MANY, ONE], ids=["many", "one"])
@pytest.mark.parametrize("optimizer", ["sgd", "nesterov", "delayed-nesterov"])
def test_any_number_of_threads_reads_the_same(tmp_path, layout, optimizer):
    cut = make_cut(9, layout=layout, optimizer=optimizer)
    write_checkpoint(tmp_path / "c", cut)
    with Checkpoint(tmp_path / "c") as checkpoint:
        for threads in THREADS:
            for version, found in zip(cut.fragments, checkpoint.load(threads=threads), strict=True):
                assert found.version == version.version
                assert found.params.tobytes() == version.params.tobytes()
                assert found.state.keys() == version.state.keys()
                for name, array in version.state.items():
                    assert found.state[name].tobytes() == array.tobytes()


def damaged(path, changes) -> None:
    """The file with other bytes: (fragment, array, element, value) each."""
    with Checkpoint(path) as checkpoint:
        places = dict(checkpoint.places)
    with open(path, "r+b") as file:
        for fragment, array, element, value in changes:
            file.seek(places[fragment, array] + 4 * element)
            file.write(np.float32(value).tobytes())


@pytest.mark.parametrize("threads", THREADS)
def test_the_first_damage_of_the_file_is_told(tmp_path, threads):
    write_checkpoint(tmp_path / "c", make_cut(9, layout=MANY))
    damaged(tmp_path / "c", [(1, "momentum", 1_100_000, 3.5), (2, "params", 0, np.nan),
                             (4, "params", 5, np.inf)])
    with Checkpoint(tmp_path / "c") as checkpoint:
        with pytest.raises(CheckpointFormatError, match=r"fragments\.1\.momentum .*SHA-256"):
            checkpoint.prove(threads=threads)
        with pytest.raises(CheckpointFormatError, match=r"fragments\.2\.params .*finite values"):
            checkpoint.load(threads=threads, verify=False)


@pytest.mark.parametrize("threads", THREADS[1:])
def test_a_read_that_fails_ends_the_others(tmp_path, threads):
    """Nobody reads on once it is known that the file is not to be had."""
    place = 1 << 62

    class Failing(Files):
        def read(self, descriptor, buffers, offset):
            if offset >= place:
                raise OSError(errno.EIO, "Input/output error")
            return super().read(descriptor, buffers, offset)

    write_checkpoint(tmp_path / "c", make_cut(9, layout=MANY))
    before = set(threading.enumerate())
    with Checkpoint(tmp_path / "c", Failing()) as checkpoint:
        place = checkpoint.places[3, "params"]
        with pytest.raises(CheckpointError, match=r"fragments\.3\.params .*Input/output error"):
            checkpoint.load(threads=threads)
    assert set(threading.enumerate()) <= before


def test_progress_ends_at_everything(tmp_path):
    cut = make_cut(9, layout=MANY)
    write_checkpoint(tmp_path / "c", cut)
    for threads in THREADS:
        told = []
        with Checkpoint(tmp_path / "c") as checkpoint:
            checkpoint.prove(threads=threads, progress=lambda *done, told=told: told.append(done))
        assert told == sorted(told)
        assert told[-1] == (cut.facts.state_bytes, cut.facts.state_bytes)
