"""Other programs that synchronise parameters, side by side with this one.

    python3 -m venv peers && peers/bin/pip install -r benchmarks/peers/requirements.txt
    python3 -m venv flower && flower/bin/pip install -r benchmarks/peers/requirements-flower.txt
    python -m benchmarks.peers --python peers/bin/python --flower-python flower/bin/python \\
        --json peers.json --png peers.png

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
from benchmarks.peers.contest import PEERS, Contest, Peer, PeerFailed
from benchmarks.peers.place import Place

MIB = 1024 * 1024
PLACES: dict[str, float | None] = {"loopback": None, "1 Gb/s": 1e9, "100 Mb/s": 1e8}
SYNCS = {"loopback": 10, "1 Gb/s": 6, "100 Mb/s": 2}
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
    """A cell for each peer, format, place and number of participants; turns over all peers."""
    for place in options.places:
        for world in options.worlds:
            found: dict[tuple[str, str], list[float]] = {}
            failed: dict[tuple[str, str], str] = {}
            turns = 1 if options.short or place == "100 Mb/s" else options.turns
            for _ in range(turns):
                for peer in peers:
                    for form in peer.forms:
                        key = peer.name, form
                        if key in failed:
                            continue
                        try:
                            seconds = one(peer, form, place, world, options)
                        except PeerFailed as error:
                            failed[key] = str(error)
                        else:
                            found.setdefault(key, []).extend(seconds)
            for peer in peers:
                for form in peer.forms:
                    key = peer.name, form
                    cell = {"peer": peer.name, "form": form, "place": place, "participants": world}
                    if key in failed:
                        yield cell | {"failed": failed[key]}
                    else:
                        yield cell | {"seconds": statistics.median(found[key]),
                                      "least": min(found[key]), "most": max(found[key]),
                                      "syncs": len(found[key])}


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


def run(peers: list[Peer], options: argparse.Namespace) -> int:
    said = {"when": datetime.now(UTC).isoformat(timespec="seconds"), "mib": options.mib,
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            "load_before": os.getloadavg()[0], "versions": versions(options.pythons),
            "syncs": [], "losses": []}
    print(f"{said['when'][:10]}, {said['machine']}, load {said['load_before']:.1f}, "
          f"{said['versions']}")
    print(f"\none sync of {options.mib} MiB of f32 parameters, seconds\n"
          f"{'':43} {'median':>8} {'least':>8} {'most':>8}")
    for cell in sync_rows(peers, options):
        said["syncs"].append(cell)
        print(sync_line(cell), flush=True)
    if not options.no_losses:
        print("\none participant killed half way through a sync, f32, loopback: seconds until\n"
              "the others have completed one, and syncs of theirs that came to nothing\n"
              f"{'':20} {'usual':>8} {'others':>8} {'nothing':>8}")
        for cell in loss_rows(peers, options):
            said["losses"].append(cell)
            print(loss_line(cell), flush=True)
    said["load_after"] = os.getloadavg()[0]
    if options.json:
        Path(options.json).write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable,
                        help="interpreter with torch, torchft and hivemind")
    parser.add_argument("--flower-python", default=sys.executable, help="interpreter with Flower")
    parser.add_argument("--only", action="append", choices=[peer.name for peer in PEERS],
                        help="only this peer; may be repeated")
    parser.add_argument("--place", action="append", dest="places", choices=list(PLACES))
    parser.add_argument("--participants", action="append", dest="worlds", type=int)
    parser.add_argument("--mib", type=int, help="of f32 parameters (128)")
    parser.add_argument("--turns", type=int, default=2,
                        help="in each a peer is started anew (%(default)s)")
    parser.add_argument("--no-losses", action="store_true", help="nobody is killed")
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
