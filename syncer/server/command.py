"""`syncer serve` and `python -m syncer.server`: a command line in, an exit status out.

It must not hold any logic of a run.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from ..errors import ConfigError
from ..flags import PARSER_SETTINGS, add_options, read_config, resolve
from .service import EXIT_BAD_CONFIG, serve


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """The parser of `syncer serve`."""
    return add_options(subparsers.add_parser("serve", **PARSER_SETTINGS))


def run(args: argparse.Namespace) -> int:
    """`syncer serve`; raises `ConfigError`."""
    return serve(resolve(vars(args), os.environ))


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m syncer.server`; a mistake of the user is one sentence and status 2."""
    words = sys.argv[1:] if argv is None else argv
    try:
        return serve(read_config(words, os.environ, prog="python -m syncer.server"))
    except ConfigError as error:
        print(f"syncer: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
