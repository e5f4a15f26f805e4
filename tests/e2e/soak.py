"""A long run in short: learners come, go, pause and send rubbish, behind a middlebox that forgets.

    python -m tests.e2e.soak --seconds 600

A real server with a checkpoint and a tape serves eight honest learners, a hostile one and
strangers. At the end: every honest learner merged in the last part, memory, descriptors and threads
of the server are flat (medians of the last and the middle third), the log is small, and the server
stops when it is told to, with a checkpoint that is whole. Prints figures; status 1 if a part fails.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from syncer.errors import SyncerError
from syncer.learner import Learner, build_layout, layout_fingerprint
from syncer.protocol import Msg
from syncer.wire import encode

from .forgetful import ForgetfulProxy
from .scripted import ROOT, ScriptedLearner, ServerProcess

HONEST, HOSTILE = 8, 8
SHAPES = {"embed": (300, 40), "a.weight": (200, 150), "b.weight": (150, 200), "bias": (7,)}
FRAGMENTS = 3
KEY = "soak"
LOG_BYTES_MAX = 1_000_000
LAST_S = 60.0
"""Every honest learner merges in so much of the end. A run that is shorter than two of it counts
from its middle, and goes on for as much more if somebody has not merged by then."""
LULL_S, EVERY_S, FORGET_S = 4.0, 20.0, 2.5
"""Every so often all learners rest for a while, as in a long local phase: then the middlebox
forgets their data sockets, while heartbeats keep the control sockets."""
MIB = 1024 * 1024


class Sample(NamedTuple):
    """What the server's process has at a moment."""

    rss: int
    descriptors: int
    threads: int


def sample(pid: int) -> Sample:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return Sample(pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(f"/proc/{pid}/fd")),
                  len(os.listdir(f"/proc/{pid}/task")))


class Merges:
    """The pushes of each learner that were merged, by the moment at which the tape was seen."""

    def __init__(self, path: Path):
        self.path, self._read, self._rest = path, 0, b""
        self.at: dict[int, list[float]] = collections.defaultdict(list)
        self.steps = 0

    def look(self, now: float) -> None:
        if not self.path.exists():
            return
        with self.path.open("rb") as tape:
            tape.seek(self._read)
            new = tape.read()
        self._read += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        for line in lines:
            record = json.loads(line)
            if "responders" in record:
                self.steps += 1
                for push in record["responders"]:
                    self.at[push["id"]].append(now)

    def since(self, moment: float) -> list[int]:
        """Merged pushes of each honest learner from a moment on."""
        return [sum(at >= moment for at in self.at[i]) for i in range(HONEST)]


class Fleet:
    """Everybody who is not the server; `close` ends them."""

    def __init__(self, direct: int, middlebox: int, seed: int):
        self.direct, self.address = direct, f"127.0.0.1:{middlebox}"
        self.over = threading.Event()
        self.server_stops = False
        """From here on no answer of the server is owed."""
        self.lives = 0
        self.failures: list[str] = []
        bodies = [(self._honest, i) for i in range(HONEST)] + [
            (self._hostile, HOSTILE), (self._stranger, HOSTILE + 1)]
        self.threads = [
            threading.Thread(target=self._run, args=(body, random.Random(seed * 100 + i), i),
                             name=f"soak-{body.__name__}-{i}", daemon=True) for body, i in bodies]
        for thread in self.threads:
            thread.start()

    def _run(self, body, dice: random.Random, learner: int) -> None:
        while not self.over.is_set():
            try:
                body(dice, learner)
            except (SyncerError, OSError) as error:
                if body == self._honest and not self.server_stops:
                    self.failures.append(f"learner {learner}: {error}")
            except Exception as error:
                self.failures.append(f"{body.__name__} {learner}: {error!r}")
            self.over.wait(dice.uniform(0.1, 1.5))

    def _honest(self, dice: random.Random, learner: int) -> None:
        """One life: it comes, trains, pauses now and then, and goes in one of three ways."""
        values = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        one = Learner(values, self.address, learner_id=learner, dtype="bf16", fragments=FRAGMENTS,
                      num_streams=dice.randint(0, 2), key=KEY, connect_timeout_s=60)
        try:
            if learner or self.lives:
                one.adopt(60)
            self.lives += 1
            ends = time.monotonic() + dice.uniform(4, 20)
            while time.monotonic() < ends and not self.over.is_set():
                values["bias"] += np.float32(dice.uniform(-0.01, 0.01))
                one.step(dice.randint(1, 9))
                self.over.wait(dice.uniform(1, 3) if dice.random() < 0.002 else 0.005)
                while time.monotonic() % EVERY_S < LULL_S and not self.over.wait(0.05):
                    pass
        finally:
            way = dice.choice(("close", "forget", "cut"))
            if way == "cut" and (group := one._client._group) is not None:
                with contextlib.suppress(OSError):  # the middlebox was faster
                    group._sockets[0].socket.shutdown(socket.SHUT_RDWR)
            if way != "forget":
                one.close()
            del one
            gc.collect()

    def _hostile(self, dice: random.Random, learner: int) -> None:
        """A member with the key that breaks the protocol in one of some ways, or just leaves."""
        layout = build_layout(SHAPES, FRAGMENTS)
        with ScriptedLearner(self.direct, learner, layout.wire, dtype=2, key=KEY.encode(),
                             fingerprint=layout_fingerprint(layout)) as one:
            crime = dice.choice((
                bytes(64), encode.frame(99, b""), encode.frame_header(Msg.PUSH_FRAGMENT, 2**40),
                encode.frame(Msg.HEARTBEAT, dice.randbytes(12)),
                encode.frame(Msg.PUSH_FRAGMENT, dice.randbytes(60)),
                encode.frame(Msg.CHUNK, dice.randbytes(40)), b""))
            one.control.sendall(crime)
            self.over.wait(dice.uniform(0.0, 0.5))

    def _stranger(self, dice: random.Random, _: int) -> None:
        """Without the key: random bytes, half a HELLO, silence."""
        with socket.create_connection(("127.0.0.1", self.direct), 5) as one:
            one.sendall(dice.choice((
                dice.randbytes(dice.randint(1, 3000)), encode.frame(Msg.HELLO, dice.randbytes(98)),
                encode.frame_header(Msg.HELLO, 1 << 20) + dice.randbytes(5000), b"")))
            self.over.wait(dice.uniform(0.0, 0.5))

    def close(self) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join(90)
            if thread.is_alive():
                self.failures.append(f"{thread.name} does not end")


class Findings:
    """What a run has shown: figures, and the sentences of what failed."""

    def __init__(self) -> None:
        self.wrong: list[str] = []

    def check(self, good: bool, sentence: str) -> None:
        print(("ok    " if good else "WRONG ") + sentence, flush=True)
        if not good:
            self.wrong.append(sentence)


def third_medians(samples: list[Sample]) -> Iterator[tuple[str, list[float]]]:
    """Of each figure the median of the first, middle and last third."""
    third = len(samples) // 3
    for name, column in zip(Sample._fields, zip(*samples, strict=True), strict=True):
        yield name, [statistics.median(column[i * third:(i + 1) * third]) for i in range(3)]


def soak(directory: Path, seconds: float, seed: int) -> list[str]:
    """The sentences of what failed."""
    checkpoint, tape = directory / "soak.ckpt", directory / "tape.jsonl"
    found, merges, samples = Findings(), Merges(tape), []
    flags = ["--quorum", "2", "--grace-ms", "20", "--pipeline", "2", "--start-learners", "2",
             "--quorum-timeout-s", "5", "--checkpoint-path", str(checkpoint),
             "--checkpoint-every", "50", "--background-checkpoint", "--event-tape", str(tape),
             "--late-carry", "--min-round-interval-ms", "10"]
    with ServerProcess(directory, *flags, learners=HONEST + 1, steps=2**31,
                       environment={"SYNCER_HMAC_KEY": KEY}) as server:
        port = server.port
        with ForgetfulProxy(port, idle_s=FORGET_S, notice_s=1.0, every_s=2.0, seed=seed) as box:
            fleet = Fleet(port, box.port, seed)
            start = time.monotonic()
            end = start + seconds
            since = end - min(LAST_S, seconds / 2)
            while server.process.poll() is None and (now := time.monotonic()) < end:
                merges.look(now)
                if now > end - 1 and seconds < 2 * LAST_S and not all(
                        merges.since(since)) and end < start + seconds + LAST_S:
                    end = now + 2
                samples.append(sample(server.process.pid))
                time.sleep(0.25)
            merges.look(time.monotonic())
            found.check(server.process.poll() is None, "the server runs to the end")
            fleet.server_stops = True
            server.process.send_signal(signal.SIGTERM)
            status = server.process.wait(60)
            fleet.close()
        log_bytes = server.log_path.stat().st_size
        lines = server.log.text().splitlines()
    report(found, merges, samples, end - start, since)
    found.check(status == 128 + signal.SIGTERM, f"it stops when told to: status {status}")
    inspected = subprocess.run([sys.executable, "-m", "syncer", "checkpoint", "inspect",
                                str(checkpoint)], capture_output=True, text=True, timeout=120,
                               cwd=ROOT, check=False)
    found.check(inspected.returncode == 0, f"its checkpoint is whole{inspected.stderr[-300:]}")
    found.check(log_bytes < LOG_BYTES_MAX, f"log: {log_bytes} bytes, {len(lines)} lines")
    found.check(not any("internal error" in line or "Traceback" in line for line in lines),
                "no defect in the log")
    print(f"      {fleet.lives} lives, {box.forgot_idle} idle and {box.forgot_busy} busy flows "
          "forgotten", flush=True)
    found.check(not fleet.failures, f"no honest learner has an error: {fleet.failures[:3]}")
    return found.wrong


def report(found: Findings, merges: Merges, samples: list[Sample], seconds: float,
           since: float) -> None:
    found.check(merges.steps > 0, f"{merges.steps} outer steps in {seconds:.0f} s")
    found.check(all(merges.since(since)), "every honest learner merged towards the end: "
                f"{merges.since(since)} pushes since then")
    room = {"rss": lambda middle: max(16 * MIB, middle / 4), "descriptors": lambda _: 24,
            "threads": lambda _: 4}
    for name, (first, middle, last) in third_medians(samples):
        scale, unit = (MIB, " MiB") if name == "rss" else (1, "")
        found.check(last <= middle + room[name](middle),
                    f"{name} of the server, medians of thirds: {first / scale:.1f}, "
                    f"{middle / scale:.1f}, {last / scale:.1f}{unit}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, help="keep log, tape and checkpoint here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
        wrong = soak(args.directory or Path(scratch), args.seconds, args.seed)
    print(f"soak: {'failed: ' + '; '.join(wrong) if wrong else 'all good'}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
