"""File systems that are not all alike: access lists, attributes, calls that some do not have."""

from __future__ import annotations

import errno
import os
import struct

import pytest

from syncer.checkpoint.atomic import ACCESS_LIST, WriteError
from syncer.checkpoint.reader import Checkpoint
from syncer.checkpoint.tolerant import Tolerant
from syncer.checkpoint.writer import write_checkpoint
from tests.checkpoint.cuts import Faulty, make_cut

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
