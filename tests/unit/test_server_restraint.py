"""What keeps the log short, whoever writes to it: a full disk says as much as a million peers."""

from __future__ import annotations

import threading

import pytest

from syncer.server.restraint import BURST, REFILL_NS, Restraint

TEXT = "event tape record lost"


class Clock:
    """A loop of which only the time is asked: other threads have no timers."""

    time_ns = 0

    def now_ns(self) -> int:
        return self.time_ns


@pytest.fixture
def said():
    return []


@pytest.fixture
def restraint(said):
    return Restraint(Clock(), lambda level, text, fields: said.append((text, fields)))


def elsewhere(work) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def tell(restraint, times: int) -> None:
    """As a log does, on a thread of its own."""
    def work():
        for number in range(times):
            assert not restraint.admits("ERROR", TEXT, {"number": number})

    elsewhere(work)


def test_lines_of_other_threads_are_few_and_none_is_lost(restraint, said):
    tell(restraint, BURST + 7)
    assert len(said) == BURST
    restraint.loop.time_ns = REFILL_NS
    tell(restraint, 1)
    assert said[-1] == (TEXT, {"number": 0, "times": 8})
    tell(restraint, 5)
    restraint.close()
    assert said[-1] == (TEXT, {"number": 4, "times": 5})
    assert sum(fields.get("times", 1) for _, fields in said) == BURST + 7 + 1 + 5


def test_after_the_end_nothing_is_held_back(restraint, said):
    restraint.close()
    elsewhere(lambda: said.append(restraint.admits("ERROR", TEXT, {})))
    assert said == [True]
