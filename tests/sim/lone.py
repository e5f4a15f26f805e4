"""A simulated loop without a server around it, for the parts of one that only need its time.

Must not know what they are.
"""

from __future__ import annotations

from tests.sim.clock import World
from tests.sim.network import Network
from tests.sim.system import SimLoop


def lone_loop() -> SimLoop:
    """One on which nothing is registered."""
    world = World(1)
    return SimLoop(world, Network(world, 1, 1, False))


def pass_time(loop: SimLoop, ns: int) -> None:
    """So much later, what was due until then is done."""
    loop.world.now_ns += ns
    loop.turn([])
