"""Learners are killed at Poisson times, and the server once: what does that cost?

Four learners with steps of a second. Each is killed (SIGKILL) after so many seconds on the average
and is back 20 s later as a new process: what it had not pushed is lost, and its AdamW and the
learning rate begin anew, unless it goes on from a checkpoint of its own. The server is killed once
and started again 10 s later, from the checkpoint that it writes at every step. Kills fall at the
same times for every policy.
"""

from __future__ import annotations

import random
import sys
from typing import Any

from experiments import command
from experiments.model import SIZES
from experiments.tables import chaos as table
from experiments.world import Fleet, Setting
from tests.sim.clock import SECOND

__all__ = ["cells", "measure", "table"]

SIZE, RATE, LEARNERS, SECONDS, SEEDS = SIZES["small"], 8e-3, 4, 960, (1, 2, 3)
DOWN_S, SERVER_DOWN_S = 20.0, 10.0
MEAN_S = {"calm": 0.0, "a learner every 60 s": 240.0, "a learner every 20 s": 80.0}
"""Seconds that one learner lives on the average; calm: nobody is killed, the server neither."""
LESS = {"quorum": 3, "grace_ms": 1000}
POLICIES: dict[str, tuple[dict[str, Any], int]] = {
    "K = M": ({}, 0),
    "K = M - 1, 1 s of grace": (LESS, 0),
    "K = 1, 1 s of grace": (LESS | {"quorum": 1}, 0),
    "K = M - 1, own checkpoints": (LESS, 50),
}
"""Flags of the server, and own steps between two checkpoints of a learner's AdamW."""


def cells(quick: bool) -> list[dict[str, Any]]:
    policies, seconds, seeds = (list(POLICIES), SECONDS, SEEDS) if not quick else (
        list(POLICIES)[1:2], 160, (1,))
    return [{"policy": policy, "chaos": chaos, "seed": seed, "seconds": seconds}
            for policy in policies for chaos in MEAN_S for seed in seeds]


def kills(fleet: Fleet, chaos: str, seconds: float) -> list[float]:
    """Arms them; seconds of the server's."""
    if not MEAN_S[chaos]:
        return []
    dice = random.Random(f"{chaos} {fleet.setting.seed}")

    def after(at_s: float, call: Any, *arguments: Any) -> None:
        fleet.world.after(at_s * SECOND, call, *arguments)

    for island in fleet.islands:
        at_s = dice.expovariate(1 / MEAN_S[chaos])
        while at_s < seconds:
            after(at_s, island.kill, DOWN_S)
            at_s += DOWN_S + dice.expovariate(1 / MEAN_S[chaos])
    server_s = seconds * dice.uniform(0.4, 0.6)
    after(server_s, fleet.kill_server, SERVER_DOWN_S)
    return [server_s]


def measure(cell: dict[str, Any]) -> dict[str, Any]:
    seconds = cell["seconds"]
    rounds, keeps = POLICIES[cell["policy"]]
    fleet = Fleet(Setting(SIZE, cell["seed"], RATE, LEARNERS, 4 * seconds, saves=True, keeps=keeps,
                          rounds=rounds))
    fleet.play(lambda: fleet.began_ns is not None)
    servers = kills(fleet, cell["chaos"], seconds)
    fleet.play(lambda: fleet.seconds >= seconds)
    counted, told = fleet.ledger.entries(), fleet.server.scheduler.ledger
    assert counted == told, f"the ledger says {told}, and {counted} was merged"
    return cell | {
        "loss": fleet.loss, "kills": fleet.killed, "goodput": fleet.merged_steps / seconds,
        "commits": len(fleet.ledger.merges), "longest_gap_s": max(fleet.gaps_s(servers)),
        "usual_gap_s": sorted(fleet.gaps_s(servers))[len(fleet.ledger.merges) // 2]}


if __name__ == "__main__":
    sys.exit(command.main(sys.modules[__name__]))
