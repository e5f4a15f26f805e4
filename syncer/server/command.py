"""`syncer serve` and `python -m syncer.server`: a command line in, an exit status out.

It must not hold any logic of a run, and loads the server only once the flags are answered.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from syncer import flags
from syncer.cli import answered
from syncer.config import Config


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `serve` with every setting of the server."""
    flags.add_options(subparsers.add_parser(
        "serve", help="run the server of a run", **flags.PARSER_SETTINGS))


def run(args: argparse.Namespace) -> int:
    """Serves one run to its end; returns its exit status, raises `SyncerError`."""
    return serve(flags.resolve(vars(args), os.environ))


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m syncer.server`; a mistake of the user is one sentence and status 2."""
    words = sys.argv[1:] if argv is None else argv
    return answered(
        lambda: serve(flags.read_config(words, os.environ, prog="python -m syncer.server")))


def serve(config: Config) -> int:
    """As `syncer.server.service.serve`, whose process this is: it does not wait for a worker that
    computes what nobody wants any more. Loading it checks the kernels, which may fail."""
    from syncer.server import system  # noqa: PLC0415
    from syncer.server.service import serve as run_server  # noqa: PLC0415

    status = run_server(config)
    if system.still_computing():
        system.leave(status)
    return status
