"""A disk that fails while a checkpoint is read, restored or unmarked: one sentence, no remains."""

from __future__ import annotations

import errno
import os

import pytest

from syncer.checkpoint.files import Files
from syncer.checkpoint.marker import marker_path, remove_marker, write_marker
from syncer.checkpoint.reader import Checkpoint
from syncer.checkpoint.restore import restore
from syncer.checkpoint.writer import write_checkpoint
from syncer.errors import CheckpointError, CheckpointFormatError
from tests.checkpoint.cuts import Faulty, make_cut, names_in
from tests.descriptors import open_descriptors

FORMS = ("safetensors", "yeto-v3")


class Failing(Faulty):
    """`Faulty` also in the calls that look and read."""


def _failing(name: str):
    def call(self, *given, **options):
        self._count(name)
        return getattr(Files, name)(self, *given, **options)
    return call


for _name in ("open", "read", "status", "exists", "names"):
    setattr(Failing, _name, _failing(_name))


@pytest.mark.parametrize("form", FORMS)
def test_a_fault_at_every_call_of_a_read(tmp_path, form):
    path = tmp_path / "c"
    write_checkpoint(path, make_cut(), form)
    listing = Failing()
    with Checkpoint(path, listing) as checkpoint:
        checkpoint.load(threads=1)
    calls = [call for call in listing.calls if call != "close"]
    assert calls.count("read") >= 3
    assert "status" in calls
    before = open_descriptors()
    for index, call in enumerate(listing.calls):
        if call == "close":
            continue
        with pytest.raises(CheckpointError, match="Input/output error") as caught:  # noqa: SIM117
            with Checkpoint(path, Failing(index)) as checkpoint:
                checkpoint.load(threads=1)
        assert str(path) in str(caught.value), call
    assert open_descriptors() <= before


class Shrinking(Files):
    """The file is cut when its size has been looked at: the first look is at what it is."""

    def __init__(self, path, left: int):
        self.path, self.left, self.looks = path, left, 0

    def status(self, file):
        found = super().status(file)
        self.looks += 1
        if self.looks == 2:
            os.truncate(self.path, self.left)
        return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("left", [0, 4, 20, 100])
def test_a_file_that_shrinks_while_its_head_is_read(tmp_path, form, left):
    path = tmp_path / "c"
    write_checkpoint(path, make_cut(), form)
    with pytest.raises(CheckpointFormatError, match="shrank while it was read"):
        Checkpoint(path, Shrinking(path, left))


@pytest.mark.parametrize("form", FORMS)
def test_a_file_that_shrinks_while_its_tensors_are_read(tmp_path, form):
    path = tmp_path / "c"
    write_checkpoint(path, make_cut(), form)
    with Checkpoint(path) as checkpoint:
        os.truncate(path, checkpoint.size // 2)
        with pytest.raises(CheckpointFormatError, match="shrank while it was read"):
            checkpoint.load()
        with pytest.raises(CheckpointError, match="shrank while it was read"):
            restore(checkpoint, tmp_path / "other")
    assert names_in(tmp_path) == {"c"}


def test_a_fault_at_every_call_of_a_restore(tmp_path):
    """The run's own file has either all of its bytes or all of the restored ones."""
    path, source = tmp_path / "c", tmp_path / "c.step-3"
    write_checkpoint(source, make_cut(3))
    write_checkpoint(path, make_cut(9))
    write_marker(path, 9)
    old, new = path.read_bytes(), source.read_bytes()
    listing = Failing()
    with Checkpoint(source, listing) as checkpoint:
        opened = len(listing.calls)
        restore(checkpoint, path, listing)
    calls = listing.calls[opened:]
    assert {"link", "unlink", "rename", "sync_directory", "read", "write"} <= set(calls)
    words = []
    for index, call in enumerate(calls):
        for name in names_in(tmp_path):
            (tmp_path / name).unlink()
        source.write_bytes(new)
        path.write_bytes(old)
        write_marker(path, 9)
        files = Failing(opened + index)
        try:
            with Checkpoint(source, files) as checkpoint:
                restore(checkpoint, path, files)
        except CheckpointError as error:
            words.append(str(error))
        assert source.read_bytes() == new, call
        assert path.read_bytes() in (old, new), call
    assert len(words) >= len(calls) // 2
    assert all("Input/output error" in text for text in words), words


def test_a_file_system_without_second_names(tmp_path):
    """What is there cannot be set aside, so it is not replaced."""
    path, source = tmp_path / "c", tmp_path / "other"
    write_checkpoint(source, make_cut(3))
    write_checkpoint(path, make_cut(9))
    old = path.read_bytes()
    files = Faulty(0, only="link", number=errno.EPERM, times=99)
    with (Checkpoint(source, files) as checkpoint,
          pytest.raises(CheckpointError, match="move it away yourself, then restore again")):
        restore(checkpoint, path, files)
    assert path.read_bytes() == old
    assert names_in(tmp_path) == {"c", "other"}


@pytest.mark.parametrize("call", ["exists", "unlink", "sync_directory"])
def test_a_marker_that_cannot_be_removed(tmp_path, call):
    write_marker(tmp_path / "c", 4)
    name = marker_path(tmp_path / "c")
    with pytest.raises(CheckpointError, match="could not be removed: Input/output error") as caught:
        remove_marker(tmp_path / "c", Failing(0, only=call))
    assert name in str(caught.value)
