"""How often introduced learners are told and heard, and what of what they hold is believed."""

from __future__ import annotations

import pytest

from syncer.checkpoint.lineage import Lineage
from syncer.layout import AVG, FragmentLayout, Layout
from syncer.protocol import DTYPE_F32, NoticeCode
from syncer.server.introducing import versions_held
from syncer.server.outbox import Outbox
from syncer.server.reporting import REPORT_PAUSE_NS, ReportBook
from syncer.server.telling import NOTICE_PAUSE_NS, PacedNotices
from syncer.wire.extended import LearnerReport, NoticeText, encode_notice
from syncer.wire.extension import Extension, Held
from syncer.wire.hello import Hello
from tests.sim.clock import MS
from tests.sim.lone import lone_loop, pass_time


class Peer:
    """A group as far as notices and reports know it; `heard` are the frames that left it."""

    extended, ended = True, False

    def __init__(self, learner: int):
        self.learner = learner
        self.outbox = Outbox(1)
        self.heard: list[bytes] = []

    def pump(self) -> None:
        self.heard += self.outbox.take_small()


@pytest.fixture
def loop():
    return lone_loop()


def notice(text: str) -> bytes:
    return encode_notice(NoticeText(NoticeCode.LEARNERS, text))


def test_a_newer_notice_takes_the_place_of_one_that_waits(loop):
    notices, one, other = PacedNotices(loop), Peer(0), Peer(1)
    for text in "abc":
        notices.say(one, NoticeCode.LEARNERS, text)
    notices.say(other, NoticeCode.LEARNERS, "d")
    assert (one.heard, other.heard) == ([notice("a")], [notice("d")])
    pass_time(loop, NOTICE_PAUSE_NS - 1)
    assert one.heard == [notice("a")]
    pass_time(loop, 1)
    assert one.heard == [notice("a"), notice("c")]
    pass_time(loop, NOTICE_PAUSE_NS)
    notices.say(one, NoticeCode.LEARNERS, "e")
    assert one.heard[2:] == [notice("e")]
    assert other.heard == [notice("d")]


def test_who_has_gone_or_cannot_hear_is_told_nothing(loop):
    notices, plain, gone = PacedNotices(loop), Peer(0), Peer(1)
    plain.extended = False
    notices.say(plain, NoticeCode.LEARNERS, "a")
    for text in "ab":
        notices.say(gone, NoticeCode.LEARNERS, text)
    notices.leave(gone)
    pass_time(loop, 2 * NOTICE_PAUSE_NS)
    assert (plain.heard, gone.heard) == ([], [notice("a")])
    assert not any(timer.active for timer in loop.timers_made)


def test_one_report_a_second_is_kept(loop):
    book, one, other = ReportBook(loop), Peer(3), Peer(1)
    assert book.since_last() == []
    book.take(one, LearnerReport(1.0))
    pass_time(loop, REPORT_PAUSE_NS - 1)
    book.take(one, LearnerReport(2.0))
    book.take(other, LearnerReport(lr=0.5))
    assert [(entry["id"], entry["loss"], entry["lr"]) for entry in book.since_last()] == [
        (1, None, 0.5), (3, 1.0, None)]
    assert book.since_last() == []
    pass_time(loop, 1)
    book.take(one, LearnerReport(3.0))
    book.leave(other)
    assert [(entry["id"], entry["loss"]) for entry in book.since_last()] == [(3, 3.0)]


def test_a_report_goes_with_the_connection_that_made_it(loop):
    book, old, new = ReportBook(loop), Peer(0), Peer(0)
    book.take(old, LearnerReport(1.0))
    pass_time(loop, REPORT_PAUSE_NS + MS)
    book.take(new, LearnerReport(2.0))
    book.leave(old)
    assert book.newest[0].report.loss == 2.0
    book.leave(new)
    assert not book.newest


def hello(*held: Held | None) -> Hello:
    layout = Layout((FragmentLayout(AVG, (1,)),) * len(held))
    return Hello(0, 1, DTYPE_F32, layout, bytes(32), bytes(32), extension=Extension(held=held))


def test_what_a_learner_holds_counts_by_the_process_that_sent_it():
    lineage = Lineage(epoch=3, instance=30, entries=((10, 5), (20, None)))
    found = versions_held(hello(Held(30, 99), Held(10, 5), Held(10, 6), Held(20, 1), Held(40, 1),
                                None), lineage)
    assert found == (99, 5, -1, -1, -1, -1)
    found = versions_held(hello(Held(30, 99), Held(10, 5)), lineage, sends_changes=True)
    assert found == (99, -1), "who sends changes keeps what it has sent itself"
    assert versions_held(hello()._replace(extension=None), lineage) == ()
    assert versions_held(hello()._replace(extension=Extension()), lineage) == ()
