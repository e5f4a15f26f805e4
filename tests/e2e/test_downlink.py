"""--downlink q4: who gets changes, that all have one anchor, and what goes back to the whole."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest

from syncer.learner import Learner
from syncer.protocol import DTYPE_BF16, DTYPE_F32, DTYPE_Q4, bulk_dtype
from syncer.wire.extended import Welcome
from syncer.wire.extension import Extension, Held
from syncer.wire.messages import Bcast, BcastChange
from tests.e2e.scripted import ScriptedLearner, ServerProcess, ServerThread, layout_of
from tests.e2e.scripted_reader import ScriptedReader
from tests.golden.change_reference import as_bulk, change_of, changed

TWO = layout_of((700,), (300, 1))
TAKES = Extension(changes=(DTYPE_Q4,))
VALUES = [np.linspace(-1, 1, 700, dtype=np.float32), np.full(301, 2, np.float32)]


def params_of(server: ServerThread, fragment: int) -> np.ndarray:
    return server.server.session.merging.store.current(fragment).params


def play(learners: list[ScriptedLearner], step: int) -> None:
    rng = np.random.default_rng(step)
    for learner in learners:
        pull = learner.pull(step)
        numel = TWO.fragments[pull.fragment].numel
        learner.push(pull, 0.1 * rng.standard_normal(numel).astype(np.float32))


def told(learner: ScriptedLearner) -> list[tuple]:
    """(type, version) of its broadcasts."""
    return [(type(m), m.version) for m in learner.seen if isinstance(m, Bcast | BcastChange)]


@pytest.mark.parametrize("dtype", [DTYPE_F32, DTYPE_BF16, DTYPE_Q4])
def test_all_learners_hold_one_anchor_however_it_came(tmp_path, dtype):
    """One takes changes, one has introduced itself and does not, one speaks protocol 4 alone."""
    bulk = bulk_dtype(dtype)
    with ServerThread(tmp_path, learners=3, quorum=3, total_steps=9, pipeline=1, outer_lr=0.3,
                      downlink="q4") as server:
        fleet = [server.learner(i, TWO, dtype=dtype, extension=said)
                 for i, said in enumerate((TAKES, Extension(), None))]
        fleet[0].send_init(VALUES)
        anchors = [as_bulk(values, bulk) for values in VALUES]
        for step in range(1, 9):
            play(fleet, step)
            for learner in fleet:
                learner.early.append(learner.pull(step + 1))
            fragment = (step - 1) % 2
            change = change_of(params_of(server, fragment), anchors[fragment])
            anchors[fragment] = changed(anchors[fragment], change, bulk)
            for learner in fleet:
                np.testing.assert_array_equal(learner.params[fragment], anchors[fragment])
        play(fleet, 9)
        for learner in fleet:
            learner.take_cut()
            for fragment in range(2):
                np.testing.assert_array_equal(learner.final[fragment], params_of(server, fragment))
        assert told(fleet[0]) == [(Bcast, 0), (Bcast, 0)] + [(BcastChange, v) for v in range(1, 9)]
        for other in fleet[1:]:
            assert told(other) == [(Bcast, v) for v in (0, 0, *range(1, 9))]
        assert [m.changes for learner in fleet for m in learner.seen if isinstance(m, Welcome)] == (
            [DTYPE_Q4, 0])
        server.close_learners()
        assert server.wait() == 0


def test_without_the_flag_nobody_hears_of_changes(tmp_path):
    with ServerThread(tmp_path, total_steps=2, pipeline=1) as server:
        learner = server.learner(0, TWO, extension=TAKES)
        learner.send_init(VALUES)
        play([learner], 1)
        play([learner], 2)
        learner.finish()
        assert {kind for kind, _ in told(learner)} == {Bcast}
        assert [m.changes for m in learner.seen if isinstance(m, Welcome)] == [0]
        learner.close()
        assert server.wait() == 0


def held(instance: int, *versions: int) -> Extension:
    return TAKES._replace(held=tuple(Held(instance, version) for version in versions))


def test_who_comes_back_goes_on_from_what_is_kept(tmp_path):
    with ServerThread(tmp_path, learners=2, quorum=1, grace_ms=0, total_steps=9, pipeline=1,
                      downlink="q4") as server:
        stays = server.learner(0, TWO, extension=TAKES)
        goes = server.learner(1, TWO, extension=TAKES)
        instance = goes.until(Welcome).instance
        stays.send_init(VALUES)
        goes.pull(1)
        goes.holding({0: 0, 1: 0})
        goes.close()
        server.log.wait("learner disconnected", learner=1)
        play([stays], 1)
        stays.early.append(stays.pull(2))
        back = server.learner(1, TWO, extension=held(instance, 0, 0))
        back.params, back.versions = dict(goes.params), dict(goes.versions)
        assert back.until(Welcome).kept == (False, True)
        back.early.append(back.pull(2))
        play([stays], 2)
        back.pull(3)
        stays.early.append(stays.pull(3))
        assert told(back) == [(Bcast, 1), (BcastChange, 2)]
        for fragment in range(2):
            np.testing.assert_array_equal(back.params[fragment], stays.params[fragment])
        for step in range(3, 10):
            play([stays], step)
        for learner in (stays, back):
            learner.take_cut()
        server.close_learners()
        assert server.wait() == 0


def test_a_reader_gets_the_parameters_themselves(tmp_path):
    with ServerThread(tmp_path, total_steps=9, pipeline=1, downlink="q4") as server:
        learner = server.learner(0, TWO, extension=TAKES)
        learner.send_init(VALUES)
        for step in range(1, 5):
            play([learner], step)
        learner.early.append(learner.pull(5))
        with ScriptedReader(server.port, DTYPE_F32) as reader:
            cut = reader.cut()
        assert cut.step == 4
        for fragment, tensor in enumerate(cut.tensors):
            assert bytes(tensor) == params_of(server, fragment).tobytes()
            assert (learner.params[fragment] != params_of(server, fragment)).any()


def three_steps(tmp_path, downlink):
    """The settings and the instance of a process that has saved and ended behind step 3."""
    settings = dict(learners=1, total_steps=6, pipeline=1, checkpoint_every=1,
                    checkpoint_path=str(tmp_path / "c"))
    with ServerThread(tmp_path, **settings, downlink=downlink) as server:
        learner = server.learner(0, TWO, extension=TAKES)
        instance = learner.until(Welcome).instance
        learner.send_init(VALUES)
        for step in (1, 2, 3):
            play([learner], step)
        learner.pull(4)
        server.server.stop()
        server.wait()
    return settings, instance


@pytest.mark.parametrize(("before", "after"), [("q4", "q4"), ("q4", "whole"), ("whole", "q4")])
def test_nothing_is_kept_of_another_process(tmp_path, before, after):
    """What a file has are parameters, and what such a process has sent is not them."""
    settings, instance = three_steps(tmp_path, before)
    beside = (tmp_path / "c.epoch").read_text()
    assert ("every=2\n" in beside and "clean" not in beside) == (before == "q4")
    with ServerThread(tmp_path, **settings, downlink=after, resume=True) as server:
        learner = server.learner(0, TWO, extension=held(instance, 3, 2))
        welcome = learner.until(Welcome)
        assert welcome.kept == (False, False)
        at = welcome.global_step
        assert (at > 3) == (before == "q4"), "other bits under the same number"
        play([learner], at + 1)
        learner.early.append(learner.pull(at + 2))
        assert told(learner) == [(Bcast, at - 1), (Bcast, at), (
            BcastChange if after == "q4" else Bcast, at + 1)]
        is_exact = [(learner.params[f] == params_of(server, f)).all() for f in range(2)]
        assert is_exact[(at + 1) % 2], "not merged since the resume"
        assert is_exact[at % 2] == (after == "whole")


@pytest.mark.parametrize(("lost", "options", "step"), [
    (False, {"renumber": 0}, 3), (True, {}, 1005), (False, {"renumber": 4}, 7)])
def test_a_file_says_that_its_versions_are_not_what_was_sent(tmp_path, lost, options, step):
    """Whoever follows without changes keeps nothing of it, whatever steps are called then."""
    settings, instance = three_steps(tmp_path, "q4")
    if lost:
        (tmp_path / "c.epoch").unlink()
    with ServerThread(tmp_path, **settings, **options, resume=True) as server:
        learner = server.learner(0, TWO, extension=held(instance, 3, 2))
        welcome = learner.until(Welcome)
        assert (welcome.global_step, welcome.kept) == (step, (False, False))
        assert [learner.until(Bcast).version for _ in range(2)] == [step - 1, step]
        for fragment in range(2):
            assert (learner.params[fragment] == params_of(server, fragment)).all()


def test_a_sync_costs_a_byte_a_parameter(tmp_path, stderr):
    """Real learners, q4 both ways; they hold the same anchors, and the final cut is exact."""
    numel, syncs = 300_000, 16
    with ExitStack() as stack:
        server = stack.enter_context(ServerProcess(
            tmp_path, "--downlink", "q4", "--quorum", "2", "--grace-ms", "60000",
            "--final-state", str(tmp_path / "final.bin"), learners=2, steps=2 + syncs))
        models = [{"w": np.random.default_rng(7).standard_normal(numel).astype(np.float32)}
                  for _ in range(2)]
        pair = [stack.enter_context(Learner(
            models[i], f"127.0.0.1:{server.port}", learner_id=i, dtype="q4", fragments=1,
            num_streams=2)) for i in range(2)]
        rng = np.random.default_rng(8)
        count = {}

        def train(is_there) -> None:
            """Both of them, until it is true of what a step of each has shown."""
            found = [False, False]
            while not all(found):
                for i, learner in enumerate(pair):
                    models[i]["w"] += (0.01 * rng.standard_normal(numel)).astype(np.float32)
                    found[i] = is_there(learner.step(1))

        for target in (1, 1 + syncs):
            train(lambda status, target=target: status.versions[0] >= target)
            count[target] = [learner.bytes_sent + learner.bytes_received for learner in pair]
        anchors = [learner._fragments[0].anchor.tobytes() for learner in pair]
        train(lambda status: status.finished)
        for learner in pair:
            learner.finish()
        assert server.wait() == 0
    assert anchors[0] == anchors[1]
    for i in range(2):
        per_parameter = (count[1 + syncs][i] - count[1][i]) / (syncs * numel)
        assert 0.9 < per_parameter <= 1.1
    final = np.frombuffer((tmp_path / "final.bin").read_bytes()[12:], "<f4")
    for model in models:
        assert model["w"].tobytes() == final.tobytes()
    assert stderr.getvalue().count("broadcasts come as 4-bit changes") == 2
