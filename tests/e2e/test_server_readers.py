"""Readers of a live run: whole cuts, of which the learners feel nothing."""

from __future__ import annotations

import secrets
import signal

import numpy as np
import pytest

from syncer.checkpoint.reader import Checkpoint
from syncer.protocol import DTYPE_BF16, DTYPE_F32, NoticeCode, RunState
from syncer.reader.cut_session import (
    ReaderSession,
    ReceivedCut,
    Refused,
    ServerEnd,
    SessionLayout,
    Welcome,
)
from syncer.server import catchups
from syncer.server.capacity import STRANGERS_MIN
from syncer.wire.encode import encode_heartbeat, encode_pull
from syncer.wire.extended import NoticeText
from syncer.wire.messages import Heartbeat, Pull
from tests.e2e.checkpointed import answer, cut_in, flags, start, train
from tests.e2e.scripted import (
    MIXED,
    ServerProcess,
    ServerThread,
    layout_of,
    to_wire,
)
from tests.e2e.scripted_reader import ScriptedReader

LARGE = layout_of((700_000,), (500_000,), (600_001,))


def saved(path, step: int) -> list[np.ndarray]:
    """The parameters of a step, as its checkpoint has them."""
    kept = path.with_name(f"{path.name}.step-{step}")
    with Checkpoint(kept if kept.exists() else path) as checkpoint:
        assert checkpoint.facts.step == step
        loaded = checkpoint.load()
        return [np.array(fragment.params) for fragment in loaded]


def assert_is_saved(cut: ReceivedCut, path) -> None:
    """To the bit, in the dtype of the cut."""
    for tensor, values in zip(cut.tensors, saved(path, cut.step), strict=True):
        assert bytes(tensor) == to_wire(values, cut.dtype)


def refusal(port: int, **said) -> str:
    with ScriptedReader(port, **said) as reader:
        text = reader.until(Refused).text
        assert reader.next() is None
        return text


# ------------------------------------------------------------------------------------ whole cuts
@pytest.mark.parametrize("dtype", [DTYPE_F32, DTYPE_BF16])
def test_a_reader_gets_the_cut_of_a_step(tmp_path, dtype):
    path = tmp_path / "c"
    with (ServerThread(tmp_path, total_steps=5, checkpoint_path=str(path), checkpoint_every=1,
                       checkpoint_keep=9, pipeline=1) as server,
          ScriptedReader(server.port, dtype) as early):
        welcome = early.next()
        assert isinstance(welcome, Welcome)
        assert welcome.state is RunState.WAITING
        assert (welcome.total_steps, welcome.learners, welcome.kept) == (5, 1, ())
        learner = start(server.learner(0))
        layout = early.next()
        assert isinstance(layout, SessionLayout)
        assert layout.layout == MIXED
        assert (layout.fingerprint, layout.names) == (learner.hello.fingerprint, None)
        assert early.cut().step == 0
        train(learner, 4)
        pull = learner.pull(5)
        with ScriptedReader(server.port, dtype) as late:
            assert late.until(Welcome).global_step == 4
            cut = late.cut()
            assert (cut.step, cut.dtype) == (4, dtype)
            assert_is_saved(cut, path)
        answer(learner, pull)
        learner.finish()
        assert isinstance(early.next(), ServerEnd)
        assert early.next() is None
        assert server.wait() == 0
        assert [line["cuts"] for line in server.log.find("reader left")] == [1]


def test_who_follows_gets_every_cut_and_the_final_one(tmp_path):
    path = tmp_path / "c"
    with (ServerThread(tmp_path, total_steps=8, checkpoint_path=str(path), checkpoint_every=1,
                       checkpoint_keep=9, pipeline=1) as server,
          ScriptedReader(server.port, DTYPE_BF16, follows=True) as reader):
        learner = start(server.learner(0))
        cuts = [reader.cut()]
        for step in range(1, 9):
            answer(learner, learner.pull(step))
            if step % 3 == 0:
                cuts.append(reader.cut())
        learner.take_cut()
        cuts.append(reader.cut())
        assert isinstance(reader.next(), ServerEnd)
        assert server.wait() == 0
    assert [(cut.step, cut.is_final) for cut in cuts] == [
        (0, False), (3, False), (6, False), (8, True)]
    for cut in cuts:
        assert_is_saved(cut, path)


def test_a_slow_reader_skips_cuts_and_each_is_whole(tmp_path):
    """Commits go on while a cut is sent: nothing of a newer one is in it."""
    path = tmp_path / "c"
    with (ServerThread(tmp_path, total_steps=20, checkpoint_path=str(path), checkpoint_every=1,
                       checkpoint_keep=99, pipeline=1) as server,
          ScriptedReader(server.port, follows=True, receive_buffer_bytes=4096) as reader):
        learner = server.learner(0, LARGE)
        learner.send_init([np.ones(f.numel, np.float32) for f in LARGE.fragments])
        reader.until(SessionLayout)
        for step in range(1, 21):
            pull = learner.pull(step)
            if step == 14:  # 13 steps are committed, and a part of the first cut is on its way
                versions = server.server.readers.groups[0].outbox.held_versions
                assert {version for _, version in versions} == {0}
                cuts = [reader.cut()]
            elif step == 18:  # what has been replaced since is held for it
                cuts.append(reader.cut())
            learner.push(pull, np.full(LARGE.fragments[pull.fragment].numel, step, np.float32))
        learner.take_cut()
        while not cuts[-1].is_final:
            cuts.append(reader.cut())
    assert [cut.step for cut in cuts] in ([0, 15, 20], [0, 15, 18, 20])
    for cut in cuts:
        assert_is_saved(cut, path)


def test_a_reader_changes_nothing(tmp_path, undisturbed):
    """The files of a run with three readers are those of a run without."""
    path = tmp_path / "c"
    with ServerProcess(tmp_path, *flags(path, 1, "--checkpoint-keep", "99"), steps=9) as server:
        readers = [ScriptedReader(server.port, dtype, follows=True)
                   for dtype in (DTYPE_F32, DTYPE_F32, DTYPE_BF16)]
        learner = start(server.learner(0))
        readers[0].cut()
        readers[0].close()
        train(learner, 9)
        learner.finish()
        learner.close()
        assert server.wait() == 0
        for reader in readers:
            reader.close()
    assert cut_in(path.read_bytes()) == cut_in(undisturbed[9])


# ------------------------------------------------------------------------------------- the door
def test_a_reader_needs_the_key_and_a_recorded_hello_is_none(tmp_path):
    with ServerThread(tmp_path, island_hmac_key="secret") as server:
        for key in (None, b"wrong"):
            assert refusal(server.port, key=key).startswith("HELLO authentication failed")
        said = ReaderSession(DTYPE_F32, follows=True).hello(7, b"secret")
        with ScriptedReader(server.port, said=said) as reader:
            assert isinstance(reader.next(), Welcome)
        assert refusal(server.port, said=said).startswith("duplicate connection generation 7 of a")


def test_readers_have_their_number_of_places(tmp_path):
    with ServerThread(tmp_path, max_readers=1) as server:
        with ScriptedReader(server.port) as reader:
            reader.until(Welcome)
            assert "--max-readers" in refusal(server.port)
        server.log.wait("reader left")
        with ScriptedReader(server.port) as reader:
            reader.until(Welcome)
    with ServerThread(tmp_path, max_readers=0) as server:
        assert "takes no readers, as --max-readers says" in refusal(server.port)


def test_a_reader_gets_no_socket_that_a_learner_was_promised(tmp_path):
    with ServerThread(tmp_path) as server:
        capacity = server.server.readers.capacity
        promised = capacity.rest - STRANGERS_MIN
        capacity.promise(promised)
        assert "no room for one more socket of a reader" in refusal(server.port)
        capacity.promise(-promised)
        with ScriptedReader(server.port) as reader:
            assert isinstance(reader.next(), Welcome)


def test_who_has_its_cut_keeps_nobody_out(tmp_path):
    with (ServerThread(tmp_path, max_readers=1, total_steps=9) as server,
          ScriptedReader(server.port) as served):
        start(server.learner(0)).pull(1)
        assert served.cut().step == 0
        with ScriptedReader(server.port) as reader:
            assert reader.cut().step == 0
            assert served.next() is None


def test_a_reader_hears_what_the_run_waits_for_and_who_comes_later_at_once(tmp_path):
    with ServerThread(tmp_path, learners=2) as server, ScriptedReader(server.port) as reader:
        said = reader.until(NoticeText)
        assert said.code == NoticeCode.LEARNERS
        assert "0 of 2 learners are here, learners 0 and 1 are missing" in said.text
        server.learner(0)
        with ScriptedReader(server.port) as late:
            assert isinstance(late.next(), Welcome)
            wait = late.until(NoticeText)
            assert wait.code == NoticeCode.LEARNERS


def test_a_reader_hears_that_it_waits_for_its_turn_and_behind_whom(tmp_path, monkeypatch):
    assert catchups.TURN_SAID_NS == 5 * 10**9
    monkeypatch.setattr(catchups, "TURN_SAID_NS", 20 * 10**6)
    monkeypatch.setattr(catchups, "STALLED_NS", 10**12)  # however slow this machine is
    with ServerThread(tmp_path, total_steps=9, max_concurrent_catchups=1) as server:
        learner = server.learner(0, LARGE)
        learner.send_init([np.ones(f.numel, np.float32) for f in LARGE.fragments])
        learner.pull(1)
        with ScriptedReader(server.port, receive_buffer_bytes=4096) as first:
            first.until(SessionLayout)  # and no byte more
            with ScriptedReader(server.port) as second:
                said = second.until(NoticeText)
                assert said.code == NoticeCode.OTHER
                assert "for its turn to be sent a cut, behind 1 reader, without a lim" in said.text
                first.close()
                assert second.cut().step == 0
        (line, *_) = server.log.find("reader waits for its turn")
        assert line["behind"] == "1 reader"


def test_a_reader_of_another_run_is_told_both_names(tmp_path):
    with ServerThread(tmp_path) as server, ScriptedReader(server.port, run="blue") as early:
        early.until(Welcome)  # the run may still get that name
        learner = start(server.learner(0))
        assert early.until(Refused).text == "session mismatch: expected no run, got run blue"
        learner.pull(1)
        assert refusal(server.port, run="blue").endswith("expected no run, got run blue")


def test_a_reader_may_say_nothing_but_heartbeats(tmp_path):
    with ServerThread(tmp_path, total_steps=9) as server, ScriptedReader(server.port) as reader:
        reader.until(Welcome)
        for step in range(3):
            reader.sock.sendall(encode_heartbeat(Heartbeat(99, step)))
        start(server.learner(0)).pull(1)
        assert reader.cut().step == 0
        reader.sock.sendall(encode_pull(Pull(0, 1, 1)))
        assert "unexpected message type 3" in reader.until(Refused).text
        assert server.log.wait("reader left")["cuts"] == 1


def test_a_reader_that_dials_as_a_learner_takes_no_place_of_it(tmp_path):
    """Its id is nobody's, whatever it says; the run goes on with its learner."""
    with ServerThread(tmp_path, total_steps=2) as server:
        learner = start(server.learner(0))
        session = ReaderSession(DTYPE_F32, follows=False)
        said = bytearray(session.hello(secrets.randbits(64) | 1, None))
        said[13 + 2 : 13 + 6] = bytes(4)  # learner 0
        with ScriptedReader(server.port, said=bytes(said)) as reader:
            assert reader.cut().step == 0
            train(learner, 2)
            learner.finish()
        assert server.wait() == 0


# ---------------------------------------------------------------------------------------- the end
def test_a_run_that_a_signal_ends_leaves_its_readers_without_a_final_cut(tmp_path):
    with ServerProcess(tmp_path, steps=9) as server:
        reader = ScriptedReader(server.port, follows=True)
        learner = start(server.learner(0))
        assert reader.cut().step == 0
        train(learner, 1)
        server.signal(signal.SIGTERM)
        assert server.wait() == 128 + 15
        while (found := reader.next()) is not None:
            assert not isinstance(found, ReceivedCut | ServerEnd)
        reader.close()


def test_the_final_cut_of_a_large_run_is_waited_for_as_long_as_it_is_taken(tmp_path):
    with ServerThread(tmp_path, total_steps=1) as server:
        learner = server.learner(0, LARGE)
        learner.send_init([np.ones(f.numel, np.float32) for f in LARGE.fragments])
        with ScriptedReader(server.port, follows=True, receive_buffer_bytes=4096) as reader:
            assert reader.cut().step == 0
            pull = learner.pull(1)
            learner.push(pull, np.ones(LARGE.fragments[0].numel, np.float32))
            learner.finish()
            server.log.wait("training complete")
            assert server.status is None
            cut = reader.cut()
            assert (cut.step, cut.is_final) == (1, True)
            assert isinstance(reader.until(ServerEnd), ServerEnd)
        assert server.wait() == 0
