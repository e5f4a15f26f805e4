"""kill -9: at every call of a save, and at a few random moments (`make kill-test` for 200)."""

from __future__ import annotations

import pytest

from tests.e2e.killed import EVERY, fresh, kill_at_random

pytestmark = pytest.mark.slow

CALLS_OF_A_SAVE = 11
"""create, set_mode, write, write, sync, close, link, rename, sync_directory, unlink: and one more,
so that every server gets a bit further than the one before it."""


@pytest.fixture(scope="module", params=sorted(EVERY))
def undisturbed(request, tmp_path_factory):
    """(mode, what the last checkpoint holds)."""
    return request.param, fresh(tmp_path_factory.mktemp("undisturbed"), request.param).finish()


def test_killed_between_any_two_calls_of_a_save(tmp_path, undisturbed):
    """One server after the other dies one call further into its second save."""
    mode, expected = undisturbed
    run = fresh(tmp_path, mode)
    for call in range(CALLS_OF_A_SAVE):
        if run.finished:
            assert run.finish() == expected
            run = fresh(tmp_path, mode)
        died = run.killed_at("after" if call % 2 else "before", CALLS_OF_A_SAVE + call)
        assert died or run.finished
    assert run.finish() == expected


def test_killed_at_random_moments(tmp_path, undisturbed):
    mode, expected = undisturbed
    assert kill_at_random(tmp_path, mode, 3, seed=1, expected=expected) >= 1
