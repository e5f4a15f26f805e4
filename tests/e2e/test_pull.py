"""`syncer pull` as a person meets it: the file, the lines, the statuses, and what goes wrong."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from syncer.checkpoint.model_file import model_metadata
from syncer.checkpoint.reader import Checkpoint
from syncer.learner import Learner
from syncer.reader import PullFailed, cuts, pull
from syncer.wire import messages
from syncer.wire.encode import encode_error
from tests.e2e.checkpointed import answer, start, train
from tests.e2e.convex_learner import SHAPES
from tests.e2e.scripted import (
    MIXED,
    ROOT,
    ServerProcess,
    ServerThread,
    layout_of,
    to_wire,
    wait_until,
)
from tests.e2e.waiting import step_until


def environment(**more: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SYNCER_", "YETO_"))}
    return clean | more


def pulled(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "syncer", "pull", *words], cwd=ROOT, timeout=60,
                          env=environment(**more), capture_output=True, text=True, check=False)


class PullProcess:
    """`syncer pull` that goes on; `lines()` are those of its standard output so far."""

    def __init__(self, directory: Path, *words: str):
        self.out, self.err = directory / "pull.out", directory / "pull.err"
        with open(self.out, "wb") as out, open(self.err, "wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "syncer", "pull", *words], cwd=ROOT, stdout=out, stderr=err,
                env=environment())

    def records(self) -> list[dict]:
        whole = self.out.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def said(self, text: str) -> None:
        wait_until(lambda: text in self.err.read_text(), f"{text!r} in {self.err.read_text()}")

    def __enter__(self) -> PullProcess:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.process.wait()


def read_model(path: Path) -> tuple[dict[str, str], dict[str, tuple[str, list[int], bytes]]]:
    """Metadata, and (dtype, shape, bytes) by name, read as any program would."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:end])
    metadata = entries.pop("__metadata__")
    return metadata, {
        name: (entry["dtype"], entry["shape"],
               data[end + entry["data_offsets"][0] : end + entry["data_offsets"][1]])
        for name, entry in entries.items()}


def training(server: ServerThread | ServerProcess, path: Path, steps: int):
    """A learner that has trained so many steps and holds the next pull."""
    learner = start(server.learner(0))
    train(learner, steps)
    return learner, learner.pull(steps + 1)


def parameters_of(checkpoint: Path) -> list[np.ndarray]:
    with Checkpoint(checkpoint) as opened:
        return [np.array(fragment.params) for fragment in opened.load()]


# ------------------------------------------------------------------------------------ one cut
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_the_file_is_the_checkpoint_of_its_step(tmp_path, dtype):
    checkpoint, output = tmp_path / "c", tmp_path / "model.safetensors"
    with ServerThread(tmp_path, total_steps=9, checkpoint_path=str(checkpoint),
                      checkpoint_every=1, pipeline=1) as server:
        training(server, checkpoint, 4)
        done = pulled(f"127.0.0.1:{server.port}", "-o", str(output), "--dtype", dtype, "--json")
        assert done.returncode == 0, done.stderr
        record = json.loads(done.stdout)
        assert (record["global_step"], record["final"], record["named"]) == (4, False, False)
        assert record["bytes"] == output.stat().st_size
        metadata, tensors = read_model(output)
        assert (metadata["format"], metadata["global_step"]) == ("pt", "4")
        saved = parameters_of(checkpoint)
        assert list(tensors) == [f"fragments.{p}.params" for p in range(3)]
        for (kind, shape, data), values in zip(tensors.values(), saved, strict=True):
            assert (kind, shape) == (dtype.upper(), [values.size])
            assert data == to_wire(values, {"f32": 1, "bf16": 2}[dtype])
        assert os.listdir(tmp_path).count("model.safetensors.lock") == 0


def test_it_is_what_is_exported_of_the_checkpoint_by_the_learners_own_names(tmp_path):
    checkpoint, output = tmp_path / "c", tmp_path / "model.safetensors"
    exported = tmp_path / "exported.safetensors"
    parameters = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    with (ServerThread(tmp_path, total_steps=10**6, checkpoint_path=str(checkpoint),
                       checkpoint_every=1, run="blue", learners=2, start_learners=1) as server,
          Learner(parameters, f"127.0.0.1:{server.port}", learner_id=0, fragments=3,
                  run="blue") as learner):
        address = f"127.0.0.1:{server.port}"
        step_until(learner, lambda status: min(status.versions) > 0)

        def same_step() -> bool:
            """What was pushed last may be committed between the two."""
            done = pulled(address, "-o", str(output), "--run", "blue")
            assert done.returncode == 0, done.stderr
            subprocess.run([sys.executable, "-m", "syncer", "checkpoint", "export",
                            str(checkpoint), str(exported)], cwd=ROOT, check=True, timeout=60)
            return model_metadata(output)["global_step"] == model_metadata(exported)["global_step"]

        wait_until(same_step, "both of one step")
        assert model_metadata(output)["run"] == "blue"
        assert read_model(output)[1] == read_model(exported)[1]
        values = pull(address, run="blue").parameters()
        assert {name: array.shape for name, array in values.items()} == SHAPES
        done = pulled(address, "-o", str(output), "--run", "green")
        assert done.returncode == 1
        assert "expected run blue, got run green" in one_sentence(done)


# ------------------------------------------------------------------------------------ following
def test_a_file_that_follows_is_a_whole_cut_at_every_moment(tmp_path):
    checkpoint, output = tmp_path / "c", tmp_path / "model.safetensors"
    torn: list[str] = []
    with (ServerThread(tmp_path, total_steps=30, checkpoint_path=str(checkpoint),
                       checkpoint_every=1, checkpoint_keep=99, pipeline=1) as server,
          PullProcess(tmp_path, f"127.0.0.1:{server.port}", "-o", str(output), "--follow",
                      "--json") as process):
        process.said("connected to")
        learner = start(server.learner(0))
        wait_until(process.records, "the first cut")
        ended = threading.Event()

        def watch() -> None:
            while not ended.is_set():
                metadata, tensors = read_model(output)
                step = int(metadata["global_step"])
                path = checkpoint.with_name(f"c.step-{step}")
                if path.exists():
                    saved = [values.tobytes() for values in parameters_of(path)]
                    if [data for _, _, data in tensors.values()] != saved:
                        torn.append(f"step {step}")

        watcher = threading.Thread(target=watch)
        watcher.start()
        for step in range(1, 31):
            answer(learner, learner.pull(step))
            if step % 9 == 0:
                wait_until(lambda step=step: process.records()[-1]["global_step"] >= step,
                           f"a cut of step {step}")
        learner.finish()
        assert process.process.wait(60) == 0
        ended.set()
        watcher.join()
        assert server.wait() == 0
        assert not torn
        records = process.records()
        assert [r["final"] for r in records] == [False] * (len(records) - 1) + [True]
        steps = [r["global_step"] for r in records]
        assert steps[:-1] == sorted(set(steps[:-1]))
        assert {9, 18, 27} <= set(steps)
        _, tensors = read_model(output)
        assert [data for _, _, data in tensors.values()] == [
            values.tobytes() for values in parameters_of(checkpoint)]


def test_a_server_that_is_killed_is_dialed_again_until_it_is_back(tmp_path):
    checkpoint, output = tmp_path / "c", tmp_path / "model.safetensors"
    flags = ("--checkpoint-path", str(checkpoint), "--checkpoint-every", "1")
    with ServerProcess(tmp_path, *flags, steps=9) as server:
        process = PullProcess(tmp_path, f"127.0.0.1:{server.port}", "-o", str(output), "--follow",
                              "--json")
        with process:
            learner, _ = training(server, checkpoint, 4)
            wait_until(lambda: process.records() and process.records()[-1]["global_step"] >= 3,
                       "the cut of step 3")
            server.signal(signal.SIGKILL)
            server.process.wait()
            learner.close()
            process.said("dialing again")
            before = len(process.records())
            with ServerProcess(tmp_path, *flags, "--resume", "--port", str(server.port),
                               steps=9) as second:
                second.log.wait("reader connected")
                learner = second.learner(0)
                train(learner, 5)
                learner.finish()
                assert process.process.wait(60) == 0, process.err.read_text()
                assert second.wait() == 0
            assert process.records()[before:][-1] | {"seconds": 0, "bytes": 0} == {
                "path": str(output), "global_step": 9, "final": True, "run": None, "epoch": 2,
                "dtype": "f32", "tensors": 3, "named": False, "bytes": 0, "seconds": 0}


def test_a_server_that_is_killed_in_the_middle_of_a_cut_leaves_the_file_before_it(tmp_path):
    """The cut is larger than all buffers on its way, and its reader stands still meanwhile."""
    large = layout_of((4_000_000,), (5_000_000,))
    checkpoint, output = tmp_path / "c", tmp_path / "model.safetensors"
    flags = ("--checkpoint-path", str(checkpoint), "--checkpoint-every", "1", "--pipeline", "1")
    with ServerProcess(tmp_path, *flags, steps=4) as server:
        learner = server.learner(0, large)
        learner.send_init([np.ones(f.numel, np.float32) for f in large.fragments])
        learner.pull(1)
        with PullProcess(tmp_path, f"127.0.0.1:{server.port}", "-o", str(output), "--follow",
                         "--json") as process:
            wait_until(process.records, "the first cut")
            before = output.read_bytes()
            process.process.send_signal(signal.SIGSTOP)
            for step in (1, 2):
                learner.push(messages.Pull((step - 1) % 2, step, 1),
                             np.full(large.fragments[step - 1].numel, 0.5, np.float32))
                learner.pull(step + 1)
            server.signal(signal.SIGKILL)
            server.process.wait()
            process.process.send_signal(signal.SIGCONT)
            process.said("dialing again")
            assert output.read_bytes() == before
            assert not output.with_name("model.safetensors.tmp").exists()
            with ServerProcess(tmp_path, *flags, "--resume", "--port", str(server.port),
                               steps=4) as second:
                second.learner(0, large).pull(3)
                wait_until(lambda: process.records()[-1]["global_step"] == 2, "step 2")
                _, tensors = read_model(output)
                assert [data for _, _, data in tensors.values()] == [
                    values.tobytes() for values in parameters_of(checkpoint)]


def test_ctrl_c_says_which_step_the_file_has(tmp_path):
    output = tmp_path / "model.safetensors"
    for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        with (ServerThread(tmp_path, total_steps=9) as server,
              PullProcess(tmp_path, f"127.0.0.1:{server.port}", "-o", str(output), "--follow",
                          "--json") as process):
            process.said("connected to")
            start(server.learner(0))
            wait_until(process.records, "the first cut")
            process.process.send_signal(number)
            assert process.process.wait(60) == status
            said = process.err.read_text().splitlines()
            assert said[-1] == f"syncer pull: stopped; {output} has step 0"
            assert not any("Traceback" in line for line in said)


# ------------------------------------------------------------------------------------ mistakes
def one_sentence(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in done.stderr.splitlines() if line.startswith("syncer: ")]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return lines[0]


@pytest.mark.parametrize(("words", "text"), [
    (("nowhere", "-o", "m"), "address 'nowhere' is not host:port"),
    (("127.0.0.1:1",), "-o"),
    (("127.0.0.1:1", "-o", "/no/such/place/m"), "/no/such/place/m"),
    (("127.0.0.1:1", "-o", "m", "--dtype", "q4"), "--dtype"),
    (("127.0.0.1:1", "-o", "m", "--run", "a b"), "--run a b cannot be used"),
    (("127.0.0.1:1", "-o", "m", "--timeout-s", "soon"), "'soon' is no number of seconds"),
])
def test_what_cannot_be_used_is_one_sentence_and_status_2(words, text):
    done = pulled(*words)
    assert done.returncode == 2
    assert text in one_sentence(done)


def test_nobody_there_is_status_1_when_patience_is_over(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    done = pulled(f"127.0.0.1:{port}", "-o", str(tmp_path / "m"), "--timeout-s", "2")
    assert done.returncode == 1
    assert "Connection refused" in one_sentence(done)
    assert not (tmp_path / "m").exists()


def test_a_run_that_does_not_begin_is_status_1_and_says_what_it_waits_for(tmp_path):
    with ServerThread(tmp_path, learners=3) as server:
        done = pulled(f"127.0.0.1:{server.port}", "-o", str(tmp_path / "m"), "--timeout-s", "3")
    assert done.returncode == 1
    assert "a run to begin: its learners (3) bring the model" in one_sentence(done)


def test_the_key_is_that_of_the_environment(tmp_path):
    with ServerThread(tmp_path, island_hmac_key="secret", total_steps=9) as server:
        learner = server.learner(0, key=b"secret")
        start(learner).pull(1)
        address = f"127.0.0.1:{server.port}"
        for more in ({}, {"SYNCER_HMAC_KEY": "wrong"}):
            done = pulled(address, "-o", str(tmp_path / "m"), **more)
            assert done.returncode == 1
            assert "refuses: HELLO authentication failed" in one_sentence(done)
        assert pulled(address, "-o", str(tmp_path / "m"),
                      SYNCER_HMAC_KEY="secret").returncode == 0


def test_no_places_and_other_runs_are_status_1(tmp_path):
    with ServerThread(tmp_path, max_readers=0) as server:
        done = pulled(f"127.0.0.1:{server.port}", "-o", str(tmp_path / "m"))
        assert (done.returncode, "--max-readers" in one_sentence(done)) == (1, True)
    with ServerThread(tmp_path, total_steps=9) as server:
        start(server.learner(0)).pull(1)
        done = pulled(f"127.0.0.1:{server.port}", "-o", str(tmp_path / "m"), "--run", "blue")
        assert done.returncode == 1
        assert "expected no run, got run blue" in one_sentence(done)


def test_only_its_own_files_are_replaced(tmp_path):
    checkpoint, output = tmp_path / "c", tmp_path / "model.safetensors"
    with ServerThread(tmp_path, total_steps=9, checkpoint_path=str(checkpoint),
                      checkpoint_every=1, pipeline=1) as server:
        training(server, checkpoint, 1)
        address = f"127.0.0.1:{server.port}"
        notes = tmp_path / "notes"
        notes.write_text("mine")
        before = checkpoint.read_bytes()
        for path, what in ((checkpoint, "is in use by process"), (notes, "is another file"),
                           (tmp_path, "is a directory, which no file can replace")):
            done = pulled(address, "-o", str(path))
            assert (done.returncode, what in one_sentence(done)) == (2, True)
        assert checkpoint.read_bytes() == before
        copy = tmp_path / "copy"
        copy.write_bytes(before)
        assert "is a checkpoint, which" in one_sentence(pulled(address, "-o", str(copy)))
        assert notes.read_text() == "mine"
        for _ in range(2):
            assert pulled(address, "-o", str(output)).returncode == 0
        assert pulled(address, "-o", str(notes), "--overwrite").returncode == 0
        assert model_metadata(notes)["global_step"] == "1"
    with ServerThread(tmp_path, total_steps=9) as server:
        learner = server.learner(0, fingerprint=b"\x22" * 32)
        start(learner).pull(1)
        done = pulled(f"127.0.0.1:{server.port}", "-o", str(output))
        assert done.returncode == 2
        assert "has the parameters of another model" in one_sentence(done)
        assert model_metadata(output)["global_step"] == "1"


@pytest.mark.parametrize(("output", "what"), [
    ("fifo", "is a FIFO, which no file can replace"), ("/dev/null", "is a device"),
    ("x" * 250, "give it a shorter name"), ("no/model", "does not exist")])
def test_what_cannot_be_written_is_refused_before_anything_is_dialed(tmp_path, output, what):
    os.mkfifo(tmp_path / "fifo")
    for more in ([], ["--overwrite"]):
        done = pulled("127.0.0.1:1", "-o", str(tmp_path / output), *more)
        assert (done.returncode, what in one_sentence(done)) == (2, True)


def test_an_older_server_is_told_apart(tmp_path):
    """It takes the id of a reader for a learner's that is out of its range."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        def serve() -> None:
            sock, _ = listening.accept()
            sock.recv(1 << 16)
            sock.sendall(encode_error("invalid HELLO: learner_id 4294967295 is outside configured "
                                      "range 0..1"))
            sock.close()
        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(PullFailed, match="it knows no readers, being older"):
            pull(f"127.0.0.1:{listening.getsockname()[1]}")
        thread.join()


def test_cuts_go_to_a_program_as_well(tmp_path):
    with ServerThread(tmp_path, total_steps=4, pipeline=1) as server:
        found = cuts(f"127.0.0.1:{server.port}", dtype="bf16")
        learner = start(server.learner(0))
        assert next(found).step == 0
        train(learner, 3)
        cut = next(found)
        assert (cut.step, [values.size for values in cut.parameters().values()]) == (
            3, [f.numel for f in MIXED.fragments])
        train(learner, 1)
        learner.take_cut()
        assert [(cut.step, cut.is_final) for cut in found] == [(4, True)]


def test_a_file_that_cannot_be_written_is_status_5(tmp_path):
    """The directory is gone when the cut is there, and nothing else of the run is touched."""
    place = tmp_path / "place"
    place.mkdir()
    with (ServerThread(tmp_path, total_steps=9) as server,
          PullProcess(tmp_path, f"127.0.0.1:{server.port}", "-o", str(place / "m")) as process):
        process.said("connected to")
        place.rename(tmp_path / "elsewhere")
        start(server.learner(0)).pull(1)
        assert process.process.wait(60) == 5
        assert f"syncer: {place / 'm'}" in process.err.read_text()
        assert not process.records()
