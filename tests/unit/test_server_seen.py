"""Numbers that have been seen, in memory that does not grow."""

import random

from syncer.server.seen import BITS, EverSeen


def test_no_number_is_forgotten_and_new_ones_look_new():
    dice = random.Random(11)
    numbers = [dice.getrandbits(64) for _ in range(20_000)]
    seen = EverSeen()
    assert numbers[0] not in seen
    for number in numbers:
        seen.add(number)
    assert all(number in seen for number in numbers)
    assert not any(dice.getrandbits(64) in seen for _ in range(20_000))
    assert len(seen._bits) == BITS // 8, "whatever was added"


def test_numbers_that_are_close_together_are_told_apart():
    seen = EverSeen()
    for number in range(0, 20_000, 2):
        seen.add(number)
    assert not any(number in seen for number in range(1, 20_000, 2))
