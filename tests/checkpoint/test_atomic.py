"""Files are whole or not there: a fault at every single call, real full disks, modes, leftovers."""

from __future__ import annotations

import errno
import os
import subprocess
import tempfile

import pytest

from syncer.checkpoint import atomic, lane
from syncer.checkpoint.atomic import AtomicFile, WriteError, clear_leftovers
from syncer.checkpoint.files import FILES, Behind, Files, Patient
from syncer.checkpoint.reader import Checkpoint
from syncer.checkpoint.writer import write_checkpoint
from syncer.layout import FragmentLayout, Layout
from tests.checkpoint.cuts import LARGE, Faulty, copy_of, failure_of, make_cut, names_in


def calls_of_a_save(path, cut) -> list[str]:
    files = Faulty()
    write_checkpoint(path, cut, files=files)
    return files.calls


@pytest.mark.parametrize("old", [True, False])
def test_a_fault_at_every_call_leaves_the_old_cut(tmp_path, old):
    """Every call of a save fails once: the old file has its bytes, and nothing else is there."""
    before, after = make_cut(3, layout=LARGE), make_cut(4, layout=LARGE)
    path = tmp_path / "run.ckpt"
    write_checkpoint(path, before)
    whole = path.read_bytes()
    if not old:
        path.unlink()
    calls = calls_of_a_save(path, after)
    assert calls.count("write") >= 5
    assert ("unlink" in calls) == old
    assert {"free_bytes", "create", "sync", "close", "rename", "sync_directory"} <= set(calls)
    seen = set()
    for index, call in enumerate(calls):
        if old:
            path.write_bytes(whole)
        else:
            path.unlink(missing_ok=True)
        for name in names_in(tmp_path) - {path.name}:
            (tmp_path / name).unlink()
        error = failure_of(path, after, Faulty(index, number=errno.EIO))
        if error is not None:
            seen.add(call)
            assert str(path) in str(error)
            assert "Input/output error" in str(error)
            assert "unchanged" in str(error)
            assert error.number == errno.EIO
            assert names_in(tmp_path) == ({path.name} if old else set()), call
            assert not old or path.read_bytes() == whole, call
        else:
            # only forgetting the second name of the old file may fail without a word
            assert call == "unlink"
            assert index == len(calls) - 1
            assert names_in(tmp_path) <= {path.name, f"{path.name}.old.tmp"}
            write_checkpoint(path, after)
            assert names_in(tmp_path) == {path.name}, "the next save clears what was left"
    assert seen >= {"write", "create", "sync", "close", "rename", "sync_directory", "free_bytes"}


def test_the_space_of_a_large_file_is_given_back_beside_what_comes_next(tmp_path, monkeypatch):
    """Its name has gone by then, and no save waits for it."""
    monkeypatch.setattr(atomic, "LARGE_BYTES", 1)
    path = tmp_path / "c"
    write_checkpoint(path, make_cut(3))
    files, begun = Faulty(), {}

    def beside(work, name):
        if name != "syncer-checkpoint-free":
            return lane.beside(work, name)
        begun[name] = work
        return lambda: None

    held = []
    monkeypatch.setattr(files, "open", lambda name: held.append(FILES.open(name)) or held[0])
    write_checkpoint(path, make_cut(4), files=files, beside=beside)
    assert names_in(tmp_path) == {"c"}
    (free,) = begun.values()
    assert os.fstat(held[0]).st_nlink == 0
    free()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(held[0])


@pytest.mark.parametrize("call", ["open", "close"])
def test_a_large_file_that_cannot_be_held_or_let_go_is_replaced_all_the_same(
        tmp_path, monkeypatch, call):
    monkeypatch.setattr(atomic, "LARGE_BYTES", 1)
    path, failing = tmp_path / "c", []
    write_checkpoint(path, make_cut(3))

    class Failing(Files):
        def open(self, name):
            failing.append(call)
            if call == "open":
                raise OSError(errno.EACCES, "no")
            return super().open(name)

        def close(self, descriptor):
            super().close(descriptor)
            if failing:
                raise OSError(errno.EIO, "no")

    write_checkpoint(path, make_cut(4), files=Failing(), beside=at_once)
    assert failing == [call]
    assert names_in(tmp_path) == {"c"}
    with Checkpoint(path) as checkpoint:
        assert checkpoint.facts.step == 4


def at_once(work, name):
    work()
    return lambda: None


def test_a_directory_that_cannot_be_made_durable_brings_the_old_file_back(tmp_path):
    path = tmp_path / "c"
    write_checkpoint(path, make_cut(3))
    with pytest.raises(WriteError, match=r"fsync of the directory.*unchanged") as caught:
        write_checkpoint(path, make_cut(4), files=Faulty(0, only="sync_directory"))
    assert caught.value.call == "sync_directory"
    with Checkpoint(path) as checkpoint:
        assert checkpoint.facts.step == 3
    assert names_in(tmp_path) == {"c"}


def test_if_even_that_fails_both_files_are_kept_and_named(tmp_path):
    class Broken(Faulty):
        def sync_directory(self, path):
            self.only = "rename"  # the next one is the way back
            raise OSError(errno.EIO, "broken")

    path = tmp_path / "c"
    write_checkpoint(path, make_cut(3))
    with pytest.raises(WriteError, match=r"leads to the new file.*c\.old\.tmp"):
        write_checkpoint(path, make_cut(4), files=Broken(0, only="nothing"))
    with Checkpoint(path) as new, Checkpoint(f"{path}.old.tmp") as old:
        assert (new.facts.step, old.facts.step) == (4, 3)


def test_without_hard_links_a_save_works(tmp_path):
    for number in (errno.EPERM, errno.EOPNOTSUPP):
        write_checkpoint(tmp_path / "c", make_cut(3))
        write_checkpoint(tmp_path / "c", make_cut(4), files=Faulty(0, only="link", number=number))
        with Checkpoint(tmp_path / "c") as checkpoint:
            assert checkpoint.facts.step == 4
        assert names_in(tmp_path) == {"c"}


# -------------------------------------------------------------------------------- the disk
def test_space_is_checked_before_a_byte_is_written(tmp_path):
    class Small(Faulty):
        def free_bytes(self, path):
            self._count("free_bytes")
            return 100

    files = Small()
    cut = make_cut(4)
    size = write_checkpoint(tmp_path / "measure", cut)
    with pytest.raises(WriteError, match=rf"needs {size} bytes .* has 100 bytes free; free "
                       rf"{size - 100}"):
        write_checkpoint(tmp_path / "c", cut, files=files)
    assert files.calls == ["free_bytes"]
    assert names_in(tmp_path) == {"measure"}


@pytest.fixture
def small_disk():
    """A file system of 4 MiB of its own. Needs root, as CI has."""
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", directory],
                              capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip("THE FULL DISK WAS NOT TESTED: mounting a small file system needs root: "
                        f"{done.stderr.strip()}")
        try:
            yield directory
        finally:
            subprocess.run(["umount", directory], check=True)


def test_a_full_disk_for_real(small_disk):
    """Both ways to run out of space: seen before the first byte, and in the middle of writing."""
    class Hopeful(Files):
        def free_bytes(self, path):
            return 10**12

    layout = Layout((FragmentLayout(0, (200_000,)),))
    path = f"{small_disk}/c"
    write_checkpoint(path, make_cut(1, layout=layout))
    with open(path, "rb") as file:
        whole = file.read()
    with open(f"{small_disk}/ballast", "wb") as file:
        file.write(bytes(2 * 2**20))
    for files, text in [(Files(), "bytes free"), (Hopeful(), "No space left on device")]:
        with pytest.raises(WriteError, match=text) as caught:
            write_checkpoint(path, make_cut(2, layout=layout), files=files)
        assert caught.value.number == errno.ENOSPC
        assert names_in(small_disk) == {"c", "ballast"}
        with open(path, "rb") as file:
            assert file.read() == whole
    os.unlink(f"{small_disk}/ballast")
    write_checkpoint(path, make_cut(2, layout=layout))
    with Checkpoint(path) as checkpoint:
        assert checkpoint.facts.step == 2


@pytest.mark.parametrize("leftover", ["c.tmp", "c.old.tmp"])
def test_what_a_killed_process_left_is_free_space(small_disk, leftover):
    """A disk of two and a half copies, one of them a partial file or the second name of an old
    one: it goes first, and is then no reason to refuse the save."""
    layout = Layout((FragmentLayout(0, (210_000,)),))
    size = write_checkpoint(f"{small_disk}/c", make_cut(1, layout=layout))
    assert 2 * size < 4 * 2**20 < 3 * size
    with open(f"{small_disk}/{leftover}", "wb") as file:
        file.write(bytes(size))
    write_checkpoint(f"{small_disk}/c", make_cut(2, layout=layout))
    assert names_in(small_disk) == {"c"}
    with Checkpoint(f"{small_disk}/c") as checkpoint:
        checkpoint.load()
        assert checkpoint.facts.step == 2


def test_a_second_name_that_may_be_the_only_one_stays_until_a_file_stands(tmp_path):
    (tmp_path / "c.old.tmp").write_bytes(b"the only copy")
    assert failure_of(tmp_path / "c", make_cut(2), Faulty(0, only="rename")) is not None
    assert names_in(tmp_path) == {"c.old.tmp"}
    clear_leftovers(tmp_path / "c")
    assert names_in(tmp_path) == {"c.old.tmp"}
    write_checkpoint(tmp_path / "c", make_cut(2))
    assert names_in(tmp_path) == {"c"}


def test_leftovers_are_those_of_one_path(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "c").symlink_to(tmp_path / "disk" / "run")
    others = {"run", "run.step-4", "run.final", "run.lock", "run.step-x.tmp", "runs.tmp",
              "run.tmp.bak", "a.run.tmp"}
    for name in others | {"run.tmp", "run.old.tmp", "run.step.tmp", "run.step-4.tmp"}:
        (tmp_path / "disk" / name).write_bytes(b"x")
    clear_leftovers(tmp_path / "c")
    assert names_in(tmp_path / "disk") == others


def test_direct_writes_are_refused_in_a_sentence(tmp_path):
    with pytest.raises(WriteError, match="takes no direct writes; leave --checkpoint-direct out"):
        write_checkpoint(tmp_path / "c", make_cut(), direct=True,
                         files=Faulty(0, only="create", number=errno.EINVAL))


# --------------------------------------------------------------------- what was there before
def test_mode_and_owner_of_a_replaced_file_are_kept(tmp_path):
    path = tmp_path / "c"
    write_checkpoint(path, make_cut(1))
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask()
    path.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(path, 12345, 54321)
    before = path.stat()
    write_checkpoint(path, make_cut(2))
    after = path.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (
        before.st_mode, before.st_uid, before.st_gid)
    assert after.st_ino != before.st_ino


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_an_owner_that_may_not_be_given_is_no_reason_to_lose_a_checkpoint(tmp_path):
    path = tmp_path / "c"
    write_checkpoint(path, make_cut(1))
    if os.geteuid() == 0:
        os.chown(path, 12345, 54321)
    write_checkpoint(path, make_cut(2), files=Faulty(0, only="set_owner", number=errno.EPERM))
    with Checkpoint(path) as checkpoint:
        assert checkpoint.facts.step == 2


@pytest.mark.parametrize("kind", ["file", "link", "dangling"])
def test_a_leftover_partial_file_is_replaced(tmp_path, kind):
    victim, leftover = tmp_path / "victim", tmp_path / "c.tmp"
    victim.write_bytes(b"mine")
    match kind:
        case "file":
            leftover.write_bytes(b"x" * 100_000)
        case "link":
            leftover.symlink_to(victim)
        case "dangling":
            leftover.symlink_to(tmp_path / "nowhere")
    write_checkpoint(tmp_path / "c", make_cut(2))
    assert names_in(tmp_path) == {"c", "victim"}
    assert victim.read_bytes() == b"mine"


def test_a_symbolic_link_keeps_leading_to_the_checkpoint(tmp_path):
    real = tmp_path / "large-disk"
    real.mkdir()
    (tmp_path / "c").symlink_to(real / "run")
    for step in (1, 2):
        write_checkpoint(tmp_path / "c", make_cut(step))
        assert (tmp_path / "c").is_symlink()
        with Checkpoint(real / "run") as checkpoint:
            assert checkpoint.facts.step == step


def test_a_bare_name_is_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_checkpoint("bare", make_cut(2))
    assert names_in(tmp_path) == {"bare"}


@pytest.mark.parametrize("kind", ["directory", "pipe"])
def test_what_is_no_file_is_not_replaced(tmp_path, kind):
    """And not a byte is written first."""
    (tmp_path / "c").mkdir() if kind == "directory" else os.mkfifo(tmp_path / "c")
    files = Faulty()
    with pytest.raises(WriteError, match="no regular file"):
        write_checkpoint(tmp_path / "c", make_cut(2), files=files)
    assert names_in(tmp_path) == {"c"}
    assert "create" not in files.calls


def test_a_name_too_long_for_its_second_name_is_seen_first(tmp_path):
    path = tmp_path / ("n" * 248)
    write_checkpoint(path, make_cut(1))
    whole, files = path.read_bytes(), Faulty()
    with pytest.raises(WriteError, match=r"too long a name: .*\.old\.tmp' must fit"):
        write_checkpoint(path, make_cut(2), files=files)
    assert "create" not in files.calls
    assert path.read_bytes() == whole
    assert names_in(tmp_path) == {path.name}


def test_leaving_without_a_commit_leaves_nothing(tmp_path):
    with AtomicFile(tmp_path / "f") as file:
        file.append(b"half")
        file.flush()
        assert names_in(tmp_path) == {"f.tmp"}
    assert not names_in(tmp_path)


def test_letting_go_empties_the_cut_as_it_is_written(tmp_path):
    cut = make_cut(5, layout=LARGE)
    held = copy_of(cut)
    left = []

    class Watching(Files):
        def write(self, descriptor, buffers, offset):
            left.append(sum(version is not None for version in held.fragments))
            return super().write(descriptor, buffers, offset)

    write_checkpoint(tmp_path / "c", held, files=Watching(), let_go=True)
    assert held.fragments == [None, None]
    assert left[0] == 1
    assert sorted(left, reverse=True) == left
    write_checkpoint(tmp_path / "d", cut)
    assert (tmp_path / "c").read_bytes() == (tmp_path / "d").read_bytes()


def test_a_failing_digest_thread_fails_the_save(tmp_path, monkeypatch):
    monkeypatch.setattr("syncer.checkpoint.reader.sha256_update_pair", lambda *given: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        write_checkpoint(tmp_path / "c", make_cut(5))
    assert not names_in(tmp_path)


def test_somebody_elses_partial_file_is_never_published(tmp_path):
    """Two writers of one name, as after a lock that does not hold: the first one's name leads to
    what the second has begun."""
    write_checkpoint(tmp_path / "c", make_cut(1))
    whole = (tmp_path / "c").read_bytes()
    first = AtomicFile(tmp_path / "c")
    first.append(b"a" * 100_000)
    with AtomicFile(tmp_path / "c") as second:
        second.append(b"torn")
        second.flush()
        with pytest.raises(WriteError, match=r"by another process, too.*unchanged"):
            first.commit()
        first.abort()
        assert (tmp_path / "c").read_bytes() == whole
        assert (tmp_path / "c.tmp").read_bytes() == b"torn", "it is the other's"
        second.commit()
    assert (tmp_path / "c").read_bytes() == b"torn"
    assert names_in(tmp_path) == {"c"}


# -------------------------------------------------------------------------------- retries
@pytest.mark.parametrize("call", ["write", "create", "rename", "free_bytes", "link"])
def test_a_passing_error_is_tried_again(tmp_path, call):
    write_checkpoint(tmp_path / "c", make_cut(1))
    told = []
    files = Patient(Faulty(0, only=call), 1, 0.0, lambda name, error: told.append(name))
    write_checkpoint(tmp_path / "c", make_cut(2), files=files)
    assert told == [call]
    assert files.left == 0
    with Checkpoint(tmp_path / "c") as checkpoint:
        checkpoint.load()
        assert checkpoint.facts.step == 2


@pytest.mark.parametrize(("number", "times", "retries"), [
    (errno.EIO, 2, 1), (errno.EIO, 1, 0), (errno.EROFS, 1, 5), (errno.EACCES, 1, 5)])
def test_what_does_not_pass_counts(tmp_path, number, times, retries):
    faulty = Faulty(0, only="write", number=number, times=times)
    with pytest.raises(WriteError):
        write_checkpoint(tmp_path / "c", make_cut(2), files=Patient(faulty, retries, 0.0))
    assert not names_in(tmp_path)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
@pytest.mark.parametrize("call", ["create", "sync_directory"])
def test_a_descriptor_is_waited_for_without_a_retry(tmp_path, number, call):
    told, slept = [], []
    faulty = Faulty(0, only=call, number=number, times=40)
    files = Patient(faulty, 0, 0.0, lambda name, error: told.append(name), slept.append)
    write_checkpoint(tmp_path / "c", make_cut(2), files=files)
    assert told == [call]
    assert slept == [1.0] * 40
    assert names_in(tmp_path) == {"c"}


@pytest.mark.parametrize("call", ["sync", "sync_directory"])
def test_an_fsync_is_never_repeated_on_the_same_bytes(tmp_path, call):
    faulty = Faulty(0, only=call)
    with pytest.raises(WriteError):
        write_checkpoint(tmp_path / "c", make_cut(2), files=Patient(faulty, 5, 0.0))
    assert faulty.calls.count(call) == (1 if call == "sync" else 2), "once more for the way back"


def test_every_call_of_a_patient_reaches_the_files_behind(tmp_path):
    """A new method of `Files` must not be forgotten there."""
    public = {name for name in vars(Files) if not name.startswith("_")}
    assert public <= set(vars(Behind))
    inner = Faulty()
    write_checkpoint(tmp_path / "c", make_cut(1), files=Patient(inner, 1))
    assert set(inner.calls) >= {"create", "write", "sync", "close", "rename", "sync_directory"}
