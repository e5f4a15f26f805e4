"""Earlier checkpoints: kept, counted, set aside, gone back to; a crash between any two calls."""

from __future__ import annotations

import json
import os
import queue
import shutil

import pytest

from syncer.checkpoint.files import Files
from syncer.checkpoint.history import step_of
from syncer.checkpoint.lock import PathLock
from syncer.checkpoint.reader import Checkpoint
from syncer.checkpoint.restore import owner_of, restore
from syncer.checkpoint.saver import Saver
from syncer.checkpoint.writer import write_checkpoint
from syncer.cli import main
from tests.checkpoint.cuts import make_cut, names_in

PATIENCE_S = 60.0


class Dead(BaseException):
    """The process is gone: nothing it does from here on happens."""


class Dying(Files):
    """The real file system until call number `last` is due."""

    def __init__(self, last: int | None = None):
        self.last, self.count = last, 0


def _dying(name: str):
    def call(self, *given, **options):
        if self.last is not None and self.count >= self.last:
            raise Dead
        self.count += 1
        return getattr(Files, name)(self, *given, **options)
    return call


for _name in [name for name in vars(Files) if not name.startswith("_")]:
    if _name not in ("close", "remark"):
        setattr(Dying, _name, _dying(_name))


class Direct:
    """A lane that runs everything at once."""

    def submit(self, work):
        work()

    def beside(self, work, name):
        work()
        return lambda: None

    def now_s(self):
        return 0.0

    def pause(self, seconds):
        pass

    def close(self):
        pass


def run_of(path, begin, steps, *, keep=2, seed=0, files=None):
    """A server that goes on from `begin` and saves these steps; what it warned of."""
    warnings, told = [], queue.Queue()
    saver = Saver(path, keep=keep, pause_s=0.0, lane=Direct(), files=files or Files(),
                  warn=lambda text, fields: warnings.append(text))
    aside = saver.begin(begin)
    for step in steps:
        saver.save("periodic", make_cut(step, seed=seed), told.put)
        outcome = told.get_nowait()
        if isinstance(outcome.defect, Dead):
            raise outcome.defect
        assert outcome.error is None
        assert outcome.defect is None
    assert not warnings
    return aside


def contents(directory):
    """What each file holds: (step, bytes)."""
    found = {}
    for name in names_in(directory):
        with Checkpoint(directory / name) as checkpoint:
            checkpoint.load()
            found[name] = checkpoint.facts.step
    return found


def bytes_of(step, seed, directory):
    path = directory / "reference"
    write_checkpoint(path, make_cut(step, seed=seed))
    data = path.read_bytes()
    path.unlink()
    return data


def test_a_plain_copy_over_the_newest_harms_no_other(tmp_path):
    path = tmp_path / "run"
    run_of(path, None, [20, 24, 27, 30], keep=3)
    before = {name: (tmp_path / name).read_bytes() for name in names_in(tmp_path) - {"run"}}
    shutil.copyfile(tmp_path / "run.step-20", path)
    for name, data in before.items():
        assert (tmp_path / name).read_bytes() == data
    # and the run that goes on from it counts its own past alone
    aside = run_of(path, 20, [23, 25, 26], seed=1)
    assert [one.step for one in aside] == [27, 24]
    assert contents(tmp_path) == {
        "run": 26, "run.step-23": 23, "run.step-25": 25,
        "run.abandoned-1.step-24": 24, "run.abandoned-1.step-27": 27}
    assert (tmp_path / "run.abandoned-1.step-27").read_bytes() == before["run.step-27"]
    assert (tmp_path / "run.step-25").read_bytes() == bytes_of(25, 1, tmp_path)


def test_a_run_that_begins_anew_has_no_past(tmp_path):
    path = tmp_path / "run"
    run_of(path, None, [2, 4, 6])
    run_of(path, None, [1, 2, 3])
    assert contents(tmp_path) == {
        "run": 3, "run.step-1": 1, "run.step-2": 2,
        "run.abandoned-1.step-2": 2, "run.abandoned-1.step-4": 4}
    run_of(path, 3, [], keep=0)
    assert set(contents(tmp_path)) == names_in(tmp_path)


@pytest.mark.parametrize("keep", [0, 2])
def test_links_to_the_newest_of_earlier_versions(tmp_path, keep):
    """A kept name that is the newest file itself: written over with it, it lies."""
    path = tmp_path / "run"
    run_of(path, None, [20, 24])
    os.link(path, tmp_path / "run.step-24")
    run_of(path, 24, [], keep=keep)
    assert names_in(tmp_path) == {"run", "run.step-20"} | ({"run.step-24"} if not keep else set())
    if keep:
        run_of(path, 24, [26])
        assert contents(tmp_path) == {"run": 26, "run.step-24": 24, "run.step-20": 20}
        os.link(path, tmp_path / "run.step-26")
    shutil.copyfile(tmp_path / "run.step-20", path)
    run_of(path, 20, [], keep=keep)
    found = contents(tmp_path)
    assert found["run"] == 20
    assert not any(name.endswith(("24", "26")) and step == 20 for name, step in found.items())


def states_of(directory):
    return {name: (directory / name).read_bytes() for name in names_in(directory)}


def put_back(directory, state):
    for name in names_in(directory):
        (directory / name).unlink()
    for name, data in state.items():
        (directory / name).write_bytes(data)


def test_a_crash_between_any_two_calls_loses_no_earlier_one(tmp_path):
    """Killed anywhere in a save: the next process puts every file under its name."""
    path = tmp_path / "run"
    run_of(path, None, [2, 4, 6])
    state = states_of(tmp_path)
    whole = Dying()
    run_of(path, 6, [8], files=whole)
    assert contents(tmp_path) == {"run": 8, "run.step-6": 6, "run.step-4": 4}
    landed = set()
    for last in range(whole.count):
        put_back(tmp_path, state)
        with pytest.raises(Dead):
            run_of(path, 6, [8], files=Dying(last))
        newest = step_of(str(path))
        landed.add(newest)
        for name in names_in(tmp_path):
            if ".step-" in name:
                assert (tmp_path / name).stat().st_ino != path.stat().st_ino
                assert step_of(str(tmp_path / name)) == int(name.rpartition("-")[2])
        assert run_of(path, newest, [10]) == []
        assert contents(tmp_path) == (
            {"run": 10, "run.step-8": 8, "run.step-6": 6} if newest == 8 else
            {"run": 10, "run.step-6": 6, "run.step-4": 4}), last
    assert landed == {6, 8}


def test_a_crash_between_any_two_calls_of_setting_aside(tmp_path):
    path = tmp_path / "run"
    run_of(path, None, [20, 24, 27, 30], keep=3)
    shutil.copyfile(tmp_path / "run.step-20", path)
    state, whole = states_of(tmp_path), Dying()
    run_of(path, 20, [], files=whole)
    for last in range(whole.count):
        put_back(tmp_path, state)
        with pytest.raises(Dead):
            run_of(path, 20, [], files=Dying(last))
        run_of(path, 20, [22])
        found = contents(tmp_path)
        assert sorted(found.values()) == [20, 22, 24, 27]
        assert {name for name in found if "abandoned" not in name} == {"run", "run.step-20"}


# ------------------------------------------------------------------------------- restore
def test_restore_goes_back_and_loses_nothing(tmp_path, capsys):
    path = tmp_path / "run.ckpt"
    run_of(path, None, [20, 24, 27], keep=3)
    (tmp_path / "run.ckpt.final").write_bytes(b"YETO_FINAL_V1\nglobal_step=27\n")
    newest, old = path.read_bytes(), (tmp_path / "run.ckpt.step-20").read_bytes()
    assert main(["checkpoint", "restore", f"{path}.step-20", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["path"], said["global_step"], said["marker_removed"]) == (str(path), 20, True)
    assert said["set_aside"] == [
        {"step": 27, "path": f"{path}.abandoned-1.step-27"},
        {"step": 24, "path": f"{path}.abandoned-1.step-24"}]
    assert path.read_bytes() == old == (tmp_path / "run.ckpt.step-20").read_bytes()
    assert path.stat().st_nlink == 1
    assert (tmp_path / "run.ckpt.abandoned-1.step-27").read_bytes() == newest
    run_of(path, 20, [22, 25], seed=1)
    assert set(contents(tmp_path)) == {
        "run.ckpt", "run.ckpt.step-20", "run.ckpt.step-22", "run.ckpt.abandoned-1.step-27",
        "run.ckpt.abandoned-1.step-24"}
    # and forward again: nobody knows which of the others are its past
    assert main(["checkpoint", "restore", f"{path}.abandoned-1.step-24"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{path}: step 24 restored from {path}.abandoned-1.step-24, ")
    assert [line.split(" as ")[0] for line in lines[1:]] == [
        f"set aside: step {step}" for step in (25, 22, 20)]
    assert contents(tmp_path)["run.ckpt"] == 24


def test_the_same_step_of_two_histories_stays_twice(tmp_path):
    path = tmp_path / "run"
    run_of(path, None, [20, 24])
    write_checkpoint(path, make_cut(20, seed=3))
    other = tmp_path / "other"
    write_checkpoint(other, make_cut(24))
    assert main(["checkpoint", "restore", str(other), "--to", str(path)]) == 0
    assert contents(tmp_path) == {"run": 24, "other": 24, "run.abandoned-1.step-20": 20,
                                  "run.abandoned-2.step-20": 20}


def test_a_damaged_newest_is_set_aside_too(tmp_path, capsys):
    path = tmp_path / "run"
    run_of(path, None, [20, 24])
    path.write_bytes(b"rubbish")
    assert main(["checkpoint", "restore", f"{path}.step-20"]) == 0
    assert "set aside: step ? as" in capsys.readouterr().out
    assert (tmp_path / "run.abandoned-1.unreadable").read_bytes() == b"rubbish"
    assert step_of(str(path)) == 20


@pytest.mark.parametrize(("given", "words"), [
    (["run"], "is not named after a checkpoint"), (["run", "--to", "run"], "nothing to restore"),
    (["run.step-99"], "No such file"), (["torn.step-3"], "the file is cut short"),
    (["run.step-20", "--to", "nowhere/run"], "No such file or directory")])
def test_restore_refuses_in_a_sentence(tmp_path, capsys, given, words):
    run_of(tmp_path / "run", None, [20, 24])
    (tmp_path / "torn.step-3").write_bytes((tmp_path / "run").read_bytes()[:-100])
    before = states_of(tmp_path)
    given = [str(tmp_path / word) if not word.startswith("--") else word for word in given]
    assert main(["checkpoint", "restore", *given]) != 0
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert states_of(tmp_path) == before


def test_a_running_server_is_left_alone(tmp_path, capsys):
    path = tmp_path / "run"
    run_of(path, None, [20, 24])
    before = states_of(tmp_path)
    with PathLock(path):
        assert main(["checkpoint", "restore", f"{path}.step-20"]) == 2
    assert f"in use by process {os.getpid()}" in capsys.readouterr().err
    assert states_of(tmp_path) == before


def test_restore_through_a_symbolic_link(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    (tmp_path / "run").symlink_to(disk / "real")
    run_of(tmp_path / "run", None, [20, 24])
    kept = disk / "real.step-20"
    assert main(["checkpoint", "restore", str(kept), "--to", str(tmp_path / "run")]) == 0
    assert contents(disk) == {"real": 20, "real.step-20": 20, "real.abandoned-1.step-24": 24}
    assert (tmp_path / "run").is_symlink()


def test_a_crash_in_a_restore_leaves_every_file_under_some_name(tmp_path):
    path = tmp_path / "run"
    run_of(path, None, [20, 24, 27], keep=3)
    state = states_of(tmp_path)

    def go_back(files):
        with Checkpoint(f"{path}.step-20") as checkpoint:
            restore(checkpoint, str(path), files)

    whole = Dying()
    go_back(whole)
    for last in range(whole.count):
        put_back(tmp_path, state)
        with pytest.raises(Dead):
            go_back(Dying(last))
        assert step_of(str(path)) in (20, 27)
        if last % 2:
            go_back(Files())
        else:  # a server goes on from what is there, or somebody goes back again
            run_of(path, step_of(str(path)), [], keep=last % 3)
            go_back(Files())
        found = contents(tmp_path)
        assert found["run"] == found["run.step-20"] == 20
        assert {24, 27} <= set(found.values()), last
        assert not any(name.endswith(".tmp") for name in found)


def test_the_checkpoint_that_a_name_was_made_from():
    for name, owner in (("d/run.step-20", "d/run"), ("run.abandoned-3.step-20", "run"),
                        ("run.abandoned-3.unreadable", "run"), ("run", None), (".step-20", None),
                        ("run.step-20.step-4", "run.step-20"), ("run.step-020", None),
                        ("run.step-20x", None)):
        assert owner_of(name) == owner, name
