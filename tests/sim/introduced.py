"""Which run a simulated fleet is, who of it introduces himself, and what must be true of a WELCOME.

Must not send or receive anything.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from syncer.config import Config
from syncer.kernels import encode_bf16, sha256
from syncer.layout import Layout
from syncer.learner import RunLost, RunMismatch
from syncer.learner.introduction import RESEED, Introduction
from syncer.learner.session import Session
from syncer.wire.contracts import rl_contract, run_contract
from syncer.wire.extended import LearnerReport, Welcome
from syncer.wire.names import FragmentNames, Names, fingerprint
from tests.sim.anchors import introduction_class
from tests.sim.clock import World
from tests.sim.feedback import has_feedback
from tests.sim.link import Link

if TYPE_CHECKING:
    from tests.sim.fleet import Fleet


def names_of(layout: Layout, model: str) -> Names:
    """Each tensor by its place in a model, in the shape that it has on the wire."""
    return tuple(FragmentNames(tuple(
        (f"{model}.f{p}.t{i}", fragment.shapes[i] if fragment.shapes else (numel,))
        for i, numel in enumerate(fragment.numels))) for p, fragment in enumerate(layout.fragments))


class RunOfFleet:
    """The model, the contract and the name of a run; `name` is None if it has none."""

    def __init__(self, config: Config, layout: Layout, model: str):
        self.names = names_of(layout, model)
        self.fingerprint = fingerprint(layout, self.names)
        island = config.expected_island_contract
        self.base = self.fingerprint if island is None else rl_contract(self.fingerprint, island)
        self.name = config.run or [None, None, "blue"][config.total_steps % 3]
        self.contract = self.base if self.name is None else run_contract(self.base, self.name)

    def asked_by(self, config: Config) -> Config:
        """With the name as --run, or not: some servers have it of the first who says it, or of
        their file. With a pinned island, learners that only have the contract need it."""
        asked = self.base != self.fingerprint or sum(self.fingerprint) % 2
        return replace(config, run=self.name) if asked else config


def introduction_of(fleet: Fleet, learner: int, contract: bytes | None) -> Introduction | None:
    """What a learner says of itself; contract: that of one which is misconfigured."""
    if learner % 2 >= fleet.settings["introduced"]:
        return None
    of = fleet.identity
    names = of.names if learner == 0 else None
    if contract is not None:
        return Introduction(contract, names=names)
    return introduction_class(learner)(of.base, run=of.name, names=names, on_lost_run=RESEED,
                                       wants_fates=has_feedback(fleet, learner))


def check_welcome(fleet: Fleet, session: Session, welcome: Welcome, link: Link) -> None:
    """What a learner is said to have is what the run has, and was never sent, to the bit."""
    assert welcome.run in ("", fleet.identity.name or ""), f"welcome to {welcome.run}"
    for fragment, kept in enumerate(welcome.kept):
        seen = session.accepted[fragment]
        if not kept or seen is None:
            continue
        fleet.marks.add("a fragment was kept")
        version, digest = seen
        if welcome.instance in fleet.anchors.changing:
            held = session.held[fragment]
            fleet.anchors.check_kept(link, fragment, version, digest, held and held.instance)
            continue
        known = [cut[fragment][1] for cut in fleet.history.cuts.values()
                 if cut[fragment][0] == version]
        assert not known or digest == sha256(on_wire(known[-1], fleet.dtype)), (
            f"3.10: version {version} of fragment {fragment} is kept, and has other bits")


def on_wire(params: bytes, dtype: int) -> bytes:
    """Bytes of a broadcast."""
    if dtype == 1:
        return params
    values = np.frombuffer(params, np.float32)
    out = bytearray(2 * len(values))
    encode_bf16(values, out)
    return bytes(out)


def report_of(world: World) -> LearnerReport:
    """What a learner tells of its training, some of it no number."""
    dice = [None, 0.5, float("nan"), 1e300]
    return LearnerReport(*(world.rng.choice(dice) for _ in LearnerReport._fields))


def tells_of_another_run(fleet: Fleet, error: Exception) -> bool:
    """Whether a learner was refused since the server is none of the run that it was in."""
    if not isinstance(error, RunLost | RunMismatch):
        return False
    fleet.marks.add(f"told: {type(error).__name__}")
    return True
