"""Learner processes against the real server: a convex problem is solved, and all end equal."""

import contextlib
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from syncer.learner import load_layout

from .convex_learner import SHAPES, distance
from .scripted import ROOT, ServerProcess
from .waiting import DEADLINE_S, until

CLEAN = {k: v for k, v in os.environ.items() if not k.startswith(("SYNCER_", "YETO_"))}


class Learners:
    """Learner processes of one run; `with` ends those that are left, by their ids."""

    def __init__(self, server: ServerProcess, directory: Path, *options: str):
        self.server, self.directory, self.options = server, directory, options
        self.processes: list[subprocess.Popen] = []

    def start(self, learner: int, *options: str) -> subprocess.Popen:
        name = f"learner-{learner}-{len(self.processes)}.log"
        with open(self.directory / name, "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.e2e.convex_learner",
                 "--server", f"127.0.0.1:{self.server.port}", "--id", str(learner),
                 "--out", str(self.out(learner)), *self.options, *options],
                cwd=ROOT, stdout=log, stderr=log, env=CLEAN)
        self.processes.append(process)
        return process

    def out(self, learner: int) -> Path:
        return self.directory / f"learner-{learner}.npz"

    def parameters(self, learner: int) -> dict[str, np.ndarray]:
        with np.load(self.out(learner)) as found:
            return dict(found)

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.directory.glob("*.log")))

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait(DEADLINE_S)


def final_state(path: Path) -> list[np.ndarray]:
    data = path.read_bytes()
    (count,) = struct.unpack_from("<I", data)
    at, fragments = 4, []
    for _ in range(count):
        (numel,) = struct.unpack_from("<Q", data, at)
        fragments.append(np.frombuffer(data, "<f4", numel, at + 8))
        at += 8 + 4 * numel
    assert at == len(data)
    return fragments


def check_equal_to_the_server(learners: Learners, ids, path: Path) -> None:
    expected = final_state(path)
    for learner in ids:
        parameters = learners.parameters(learner)
        layout = load_layout(learners.out(learner).with_suffix(".layout"))
        assert {t.name: t.shape for f in layout.fragments for t in f.tensors} == SHAPES
        for fragment, values in zip(layout.fragments, expected, strict=True):
            found = np.concatenate([parameters[t.name].reshape(-1) for t in fragment.tensors])
            assert found.tobytes() == values.tobytes(), (learner, fragment)


@pytest.mark.parametrize(("dtype", "streams"), [("f32", 0), ("bf16", 3), ("q4", 1)])
def test_three_learners_solve_a_convex_problem_and_end_with_the_servers_bits(
        tmp_path, dtype, streams):
    state = tmp_path / "final.bin"
    flags = ["--quorum", "2", "--grace-ms", "200", "--outer-lr", "0.7", "--outer-momentum", "0.5",
             "--final-state", str(state)]
    with (ServerProcess(tmp_path, *flags, learners=3, steps=60) as server,
          Learners(server, tmp_path, "--dtype", dtype, "--streams", str(streams)) as learners):
        processes = [learners.start(learner) for learner in range(3)]
        assert [p.wait(DEADLINE_S) for p in processes] == [0, 0, 0], learners.logs()
        assert server.wait() == 0, server.log.text()
        check_equal_to_the_server(learners, range(3), state)
        assert distance(learners.parameters(0)) < 0.05, distance(learners.parameters(0))


def test_a_killed_learner_rejoins_with_a_fresh_generation(tmp_path):
    """SIGKILL in the middle: the others go on, its successor catches up and ends with the rest."""
    state, rejoined = tmp_path / "final.bin", tmp_path / "rejoined"
    flags = ["--quorum", "2", "--grace-ms", "200", "--outer-momentum", "0.5",
             "--final-state", str(state)]
    hold = ["--hold", str(rejoined), "--hold-at", "20"]
    with (ServerProcess(tmp_path, *flags, learners=3, steps=60) as server,
          Learners(server, tmp_path) as learners):
        processes = [learners.start(learner, *hold) for learner in range(3)]
        until(lambda: len(server.log.find("outer step")) >= 10, "ten outer steps")
        processes[2].kill()
        assert processes[2].wait(DEADLINE_S) == -9
        until(lambda: len(server.log.find("learner disconnected")) >= 1, "the loss is seen")
        processes[2] = learners.start(2)
        until(lambda: len(server.log.find("learner connected")) == 4, "the successor is there")
        rejoined.touch()
        assert [p.wait(DEADLINE_S) for p in processes] == [0, 0, 0], learners.logs()
        assert server.wait() == 0, server.log.text()
        check_equal_to_the_server(learners, range(3), state)
        assert distance(learners.parameters(2)) < 0.05, distance(learners.parameters(2))
