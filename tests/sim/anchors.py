"""What simulated learners are sent of each version, and what must be true of it with --downlink q4.

Must not send or receive anything.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from syncer.config import Config
from syncer.learner.connection import Inbound
from syncer.learner.introduction import Introduction
from syncer.wire.extension import Extension, Held
from tests.sim.link import Link

if TYPE_CHECKING:
    from tests.sim.fleet import Fleet


class WholeIntroduction(Introduction):
    """Of a learner that knows no changes."""

    def extension(self, held: tuple[Held | None, ...]) -> Extension | None:
        said = super().extension(held)
        return said and said._replace(changes=())


def introduction_class(learner: int) -> type[Introduction]:
    return WholeIntroduction if learner == 2 else Introduction


def draw_downlink(drawn: dict[str, Any]) -> dict[str, Any]:
    """Whole in the format that has no place for what was renumbered."""
    whole = drawn["total_steps"] % 5 < 2 or drawn.get("checkpoint_format") == "yeto-v3"
    return {} if whole else {"downlink": "q4"}


def of_process(fleet: Fleet, config: Config) -> Config:
    """Every other process of some runs goes without."""
    if fleet.anchors.alternate and len(fleet.begun) % 2:
        return replace(config, downlink="whole")
    return config


class Anchors:
    """What each server process has sent as (fragment, version)."""

    def __init__(self, alternate: bool):
        self.alternate = alternate
        self.digests: dict[tuple[Any, int, int], bytes] = {}
        self.changing: set[int] = set()
        """Instances of processes with --downlink q4."""

    def check(self, link: Link, inbound: Inbound) -> None:
        """All learners of a process hold the same, whole or changed, to the bit."""
        version = inbound.message.version
        digest = self.digests.setdefault(
            (link.wires[0].listener, inbound.fragment, version), inbound.digest)
        assert digest == inbound.digest, (
            f"18.2: version {version} of fragment {inbound.fragment} has other bits elsewhere")

    def check_kept(self, link: Link, fragment: int, version: int, digest: bytes,
                   source: int | None) -> None:
        """What is kept is this process's, to the bit, and it has sent it: as something new to
        somebody, or the same bits again that a lost process had begun with."""
        sent = self.digests.get((link.wires[0].listener, fragment, version))
        assert sent == digest or (sent is None and source in self.changing and version == 0), (
            f"18.5: version {version} of fragment {fragment} is kept, and has other bits")
