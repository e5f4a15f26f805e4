"""How a session ends: the final cut, its acknowledgement, and what is fatal."""


import pytest

from syncer.errors import LocalProtocolError, RemoteProtocolError
from syncer.learner import ConnectionFailed, RunMismatch
from syncer.learner.session import Phase
from syncer.protocol import Msg
from syncer.wire import encode
from syncer.wire.messages import Bcast
from tests.bulk_frames import encode_bcast
from tests.unit.sessions import bcast, final, make, manifest, pull, values

# --- the end -----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [
    lambda a, b, m: a + b + m, lambda a, b, m: m + a + b, lambda a, b, m: a + m + b])
def test_the_cut_is_complete_with_exactly_the_manifests_versions(order):
    session = make()
    connection = session.connect(1)
    stale = final(0, 2, 5.0)
    connection.feed(0, bcast(0, 4, 9.0) + bcast(1, 3, 9.0) + stale)
    assert session.final.tensors() is None
    connection.feed(0, order(final(0, 4, 1.0), final(1, 3, 2.0), manifest(4, 4, 3)))
    assert [bytes(t) for t in session.final.tensors()] == [values(0, 1.0), values(1, 2.0)]
    assert session.final.missing() == []
    assert session.phase is Phase.FINALIZING


def test_another_version_does_not_complete_a_cut():
    session = make()
    connection = session.connect(1)
    connection.feed(0, final(0, 2, 1.0) + final(1, 3, 2.0) + manifest(4, 4, 3))
    assert session.final.tensors() is None
    assert session.final.missing() == [0]
    connection.feed(0, final(0, 4, 3.0))
    assert [bytes(t) for t in session.final.tensors()] == [values(0, 3.0), values(1, 2.0)]


def test_broadcasts_do_not_complete_a_cut_and_are_not_handed_out_any_more():
    session = make()
    connection = session.connect(1)
    connection.feed(0, final(0, 3, 1.0) + bcast(1, 4, 2.0) + bcast(0, 4, 2.0) + pull(0, 5)
                    + manifest(4, 4, 4))
    session.advance(1)
    assert session.final.tensors() is None
    assert session.final.missing() == [0, 1]
    assert session.take_broadcasts() == []
    assert session.due_pulls() == []
    with pytest.raises(LocalProtocolError, match="before the whole final cut"):
        session.acknowledge()


@pytest.mark.parametrize("acknowledged", [True, False])
def test_a_pull_behind_the_final_cut_ends_it(acknowledged):
    """On another connection: the run has gone back, and nobody will ever be sent the rest."""
    session = make()
    connection = session.connect(1)
    connection.feed(0, final(0, 4, 1.0) + manifest(4, 4, 3) + pull(0, 5))
    if acknowledged:
        connection.feed(0, final(1, 3, 2.0))
        session.acknowledge()
    connection = session.connect(2)
    connection.feed(0, bcast(0, 2, 9.0) + bcast(1, 1, 9.0))
    with pytest.raises(RunMismatch, match=r"step 3 is asked for.* final cut of step 4.*start this"):
        connection.feed(0, pull(0, 3))


def test_final_fragments_follow_the_three_rules_in_a_cache_of_their_own():
    session = make()
    connection = session.connect(1)
    connection.feed(0, bcast(0, 4, 9.0))
    assert len(connection.feed(1, final(0, 4, 1.0))) == 1  # no conflict with the broadcast
    assert connection.feed(2, final(0, 4, 1.0)) == []
    assert connection.feed(2, final(0, 3, 7.0)) == []
    with pytest.raises(RemoteProtocolError, match="FINAL_FRAGMENT fragment 0 version 4"):
        connection.feed(2, final(0, 4, 1.5))


def test_ack_then_shutdown_ends_without_an_error():
    session = make()
    connection = session.connect(1)
    connection.feed(0, final(0, 16, 1.0) + final(1, 17, 2.0) + manifest(17, 16, 17))
    ack = bytes.fromhex("dec070d10c0a00000000000000 0100 1100000000000000")
    assert session.acknowledge() == ack
    assert session.acknowledge() == ack
    assert session.phase is Phase.ACKNOWLEDGING
    assert connection.feed(0, manifest(17, 16, 17)) == []  # the cut comes again
    connection.feed(0, encode.encode_shutdown())
    assert session.phase is Phase.SHUT_DOWN
    assert session.ended
    session.fail(ConnectionFailed("late"))
    session.check()
    assert connection.feed(0, bcast(0, 99, 1.0)) == []


def test_manifest_and_cut_survive_a_reconnect_and_a_changed_manifest_is_fatal():
    session = make()
    session.connect(1).feed(0, final(0, 4, 1.0) + manifest(4, 4, 3))
    second = session.connect(2)
    second.feed(0, final(1, 3, 2.0) + manifest(4, 4, 3))
    assert session.final.tensors() is not None
    with pytest.raises(RemoteProtocolError, match="FINAL_MANIFEST changed: this learner has"):
        second.feed(0, manifest(5, 4, 5))


@pytest.mark.parametrize("before", [b"", final(0, 4, 1.0) + final(1, 3, 2.0) + manifest(4, 4, 3)])
def test_shutdown_before_the_ack_was_started_is_fatal(before):
    session = make()
    connection = session.connect(1)
    connection.feed(0, before)
    with pytest.raises(RemoteProtocolError, match="SHUTDOWN while"):
        connection.feed(0, encode.encode_shutdown())
    assert session.error is not None


# --- fatal errors ------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "metric"), [
    ("session mismatch: expected ...", "layout_hash_mismatch"),
    ("session mismatch", "layout_hash_mismatch"),
    ("HELLO syncer semantic profile differs", "syncer_profile_mismatch"),
    ("HELLO is missing the required syncer semantic profile: x", "syncer_profile_mismatch"),
    ("HELLO authentication failed: wrong key", "island_auth_failed"),
    ("PUSH_FRAGMENT names unknown fragment 9", None),
    ("a session mismatch in the middle", None),
    ("", None),
])
def test_error_texts_map_to_their_meaning(text, metric):
    session = make()
    with pytest.raises(ConnectionFailed) as raised:
        session.connect(1).feed(0, encode.encode_error(text))
    assert raised.value.metric == metric
    assert str(raised.value) == f"{metric or 'syncer connection failed'}: {text}"
    assert session.error is raised.value


def chunk(msg_id: int, total: int, offset: int, piece: bytes) -> bytes:
    head = b"".join(n.to_bytes(8, "little") for n in (msg_id, total, offset))
    return encode.frame(Msg.CHUNK, head + piece)


@pytest.mark.parametrize(("data", "text"), [
    (b"\0" * 13, "bad magic"),
    (encode.frame_header(Msg.SHUTDOWN, 1), "exceeds limit"),
    (encode.frame_header(Msg.ERROR, 65_537), "exceeds limit"),
    (encode.frame_header(Msg.PULL_REQ, 17), "exceeds limit"),
    (encode.frame_header(Msg.BCAST_FRAGMENT, 12 + 12 + 1), "exceeds limit"),
    (encode.frame_header(Msg.HELLO, 0), "unexpected message type"),
    (encode.frame_header(Msg.PUSH_FRAGMENT, 0), "unexpected message type"),
    (encode.frame(Msg.PULL_REQ, bytes(15)), "expected 16"),
    (pull(2, 1), "unknown fragment 2"),
    (encode.frame(Msg.BCAST_FRAGMENT, bytes(11)), "truncated"),
    (encode.frame(Msg.BCAST_FRAGMENT, bytes(12 + 4)), "expected 8"),
    (encode_bcast(Bcast(2, 0, memoryview(b""))), "unknown fragment 2"),
    (encode.frame(Msg.FINAL_FRAGMENT, bytes(12 + 4)), "expected 8"),
    (encode.frame(Msg.FINAL_MANIFEST, bytes(14)), "revision 0"),
    (manifest(4, 1), "has 1 fragments"),
    (b"".join(chunk(i, 33, 0, b"x") for i in range(65)), "64 chunked messages are open"),
    (chunk(0, 13 + 12 + 12 + 1, 0, b"x"), "exceeds limit"),
    (chunk(0, 12, 0, b"x"), "shorter than a frame header"),
    (chunk(0, 33, 0, b"xx") + chunk(0, 33, 1, b"x"), "overlap"),
])
def test_what_a_server_may_not_send_is_fatal(data, text):
    session = make()
    connection = session.connect(1)
    with pytest.raises(RemoteProtocolError, match=text) as raised:
        connection.feed(0, data)
    assert session.error is raised.value
