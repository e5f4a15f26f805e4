"""Simulated fleets: a block of seeds per test run, all faults, every rule, and they all finish.

`python -m tests.sim.run --seed N --count K` plays more of them.
"""

from functools import cache

import pytest

from tests.sim import run
from tests.sim.fleet import Fleet
from tests.sim.marks import REQUIRED
from tests.sim.turns import LineCheck

BLOCKS = 8
SEEDS_PER_BLOCK = 20
RARE_PATHS = {
    "late joiner pulled into open round", "rebound outstanding pull", "recovery replay", "resumed",
    "quorum timeout: new frozen-membership attempt", "tape released", "tape carried",
    "quorum timeout: relaunch deferred, too few learners", "late push waits for the next round",
    "quorum timeout: missing learners of the fixed roster pulled again", "a learner was refused",
    "rolled back", "saved round", "saved periodic in the background", "ended with status 5",
    "background save waited for", "ended with status 143", "resumed at the end", "capacity shrink",
}
assert RARE_PATHS <= REQUIRED


@cache
def play_block(block: int) -> frozenset[str]:
    """Marks of the block's runs; played once, whichever test asks first."""
    marks: set[str] = set()
    for seed in range(block * SEEDS_PER_BLOCK, (block + 1) * SEEDS_PER_BLOCK):
        fleet = Fleet(seed)
        try:
            fleet.play()
            fleet.check()
        except BaseException as error:
            raise AssertionError(f"python -m tests.sim.run --traceback --seed {seed}") from error
        marks |= fleet.marks
    return frozenset(marks)


@pytest.mark.parametrize("block", range(BLOCKS))
def test_fleets_finish(block):
    assert play_block(block)


def test_rare_paths_are_reached():
    marks = frozenset().union(*map(play_block, range(BLOCKS)))
    assert marks >= RARE_PATHS, f"never happened: {sorted(RARE_PATHS - marks)}"


def test_a_rule_broken_in_one_seed_is_a_line_and_the_others_are_played(monkeypatch, capsys):
    def look(self, session):
        if not broken:
            broken.append(session)
            raise AssertionError("a catch-up overtook a broadcast")

    broken = []
    monkeypatch.setattr(LineCheck, "look", look)
    monkeypatch.setattr("sys.argv", ["run", "--seed", "3", "--count", "2", "--steps", "5"])
    assert run.main() == 1
    said = capsys.readouterr().out
    assert "seed 3: Broken: a catch-up overtook a broadcast" in said
    assert "2 runs, 1 failed" in said


@pytest.mark.parametrize("seed", [3, 8, 52])
def test_a_seed_is_one_run(seed):
    """Nothing but the seed decides: times, log, tape and final bits are equal."""
    def outcome():
        fleet = Fleet(seed)
        fleet.play()
        fleet.check()
        return (fleet.world.now_ns, fleet.world.done, bytes(fleet.tape.data), fleet.lines.lines,
                fleet.history.current())

    assert outcome() == outcome()
