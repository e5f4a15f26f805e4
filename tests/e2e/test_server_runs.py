"""Which run a learner has come to: two fleets on one port, and what becomes of the stray one."""

from __future__ import annotations

import numpy as np
import pytest

from syncer.protocol import HASH_BYTES
from syncer.wire.contracts import run_contract
from syncer.wire.extended import Welcome
from syncer.wire.extension import Extension, RunClaim
from tests.e2e.checkpointed import answer, flags
from tests.e2e.scripted import ScriptedLearner, ServerProcess, ServerThread, layout_of

TWO = layout_of((4,), (3,))
PRINT = b"\x11" * HASH_BYTES
STEPS = 6


def of_run(name: str | None) -> dict:
    """Settings of a scripted learner of a run."""
    if name is None:
        return {"fingerprint": PRINT}
    return {"fingerprint": PRINT, "contract": run_contract(PRINT, name),
            "extension": Extension(run=RunClaim(PRINT, name))}


def values_of(seed: int) -> list[np.ndarray]:
    dice = np.random.default_rng(seed)
    return [dice.normal(size=fragment.numel).astype(np.float32) for fragment in TWO.fragments]


def trained(tmp_path, strays: tuple[str | None, ...]) -> tuple[dict[int, bytes], list[str]]:
    """The final bits of two learners of run blue, and what learners of other runs are told that
    dial all the while, with the ids and the layout of these."""
    told = []
    with ServerThread(tmp_path, learners=2, total_steps=STEPS) as server:
        pair = [server.learner(i, TWO, **of_run("blue")) for i in range(2)]
        pair[0].send_init(values_of(1))
        for step in range(1, STEPS + 1):
            for learner in pair:
                for stray in strays:
                    with ScriptedLearner(server.port, learner.learner, TWO, **of_run(stray)) as one:
                        told.append(one.error())
                pull = learner.pull(step)
                learner.push(pull, values_of(10 * step + learner.learner)[pull.fragment],
                             base=max(0, step - 2))
        for learner in pair:
            learner.take_cut()
        server.close_learners()
        assert server.wait() == 0
    finals = [{p: found.tobytes() for p, found in learner.final.items()} for learner in pair]
    assert finals[0] == finals[1]
    return finals[0], told


def test_two_fleets_with_the_same_ids_on_one_port(tmp_path):
    calm, _ = trained(tmp_path, ())
    disturbed, told = trained(tmp_path, ("red", None))
    assert disturbed == calm
    expected = run_contract(PRINT, "blue").hex()
    assert told == [
        text.replace("RED", run_contract(PRINT, "red").hex()).replace("NONE", PRINT.hex())
        for text in told_of(expected)] * (2 * STEPS)


def told_of(expected: str) -> list[str]:
    common = f"fingerprint={PRINT.hex()} dtype=f32 fragments=2 elements=7 profile=none"
    ours = f"session mismatch: expected session_contract_hash={expected} (run blue) {common}; got"
    return [f"{ours} session_contract_hash=RED (run red) {common}",
            f"{ours} session_contract_hash=NONE (no run) {common}"]


def test_the_name_of_the_first_that_says_it_is_that_of_the_run(tmp_path):
    """Also when somebody fixed the session who was only given the contract."""
    with ServerThread(tmp_path, learners=2, total_steps=1) as server:
        given = of_run("blue") | {"extension": None}
        server.learner(0, TWO, **given)
        server.log.wait("learner connected")
        with ScriptedLearner(server.port, 1, TWO, **of_run("red")) as stray:
            assert "(run blue)" not in stray.error()
        assert server.learner(1, TWO, **of_run("blue")).until(Welcome).run == "blue"
        with ScriptedLearner(server.port, 1, TWO, **of_run("red")) as stray:
            assert f"{run_contract(PRINT, 'blue').hex()} (run blue) " in stray.error()


def test_a_learner_of_another_run_does_not_end_a_strict_one(tmp_path, undisturbed):
    """It has lost its way; that says nothing about the file that was resumed."""
    path = tmp_path / "c"
    path.write_bytes(undisturbed[4])
    with ServerProcess(tmp_path, *flags(path, 1, "--resume", "--max-base-lag", "0"),
                       steps=5) as server:
        with ScriptedLearner(server.port, 0, **of_run("red")) as stray:
            assert "(no run)" in (text := stray.error())
            assert "(run red)" in text
        with ScriptedLearner(server.port, 0) as learner:
            answer(learner, learner.pull(5))
            learner.finish()
            learner.close()
        assert server.wait() == 0


# -------------------------------------------------------------------------------------- --run
def test_with_run_the_name_is_asked_of_everybody(tmp_path):
    """Also of the first one, and of learners that are only given the contract."""
    with ServerThread(tmp_path, learners=2, total_steps=1, run="blue") as server:
        for stray, named in (("red", " (run red)"), (None, " (no run)")):
            with ScriptedLearner(server.port, 0, TWO, **of_run(stray)) as other:
                contract = other.hello.contract.hex()
                assert other.error() == (
                    "session mismatch: expected session_contract_hash="
                    f"{run_contract(PRINT, 'blue').hex()} (run blue), got session_contract_hash="
                    f"{contract}{named}")
        assert server.learner(0, TWO, **of_run("blue")).until(Welcome).run == "blue"
        server.learner(1, TWO, **of_run("blue") | {"extension": None})
        server.log.wait("learner connected", learner=1)


def saved(tmp_path, **settings) -> str:
    """A checkpoint of step 2 of a run of one learner."""
    path = str(tmp_path / "c")
    with ServerThread(tmp_path, total_steps=4, checkpoint_path=path, checkpoint_every=1,
                      **settings) as server:
        learner = server.learner(0, TWO, **of_run("blue"))
        learner.send_init(values_of(1))
        for step in (1, 2):
            learner.push(learner.pull(step), values_of(step)[step - 1], base=0)
        server.log.wait("outer step", step=2)
        server.server.stop()
        server.wait()
    return path


@pytest.mark.parametrize(("flags", "text"), [
    (("--run", "red"), "run: expected red, which --run asks for, found blue"),
    (("--expected-island-contract", "ab" * 32), "which --expected-island-contract asks for"),
    (("--run", "blue", "--expected-island-contract", "ab" * 32),
     "which --run and --expected-island-contract ask for"),
])
def test_a_file_of_another_run_is_not_resumed(tmp_path, flags, text):
    path = saved(tmp_path)
    with ServerProcess(tmp_path, "--checkpoint-path", path, "--resume", *flags, steps=4,
                       wait=False) as server:
        assert server.wait() == 4
        assert text in server.log.text()


def test_a_file_without_a_name_is_resumed_by_its_contract(tmp_path):
    """As the other format has it, and all older files."""
    path = saved(tmp_path, checkpoint_format="yeto-v3")
    common = ("--checkpoint-path", path, "--resume", "--checkpoint-format", "yeto-v3")
    with ServerProcess(tmp_path, *common, "--run", "red", steps=4, wait=False) as server:
        assert server.wait() == 4
        assert "session contract: expected" in server.log.text()
    with (
        ServerProcess(tmp_path, *common, "--run", "blue", steps=4) as server,
        ScriptedLearner(server.port, 0, TWO, **of_run("blue")) as learner,
    ):
        assert learner.until(Welcome).run == "blue"


def test_a_resumed_run_keeps_its_name(tmp_path):
    path = saved(tmp_path)
    with (
        ServerProcess(tmp_path, "--checkpoint-path", path, "--resume", steps=4) as server,
        ScriptedLearner(server.port, 0, TWO, **of_run("red")) as stray,
        ScriptedLearner(server.port, 0, TWO, **of_run("blue")) as learner,
    ):
        assert "(run blue) " in (text := stray.error())
        assert "(run red) " in text
        assert learner.until(Welcome).run == "blue"
