"""The server as a process: exit statuses, signals, the tape, the log, and mistakes of its user."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest

from syncer.config import OPTIONS
from syncer.config.options import flag
from syncer.config.table import MILLISECONDS_MAX, SECONDS_MAX
from syncer.errors import InvariantViolation
from syncer.flags import read_config
from syncer.merge import FragmentStore
from syncer.server.system import Signals
from syncer.wire import encode, messages
from tests.e2e.scripted import (
    ROOT,
    ScriptedLearner,
    ServerProcess,
    ServerThread,
    layout_of,
    wait_until,
)
from tests.e2e.tape import records as tape_records
from tests.unit.rows import another

SMALL = layout_of((4,))
ZEROS = np.zeros(4, np.float32)


def run_server(*flags: str, module: str = "syncer.server") -> subprocess.CompletedProcess:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SYNCER_", "YETO_"))}
    return subprocess.run([sys.executable, "-m", module, *flags], cwd=ROOT, env=clean, timeout=60,
                          capture_output=True, text=True, check=False)


def one_sentence(result: subprocess.CompletedProcess) -> str:
    """What the user reads: one line, no traceback."""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("syncer: ")
    return lines[0]


@pytest.mark.parametrize(("flags", "text"), [
    (("--learners", "0", "--total-steps", "1"), "--learners 0"),
    (("--learners", "1", "--total-steps", "1", "--quorum", "2"), "--quorum 2"),
    (("--total-steps", "1"), "--learners is missing"),
    (("--learners", "1", "--total-steps", "1", "--no-such-flag"), "--no-such-flag is unknown"),
    (("--learners", "1", "--total-steps", "1", "--host", "0.0.0.0"), "SYNCER_HMAC_KEY"),
    (("--learners", "1", "--total-steps", "1", "--event-tape", "/no/such/place/tape"), "/no/such"),
    (("--learners", "1", "--total-steps", "1", "--checkpoint-path", "/tmp/no-such-syncer-run",
      "--final-state", "/tmp/no-such-syncer-run"), "would both write /tmp/no-such-syncer-run:"),
    (("--learners", "1", "--total-steps", "1", "--final-state", "/dev/stdout"), "/dev/stdout is a"),
    (("--learners", "1", "--total-steps", "1", "--checkpoint-path", "/dev/null"), "is a device"),
])
def test_a_bad_flag_is_one_sentence_and_status_2(flags, text):
    result = run_server(*flags)
    assert result.returncode == 2
    assert text in one_sentence(result)


@pytest.mark.parametrize("flags", [
    ("--island-hmac-key", "hunter2\udcff"), ("--host", "a..b"), ("--host", "x" * 70),
    ("--log-level", "a\nb"), ("--event-tape", "/no/such\n/tape"), ("a\nb",)])
def test_a_text_that_cannot_be_used_is_one_sentence_and_status_2(flags):
    result = run_server("--learners", "1", "--total-steps", "1", "--port", "0", *flags)
    assert result.returncode == 2
    assert "hunter2" not in one_sentence(result)


def in_a_shell(redirected: str, *flags: str) -> int:
    """Status of a server that starts with these redirections, and is asked to end if it serves."""
    script = f'exec "$@" {redirected}'
    process = subprocess.Popen(["bash", "-c", script, "bash", sys.executable, "-m", "syncer",
                                "serve", "--learners", "1", "--total-steps", "1", *flags],
                               cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        return process.wait(60)
    finally:
        process.kill()


@pytest.mark.parametrize("redirected", ["2>&-", "2>/dev/full", "0<&- 1>&- 2>&-", "1>&-"])
def test_a_mistake_is_status_2_wherever_the_sentence_goes(redirected):
    assert in_a_shell(redirected, "--quorum", "2") == 2


@pytest.mark.parametrize("redirected", ["2>&-", "2>/dev/full", "0<&- 1>&- 2>&-"])
def test_a_server_whose_streams_are_closed_serves(tmp_path, redirected):
    """And nothing else gets their numbers: the tape would have libraries write into it."""
    tape = tmp_path / "tape"
    status = in_a_shell(redirected, "--port", "0", "--start-timeout-s", "1", "--event-tape",
                        str(tape))
    assert status == 6
    assert tape.read_bytes() == b""


def test_a_port_in_use_is_one_sentence_and_status_3():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = run_server("--learners", "1", "--total-steps", "1", "--port", port)
        assert result.returncode == 3
        assert f"127.0.0.1:{port} is in use" in one_sentence(result)
        result = run_server("serve", "--learners", "1", "--total-steps", "1", "--port", port,
                            module="syncer")
        assert result.returncode == 3


def test_an_address_of_another_machine_is_status_3():
    result = run_server("--learners", "1", "--total-steps", "1", "--port", "0", "--host",
                        "192.0.2.1", "--allow-unauthenticated")
    assert result.returncode == 3
    assert "192.0.2.1:0" in one_sentence(result)


@pytest.mark.parametrize("lacking", [
    ["--outer-optimizer", "sgd", "--grace-ms", "0", "--island-hmac-key", "k"],
    ["--delta-correction", "none", "--quorum-capacity", "0.5"]])
def test_what_has_no_effect_is_a_warning_each(tmp_path, lacking):
    """The whole table of settings that need others, in two command lines."""
    idle = [option for option in OPTIONS if option.needs
            and not any(need.refused for need in option.needs)
            and flag(option.name) not in lacking]
    words = [word for option in idle for word in (
        [flag(option.name)] if option.default is False else
        [flag(option.name), another(option)[0] if option.default in (None, ()) else
         str(option.default)])]
    given = read_config(["--learners", "4", "--total-steps", "1", *lacking, *words], {})
    assert len(given.without_effect) > 15
    with ServerProcess(tmp_path, *lacking, *words, learners=4) as server:
        server.signal(signal.SIGTERM)
        assert server.wait() == 143
        found = server.log.find("a setting has no effect", level="warning")
        assert [(line["setting"], line["needs"]) for line in found] == list(given.without_effect)


WAITS = [option for option in OPTIONS if getattr(option.values, "high", 0) in (
    SECONDS_MAX, MILLISECONDS_MAX)]


@pytest.mark.parametrize("option", WAITS, ids=lambda option: option.name)
def test_a_wait_may_be_as_long_as_its_flag_admits(tmp_path, option):
    """31 years and more: the selector counts milliseconds in 32 bits."""
    settings = {option.name: option.values.high} | (
        {"quorum_capacity": 1.0} if option.name == "soft_deadline_s" else {})
    with (ServerThread(tmp_path, **settings) as server,
          server.learner(0, SMALL) as learner):
        learner.send_init([ZEROS])
        learner.push(learner.pull(1), ZEROS)
        server.log.wait("outer step", step=1)
        server.server.stop(signal.SIGTERM)
        server.log.wait("stopped by signal 15")


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130),
                                               (signal.SIGHUP, 129)])
def test_a_signal_ends_the_run(tmp_path, request, signum, status):
    tape = tmp_path / "tape"
    before = signal.signal(signum, signal.SIG_DFL)  # `nohup make test` ignores hang-ups: inherited
    request.addfinalizer(lambda: signal.signal(signum, before))
    with ServerProcess(tmp_path, "--event-tape", str(tape), steps=5) as server:
        with ScriptedLearner(server.port, 0, SMALL) as learner:
            learner.send_init([ZEROS])
            learner.push(learner.pull(1), ZEROS)
            learner.pull(2)
            server.signal(signum)
            learner.ended()
        assert server.wait() == status
        assert server.log.find("server totals")
        assert not server.log.find("Traceback")
    assert tape_records(tape)[-1] == {
        "event": "shutdown", "step": 1, "signal": signum}


def test_a_signal_while_nobody_is_connected(tmp_path):
    with ServerProcess(tmp_path) as server:
        server.signal(signal.SIGTERM)
        assert server.wait() == 143


def test_a_peer_that_does_not_read_cannot_hold_up_the_end(tmp_path):
    layout = layout_of((4_000_000,))
    with ServerThread(tmp_path) as server:
        learner = server.learner(0, layout)
        learner.send_init([np.zeros(4_000_000, np.float32)])
        server.log.wait("global parameters initialized")
        server.server.stop(signal.SIGINT)
        assert server.wait() == 130


def test_a_second_signal_ends_the_process_at_once(tmp_path):
    ended = []
    with ServerThread(tmp_path) as server:
        signals = Signals(server.server.loop, server.server.stop, end=ended.append)
        signals._caught(signal.SIGINT, None)
        assert not ended
        signals._caught(signal.SIGTERM, None)
        assert ended == [143]
        assert server.wait() == 130


def test_a_terminal_that_is_closed_says_so_twice(tmp_path):
    """The shell and the kernel: the second one must not end the process at once."""
    ended = []
    with ServerThread(tmp_path) as server:
        signals = Signals(server.server.loop, server.server.stop, end=ended.append)
        for _ in range(2):
            signals._hung_up(signal.SIGHUP, None)
        assert server.wait() == 129
    assert not ended


@pytest.mark.parametrize("ignored", [False, True])
def test_sighup_is_left_ignored(tmp_path, ignored):
    """nohup, or a service whose terminal goes."""
    given = signal.SIG_IGN if ignored else signal.SIG_DFL
    before = signal.signal(signal.SIGHUP, given)
    try:
        with ServerThread(tmp_path) as server, Signals(server.server.loop, server.server.stop):
            assert (signal.getsignal(signal.SIGHUP) == given) is ignored
        assert signal.getsignal(signal.SIGHUP) == given
    finally:
        signal.signal(signal.SIGHUP, before)


def test_handlers_are_given_back(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with (ServerThread(tmp_path) as server,
          Signals(server.server.loop, server.server.stop)):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


# ------------------------------------------------------------------------------- run-time ends
def test_nobody_acknowledges(tmp_path):
    """58: the exit names who is missing."""
    with ServerProcess(tmp_path, "--final-ack-timeout-s", "1") as server:
        with ScriptedLearner(server.port, 0, SMALL) as learner:
            learner.send_init([ZEROS])
            learner.push(learner.pull(), ZEROS)
            learner.until(messages.Manifest)
            learner.ended()
        assert server.wait() == 1
        server.log.wait("final cut not acknowledged in time; missing learners [0]", level="error")


def test_a_learner_that_drops_after_the_cut_gets_it_again(tmp_path):
    """57: the acknowledgement of the new generation counts."""
    with ServerThread(tmp_path) as server:
        learner = server.learner(0, SMALL)
        learner.send_init([ZEROS])
        learner.push(learner.pull(), ZEROS)
        learner.until(messages.Manifest)
        learner.close()
        server.log.wait("learner disconnected")
        back = server.learner(0, SMALL)
        back.finish()
        assert not [m for m in back.seen if isinstance(m, messages.Bcast)]
        back.close()
        assert server.wait() == 0


def test_a_stale_push_ends_a_run_with_lag_0(tmp_path):
    """41: a tape record, then status 1."""
    tape = tmp_path / "tape"
    flags = ("--max-base-lag", "0", "--grace-ms", "0", "--event-tape", str(tape))
    with ServerProcess(tmp_path, *flags, steps=3) as server:
        with ScriptedLearner(server.port, 0, SMALL) as learner:
            learner.send_init([ZEROS])
            learner.push(learner.pull(1), ZEROS)
            learner.push(learner.pull(2), ZEROS, base=0)
            learner.ended()
        assert server.wait() == 1
    record = tape_records(tape)[-1]
    assert record["event"] == "rl_strict_failure"
    assert record["metric"] == "rejected_stale_updates"


def test_budget_done_without_a_budget_ends_its_connection_and_not_the_run(tmp_path):
    """The learner beside it trains to the end."""
    with ServerThread(tmp_path, learners=2, start_learners=1, quorum=1) as server:
        learner, wrong = server.learner(0, SMALL), server.learner(1, SMALL)
        wrong.send(encode.encode_budget_done(messages.BudgetDone(5)))
        assert wrong.error() == ("BUDGET_DONE(5) of learner 1: the run has no "
                                 "--learner-budget-steps")
        server.log.wait("report of a spent budget refused", level="warning", learner=1)
        learner.send_init([ZEROS])
        learner.push(learner.pull(), ZEROS)
        learner.finish()
        assert server.wait() == 0


def test_a_final_state_that_cannot_be_written(tmp_path):
    """The learners have what they trained for, and the status says what is missing."""
    directory = tmp_path / "out"
    directory.mkdir()
    with ServerProcess(tmp_path, "--final-state", str(directory / "state")) as server:
        with ScriptedLearner(server.port, 0, SMALL) as learner:
            learner.send_init([ZEROS])
            pull = learner.pull()
            directory.rmdir()
            learner.push(pull, ZEROS)
            assert learner.finish().step == 1
        assert server.wait() == 1
        server.log.wait("final state not written", level="error")
        server.log.wait("final-state could not be written", level="error")


def test_a_defect_is_one_line_and_status_1(tmp_path, monkeypatch):
    with ServerThread(tmp_path) as server:
        def broken(event, given):
            raise InvariantViolation("two rounds of one fragment")

        monkeypatch.setattr(server.witness, "after", broken)
        learner = server.learner(0, SMALL)
        learner.ended()
        assert server.wait() == 1
        lines = server.log.find("internal error: InvariantViolation: two rounds", level="error")
        assert len(lines) == 1
        assert all(line["level"] == "debug" for line in server.log.find("Traceback"))


def test_a_defect_in_a_worker_ends_the_run(tmp_path, monkeypatch):
    with ServerThread(tmp_path) as server:
        learner = server.learner(0, SMALL)
        learner.send_init([ZEROS])
        pull = learner.pull()

        def broken(*arguments):
            raise RuntimeError("a defect")

        monkeypatch.setattr(FragmentStore, "prepare", broken)
        learner.push(pull, ZEROS)
        learner.ended()
        assert server.wait() == 1
        server.log.wait("internal error: RuntimeError", level="error")


# --------------------------------------------------------------------------------- tape and log
def test_the_log_lines_that_other_programs_look_for(tmp_path):
    with ServerProcess(tmp_path, "--log-format", "text", steps=1, wait=False) as server:
        def port():
            for line in server.log.text().splitlines():
                if "syncer listening" in line:
                    return int(line.split("port=")[1].split()[0])
            assert server.process.poll() is None, server.log.text()
            return None

        with ScriptedLearner(wait_until(port, "syncer listening"), 0, SMALL) as learner:
            learner.send_init([ZEROS])
            learner.push(learner.pull(), ZEROS)
            learner.finish()
        assert server.wait() == 0
        text = server.log.text()
    at = 0
    for line in ("syncer listening", "learner connected", "global parameters initialized",
                 "outer step", "learner finalized",
                 "all learners acknowledged final cut learners=1",
                 "training complete after 1 outer steps", "server totals bytes_received="):
        assert line in text[at:], f"{line} is missing or out of order in\n{text}"
        at = text.index(line, at)
    assert "\x1b" not in text
    assert all(line.startswith("20") for line in text.splitlines())


def test_the_tape_is_whole_lines_in_step_order(tmp_path):
    tape = tmp_path / "tape"
    tape.write_text('{"event": "of an earlier run"}\n')
    layout = layout_of((4,), (3,))
    with ServerThread(tmp_path, total_steps=6, event_tape=str(tape)) as server:
        learner = server.learner(0, layout)
        learner.send_init([np.zeros(4, np.float32), np.zeros(3, np.float32)])
        for step in range(1, 7):
            pull = learner.pull(step)
            learner.push(pull, np.ones((4, 3)[pull.fragment]), c_steps=2, c_tokens=10)
        learner.finish()
        learner.close()
        assert server.wait() == 0
    text = tape.read_text()
    assert text.endswith("\n")
    assert text.startswith('{"event": "of an earlier run"}\n')
    init, *merges = tape_records(tape, skip=1)
    assert init["event"] == "init"
    assert [record["step"] for record in merges] == list(range(1, 7))
    assert list(merges[0])[:9] == [
        "protocol_version", "delta_semantics", "sync/layout_hash", "sync/base_version",
        "sync/responders", "sync/quorum", "sync/rejected_stale_updates", "sync/merge_seconds",
        "sync/global_delta_norm"]
    assert merges[0]["responders"][0]["weight"] == 50.0
