"""One peer in one place: how long a sync takes, and what the others do when one is killed.

Must not know what a peer is made of: every participant says with a line when a sync is complete.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import IO, NamedTuple

from benchmarks.peers import run_ours_server
from benchmarks.peers.part import Part
from benchmarks.peers.place import Place, Seat

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 300.0
"""Without a sync for so long, a peer has failed."""
FEWEST, SLOW_S = 3, 15.0
"""So many syncs are enough when they have taken longer than so many seconds."""
GONE_S = 90.0
"""Without a sync for so long after one was killed, the others do not go on."""


class Peer(NamedTuple):
    """A program: its name in the table, its participant's module, the formats on the wire from f32
    to its smallest, and which interpreter it needs."""

    name: str
    module: str
    forms: tuple[str, ...]
    python: str
    hub: Callable[[int, str], list[str]] | None = None
    """Module and arguments of its server or coordinator, told of how many participants and which
    format."""


PEERS = (
    Peer("syncer", "run_ours", run_ours_server.FORMS, "ours", run_ours_server.command),
    Peer("torchft DiLoCo", "run_torchft", ("f32",), "peers",
         lambda world, form: ["benchmarks.peers.run_torchft", "hub"]),
    Peer("torch all-reduce", "run_all_reduce", ("f32", "bf16"), "peers"),
    Peer("hivemind", "run_hivemind", ("f32", "8 bits"), "peers"),
    Peer("Flower", "run_flower", ("f32", "f16"), "flower",
         lambda world, form: ["benchmarks.peers.run_flower", "hub", str(world)]),
)


class PeerFailed(Exception):
    """It did not sync here; one sentence says what it said last."""


def kill(process: subprocess.Popen[str]) -> None:
    """A participant and every process of its own, as when its machine is gone."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class Contest:
    """All processes of one peer in one place; leaving the stack ends them."""

    def __init__(self, stack: ExitStack, peer: Peer, form: str, place: Place, *, numel: int,
                 python: str):
        self.stack, self.peer, self.python = stack, peer, python
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="peers")))
        world = self.world = len(place.seats)
        if peer.hub:
            self.hub = self._start(place.hub, "hub", *peer.hub(world, form))
            self._wait("hub", self.hub, "listening")
        self.members = [
            self._start(seat, str(rank), f"benchmarks.peers.{peer.module}", json.dumps(Part(
                rank, world, seat.address, place.hub.address, place.seats[0].address,
                seat.interface, numel, form, 0)))
            for rank, seat in enumerate(place.seats)]

    def _file(self, name: str) -> IO[str]:
        return self.stack.enter_context((self.folder / name).open("w"))

    def _start(self, seat: Seat, name: str, *arguments: str) -> subprocess.Popen[str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("SYNCER_")}
        process = seat.host.start(
            self.python, "-m", *arguments, cwd=ROOT, stdout=self._file(name),
            stderr=self._file(f"{name}.log"), stdin=subprocess.DEVNULL,
            env=clean | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            start_new_session=True)  # what it has started ends with it
        self.stack.callback(process.wait)
        self.stack.callback(kill, process)
        return process

    def _said(self, name: str) -> str:
        return (self.folder / name).read_text(errors="replace")

    def _wait(self, name: str, process: subprocess.Popen[str], text: str) -> None:
        until = time.monotonic() + PATIENCE_S
        while text not in self._said(name) + self._said(f"{name}.log"):
            if process.poll() is not None or time.monotonic() > until:
                raise PeerFailed(self._last(name))
            time.sleep(0.02)

    def _last(self, name: str) -> str:
        lines = self._said(f"{name}.log").strip().splitlines()
        return lines[-1][:200] if lines else "it said nothing"

    def syncs(self) -> list[tuple[float, int]]:
        """When participant 0 was through with each, and of how many participants it was."""
        whole = self._said("0").rpartition("\n")[0].splitlines()
        return [(at, members) for at, members in map(json.loads, whole)]

    def until(self, count: int, *, fewest: int | None = None,
              patience_s: float = 0.0) -> list[float]:
        """The times of participant 0 when it has made so many syncs of all participants; after
        some patience the fewest are enough."""
        last, heard = 0, time.monotonic()
        enough_at = heard + patience_s
        while len(found := [at for at, members in self.syncs() if members == self.world]) < count:
            if len(found) > last:
                last, heard = len(found), time.monotonic()
            if fewest and last >= fewest and heard > enough_at:
                break
            if self.members[0].poll() is not None:
                raise PeerFailed(f"ended: {self._last('0')}")
            if time.monotonic() - heard > PATIENCE_S:
                raise PeerFailed(f"no sync in {PATIENCE_S:.0f} s: {self._last('0')}")
            time.sleep(0.01)
        return found


def sync_seconds(contest: Contest, warm: int, syncs: int) -> list[float]:
    """Of each sync after the first ones, from the end of the one before; of so many, or of at least
    `FEWEST` where they are slow."""
    contest.until(warm + 1)
    times = contest.until(warm + 1 + syncs, fewest=warm + 1 + min(FEWEST, syncs),
                          patience_s=SLOW_S)
    return [after - before for before, after in pairwise(times[warm : warm + syncs + 1])]


class Loss(NamedTuple):
    """One was killed in the middle of a sync. Seconds until the others had completed one, None:
    never; syncs of theirs that came to nothing; and what the first of them said if it ended."""

    usual_s: float
    others_s: float | None
    failed: int
    ended: str


def killed(contest: Contest, warm: int) -> Loss:
    """Kills the last participant half way through a sync."""
    times = contest.until(warm + 3)
    usual = statistics.median(after - before for before, after in pairwise(times[warm:]))
    begun = contest.until(len(times) + 1)[-1]
    time.sleep(max(0.0, begun + usual / 2 - time.monotonic()))
    at = time.monotonic()
    kill(contest.members[-1])
    while time.monotonic() - at < GONE_S:
        after = [(when, members) for when, members in contest.syncs() if when > at]
        failed = sum(not members for _, members in after)
        if good := [when for when, members in after if members]:
            return Loss(usual, good[0] - at, failed, "")
        if contest.members[0].poll() is not None:
            return Loss(usual, None, failed, contest._last("0"))
        time.sleep(0.005)
    return Loss(usual, None, failed, "")


def pythons(peers: str, flower: str) -> dict[str, str]:
    return {"ours": sys.executable, "peers": peers, "flower": flower}
