"""How many bytes of catch-ups may be on their way, from what they did to broadcasts."""

from __future__ import annotations

import pytest

from syncer.server.catchups import (
    ALONE_MIN,
    BEGIN_BYTES,
    FLOOR_BYTES,
    MS,
    Flight,
    FlightKind,
    Headroom,
)

SIZE = 10**6


def flight(kind: FlightKind, took_ms: float) -> Flight:
    made = Flight(SIZE, {}, 0, kind)
    made.count, made.took_ns = 1, [int(took_ms * MS)]
    return made


def judged(headroom: Headroom, took_ms: float, now_ms: int) -> None:
    """Eight broadcasts beside catch-ups that use all they may, and what follows."""
    headroom.peak = headroom.bytes
    for _ in range(8):
        headroom.measured(flight(FlightKind.USUAL, took_ms))
    headroom.judge(now_ms * MS, False)


@pytest.fixture
def headroom() -> Headroom:
    made = Headroom()
    for _ in range(ALONE_MIN):
        made.measured(flight(FlightKind.ALONE, 10))
    made.judge(100 * MS, False)
    return made


def test_it_halves_while_broadcasts_are_slower_and_never_ends(headroom):
    found = []
    for tenth in range(2, 6):
        judged(headroom, 15, 100 * tenth)
        found.append(headroom.bytes)
    assert found[0] == BEGIN_BYTES // 2
    assert found[-1] == FLOOR_BYTES


def test_it_grows_while_they_are_not_and_not_beyond_what_has_hurt(headroom):
    judged(headroom, 10.5, 200)
    judged(headroom, 10.5, 300)
    assert headroom.bytes == 4 * BEGIN_BYTES
    judged(headroom, 20, 400)
    assert headroom.bytes == 2 * BEGIN_BYTES
    judged(headroom, 10.5, 500)
    assert headroom.bytes == 2 * BEGIN_BYTES * 5 // 4


def test_between_the_two_it_stays(headroom):
    judged(headroom, 13, 200)
    assert headroom.bytes == BEGIN_BYTES


def test_with_nobody_to_be_hurt_it_doubles_every_100_ms(headroom):
    for tenth in range(2, 5):
        headroom.judge(100 * tenth * MS, True)
    assert headroom.bytes == 8 * BEGIN_BYTES


def test_after_harm_it_waits_for_the_next_broadcasts(headroom):
    judged(headroom, 20, 200)
    for tenth in range(3, 9):
        headroom.judge(100 * tenth * MS, True)
    assert headroom.bytes == BEGIN_BYTES // 2
