"""The queue of a connection group: order, coalescing, what it keeps alive."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from syncer import pages
from syncer.merge.buffers import BufferPool
from syncer.merge.versions import FragmentVersion
from syncer.protocol import CHUNK_SIZE, DTYPE_BF16, DTYPE_F32, DTYPE_Q4, Msg
from syncer.server.downlink import AnchorImage, ChangeImage
from syncer.server.outbox import Outbox
from syncer.server.wire_version import WireVersion
from syncer.wire import encode
from tests.golden.merge_reference import bf16_encode

POOL = BufferPool()


def image(fragment, version, numel=3, kind=Msg.BCAST_FRAGMENT, dtype=DTYPE_F32):
    params = np.full(numel, version, np.float32)
    source = SimpleNamespace(fragment=fragment, version=version, params=params)
    return WireVersion(kind, source, dtype, POOL)


def drain(outbox, log=None):
    """Send everything at once; (fragment, version) of each message, and the small frames."""
    log = [] if log is None else log
    while True:
        for frame in outbox.take_small():
            log.append(frame)
        piece = outbox.next_piece()
        if piece is None:
            if not outbox.has_pieces() and outbox.empty:
                return log
            continue
        bulk, _ = piece
        name = bulk.image.fragment, bulk.image.version
        outbox.piece_sent(bulk)
        if not log or log[-1] != name:
            log.append(name)


def test_a_newer_version_takes_the_place_of_a_queued_one():
    outbox = Outbox(3)
    for fragment, version in ((0, 1), (1, 2), (2, 3), (0, 4), (1, 5)):
        assert outbox.broadcast(image(fragment, version))
    assert drain(outbox) == [(0, 4), (1, 5), (2, 3)]


def test_a_version_is_taken_in_once_on_a_connection():
    outbox = Outbox(2)
    assert outbox.broadcast(image(0, 1))
    assert not outbox.broadcast(image(0, 1))
    assert not outbox.broadcast(image(0, 0))
    assert drain(outbox) == [(0, 1)]
    assert not outbox.broadcast(image(0, 1))
    assert drain(outbox) == []


def test_a_message_that_has_begun_is_finished_and_pins_one_old_version():
    outbox = Outbox(2)
    big = CHUNK_SIZE // 4 + 1000  # two chunks
    outbox.broadcast(image(0, 1, big))
    bulk, _ = outbox.next_piece()
    for version in (3, 5, 7):
        outbox.broadcast(image(0, version, big))
    assert outbox.held_versions == [(0, 1), (0, 7)]
    assert outbox.next_piece()[0] is bulk
    # Its last piece is handed out but not sent: nothing newer of the fragment begins.
    assert not outbox.has_pieces()
    assert outbox.next_piece() is None
    outbox.broadcast(image(1, 2))
    assert outbox.next_piece()[0].image.fragment == 1
    outbox.piece_sent(bulk)
    assert outbox.next_piece() is None
    outbox.piece_sent(bulk)
    assert outbox.held_versions == [(1, 2), (0, 7)]
    assert outbox.next_piece()[0].image.version == 7


def test_a_pull_waits_for_the_broadcasts_of_its_fragment_only():
    outbox = Outbox(2)
    outbox.broadcast(image(0, 1))
    outbox.pull(1, b"pull 1")
    outbox.pull(0, b"pull 0")
    assert drain(outbox) == [b"pull 1", (0, 1), b"pull 0"]


def test_a_pull_waits_behind_the_newest_broadcast_also_when_an_older_one_is_under_way():
    outbox = Outbox(1)
    outbox.broadcast(image(0, 1))
    bulk, _ = outbox.next_piece()
    outbox.pull(0, b"of version 1")
    outbox.broadcast(image(0, 2))
    outbox.pull(0, b"of version 2")
    outbox.piece_sent(bulk)
    assert drain(outbox) == [(0, 2), b"of version 2"]


def test_pulls_that_nobody_reads_do_not_pile_up():
    outbox = Outbox(2)
    for step in range(1000):
        outbox.pull(step % 2, b"pull %d" % step)
    assert outbox.take_small() == [b"pull 998", b"pull 999"]
    assert outbox.take_small() == []


def test_a_catch_up_ends_once_and_names_what_was_sent():
    outbox = Outbox(2)
    outbox.catch_up([image(0, 1), image(1, 2)])
    assert outbox.caught_up() is None
    bulk, _ = outbox.next_piece()
    outbox.piece_sent(bulk)
    outbox.broadcast(image(0, 3))
    outbox.broadcast(image(1, 4))
    assert outbox.caught_up() is None, "fragment 1 has not gone out"
    assert drain(outbox) == [(1, 4), (0, 3)]
    assert outbox.caught_up() == (3, 4)
    assert outbox.caught_up() is None


def test_a_catch_up_ends_also_when_the_queue_never_does():
    """A link that carries one message while two new versions come: there is always one queued."""
    outbox = Outbox(3)
    outbox.catch_up([image(fragment, 0) for fragment in range(3)])
    found = []
    for step in range(1, 9, 2):
        bulk, _ = outbox.next_piece()
        outbox.broadcast(image((step - 1) % 3, step))
        outbox.broadcast(image(step % 3, step + 1))
        outbox.piece_sent(bulk)
        found.append(outbox.caught_up())
    assert found == [None, None, (4, 5, 6), None]
    assert not outbox.empty
    outbox.pull(1, b"pull of fragment 1")
    assert outbox.take_small() == [], "behind the version that was named, which is queued"
    order = drain(outbox)
    assert order.index(b"pull of fragment 1") > order.index((1, 8))


def test_a_fragment_that_was_under_way_before_a_second_catch_up_goes_out_again():
    outbox = Outbox(2)
    outbox.catch_up([image(0, 0), image(1, 0)])
    drain(outbox)
    assert outbox.caught_up() == (0, 0)
    outbox.broadcast(image(0, 1))
    bulk, _ = outbox.next_piece()
    outbox.catch_up([image(0, 3), image(1, 0)])
    outbox.piece_sent(bulk)
    assert outbox.caught_up() is None, "version 1 is older than the catch-up"
    assert drain(outbox) == [(0, 3)]
    assert outbox.caught_up() == (3, 0)


def test_a_second_catch_up_sends_nothing_twice():
    outbox = Outbox(2)
    outbox.catch_up([image(0, 0), image(1, 0)])
    drain(outbox)
    assert outbox.caught_up() == (0, 0)
    outbox.catch_up([image(0, 0), image(1, 0)])
    assert outbox.caught_up() == (0, 0)


def test_the_final_cut_replaces_what_is_queued_and_the_manifest_is_last():
    outbox = Outbox(2)
    outbox.broadcast(image(0, 3))
    outbox.broadcast(image(1, 2))
    bulk, _ = outbox.next_piece()
    outbox.pull(0, b"pull")
    outbox.frame(b"error")
    cut = [image(0, 3, kind=Msg.FINAL_FRAGMENT), image(1, 4, kind=Msg.FINAL_FRAGMENT)]
    outbox.final_cut(cut, b"manifest")
    outbox.pull(1, b"too late")
    assert not outbox.broadcast(image(1, 5))
    outbox.piece_sent(bulk)
    assert drain(outbox) == [b"error", (0, 3), (1, 4), b"manifest"]
    assert outbox.empty


@pytest.mark.parametrize("numel", [1, 1000, CHUNK_SIZE // 4, CHUNK_SIZE + 17])
@pytest.mark.parametrize("dtype", [DTYPE_F32, DTYPE_BF16, DTYPE_Q4])
def test_the_pieces_are_the_frame(numel, dtype):
    """Cut at multiples of CHUNK_SIZE, encoded range by range, and nothing is encoded too early."""
    rng = np.random.default_rng(numel)
    params = rng.standard_normal(numel).astype(np.float32)
    source = SimpleNamespace(fragment=1, version=9, params=params)
    outbox = Outbox(2)
    outbox.broadcast(WireVersion(Msg.BCAST_FRAGMENT, source, dtype, POOL))
    inner, heads = b"", []
    while (piece := outbox.next_piece()) is not None:
        bulk, (head, body) = piece
        if bulk.rough:  # whoever sends it has it encoded part by part
            bulk.image.ready(len(inner) + len(body))
        data = bytes(head) + bytes(body)
        heads.append(data[13:37])
        inner += data[37:]
        assert len(data) <= 37 + CHUNK_SIZE
        outbox.piece_sent(bulk)
    body = params.tobytes() if dtype == DTYPE_F32 else bf16_encode(params).tobytes()
    payload = encode.bcast_head(1, 9) + body
    assert inner == encode.frame(Msg.BCAST_FRAGMENT, payload)
    assert [int.from_bytes(head[16:], "little") for head in heads] == list(
        range(0, len(inner), CHUNK_SIZE))
    assert {head[:8] for head in heads} == {bytes(8)}


def changed(version, base, numel=300):
    """As `image`, with the change of `base` that makes it."""
    whole = image(0, version, numel)
    change = ChangeImage(whole, base, memoryview(bytes(264)))
    return AnchorImage(whole, whole.body, change)


def kinds(outbox):
    """(kind, version) of what goes out."""
    sent = []
    while (piece := outbox.next_piece()) is not None:
        bulk, buffers = piece
        sent.append((Msg(buffers[0][37 + 4]), bulk.image.version))
        assert sum(map(len, buffers)) == 37 + 13 + len(bulk.image.head) + len(bulk.image.body)
        outbox.piece_sent(bulk)
    return sent


WHOLE, CHANGE = Msg.BCAST_FRAGMENT, Msg.BCAST_CHANGE


def test_a_change_goes_to_who_has_what_it_changes():
    outbox = Outbox(1)
    outbox.takes_changes = True
    outbox.broadcast(changed(2, 1))
    assert outbox.bytes_of(changed(2, 1)) == 1200
    assert kinds(outbox) == [(WHOLE, 2)], "nothing of this fragment was sent before"
    outbox.broadcast(changed(3, 2))
    assert outbox.bytes_of(changed(3, 2)) == 264
    outbox.pull(0, b"a pull")
    assert kinds(outbox) == [(CHANGE, 3)]
    assert outbox.take_small() == [b"a pull"], "it waits for the change as for the whole"
    outbox.broadcast(changed(4, 3))
    outbox.broadcast(changed(5, 4))
    assert outbox.bytes_of(changed(5, 4)) == 1200
    assert kinds(outbox) == [(WHOLE, 5)], "version 4 was skipped"
    outbox.broadcast(image(0, 6, 300))
    assert kinds(outbox) == [(WHOLE, 6)], "there is no change of it"


def test_a_change_waits_for_what_it_changes_and_then_is_one():
    outbox = Outbox(1)
    outbox.takes_changes = True
    outbox.broadcast(changed(1, 0))
    first, _ = outbox.next_piece()
    outbox.broadcast(changed(2, 1))
    assert outbox.bytes_of(changed(2, 1)) == 264
    assert outbox.next_piece() is None
    outbox.piece_sent(first)
    assert kinds(outbox) == [(CHANGE, 2)]


def test_what_a_peer_keeps_is_changed():
    outbox = Outbox(1)
    outbox.takes_changes = True
    outbox.keep(0, 6)
    outbox.broadcast(changed(7, 6))
    assert kinds(outbox) == [(CHANGE, 7)]


def test_who_takes_no_changes_gets_the_same_values_whole():
    outbox = Outbox(1)
    for version in (1, 2):
        outbox.broadcast(changed(version, version - 1))
        assert outbox.bytes_of(changed(version, version - 1)) == 1200
        assert kinds(outbox) == [(WHOLE, version)]


def test_an_encoded_image_lets_go_of_its_source():
    """bf16 readers must not pin the f32 version."""
    shared = image(0, 1, 10, dtype=DTYPE_BF16)
    shared.ready(3)
    assert shared.params is not None
    shared.ready(20)
    assert shared.params is None


@pytest.mark.parametrize(("kind", "dtype"), [
    (Msg.BCAST_FRAGMENT, DTYPE_F32), (Msg.BCAST_FRAGMENT, DTYPE_BF16),
    (Msg.FINAL_FRAGMENT, DTYPE_BF16)])
def test_a_version_on_its_way_keeps_its_parameters_and_no_optimizer_state(kind, dtype):
    """A reader that has stopped pins it for as long as it likes."""
    memory = BufferPool()
    buffers = [memory.take(1000) for _ in range(3)]
    source = FragmentVersion(0, 1, 1, ("momentum", "accumulator"), buffers)
    del buffers
    shared = WireVersion(kind, source, dtype, POOL)
    shared.ready(10)
    del source
    assert memory.live == 1
    shared.ready(len(shared.body))
    assert memory.live == (0 if dtype == DTYPE_BF16 and kind == Msg.BCAST_FRAGMENT else 1)


def test_image_memory_is_free_once_the_last_piece_is_gone():
    pool, before = BufferPool(), pages.used_bytes()
    source = SimpleNamespace(fragment=0, version=1, params=np.zeros(100_000, np.float32))
    shared = WireVersion(Msg.BCAST_FRAGMENT, source, DTYPE_BF16, pool)
    piece = shared.body[10:20]
    del shared
    assert pool.live == 1
    assert pages.used_bytes() > before
    del piece
    assert pool.live == 0
    assert pages.used_bytes() == before


def test_a_broadcast_that_a_pull_waits_for_goes_first():
    """In the order of the pulls; what nobody waits for keeps its own."""
    outbox = Outbox(4)
    for fragment in range(4):
        outbox.broadcast(image(fragment, 1))
    assert not outbox.awaited()
    outbox.pull(3, b"pull 3")
    outbox.pull(1, b"pull 1")
    assert outbox.awaited()
    assert drain(outbox) == [(3, 1), b"pull 3", (1, 1), b"pull 1", (0, 1), (2, 1)]
    assert not outbox.awaited()


def test_what_is_queued_when_a_catch_up_ends_trails_behind_it_once():
    outbox = Outbox(2)
    outbox.catch_up([image(0, 0), image(1, 0)])
    bulk, _ = outbox.next_piece()
    outbox.broadcast(image(0, 1))
    outbox.piece_sent(bulk)
    bulk, _ = outbox.next_piece()
    outbox.piece_sent(bulk)
    assert outbox.caught_up() == (1, 0)
    assert outbox.trailing
    outbox.broadcast(image(1, 2))
    bulk, _ = outbox.next_piece()
    outbox.piece_sent(bulk)
    assert not outbox.trailing, "what came since is broadcast like any other"
    assert not outbox.empty


def test_a_catch_up_of_what_was_taken_in_is_known_to_be_empty():
    outbox = Outbox(2)
    assert not outbox.has_taken([0, 0])
    outbox.broadcast(image(0, 3))
    outbox.broadcast(image(1, 4))
    assert outbox.has_taken([3, 4])
    assert not outbox.has_taken([3, 6])


@pytest.mark.parametrize(("numel", "stripes", "sizes"), [
    (2**18, 1, [2**20 + 25]),
    (2**18, 3, [349534, 349534, 349533]),
    (2**18, 100, [2**18] * 4 + [25]),
    (2**21, 2, [4194304, 4194304, 25]),
])
def test_a_message_is_cut_for_the_sockets_that_it_goes_over(numel, stripes, sizes):
    """Of no less than 256 KiB, and no more than 4 MiB."""
    outbox = Outbox(1)
    outbox.stripes = stripes
    outbox.broadcast(image(0, 1, numel))
    found = []
    while (piece := outbox.next_piece()) is not None:
        bulk, (head, body) = piece
        found.append(len(head) - 37 + len(body))
        outbox.piece_sent(bulk)
    assert found == sizes
    assert outbox.empty
