"""A learner whose broadcasts come as changes: what it makes of them, whatever their order."""

import numpy as np
import pytest

from syncer.errors import RemoteProtocolError
from syncer.kernels import sha256
from syncer.learner import changes as changes_module
from syncer.learner.failures import TurnedAway
from syncer.learner.introduction import Introduction
from syncer.protocol import DTYPE_BF16, DTYPE_F32, DTYPE_Q4
from syncer.wire.extended import RunState, Welcome, encode_welcome
from syncer.wire.extension import Held
from syncer.wire.hello import parse_hello
from syncer.wire.messages import Bcast, BcastChange
from tests.bulk_frames import encode_bcast, encode_change
from tests.golden.change_reference import change_of, changed
from tests.golden.merge_reference import bf16_decode, bf16_encode
from tests.unit.sessions import FINGERPRINT, NUMELS, make, pull

F32 = np.float32


def welcome(*kept: bool, changes: int = DTYPE_Q4) -> bytes:
    return encode_welcome(Welcome(1, 7, 3, 40, 2, 1, 0.0, RunState.RUNNING, "syncer", "",
                                  kept=kept or (False, False), changes=changes))


class Fleet:
    """One learner, and what the server tells of fragment 0 and 1: versions 1, 2, … of each."""

    def __init__(self, dtype: int = DTYPE_F32):
        self.session = make(1, dtype, introduction=Introduction(FINGERPRINT))
        self.dtype = DTYPE_F32 if dtype == DTYPE_F32 else DTYPE_BF16
        rng = np.random.default_rng(1)
        self.anchors = [[np.zeros(numel, F32)] for numel in NUMELS]
        self.deltas = [[b""] for _ in NUMELS]
        for anchors, deltas in zip(self.anchors, self.deltas, strict=True):
            for _ in range(9):
                values = anchors[-1] + rng.standard_normal(anchors[-1].size).astype(F32)
                deltas.append(change_of(values, anchors[-1]))
                anchors.append(changed(anchors[-1], deltas[-1], self.dtype))
        self.connection = None

    def meet(self, *kept: bool, **options):
        """Its next connection, welcomed."""
        self.connection = self.session.connect((self.session.last_generation or 0) + 1)
        self.connection.feed(0, welcome(*kept, **options))
        return self

    def bytes_of(self, version: int, fragment: int = 0) -> bytes:
        anchor = self.anchors[fragment][version]
        return anchor.tobytes() if self.dtype == DTYPE_F32 else bf16_encode(anchor).tobytes()

    def whole(self, version: int, fragment: int = 0) -> bytes:
        return encode_bcast(Bcast(fragment, version, memoryview(self.bytes_of(version, fragment))))

    def change(self, version: int, fragment: int = 0, base: int | None = None) -> bytes:
        return encode_change(BcastChange(fragment, version - 1 if base is None else base, version,
                                         memoryview(self.deltas[fragment][version])))

    def feed(self, *frames: bytes) -> list[int]:
        """Versions that were news, in order."""
        return [inbound.message.version for frame in frames
                for inbound in self.connection.feed(1, frame)
                if isinstance(inbound.message, Bcast)]

    def check(self, version: int, fragment: int = 0) -> None:
        """The newest broadcast to be taken is this one, to the bit."""
        [bcast] = [each for each in self.session.broadcasts if each.fragment == fragment]
        assert bcast.version == version
        assert bytes(bcast.tensor) == self.bytes_of(version, fragment)
        assert self.session.held[fragment] == Held(7, version)


@pytest.fixture(params=[DTYPE_F32, DTYPE_BF16, DTYPE_Q4])
def fleet(request):
    return Fleet(request.param).meet()


def test_the_oracle_reads_what_it_writes():
    values = np.array([1.5, -2.0], F32)
    np.testing.assert_array_equal(bf16_decode(bf16_encode(values)), values)


def test_a_change_makes_the_tensor_of_a_whole_broadcast(fleet):
    assert fleet.feed(fleet.whole(1), fleet.change(2), fleet.change(3)) == [1, 2, 3]
    fleet.check(3)
    assert fleet.feed(fleet.whole(1, 1), fleet.change(2, 1)) == [1, 2]
    fleet.check(2, 1)
    taken = fleet.session.take_broadcasts()
    assert [(each.fragment, each.version) for each in taken] == [(0, 3), (1, 2)]
    assert fleet.feed(fleet.change(4)) == [4], "it is kept for changes when it was taken, too"
    fleet.check(4)


def test_changes_that_overtake_what_they_change_wait_for_it(fleet):
    assert fleet.feed(fleet.change(4), fleet.change(2), fleet.change(3)) == []
    assert fleet.feed(fleet.whole(1)) == [1, 2, 3, 4]
    fleet.check(4)
    assert fleet.feed(fleet.change(6), fleet.change(5)) == [5, 6]
    fleet.check(6)


def test_what_is_older_than_the_newest_is_dropped(fleet):
    assert fleet.feed(fleet.whole(1), fleet.change(3)) == [1]
    assert fleet.feed(fleet.whole(5), fleet.change(2), fleet.change(4), fleet.change(5)) == [5]
    assert fleet.feed(fleet.change(6)) == [6]
    fleet.check(6)


def test_a_version_that_comes_both_ways_is_one(fleet):
    assert fleet.feed(fleet.whole(1), fleet.change(2), fleet.whole(2)) == [1, 2]
    other = encode_bcast(Bcast(0, 2, memoryview(fleet.bytes_of(3))))
    with pytest.raises(RemoteProtocolError, match="version 2 came with other bytes"):
        fleet.feed(other)


def test_what_a_change_has_made_is_hashed_when_it_comes_again(fleet, monkeypatch):
    hashed = []
    monkeypatch.setattr(changes_module, "sha256", lambda data: hashed.append(data) or sha256(data))
    assert fleet.feed(fleet.whole(1), fleet.change(2), fleet.change(3)) == [1, 2, 3]
    assert not hashed
    assert fleet.feed(fleet.whole(3)) == []
    assert fleet.feed(fleet.whole(3)) == []
    [tensor] = hashed
    assert bytes(tensor) == fleet.bytes_of(3)
    other = bytes([1]) + fleet.bytes_of(3)[1:]
    assert other != fleet.bytes_of(3)
    with pytest.raises(RemoteProtocolError, match=f"first {sha256(tensor).hex()}, now "):
        fleet.feed(encode_bcast(Bcast(0, 3, memoryview(other))))


def test_a_new_connection_begins_with_the_whole(fleet):
    """Nothing of the old one is waited for, and nothing of before is changed unless it is kept."""
    fleet.feed(fleet.whole(1), fleet.change(3))
    fleet.meet()
    assert fleet.feed(fleet.change(2)) == [], "what this learner has is of another connection"
    assert fleet.feed(fleet.whole(1)) == [2], "what it had already is no news"
    fleet.check(2)


def test_what_is_kept_is_changed(fleet):
    fleet.feed(fleet.whole(1), fleet.change(2))
    fleet.meet(True, False)
    assert fleet.feed(fleet.change(3)) == [3]
    fleet.check(3)
    assert fleet.session._unconfirmed == {0, 1}, "an anchor that is not applied yet"
    fleet.session.take_broadcasts()
    assert fleet.session._unconfirmed == {1}


def test_a_pull_is_answered_on_what_a_change_has_brought(fleet):
    fleet.feed(fleet.whole(1), fleet.change(3), fleet.change(2), pull(0, 5))
    fleet.session.take_broadcasts()
    fleet.session.advance(1)
    [due] = fleet.session.due_pulls()
    assert fleet.session.answer(due).base == 3


def test_a_change_that_fits_nothing_ends_the_connection_and_the_next_one_brings_the_whole(fleet):
    fleet.feed(fleet.whole(1), fleet.whole(4))
    with pytest.raises(TurnedAway, match=r"makes version 5 of fragment 0 of version 3, and this "
                                         r"learner is at version 4"):
        fleet.feed(fleet.change(5, base=3))
    assert fleet.session.error is None
    assert fleet.session.held == (None, None)
    fleet.meet()
    assert fleet.feed(fleet.whole(4), fleet.change(5)) == [5]
    fleet.check(5)


def test_what_was_not_kept_for_changes_cannot_be_changed(fleet):
    """It came while no changes were spoken of, and a server says all the same that it is kept."""
    fleet.meet(changes=0)
    fleet.feed(fleet.whole(1))
    fleet.meet(True, False)
    with pytest.raises(TurnedAway, match="this learner has no bytes of version 1"):
        fleet.feed(fleet.change(2))
    hello = parse_hello(fleet.session.connect(99).openings[0][13:], key=None, learners=8)
    assert hello.extension.held == (None, None)
    assert hello.extension.changes == (DTYPE_Q4,)


def test_changes_come_only_where_they_were_spoken_of(fleet):
    fleet.meet(changes=0)
    fleet.feed(fleet.whole(1))
    with pytest.raises(RemoteProtocolError, match="whose WELCOME speaks of none"):
        fleet.feed(fleet.change(2))
    plain = make(1)
    with pytest.raises(RemoteProtocolError, match="unexpected message type 19"):
        plain.connect(1).feed(1, fleet.change(2))


def test_what_waits_has_a_bound(fleet):
    fleet.connection.limits = fleet.connection.limits._replace(open_bytes_max=3 * 132)
    fleet.feed(fleet.change(2), fleet.change(3), fleet.change(4), fleet.change(4))
    with pytest.raises(TurnedAway, match="396 bytes of changes wait for what they change"):
        fleet.feed(fleet.change(5))
    fleet.feed(fleet.whole(1), fleet.change(5), fleet.change(7), fleet.change(8), fleet.change(9))
    fleet.feed(fleet.whole(8))
    fleet.check(9)
    assert fleet.session._changes._waiting_bytes == 0


def test_a_lost_connection_makes_no_use_of_what_the_new_one_has_brought():
    fleet = Fleet().meet()
    old = fleet.connection
    fleet.feed(fleet.whole(1))
    fleet.meet(True, False)
    fleet.feed(fleet.change(3))
    assert fleet.session.rebuilt(old, 0) is None
    old.feed(1, fleet.change(2))
    assert fleet.feed(fleet.change(2)) == [2, 3]
    assert changes_module.Changes(1).take(0) is None
