"""`syncer demo`: flags, their units and defaults, and what is refused before anything starts.

Must stay cheap to import: the run itself is loaded when the flags have been answered.
"""

from __future__ import annotations

import argparse
import importlib.util
import os

from syncer.demo import settings
from syncer.demo.learner import check_torch, seconds, whole_number
from syncer.demo.run_plan import RunPlan
from syncer.errors import ConfigError

LEARNERS_MAX = 64
"""Each one is a process of about 60 MB that trains all the time."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `demo` with all its flags."""
    parser = subparsers.add_parser(
        "demo", help="train a small language model with several learners, here",
        allow_abbrev=False,
        description="Trains a byte-level language model on Python's own source files with one "
                    "server and several learners: real processes, real TCP on this machine. Ends "
                    "with what each learner and the merged model reached.")
    parser.add_argument("--learners", metavar="N", type=whole_number(1, LEARNERS_MAX),
                        default=settings.LEARNERS,
                        help="learner processes, 1 to 64 (default: %(default)s)")
    parser.add_argument("--steps", metavar="T", type=whole_number(1),
                        help="end after T outer steps, paced by the learners' own steps "
                             f"({settings.SYNC_INTERVAL_STEPS} between two merges of a fragment; "
                             "default: as many as fit into --seconds)")
    parser.add_argument("--seconds", metavar="S", type=seconds,
                        help="end after S seconds of training; without --steps the outer steps "
                             f"are spread evenly over them (default: {settings.SECONDS:g}, or no "
                             "limit with --steps)")
    parser.add_argument("--dtype", choices=settings.WIRE_DTYPES, default=settings.DTYPE,
                        help="number format on the wire (default: %(default)s)")
    parser.add_argument("--seed", metavar="SEED", type=whole_number(0), default=settings.SEED,
                        help="seed of the first parameters and of the batches "
                             "(default: %(default)s)")
    parser.add_argument("--torch", action="store_true",
                        help="train a small GPT in PyTorch in place of the model in NumPy")
    parser.add_argument("--kill-one", action="store_true",
                        help="kill one learner half-way with SIGKILL and start it again a few "
                             "outer steps later")
    parser.add_argument("--baseline", action="store_true",
                        help="afterwards train one learner alone with the same number of own "
                             "steps, and print both results")
    parser.add_argument("--json", metavar="FILE",
                        help="write the closing table, the loss curve and every merge to FILE")
    parser.add_argument("--plot", metavar="FILE",
                        help="draw the loss over time with merges, joins and losses to FILE, for "
                             "example loss.png (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    """Runs the demo and returns its exit status. Raises ConfigError for flags it cannot follow."""
    budget = args.seconds
    if budget is None and args.steps is None:
        budget = settings.SECONDS
    plan = RunPlan(learners=args.learners, steps=args.steps, seconds=budget, dtype=args.dtype,
                   seed=args.seed, kill_one=args.kill_one, baseline=args.baseline,
                   json=args.json, plot=args.plot, torch=args.torch)
    check(plan)
    for name in settings.ONE_THREAD:  # figures must not depend on how many cores measure them
        os.environ.setdefault(name, "1")
    from syncer.demo.processes.conductor import run as run_demo  # noqa: PLC0415  loads NumPy

    return run_demo(plan)


def check(plan: RunPlan) -> None:
    """Refuses what could only fail after a minute of training. Raises ConfigError."""
    check_torch(plan.torch)
    if plan.kill_one and plan.total_steps < 4:
        raise ConfigError(f"--kill-one needs at least 4 outer steps, --steps gives "
                          f"{plan.total_steps}")
    for name, path in (("--json", plan.json), ("--plot", plan.plot)):
        if path is None:
            continue
        parent = os.path.dirname(os.path.abspath(path))
        if os.path.isdir(path):
            raise ConfigError(f"{name} {path} is a directory; name a file")
        if not os.path.isdir(parent):
            raise ConfigError(f"{name} {path} cannot be written: the directory {parent} does not "
                              "exist")
        if not os.access(path if os.path.exists(path) else parent, os.W_OK):
            raise ConfigError(f"{name} {path} cannot be written: permission denied")
    if plan.plot is not None:
        if importlib.util.find_spec("matplotlib") is None:
            raise ConfigError("--plot needs matplotlib; install it with: "
                              "pip install 'diloco-syncer[demo]'")
        if os.path.splitext(plan.plot)[1].lower() not in (".png", ".svg", ".pdf"):
            raise ConfigError(f"--plot {plan.plot} has no known picture format; end the name in "
                              ".png, .svg or .pdf")
