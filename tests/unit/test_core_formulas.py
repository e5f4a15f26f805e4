"""The formulas of the round logic against the worked examples of their description."""

import random

import pytest

from syncer.config import Config
from syncer.core.actions import Admit
from syncer.core.events import Disconnected, Hello
from syncer.core.rounds.closing import Verdict, decide_close, grace_ns, launch_interval_ns
from syncer.core.rounds.contributions import most_over
from syncer.core.rounds.membership import Member
from syncer.core.run.scheduler import Scheduler
from tests.toy_driver import MS, ToyDriver, toy_config

SECOND = 1_000_000_000
NEVER = 2**63 - 1


@pytest.mark.parametrize(
    ("step_time_s", "since_launch_s", "sync_s", "expected_ns"),
    [
        (1.0, 0.5, 0.5, 800_000_000),
        (0.1, 1.0, 1.0, 0),
        (60.0, 0.5, 0.5, SECOND),
        (-1.0, 0.5, 0.5, SECOND),
        (0.5, 0.5, 0.5, 0),
        (1.0, 0.0, 0.75, SECOND),
    ],
)
def test_grace_examples(step_time_s, since_launch_s, sync_s, expected_ns):
    assert grace_ns(0.8, 2.0, SECOND, step_time_s, since_launch_s, sync_s) == expected_ns


def test_grace_gamma_zero_and_cap_zero():
    assert grace_ns(0.0, 2.0, SECOND, 60.0, 0.0, 0.0) == 0
    assert grace_ns(0.8, 2.0, 0, -1.0, 0.0, 0.0) == 0


def test_launch_interval():
    longest = 900 * SECOND
    assert launch_interval_ns(0, longest, 24.0, 1.0, 4) == 6 * SECOND
    assert launch_interval_ns(7 * SECOND, longest, 24.0, 1.0, 4) == 7 * SECOND
    assert launch_interval_ns(250_000_000, longest, 24.0, -1.0, 4) == 250_000_000, "no estimate"
    assert launch_interval_ns(250_000_000, longest, 0.0, 9.0, 4) == 250_000_000, "H = 0"
    assert launch_interval_ns(0, longest, 24.0, 200.0, 4) == longest, "as long as a round may take"
    assert launch_interval_ns(longest + 1, longest, 24.0, 200.0, 4) == longest + 1, "but the floor"
    assert launch_interval_ns(0, longest, 1e300, 1e300, 1) == longest, "an absurd pace"


def test_step_time_is_the_mean_of_the_newest_sample_and_the_past():
    member = Member(3, 7)
    member.observe(0, 10)
    assert member.step_time_s < 0, "one sample is no interval"
    member.observe(SECOND, 12)
    assert member.step_time_s == 0.5
    member.observe(2 * SECOND + SECOND // 2, 13)
    assert member.step_time_s == 1.0


def test_one_sample_of_step_time_counts_for_four_estimates_at_most():
    member = Member(3, 7)
    member.observe(0, 10)
    member.observe(SECOND, 12)
    member.observe(SECOND + 600 * SECOND, 13)
    assert member.step_time_s == 1.25, "0.5 and 4 * 0.5, not 600"
    member.observe(SECOND + 605 * SECOND, 14)
    assert member.step_time_s == 3.125, "5 is 4 * 1.25"
    member = Member(3, 8)
    member.observe(0, 10)
    member.observe(0, 11)
    assert member.step_time_s == 0
    member.observe(SECOND, 12)
    assert member.step_time_s == 0.5, "four times nothing is no limit"


def test_step_time_clock_restarts_without_progress():
    member = Member(0, 1)
    member.observe(0, 10)
    member.observe(100 * SECOND, 10)
    assert member.step_time_s < 0
    member.observe(101 * SECOND, 11)
    assert member.step_time_s == 1.0, "the pause is not counted"
    member.observe(200 * SECOND, 4)
    member.observe(202 * SECOND, 5)
    assert member.step_time_s == 1.5, "a step counter that ran back starts anew"


def slow_decide(case):
    """The closing rules in the words of their description, one sentence after the other."""
    now, answered, expected, contributed, quorum, grace, deadline = case
    everybody = answered >= expected
    if everybody and contributed:
        return "CLOSE"
    if quorum:
        armed = grace != NEVER
        return "CLOSE" if armed and now >= grace else "WAIT"
    return "RELAUNCH" if now >= deadline else "WAIT"


def test_decide_close_equals_its_slow_twin_on_every_small_case():
    cases = 0
    for now in (0, 5, 10, 15):
        for answered in range(4):
            for expected in range(4):
                for quorum in (False, True):
                    for grace in (5, 10, NEVER):
                        for deadline in (5, 10):
                            case = (now, answered, expected, answered > 0, quorum, grace, deadline)
                            assert decide_close(*case).name == slow_decide(case), case
                            cases += 1
    assert cases == 4 * 4 * 4 * 2 * 3 * 2


def test_verdicts_are_named():
    assert [v.name for v in Verdict] == ["WAIT", "CLOSE", "RELAUNCH"]


def test_generations_are_remembered_within_a_bound():
    """Of 4,096 learners 64 each: then the oldest of this learner is forgotten, nobody else's."""
    scheduler = Scheduler(Config(learners=4096, total_steps=1))

    def admitted(learner, generation):
        actions = scheduler.step(0, Hello(1, learner, generation, 1))
        scheduler.step(0, Disconnected(learner, generation))
        return any(isinstance(action, Admit) for action in actions)

    assert admitted(1, 1)
    assert all(admitted(0, generation) for generation in range(1, 65))
    assert not admitted(0, 1)
    assert admitted(0, 65)
    assert admitted(0, 1)
    assert not admitted(0, 3)
    assert not admitted(1, 1)


def test_a_weight_is_capped_at_1000_times_the_lower_median_of_the_others():
    """Against its own words, with one or two entries of each learner, and near the cap."""
    rng = random.Random(3)
    for _ in range(3000):
        found = [(rng.choice([1.0, 2.0, 999.0, 1000.0, 1e6, 1e300]) * rng.choice([1, 1, 1.5]),
                  learner) for learner in range(rng.randint(1, 6))
                 for _ in range(rng.choice([1, 1, 2]))]
        weighed = sorted(found)
        for weight, learner in found:
            others = sorted(w for w, who in found if who != learner)
            cap = 1000.0 * others[(len(others) - 1) // 2] if others else float("inf")
            assert most_over(weighed, learner, weight) == min(weight, cap), (weighed, learner)
    assert most_over([], 0, 7.0) == 7.0
    assert most_over([(1.0, 1)], 0, 0.0) == 0.0


def test_time_that_runs_back_is_no_time_passed():
    """Grace of 20 ms is counted from the newest time that was ever said."""
    driver = ToyDriver(toy_config(learners=2, quorum=1))
    driver.feed(0, driver.hello(0, 1))
    driver.feed(0, driver.hello(1, 1))
    driver.feed(100 * MS, driver.init(0, 1, 0, 0.0))
    driver.feed(80 * MS, driver.push(0, 1, 1, -1.0))
    assert driver.scheduler.deadline_ns() == 120 * MS
