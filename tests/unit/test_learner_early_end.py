"""When a learner without steps leaves the rounds: if they wait for it, and only then."""

import pytest

from syncer.learner.early_end import AWAY_MAX_S, AWAY_MIN_S, WAITED_FOR, WAITED_FOR_MIN_S, EarlyEnd
from syncer.wire.messages import Pull


def test_rounds_that_close_without_it_are_left_alone():
    early, now = EarlyEnd(), 0.0
    for step in range(100):
        early.look(now, 1, [Pull(0, step, 1)])
        now += WAITED_FOR_MIN_S / 2
        assert early.reason(now, now, None) is None, "a merge has just come"


@pytest.mark.parametrize(("expected_s", "wait_s"), [
    (None, WAITED_FOR_MIN_S), (0.01, WAITED_FOR_MIN_S), (60.0, WAITED_FOR * 60)])
def test_a_run_that_waits_for_it_is_left(expected_s, wait_s):
    early = EarlyEnd()
    early.look(100.0, 1, [Pull(0, 7, 1), Pull(1, 8, 1)])
    assert early.due(0.0, expected_s) == 100 + wait_s
    assert early.reason(99 + wait_s, 0.0, expected_s) is None
    assert "step 7" in early.reason(100 + wait_s, 0.0, expected_s)


def test_without_an_open_pull_nobody_waits_for_it():
    early = EarlyEnd()
    early.look(0.0, 1, [])
    assert early.due(0.0, 1.0) is None
    assert early.reason(1e9, 0.0, 1.0) is None


def test_a_new_attempt_at_a_round_is_enough():
    early = EarlyEnd()
    early.look(0.0, 1, [Pull(0, 7, 2)])
    assert early.reason(0.0, 0.0, None) is None, "the first that this connection was asked for"
    early.look(0.1, 1, [Pull(0, 7, 3)])
    assert "launched again" in early.reason(0.1, 0.1, None)
    early.look(0.2, 2, [Pull(0, 7, 4)])
    assert early.reason(0.2, 0.2, None) is None, "another connection"


def test_it_comes_back_less_and_less_often():
    early, away = EarlyEnd(), []
    for _ in range(5):
        away.append(early.away_s)
        early.left()
    assert away[0] == AWAY_MIN_S
    assert away == sorted(away)
    assert away[-1] == AWAY_MAX_S
