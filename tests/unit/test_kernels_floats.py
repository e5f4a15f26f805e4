"""Kernels compute as IEEE-754 says in a thread whose float mode a library has changed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from syncer import kernels
from syncer.config import Config
from syncer.errors import KernelError
from syncer.kernels import testing
from syncer.layout import AVG, RDA, FragmentLayout, Layout
from syncer.learner.fragment import Fragment
from syncer.merge import FragmentStore
from syncer.server import system
from syncer.server.log import Log
from syncer.server.selector import SelectorLoop
from syncer.server.service import Server
from syncer.server.system import ThreadWorkers
from syncer.server.workers import Job
from tests import flushing
from tests.differential.kernel_cases import CASES, run_case
from tests.flushing import FLUSH, UPWARD

F32 = np.float32
pytestmark = pytest.mark.skipif(not flushing.SUPPORTED, reason="this machine's mode is not known")
MODES = pytest.mark.parametrize("bits", [FLUSH, UPWARD, FLUSH | UPWARD],
                                ids=["flush", "upward", "both"])


def faint(n: int, seed: int = 1) -> np.ndarray:
    """Subnormal values of both signs, some zeros."""
    bits = np.random.default_rng(seed).integers(0, 1 << 23, n, dtype=np.uint32)
    bits[::5] = 0
    bits[::3] |= np.uint32(1 << 31)
    return bits.view(F32)


def test_the_mode_is_seen_and_put_right() -> None:
    assert kernels.float_faults() == ""
    with flushing.changed(FLUSH):
        assert kernels.float_faults() == "subnormal numbers are flushed to zero"
        with kernels.exact_floats():
            assert flushing.mode() == 0
            assert kernels.float_faults() == ""
    flushing.change(FLUSH | UPWARD)
    assert kernels.restore_floats() == (
        "subnormal numbers are flushed to zero, results are not rounded to nearest")
    assert flushing.mode() == 0
    assert kernels.restore_floats() == ""


@MODES
@pytest.mark.parametrize("name", CASES)
def test_kernels_give_the_same_bits_and_leave_the_mode(name: str, bits: int) -> None:
    """On one thread and on a team that is made in that mode."""
    for threads in (1, 3):
        n = 3 * 16384 + 5
        expected = run_case(name, n, seed=3, threads=threads)
        changed = _calls_in(bits)
        with pytest.MonkeyPatch.context() as patch:
            for module, called in changed:
                patch.setattr(module, called.__name__, changed_call(called, bits))
            assert run_case(name, n, seed=3, threads=threads) == expected


def _calls_in(bits: int) -> list:
    return [(module, getattr(module, name))
            for module, names in ((testing, ["accumulate", "accumulate_first", "decode",
                                             "delayed_nesterov", "encode_range", "nesterov", "norm",
                                             "rotate", "rotated_sumsq", "scale", "sgd", "shrink",
                                             "three_sums"]),
                                  (kernels, ["axpby_blend", "decode_bf16", "decode_f32",
                                             "decode_q4", "dot", "encode_bf16", "encode_q4",
                                             "first_nonfinite", "sumsq"]))
            for name in names]


def changed_call(call, bits: int):
    """The kernel alone in that mode: its inputs are made in the usual one."""
    def inside(*arguments, **options):
        with flushing.changed(bits):
            return call(*arguments, **options)
    return inside


@MODES
def test_golden_results_in_another_mode(bits: int) -> None:
    with flushing.changed(bits):
        assert kernels.check() == []
        kernels.self_check()


def in_a_new_thread(call) -> list:
    found: list = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found


def test_a_team_that_was_made_flushing_computes_right_later() -> None:
    """OpenMP's threads inherit the mode of whoever has them made, and keep it."""
    x = faint(8 * 16384)

    def sums() -> tuple[float, float]:
        with flushing.changed(FLUSH):
            first = kernels.sumsq(x, 8)  # this thread's own team begins here
        return first, kernels.sumsq(x, 8)

    expected = kernels.sumsq(x)
    assert expected > 0
    assert in_a_new_thread(sums) == [(expected, expected)]


@pytest.mark.parametrize("mode", [AVG, RDA])
def test_a_merge_while_subnormal_numbers_are_flushed(mode: int) -> None:
    n = 5 * 16384 + 3

    def merged(threads: int, change: int) -> list[bytes]:
        store = FragmentStore(Layout((FragmentLayout(mode, (n - 100, 100)),)), lr=0.7, momentum=0.9,
                              threads=threads, delta_correction="heloco")
        store.adopt(0, np.ones(n, F32), state={"momentum": faint(n, 2)})
        pushes = [(i, 1, 1.0 + i, faint(n, 3 + i) * F32(2.0 ** (20 * i))) for i in range(3)]
        with flushing.changed(change):
            prepared = store.prepare(0, 1, pushes)
        version = prepared.result
        arrays = version.params, version.state["momentum"]
        return [np.asarray(array).tobytes() for array in arrays]

    expected = merged(1, 0)
    for threads in (1, 2):
        assert in_a_new_thread(lambda threads=threads: merged(threads, FLUSH)) == [expected]


def test_a_delta_in_another_mode() -> None:
    local, anchor = F32(2.0**-126) + faint(1000), np.full(1000, 2.0**-126, F32)
    plain, flushed = (np.empty(4000, np.uint8) for _ in range(2))
    for out, bits in ((plain, 0), (flushed, FLUSH)):
        fragment = Fragment([local], 1)
        fragment.anchor = anchor
        with flushing.changed(bits):
            fragment.pack_delta(out)
    assert plain.any()
    assert plain.tobytes() == flushed.tobytes()


def test_importing_in_another_mode_is_no_error_and_says_so() -> None:
    code = ("from tests import flushing; flushing.change(flushing.FLUSH | flushing.UPWARD)\n"
            "from syncer.kernels.command import report; print(report())\n"
            "print(flushing.mode() == flushing.FLUSH | flushing.UPWARD)")
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                           cwd=Path(__file__).parents[2], env=os.environ)
    assert "floats    subnormal numbers are flushed to zero" in found.stdout
    assert found.stdout.endswith("True\n")


class Lines:
    """Takes the lines of a log."""

    terminal = False

    def __init__(self) -> None:
        self.lines: list[bytes] = []

    def __call__(self, line: bytes) -> None:
        self.lines.append(line)

    def close(self) -> None:
        """Nothing waits here."""


def test_a_server_undoes_what_a_library_did_before_it_and_says_so() -> None:
    lines = Lines()
    config = Config(learners=1, total_steps=1, port=0, allow_unauthenticated=True)

    def modes() -> list[int]:
        flushing.change(FLUSH)
        server = Server(config, Log("info", "text", lines))
        found, done = [flushing.mode()], threading.Event()
        server.workers.submit(Job(flushing.mode, lambda mode, error: found.append(mode)))
        server.workers.submit(Job(done.set, lambda *answer: None))
        assert done.wait(60)
        while len(found) < 2:
            server.loop.poll(server.loop.now_ns() + 10**7)
        server.stop()
        server.run()
        return found

    assert in_a_new_thread(modes) == [[0, 0]]
    said = [line for line in lines.lines if b"a library changed how floats are computed" in line]
    assert len(said) == 1
    assert b"WARN" in said[0]
    assert b"thread=main" in said[0]
    assert b"subnormal numbers are flushed to zero" in said[0]


def test_a_worker_is_put_right_before_each_job() -> None:
    """A library that a job calls may change its thread; that is said once for each thread."""
    loop = SelectorLoop()
    workers, said, found = ThreadWorkers(loop, 1), [], []
    workers.floats_restored = lambda *what: said.append(what)
    for _ in range(3):
        workers.submit(Job(flushing.mode, lambda mode, error: found.append(mode)))
        workers.submit(Job(lambda: flushing.change(FLUSH), lambda *answer: None))
    while len(found) < 3:
        loop.poll(loop.now_ns() + 10**7)
    workers.close()
    loop.close()
    assert found == [0, 0, 0]
    assert said == [("syncer-worker-0", "subnormal numbers are flushed to zero")]


def test_a_worker_whose_kernels_are_wrong_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong() -> None:
        raise KernelError("kernel self-check failed")

    monkeypatch.setattr(system, "self_check", wrong)
    loop = SelectorLoop()
    workers = ThreadWorkers(loop, 1)
    with pytest.raises(KernelError, match="kernel self-check failed"):
        loop.poll(loop.now_ns() + 60 * 10**9)  # until something is posted
    workers.close()
    loop.close()
