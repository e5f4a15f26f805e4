"""The arithmetic of steps, fragments and versions against a walk through every step."""

import pytest

from syncer.steps import fragment_of, merges_at, version_at


@pytest.mark.parametrize("fragments", [1, 2, 3, 7])
def test_a_walk_through_every_step(fragments):
    versions, merges = [0] * fragments, [0] * fragments
    for step in range(4 * fragments + 1):
        if step:
            own = (step - 1) % fragments
            assert fragment_of(step, fragments) == own
            versions[own], merges[own] = step, merges[own] + 1
        found = range(fragments)
        assert [version_at(step, p, fragments) for p in found] == versions
        assert [merges_at(step, p, fragments) for p in found] == merges
        assert [merges_at(v, p, fragments) for p, v in enumerate(versions)] == merges


def test_the_whole_range_of_a_step():
    """A file may claim any step of 64 bits, which must not be an overflow."""
    last = 2**64 - 1
    assert version_at(last, 0, 1) == last
    assert merges_at(last, 0, 1) == last
    assert version_at(last, 2, 4) == last
    assert version_at(last, 3, 4) == last - 3
    assert fragment_of(last, 4) == 2
