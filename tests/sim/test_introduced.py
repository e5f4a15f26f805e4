"""Simulated fleets that introduce themselves: two of them on one port."""

from __future__ import annotations

from syncer.wire.contracts import run_contract
from syncer.wire.encode import encode_hello
from syncer.wire.extension import Extension, RunClaim
from tests.sim.clock import MS, SECOND
from tests.sim.fleet import Fleet
from tests.sim.strangers import Stranger
from tests.toy_driver import toy_config


def test_a_second_fleet_with_the_same_ids_changes_nothing_for_the_first():
    """Every HELLO of it is refused with both names; nobody of the first one is superseded."""
    fleet = Fleet(5, config=toy_config(learners=3, quorum=3, total_steps=14, run="blue",
                                       log_format="json"),
                  faults=[], settings={"introduced": 2, "eager": 0, "misconfigured": 0,
                                       "strangers": 1024, "stranger_bytes": 1 << 28,
                                       "impatience": 0, "tight": False})
    base, strays = fleet.identity.base, []

    def dial() -> None:
        hello = fleet.hello(len(strays) % 3, fleet.world.rng.getrandbits(64) | 1)
        hello = hello._replace(contract=run_contract(base, "red"), num_streams=0,
                               extension=Extension(run=RunClaim(base, "red")))
        strays.append(Stranger(fleet, encode_hello(hello, fleet.key), 5 * SECOND))
        if not fleet.over():
            fleet.world.after(50 * MS, dial)

    fleet.world.after(50 * MS, dial)
    fleet.play()
    fleet.check()
    answers = [bytes(stray.answer) for stray in strays if stray.answer]
    assert len(answers) > 20
    assert all(b"(run blue)" in answer and b"(run red)" in answer for answer in answers)
    said = b"".join(fleet.lines.lines)
    assert b"while its older connection is alive" not in said
    assert said.count(b"learner disconnected") <= 3  # of the end
