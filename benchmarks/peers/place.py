"""Where participants run: all on one loopback, or each on a host of its own behind one switch.

Every participant has one link of the given rate. The hub, which has the server or coordinator of
those peers that have one, has a link as fast as those of all participants together: it is where a
fleet would put its fastest port, and what it must carry is said with the figures.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import NamedTuple

from benchmarks.lab.network import Host, cable


class Seat(NamedTuple):
    host: Host
    address: str
    interface: str


class Place:
    """Seats for so many participants, and one for the hub."""

    def __init__(self, stack: ExitStack, participants: int, bits_per_s: float | None):
        self.stack = stack
        if bits_per_s is None:
            alone = Seat(self._host(), "127.0.0.1", "lo")
            self.hub, self.seats = alone, [alone] * participants
            return
        self.switch = self._host()
        self.switch.run("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        self.hub = self._seat(1, participants * bits_per_s)
        self.seats = [self._seat(2 + number, bits_per_s) for number in range(participants)]

    def _host(self) -> Host:
        host = Host()
        self.stack.callback(host.close)
        return host

    def _seat(self, number: int, bits_per_s: float) -> Seat:
        host = self._host()
        switch, own = cable(number, self.switch, host, bits_per_s)
        host.run("ip", "route", "add", "default", "via", switch)
        return Seat(host, own, f"c{number}")
