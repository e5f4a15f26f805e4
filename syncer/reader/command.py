"""`syncer pull`: flags, the file that each cut becomes, and the exit status.

Must not decide when a cut is whole: `pulling` gives whole ones only.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from syncer.checkpoint.atomic import WriteError, written_anew
from syncer.checkpoint.files import FILES, Patient
from syncer.checkpoint.lock import PathLock
from syncer.checkpoint.model_file import model_metadata, names_or_places, write_model
from syncer.checkpoint.progress import size
from syncer.config.paths import trouble_of_file
from syncer.errors import ConfigError
from syncer.exits import Exit, after_signal
from syncer.learner.arguments import checked_key
from syncer.protocol import DTYPES
from syncer.ranges import RUN
from syncer.reader.pull_screen import PullScreen, pull_screen
from syncer.reader.pulling import BULK_DTYPES, PULL_TIMEOUT_S, LiveCut, Pulling
from syncer.streams import complain

WRITTEN_BY = "syncer pull"
WRITE_RETRIES = 5


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `pull` with all its flags."""
    parser = subparsers.add_parser(
        "pull", help="write the parameters of a live run to a model file", allow_abbrev=False,
        description="Takes one whole cut of a run that goes on - all parameters after one and the "
                    "same step - and writes it as a safetensors file, under the names that the "
                    "model loads them by where the run knows them. Rounds and learners feel "
                    "nothing of it. The file appears under its name complete and on disk, or not "
                    "at all.",
        epilog="With a key (SYNCER_HMAC_KEY) the run must have the same one. Exit statuses: 0 the "
               "file is written (with --follow: the run has ended, and the file has its last "
               "cut), 1 no cut could be had, 2 a flag or file cannot be used, 5 the file could "
               "not be written, 130 and 143 ended by SIGINT and SIGTERM.")
    parser.add_argument("address", metavar="HOST:PORT", help="of the server; or unix:/PATH")
    parser.add_argument("-o", "--output", metavar="FILE", required=True,
                        help="model file to write, for example model.safetensors")
    parser.add_argument("--follow", action="store_true",
                        help="go on until the run ends: replace FILE by every cut that comes, one "
                             "each time all fragments were merged, or fewer on a slow link")
    parser.add_argument("--dtype", choices=list(BULK_DTYPES), default="f32",
                        help="number format of link and file (default: %(default)s)")
    parser.add_argument("--run", metavar="NAME",
                        help="only from the run of this name (default: whichever is there)")
    parser.add_argument("--tls", metavar="FILE",
                        help="certificate, key and authority of a reader, in one PEM file, for a "
                             "server with --tls-cert")
    parser.add_argument("--timeout-s", metavar="S", type=seconds,
                        help="give up when nothing came for S seconds, 0: never (default: "
                             f"{PULL_TIMEOUT_S:g}, with --follow 0)")
    parser.add_argument("--overwrite", action="store_true",
                        help="replace FILE whatever it is (default: only what this command has "
                             "written, of the same model)")
    parser.add_argument("--json", action="store_true",
                        help="print a JSON object for each cut, one a line")


def seconds(text: str) -> float:
    """A length of time in seconds, 0 for none."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 10**9:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds, for example 60")
    return value


def run(args: argparse.Namespace) -> int:
    """Pulls; returns the exit status, raises `SyncerError`."""
    if args.run is not None and not RUN.admits(args.run):
        raise ConfigError(f"--run {args.run} cannot be used: expected {RUN.words}")
    limit = args.timeout_s
    if limit is None:
        limit = 0 if args.follow else PULL_TIMEOUT_S
    screen = pull_screen(args.json)
    pulling = Pulling(args.address, dtype=args.dtype, follow=args.follow, run=args.run,
                      key=checked_key(None), timeout_s=limit or None, tls=args.tls, say=screen.say,
                      progress=screen.progress)
    target = Target(args, screen)
    with PathLock(args.output, "-o"):
        target.look()
        try:
            with signals_as_interrupts() as seen:
                return follow(pulling, target)
        except KeyboardInterrupt:
            screen.say(f"stopped; {target.state()}")
            return after_signal(seen[0] if seen else signal.SIGINT)
        except BaseException:
            if args.follow and target.written is not None:
                screen.say(target.state())
            raise
        finally:
            screen.close()


def follow(pulling: Pulling, target: Target) -> int:
    """Write every cut that comes. A write that fails ends whoever wants one cut; who follows tries
    again with the next."""
    failed = False
    for cut in pulling:
        try:
            target.write(cut)
            failed = False
        except WriteError as error:
            failed = True
            complain(str(error))
            if not pulling.follow:
                break
    if pulling.follow:
        target.screen.say(f"the run has ended; {target.state()}")
    return Exit.NOT_WRITTEN if failed else Exit.DONE


@contextmanager
def signals_as_interrupts() -> Iterator[list[int]]:
    """SIGTERM ends as Ctrl-C does, by its own number."""
    seen: list[int] = []

    def caught(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, caught) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Target:
    """The file. Raises `ConfigError` if it must not be replaced, `WriteError` if it cannot be."""

    def __init__(self, args: argparse.Namespace, screen: PullScreen):
        self.path, self.screen = args.output, screen
        self.as_json, self.overwrite = args.json, args.overwrite
        self.written: LiveCut | None = None
        self.begun = time.monotonic()
        if (trouble := trouble_of_file(self.path)) is not None:
            raise ConfigError(f"-o {self.path} {trouble}")
        self.replaces: dict[str, str] | None = None

    def look(self) -> None:
        """Whether what is there may be replaced; nobody else is writing it."""
        self.replaces = None if self.overwrite else self._there()

    def _there(self) -> dict[str, str] | None:
        """What a file that is there tells of itself: one of this command, or it stays."""
        try:
            found = model_metadata(self.path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(f"-o {self.path} cannot be looked into: {error.strerror}") from None
        if found is None or found.get("written_by") != WRITTEN_BY:
            what = "a checkpoint" if found and "header_sha256" in found else "another file"
            raise ConfigError(f"-o {self.path} is {what}, which this command has not written: name "
                              "another one, or say --overwrite")
        return found

    def write(self, cut: LiveCut) -> None:
        session = cut.session
        fingerprint = session.fingerprint.hex()
        if self.replaces is not None and self.replaces.get("layout_fingerprint") != fingerprint:
            raise ConfigError(f"-o {self.path} has the parameters of another model, of step "
                              f"{self.replaces.get('global_step')}: name another file, or say "
                              "--overwrite")
        metadata = {"written_by": WRITTEN_BY, "global_step": str(cut.step),
                    "epoch": str(cut.welcome.epoch), "instance": f"{cut.welcome.instance:016x}",
                    "layout_fingerprint": fingerprint,
                    "session_contract": session.contract.hex()}
        if cut.welcome.run:
            metadata["run"] = cut.welcome.run
        names = (None if session.names is None
                 else [fragment.tensors for fragment in session.names])
        tensors = names_or_places([f.numel for f in session.layout.fragments], names)
        files = Patient(FILES, WRITE_RETRIES, told=lambda call, error: self.screen.say(
            f"tried again: {call}: {error.strerror}"))
        count = written_anew(lambda patient: write_model(
            self.path, cut.tensors, tensors, dtype=cut.dtype, metadata=metadata,
            files=patient), files)
        self.written, self.replaces = cut, metadata
        self._tell(cut, count, sum(map(len, tensors)))

    def _tell(self, cut: LiveCut, count: int, tensors: int) -> None:
        run = cut.welcome.run
        record: dict[str, Any] = {
            "path": self.path, "global_step": cut.step, "final": cut.is_final,
            "run": run or None, "epoch": cut.welcome.epoch, "dtype": DTYPES[cut.dtype],
            "tensors": tensors, "named": cut.session.names is not None, "bytes": count,
            "seconds": round(time.monotonic() - self.begun, 3)}
        kind = "the final cut, step" if cut.is_final else "step"
        print(json.dumps(record) if self.as_json else
              f"{self.path}: {kind} {cut.step}{f' of run {run}' if run else ''}, {tensors} "
              f"tensors, {size(count)}", flush=True)

    def state(self) -> str:
        """Which step the file has, in words."""
        if self.written is not None:
            return f"{self.path} has step {self.written.step}"
        if self.replaces is not None:
            return f"{self.path} has step {self.replaces.get('global_step')}, as before"
        return f"nothing was written to {self.path}"


