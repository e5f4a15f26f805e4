"""`Learner` against a scripted server: the step boundary, deltas, the H gate, the final cut."""

import itertools
import threading

import numpy as np
import pytest

from syncer.errors import RemoteProtocolError, SyncerError
from syncer.kernels import decode_bf16, decode_q4, encode_bf16
from syncer.learner import ConnectionFailed, Learner, heartbeats, layout_fingerprint, load_layout
from syncer.learner import client as client_module
from syncer.learner import learner as learner_module
from syncer.learner.client import Client
from syncer.learner.client_group import QUEUE_FRAMES_MAX
from syncer.learner.session import Phase
from syncer.wire.messages import Heartbeat, Pull, Push

from .scripted_server import DEADLINE_S, PUBLISHED_REFUSAL, ScriptedServer
from .waiting import step_until, until


def model(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in
            {"embed": (5, 7), "a": (300, 41), "b": (129,), "scalar": ()}.items()}


def flat(learner: Learner, parameters: dict, fragment: int) -> np.ndarray:
    return np.concatenate(
        [parameters[t.name].reshape(-1) for t in learner.layout.fragments[fragment].tensors])


def bf16(values: np.ndarray) -> np.ndarray:
    out = np.empty(2 * values.size, np.uint8)
    encode_bf16(values, out)
    return out


def widened(raw) -> np.ndarray:
    out = np.empty(len(raw) // 2, np.float32)
    assert decode_bf16(raw, out, False) == -1
    return out


def decoded(dtype: str, raw, numel: int) -> np.ndarray:
    out = np.empty(numel, np.float32)
    if dtype == "q4":
        assert decode_q4(raw, out, False) == -1
        return out
    return widened(raw) if dtype == "bf16" else np.frombuffer(raw, "<f4")


@pytest.fixture
def server():
    with ScriptedServer() as each:
        yield each


@pytest.fixture
def quick(monkeypatch):
    """No waits of an outage; for tests that are not about them."""
    monkeypatch.setattr(client_module, "backoff_s", lambda attempt: 0.0)
    monkeypatch.setattr(client_module, "DRAIN_S", 0.0)


class Island:
    """Learner 0 with alpha 0.25, and the server's end of its connection, its INITs received."""

    def __init__(self, server: ScriptedServer, dtype: str, num_streams: int):
        self.dtype = dtype
        self.parameters = model()
        self.before = {name: values.copy() for name, values in self.parameters.items()}
        self.learner = Learner(self.parameters, server.address, learner_id=0, dtype=dtype,
                               fragments=3, alpha=0.25, num_streams=num_streams)
        self.fragments = range(len(self.learner.layout.fragments))
        self.peer = server.accept()
        self.inits = self.peer.receive_inits()

    def bulk(self, values: np.ndarray):
        """(as INIT and BCAST carry it, as the reader has it then)"""
        raw = values if self.dtype == "f32" else bf16(values)
        return raw, (values if self.dtype == "f32" else widened(raw))

    def follow_a_broadcast(self) -> list[np.ndarray]:
        """The anchors, once version 7 + f of every fragment f is blended."""
        anchors, applied = [], []
        for f in self.fragments:
            raw, anchor = self.bulk(flat(self.learner, model(1), f))
            anchors.append(anchor)
            self.peer.bcast(f, 7 + f, raw)
        while len(applied) < len(anchors):
            applied += step_until(self.learner, lambda s: s.applied, tokens=3).applied
        assert sorted(applied) == [(f, 7 + f) for f in self.fragments]
        return anchors


@pytest.fixture(params=[(dtype, streams) for dtype in ("f32", "bf16", "q4") for streams in (0, 3)],
                ids=lambda param: f"{param[0]}-{param[1]}")
def island(server, quick, request):
    made = Island(server, *request.param)
    with made.learner:
        yield made


def test_the_initial_values_are_the_own_ones(island):
    for f in island.fragments:
        raw, _ = island.bulk(flat(island.learner, island.before, f))
        assert island.inits[f] == raw.tobytes()


def test_a_broadcast_is_blended_in_f32(island):
    anchors = island.follow_a_broadcast()
    for f in island.fragments:
        blended = (np.float32(0.25) * flat(island.learner, island.before, f)
                   + np.float32(0.75) * anchors[f])
        np.testing.assert_array_equal(flat(island.learner, island.parameters, f), blended)


def test_a_pull_is_answered_with_the_delta_from_the_exact_anchor(island):
    learner, anchors = island.learner, island.follow_a_broadcast()
    for values in island.parameters.values():
        np.add(values, np.float32(0.125), out=values)
    island.peer.pull(1, 9, attempt=2)
    status = step_until(learner, lambda s: s.answered, tokens=3)
    assert status.answered == ((1, 9),)
    push = island.peer.receive_push()
    assert push[:6] == (0, 1, 9, 2, 8, status.step)
    assert 1 <= push.c_steps <= status.step
    assert push.c_tokens == 3 * push.c_steps
    delta = flat(learner, island.parameters, 1) - anchors[1]
    found = decoded(island.dtype, push.delta, delta.size)
    if island.dtype == "f32":
        np.testing.assert_array_equal(found, delta)
    elif island.dtype == "bf16":
        np.testing.assert_array_equal(found, widened(bf16(delta)))
    else:
        assert np.abs(found - delta).max() <= np.abs(delta).max() / 2
    until(lambda: learner.bytes_sent > sum(map(len, island.inits)) + len(push.delta),
          "what has left is counted")


def test_the_final_cut_is_taken_to_the_bit_and_acknowledged_once(island):
    learner, peer = island.learner, island.peer
    island.follow_a_broadcast()
    cut = model(2)
    for f in island.fragments:
        peer.final(f, 9 + f, flat(learner, cut, f))
    peer.manifest(11, [9 + f for f in island.fragments])
    assert step_until(learner, lambda s: s.finished).finished
    assert learner.finish(DEADLINE_S).finished
    for name, values in island.parameters.items():
        np.testing.assert_array_equal(values, cut[name])
    assert peer.receive_ack().step == 11
    assert learner.finish(DEADLINE_S).finished
    assert learner.bytes_received > 4 * sum(v.size for v in cut.values())


# --- INIT --------------------------------------------------------------------------------------


def learner_of(server: ScriptedServer, parameters: dict, **options) -> Learner:
    defaults = {"learner_id": 0, "dtype": "f32", "fragments": 3, "num_streams": 2, "alpha": 0.0}
    return Learner(parameters, server.address, **defaults | options)


def in_thread(call):
    """Runs `call` beside the test; the returned function waits for its result."""
    results = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()

    def result():
        thread.join(DEADLINE_S)
        assert results, "the call has not returned, or has raised"
        return results[0]

    return result


def test_an_init_that_was_cut_off_starts_again(server, quick):
    parameters = {"a": np.arange(4_000_000, dtype=np.float32), "b": np.ones(3, np.float32)}
    start = in_thread(lambda: learner_of(server, parameters, num_streams=1))
    peer = server.accept()
    until(lambda: peer.sockets[1].recv(65_536), "INIT begins")
    peer.close()
    peer = server.accept()
    inits = peer.receive_inits()
    assert inits == [parameters["a"].tobytes(), parameters["b"].tobytes()]
    start().close()


def test_an_init_is_repeated_until_a_broadcast_shows_that_it_arrived(server, quick):
    """The kernel took the first one, but the server that got it is gone."""
    with learner_of(server, model()) as learner:
        first = server.accept()
        inits = first.receive_inits()
        first.close()
        waiting = in_thread(learner.finish)
        second = server.accept()
        assert second.receive_inits() == inits
        for fragment in range(len(learner.layout.fragments)):
            second.bcast(fragment, 0, flat(learner, model(1), fragment))
        send_cut(second, learner, model(2), 1)
        assert waiting().finished


def test_an_init_is_not_repeated_once_the_server_has_it(server, quick):
    """As far as protocol 4 lets a learner know: a server of which it has had a broadcast."""
    server.refusal = PUBLISHED_REFUSAL
    with learner_of(server, model()) as learner:
        first = server.accept()
        first.receive_inits()
        first.bcast(0, 0, flat(learner, model(1), 0))
        step_until(learner, lambda s: s.applied)
        first.close()
        second = server.accept()
        second.bcast(0, 0, flat(learner, model(1), 0))
        second.pull(0, 1)
        step_until(learner, lambda s: s.answered)
        assert isinstance(second.receive(), Push)


def test_only_learner_0_brings_values(server, quick):
    with learner_of(server, model(), learner_id=1) as learner:
        peer = server.accept()
        peer.bcast(0, 4, flat(learner, model(1), 0))
        peer.pull(0, 5)
        step_until(learner, lambda s: s.answered)
        push = peer.receive()
        assert isinstance(push, Push)
        assert (push.learner, push.base) == (1, 4)


# --- step boundary -----------------------------------------------------------------------------


def test_the_gate_holds_a_pull_until_enough_steps_on_the_anchor(server, quick):
    with learner_of(server, model(), learner_id=1, min_steps_per_sync=5) as learner:
        peer = server.accept()
        peer.pull(0, 4 + len(learner.layout.fragments))
        peer.bcast(0, 4, flat(learner, model(1), 0))
        start = step_until(learner, lambda s: s.applied).step
        answered = step_until(learner, lambda s: s.answered).step
        assert answered >= start + 5
        push = peer.receive_push()
        assert push.c_steps == answered - start
        assert push.local_step == answered


def test_a_pull_that_overtook_its_broadcast_is_answered_on_it_one_step_later(server, quick):
    """Both are there at one boundary: the broadcast is applied first, so no step is on it yet."""
    with learner_of(server, model(), learner_id=1) as learner:
        peer = server.accept()
        peer.bcast(0, 1, flat(learner, model(1), 0))
        step_until(learner, lambda s: s.applied)
        peer.pull(0, 2)
        peer.bcast(0, 2, flat(learner, model(2), 0))
        session = learner._session
        until(lambda: session.pulls and session.broadcasts, "both arrive")
        first, second = learner.step(5), learner.step(7)
        assert (first.applied, first.answered) == (((0, 2),), ())
        assert (second.applied, second.answered) == ((), ((0, 2),))
        push = peer.receive_push()
        assert (push.base, push.c_steps, push.c_tokens) == (2, 1, 7)


def test_a_slow_network_defers_answers_and_never_blocks_a_step(server, quick):
    """The server stops reading: a pull stays pending until it reads again, or a newer one comes."""
    parameters = {"a": np.zeros(50_000, np.float32)}
    with learner_of(server, parameters, learner_id=1, num_streams=1) as learner:
        peer, session = server.accept(), learner._session
        peer.bcast(0, 0, np.ones(50_000, "<f4"))
        step_until(learner, lambda s: s.applied)
        attempts = itertools.count(1)

        def ask() -> int:
            attempt = next(attempts)
            peer.pull(0, 1, attempt=attempt)
            until(lambda: session.pulls == [Pull(0, 1, attempt)], "the pull arrives")
            return attempt

        while True:
            asked = ask()
            if not any(learner.step(1).answered for _ in range(50)):
                break
        assert asked > QUEUE_FRAMES_MAX
        newest = ask()
        pushes = in_thread(lambda: [peer.receive_push().attempt for _ in range(asked)])
        step_until(learner, lambda s: s.answered)
        assert pushes() == [*range(1, asked), newest]


@pytest.mark.parametrize(("seconds", "every"), [(0.0, True), (1e9, False)])
def test_heartbeats_are_limited_in_time(server, quick, monkeypatch, seconds, every):
    monkeypatch.setattr(heartbeats, "HEARTBEAT_S", seconds)
    with learner_of(server, model(), learner_id=1) as learner:
        peer = server.accept()
        for _ in range(4):
            learner.step(1)
        send_cut(peer, learner, model(2), 7)
        steps = step_until(learner, lambda s: s.finished).step
        learner.finish(DEADLINE_S)
        assert peer.receive_ack().step == 7  # behind all heartbeats on the control socket
        found = [message for message in peer.waiting if isinstance(message, Heartbeat)]
        expected = range(1, steps + 1) if every else [1]
        steps_heard = {h.local_step for h in found} - {0}  # the pulse, before the first step
        assert sorted(steps_heard) == list(expected)
        assert every or len(found) == 1
        assert {h.learner for h in found} == {1}


def test_an_outage_shows_in_the_status_and_raises_nothing(server, monkeypatch):
    go_on = threading.Event()
    monkeypatch.setattr(client_module, "DRAIN_S", 0.0)
    monkeypatch.setattr(Client, "_connect", _held(Client._connect, go_on))
    with learner_of(server, model(), learner_id=1) as learner:
        peer = server.accept()
        assert learner.step(1).connected
        peer.close()
        step_until(learner, lambda s: not s.connected)
        learner.step(1)
        go_on.set()
        server.accept()
        assert step_until(learner, lambda s: s.connected).finished is False


def _held(connect, go_on):
    """The real `connect`, which waits for `go_on` from its second call on."""
    calls = []

    def held(self, *limits):
        calls.append(limits)
        if len(calls) > 1:
            assert go_on.wait(DEADLINE_S)
        return connect(self, *limits)

    return held


def test_a_fatal_error_reaches_every_call(server, quick):
    with learner_of(server, model(), learner_id=1) as learner:
        peer = server.accept()
        peer.error("session mismatch: expected a, got b")
        with pytest.raises(ConnectionFailed, match="layout_hash_mismatch") as raised:
            step_until(learner, lambda s: False)
        assert raised.value.metric == "layout_hash_mismatch"
        with pytest.raises(ConnectionFailed, match="session mismatch"):
            learner.finish(DEADLINE_S)


# --- the end -----------------------------------------------------------------------------------


def send_cut(peer, learner: Learner, cut: dict, step: int) -> None:
    count = len(learner.layout.fragments)
    for f in range(count):
        peer.final(f, step, flat(learner, cut, f))
    peer.manifest(step, [step] * count)


def test_finish_follows_the_run_until_the_cut_comes(server, quick):
    """Called early: broadcasts are still applied, and due pulls answered."""
    parameters, cut = model(), model(2)
    with learner_of(server, parameters, learner_id=1) as learner:
        peer = server.accept()
        peer.bcast(0, 1, flat(learner, model(1), 0))
        step_until(learner, lambda s: s.applied)
        learner.step(1)
        done = in_thread(lambda: learner.finish(DEADLINE_S))
        peer.pull(0, 2)
        assert peer.receive_push().base == 1
        peer.bcast(0, 2, flat(learner, model(3), 0))
        until(lambda: learner._session.versions[0] == 2, "the broadcast is applied")
        send_cut(peer, learner, cut, 7)
        assert peer.receive_ack().step == 7
        assert done().finished
        for name, values in parameters.items():
            np.testing.assert_array_equal(values, cut[name])


def test_the_ack_is_sent_again_on_the_next_connection(server, quick):
    """The connection ends between the cut and the ACK."""
    with learner_of(server, model(), learner_id=1) as learner:
        peer = server.accept()
        server.stop_listening()
        send_cut(peer, learner, model(2), 7)
        step_until(learner, lambda s: s.finished)
        until(lambda: learner._session.final.tensors() is not None, "the cut arrives")
        peer.close()
        step_until(learner, lambda s: not s.connected)
        done = in_thread(lambda: learner.finish(DEADLINE_S))
        until(lambda: learner._session.phase is Phase.ACKNOWLEDGING, "the cut is applied")
        server.listen_again()
        again = server.accept()
        assert again.receive_ack().step == 7
        again.shutdown()
        assert done().finished


def test_shutdown_counts_as_an_ack_that_arrived(server, quick):
    """The ACK reached the server although its sender has seen the connection end."""
    with learner_of(server, model(), learner_id=1) as learner:
        peer = server.accept()
        server.stop_listening()
        send_cut(peer, learner, model(2), 7)
        step_until(learner, lambda s: s.finished)
        until(lambda: learner._session.final.tensors() is not None, "the cut arrives")
        peer.close()
        step_until(learner, lambda s: not s.connected)
        done = in_thread(lambda: learner.finish(DEADLINE_S))
        until(lambda: learner._session.phase is Phase.ACKNOWLEDGING, "the cut is applied")
        server.listen_again()
        again = server.accept()
        again.shutdown()
        assert done().finished
        learner.step(1)


def test_an_incomplete_cut_is_an_error_that_names_what_is_missing(server, quick):
    with learner_of(server, model(), learner_id=1) as learner:
        peer = server.accept()
        with pytest.raises(SyncerError, match="manifest missing"):
            learner.finish(0.0)
        for f in (0, 2):
            peer.final(f, 5, flat(learner, model(2), f))
        peer.manifest(5, [5, 5, 4])
        step_until(learner, lambda s: s.finished)
        until(lambda: learner._session.final.missing() == [1, 2], "both arrive")
        with pytest.raises(SyncerError, match=r"fragments 1, 2 missing"):
            learner.finish(0.0)
        peer.final(1, 5, flat(learner, model(2), 1))
        peer.manifest(6, [5, 5, 4])
        with pytest.raises(RemoteProtocolError, match="FINAL_MANIFEST changed"):
            learner.finish(DEADLINE_S)


def test_a_long_wait_for_the_cut_shows_progress(server, quick, monkeypatch, stderr):
    monkeypatch.setattr(learner_module, "WAIT_REPORT_S", 0.0)
    with learner_of(server, model(), learner_id=1) as learner:
        peer = server.accept()
        done = in_thread(lambda: learner.finish(DEADLINE_S))
        until(lambda: "manifest missing" in stderr.getvalue(), "a progress line")
        assert "[yeto-syncer-client] waiting for the final cut (manifest missing), " in (
            stderr.getvalue())
        send_cut(peer, learner, model(2), 7)
        assert done().finished


def test_the_layout_file_names_every_parameter(server, quick, tmp_path):
    with learner_of(server, model(), learner_id=1) as learner:
        learner.save_layout(tmp_path / "layout.json")
        saved = load_layout(tmp_path / "layout.json")
        assert saved == learner.layout
        assert layout_fingerprint(saved) == server.accept().hello.fingerprint
    found = {t.name: t.shape for f in saved.fragments for t in f.tensors}
    assert found == {name: values.shape for name, values in model().items()}
