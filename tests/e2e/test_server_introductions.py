"""The server's side of introductions: WELCOME, what is kept, proved sockets, reports, names."""

from __future__ import annotations

import json
import random
import socket

import numpy as np
import pytest
from safetensors.numpy import load_file

from syncer.cli import main
from syncer.layout import AVG, FragmentLayout, Layout
from syncer.protocol import NoticeCode, RunState
from syncer.server import shortened
from syncer.wire import encode, messages
from syncer.wire.extended import LearnerReport, NoticeText, Welcome, encode_report
from syncer.wire.extension import Extension, Held
from syncer.wire.hello import hello_mac
from syncer.wire.names import FragmentNames, fingerprint
from tests.e2e.scripted import EndOfStream, ScriptedLearner, ServerThread, layout_of

TWO = layout_of((4,), (3,))
BLOCK = Extension(client="a scripted one")
VALUES = [np.ones(4, np.float32), np.full(3, 2, np.float32)]
DELTAS = [np.full(4, 0.5, np.float32), np.full(3, 0.25, np.float32)]


def play(learners: list[ScriptedLearner], first: int, last: int) -> None:
    for step in range(first, last + 1):
        for learner in learners:
            pull = learner.pull(step)
            learner.push(pull, DELTAS[pull.fragment], base=max(step - len(TWO.fragments), 0))


def block(instance: int, *versions: int | None) -> Extension:
    """Of a learner that holds these versions."""
    return BLOCK._replace(held=tuple(
        None if version is None else Held(instance, version) for version in versions))


def heard(learner: ScriptedLearner) -> list:
    """What a learner was sent, without tensors."""
    return [(m.fragment, m.version) if isinstance(m, messages.Bcast) else m for m in learner.seen]


# ----------------------------------------------------------------------------------- WELCOME
def test_welcome_is_the_first_thing_that_an_introduced_learner_hears(tmp_path):
    with ServerThread(tmp_path, total_steps=2, sync_interval_steps=24.0, min_round_interval_ms=0,
                      quorum_timeout_s=30) as server:
        learner = server.learner(0, TWO, extension=BLOCK)
        welcome = learner.next()
        lineage = server.server.persistence.lineage
        assert welcome == Welcome(1, lineage.instance, 0, 2, 1, 1, 24.0, RunState.WAITING,
                                  welcome.version, "", 0, (False, False))
        assert welcome.version.startswith("syncer ")
        learner.send_init(VALUES)
        play([learner], 1, 2)
        learner.finish()
        assert sum(isinstance(message, Welcome) for message in learner.seen) == 1
        learner.close()
        assert server.wait() == 0
    assert server.log.find("learner has introduced itself", client="a scripted one", kept=0)


def test_others_hear_nothing_of_it(tmp_path):
    with ServerThread(tmp_path, total_steps=1) as server:
        learner = server.learner(0, TWO)
        learner.send_init(VALUES)
        play([learner], 1, 1)
        learner.finish()
        learner.close()
        assert server.wait() == 0
    assert not [m for m in learner.seen if isinstance(m, Welcome | NoticeText)]


def test_a_refused_one_gets_its_error_alone(tmp_path):
    with ServerThread(tmp_path, total_steps=1) as server:
        learner = server.learner(0, TWO, extension=BLOCK)
        learner.send_init(VALUES)
        learner.pull(1)
        again = server.learner(0, TWO, extension=BLOCK, generation=learner.hello.generation)
        other = server.learner(0, layout_of((5,)), extension=BLOCK)
        assert "duplicate connection generation" in again.error()
        assert "session mismatch" in other.error()
        assert [type(m) for m in again.seen + other.seen] == [str, str]
        learner.push(messages.Pull(0, 1, 1), DELTAS[0])
        learner.finish()
        learner.close()
        assert server.wait() == 0


@pytest.mark.parametrize("quorum", [{"quorum": 2}, {"quorum_capacity": 0.5, "q_min": 1}])
def test_welcome_says_how_a_round_closes(tmp_path, quorum):
    with ServerThread(tmp_path, learners=3, **quorum) as server:
        learner = server.learner(1, TWO, extension=BLOCK)
        assert learner.next().quorum == quorum.get("quorum", 0)


# -------------------------------------------------------------------------------------- kept
def test_who_comes_back_is_sent_only_what_has_changed(tmp_path):
    with ServerThread(tmp_path, learners=2, total_steps=4, quorum=1, pipeline=1,
                      grace_ms=0) as server:
        stays = server.learner(0, TWO, extension=BLOCK)
        goes = server.learner(1, TWO, extension=BLOCK)
        instance = goes.next().instance
        stays.send_init(VALUES)
        goes.pull(1)
        goes.close()
        server.log.wait("learner disconnected", learner=1)
        play([stays], 1, 1)
        stays.pull(2)
        back = server.learner(1, TWO, extension=block(instance, 0, 0))
        welcome = back.next()
        assert (welcome.state, welcome.global_step) == (RunState.RUNNING, 1)
        assert welcome.kept == (False, True)
        back.pull(2)  # late join: fragment 1 counts as delivered at version 0
        assert heard(back) == [welcome, (0, 1), messages.Pull(1, 2, 1)]
        back.close()
        server.log.wait("learner disconnected", generation=shortened.short(back.hello.generation))
        whole = server.learner(1, TWO, extension=block(instance, 1, 0))
        assert whole.next().kept == (True, True)
        whole.pull(2)
        assert len(whole.seen) == 2
        # Of another process, or of a version that never was: nothing is believed.
        whole.close()
        server.log.wait("learner disconnected", generation=shortened.short(whole.hello.generation))
        liar = server.learner(1, TWO, extension=block(instance ^ 1, 1, 0))
        assert liar.next().kept == (False, False)
        liar.pull(2)
        assert sorted(heard(liar)[1:3]) == [(0, 1), (1, 0)]
        stays.push(messages.Pull(1, 2, 1), DELTAS[1], base=0)
        play([stays], 3, 4)
        # The final cut is whole, and nothing is kept of it.
        late = server.learner(1, TWO, extension=block(instance, 3, 4))
        stays.take_cut()
        liar.close()
        assert len(late.final) == 0
        late.take_cut()
        assert late.seen[0].state in (RunState.RUNNING, RunState.FINISHING)
        assert len(late.final) == len(stays.final) == 2
        server.close_learners()
        assert server.wait() == 0


def test_a_restarted_server_sends_nothing_that_was_saved(tmp_path):
    settings = dict(learners=2, total_steps=6, checkpoint_path=str(tmp_path / "c"),
                    checkpoint_every=1)
    with ServerThread(tmp_path, **settings) as server:
        pair = [server.learner(i, TWO, extension=BLOCK) for i in range(2)]
        first = pair[0].next()
        pair[0].send_init(VALUES)
        play(pair, 1, 3)
        server.log.wait("outer step", step=3)
        server.server.stop()
        server.wait()
    with ServerThread(tmp_path, **settings, resume=True, start_learners=2) as server:
        pair = [server.learner(i, TWO, extension=block(first.instance, 3, 2)) for i in range(2)]
        for learner in pair:
            welcome = learner.next()
            assert welcome.epoch == first.epoch + 1
            assert welcome.instance not in (0, first.instance)
            assert (welcome.global_step, welcome.state) == (3, RunState.WAITING)
            assert welcome.kept == (True, True)
            assert isinstance(learner.next(), messages.Pull)
        for learner in pair:
            learner.push(messages.Pull(1, 4, 1), DELTAS[1], base=2)
        play(pair, 5, 6)
        for learner in pair:
            learner.take_cut()
        server.close_learners()
        assert server.wait() == 0


# ----------------------------------------------------------------------------- data sockets
KEY = "the island's key"


def test_with_a_key_data_sockets_are_proved(tmp_path):
    with ServerThread(tmp_path, total_steps=2, island_hmac_key=KEY) as server:
        learner = ScriptedLearner(server.port, 0, TWO, extension=BLOCK, key=KEY.encode(),
                                  streams=2, connect=False)
        learner.dial()
        learner.until(Welcome)
        hello = messages.DataHello(0, learner.hello.generation, 0)
        for said in (encode.encode_data_hello(hello),
                     encode.encode_data_hello(hello, b"another key"),
                     encode.encode_data_hello(hello._replace(stream=1), KEY.encode())[:-1] + b"?"):
            sock = learner.open_socket()
            sock.sendall(said)
            learner.readers.pop(sock)
            assert b"unknown learner 0 generation" in received_all(sock)
        learner.dial_data(0)
        learner.dial_data(1)
        learner.send_init(VALUES)
        play([learner], 1, 2)
        learner.finish()
        learner.close()
        assert server.wait() == 0


def received_all(sock: socket.socket) -> bytes:
    """Until the other end closes."""
    found = b""
    while data := sock.recv(4096):
        found += data
    sock.close()
    return found


def test_a_recorded_hello_with_block_and_key_is_worth_nothing(tmp_path):
    """It is refused while its connection lives, and when that has gone."""
    with ServerThread(tmp_path, total_steps=1, island_hmac_key=KEY) as server:
        learner = ScriptedLearner(server.port, 0, TWO, extension=BLOCK, key=KEY.encode())
        recorded = encode.encode_hello(learner.hello, KEY.encode())
        learner.until(Welcome)

        def replayed() -> bytes:
            sock = socket.create_connection(("127.0.0.1", server.port))
            sock.sendall(recorded)
            return received_all(sock)

        assert b"duplicate connection generation" in replayed()
        learner.close()
        server.log.wait("learner disconnected")
        assert b"duplicate connection generation" in replayed()
        assert not server.log.find("learner connected", step=1)


def test_a_data_socket_from_elsewhere_is_told_of(tmp_path):
    with ServerThread(tmp_path, total_steps=1) as server:
        learner = server.learner(0, TWO, streams=1, connect=False)
        learner.dial()
        learner.source = "127.0.0.2"
        learner.dial_data(0)
        line = server.log.wait("a data socket comes from another address than its learner")
        assert line["peer"].startswith("127.0.0.2:")
        assert line["control_peer"].startswith("127.0.0.1:")


# ------------------------------------------------------------------------------------ NOTICE
def test_two_addresses_of_one_id_are_named_to_both(tmp_path):
    with ServerThread(tmp_path, learners=2, total_steps=1) as server:
        first = server.learner(0, TWO, extension=BLOCK)
        first.until(Welcome)
        second = server.learner(0, TWO, extension=BLOCK, source="127.0.0.2")
        notices = [learner.until(NoticeText) for learner in (first, second)]
        assert notices[0] == notices[1]
        assert notices[0].code == NoticeCode.CLAIMED_TWICE
        assert "127.0.0.1:" in notices[0].text
        assert "127.0.0.2:" in notices[0].text


def test_a_wait_is_said_to_those_who_have_introduced_themselves(tmp_path):
    with ServerThread(tmp_path, learners=2, total_steps=1) as server:
        learner = server.learner(0, TWO, extension=BLOCK)
        plain = server.learner(0, TWO)
        learner_too = server.learner(0, TWO, extension=BLOCK)
        notice = learner_too.until(NoticeText)
        assert notice.code == NoticeCode.LEARNERS
        assert "1" in notice.text
        assert not plain.seen
        assert learner is not None


# ------------------------------------------------------------------------------------ REPORT
def merges(path) -> list[dict]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [record for record in records if "fragment" in record]


def test_reports_end_the_record_of_the_next_merge(tmp_path):
    tape = tmp_path / "tape"
    with ServerThread(tmp_path, learners=2, total_steps=3, event_tape=str(tape)) as server:
        pair = [server.learner(i, TWO, extension=BLOCK) for i in range(2)]
        pair[0].send_init(VALUES)
        pulls = [learner.pull(1) for learner in pair]
        pair[1].send(encode_report(LearnerReport(2.5, lr=float("nan"), goodput=0.75)))
        pair[1].send(encode_report(LearnerReport(9.0)))  # too soon: dropped without a word
        for learner, pull in zip(pair, pulls, strict=True):
            learner.push(pull, DELTAS[0])
        play(pair, 2, 3)
        for learner in pair:
            learner.take_cut()
        server.close_learners()
        assert server.wait() == 0
    first, second, third = merges(tape)
    assert list(first)[-1] == "reports"
    assert first["reports"] == [
        {"id": 1, "loss": 2.5, "tokens_per_s": None, "lr": None, "goodput": 0.75}]
    assert "reports" not in second
    assert "reports" not in third


def test_malformed_reports_and_reports_of_others(tmp_path):
    with ServerThread(tmp_path, learners=2, total_steps=1) as server:
        learner = server.learner(0, TWO, extension=BLOCK)
        learner.send(encode.frame(17, b"\x01\x00\x01\x00\x09"))
        assert learner.error().startswith("invalid REPORT: ")
        plain = server.learner(0, TWO)
        plain.send(encode_report(LearnerReport(1.0)))
        assert "17" in plain.error()


# ------------------------------------------------------------------------------------- names
NAMED = Layout((FragmentLayout(AVG, (4,)), FragmentLayout(AVG, (3,))))
NAMES = (FragmentNames((("a.weight", (2, 2)),)), FragmentNames((("b.bias", (3,)),)))


def named(learner: int, server: ServerThread, names=NAMES) -> ScriptedLearner:
    return server.learner(learner, NAMED, fingerprint=fingerprint(NAMED, NAMES),
                          extension=BLOCK._replace(names=names))


def test_names_of_learner_0_go_into_the_checkpoint(tmp_path):
    model = tmp_path / "model.safetensors"
    settings = dict(learners=1, total_steps=4, checkpoint_path=str(tmp_path / "c"),
                    checkpoint_every=1, final_state=str(model))
    with ServerThread(tmp_path, **settings) as server:
        learner = named(0, server)
        learner.send_init(VALUES)
        play([learner], 1, 2)
        server.log.wait("outer step", step=2)
        server.server.stop()
        server.wait()
    text = (tmp_path / "c").read_bytes()[:4000].decode("utf-8", "replace")
    assert "a.weight" in text
    others = (NAMES[0], FragmentNames((("b.bias", (3, 1)),)))
    with ServerThread(tmp_path, **settings, resume=True) as server:
        learner = named(0, server, others)
        server.log.wait("other names of parameters are not used")
        play([learner], 3, 4)
        learner.finish()
        learner.close()
        assert server.wait() == 0
        assert server.server.persistence.names == tuple(n.tensors for n in NAMES)
    assert main(["checkpoint", "export", str(tmp_path / "c"), str(tmp_path / "exported")]) == 0
    assert model.read_bytes() == (tmp_path / "exported").read_bytes()
    found = load_file(model)
    assert {name: values.shape for name, values in found.items()} == {
        "a.weight": (2, 2), "b.bias": (3,)}
    assert found["a.weight"].tobytes() == learner.final[0].tobytes()
    assert found["b.bias"].tobytes() == learner.final[1].tobytes()


def test_a_model_file_of_a_run_without_names(tmp_path):
    model = tmp_path / "model.safetensors"
    with ServerThread(tmp_path, learners=1, total_steps=2, final_state=str(model)) as server:
        learner = server.learner(0, NAMED)
        learner.send_init(VALUES)
        play([learner], 1, 2)
        learner.finish()
        learner.close()
        assert server.wait() == 0
    found = load_file(model)
    assert {name: values.shape for name, values in found.items()} == {
        "fragments.0.params": (4,), "fragments.1.params": (3,)}
    assert found["fragments.0.params"].tobytes() == learner.final[0].tobytes()


# ----------------------------------------------------------------------------- strict rosters
def test_in_a_strict_run_nothing_overtakes_a_broadcast(tmp_path):
    """A learner of protocol 4 that answers a pull with what it has, over four data sockets."""
    steps = 2000  # without the rule it ends within some hundred
    with ServerThread(tmp_path, total_steps=steps, max_base_lag=0, quorum=1,
                      grace_ms=0) as server:
        learner = server.learner(0, layout_of((2000,), (2000,)), streams=4)
        learner.send_init([np.ones(2000, np.float32)] * 2)
        delta = np.full(2000, 0.001, np.float32)
        try:
            for step in range(1, steps + 1):
                learner.push(learner.pull(step), delta)
        except EndOfStream:
            pass
        else:
            learner.finish()
            learner.close()
        assert server.wait() == 0


# ------------------------------------------------------------------------------------ hostile
def test_whatever_a_block_is_the_run_goes_on(tmp_path):
    """Blocks with bytes changed, cut out or put in: each is answered with an ERROR or taken."""
    dice = random.Random(5)
    key = KEY.encode()
    extension = block(7, 3, None)._replace(names=NAMES, run=None)
    with ServerThread(tmp_path, learners=2, total_steps=2, island_hmac_key=KEY, quorum=1,
                      start_learners=1, grace_ms=0) as server:
        settings = dict(fingerprint=fingerprint(NAMED, NAMES), key=key)
        learner = server.learner(0, NAMED, extension=extension, **settings)
        learner.send_init(VALUES)
        pull = learner.pull(1)
        answers = []
        for generation in range(1, 301):
            hello = learner.hello._replace(generation=generation, learner=1)
            with ScriptedLearner(server.port, 1, NAMED, extension=extension, connect=False,
                                 **settings) as other:
                other.control = other.open_socket()
                other.send(mutated(encode.encode_hello(hello)[13:], dice, key))
                answers.append(other.next())
        assert server.log.find("connection refused")
        refused = [answer for answer in answers if isinstance(answer, str)]
        assert all(answer.startswith(("invalid HELLO", "session mismatch")) for answer in refused)
        assert 100 < len(refused) < 300
        learner.push(pull, DELTAS[0])
        play([learner], 2, 2)
        learner.take_cut()
        server.close_learners()
        server.server.stop()
        server.wait()
        assert not server.log.find("internal error")


def mutated(body: bytes, dice: random.Random, key: bytes) -> bytes:
    """A HELLO whose block is not as it was, with a MAC that fits."""
    body, begin = bytearray(body), len(body) - 100
    for _ in range(dice.randint(1, 3)):
        at = dice.randrange(begin, len(body))
        match dice.randrange(4):
            case 0:
                body[at] = dice.randrange(256)
            case 1:
                del body[at]
            case 2:
                body[at:at] = dice.randbytes(dice.randint(1, 5))
            case _:
                body[at] ^= 1 << dice.randrange(8)
    return encode.frame(1, bytes(body) + hello_mac(key, bytes(body)))
