"""`syncer kernels`: what runs here and whether its bits are right. Must not start anything."""

from __future__ import annotations

import argparse
import json

from syncer import kernels


def add_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    """Adds the `kernels` subcommand to an argparse subparsers object."""
    parser = subparsers.add_parser(
        "kernels",
        help="show the kernel variants of this CPU, and check them",
        description="Shows per kernel family the active variant and those this CPU can run. "
        "SYNCER_KERNELS=portable, or family=variant pairs separated by commas, forces variants.",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="compute golden results with every variant and compare each with portable; "
        "exit status 1 if a bit is wrong",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def report() -> str:
    """Families, CPU features, compiler and OpenMP, one per line; also shown by `--version -v`."""
    facts = kernels.describe()
    lines = []
    for family in kernels.variants():
        names = (
            f"[{name}]" if name == facts[family]["active"] else name
            for name in facts[family]["available"]
        )
        lines.append(f"{family:<9} {'  '.join(names)}")
    lines.append(f"cpu       {'  '.join(facts['cpu']) or 'no feature that a variant needs'}")
    lines.append(f"compiler  {facts['compiler']}")
    lines.append(f"openmp    {'yes' if facts['openmp'] else 'no: merges use one thread'}")
    if facts["floats"]:
        lines.append(f"floats    {facts['floats']} in this process; not in the kernels")
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    """Prints the report, with --check also the failures; returns the exit status."""
    failures = kernels.check() if args.check else []
    if args.json:
        wrong = [dict(zip(("family", "variant", "what", "length"), each, strict=True))
                 for each in failures]
        print(json.dumps({**kernels.describe(), **({"wrong": wrong} if args.check else {})}))
        return 1 if failures else 0
    print(report())
    if not args.check:
        return 0
    for family, variant, what, length in failures:
        print(f"WRONG     {family} {variant}: {what}, length {length}")
    print(f"{len(failures)} checks failed" if failures else "all kernel checks passed")
    return 1 if failures else 0
