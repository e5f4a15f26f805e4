"""`python -m tests.mutation.play NAME…`: plays these scenarios, then all others, to a difference.

Prints the name of the first scenario that does not say what happens, with exit status 1. Must not
show the difference: `python -m tests.scenarios` does.
"""

from __future__ import annotations

import sys

from tests.scenarios.runner import FILES, rewrite


def main() -> int:
    for path in sorted(FILES, key=lambda path: path.stem not in sys.argv[1:]):
        text = path.read_text(encoding="utf-8")
        try:
            is_true = rewrite(text) == text
        except Exception as error:  # whatever the mistake makes of the scheduler
            print(f"{path.stem} ({type(error).__name__})")
            return 1
        if not is_true:
            print(path.stem)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
