"""No two files of a run are one, under whatever names."""

from __future__ import annotations

import os

import pytest

from syncer.errors import ConfigError
from syncer.flags import resolve
from tests.checkpoint.cuts import names_in

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


@pytest.mark.parametrize("end", ["", ".tmp", ".old.tmp"])
def test_the_tape_is_not_the_final_state(tmp_path, end):
    with pytest.raises(ConfigError, match="would both write"):
        resolved(final_state=tmp_path / "f", event_tape=f"{tmp_path}/f{end}")


@pytest.mark.parametrize("aliased", ["c", "c.final", "c.step-3", "c.lock"])
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
