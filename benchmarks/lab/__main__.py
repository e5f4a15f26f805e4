"""What syncs take over links of known rate and delay, beside what the links allow.

    python -m benchmarks.lab                  # about five minutes
    python -m benchmarks.lab --only sync --json lab.json

Real servers and learners in network namespaces with veth pairs and token buckets, on this machine
alone; takes Linux, iproute2, and root or user namespaces. Nothing is left behind, whatever ends it.
Status 1 when a bound is missed, 2 when this machine cannot have such a network.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial

from benchmarks.lab import scenes
from benchmarks.lab.network import NotPermitted, apart
from benchmarks.lab.scenes import Link, Row, SceneFailed

GB, MB = Link(1e9), Link(1e8)
DTYPES = ("f32", "bf16", "q4")


def all_scenes(short: bool) -> dict[str, list[Callable[[], Row]]]:
    """The rows of each table."""
    mib, syncs = ({GB: 64, MB: 16}, 8) if not short else ({GB: 8, MB: 2}, 3)
    delayed = [(Link(1e9, 10), 64), (Link(1e9, 100), 64), (Link(1e8, 10), 16), (Link(1e8, 100), 16)]
    return {
        "sync": [scene for link in (GB, MB) for scene in (
            partial(scenes.bare, link, mib[link]),
            *(partial(scenes.sync, link, dtype, mib[link], syncs) for dtype in DTYPES),
            partial(scenes.sync, link, "q4", mib[link], syncs, "q4"))],
        "delay": [partial(scenes.sync, link, "f32", 8 if short else size, syncs)
                  for link, size in delayed],
        "straggler": [partial(scenes.straggler, 8 if short else 32, syncs)],
        "joiners": [partial(scenes.joiners, Link(4e8), catchups, 1 if short else 5.9)
                    for catchups in ("", "4")],
    }


HEADS = {
    "sync": "sync of the whole model, two learners, each with a link of its own",
    "delay": "the same with delay, and a round trip for each fragment of those in flight",
    "straggler": "a sync beside a straggler, against one without it",
    "joiners": "a round beside those who join, against one before",
}


def table(name: str, rows: list[Row]) -> Iterator[str]:
    """At most 80 columns."""
    yield f"\n{HEADS[name]}"
    yield f"{'':44} {'takes s':>8} {'against':>8} {'ratio':>6} {'wanted':>7}"
    for row in rows:
        wanted = f"{'<=' if row.at_most else '>='} {row.wanted:g}" if row.wanted else ""
        yield (f"{row.what:44} {row.seconds:8.4f} {row.bound_s:8.4f} {row.ratio:6.2f} "
               f"{wanted:>7}{'' if row.holds else ' !'}")


def run(options: argparse.Namespace) -> int:
    found: dict[str, list[Row]] = {}
    try:
        for name, rows in all_scenes(options.short).items():
            if options.only and name not in options.only:
                continue
            found[name] = [scene() for scene in rows]
            print(*table(name, found[name]), sep="\n", flush=True)
    except (NotPermitted, SceneFailed) as error:
        print(f"benchmarks.lab: {error}", file=sys.stderr)
        return 2 if isinstance(error, NotPermitted) else 1
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"when": datetime.now(UTC).isoformat(timespec="seconds"),
                       "machine": f"{os.cpu_count()} cores, {platform.machine()}",
                       "rows": {name: [row._asdict() for row in rows]
                                for name, rows in found.items()}}, file, indent=1)
            file.write("\n")
    return 0 if all(row.holds for rows in found.values() for row in rows) else 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lab", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=sorted(HEADS),
                        help="only this table; may be repeated")
    parser.add_argument("--json", metavar="FILE", help="write the rows to a file, too")
    parser.add_argument("--short", action="store_true",
                        help="small models and few syncs: whether it works, not how fast")
    options = parser.parse_args(arguments)
    try:
        return apart(lambda: run(options))
    except NotPermitted as error:
        print(f"benchmarks.lab: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
