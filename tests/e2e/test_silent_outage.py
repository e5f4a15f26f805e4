"""A network that drops every packet, or forgets a machine: who is left notices, and goes on."""

import json
import os
import subprocess
import sys
import time

import pytest

from syncer.checkpoint.model_file import model_metadata

from .dark_network import NEAR, DarkNetwork, possible, reader, sending
from .scripted import ROOT

PORT = 29400
DARK_S = 180.0
"""Keep-alive and TCP_USER_TIMEOUT take 60 s; this bound is only for a test that fails."""


@pytest.fixture
def network():
    if not possible():
        pytest.skip("no network namespaces here: that takes root on Linux, ip, unshare, nsenter")
    with DarkNetwork() as made:
        yield made


@pytest.fixture
def start(tmp_path):
    """Starts a Python module somewhere; its stderr is a file. `running`: the processes so far."""
    running = []

    def begin(name: str, where: list[str], *arguments: str):
        path = tmp_path / name
        with path.open("wb") as stderr:
            running.append(subprocess.Popen(
                [*where, sys.executable, "-m", *arguments], stderr=stderr, cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT)}))
        return reader(path)

    begin.running = running
    yield begin
    for process in running:
        process.kill()
        process.wait()


def until(reached, what: str):
    deadline = time.monotonic() + DARK_S
    while not (value := reached()):
        assert time.monotonic() < deadline, f"not within {DARK_S} s: {what}"
        time.sleep(0.05)
    return value


def events(lines, text: str) -> list[dict]:
    """Complete JSON lines of a log that say it."""
    found = []
    for line in lines():
        if text in line and line.endswith("}"):
            found.append(json.loads(line))
    return found


@pytest.mark.slow
@pytest.mark.timeout(4 * DARK_S)
def test_a_silent_outage_is_noticed_and_said_by_both_sides(network, start):
    log = start("server", network.near, "syncer.server", "--learners", "2", "--total-steps",
                "1000000", "--quorum", "1", "--grace-ms", "20", "--sync-interval-steps", "0",
                "--min-round-interval-ms", "50", "--host", NEAR, "--port", str(PORT),
                "--allow-unauthenticated", "--log-format", "json")
    start("local", network.near, "tests.e2e.endless_learner", f"{NEAR}:{PORT}", "0")
    remote = start("remote", network.far, "tests.e2e.endless_learner", f"{NEAR}:{PORT}", "1")

    def merged_both(behind: int) -> bool:
        return any(event["responders"] == 2 for event in events(log, "outer step")[behind:])

    until(lambda: merged_both(0), "steps with both learners")
    network.darken()
    told = until(lambda: events(log, "fallen silent"), "the server's warning")
    assert [event["learner"] for event in told] == [1]
    assert told[0]["level"] == "warning"
    assert told[0]["silent_s"] > 30
    assert "quorum timeout" in told[0]["next"]
    until(lambda: any("no news of" in line for line in remote()), "no news, says the learner")
    until(lambda: any("lost (" in line and "nothing came for" in line for line in remote()),
          "the learner gives the connection up")
    steps = len(events(log, "outer step"))
    until(lambda: len(events(log, "outer step")) > steps, "the others go on")
    network.light()
    until(lambda: any("again after" in line for line in remote()), "the learner is back")
    steps = len(events(log, "outer step"))
    until(lambda: merged_both(steps), "and takes part")


@pytest.mark.slow
@pytest.mark.timeout(4 * DARK_S)
@pytest.mark.parametrize("cut", ["push", "broadcast"])
def test_a_message_that_a_forgotten_flow_cuts_off_is_sent_again(network, start, cut):
    """A middlebox forgets one data socket in the middle of 8 MB. The quorum needs this learner, and
    its timeout is far away, so no step is made before the message has come."""
    log = start("server", network.near, "syncer.server", "--learners", "1", "--total-steps",
                "1000000", "--sync-interval-steps", "0", "--host", NEAR, "--port", str(PORT),
                "--allow-unauthenticated", "--log-format", "json")
    learner = start("learner", network.far, "tests.e2e.endless_learner", f"{NEAR}:{PORT}", "0",
                    "2000")
    until(lambda: len(events(log, "outer step")) > 1, "steps")
    network.slow_down("40mbit")
    if cut == "push":
        port = until(lambda: [mine for mine, _ in sending(network.far, 100_000)], "a push")[0]
    else:
        port = until(lambda: [theirs for _, theirs in sending(network.near, 100_000)],
                     "a broadcast")[0]
    network.forget(port)
    until(lambda: any("lost (" in line for line in learner()), "the learner notices")
    until(lambda: any("again after" in line for line in learner()), "the learner is back")
    connected = [event["time"] for event in until(
        lambda: events(log, "learner connected")[1:], "the new connection")][-1]
    until(lambda: sum(event["time"] > connected for event in events(log, "outer step")) > 2,
          "steps with the new connection")
    assert not events(log, "quorum timeout")


@pytest.mark.slow
@pytest.mark.timeout(4 * DARK_S)
def test_a_machine_that_vanished_and_is_back_at_once_takes_its_own_place(network, start):
    """Every round needs both, and nothing tells the server that the old connection is dead: its
    packets, also the FIN of its end, are dropped, with a broadcast and a pull on the way to it. TCP
    takes a minute to find out."""
    log = start("server", network.near, "syncer.server", "--learners", "2", "--total-steps",
                "1000000", "--quorum", "2", "--sync-interval-steps", "0", "--host", NEAR, "--port",
                str(PORT), "--allow-unauthenticated", "--log-format", "json")
    start("local", network.near, "tests.e2e.endless_learner", f"{NEAR}:{PORT}", "0")
    start("remote", network.far, "tests.e2e.endless_learner", f"{NEAR}:{PORT}", "1")
    until(lambda: len(events(log, "outer step")) > 2, "steps with both")
    for port, _ in sending(network.far, 0):
        network.forget(port)
    start.running[-1].kill()
    start("again", network.far, "tests.e2e.endless_learner", f"{NEAR}:{PORT}", "1")
    until(lambda: len(events(log, "learner connected")) > 2, "the machine is back")
    steps = len(events(log, "outer step"))
    until(lambda: len(events(log, "outer step")) > steps, "steps with both, again")
    assert not events(log, "learner disconnected"), "it waited until TCP had found out"
    older, newer = (event["generation"] for event in events(log, "learner connected")
                    if event["learner"] == 1 and event["message"] == "learner connected")
    told = events(log, "rebound outstanding pull")[0]
    assert (told["died"], told["generation"]) == (older, newer)


@pytest.mark.slow
@pytest.mark.timeout(4 * DARK_S)
def test_a_pull_whose_link_is_unplugged_goes_on_when_it_is_back(network, start, tmp_path):
    """Nobody gets an error: keep-alive finds out on both sides, and the file stays whole."""
    output = tmp_path / "model.safetensors"
    log = start("server", network.near, "syncer.server", "--learners", "1", "--total-steps",
                "1000000", "--sync-interval-steps", "0", "--min-round-interval-ms", "50", "--host",
                NEAR, "--port", str(PORT), "--allow-unauthenticated", "--log-format", "json")
    start("local", network.near, "tests.e2e.endless_learner", f"{NEAR}:{PORT}", "0")
    until(lambda: events(log, "outer step"), "the first step")
    said = start("pull", network.far, "syncer", "pull", f"{NEAR}:{PORT}", "-o", str(output),
                 "--follow")

    def step() -> int:
        return int((model_metadata(output) or {})["global_step"]) if output.exists() else -1

    first = until(lambda: step() > 0 and step(), "a cut")
    network.darken()
    until(lambda: any("waiting for the next cut" in line for line in said()), "a word of it")
    until(lambda: any("dialing again" in line for line in said()), "the end of the connection")
    until(lambda: events(log, "reader left"), "the server's notice of it")
    dark = step()
    network.light()
    until(lambda: step() > dark >= first, "a cut of after the outage")
