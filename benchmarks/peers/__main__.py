"""Other programs that synchronise parameters, side by side with this one.

    make bench-peers                          # the environments of the others, and all of it
    python -m benchmarks.peers --only syncer --only "torchft DiLoCo" --place "1 Gb/s"

A sync of 128 MiB of f32 parameters with 2 and 4 participants, over loopback and over links of
1 Gb/s and 100 Mb/s, with f32 and each one's smallest format on the wire: the time from the end of
one to the end of the next, no training in between, warm-up left out, in turns. And what the others
do when one participant is killed in the middle. Takes what `python -m benchmarks.lab` takes; what
does not install or run says why. `--png` takes matplotlib.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.lab.network import NotPermitted, apart
from benchmarks.peers import contest
from benchmarks.peers.contest import PEERS, ROOT, Contest, Peer, PeerFailed
from benchmarks.peers.place import Place

MIB = 1024 * 1024
PLACES: dict[str, float | None] = {"loopback": None, "1 Gb/s": 1e9, "100 Mb/s": 1e8}
SYNCS = {"loopback": 10, "1 Gb/s": 6, "100 Mb/s": 3}
WARM = {"loopback": 2, "1 Gb/s": 2, "100 Mb/s": 1}
VERSIONS = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
found = {}
for name in ("torch", "torchft", "hivemind", "flwr", "numpy"):
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""
Cell = dict[str, Any]


def versions(pythons: dict[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for python in (pythons["peers"], pythons["flower"]):
        done = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, check=False)
        found |= json.loads(done.stdout) if done.returncode == 0 else {}
    return found


def one(peer: Peer, form: str, place: str, world: int, options: argparse.Namespace) -> list[float]:
    """Seconds of each sync of one turn."""
    with ExitStack() as stack:
        seats = Place(stack, world, PLACES[place])
        made = Contest(stack, peer, form, seats, numel=options.mib * MIB // 4,
                       python=options.pythons[peer.python])
        syncs = 2 if options.short else SYNCS[place]
        return contest.sync_seconds(made, 1 if options.short else WARM[place], syncs)


def sync_rows(peers: list[Peer], options: argparse.Namespace) -> Iterator[Cell]:
    """A cell for each peer, format, place and number of participants, in turns over all of them;
    one of a later turn has the syncs of the earlier ones, too."""
    for world in options.worlds:
        for place in options.places:
            found: dict[tuple[str, str], list[float]] = {}
            without: set[tuple[str, str]] = set()
            turns = 1 if options.short or place == "100 Mb/s" else options.turns
            trials = [(peer, form) for peer in peers for form in peer.forms]
            for peer, form in trials * turns:
                if (peer.name, form) in without:
                    continue
                cell = {"peer": peer.name, "form": form, "place": place, "participants": world}
                try:
                    seconds = found.setdefault((peer.name, form), [])
                    seconds += one(peer, form, place, world, options)
                except PeerFailed as error:
                    without.add((peer.name, form))
                    yield cell | {"failed": str(error)}
                else:
                    yield cell | {"seconds": statistics.median(seconds), "least": min(seconds),
                                  "most": max(seconds), "syncs": len(seconds)}


def loss_rows(peers: list[Peer], options: argparse.Namespace) -> Iterator[Cell]:
    """On loopback, f32: one is killed half way through a sync."""
    for world in options.worlds:
        for peer in peers:
            cell = {"peer": peer.name, "participants": world}
            with ExitStack() as stack:
                try:
                    seats = Place(stack, world, None)
                    made = Contest(stack, peer, "f32", seats, numel=options.mib * MIB // 4,
                                   python=options.pythons[peer.python])
                    yield cell | contest.killed(made, 1)._asdict()
                except PeerFailed as error:
                    yield cell | {"failed_to_run": str(error)}


def sync_line(cell: Cell) -> str:
    """At most 80 columns."""
    head = f"{cell['place']:9} {cell['participants']:2}  {cell['peer']:16} {cell['form']:13}"
    if "failed" in cell:
        return f"{head} {cell['failed']}"[:80]
    return f"{head} {cell['seconds']:8.3f} {cell['least']:8.3f} {cell['most']:8.3f}"


def loss_line(cell: Cell) -> str:
    head = f"{cell['participants']:2}  {cell['peer']:16}"
    if "failed_to_run" in cell:
        return f"{head} {cell['failed_to_run']}"[:80]
    others = "never" if cell["others_s"] is None else f"{cell['others_s']:.2f}"
    return f"{head} {cell['usual_s']:8.2f} {others:>8} {cell['failed']:8}  {cell['ended']}"[:80]


class Kept:
    """The file of --json: what is measured takes the place of what it has of the same kind, at
    once, so that an interrupted run keeps what it has."""

    def __init__(self, options: argparse.Namespace):
        self.file = Path(options.json) if options.json else None
        self.head = {"when": datetime.now(UTC).isoformat(timespec="seconds"), "mib": options.mib,
                     "machine": f"{os.cpu_count()} cores, {platform.machine()}",
                     "versions": versions(options.pythons)}
        self.cells: dict[str, list[Cell]] = {"syncs": [], "losses": []}
        if self.file and self.file.exists():
            before = json.loads(self.file.read_text(encoding="utf-8"))
            if before["mib"] == options.mib:
                self.cells = {kind: before[kind] for kind in self.cells}

    def put(self, kind: str, cell: Cell) -> None:
        def place(each: Cell) -> tuple[int, ...]:
            names = [peer.name for peer in PEERS]
            peer = names.index(each["peer"])
            at = list(PLACES).index(each.get("place", "loopback"))
            form = PEERS[peer].forms.index(each.get("form", "f32"))
            return at, each["participants"], peer, form

        cell |= {"load": round(os.getloadavg()[0], 1)}
        others = [each for each in self.cells[kind] if place(each) != place(cell)]
        self.cells[kind] = sorted([*others, cell], key=place)
        if self.file:
            self.file.write_text(json.dumps(self.head | self.cells, indent=1) + "\n",
                                 encoding="utf-8")


def run(peers: list[Peer], options: argparse.Namespace) -> int:
    kept = Kept(options)
    print(f"{kept.head['when'][:10]}, {kept.head['machine']}, load {os.getloadavg()[0]:.1f}, "
          f"{kept.head['versions']}")
    print(f"\none sync of {options.mib} MiB of f32 parameters, seconds\n"
          f"{'':43} {'median':>8} {'least':>8} {'most':>8}")
    for cell in () if options.losses_only else sync_rows(peers, options):
        kept.put("syncs", cell)
        print(sync_line(cell), flush=True)
    if not options.no_losses:
        print("\none participant killed half way through a sync, f32, loopback: seconds until\n"
              "the others have completed one, and syncs of theirs that came to nothing\n"
              f"{'':20} {'usual':>8} {'others':>8} {'nothing':>8}")
        for cell in loss_rows(peers, options):
            kept.put("losses", cell)
            print(loss_line(cell), flush=True)
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    made = {name: ROOT / f"build/{name}/bin/python" for name in ("peers", "flower")}
    known = {name: str(path) if path.exists() else sys.executable for name, path in made.items()}
    parser.add_argument("--python", default=known["peers"],
                        help="interpreter with torch, torchft and hivemind")
    parser.add_argument("--flower-python", default=known["flower"],
                        help="interpreter with Flower")
    parser.add_argument("--only", action="append", choices=[peer.name for peer in PEERS],
                        help="only this peer; may be repeated")
    parser.add_argument("--place", action="append", dest="places", choices=list(PLACES))
    parser.add_argument("--participants", action="append", dest="worlds", type=int)
    parser.add_argument("--mib", type=int, help="of f32 parameters (128)")
    parser.add_argument("--turns", type=int, default=2,
                        help="in each a peer is started anew (%(default)s)")
    parser.add_argument("--no-losses", action="store_true", help="nobody is killed")
    parser.add_argument("--losses-only", action="store_true", help="the second table alone")
    parser.add_argument("--short", action="store_true", help="whether it works, not how fast")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--png", metavar="FILE")
    parser.add_argument("--draw", metavar="JSON", help="run nothing: draw --png of this one")
    options = parser.parse_args(arguments)
    options.places = options.places or list(PLACES)
    options.worlds = options.worlds or [2, 4]
    options.mib = options.mib or (8 if options.short else 128)
    options.pythons = contest.pythons(options.python, options.flower_python)
    if options.png and not (options.draw or options.json):
        parser.error("--png draws what --json has written")
    if not options.draw:
        peers = [peer for peer in PEERS if not options.only or peer.name in options.only]
        try:
            status = apart(lambda: run(peers, options))
        except NotPermitted as error:
            print(f"benchmarks.peers: {error}", file=sys.stderr)
            return 2
        if status or not options.png:
            return status
    from benchmarks.peers.drawing import draw  # noqa: PLC0415, matplotlib only where it is asked for
    draw(json.loads(Path(options.draw or options.json).read_text(encoding="utf-8")), options.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
