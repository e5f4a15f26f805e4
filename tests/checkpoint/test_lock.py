"""The lock of a path: one holder, whatever it is called, and a sentence for everybody else."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading

import pytest

from syncer.checkpoint.lock import PathLock
from syncer.errors import ConfigError
from tests.checkpoint.cuts import names_in
from tests.checkpoint.locking import flock_fails
from tests.descriptors import open_descriptors

PATIENCE_S = 60.0
HOLDER = """
import sys
from syncer.checkpoint.lock import PathLock
lock = PathLock(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
lock.close()
"""


def test_a_second_process_is_told_the_first_ones_pid(tmp_path):
    path = str(tmp_path / "c")
    with subprocess.Popen([sys.executable, "-c", HOLDER, path], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=rf"in use by process {holder.pid}\b.*c\.lock"):
            PathLock(path)
        holder.kill()
        holder.wait()
        assert names_in(tmp_path) == {"c.lock"}, "a killed process leaves the file"
        with PathLock(path):
            assert (tmp_path / "c.lock").read_text().split()[0] == str(os.getpid())
        assert not names_in(tmp_path)


def test_within_a_process_too(tmp_path):
    with PathLock(tmp_path / "c"), pytest.raises(ConfigError, match=str(os.getpid())):
        PathLock(tmp_path / "c")
    with PathLock(tmp_path / "c"), PathLock(tmp_path / "d"):
        pass


def test_one_lock_under_every_name(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "c").symlink_to(tmp_path / "disk" / "run")
    (tmp_path / "chain").symlink_to(tmp_path / "c")
    with PathLock(tmp_path / "chain"):
        assert names_in(tmp_path / "disk") == {"run.lock"}
        for name in ("c", "chain", "disk/run"):
            with pytest.raises(ConfigError, match=str(os.getpid())):
                PathLock(tmp_path / name)


def test_a_link_into_a_directory_that_is_not_there(tmp_path):
    (tmp_path / "c").symlink_to(tmp_path / "nowhere" / "run")
    with pytest.raises(ConfigError, match="name a file in a directory"):
        PathLock(tmp_path / "c")


def test_many_takers_of_one_lock(tmp_path):
    """Removing the file at the end must not let two in."""
    inside, most, wrong = [0], [0], []

    def take():
        for _ in range(50):
            try:
                with PathLock(tmp_path / "c"):
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                    if inside[0] != 1:
                        wrong.append(inside[0])
                    inside[0] -= 1
            except ConfigError:
                continue

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert most == [1]
    assert not wrong
    assert not names_in(tmp_path)


def test_a_directory_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="name a file in a directory"):
        PathLock(tmp_path / "nowhere" / "c")


def test_a_name_that_is_too_long_for_a_lock(tmp_path):
    with pytest.raises(ConfigError, match="give it a shorter name"):
        PathLock(tmp_path / ("c" * 253))


@pytest.mark.parametrize(("number", "times", "advice"), [
    (errno.EOPNOTSUPP, 1, "its file system has no locks here; mount it with them"),
    (errno.EDQUOT, 99, "; make room there"), (errno.EIO, 99, "Input/output error"),
    (errno.EIO, 1, None)])
def test_a_file_system_that_does_not_lock(tmp_path, monkeypatch, number, times, advice):
    """A moment's trouble passes; what stays is said, and no descriptor is left."""
    begun = open_descriptors()
    flock_fails(monkeypatch, number, times)
    if advice is None:
        PathLock(tmp_path / "c").close()
    else:
        with pytest.raises(ConfigError, match=advice) as caught:
            PathLock(tmp_path / "c")
        assert f"{tmp_path / 'c'} cannot be locked with {tmp_path / 'c.lock'}" in str(caught.value)
    assert open_descriptors() <= begun
