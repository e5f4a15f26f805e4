"""What the lab runs over its links: syncs by dtype, a straggler, joiners. Must not print."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from benchmarks.lab.network import Host, cable
from syncer.protocol import DTYPES, bulk_dtype, tensor_bytes

ROOT = Path(__file__).resolve().parents[2]
PORT = "29400"
FRAGMENTS, IN_FLIGHT = 8, 4
WARM_SYNCS = 2
MIB = 1024 * 1024
PATIENCE_S = 600.0
"""A scene that is not through by then has failed."""
CODES = {name: code for code, name in DTYPES.items()}
STRAGGLER_BITS = 40e6
"""5 MB/s."""
JOINERS, TRAINING = 32, 3


class Link(NamedTuple):
    """A kind of link: bits a second in either direction, and milliseconds there and back."""

    bits_per_s: float
    round_trip_ms: float = 0.0

    def __str__(self) -> str:
        rate = (f"{self.bits_per_s / 1e9:g} Gb/s" if self.bits_per_s >= 1e9
                else f"{self.bits_per_s / 1e6:g} Mb/s")
        return rate + (f", {self.round_trip_ms:g} ms" if self.round_trip_ms else "")


class Row(NamedTuple):
    """A figure beside its bound. `ratio`: how much of the bound is reached, or how many times as
    long something takes; `wanted`: the least of the one, the most of the other."""

    what: str
    seconds: float
    bound_s: float
    ratio: float
    wanted: float
    at_most: bool = False

    @property
    def holds(self) -> bool:
        return self.ratio <= self.wanted if self.at_most else self.ratio >= self.wanted


class SceneFailed(Exception):
    """A process of a scene ended as it should not; the text has what it said last."""


class Fleet:
    """A server on a host of its own, and a host with a cable to it for every learner."""

    def __init__(self, stack: ExitStack, learners: int, *flags: str, total_steps: int):
        self.stack = stack
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="syncer-lab")))
        self.server_host = self._host()
        self.hosts = 0
        log = self.file("server")
        self.server = self.process(
            self.server_host, "syncer.server", "--learners", str(learners), "--total-steps",
            str(total_steps), "--host", "0.0.0.0", "--port", PORT, "--allow-unauthenticated",
            "--sync-interval-steps", "0", "--delta-correction", "none", *flags, stderr=log)
        self._until_said("server", "listening", self.server)

    def _host(self) -> Host:
        host = Host()
        self.stack.callback(host.close)
        return host

    def file(self, name: str) -> IO[str]:
        return self.stack.enter_context((self.folder / name).open("w"))

    def said(self, name: str) -> str:
        return (self.folder / name).read_text(errors="replace")

    def process(self, host: Host, module: str, *arguments: str,
                 **options: object) -> subprocess.Popen[str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("SYNCER_")}
        process = host.start(sys.executable, "-m", module, *arguments, cwd=ROOT,
                             env=clean | {"PYTHONPATH": str(ROOT)}, **options)
        self.stack.callback(process.wait)
        self.stack.callback(process.kill)
        return process

    def _until_said(self, name: str, text: str, process: subprocess.Popen[str]) -> None:
        while text not in self.said(name):
            if process.poll() is not None:
                raise SceneFailed(f"{name} has ended: {self.said(name)[-300:]}")
            time.sleep(0.02)

    def host(self, link: Link) -> tuple[Host, str]:
        """A host behind such a link, and the server's address from there."""
        self.hosts += 1
        host = self._host()
        server, _ = cable(self.hosts, self.server_host, host, link.bits_per_s)
        if not link.round_trip_ms:
            return host, f"{server}:{PORT}"
        relay = self.process(host, "benchmarks.lab.relay", server, PORT,
                              str(link.round_trip_ms), stdout=subprocess.PIPE)
        assert relay.stdout is not None
        self.stack.callback(relay.stdout.close)
        return host, f"127.0.0.1:{relay.stdout.readline().strip()}"

    def learner(self, number: int, link: Link, dtype: str, numel: int) -> subprocess.Popen[str]:
        host, address = self.host(link)
        return self.process(host, "benchmarks.lab.learner", address, str(number), dtype,
                             str(FRAGMENTS), str(numel), stdout=self.file(f"learner {number}"),
                             stderr=self.file(f"stderr {number}"))

    def applied(self, number: int, process: subprocess.Popen[str]) -> list[list[float]]:
        """What a learner says at its end."""
        if process.wait(PATIENCE_S) != 0:
            raise SceneFailed(f"learner {number} has ended: {self.said(f'stderr {number}')[-300:]}")
        found: list[list[float]] = json.loads(self.said(f"learner {number}"))
        return found


@contextmanager
def fleet(learners: int, *flags: str, total_steps: int) -> Iterator[Fleet]:
    """A fleet whose processes are gone at the end."""
    with ExitStack() as stack:
        yield Fleet(stack, learners, *flags, total_steps=total_steps)


def sync_seconds(applied: list[list[float]]) -> float:
    """What a sync of all fragments takes, by the times of what was applied after the first ones
    and before the last ones, which the final cut is among."""
    times = [at for at, _, _ in applied][WARM_SYNCS * FRAGMENTS : -IN_FLIGHT]
    return (times[-1] - times[0]) / (len(times) - 1) * FRAGMENTS


def sync(link: Link, dtype: str, mib: int, syncs: int, downlink: str = "whole") -> Row:
    """Two learners, each behind a link of its own: what it takes to sync the whole model once, in
    the long run, beside the bytes of the busier direction at the rate of the link.

    With delay the bound has a round trip for as many fragments as are in flight. downlink: of the
    server; with q4 broadcasts are changes of half a byte a parameter.
    """
    numel = mib * MIB // 4 // FRAGMENTS
    steps = (WARM_SYNCS + syncs + 1) * FRAGMENTS
    with fleet(2, "--quorum", "2", "--grace-ms", "0", "--pipeline", str(IN_FLIGHT),
               "--downlink", downlink, total_steps=steps) as made:
        learners = [made.learner(number, link, dtype, numel) for number in range(2)]
        found = statistics.median(sync_seconds(made.applied(number, each))
                                  for number, each in enumerate(learners))
    code = CODES[dtype]
    up = tensor_bytes(numel, code)
    down = tensor_bytes(numel, bulk_dtype(code) if downlink == "whole" else CODES[downlink])
    bound = FRAGMENTS * max(up, down) * 8 / link.bits_per_s
    # A fragment is under way up, down and a round trip; so many are at the same time.
    alone = (FRAGMENTS * 8 * (up + down) / link.bits_per_s
             + FRAGMENTS * link.round_trip_ms / 1000) / IN_FLIGHT
    bound = max(bound, alone)
    ways = dtype + " both ways" * (downlink != "whole")
    return Row(f"{link}, {ways}, {mib} MiB", found, bound, bound / found, 0.9)


def bare(link: Link, mib: int) -> Row:
    """What sockets without a program reach there, as many each way at once: no bound of ours."""
    count = mib * MIB
    with ExitStack() as stack:
        hosts = [Host() for _ in range(2)]
        for host in hosts:
            stack.callback(host.close)
        address, _ = cable(1, *hosts, link.bits_per_s)
        command = [sys.executable, "-m", "benchmarks.lab.bare"]
        serving = hosts[0].start(*command, "serve", PORT, "4", str(count), cwd=ROOT,
                                 stderr=subprocess.PIPE)
        stack.callback(serving.wait)
        stack.callback(serving.kill)
        assert serving.stderr is not None
        stack.callback(serving.stderr.close)
        serving.stderr.readline()
        dialing = hosts[1].start(*command, "dial", f"{address}:{PORT}", "4", str(count), cwd=ROOT,
                                 stdout=subprocess.PIPE)
        stack.callback(dialing.kill)
        said, _ = dialing.communicate(timeout=PATIENCE_S)
    if dialing.returncode:
        raise SceneFailed("bare sockets have failed")
    bound, found = count * 8 / link.bits_per_s, float(said)
    return Row(f"{link}, bare sockets, {mib} MiB", found, bound, bound / found, 0.0)


def straggler(mib: int, syncs: int) -> Row:
    """Two learners at 1 Gb/s, without and with a third one behind 5 MB/s; a quorum of two."""
    numel, fast = mib * MIB // 4 // FRAGMENTS, Link(1e9)
    steps = (WARM_SYNCS + syncs + 1) * FRAGMENTS
    found = []
    for slow in (False, True):
        with fleet(2 + slow, "--quorum", "2", "--grace-ms", "0", "--pipeline", str(IN_FLIGHT),
                   total_steps=steps) as made:
            learners = [made.learner(number, fast, "f32", numel) for number in range(2)]
            if slow:
                made.learner(2, Link(STRAGGLER_BITS), "f32", numel)
            found.append(statistics.median(sync_seconds(made.applied(number, each))
                                           for number, each in enumerate(learners)))
    without, beside = found
    return Row(f"a learner at 5 MB/s beside two, f32, {mib} MiB", beside, without,
               beside / without, 1.5, at_most=True)


def joiners(link: Link, catchups: str, model_mb: float) -> Row:
    """Rounds of three learners that only move bytes, before and beside 32 that join at once, all
    over one link. A joiner leaves when it has the model: more members are more to send."""
    flags = ["--quorum", str(TRAINING), "--start-learners", str(TRAINING), "--grace-ms", "0",
             "--pipeline", "1", "--merge-threads", "1"]
    if catchups:
        flags += ["--max-concurrent-catchups", catchups]
    with fleet(TRAINING + JOINERS, *flags, total_steps=10**9) as made:
        host, address = made.host(link)
        training = made.process(host, "benchmarks.lab.joiners", "train", address, str(model_mb),
                                stdout=made.file("rounds"))
        if training.wait(PATIENCE_S) != 0:
            raise SceneFailed("those who train have ended")
        before, beside = json.loads(made.said("rounds"))
        made.server.send_signal(signal.SIGTERM)
        made.server.wait(PATIENCE_S)
    how = f"{catchups} at a time" if catchups else "as many as fit"
    return Row(f"{JOINERS} joiners, {how}, {link}, {model_mb:g} MB", beside, before,
               beside / before, 1.5, at_most=True)
