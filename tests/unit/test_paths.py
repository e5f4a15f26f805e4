"""Each file of a run can be written, and no two are one, under whatever names."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from syncer.checkpoint.atomic import WriteError
from syncer.config import Config
from syncer.errors import ConfigError
from syncer.flags import resolve
from syncer.server.log import Log
from syncer.server.persistence import Persistence
from tests.checkpoint.cuts import Faulty, names_in

BASE = {"learners": "1", "total_steps": "1"}


def resolved(**given):
    return resolve(BASE | {name: str(value) for name, value in given.items()}, {})


SIDE_NAMES = ["c", "c.tmp", "c.old.tmp", "c.lock", "c.final", "c.final.tmp", "c.final.old.tmp",
              "c.step-20", "c.step-20.tmp", "c.step.tmp", "./c", "d/../c"]


@pytest.mark.parametrize("option", ["final_state", "event_tape"])
@pytest.mark.parametrize("name", SIDE_NAMES)
def test_names_of_the_checkpoint_are_taken(tmp_path, option, name):
    (tmp_path / "d").mkdir()
    with pytest.raises(ConfigError, match=r"would both write .*: name files that") as caught:
        resolved(checkpoint_path=tmp_path / "c", **{option: f"{tmp_path}/{name}"})
    assert "\n" not in str(caught.value)
    assert "--checkpoint-path" in str(caught.value)
    assert f"--{option.replace('_', '-')}" in str(caught.value)
    assert names_in(tmp_path) == {"d"}


@pytest.mark.parametrize("name", [*SIDE_NAMES, "c.epoch"])
def test_a_socket_is_no_file_of_the_run(tmp_path, name):
    """What a save clears away before it writes would be where learners connect."""
    (tmp_path / "d").mkdir()
    listen = f"unix:{tmp_path}/{name}"
    with pytest.raises(ConfigError, match=r"--listen unix:.* would both write .*: name files"):
        resolved(checkpoint_path=tmp_path / "c", listen=listen)
    with pytest.raises(ConfigError, match=r"--listen unix:.* would both write .*: name files"):
        resolved(event_tape=tmp_path / f"{name}.lock", listen=listen)
    resolved(checkpoint_path=tmp_path / "e", listen=listen)


@pytest.mark.parametrize("end", ["", ".tmp", ".old.tmp"])
def test_the_tape_is_not_the_final_state(tmp_path, end):
    with pytest.raises(ConfigError, match="would both write"):
        resolved(final_state=tmp_path / "f", event_tape=f"{tmp_path}/f{end}")


@pytest.mark.parametrize("aliased", ["c", "c.final", "c.epoch", "c.step-3", "c.lock"])
@pytest.mark.parametrize("kind", ["symlink", "hard link", "linked directory", "dangling"])
def test_aliases_are_seen(tmp_path, aliased, kind):
    real = tmp_path / "real"
    real.mkdir()
    target = real / aliased
    if kind != "dangling":
        target.write_bytes(b"x")
    alias = tmp_path / "alias"
    match kind:
        case "symlink" | "dangling":
            alias.symlink_to(target)
        case "hard link":
            os.link(target, alias)
        case "linked directory":
            (tmp_path / "door").symlink_to(real)
            alias = tmp_path / "door" / aliased
    for option in "final_state", "event_tape":
        with pytest.raises(ConfigError, match="would both write"):
            resolved(checkpoint_path=real / "c", **{option: alias})


def test_the_checkpoint_itself_may_be_the_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "c").symlink_to(tmp_path / "disk" / "run")
    for name in ("run", "run.tmp", "run.lock", "run.step-4", "run.final"):
        with pytest.raises(ConfigError, match="would both write"):
            resolved(checkpoint_path=tmp_path / "c", final_state=tmp_path / "disk" / name)
    with pytest.raises(ConfigError, match="would both write"):
        resolved(checkpoint_path=tmp_path / "c", final_state=tmp_path / "c.final")


def test_other_names_are_free(tmp_path):
    """Also those that only look alike, and kept files that are links of the checkpoint."""
    (tmp_path / "c").write_bytes(b"x")
    os.link(tmp_path / "c", tmp_path / "c.step-4")
    for name in ("cc", "c.tape", "c.step-x", "c.steps", "d.step-4", "c.final.txt", "c-final"):
        resolved(checkpoint_path=tmp_path / "c", event_tape=tmp_path / name,
                 final_state=tmp_path / "f")


# ------------------------------------------------------------------------ what could not be written
REPLACED = ["checkpoint_path", "final_state"]


@pytest.mark.parametrize("option", [*REPLACED, "event_tape"])
@pytest.mark.parametrize(("kind", "words"), [
    ("directory", "a directory"), ("fifo", "a FIFO"), ("socket", "a socket"),
    ("device", "a device"), ("link to a device", "a device"), ("loop", "symbolic links"),
    ("dangling", "it leads to .*/nowhere/run, and the directory .*/nowhere does not exist")])
def test_what_no_file_can_replace_is_refused_at_once(tmp_path, option, kind, words):
    """Lines of a tape may go to a FIFO or a device, which is none of files."""
    path = tmp_path / "c"
    match kind:
        case "directory":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as listening:
                listening.bind(str(path))
        case "device":
            path = "/dev/null"
        case "link to a device":
            path.symlink_to("/dev/null")
        case "loop":
            path.symlink_to(path)
        case "dangling":
            path.symlink_to(tmp_path / "nowhere" / "run")
    before = names_in(tmp_path)
    if option == "event_tape" and words in ("a FIFO", "a device"):
        resolved(event_tape=path)
        return
    with pytest.raises(ConfigError, match=words) as caught:
        resolved(**{option: path})
    assert str(caught.value).startswith(f"--{option.replace('_', '-')} {path} ")
    assert "\n" not in str(caught.value)
    assert names_in(tmp_path) == before


def test_a_dangling_link_into_a_directory_is_a_new_file(tmp_path):
    (tmp_path / "c").symlink_to(tmp_path / "run")
    resolved(checkpoint_path=tmp_path / "c")


@pytest.mark.parametrize(("length", "extra", "fits"), [
    (241, {}, True), (242, {}, False), (248, {}, False),
    (241, dict(mark_final_checkpoint="true"), True),
    (230, dict(checkpoint_keep=3), True), (231, dict(checkpoint_keep=3), False)])
def test_a_name_must_leave_room_for_those_made_from_it(tmp_path, length, extra, fits):
    path = tmp_path / ("n" * length)
    if fits:
        resolved(checkpoint_path=path, **extra)
        return
    with pytest.raises(ConfigError, match=r"File name too long .*takes names of 255\); give it a "
                                          "shorter name"):
        resolved(checkpoint_path=path, **extra)
    if length == 248 and not extra:
        with pytest.raises(ConfigError, match="File name too long"):
            resolved(final_state=path)
        resolved(event_tape=path)


@pytest.mark.parametrize("end", [".tmp", ".old.tmp", ".final", ".epoch"])
def test_a_directory_under_a_name_that_goes_with_it(tmp_path, end):
    (tmp_path / f"c{end}").mkdir()
    with pytest.raises(ConfigError, match=rf"c\{end}, which is written with it, is a directory"):
        resolved(checkpoint_path=tmp_path / "c", mark_final_checkpoint="true")


@pytest.mark.parametrize(("number", "refused"), [(errno.EINVAL, True), (errno.EIO, False)])
def test_a_file_system_without_direct_writes_is_seen_at_the_start(tmp_path, number, refused):
    """Trouble of a moment is left to the save, which tries again."""
    config = Config(learners=1, total_steps=9, checkpoint_path=str(tmp_path / "c"),
                    checkpoint_direct=True)
    log = Log("error", "json", lambda line: None)
    persistence = Persistence(config, log, Faulty(0, only="create", number=number))
    if refused:
        with pytest.raises(WriteError, match="takes no direct writes; leave --checkpoint-direct"):
            persistence.begin()
    else:
        persistence.begin()
    persistence.close()
    assert not names_in(tmp_path)
