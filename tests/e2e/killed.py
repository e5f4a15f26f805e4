"""A run whose server is killed again and again; each time what is on disk must be a whole cut.

As a program it is the long form of the test: `python -m tests.e2e.killed --kills 200`. With
`--server WHEN CALL` it is a server that kills itself at one call of the file layer: the moments
between two system calls, which a killer with a clock rarely meets.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from syncer.checkpoint.epoch_file import read_epoch
from syncer.checkpoint.files import Files
from syncer.checkpoint.reader import Checkpoint
from syncer.layout import RDA, FragmentLayout, Layout
from syncer.protocol import Msg
from syncer.wire.messages import Manifest, Pull
from tests.checkpoint.cuts import names_in
from tests.e2e.checkpointed import cut_in
from tests.e2e.scripted import EndOfStream, ScriptedLearner, ServerProcess, wait_until

LAYOUT = Layout((FragmentLayout(RDA, (40_000, 7)), FragmentLayout(RDA, (9001,)),
                 FragmentLayout(RDA, (25_000,))))
STEPS = 30
EVERY = {"per-round": ("--checkpoint-every", "1"),
         "background": ("--checkpoint-every", "3", "--background-checkpoint")}
STRAYS = {"c.tmp", "c.old.tmp", "c.lock", "c.final.tmp", "c.epoch.tmp", "c.epoch.old.tmp"}
"""What a killed server may leave beside the checkpoint and its marker; the next one clears it."""


def delta(step: int) -> np.ndarray:
    numel = LAYOUT.fragments[(step - 1) % len(LAYOUT.fragments)].numel
    return np.random.default_rng(step).standard_normal(numel).astype(np.float32)


class Run:
    """One run to its end over any number of servers, with one scripted learner."""

    def __init__(self, directory: Path, mode: str):
        self.directory, self.mode = directory, mode
        self.work = directory / "work"
        self.work.mkdir()
        self.path = self.work / "c"
        self.finished = False
        self.seen = -1
        """Newest version a learner was shown."""

    def server(self, module: tuple[str, ...] = ("syncer.server",)) -> ServerProcess:
        flags = ["--checkpoint-path", str(self.path), *EVERY[self.mode], "--mark-final-checkpoint",
                 "--max-base-lag", "0", "--grace-ms", "0", "--quorum", "1"]
        if self.path.exists():
            flags.append("--resume")
        return ServerProcess(self.directory, *flags, steps=STEPS, module=module)

    def follow(self, server: ServerProcess) -> None:
        """Train on a server until it ends or is killed."""
        added = self.added()
        with suppress(EndOfStream, OSError), ScriptedLearner(server.port, 0, LAYOUT) as learner:
            try:
                learner.send_init([np.zeros(f.numel, np.float32) for f in LAYOUT.fragments])
                while True:
                    pull = learner.until(lambda m: isinstance(m, Pull | Manifest))
                    if isinstance(pull, Manifest):
                        learner.acknowledge(pull.step)
                        learner.until(Msg.SHUTDOWN)
                        break
                    step = pull.step - added
                    learner.push(pull, delta(step), local_step=step, c_steps=3,
                                 c_tokens=100 + step)
            finally:
                self.seen = max(self.seen, *(version - added
                                             for version in learner.versions.values()), -1)

    def added(self) -> int:
        """To the steps of the server that runs."""
        beside = read_epoch(str(self.path))
        return 0 if beside is None else beside.renumbered

    def check(self) -> None:
        """What a killed server leaves: a whole cut, not older than what was seen."""
        assert names_in(self.work) <= {"c", "c.epoch", "c.final"} | STRAYS, names_in(self.work)
        step = -1
        if self.path.exists():
            with Checkpoint(self.path) as checkpoint:
                checkpoint.load()
                step = checkpoint.facts.step - checkpoint.facts.lineage.renumbered
        if self.mode == "per-round":
            assert step >= self.seen, f"step {self.seen} was shown, {step} is on disk"
        else:
            # while step k + 3 is being written rounds go on to step k + 6, whose save then waits
            assert max(step, 0) % 3 == 0
            assert max(step, 0) + 6 >= self.seen, f"step {self.seen} was shown, {step} is on disk"
        if (self.work / "c.final").exists():
            assert step == STEPS

    def killed_after(self, delay_s: float) -> None:
        """One server that lives so long after it began to listen, if the run is not over before."""
        with self.server() as server:
            timer = threading.Timer(delay_s, lambda: server.signal(signal.SIGKILL))
            timer.start()
            self.follow(server)
            timer.cancel()
            timer.join()
            self.over(server)

    def killed_at(self, when: str, call: int) -> bool:
        """One server that kills itself at a call of the file layer; False if it came to no such."""
        with self.server(("tests.e2e.killed", "--server", when, str(call))) as server:
            self.follow(server)
            return self.over(server) == -signal.SIGKILL

    def over(self, server: ServerProcess) -> int:
        status = wait_until(lambda: [s] if (s := server.process.poll()) is not None else None,
                            "the end of the server")[0]
        assert status in (0, -signal.SIGKILL), server.log.text()
        self.finished = status == 0
        self.check()
        return status

    def finish(self) -> Any:
        """Bring the run to its end undisturbed; what its last checkpoint holds."""
        if not self.finished:
            with self.server() as server:
                self.follow(server)
                self.over(server)
        assert self.finished
        assert names_in(self.work) == {"c", "c.epoch", "c.final"}
        last = STEPS + self.added()
        assert (self.work / "c.final").read_text() == f"YETO_FINAL_V1\nglobal_step={last}\n"
        return cut_in(self.path.read_bytes())


def fresh(directory: Path, mode: str) -> Run:
    return Run(Path(tempfile.mkdtemp(dir=directory)), mode)


def kill_at_random(directory: Path, mode: str, kills: int, seed: int,
                   expected: Any) -> int:
    """Kill servers at so many random moments; returns over how many whole runs."""
    chance = random.Random(f"{mode} {seed}")
    done, runs = 0, 0
    while done < kills:
        run, runs = fresh(directory, mode), runs + 1
        while done < kills and not run.finished:
            run.killed_after(chance.uniform(0.0, 0.25))
            done += not run.finished
        assert run.finish() == expected, "a killed run ends with another cut"
    return runs


class Suicidal(Files):
    """Kills the process before or after a call, counted over the run."""

    def __init__(self, when: str, call: int):
        self.when, self.left = when, call

    def _reached(self, when: str) -> None:
        if when == self.when:
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= 1


def _suicidal(name: str):
    def call(self, *given, **options):
        self._reached("before")
        result = getattr(Files, name)(self, *given, **options)
        self._reached("after")
        return result
    return call


for _name in ("create", "write", "sync", "set_mode", "close", "link", "rename", "unlink",
              "sync_directory"):
    setattr(Suicidal, _name, _suicidal(_name))


def serve(when: str, call: int, argv: list[str]) -> int:
    from syncer import flags  # noqa: PLC0415
    from syncer.server.service import Server  # noqa: PLC0415
    from syncer.server.system import System  # noqa: PLC0415
    return Server(flags.read_config(argv, os.environ), system=System(Suicidal(when, call))).run()


def main() -> int:
    if sys.argv[1:2] == ["--server"]:
        return serve(sys.argv[2], int(sys.argv[3]), sys.argv[4:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="of each kind of checkpoint")
    parser.add_argument("--mode", choices=sorted(EVERY), help="one kind alone")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        for mode in [given.mode] if given.mode else EVERY:
            expected = fresh(Path(directory), mode).finish()
            runs = kill_at_random(Path(directory), mode, given.kills, given.seed, expected)
            print(f"{mode}: killed at {given.kills} random moments (seed {given.seed}) of {runs} "
                  "runs; every file loaded, every run ended with the same cut", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
