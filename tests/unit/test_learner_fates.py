"""What became of pushes, as a learner hears it, and what it carries on of the last one."""

import numpy as np
import pytest

from syncer.errors import RemoteProtocolError
from syncer.kernels import decode_bf16, decode_q4, encode_bf16, encode_q4
from syncer.learner.fates import Fates
from syncer.learner.fragment import WINDOW, Fragment
from syncer.learner.introduction import Introduction
from syncer.protocol import DTYPE_BF16, DTYPE_Q4, PushFate, RunState, tensor_bytes
from syncer.wire.extended import Fate, Welcome, encode_fate, encode_welcome
from syncer.wire.messages import Pull
from tests.unit.sessions import FINGERPRINT, make

MERGED, NOT_COME = PushFate.MERGED, PushFate.NOT_COME


def answered(fates: Fates, step: int, attempt: int = 1) -> bool:
    """An answer is packed; whether the error before it is carried on."""
    fates.answered(Pull(0, step, attempt))
    return fates.carried(0)


@pytest.mark.parametrize("fate", [*PushFate, 200])
def test_only_a_merge_is_carried_on(fate):
    fates = Fates(1, True)
    assert not answered(fates, 1)
    fates.take(Fate(0, 1, 1, fate))
    assert answered(fates, 3) == (fate == MERGED)
    assert not answered(fates, 5)  # of the one at 3 nobody has spoken
    fates.take(Fate(0, 5, 1, MERGED))
    assert fates.merged(0) == 5
    assert answered(fates, 7)


@pytest.mark.parametrize("told", [Fate(0, 1, 2, MERGED), Fate(0, 2, 1, MERGED)])
def test_a_fate_is_of_the_last_answer_alone(told):
    fates = Fates(1, True)
    answered(fates, 1)
    fates.take(told)
    assert not answered(fates, 2, 2)
    fates.take(Fate(0, 1, 1, MERGED))
    assert not answered(fates, 3)


def test_of_two_answers_to_one_pull_nobody_can_tell_the_fates_apart():
    fates = Fates(1, True)
    for told in ((), (NOT_COME,)):
        answered(fates, 4)
        for each in told:
            fates.take(Fate(0, 4, 1, each))
        assert not answered(fates, 4)
        fates.take(Fate(0, 4, 1, MERGED))
        assert not answered(fates, 4)
        fates.take(Fate(0, 4, 1, MERGED))
        assert not answered(fates, 5)
        fates.begin(True)
    answered(fates, 6)
    fates.take(Fate(0, 6, 1, PushFate.STALE_BASE))  # the first one is decided
    assert not answered(fates, 6)
    fates.take(Fate(0, 6, 1, MERGED))
    assert answered(fates, 7)


def test_what_is_undecided_when_its_connection_ends_is_not_carried_on():
    fates = Fates(1, True)
    answered(fates, 1)
    fates.begin(True)
    fates.take(Fate(0, 1, 1, MERGED))  # of this connection's answer, which there is not
    fates.welcomed([True], [9])
    assert not answered(fates, 2)


@pytest.mark.parametrize(("kept", "version", "lasts"), [
    (True, 3, True), (True, 5, True), (True, 2, False), (False, 3, False)])
def test_a_merge_outlives_its_connection_where_the_next_server_has_it(kept, version, lasts):
    fates = Fates(1, True)
    answered(fates, 3)
    fates.take(Fate(0, 3, 1, MERGED))
    fates.begin(True)
    fates.welcomed([kept], [version])
    assert answered(fates, 5) == lasts


def test_a_server_without_introductions_ends_everything():
    fates = Fates(1, True)
    answered(fates, 3)
    fates.take(Fate(0, 3, 1, MERGED))
    fates.begin(False)
    assert not answered(fates, 5)


def test_a_server_that_does_not_tell_is_found_out():
    fates, unasked = Fates(1, True), Fates(1, False)
    for each in (fates, unasked):
        answered(each, 1)
        answered(each, 1)
        answered(each, 2)
        answered(each, 3)
    assert fates.untold
    assert not unasked.untold
    fates.take(Fate(0, 3, 1, NOT_COME))
    answered(fates, 4)
    answered(fates, 5)
    assert not fates.untold


# --- on a connection ---------------------------------------------------------------------------


def test_it_is_asked_for_and_heard_on_the_newest_connection_alone():
    session = make(introduction=Introduction(FINGERPRINT, wants_fates=True))
    plain = make(introduction=Introduction(FINGERPRINT))
    asked = bytes.fromhex("0700 00000000")
    assert asked in session.connect(5).openings[0]
    assert asked not in plain.connect(5).openings[0]
    welcome = encode_welcome(Welcome(1, 7, 0, 9, 1, 1, 0.0, RunState.RUNNING, "test",
                                     kept=(False, False)))
    old = session.connection
    old.feed(0, welcome)
    new = session.connect(6)
    new.feed(0, welcome)
    session.fates.answered(Pull(0, 1, 1))
    session.accept(old, old.parse(20, memoryview(encode_fate(Fate(0, 1, 1, MERGED))[13:])))
    assert session.fates.merged(0) is None
    new.feed(0, encode_fate(Fate(0, 1, 1, MERGED)))
    assert session.fates.merged(0) == 1
    with pytest.raises(RemoteProtocolError, match="unknown fragment 2"):
        new.feed(0, encode_fate(Fate(2, 1, 1, MERGED)))
    unasked = plain.connection
    unasked.feed(0, welcome)
    with pytest.raises(RemoteProtocolError, match="unexpected message type"):
        unasked.feed(0, encode_fate(Fate(0, 1, 1, MERGED)))


# --- arithmetic --------------------------------------------------------------------------------

CODECS = {DTYPE_BF16: (encode_bf16, decode_bf16), DTYPE_Q4: (encode_q4, decode_q4)}


@pytest.mark.parametrize("dtype", CODECS)
@pytest.mark.parametrize("sizes", [(1,), (300, 7), (WINDOW - 1, 2, WINDOW + 300)])
def test_the_next_delta_has_what_the_last_one_lost(dtype, sizes):
    rng = np.random.default_rng(3)
    local = [rng.standard_normal(size).astype(np.float32) for size in sizes]
    anchor = rng.standard_normal(sum(sizes)).astype(np.float32)
    encode, decode = CODECS[dtype]
    fragment = Fragment(local, dtype)
    fragment.feed_back()
    bulk = np.empty(2 * anchor.size, np.uint8)
    encode_bf16(anchor, bulk)
    decode_bf16(bulk, anchor, False)
    fragment.rebase(bulk.data, 0.5)
    lost = None
    for forgotten in (False, False, True, False):
        for array in local:
            np.multiply(array, np.float32(1.01), out=array)
        if forgotten:
            fragment.forget_error()
            lost = None
        delta = np.concatenate(local) - anchor
        if lost is not None:
            delta = delta + lost
        out, expected = (np.zeros(tensor_bytes(anchor.size, dtype), np.uint8) for _ in range(2))
        fragment.pack_delta(out)
        encode(delta, expected)
        assert out.tobytes() == expected.tobytes()
        kept = np.empty_like(anchor)
        decode(expected, kept, False)
        lost = delta - kept
        assert fragment.error.tobytes() == lost.tobytes()
        assert np.any(lost) or sizes == (1,)  # the largest of a block is exact


def test_without_it_a_delta_keeps_nothing():
    fragment = Fragment([np.ones(3, np.float32)], DTYPE_BF16)
    fragment.rebase(memoryview(bytes(6)), 0.5)
    fragment.pack_delta(np.empty(6, np.uint8))
    assert fragment.error is None
    assert set(fragment.kept()) == {"anchor"}


def test_errors_add_up_to_what_was_meant():
    """A change that 4 bits cannot tell beside a large one arrives all the same."""
    fragment = Fragment([local := np.zeros(256, np.float32)], DTYPE_Q4)
    fragment.feed_back()
    fragment.rebase(memoryview(bytes(512)), 0.0)
    local[0], local[1:] = 1.0, np.float32(0.001)  # a level of q4 is 1/64 of the largest
    arrived = np.zeros(256, np.float32)
    for _ in range(64):
        out, kept = np.zeros(132, np.uint8), np.empty(256, np.float32)
        fragment.pack_delta(out)
        decode_q4(out, kept, False)
        arrived += kept
    assert abs(arrived[1] / (64 * 0.001) - 1) < 0.3
    out = np.zeros(132, np.uint8)
    encode_q4(local, out)
    decode_q4(out, kept, False)
    assert kept[1] == 0
