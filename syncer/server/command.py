"""`syncer serve`: the server as a subcommand, with the flags of flags.py."""

from __future__ import annotations

import argparse
import os

from syncer import flags


def add_parser(subparsers) -> None:
    """Adds `serve` with every setting of the server."""
    flags.add_options(subparsers.add_parser(
        "serve", help="run the server of a run", **flags.PARSER_SETTINGS))


def run(args: argparse.Namespace) -> int:
    """Serves one run to its end and returns the exit status of rounds.md 2."""
    from syncer.server.driver import serve  # noqa: PLC0415  flags must be answered before it loads

    return serve(flags.resolve(vars(args), os.environ))
