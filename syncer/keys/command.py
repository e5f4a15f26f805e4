"""`syncer keys`: flags, and what is said of the files that were made.

Must not make any: `authority` does.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from syncer.exits import Exit

if TYPE_CHECKING:
    from syncer.keys import authority

DAYS = 365
DAYS_MAX = 3650
CERTIFICATES_MAX = 10_000


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `keys` with its three actions."""
    parser = subparsers.add_parser(
        "keys", help="make the certificates of a fleet, for TLS", allow_abbrev=False,
        description="Makes what TLS needs: an authority of the fleet's own, a certificate for the "
                    "server, and one for each learner and reader. Every file but ca.pem has a "
                    "private key in it: copy each to its machine alone, by a way that is safe, and "
                    "keep ca-key.pem where nobody else comes. No file is ever replaced.",
        epilog="Exit statuses: 0 done, 2 something that was given cannot be used.")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    init = actions.add_parser("init", help="a new authority, and the server's certificate",
                              allow_abbrev=False)
    init.add_argument("directory", metavar="DIRECTORY")
    init.add_argument("--host", action="append", metavar="NAME",
                      help="name or address by which learners dial the server; may be repeated "
                           "(default: the name of this machine)")
    init.add_argument("--learners", type=number_of("learners", 0, CERTIFICATES_MAX), default=0,
                      metavar="M",
                      help="make learner-0.pem to learner-<M-1>.pem as well (default: none)")
    learner = actions.add_parser("learner", help="certificates of further learners or readers",
                                 allow_abbrev=False)
    learner.add_argument("directory", metavar="DIRECTORY")
    learner.add_argument("names", nargs="+", metavar="NAME", help="for example learner-7 or eval")
    for each in (init, learner):
        each.add_argument("--days", type=number_of("days", 1, DAYS_MAX), default=DAYS, metavar="D",
                          help="how long they hold (default: %(default)s)")
    shown = actions.add_parser("show", help="what certificates say, and until when they hold",
                               allow_abbrev=False)
    shown.add_argument("files", nargs="+", metavar="FILE")


def number_of(what: str, least: int, most: int) -> Callable[[str], int]:
    """An argparse type: so many of these."""
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(
                f"{text!r} is no number of {what} from {least} to {most}")
        return int(text)

    return parse


def run(args: argparse.Namespace) -> int:
    """Does it; returns the exit status, raises `ConfigError`."""
    made = importlib.import_module("syncer.keys.authority")
    if args.action == "show":
        for file in args.files:
            print(line(file, made.show(file)))
        return Exit.DONE
    if args.action == "init":
        fleet = made.Authority.make(args.directory)
        server = fleet.server(args.host or [socket.gethostname()], args.days)
        names = [f"learner-{learner}" for learner in range(args.learners)]
        print(f"{server}: for the server, with --tls-cert {server} --tls-key {server} "
              f"--tls-client-ca {fleet.directory / made.CA}")
    else:
        fleet, names = made.Authority(args.directory), args.names
    for name in names:
        print(f"{fleet.learner(name, args.days)}: for {name} alone, as tls= or --tls")
    return Exit.DONE


def line(file: str, shown: authority.Shown) -> str:
    """What is to be said of one file."""
    left = (shown.until - datetime.datetime.now(datetime.UTC)).days
    return (f"{file}: {', '.join(shown.names) or 'no name'}; for {shown.role}; signed by "
            f"{shown.signed_by}; until {shown.until:%Y-%m-%d} ({left} days); "
            f"{'with' if shown.has_key else 'without'} a private key")
