"""Learners that drop, misbehave and return at random: the run ends trained, with one history.

The choices come from a seed, what they meet comes from the machine; what must hold, holds always.
"""

from __future__ import annotations

import hashlib
import random
import threading
from contextlib import suppress

import numpy as np
import pytest

from syncer.protocol import DTYPE_BF16, DTYPE_F32, DTYPE_Q4, Msg
from syncer.wire import encode, messages
from tests.e2e.scripted import (
    PATIENCE_S,
    EndOfStream,
    ScriptedLearner,
    ServerProcess,
    layout_of,
    wait_until,
)
from tests.e2e.tape import records as tape_records

LAYOUT = layout_of((1_200_000,), (3000, 7), (50_000,))
LEARNERS, STEPS = 4, 36


class Fleet:
    """The lives of some learners, each on its own thread, and what they saw together."""

    def __init__(self, port: int, dtype: int, seed: int):
        self.port, self.dtype, self.seed = port, dtype, seed
        self.over = threading.Event()
        self.lock = threading.Lock()
        self.history: dict[tuple[str, int, int], str] = {}
        self.crimes = 0
        self.problems: list[str] = []
        self.threads = [threading.Thread(target=self.lives, args=(learner,))
                        for learner in range(LEARNERS)]

    def lives(self, learner: int) -> None:
        rng = random.Random(self.seed * 100 + learner)
        try:
            while not self.over.is_set():
                self.life(learner, rng)
        except BaseException as error:
            self.problems.append(f"learner {learner}: {error!r}")
            raise

    def life(self, number: int, rng: random.Random) -> None:
        """One connection: up to some messages, then it is dropped."""
        with suppress(EndOfStream, OSError), ScriptedLearner(
                self.port, number, LAYOUT, dtype=self.dtype,
                streams=rng.choice([0, 0, 1, 4])) as learner:
            if number == 0:
                learner.send_init([np.zeros(f.numel, np.float32) for f in LAYOUT.fragments])
            seen: dict[tuple[str, int], list[int]] = {}
            for _ in range(rng.choice([2, 5, 20, 200])):
                message = learner.next()
                if isinstance(message, messages.Bcast | messages.FinalFragment):
                    self.remember(message, seen, not learner.data)
                elif isinstance(message, messages.Manifest):
                    learner.acknowledge(message.step)
                elif message is Msg.SHUTDOWN:
                    self.over.set()
                    return
                elif isinstance(message, messages.Pull) and not self.answer(learner, message, rng):
                    return

    def answer(self, learner: ScriptedLearner, pull: messages.Pull, rng: random.Random) -> bool:
        """Mostly a good push; at first and sometimes a crime; a heartbeat too, or the end."""
        numel = LAYOUT.fragments[pull.fragment].numel
        luck = rng.random()
        if luck < 0.04 and self.crimes:
            return False
        if luck < 0.10 or not self.crimes:
            self.crimes += 1
            bad = np.full(numel, np.inf, np.float32)
            learner.send(b"garbage" * 10) if luck < 0.07 else learner.push(pull, bad)
            return True
        learner.push(pull, np.full(numel, -0.01, np.float32), local_step=pull.step)
        if luck < 0.3:
            learner.send(encode.encode_heartbeat(messages.Heartbeat(learner.learner, pull.step)))
        return True

    def remember(self, message, seen, one_socket: bool) -> None:
        """No version twice on a connection, in order on one socket, the same bytes for all."""
        kind, fragment, version = type(message).__name__, message.fragment, message.version
        versions = seen.setdefault((kind, fragment), [])
        if version in versions or (one_socket and versions and version < versions[-1]):
            self.problems.append(f"{kind} {fragment}: version {version} after {versions}")
        versions.append(version)
        digest = hashlib.sha256(message.tensor).hexdigest()
        with self.lock:
            first = self.history.setdefault((kind, fragment, version), digest)
        if digest != first:
            self.problems.append(f"{kind} {fragment} version {version} has two contents")


@pytest.mark.parametrize(("seed", "dtype"), [(1, DTYPE_F32), (2, DTYPE_BF16), (3, DTYPE_Q4)])
def test_a_restless_fleet_trains_to_the_end(tmp_path, seed, dtype):
    tape = tmp_path / "tape"
    flags = ("--grace-ms", "50", "--quorum", "2", "--pipeline", str(seed), "--quorum-timeout-s",
             "1", "--event-tape", str(tape), "--final-ack-timeout-s", "60")
    with ServerProcess(tmp_path, *flags, learners=LEARNERS, steps=STEPS) as server:
        fleet = Fleet(server.port, dtype, seed)
        for thread in fleet.threads:
            thread.start()
        try:
            status = wait_until(lambda: server.process.poll() is not None and "ended",
                                "the end of the run")
        finally:
            fleet.over.set()
            server.process.kill()
            for thread in fleet.threads:
                thread.join(PATIENCE_S)
        assert status == "ended"
        assert server.process.wait() == 0, server.log.text()[-3000:]
    assert not fleet.problems
    assert fleet.crimes
    steps = [record["step"] for record in tape_records(tape) if "attempt" in record]
    assert steps == list(range(1, STEPS + 1))
