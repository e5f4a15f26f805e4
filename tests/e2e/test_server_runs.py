"""Which run a learner has come to: two fleets on one port, and what becomes of the stray one."""

from __future__ import annotations

import numpy as np

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
