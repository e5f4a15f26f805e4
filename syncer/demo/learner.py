"""One learner of the demo as a process: `python -m syncer.demo.learner --server HOST:PORT --id N`.

Flags, signals and exit statuses only; what it does is in processes/training.py, which is imported
after the flags have been answered and the linear algebra library has been told to use one thread.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence

from syncer.demo import settings
from syncer.demo.processes import report
from syncer.demo.processes.stop import Stopped, StopRequest
from syncer.errors import ConfigError, SyncerError
from syncer.exits import Exit
from syncer.flags import OneSentenceParser
from syncer.streams import complain


def build_parser() -> argparse.ArgumentParser:
    """The flags of a learner."""
    parser = OneSentenceParser(
        prog="python -m syncer.demo.learner", allow_abbrev=False,
        description="Trains a byte-level language model on Python's own source files and joins a "
                    "server. Ctrl-C leaves the run; the others go on.")
    parser.add_argument("--server", metavar="HOST:PORT", help="the server to join")
    parser.add_argument("--tls", metavar="FILE",
                        help="key, certificate and authority in one PEM file, for a server with "
                             "--tls-cert (default: no TLS)")
    parser.add_argument("--alone", metavar="STEPS", type=whole_number(1),
                        help="train STEPS own steps without a server instead")
    parser.add_argument("--id", metavar="N", type=whole_number(0), default=0, dest="learner",
                        help="id of this learner, from 0; unique in the run (default: %(default)s)")
    parser.add_argument("--shards", metavar="S", type=whole_number(1), default=settings.LEARNERS,
                        help="shards the text is cut into; this learner reads shard id mod S "
                             "(default: %(default)s)")
    parser.add_argument("--dtype", choices=settings.WIRE_DTYPES, default=settings.DTYPE,
                        help="number format on the wire; the same for every learner of a run "
                             "(default: %(default)s)")
    parser.add_argument("--seed", metavar="SEED", type=whole_number(0), default=settings.SEED,
                        help="seed of the first parameters and, with the id, of the batches "
                             "(default: %(default)s)")
    parser.add_argument("--first-step", metavar="K", type=whole_number(0), default=0,
                        help="go on with the learning-rate schedule after K own steps, in place of "
                             "a learner that was lost (default: %(default)s)")
    parser.add_argument("--connect-timeout-s", metavar="SECONDS", type=seconds, default=900.0,
                        help="give up when the server cannot be reached for the first time within "
                             "so many seconds (default: 900)")
    parser.add_argument("--torch", action="store_true",
                        help="train a small GPT in PyTorch; the same for every learner of a run")
    parser.add_argument("--report", choices=("text", "json"), default="text",
                        help="lines for people or one JSON object per line (default: %(default)s)")
    return parser


def whole_number(least: int, most: int = (1 << 32) - 1) -> Callable[[str], int]:
    """An argparse type: an integer from `least` to `most`."""
    def parse(text: str) -> int:
        digits = text.isascii() and text.isdigit() and len(text) <= 10
        if not digits or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a whole number from {least} to {most}")
        return int(text)

    return parse


def seconds(text: str) -> float:
    """An argparse type: a finite number of seconds above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def check_torch(wanted: bool) -> None:
    """Raises ConfigError where --torch cannot be followed."""
    if wanted and importlib.util.find_spec("torch") is None:
        raise ConfigError("--torch needs PyTorch; install it with: "
                          "pip install 'diloco-syncer[torch]'")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one learner; returns its exit status: 0 done, 1 failed, 2 bad flag, 130/143 stopped."""
    try:
        stop = StopRequest()
        args = build_parser().parse_args(argv)
        if (args.server is None) == (args.alone is None):
            raise ConfigError("give either --server HOST:PORT to join a run or --alone STEPS to "
                              "train without one")
        check_torch(args.torch)
        for name in settings.ONE_THREAD:
            os.environ.setdefault(name, "1")
        from syncer.demo.processes import training  # noqa: PLC0415  loads NumPy, which reads them

        task = training.Task(
            learner=args.learner, shards=args.shards, seed=args.seed, first_step=args.first_step,
            dtype=args.dtype, server=args.server, steps=args.alone or 0,
            connect_timeout_s=args.connect_timeout_s, tls=args.tls, torch=args.torch)
        return training.run(task, report.open_report(args.report), stop)
    except Stopped:
        return stop.exit_status
    except ConfigError as error:
        complain(str(error))
        return Exit.UNUSABLE
    except SyncerError as error:
        complain(str(error))
        return Exit.FAILED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.FAILED


if __name__ == "__main__":
    sys.exit(main())
