"""A learner that introduces itself: its block, WELCOME first, what it keeps and what it forgets."""

import hashlib

import numpy as np
import pytest

from syncer.errors import ConfigError, RemoteProtocolError
from syncer.layout import RDA, FragmentLayout, Layout
from syncer.learner import ConnectionFailed, RunLost, RunMismatch, introduction
from syncer.learner.failures import NotUnderstood, TurnedAway
from syncer.learner.introduction import Introduction, client_text
from syncer.learner.notices import NOTICE_AGAIN_S, Notices
from syncer.learner.reports import FIGURES_S, TrainingFigures
from syncer.learner.session import Phase, Session
from syncer.learner.situation import standing
from syncer.protocol import DTYPE_F32
from syncer.wire import encode, extension
from syncer.wire.contracts import run_contract
from syncer.wire.extended import (
    LearnerReport,
    NoticeText,
    RunState,
    Welcome,
    encode_notice,
    encode_welcome,
    parse_report,
)
from syncer.wire.extension import Held
from syncer.wire.hello import parse_hello
from syncer.wire.messages import Bcast
from syncer.wire.names import FragmentNames, fingerprint
from tests.bulk_frames import encode_bcast
from tests.unit.sessions import FINGERPRINT, bcast, final, make, manifest, pull

WAITING, RUNNING, FINISHING = RunState


def session(learner: int = 1, **options) -> Session:
    return make(learner, introduction=Introduction(FINGERPRINT, **options))


def welcome(*, epoch=1, instance=7, step=0, state=RUNNING, kept=(0, 0), quorum=1, run="") -> bytes:
    return encode_welcome(Welcome(epoch, instance, step, 40, 2, quorum, 0.0, state, "syncer", run,
                                  kept=tuple(map(bool, kept))))


def hello_of(connection, key=None):
    return parse_hello(connection.openings[0][13:], key=key, learners=8)


def meet(each: Session, **fields):
    """The next connection, welcomed."""
    connection = each.connect((each.last_generation or 0) + 1)
    connection.feed(0, welcome(**fields))
    return connection


# --- the block -----------------------------------------------------------------------------------


def test_its_hello_is_the_golden_one_and_begins_like_that_of_protocol_4(monkeypatch):
    """18.7 of docs/protocol.md, with what was held before."""
    monkeypatch.setattr(introduction, "client_text", lambda: "syncer 1.0 on alpha")
    layout = Layout((FragmentLayout(RDA, (4,)),))
    names = (FragmentNames((("w", (2, 2)),)),)
    base = fingerprint(layout, names)
    each = Session(layout, base, learner=7, dtype=DTYPE_F32, num_streams=3,
                   introduction=Introduction(base, run="blue", names=names))
    tensor = memoryview(bytes(16))
    each.connect(1).feed(0, encode_welcome(Welcome(
        3, 0x1122334455667788, 17, 40, 8, 2, 24.0, RUNNING, "syncer 1.0", "blue", kept=(False,)))
        + encode_bcast(Bcast(0, 17, tensor)))
    generation = 0x0102030405060708
    payload = each.connect(generation).openings[0][13:]
    changes = bytes.fromhex("0600 01000000 03")
    assert payload.endswith(changes + bytes.fromhex("82000000 53595831"))
    without = payload[:-8 - len(changes)] + bytes.fromhex("7b000000 53595831")
    assert hashlib.sha256(without).hexdigest() == (
        "42cb53e6cd3a6b85d1cb1f95a6766115337aaa20c785aa1b983bba1a6274e497")
    plain = Session(layout, base, learner=7, dtype=DTYPE_F32, num_streams=3,
                    contract=run_contract(base, "blue"))
    assert payload.startswith(plain.connect(generation).openings[0][13:])


def test_client_is_a_short_printable_text():
    text = client_text()
    assert text.startswith("syncer ")
    assert " on " in text
    assert text.isprintable()


def test_names_that_no_hello_can_carry_are_left_out(monkeypatch):
    names = (FragmentNames((("a" * 200, (2,)),)), FragmentNames((("b", (1,)), ("c", (2,)))))
    monkeypatch.setattr(extension, "EXTENSION_BYTES_MAX", 300)
    said = Introduction(FINGERPRINT, names=names)
    make(0, introduction=said)
    assert said.names is None


@pytest.mark.parametrize("options", [
    {"run": ""}, {"run": "a b"}, {"run": "x" * 65}, {"run": 3}, {"on_lost_run": "restart"}])
def test_what_cannot_be_introduced_is_refused_before_dialing(options):
    with pytest.raises(ConfigError, match="run"):
        Introduction(FINGERPRINT, **options)


def test_with_a_key_its_data_sockets_are_proved():
    each = make(1, key=b"secret", introduction=Introduction(FINGERPRINT))
    assert [len(opening) - 13 for opening in each.connect(5).openings[1:]] == [48, 48]
    plain = make(1, key=b"secret")
    assert [len(opening) - 13 for opening in plain.connect(5).openings[1:]] == [16, 16]


# --- WELCOME -------------------------------------------------------------------------------------


@pytest.mark.parametrize("frame", [
    bcast(0, 0, 1.0), pull(0, 1), manifest(3, 2, 3), final(0, 1, 1.0), encode.encode_shutdown(),
    encode_notice(NoticeText(1, "x"))])
def test_nothing_is_used_before_it(frame):
    each = session()
    connection = each.connect(1)
    assert not connection.ready
    with pytest.raises(RemoteProtocolError, match="before its WELCOME"):
        connection.feed(0, frame)


def test_it_comes_once():
    each = session()
    connection = meet(each)
    with pytest.raises(RemoteProtocolError, match="second WELCOME"):
        connection.feed(0, welcome())


def test_without_an_introduction_it_is_an_unknown_type():
    with pytest.raises(RemoteProtocolError, match="15"):
        make(1).connect(1).feed(0, welcome())


def test_what_follows_it_in_the_same_bytes_is_used():
    each = session()
    connection = each.connect(1)
    assert len(connection.feed(0, welcome() + bcast(0, 0, 1.0) + pull(0, 1))) == 3


def test_the_line_about_the_run_comes_from_it():
    each = session()
    connection = each.connect(1)
    assert standing(each) is None
    connection.feed(0, welcome(step=17, run="blue"))
    assert standing(each) == (
        "the run blue is at step 17 of 40; learner 1 has made no step yet in this process")


def test_one_that_is_late_is_not_judged():
    each = session()
    old = each.connect(1)
    meet(each)
    assert old.feed(0, welcome(instance=8)) == []
    assert each.welcome.instance == 7


@pytest.mark.parametrize(("learner", "fields", "wanted"), [
    (0, {"state": WAITING}, True), (1, {"state": WAITING}, False),
    (0, {"state": WAITING, "epoch": 2}, False), (0, {"state": RUNNING}, False),
    (0, {"state": FINISHING}, False)])
def test_learner_0_brings_the_values_of_a_run_that_waits_for_its_first(learner, fields, wanted):
    each = session(learner)
    for _ in range(2):
        connection = meet(each, **fields)
        assert each.wants_initial_values == wanted
        connection.feed(1, bcast(0, 0, 1.0))
        assert not each.wants_initial_values, "the server has them"


# --- one server after the other ------------------------------------------------------------------


@pytest.mark.parametrize(("fields", "error"), [
    ({"instance": 8, "step": 0}, RunLost),
    ({"instance": 8, "step": 0, "epoch": 9}, RunLost),
    ({"instance": 8, "step": 5, "epoch": 2}, RunMismatch),
    ({"instance": 8, "step": 5, "epoch": 3}, RunMismatch),
    ({"instance": 7, "step": 5, "epoch": 2}, RunMismatch),
    ({"instance": 8, "step": 5, "epoch": 4}, None),
    ({"instance": 7, "step": 0, "epoch": 3}, None)])
def test_who_answers_is_compared_with_the_last_server(fields, error):
    each = session()
    meet(each, epoch=3, step=4).feed(1, bcast(0, 4, 1.0))
    if error is None:
        meet(each, **fields)
        return
    with pytest.raises(error, match=r"stop that|Stop the one"):
        meet(each, **fields)
    assert isinstance(each.error, ConnectionFailed)


def test_who_holds_nothing_that_was_merged_follows_anybody():
    each = session()
    meet(each, epoch=3, step=4).feed(1, bcast(0, 0, 1.0))
    meet(each, epoch=1, instance=8).feed(1, bcast(0, 4, 1.0))
    meet(each, epoch=1, instance=8, step=4)
    assert each.error is None


def test_a_lost_run_is_begun_anew_if_that_is_wanted():
    each = session(0, on_lost_run="reseed")
    meet(each, epoch=3, step=4).feed(1, bcast(0, 4, 1.0) + bcast(1, 3, 1.0))
    each.take_broadcasts()
    each.advance(5)
    connection = meet(each, instance=8, epoch=1, state=WAITING)
    assert each.wants_initial_values
    assert each.versions == (0, 0)
    assert each.unapplied() == [0, 1]
    assert each.held == (None, None)
    connection.feed(0, bcast(0, 0, 2.0) + bcast(1, 0, 2.0) + pull(0, 1))
    assert each.due_pulls() == []
    assert [b.version for b in each.take_broadcasts()] == [0, 0]
    each.advance(5)
    assert [p.step for p in each.due_pulls()] == [1]


def test_what_the_server_keeps_is_not_forgotten_with_a_lost_run():
    """It went on from its first file: of one fragment this learner has what it will not be sent."""
    each = session(0, on_lost_run="reseed")
    meet(each, epoch=3).feed(1, bcast(0, 4, 1.0) + bcast(1, 0, 1.0))
    each.take_broadcasts()
    connection = meet(each, instance=8, epoch=4, kept=(False, True))
    assert each.unapplied() == [0]
    connection.feed(0, bcast(0, 0, 2.0) + pull(1, 2))
    each.take_broadcasts()
    each.advance(5)
    assert [p.step for p in each.due_pulls()] == [2]


def test_a_run_that_is_lost_in_its_final_cut_is_not_begun_anew():
    each = session(on_lost_run="reseed")
    meet(each, step=4).feed(0, bcast(0, 4, 1.0) + manifest(4, 4, 3))
    assert each.phase is Phase.FINALIZING
    with pytest.raises(RunLost):
        meet(each, instance=8)


# --- refusals ------------------------------------------------------------------------------------


def refuse(each: Session, text: str, generation: int = 50):
    each.connect(generation).feed(0, encode.encode_error(text))


def test_a_server_of_protocol_4_is_met_without_an_introduction_from_then_on():
    each = session(run="blue")
    with pytest.raises(NotUnderstood) as raised:
        refuse(each, "invalid HELLO: invalid HELLO profile extension length: 9 bytes")
    assert isinstance(raised.value, TurnedAway)
    assert each.error is None
    plain = make(1, contract=run_contract(FINGERPRINT, "blue"))
    for generation in (60, 61):
        connection = each.connect(generation)
        assert connection.openings == plain.connect(generation).openings
        assert connection.ready
        connection.feed(0, bcast(0, 0, 1.0))
    assert standing(each) is None


@pytest.mark.parametrize("text", [
    "invalid HELLO extension: revision 0, expected 1 or later", "session mismatch: another run"])
def test_any_other_refusal_is_final(text):
    with pytest.raises(ConnectionFailed, match=text) as raised:
        refuse(session(), text)
    assert not isinstance(raised.value, TurnedAway)


def test_after_a_welcome_a_server_of_protocol_4_is_a_wrong_one():
    each = session()
    meet(each)
    with pytest.raises(RunMismatch, match="protocol 4 alone"):
        refuse(each, "invalid HELLO: 9 bytes")


# --- held ----------------------------------------------------------------------------------------


def test_what_was_accepted_is_held_with_the_process_that_sent_it():
    each = session()
    first = meet(each, instance=7)
    assert hello_of(first).extension.held == (None, None)
    first.feed(1, bcast(0, 4, 1.0))           # taken
    each.take_broadcasts()
    first.feed(1, bcast(1, 3, 1.0))           # not taken yet
    second = meet(each, instance=8, epoch=2, step=4, kept=(1, 0))
    assert hello_of(second).extension.held == (Held(7, 4), Held(7, 3))
    second.feed(1, bcast(1, 3, 1.0))          # the same, of another process
    third = each.connect(99)
    assert hello_of(third).extension.held == (Held(7, 4), Held(8, 3))


def test_what_a_server_of_protocol_4_sent_is_not_held():
    each = make(1)
    each.connect(1).feed(1, bcast(0, 4, 1.0))
    assert each.held == (None, None)


def test_a_kept_fragment_is_heard_of_and_stays_the_anchor():
    each = session()
    meet(each).feed(1, bcast(0, 4, 1.0) + bcast(1, 3, 1.0))
    each.take_broadcasts()
    each.advance(1)
    connection = meet(each, kept=(1, 0), step=4)
    connection.feed(0, pull(0, 6) + pull(1, 5))
    assert [p.fragment for p in each.due_pulls()] == [0], "the other one has to come again"
    assert connection.feed(1, bcast(0, 2, 9.0)) == [], "older than what is kept"
    assert len(connection.feed(1, bcast(1, 1, 9.0))) == 1, "whatever its number"
    with pytest.raises(RemoteProtocolError, match="other bytes"):
        connection.feed(1, bcast(0, 4, 9.0))


def test_a_kept_broadcast_that_is_not_taken_yet_is_the_next_anchor():
    each = session()
    meet(each).feed(1, bcast(0, 4, 1.0))
    each.take_broadcasts()
    each.connection.feed(1, bcast(0, 6, 2.0))
    each.advance(1)
    connection = meet(each, kept=(1, 0), step=6)
    connection.feed(0, pull(0, 8))
    assert each.due_pulls() == [], "the anchor is still the one before"
    assert [b.version for b in each.take_broadcasts()] == [6]
    each.advance(1)
    assert [p.step for p in each.due_pulls()] == [8]


def test_nothing_can_be_kept_that_was_not_held():
    each = session()
    meet(each).feed(1, bcast(0, 4, 1.0))
    with pytest.raises(RemoteProtocolError, match="keeps fragment 1"):
        meet(each, kept=(1, 1), step=4)


# --- NOTICE and REPORT ---------------------------------------------------------------------------


def test_a_notice_is_told_once_in_a_while():
    each, notices = session(), Notices()
    connection = meet(each)
    told = []
    for now in (0.0, 1.0, NOTICE_AGAIN_S, 30.5):
        connection.feed(0, encode_notice(NoticeText(1, "waiting for 1")) + encode_notice(
            NoticeText(9, f"at {now}")))
        while (text := notices.take(each.notices, now)) is not None:
            told.append((now, text))
    waits = "waiting for 1"
    assert told == [(0.0, waits), (0.0, "at 0.0"), (1.0, "at 1.0"), (NOTICE_AGAIN_S, waits),
                    (NOTICE_AGAIN_S, f"at {NOTICE_AGAIN_S}"), (30.5, "at 30.5")]


def test_a_flood_of_notices_takes_no_memory():
    each = session()
    connection = meet(each)
    for number in range(1000):
        connection.feed(0, encode_notice(NoticeText(1, str(number))))
    assert len(each.notices) < 10
    assert each.notices[-1].text == "999"


def test_reports_are_the_newest_figures_at_most_once_a_second():
    reports = TrainingFigures()
    assert reports.due(0.0) is None
    reports.put(LearnerReport(loss=2.5))
    assert parse_report(reports.due(0.0)[13:]) == LearnerReport(loss=2.5)
    reports.put(LearnerReport(loss=2.4, lr=0.1))
    reports.put(LearnerReport(loss=2.25))
    assert reports.due(FIGURES_S / 2) is None
    assert parse_report(reports.due(FIGURES_S)[13:]) == LearnerReport(loss=2.25, lr=0.1)
    assert reports.due(9.0) is None


def test_whether_a_quorum_is_everybody_is_known_from_the_welcome():
    each = session()
    assert not each.needs_everybody
    meet(each, quorum=2)
    assert each.needs_everybody
    meet(each, quorum=0)
    assert not each.needs_everybody


@pytest.mark.parametrize(("introduced", "streams"), [(True, [1, 2, 3]), (False, [1])])
def test_who_introduces_itself_cuts_a_message_for_its_data_sockets(introduced, streams):
    """19.14 of docs/protocol.md; anybody else as protocol 4 has it."""
    layout = Layout((FragmentLayout(RDA, (2**18,)),))
    each = Session(layout, FINGERPRINT, learner=0, dtype=DTYPE_F32, num_streams=3,
                   introduction=Introduction(FINGERPRINT) if introduced else None)
    connection = meet(each, kept=(0,)) if introduced else each.connect(1)
    frames = list(connection.stripe(each.tensors.init(0, np.zeros(2**18, "<f4"))))
    assert [stream for stream, _ in frames] == streams
