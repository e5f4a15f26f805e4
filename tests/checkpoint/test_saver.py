"""The saver thread, what it keeps, and the marker."""

from __future__ import annotations

import errno
import os
import queue
import threading

import pytest

from syncer.checkpoint.files import Files
from syncer.checkpoint.marker import marker_path
from syncer.checkpoint.reader import Checkpoint
from syncer.checkpoint.saver import Outcome, Saver
from syncer.checkpoint.writer import write_checkpoint
from tests.checkpoint.cuts import Faulty, copy_of, make_cut, names_in
from tests.checkpoint.lanes import SlowWorld

PATIENCE_S = 60.0


class Gate(Files):
    """The real file system, but a write waits until the test lets it go on."""

    def __init__(self):
        self.entered = threading.Semaphore(0)
        self.open = threading.Event()
        self.writers = 0
        self.writers_max = 0

    def create(self, path, *, direct=False):
        self.writers += 1
        self.writers_max = max(self.writers, self.writers_max)
        self.entered.release()
        assert self.open.wait(PATIENCE_S)
        return super().create(path, direct=direct)

    def sync_directory(self, path):
        super().sync_directory(path)
        self.writers -= 1


@pytest.fixture
def outcomes():
    return queue.Queue()


def saver_of(tmp_path, **options):
    warnings = []
    saver = Saver(tmp_path / "c", pause_s=0.0, warn=lambda text, fields: warnings.append(
        (text, fields)), **options)
    saver.warnings = warnings
    return saver


def test_saves_land_in_the_order_they_were_asked_for(tmp_path, outcomes):
    gate = Gate()
    saver = saver_of(tmp_path, files=gate)
    cuts = [make_cut(step) for step in (8, 16, 17)]
    saver.save("periodic", copy_of(cuts[0]), outcomes.put, let_go=True)
    assert gate.entered.acquire(timeout=PATIENCE_S)
    saver.save("periodic", copy_of(cuts[1]), outcomes.put, let_go=True)
    saver.save("final", cuts[2], outcomes.put)
    assert outcomes.empty()
    gate.open.set()
    found = [outcomes.get(timeout=PATIENCE_S) for _ in cuts]
    assert [(o.kind, o.step, o.error, o.defect) for o in found] == [
        ("periodic", 8, None, None), ("periodic", 16, None, None), ("final", 17, None, None)]
    assert gate.writers_max == 1
    saver.close()
    write_checkpoint(tmp_path / "alone", cuts[2])
    assert (tmp_path / "c").read_bytes() == (tmp_path / "alone").read_bytes()
    assert found[2].bytes == (tmp_path / "c").stat().st_size
    assert not gate.writers


def test_closing_waits_for_a_running_save(tmp_path, outcomes):
    gate = Gate()
    saver = saver_of(tmp_path, files=gate)
    saver.save("periodic", make_cut(8), outcomes.put)
    assert gate.entered.acquire(timeout=PATIENCE_S)
    closing = threading.Thread(target=saver.close)
    closing.start()
    assert outcomes.empty()
    gate.open.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert outcomes.get_nowait().error is None
    saver.close()


def run_one(saver, cut, outcomes, **options) -> Outcome:
    saver.save("periodic", cut, outcomes.put, **options)
    return outcomes.get(timeout=PATIENCE_S)


def test_a_failed_save_is_told_and_the_next_one_works(tmp_path, outcomes):
    files = Faulty(0, only="write", number=errno.ENOSPC, times=2)
    saver = saver_of(tmp_path, files=files, retries=1)
    failed = run_one(saver, make_cut(8), outcomes)
    assert "No space left" in failed.error
    assert failed.bytes == 0
    assert [text for text, _ in saver.warnings] == ["checkpoint write tried again"]
    assert not names_in(tmp_path)
    assert run_one(saver, make_cut(16), outcomes).error is None
    saver.close()


@pytest.mark.parametrize("call", ["sync", "sync_directory", "close"])
@pytest.mark.parametrize("case", [(1, False, True), (1, True, True), (0, False, False),
                                  (0, True, False)])
def test_a_failed_fsync_means_writing_anew(tmp_path, outcomes, call, case):
    """In the background, too: versions stay as long as they may be needed again."""
    retries, let_go, good = case
    files = Faulty(0, only=call)
    saver = saver_of(tmp_path, files=files, retries=retries)
    cut = make_cut(8)
    outcome = run_one(saver, copy_of(cut), outcomes, let_go=let_go)
    assert (outcome.error is None) == good
    if good:
        assert files.calls.count("create") == 2
        assert [fields["call"] for _, fields in saver.warnings] == [call]
        write_checkpoint(tmp_path / "alone", cut)
        assert (tmp_path / "c").read_bytes() == (tmp_path / "alone").read_bytes()
    else:
        assert not names_in(tmp_path)
    saver.close()


class FullOnce(Files):
    """Somebody else's file takes all space, and goes a moment later."""

    def __init__(self, times):
        self.times = times

    def free_bytes(self, path):
        self.times -= 1
        return super().free_bytes(path) if self.times < 0 else 10


@pytest.mark.parametrize("let_go", [False, True])
@pytest.mark.parametrize(("times", "retries"), [(1, 1), (2, 1), (1, 0), (3, 3)])
def test_a_full_disk_is_looked_at_again(tmp_path, outcomes, times, retries, let_go):
    saver = saver_of(tmp_path, files=FullOnce(times), retries=retries)
    outcome = run_one(saver, copy_of(make_cut(8)), outcomes, let_go=let_go)
    saver.close()
    assert (outcome.error is None) == (times <= retries)
    assert len(saver.warnings) == min(times, retries)
    assert all(fields["error"] == os.strerror(errno.ENOSPC) for _, fields in saver.warnings)
    assert names_in(tmp_path) == ({"c"} if times <= retries else set())


@pytest.mark.parametrize("retries", [0, 1])
def test_versions_are_given_back_when_they_cannot_be_needed_again(tmp_path, outcomes, retries):
    """One failed call leaves one attempt that is the last: it lets go."""
    cut, held = copy_of(make_cut(8)), []

    class Watching(Faulty):
        def sync(self, descriptor):
            held.append(sum(version is not None for version in cut.fragments))
            super().sync(descriptor)

    files = Watching(0, only="sync", times=retries)
    saver = saver_of(tmp_path, files=files, retries=retries)
    count = len(cut.fragments)
    assert run_one(saver, cut, outcomes, let_go=True).error is None
    saver.close()
    assert held == [count] * retries + [0]


@pytest.mark.parametrize("call", ["sync", "sync_directory", "write", "rename"])
def test_a_marker_is_tried_again(tmp_path, outcomes, call):
    saver = saver_of(tmp_path, files=Faulty(1 if call != "write" else 2, only=call), retries=1)
    assert run_one(saver, make_cut(8), outcomes, mark=True).error is None
    saver.close()
    assert names_in(tmp_path) == {"c", "c.final"}
    assert len(saver.warnings) == 1


def test_a_defect_is_no_checkpoint_error(tmp_path, outcomes):
    cut = make_cut(8)
    cut.fragments[1] = None
    saver = saver_of(tmp_path)
    outcome = run_one(saver, cut, outcomes)
    assert outcome.error is None
    assert isinstance(outcome.defect, AttributeError)
    saver.close()
    assert not names_in(tmp_path)


def test_a_saver_runs_on_the_lane_it_is_given(tmp_path):
    """Nothing happens but on the lane, and its clock is the one that is read."""
    threads = set(threading.enumerate())
    lane, told = SlowWorld(), []
    files = Faulty(0, only="create", times=2)
    saver = Saver(tmp_path / "c", files=files, lane=lane, retries=2, pause_s=20.0)
    cuts = [make_cut(8), make_cut(9)]
    saver.save("periodic", copy_of(cuts[0]), told.append, let_go=True)
    saver.save("final", cuts[1], told.append, mark=True)
    assert not told
    assert not names_in(tmp_path)
    first, second = lane.waiting
    first()
    asked = lane.gave_way
    assert asked, "whether others need the time"
    assert [(o.step, o.seconds, o.error) for o in told] == [(8, 40.0, None)]
    second()
    assert [(o.step, o.seconds, o.error) for o in told[1:]] == [(9, 0.0, None)]
    assert lane.gave_way == asked, "somebody waits for this one"
    assert lane.besides == ["syncer-checkpoint-digest"] * 2
    assert set(threading.enumerate()) <= threads
    write_checkpoint(tmp_path / "alone", cuts[1])
    assert (tmp_path / "c").read_bytes() == (tmp_path / "alone").read_bytes()
    lane.waiting.clear()
    saver.close()


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("let_go", [False, True])
def test_digests_are_taken_by_so_many_threads(tmp_path, threads, let_go):
    """Beside the rounds by one; never by more than there are fragments; the file is the same."""
    lane, told = SlowWorld(), []
    saver = Saver(tmp_path / "c", lane=lane, threads=threads)
    saver.save("periodic", make_cut(8), told.append, let_go=let_go)
    lane.waiting.pop()()
    assert told[0].error is None
    assert lane.besides == ["syncer-checkpoint-digest"] * (1 if let_go else min(threads, 3))
    write_checkpoint(tmp_path / "alone", make_cut(8))
    assert (tmp_path / "c").read_bytes() == (tmp_path / "alone").read_bytes()
    saver.close()


# --------------------------------------------------------------------------- earlier ones
def test_those_before_the_newest_stay(tmp_path, outcomes):
    """None of them is the newest file itself."""
    saver = saver_of(tmp_path, keep=2)
    for step in (2, 4, 6, 8):
        assert run_one(saver, make_cut(step), outcomes).error is None
    assert names_in(tmp_path) == {"c", "c.step-4", "c.step-6"}
    for name in ("c", "c.step-4", "c.step-6"):
        assert (tmp_path / name).stat().st_nlink == 1
    with Checkpoint(tmp_path / "c.step-4") as checkpoint:
        checkpoint.load()
        assert checkpoint.facts.step == 4
    # the same step again replaces its file, and keeps nothing
    assert run_one(saver, make_cut(8, seed=1), outcomes).error is None
    assert names_in(tmp_path) == {"c", "c.step-4", "c.step-6"}
    saver.close()
    assert not saver.warnings


@pytest.mark.parametrize("where", [".", "large-disk"])
def test_earlier_ones_through_a_symbolic_link(tmp_path, outcomes, where):
    """They hold what they are named after, and lie beside the file itself."""
    disk = tmp_path / where
    disk.mkdir(exist_ok=True)
    (tmp_path / "c").symlink_to(disk / "run")
    saver = saver_of(tmp_path, keep=2)
    for step in (2, 4, 6, 8):
        assert run_one(saver, make_cut(step), outcomes, mark=step == 8).error is None
    assert names_in(disk) >= {"run", "run.step-4", "run.step-6"}
    for step in (4, 6):
        assert not (disk / f"run.step-{step}").is_symlink()
        with Checkpoint(disk / f"run.step-{step}") as checkpoint:
            assert checkpoint.facts.step == step
    assert (tmp_path / "c.final").exists(), "beside the name that was given"
    (disk / "run.final").write_bytes(b"of a run that was given the other name")
    saver.unmark()
    saver.close()
    assert not saver.warnings
    assert names_in(tmp_path) | names_in(disk) <= {"c", "run", "run.step-4", "run.step-6", where}


def test_another_history_and_other_files_are_left_alone(tmp_path, outcomes):
    others = {"c.step-100", "c.step-x", "c.step-3.bak", "d.step-1", "c.step-007", "c.step-\u0663",
              "c.step-99999999999999999999999", "c.step-", "c.abandoned-1.step-2"}
    for name in others:
        (tmp_path / name).write_bytes(b"other")
    saver = saver_of(tmp_path, keep=1)
    for step in (8, 9):
        run_one(saver, make_cut(step), outcomes)
    saver.close()
    assert not saver.warnings
    assert names_in(tmp_path) == {"c", "c.step-8"} | others


@pytest.mark.parametrize("call", ["link", "rename", "unlink"])
def test_keeping_that_fails_is_a_warning(tmp_path, outcomes, call):
    """Without hard links nothing can be kept; the newest one is written all the same."""
    files = Faulty(number=errno.EPERM, times=99, only=call)
    saver = saver_of(tmp_path, keep=1, files=files)
    for step in (8, 9):
        assert run_one(saver, make_cut(step), outcomes).error is None
    # the first rename of a save is that of the new file
    files.fail_at = files.counted + (call == "rename")
    assert run_one(saver, make_cut(10), outcomes).error is None
    saver.close()
    with Checkpoint(tmp_path / "c") as checkpoint:
        assert checkpoint.facts.step == 10
    assert names_in(tmp_path) == {"c", "c.step-8"} | ({"c.step-9"} if call == "unlink" else set())
    assert len(saver.warnings) == 1


# --------------------------------------------------------------------------------- marker
def test_the_marker_of_a_final_checkpoint(tmp_path, outcomes):
    saver = saver_of(tmp_path)
    run_one(saver, make_cut(8), outcomes, mark=True)
    assert (tmp_path / "c.final").read_bytes() == b"YETO_FINAL_V1\nglobal_step=8\n"
    assert marker_path(tmp_path / "c") == str(tmp_path / "c.final")
    saver.unmark()
    assert names_in(tmp_path) == {"c"}
    saver.unmark()
    saver.close()


def test_a_marker_that_cannot_be_written_is_a_failed_save(tmp_path, outcomes):
    files = Faulty(1, only="sync")
    saver = saver_of(tmp_path, files=files, retries=0)
    assert "c.final" in run_one(saver, make_cut(8), outcomes, mark=True).error
    saver.close()
    assert names_in(tmp_path) == {"c"}, "the checkpoint itself is whole, and not marked"


@pytest.fixture
def no_more_threads(monkeypatch):
    """What the system says from now on, when it is told to."""
    begun, told = threading.Thread.start, threading.Event()

    def start(self):
        if told.is_set() and self.name.startswith("syncer-"):
            raise RuntimeError("can't start new thread")
        begun(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    return told


@pytest.mark.parametrize("background", [False, True])
def test_a_save_needs_no_further_thread(tmp_path, outcomes, no_more_threads, background):
    """It takes longer then, on the thread that is there, which does not become a nice one."""
    saver = saver_of(tmp_path)
    no_more_threads.set()
    usual = os.getpriority(os.PRIO_PROCESS, saver.lane.thread.native_id)
    outcome = run_one(saver, copy_of(make_cut(8)), outcomes, let_go=background)
    assert (outcome.error, outcome.defect) == (None, None)
    assert os.getpriority(os.PRIO_PROCESS, saver.lane.thread.native_id) == usual
    saver.close()
    write_checkpoint(tmp_path / "alone", make_cut(8))
    assert (tmp_path / "c").read_bytes() == (tmp_path / "alone").read_bytes()


def test_a_file_is_read_without_further_threads(tmp_path, no_more_threads, monkeypatch):
    monkeypatch.setattr("syncer.checkpoint.reader.CHUNK_BYTES", 64)
    write_checkpoint(tmp_path / "c", make_cut(8))
    begun, left = threading.Thread.start, [1]   # one of the readers is there

    def start(self):
        if left:
            left.pop()
            no_more_threads.clear()
        begun(self)
        no_more_threads.set()

    monkeypatch.setattr(threading.Thread, "start", start)
    with Checkpoint(tmp_path / "c") as checkpoint:
        found = checkpoint.load(threads=4)
    assert [one.params.tobytes() for one in found] == [
        one.params.tobytes() for one in make_cut(8).fragments]
