"""Data sockets that were promised: when those that do not come are named, and what ends a group."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from syncer.server.promised import INCOMPLETE_NS, LOOK_NS, STREAMS_WAIT_NS, Promised
from tests.sim.lone import lone_loop, pass_time
from tests.sim.system import SimLoop


class Sockets:
    """A group as far as its promises go: what it has said and got, and how it ends."""

    def __init__(self, loop: SimLoop, streams: int):
        self.loop, self.learner, self.generation, self.ended = loop, 0, 1, False
        self.hello = SimpleNamespace(num_streams=streams)
        self.control = SimpleNamespace(peer="127.0.0.1:9")
        self.data: dict[int, object] = {}
        self.reassembly = SimpleNamespace(progress={})
        self.texts: list[str] = []

    def end(self, reason: str, refusal: str | None = None) -> None:
        self.ended = True
        self.texts.append(reason)


class Told:
    """A log that keeps its warnings."""

    def __init__(self) -> None:
        self.lines: list[dict] = []

    def warning(self, text: str, **fields) -> None:
        self.lines.append({"text": text, **fields})


@pytest.fixture
def loop():
    return lone_loop()


def test_those_that_are_missing_are_named_once(loop):
    group, log = Sockets(loop, 12), Told()
    group.data[3] = object()
    Promised(group, log)
    pass_time(loop, STREAMS_WAIT_NS - 1)
    assert not log.lines
    for _ in range(20):
        pass_time(loop, LOOK_NS)
    assert [(line["streams"], line["declared"]) for line in log.lines] == [
        ("0,1,2,4,5,6,7,8...", 12)]
    assert not group.ended


def test_nobody_looks_when_all_are_there(loop):
    group, log = Sockets(loop, 2), Told()
    promised = Promised(group, log)
    group.data = {0: object(), 1: object()}
    pass_time(loop, STREAMS_WAIT_NS)
    assert not promised.timer.active
    assert not log.lines


def test_a_message_that_grows_is_waited_for_and_one_that_stands_still_is_not(loop):
    """However slowly it grows: it is what stands still that will never come."""
    group = Sockets(loop, 2)
    Promised(group, Told())
    pass_time(loop, STREAMS_WAIT_NS)
    for filled in range(1, 3 * INCOMPLETE_NS // LOOK_NS):
        group.reassembly.progress = {7: filled, 8 + filled: 5}  # others come and are complete
        pass_time(loop, LOOK_NS)
    assert not group.ended
    for _ in range(INCOMPLETE_NS // LOOK_NS - 1):
        pass_time(loop, LOOK_NS)
    assert not group.ended
    pass_time(loop, LOOK_NS)
    (text,) = group.texts
    assert text.startswith(f"chunked message 7 stands still at {filled} bytes for 30 s: ")
    assert text.endswith("data stream 0,1 of 2 never came; try again later")
