"""Regenerates the scenario files: `python -m tests.scenarios --rewrite [name…]`.

Without --rewrite it shows which files would change. Read the difference before committing it: the
files are the reviewed truth, the scheduler is what they judge.
"""

from __future__ import annotations

import argparse
import difflib
import sys

from tests.scenarios.runner import FILES, rewrite


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.scenarios", description=__doc__)
    parser.add_argument("--rewrite", action="store_true", help="write the files")
    parser.add_argument("names", nargs="*", help="only files whose name starts so")
    options = parser.parse_args()
    changed = 0
    for path in FILES:
        if options.names and not path.name.startswith(tuple(options.names)):
            continue
        old = path.read_text()
        new = rewrite(old)
        if new == old:
            continue
        changed += 1
        sys.stdout.writelines(difflib.unified_diff(
            old.splitlines(True), new.splitlines(True), path.name, path.name + " (now)"))
        if options.rewrite:
            path.write_text(new)
    return 0 if options.rewrite or not changed else 1


if __name__ == "__main__":
    sys.exit(main())
