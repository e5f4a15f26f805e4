"""`syncer checkpoint` as a person or a program meets it."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pty
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file

from syncer.checkpoint import progress as bars
from syncer.checkpoint.facts import Cut
from syncer.checkpoint.lineage import Lineage
from syncer.checkpoint.lock import PathLock
from syncer.checkpoint.progress import Progress, size
from syncer.checkpoint.reader import Checkpoint
from syncer.checkpoint.writer import write_checkpoint
from syncer.cli import main
from syncer.learner.partition import build_layout, layout_fingerprint, save_layout
from tests.checkpoint.cuts import make_cut, names_in

NAMED = build_layout({"wte.weight": (5, 3), "h.0.w": (4, 2), "h.0.b": (7,), "h.1.w": (3, 3)}, 3)


@pytest.fixture
def files(tmp_path):
    """(checkpoint, its layout file, its cut)."""
    cut = make_cut(8, layout=NAMED.wire)
    cut = Cut(dataclasses.replace(cut.facts, fingerprint=layout_fingerprint(NAMED)), cut.fragments)
    write_checkpoint(tmp_path / "c", cut)
    save_layout(tmp_path / "layout.json", NAMED)
    return tmp_path / "c", tmp_path / "layout.json", cut


def call(capsys, *argv) -> tuple[int, str, str]:
    status = main(["checkpoint", *map(str, argv)])
    out, err = capsys.readouterr()
    return status, out, err


def test_inspect(capsys, files):
    path, _, cut = files
    status, out, _ = call(capsys, "inspect", path, "--json")
    assert status == 0
    found = json.loads(out)
    assert found["format"] == "safetensors"
    assert found["bytes"] == path.stat().st_size
    assert found["global_step"] == 8
    assert found["optimizer"] == {"name": "nesterov", "lr": 0.7, "momentum": 0.9}
    assert found["ledger"] == [
        {"learner": 0, "merges": 2, "steps": 24, "tokens": 8192},
        {"learner": 3, "merges": 1, "steps": 12, "tokens": 4096}]
    for entry, version in zip(found["fragments"], cut.fragments, strict=True):
        assert entry["version"] == version.version
        assert entry["elements"] == len(version.params)
        assert entry["norms"]["params"] == pytest.approx(
            np.linalg.norm(version.params.astype(np.float64)))
        assert entry["norms"]["momentum"] == pytest.approx(
            np.linalg.norm(version.state["momentum"].astype(np.float64)))
    status, out, _ = call(capsys, "inspect", path)
    assert status == 0
    assert "step 8, 39 parameters in 3 fragments" in out
    assert "optimizer nesterov (lr 0.7, momentum 0.9)" in out
    assert out.count("\n") > 10


def test_inspect_without_norms_reads_the_header_alone(capsys, files):
    path, _, _ = files
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert call(capsys, "inspect", path, "--no-norms")[0] == 0
    status, _, err = call(capsys, "inspect", path)
    assert status == 1
    assert "SHA-256" in err


def test_verify(capsys, files):
    path, _, _ = files
    status, out, _ = call(capsys, "verify", path)
    assert (status, "6 digests match" in out) == (0, True)
    assert json.loads(call(capsys, "verify", path, "--json")[1])["ok"] is True
    data = bytearray(path.read_bytes())
    data[-3] ^= 64
    path.write_bytes(data)
    status, out, err = call(capsys, "verify", path)
    assert (status, out) == (1, "")
    assert err.startswith(f"syncer: {path}: tensor fragments.2.momentum at offset ")
    assert err.count("\n") == 1


def test_convert_there_and_back(capsys, files, tmp_path):
    path, layout, _ = files
    status, out, _ = call(capsys, "convert", path, tmp_path / "y")
    assert (status, "yeto-v3" in out) == (0, True)
    assert call(capsys, "convert", tmp_path / "y", tmp_path / "plain")[0] == 0
    assert call(capsys, "convert", tmp_path / "y", tmp_path / "again", "--layout", layout)[0] == 0
    with Checkpoint(path) as first, Checkpoint(tmp_path / "again") as again, \
            Checkpoint(tmp_path / "plain") as plain:
        assert again.facts == dataclasses.replace(
            first.facts, profile_hash=None, optimizer={"name": "nesterov"})
        assert plain.facts == dataclasses.replace(again.facts, layout=None)
        assert first.digests == again.digests == plain.digests
        again.load()
    same = tmp_path / "same"
    assert call(capsys, "convert", path, same, "--to", "safetensors", "--json")[0] == 0
    assert same.read_bytes() == path.read_bytes()
    assert not {name for name in names_in(tmp_path) if name.endswith((".tmp", ".lock"))}


def test_convert_refuses_what_does_not_fit(capsys, files, tmp_path):
    path, _, _ = files
    write_checkpoint(tmp_path / "dn", make_cut(8, optimizer="delayed-nesterov"))
    status, _, err = call(capsys, "convert", tmp_path / "dn", tmp_path / "y")
    assert (status, "nesterov only" in err) == (1, True)
    other = build_layout({"a": (3,)}, 1)
    save_layout(tmp_path / "other.json", other)
    status, _, err = call(capsys, "convert", path, tmp_path / "y", "--layout",
                          tmp_path / "other.json")
    assert (status, "not of one model" in err) == (1, True)
    data = bytearray(path.read_bytes())
    data[-3] ^= 64
    path.write_bytes(data)
    status, _, err = call(capsys, "convert", path, tmp_path / "y")
    assert (status, "SHA-256" in err) == (1, True)
    assert "y" not in names_in(tmp_path)


def test_diff(capsys, files, tmp_path):
    path, _, cut = files
    call(capsys, "convert", path, tmp_path / "y")
    status, out, _ = call(capsys, "diff", path, tmp_path / "y")
    assert (status, out.startswith("equal")) == (0, True)
    fragments = list(cut.fragments)
    changed = fragments[1].state["momentum"].copy()
    changed.view(np.uint32)[2] ^= 1
    fragments[1].state["momentum"] = changed
    write_checkpoint(tmp_path / "d", Cut(cut.facts, fragments))
    for other in (path, tmp_path / "y"):
        status, out, _ = call(capsys, "diff", tmp_path / "d", other)
        assert status == 1
        assert out.startswith("first difference: fragments.1.momentum element 2: ")
    write_checkpoint(tmp_path / "e", Cut(dataclasses.replace(cut.facts, ledger={}), fragments))
    found = json.loads(call(capsys, "diff", tmp_path / "e", path, "--json")[1])
    assert found["equal"] is False
    assert found["first_difference"].startswith("ledger: ")
    status, out, err = call(capsys, "diff", path, tmp_path / "nowhere")
    assert (status, out, "cannot be read" in err) == (2, "", True)


def test_export(capsys, files, tmp_path):
    path, layout, cut = files
    status, out, _ = call(capsys, "export", path, tmp_path / "model", "--layout", layout)
    assert (status, "4 parameters of step 8" in out) == (0, True)
    found = load_file(tmp_path / "model")
    expected = {}
    for fragment, version in zip(NAMED.fragments, cut.fragments, strict=True):
        at = 0
        for tensor in fragment.tensors:
            expected[tensor.name] = version.params[at : at + tensor.numel].reshape(tensor.shape)
            at += tensor.numel
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()
    assert call(capsys, "export", path, tmp_path / "part", "--layout", layout, "--fragments",
                "1-2")[0] == 0
    assert load_file(tmp_path / "part").keys() == {
        t.name for f in NAMED.fragments[1:] for t in f.tensors}


def test_export_takes_the_names_that_the_checkpoint_tells(capsys, files, tmp_path):
    path, layout, cut = files
    assert call(capsys, "export", path, tmp_path / "m")[:2] == (2, "")
    names = tuple(tuple((t.name, tuple(t.shape)) for t in f.tensors) for f in NAMED.fragments)
    told = dataclasses.replace(cut.facts, names=names, lineage=Lineage("blue", 3, 7, (), 4))
    write_checkpoint(tmp_path / "told", Cut(told, list(cut.fragments)))
    assert call(capsys, "export", tmp_path / "told", tmp_path / "mine")[0] == 0
    assert call(capsys, "export", path, tmp_path / "theirs", "--layout", layout)[0] == 0
    assert (tmp_path / "mine").read_bytes() == (tmp_path / "theirs").read_bytes()
    for form in ("yeto-v3", "safetensors"):
        assert call(capsys, "convert", tmp_path / "told", tmp_path / form, "--to", form)[0] == 0
    assert (tmp_path / "safetensors").read_bytes() == (tmp_path / "told").read_bytes()
    status, _, err = call(capsys, "export", tmp_path / "yeto-v3", tmp_path / "m")
    assert (status, "give the layout file of a learner with --layout" in err) == (2, True)
    out = call(capsys, "inspect", tmp_path / "told")[1]
    assert "run      blue, epoch 3, written by 0000000000000007, 4 steps added" in out
    found = json.loads(call(capsys, "inspect", tmp_path / "told", "--json")[1])
    assert (found["run"], found["epoch"], found["named"]) == ("blue", 3, True)
    other = dataclasses.replace(told, names=((("x", names[0][0][1]), *names[0][1:]), *names[1:]))
    write_checkpoint(tmp_path / "other", Cut(other, list(cut.fragments)))
    assert call(capsys, "diff", tmp_path / "told", tmp_path / "other")[1].startswith(
        "first difference: names")
    assert call(capsys, "diff", tmp_path / "told", path)[0] == 0, "only one of both tells names"


@pytest.mark.parametrize("text", ["3", "0-3", "x", "", "1-", "-", "2-1"])
def test_fragments_that_are_not_there(capsys, files, tmp_path, text):
    path, layout, _ = files
    status, _, err = call(capsys, "export", path, tmp_path / "m", "--layout", layout,
                          "--fragments", text)
    assert status == 2
    assert err.startswith("syncer: --fragments")


def test_export_needs_the_models_own_layout(capsys, files, tmp_path):
    path, _, _ = files
    save_layout(tmp_path / "other.json", build_layout({"a": (3,)}, 1))
    status, _, err = call(capsys, "export", path, tmp_path / "m", "--layout",
                          tmp_path / "other.json")
    assert (status, "not of one model" in err) == (1, True)
    assert "m" not in names_in(tmp_path)


@pytest.mark.parametrize("argv", [["checkpoint"], ["checkpoint", "inspect"],
                                  ["checkpoint", "verfiy", "x"],
                                  ["checkpoint", "convert", "a", "b", "--to", "pickle"]])
def test_wrong_words_are_one_sentence(capsys, argv):
    assert main(argv) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_progress_bar(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    clock = iter([0.0, 0.4, 0.7, 0.75, 1.0])
    monkeypatch.setattr(bars.time, "monotonic", lambda: next(clock))
    screen = Terminal()
    with Progress("reading", screen) as bar:
        bar(10, 100)      # too early to be worth a bar
        assert not screen.getvalue()
        bar(2**20, 4 * 2**20)
        bar(2**20, 4 * 2**20)  # too soon after the last one
        bar(2 * 2**20, 4 * 2**20)
    shown = screen.getvalue()
    assert shown.count("reading") == 2
    assert " 25% 1.4 MiB/s 2 s left" in shown
    assert " 50% 2.0 MiB/s 1 s left" in shown
    assert shown.endswith("\r\x1b[K")


def test_no_bar_without_a_terminal():
    stream = io.StringIO()
    with Progress("reading", stream) as bar:
        bar.begun -= 10
        bar(1, 2)
    assert stream.getvalue() == ""


def test_sizes():
    assert [size(n) for n in (0, 1023, 1536, 3 * 2**30, 2**50)] == [
        "0 B", "1023 B", "1.5 KiB", "3.0 GiB", "1024.0 TiB"]


def test_on_a_real_terminal_the_bar_leaves_no_trace(files):
    """Short work shows nothing at all, and the result is on standard output alone."""
    leader, follower = pty.openpty()
    with subprocess.Popen([sys.executable, "-m", "syncer", "checkpoint", "verify", str(files[0])],
                          stdout=subprocess.PIPE, stderr=follower, text=True) as process:
        out = process.communicate()[0]
    os.close(follower)
    assert process.returncode == 0
    assert "good, step 8" in out
    os.set_blocking(leader, False)
    with pytest.raises(OSError):  # noqa: PT011 (nothing was written: EIO or EAGAIN)
        os.read(leader, 1)
    os.close(leader)


@pytest.mark.parametrize("action", ["convert", "export"])
@pytest.mark.parametrize("name", ["c", "link", "hard", "./c", "layout.json"])
def test_the_file_that_is_read_is_never_the_output(capsys, files, action, name):
    """Under whatever name; the layout file neither."""
    path, layout, _ = files
    (path.parent / "link").symlink_to(path)
    (path.parent / "hard").hardlink_to(path)
    before, there = path.read_bytes(), names_in(path.parent)
    words = layout.read_bytes()
    status, out, err = call(capsys, action, path, path.parent / name, "--layout", layout)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert "name another file" in err
    assert (path.read_bytes(), layout.read_bytes(), names_in(path.parent)) == (before, words, there)


@pytest.mark.parametrize("action", ["convert", "export"])
def test_a_file_that_a_server_holds_is_not_written(capsys, files, action):
    path, layout, _ = files
    target = path.parent / "run"
    write_checkpoint(target, make_cut(3))
    before = target.read_bytes()
    (path.parent / "link").symlink_to(target)
    with PathLock(target):
        status, _, err = call(capsys, action, path, path.parent / "link", "--layout", layout)
    assert status == 2
    assert "OUTPUT" in err
    assert f"in use by process {os.getpid()}" in err
    assert target.read_bytes() == before


@pytest.mark.parametrize("end", [".epoch", ".lock", ".tmp", ".old.tmp", ".final", ".epoch.tmp"])
@pytest.mark.parametrize("words", [("export",), ("convert", "--to", "yeto-v3")])
def test_an_output_is_no_file_that_a_server_has_beside_the_checkpoint(capsys, files, words, end):
    path, _, _ = files
    beside = path.with_name(path.name + end)
    beside.write_bytes(b"of a server")
    (path.parent / "alias").symlink_to(beside)
    for output in (beside, path.parent / "alias"):
        status, _, err = call(capsys, words[0], path, output, *words[1:])
        assert status == 2
        assert "which a server writes with FILE" in err
    assert beside.read_bytes() == b"of a server"


@pytest.mark.parametrize("words", [("export",), ("convert", "--to", "yeto-v3")])
def test_an_output_that_no_file_can_be_is_refused_before_anything_is_read(capsys, files, words):
    path, _, _ = files
    os.mkfifo(path.with_name("fifo"))
    for output, kind in (("fifo", "a FIFO"), (".", "a directory"), ("/dev/null", "a device"),
                         ("x" * 250, "shorter name"), ("no/x", "does not exist")):
        status, _, err = call(capsys, words[0], path, path.parent / output, *words[1:])
        assert status == 2
        assert kind in err
        assert err.count("\n") == 1
