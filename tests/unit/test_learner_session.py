"""The sans-IO session: greetings, acceptance, pulls, counters, stripes, the end, fatal errors."""

import hashlib

import numpy as np
import pytest

from syncer.errors import LocalProtocolError, RemoteProtocolError
from syncer.layout import RDA, FragmentLayout, Layout
from syncer.learner.session import Session
from syncer.learner.tensor_messages import TensorMessage
from syncer.protocol import CHUNK_SIZE, DTYPE_BF16, DTYPE_F32, DTYPE_Q4
from syncer.wire import encode
from syncer.wire.frames import FrameReader
from syncer.wire.limits import Limits
from syncer.wire.messages import Bcast, Pull, parse_push
from tests.bulk_frames import encode_bcast
from tests.unit.sessions import (
    FINGERPRINT,
    NUMELS,
    bcast,
    make,
    pull,
    values,
)

# --- greetings ---------------------------------------------------------------------------------


def test_greetings_are_the_golden_bytes():
    fingerprint = bytes.fromhex("3d2c1598d87e386e871e06824ffc0e4effc1c0723722c07bc1969756d0ef1fb2")
    layout = Layout((FragmentLayout(RDA, (4,)),))
    generation = 0x0102030405060708
    session = Session(layout, fingerprint, learner=7, dtype=DTYPE_F32, num_streams=3)
    hello = bytes.fromhex(
        "dec070d1 01 6200000000000000 0400 07000000 0807060504030201 01 01000000"
        "01 01000000 0400000000000000") + 2 * fingerprint + bytes.fromhex("0300")
    assert session.connect(generation).openings == [hello, *(
        bytes.fromhex("dec070d1 08 1000000000000000 0400 07000000 0807060504030201")
        + stream.to_bytes(2, "little") for stream in range(3))]
    keyed = Session(layout, fingerprint, learner=7, dtype=DTYPE_F32, num_streams=3, key=b"secret")
    assert keyed.connect(generation).openings[0][13:] == hello[13:] + bytes.fromhex(
        "9aff0a8eec6972119a4a45363011dd115f46a1ffa27b17b37f72e89fd51e3de7")


@pytest.mark.parametrize("bad", [
    {"learner": 2**32}, {"learner": -1}, {"dtype": 4}, {"num_streams": 257}, {"num_streams": -1},
    {"contract": b"short"}, {"profile_hash": bytes(31)}, {"compat_group": ""},
    {"compat_group": "x" * 65}, {"min_steps_per_sync": 0},
])
def test_what_no_hello_can_carry_is_refused_before_connecting(bad):
    with pytest.raises(LocalProtocolError):
        make(**bad)


def test_every_connection_needs_a_generation_of_its_own():
    session = make()
    with pytest.raises(LocalProtocolError, match="nonzero"):
        session.connect(0)
    session.connect(5)
    with pytest.raises(LocalProtocolError, match="last connection"):
        session.connect(5)
    session.connect(6)


# --- broadcasts --------------------------------------------------------------------------------


def test_broadcasts_are_monotone_and_replays_are_dropped():
    session = make()
    connection = session.connect(1)
    assert len(connection.feed(1, bcast(0, 0, 1.0))) == 1
    assert connection.feed(2, bcast(0, 0, 1.0)) == []
    assert len(connection.feed(0, bcast(1, 3, 5.0))) == 1
    assert len(connection.feed(2, bcast(0, 7, 2.0))) == 1
    assert connection.feed(1, bcast(0, 6, 9.0)) == []
    assert [(b.fragment, b.version) for b in session.take_broadcasts()] == [(1, 3), (0, 7)]
    assert session.take_broadcasts() == []
    assert session.accepted[0] == (7, hashlib.sha256(values(0, 2.0)).digest())
    assert session.versions == (7, 3)


def test_while_no_boundary_comes_only_the_newest_broadcast_and_pull_of_a_fragment_are_kept():
    session = make()
    connection = session.connect(1)
    for step in range(500):
        connection.feed(1, bcast(0, step, 1.0) + bcast(1, step, 1.0))
        connection.feed(0, pull(0, step + 1) + pull(1, step + 1) + pull(1, step + 1, attempt=2))
    assert [(b.fragment, b.version) for b in session.broadcasts] == [(0, 499), (1, 499)]
    assert session.pulls == [Pull(0, 500, 1), Pull(1, 500, 2)]
    connection.feed(0, pull(1, 500, attempt=2) + pull(0, 501))
    assert session.pulls == [Pull(1, 500, 2), Pull(0, 501, 1)]
    assert session.answer(Pull(0, 500, 1)) is None


def test_what_was_seen_survives_a_reconnect():
    session = make()
    session.connect(1).feed(1, bcast(0, 4, 1.0))
    second = session.connect(2)
    assert second.feed(1, bcast(0, 4, 1.0)) == []
    assert [b.version for b in session.take_broadcasts()] == [4]
    assert second.feed(1, bcast(0, 3, 1.0)) == []
    with pytest.raises(RemoteProtocolError, match="other bytes"):
        second.feed(1, bcast(0, 4, 1.5))


@pytest.mark.parametrize(("version", "value"), [(8, 1.0), (12, 2.0)])
def test_a_server_that_was_resumed_from_an_earlier_step_is_followed(version, value):
    """Older, or the same version of another history: the first word of a new connection holds."""
    session = make()
    session.connect(1).feed(1, bcast(0, 12, 1.0) + bcast(1, 11, 1.0))
    session.take_broadcasts()
    second = session.connect(2)
    assert len(second.feed(1, bcast(0, version, value))) == 1
    assert second.feed(2, bcast(0, version - 2, 7.0)) == []  # reordered on the way: old news
    assert len(second.feed(1, bcast(0, version + 2, 3.0))) == 1
    assert [b.version for b in session.take_broadcasts()] == [version + 2]
    assert session.versions == (version + 2, 11)
    second.feed(0, pull(0, version + 4))
    session.advance(1)
    (due,) = session.due_pulls()
    assert session.answer(due).base == version + 2


def test_late_frames_of_an_older_connection_do_not_count_any_more():
    session = make()
    first = session.connect(1)
    session.lost(first)
    assert len(first.feed(1, bcast(0, 12, 1.0))) == 1
    second = session.connect(2)
    assert first.feed(1, bcast(0, 13, 1.0)) == []
    assert len(second.feed(1, bcast(0, 8, 1.0))) == 1


def test_a_version_with_other_bytes_is_fatal_for_good():
    session = make()
    connection = session.connect(1)
    connection.feed(1, bcast(0, 4, 1.0))
    with pytest.raises(RemoteProtocolError, match="BCAST_FRAGMENT fragment 0 version 4"):
        connection.feed(2, bcast(0, 4, -1.0))
    first = session.error
    assert session.ended
    assert connection.feed(0, bcast(0, 5, 1.0)) == []
    with pytest.raises(RemoteProtocolError) as raised:
        session.check()
    assert raised.value is first


# --- pulls and counters ------------------------------------------------------------------------


def test_a_pull_that_overtakes_its_broadcast_waits_for_a_step_on_it():
    session = make()
    connection = session.connect(1)
    session.advance(10)
    connection.feed(0, pull(0, 1))
    assert session.due_pulls() == []  # no anchor
    connection.feed(1, bcast(0, 3, 1.0))
    session.take_broadcasts()
    assert session.due_pulls() == []  # no step on it
    session.advance(7)
    assert session.due_pulls() == [Pull(0, 1, 1)]
    session.advance(5)
    push = session.answer(Pull(0, 1, 1))
    assert push[:8] == (0, 0, 1, 1, 3, 3, 2, 12)
    assert session.due_pulls() == []
    assert session.answer(Pull(0, 1, 1)) is None


@pytest.mark.parametrize("bounded_lag", [True, False])
def test_a_pull_waits_for_the_version_it_is_about(bounded_lag):
    """Two fragments: the round of step 6 is about version 4. Unbounded: for one whole step."""
    session = make(bounded_lag=bounded_lag)
    connection = session.connect(1)
    connection.feed(1, bcast(0, 2, 1.0))
    session.take_broadcasts()
    session.advance(1)
    connection.feed(0, pull(0, 6))
    session.advance(1)
    assert session.due_pulls() == []
    session.advance(1)
    assert session.due_pulls() == ([] if bounded_lag else [Pull(0, 6, 1)])
    connection.feed(2, bcast(0, 4, 1.0))
    session.take_broadcasts()
    assert session.due_pulls() == []
    session.advance(1)
    assert session.answer(Pull(0, 6, 1)).base == 4


@pytest.mark.parametrize("step", [1, 2])
def test_a_pull_of_the_first_rounds_is_about_the_initial_values(step):
    session = make()
    connection = session.connect(1)
    connection.feed(1, bcast(0, 0, 1.0))
    session.take_broadcasts()
    connection.feed(0, pull(0, step))
    session.advance(1)
    assert session.answer(Pull(0, step, 1)).base == 0


@pytest.mark.parametrize("held", [3, 5, 9])
def test_a_pull_is_answered_only_on_an_anchor_heard_on_its_connection(held):
    """A resumed server: the anchor held is of a lost future, or the same, or older."""
    session = make(bounded_lag=False)
    session.connect(1).feed(1, bcast(0, held, float(held)))
    session.take_broadcasts()
    session.advance(5)
    second = session.connect(2)
    second.feed(0, pull(0, 7))
    session.advance(5)
    assert session.due_pulls() == []
    second.feed(1, bcast(0, 5, 5.0))
    session.take_broadcasts()
    session.advance(1)
    assert session.answer(Pull(0, 7, 1)).base == 5


def test_a_broadcast_of_a_lost_connection_is_no_anchor_for_a_pull_of_the_next():
    session = make(bounded_lag=False)
    session.connect(1).feed(1, bcast(0, 9, 1.0))
    second = session.connect(2)
    second.feed(0, pull(0, 7))
    session.take_broadcasts()
    session.advance(5)
    assert session.due_pulls() == []
    second.feed(1, bcast(0, 9, 1.0))  # the server still holds it
    assert session.due_pulls() == [Pull(0, 7, 1)]


def test_the_gate_counts_steps_since_the_last_broadcast():
    session = make(min_steps_per_sync=3)
    connection = session.connect(1)
    connection.feed(1, bcast(0, 0, 1.0))
    session.take_broadcasts()
    connection.feed(0, pull(0, 1))
    for due in (False, False, True):
        session.advance(1)
        assert bool(session.due_pulls()) is due
    connection.feed(1, bcast(0, 1, 2.0))
    assert session.due_pulls()  # not applied yet
    session.take_broadcasts()
    assert session.due_pulls() == []
    with pytest.raises(LocalProtocolError, match="cannot be answered yet"):
        session.answer(Pull(0, 1, 1))


def test_one_fragment_waiting_does_not_hold_up_another():
    session = make()
    connection = session.connect(1)
    connection.feed(1, bcast(1, 0, 1.0))
    session.take_broadcasts()
    connection.feed(0, pull(0, 1) + pull(1, 2) + pull(1, 2) + pull(1, 2, attempt=2))
    session.advance(1)
    assert session.due_pulls() == [Pull(1, 2, 2)]


def test_pulls_end_with_their_connection():
    session = make()
    first = session.connect(1)
    first.feed(0, pull(0, 1))
    session.lost(first)
    assert session.pulls == []
    assert first.feed(0, pull(0, 2)) == []  # still read, but nobody to answer to
    second = session.connect(2)
    second.feed(0, pull(0, 3))
    session.lost(first)
    assert session.pulls == [Pull(0, 3, 1)]


def test_a_step_cannot_use_negative_tokens():
    with pytest.raises(LocalProtocolError):
        make().advance(-1)
    with pytest.raises(TypeError):
        make().advance(1.5)


# --- outgoing messages -------------------------------------------------------------------------


def received_by_server(session: Session, frames, streams: int):
    limits = Limits.for_server(session.layout, session.dtype)
    reassembly = None
    found, readers = [], {}
    for stream, buffers in frames:
        reader = readers.setdefault(stream, FrameReader(limits, reassembly))
        reassembly = reader.reassembly
        found += reader.feed(b"".join(buffers))
    assert set(readers) <= set(range(streams))
    return found


def test_a_large_push_is_striped_over_the_data_sockets_in_turn():
    numel = 3 * CHUNK_SIZE // 4 + 100
    layout = Layout((FragmentLayout(RDA, (numel,)),))
    session = Session(layout, FINGERPRINT, learner=3, dtype=DTYPE_F32, num_streams=3)
    connection = session.connect(1)
    connection.feed(1, encode_bcast(Bcast(0, 2, memoryview(bytes(4 * numel)))))
    session.take_broadcasts()
    session.advance(100)
    turns = []
    for step in (1, 2):
        connection.feed(0, encode.encode_pull(Pull(0, step, 1)))
        delta = np.arange(numel, dtype="<f4")
        push = session.tensors.push(session.answer(Pull(0, step, 1)), delta)
        frames = list(connection.stripe(push))
        assert all(np.shares_memory(np.asarray(buffers[1]), delta) for _, buffers in frames)
        turns += [stream for stream, _ in frames]
        [(msg_type, payload)] = received_by_server(session, frames, 4)
        found = parse_push(payload, 3, layout, DTYPE_F32)
        assert (msg_type, found.step, found.base, found.c_tokens) == (4, step, 2, 100)
        assert bytes(found.delta) == delta.tobytes()
    assert turns == [1, 2, 3, 1, 2, 3, 1, 2]


def test_message_numbers_run_on_over_connections_and_control_carries_all_without_data_sockets():
    session = make(num_streams=0)
    numbers = []
    for generation in (1, 2):
        connection = session.connect(generation)
        for fragment in (0, 1):
            init = session.tensors.init(fragment, bytes(4 * NUMELS[fragment]))
            [(stream, buffers)] = connection.stripe(init)
            assert stream == 0
            numbers.append(int.from_bytes(buffers[0][13:21], "little"))
    assert numbers == [0, 1, 2, 3]


@pytest.mark.parametrize(("dtype", "init_bytes", "push_bytes"), [
    (DTYPE_F32, 12, 12), (DTYPE_BF16, 6, 6), (DTYPE_Q4, 6, 132)])
def test_bodies_must_have_the_exact_length(dtype, init_bytes, push_bytes):
    session = make(dtype=dtype)
    assert isinstance(session.tensors.init(1, bytes(init_bytes)), TensorMessage)
    assert session.tensors.init_bytes(1) == init_bytes
    assert session.tensors.push_bytes(1) == push_bytes
    with pytest.raises(LocalProtocolError, match=f"expected {init_bytes}"):
        session.tensors.init(1, bytes(init_bytes + 1))
    session.connect(1).feed(1, encode_bcast(Bcast(1, 0, memoryview(bytes(init_bytes)))))
    session.take_broadcasts()
    session.advance(1)
    session.pulls.append(Pull(1, 1, 1))
    push = session.answer(Pull(1, 1, 1))
    assert isinstance(session.tensors.push(push, bytes(push_bytes)), TensorMessage)
    with pytest.raises(LocalProtocolError, match=f"expected {push_bytes}"):
        session.tensors.push(push, b"")
    with pytest.raises(LocalProtocolError, match="the layout has 2"):
        session.tensors.init(2, b"")


def test_only_learner_0_sends_init():
    with pytest.raises(LocalProtocolError, match="only learner 0"):
        make(learner=1).tensors.init(0, bytes(8))


def test_heartbeat_carries_the_steps():
    session = make(learner=7)
    for _ in range(11):
        session.advance(1)
    assert session.heartbeat() == bytes.fromhex("dec070d1060c00000000000000 07000000"
                                                "0b00000000000000")
