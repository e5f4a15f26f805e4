"""Clients of the published protocol over crashes between two files: nobody restarts them."""

from __future__ import annotations

import signal
import threading

import numpy as np
import pytest

from syncer.checkpoint.epoch_file import read_epoch
from syncer.layout import RDA, FragmentLayout, Layout
from syncer.protocol import DTYPE_BF16, DTYPE_F32, DTYPE_Q4, Msg
from syncer.wire import messages
from syncer.wire.contracts import run_contract
from tests.e2e.checkpointed import facts_of
from tests.e2e.scripted import EndOfStream, ScriptedLearner, ServerProcess
from tests.e2e.waiting import until

LAYOUT = Layout((FragmentLayout(RDA, (300,)), FragmentLayout(RDA, (7, 20))))
STEPS, CRASHES = 48, 4
INIT = [np.full(f.numel, 1.0, np.float32) for f in LAYOUT.fragments]


class PublishedClient(threading.Thread):
    """Knows nothing of epochs: it keeps the newest version of each fragment whatever connection it
    came on, drops older ones, and ends when a number comes again with other bytes. `port` says
    where to dial next; every pull is answered on top of what it holds."""

    def __init__(self, learner: int, dtype: int, port: int):
        super().__init__(daemon=True)
        self.learner, self.dtype, self.port = learner, dtype, port
        self.held: dict[int, tuple[int, bytes]] = {}
        self.trouble = ""
        self.dropped = 0
        self.done = False
        self.start()

    def run(self) -> None:
        while not self.done and not self.trouble:
            try:
                with ScriptedLearner(self.port, self.learner, LAYOUT, dtype=self.dtype) as line:
                    self.speak(line)
            except (EndOfStream, OSError):
                threading.Event().wait(0.05)      # then it dials again

    def speak(self, line: ScriptedLearner) -> None:
        if self.learner == 0 and not self.held:
            line.send_init(INIT)
        while not self.trouble:
            message = line.next()
            if isinstance(message, messages.Bcast):
                self.hear(message)
            elif isinstance(message, messages.Pull):
                base = self.held[message.fragment][0]
                numel = LAYOUT.fragments[message.fragment].numel
                line.push(message, np.full(numel, 0.5, np.float32), base=base,
                          local_step=message.step)
            elif isinstance(message, messages.Manifest):
                line.acknowledge(message.step)
            elif message == Msg.SHUTDOWN:
                self.done = True
                return

    def hear(self, message: messages.Bcast) -> None:
        version, data = self.held.get(message.fragment, (-1, b""))
        if message.version == version and bytes(message.tensor) != data:
            self.trouble = f"conflicting BCAST_FRAGMENT payloads of version {version}"
        elif message.version < version:
            self.dropped += 1
        else:
            self.held[message.fragment] = message.version, bytes(message.tensor)


def crash_between_files(server: ServerProcess) -> None:
    """Some steps behind a file, and some before the next."""
    until(lambda: len(server.log.find("outer step")) >= 5, "five steps of this server")
    until(lambda: server.log.find("outer step")[-1]["step"] % 8 in (2, 3, 4, 5, 6),
          "a step between two files")
    server.signal(signal.SIGKILL)
    server.wait()


@pytest.mark.parametrize("quorum", ["1", "2"])
@pytest.mark.parametrize("dtype", [DTYPE_F32, DTYPE_BF16, DTYPE_Q4], ids=["f32", "bf16", "q4"])
def test_two_published_clients_live_through_four_crashes(tmp_path, dtype, quorum):
    """With the usual file of every 8th step: without renumbering all pushes are of a base of the
    future, or both clients end over a number that has other bytes than before."""
    path = tmp_path / "c"
    flags = ["--checkpoint-path", str(path), "--quorum", quorum, "--grace-ms", "20",
             "--min-round-interval-ms", "20"]
    clients: list[PublishedClient] = []
    port = "0"
    for life in range(CRASHES + 1):
        more = ("--resume", "--port", port) if life else ()
        with ServerProcess(tmp_path, *flags, *more, learners=2, steps=STEPS) as server:
            port = str(server.port)
            if not clients:
                clients = [PublishedClient(learner, dtype, server.port) for learner in range(2)]
            if life < CRASHES:
                crash_between_files(server)
                continue
            status = server.wait()
            assert status == 0, server.log.text()
            raised = server.log.find("steps were raised")
    for client in clients:
        client.join(10)
        assert not client.trouble
        assert client.done
        assert client.dropped == 0
    assert len(raised) == 1
    facts = facts_of(path)
    assert facts.step == STEPS + facts.lineage.renumbered
    assert facts.lineage.epoch == CRASHES + 1
    assert facts.lineage.renumbered == CRASHES * 8002
    assert sum(entry[0] for entry in facts.ledger.values()) >= STEPS
    assert len(facts.lineage.entries) <= CRASHES


def test_a_named_run_is_resumed_as_itself(tmp_path):
    """By its name or without one; a learner of another run is refused, also without the block."""
    path = tmp_path / "c"
    fingerprint = b"\x11" * 32
    contract = run_contract(fingerprint, "blue")
    flags = ["--checkpoint-path", str(path), "--checkpoint-every", "1"]
    with ServerProcess(tmp_path, *flags, "--run", "blue", steps=9) as server:
        with ScriptedLearner(server.port, 0, LAYOUT) as stranger:
            assert f"expected session_contract_hash={contract.hex()} (run blue)" in stranger.error()
        with ScriptedLearner(server.port, 0, LAYOUT, contract=contract) as learner:
            learner.send_init(INIT)
            learner.pull(1)
            server.signal(signal.SIGTERM)
            assert server.wait() == 143
    assert facts_of(path).lineage.run == "blue"
    with ServerProcess(tmp_path, *flags, "--resume", "--run", "red", steps=9,
                       wait=False) as server:
        assert server.wait() == 4
        assert "run: expected red, which --run asks for, found blue" in server.log.text()
    for more in ((), ("--run", "blue")):
        with ServerProcess(tmp_path, *flags, "--resume", *more, steps=9) as server:
            assert server.log.wait("resumed from checkpoint", run="blue")
            with ScriptedLearner(server.port, 0, LAYOUT) as stranger:
                assert "run blue" in stranger.error()
            with ScriptedLearner(server.port, 0, LAYOUT, contract=contract) as learner:
                learner.pull(1)
                server.signal(signal.SIGTERM)
                assert server.wait() == 143
    assert facts_of(path).lineage.epoch == 1, "of the process that wrote it"
    assert read_epoch(str(path)).epoch == 3, "no epoch is given twice"
