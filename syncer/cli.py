"""The `syncer` command: finds the subcommand and loads that room only.

Must not hold any logic of a subcommand: each room has its own `command` module with
`add_parser(subparsers)` and `run(args) -> exit status`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence

from syncer import __version__
from syncer.errors import ConfigError, SyncerError
from syncer.exits import Exit
from syncer.flags import OneSentenceParser
from syncer.streams import complain, open_closed_streams

COMMANDS = {
    "serve": ("syncer.server.command", "run the server of a run (also: python -m syncer.server)"),
    "checkpoint": ("syncer.checkpoint.command",
                   "look into, verify, convert or export a checkpoint"),
    "pull": ("syncer.reader.command", "write the parameters of a live run to a model file"),
    "keys": ("syncer.keys.command", "make the certificates of a fleet, for TLS"),
    "demo": ("syncer.demo.command", "train a small language model with several learners, here"),
    "kernels": ("syncer.kernels.command", "show and check the compiled kernels of this machine"),
}


def build_parser(command: str | None) -> argparse.ArgumentParser:
    """The parser with every command's name and, in full, the one that is asked for."""
    parser = OneSentenceParser(
        prog="syncer", allow_abbrev=False,
        description="Parameter server and learners of Decoupled DiLoCo training.",
        epilog="syncer COMMAND --help shows the settings of a command.")
    parser.add_argument("--version", action="store_true",
                        help="show the version; with -v also the kernels that run here")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, text) in COMMANDS.items():
        if name == command:
            importlib.import_module(module).add_parser(commands)
        else:
            commands.add_parser(name, help=text)
    return parser


def show_version(verbose: bool) -> int:
    """Prints the version, and with `verbose` what `syncer kernels` prints."""
    print(f"syncer {__version__}")
    if verbose:
        print(importlib.import_module(COMMANDS["kernels"][0]).report())
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns its exit status; a user's mistake is one sentence."""
    words = list(sys.argv[1:] if argv is None else argv)
    return answered(lambda: subcommand(words))


def subcommand(words: list[str]) -> int:
    """Runs what the words of a command line say; raises `SyncerError`."""
    if set(words) in ({"--version"}, {"--version", "-v"}):
        return show_version(verbose="-v" in words)
    command = next((word for word in words if not word.startswith("-")), None)
    args = build_parser(command).parse_args(words)
    return int(importlib.import_module(COMMANDS[args.command][0]).run(args))


def answered(run: Callable[[], int]) -> int:
    """The status that `run` returns, or that of its error, which is said in one sentence."""
    open_closed_streams()
    try:
        return run()
    except SyncerError as error:
        complain(str(error))
        return Exit.UNUSABLE if isinstance(error, ConfigError) else Exit.FAILED
    except FileNotFoundError:
        if not _is_nowhere():
            raise
        complain("the current directory was removed, so that no relative path means anything: "
                 "change to another one")
        return Exit.UNUSABLE
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.FAILED


def _is_nowhere() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False
