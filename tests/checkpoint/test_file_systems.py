"""File systems that are not all alike: access lists, attributes, calls that some do not have."""

from __future__ import annotations

import errno
import os
import socket
import struct

import pytest

from syncer.checkpoint import command
from syncer.checkpoint.atomic import ACCESS_LIST, WriteError
from syncer.checkpoint.files import Files, Patient
from syncer.checkpoint.lock import PathLock
from syncer.checkpoint.reader import Checkpoint
from syncer.checkpoint.tolerant import Tolerant
from syncer.checkpoint.writer import write_checkpoint
from syncer.cli import main
from syncer.config import Config
from syncer.errors import ConfigError
from syncer.server.log import Log
from syncer.server.persistence import Persistence
from tests.checkpoint.cuts import Faulty, make_cut, names_in
from tests.checkpoint.locking import flock_fails

READERS = b"\2\0\0\0" + b"".join(
    struct.pack("<HHI", tag, perm, owner) for tag, perm, owner in (
        (1, 6, 0xFFFFFFFF), (2, 4, 12345), (4, 4, 0xFFFFFFFF), (16, 6, 0xFFFFFFFF),
        (32, 0, 0xFFFFFFFF)))
"""An access list that lets one more user read."""


def test_access_lists_and_attributes_are_kept(tmp_path):
    """A file without an access list does not get the default one of its directory."""
    path = tmp_path / "c"
    write_checkpoint(path, make_cut(1))
    try:
        os.setxattr(path, "user.owner", b"team 7")
        os.setxattr(path, ACCESS_LIST, READERS)
    except OSError as error:
        pytest.skip(f"ATTRIBUTES WERE NOT TESTED: this file system has none: {error.strerror}")
    path.chmod(0o660)
    before = {name: os.getxattr(path, name) for name in os.listxattr(path)}
    assert len(before) == 2
    write_checkpoint(path, make_cut(2))
    assert {name: os.getxattr(path, name) for name in os.listxattr(path)} == before
    assert path.stat().st_mode & 0o777 == 0o660
    os.removexattr(path, ACCESS_LIST)
    os.setxattr(tmp_path, "system.posix_acl_default", READERS)
    write_checkpoint(path, make_cut(3))
    assert os.listxattr(path) == ["user.owner"]
    assert path.stat().st_mode & 0o777 == 0o660


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSPC])
def test_an_attribute_that_may_not_be_given_is_said_once(tmp_path, number):
    class Attributed(Faulty):
        def attributes(self, file):
            return {} if isinstance(file, int) else {"user.a": b"1", "user.b": b"2",
                                                     "security.ima": b"of the old bytes"}

    told = []
    inner = Attributed(0, only="set_attribute", number=number, times=99)
    files = Tolerant(inner, lambda text, fields: told.append((text, fields["attribute"])))
    for step in (1, 2, 3):
        write_checkpoint(tmp_path / "c", make_cut(step), files=files)
    assert inner.calls.count("set_attribute") == 4, "two attributes of two replaced files"
    assert told == [("an attribute of the replaced file could not be kept", "user.a")]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_directory_without_fsync_is_said_once(tmp_path, number):
    told = []
    inner = Faulty(0, only="sync_directory", number=number, times=99)
    files = Tolerant(inner, lambda text, fields: told.append(text))
    for step in (1, 2):
        write_checkpoint(tmp_path / "c", make_cut(step), files=files)
        with Checkpoint(tmp_path / "c") as checkpoint:
            assert checkpoint.facts.step == step
    assert told == ["the file system cannot make a new name durable"]
    with pytest.raises(WriteError, match="fsync of the directory"):
        write_checkpoint(tmp_path / "c", make_cut(3),
                         files=Tolerant(Faulty(0, only="sync_directory"), lambda *given: None))


# ----------------------------------------------------------------------------------- locks
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_is_refused_with_the_way_out(tmp_path, monkeypatch, number):
    flock_fails(monkeypatch, number)
    words = r"has no locks here; mount it with them \(Lustre: -o flock; NFS: .*, or name a file on"
    with pytest.raises(ConfigError, match=words) as caught:
        PathLock(tmp_path / "c")
    assert os.strerror(number) in str(caught.value)
    assert "may write to" not in str(caught.value)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ENOLCK])
def test_a_lock_that_fails_once_is_tried_again(tmp_path, monkeypatch, number):
    flock_fails(monkeypatch, number, times=1)
    with PathLock(tmp_path / "c"):
        pass
    assert not names_in(tmp_path)


def test_the_lock_names_host_and_process(tmp_path):
    """A process id says nothing to somebody on another host of a network file system."""
    with PathLock(tmp_path / "c"):
        assert (tmp_path / "c.lock").read_text() == f"{os.getpid()}\n{socket.gethostname()}\n"
        with pytest.raises(ConfigError, match=rf"process {os.getpid()}, which holds .*\.lock on "
                                              f"{socket.gethostname()}; stop it"):
            PathLock(tmp_path / "c")
        (tmp_path / "c.lock").write_text("77\n")  # of an earlier version
        with pytest.raises(ConfigError, match=r"in use by process 77, which holds .*\.lock; stop"):
            PathLock(tmp_path / "c")


def test_a_name_too_long_for_its_lock(tmp_path):
    with pytest.raises(ConfigError, match="File name too long; give it a shorter name"):
        PathLock(tmp_path / ("n" * 252))


# -------------------------------------------------------------------------------- patience
LOOKS = ["open", "read", "status", "attributes", "exists", "names"]


class Stale(Files):
    """One call fails once, as on a network file system whose server has come back."""

    def __init__(self, only, number=errno.ESTALE):
        self.only, self.number = only, number


def _stale(name):
    def call(self, *given, **options):
        if self.only == name:
            self.only = None
            raise OSError(self.number, os.strerror(self.number))
        return getattr(Files, name)(self, *given, **options)
    return call


CALLS = [name for name in vars(Files) if not name.startswith("_")
         and name not in ("remark", "real_path", "lock", "end_direct")]
for _name in CALLS:
    setattr(Stale, _name, _stale(_name))


@pytest.mark.parametrize("call", [*LOOKS, "sync_directory", "unlink"])
def test_a_stale_handle_at_the_start_is_looked_up_again(tmp_path, call):
    path = tmp_path / "c"
    write_checkpoint(path, make_cut(7))
    (tmp_path / "c.tmp").write_bytes(b"left")
    config = Config(learners=2, total_steps=9, checkpoint_path=str(path), resume=True)
    persistence = Persistence(config, Log("error", "json", lambda line: None), Stale(call))
    assert persistence.resumed.step == 7
    persistence.begin()
    persistence.close()
    assert names_in(tmp_path) == {"c", "c.epoch"}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("action", ["verify", "convert", "restore"])
def test_every_command_has_the_patience_of_a_run(tmp_path, monkeypatch, capsys, call, action):
    path, kept = tmp_path / "c", tmp_path / "c.step-7"
    write_checkpoint(kept, make_cut(7))
    write_checkpoint(path, make_cut(8))
    monkeypatch.setattr(command, "FILES", Stale(call))
    given = {"verify": [path], "convert": [path, tmp_path / "out"], "restore": [kept]}[action]
    assert main(["checkpoint", action, *map(str, given)]) == 0
    err = capsys.readouterr().err
    assert err.count("\n") == (os.strerror(errno.ESTALE) in err)
    expected = {"verify": {"c"}, "convert": {"c", "out"},
                "restore": {"c", "c.abandoned-1.step-8"}}[action]
    assert names_in(tmp_path) == expected | {"c.step-7"}


def test_an_error_that_stays_is_one_sentence(tmp_path, monkeypatch, capsys):
    class Broken(Files):
        def read(self, descriptor, buffers, offset):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        def status(self, file):
            if isinstance(file, int):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().status(file)

    write_checkpoint(tmp_path / "c", make_cut(7))
    monkeypatch.setattr(command, "FILES", Broken())
    monkeypatch.setattr(Patient, "__init__", _at_once(Patient.__init__))
    assert main(["checkpoint", "verify", str(tmp_path / "c")]) == 1
    assert "cannot be read: Input/output error" in capsys.readouterr().err.splitlines()[-1]


def _at_once(init):
    def made(self, *given, **options):
        init(self, *given, **(options | {"pause_s": 0.0}))
    return made
