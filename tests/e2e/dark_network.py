"""Two hosts and a router between them that may stop forwarding: nobody gets an error, only silence.

Three network namespaces of Linux, which take root; nothing outside them is touched. Ends with the
processes that hold the namespaces.
"""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

NEAR, FAR = "10.77.1.2", "10.77.2.2"
ROUTER = {"near": "10.77.1.1", "far": "10.77.2.1"}


def possible() -> bool:
    """Whether this system lets us make such a network."""
    try:
        with DarkNetwork():
            return True
    except (OSError, subprocess.SubprocessError):
        return False


class DarkNetwork:
    """`near` and `far` are prefixes of commands that run on the one and the other host."""

    def __init__(self) -> None:
        self._holders: list[subprocess.Popen[bytes]] = []
        try:
            near, far, router = (self._namespace() for _ in range(3))
            self._router = self._inside(router)
            self.near, self.far = self._inside(near), self._inside(far)
            for name, pid, address in (("near", near, NEAR), ("far", far, FAR)):
                self._cable(name, pid, router, address)
            self.light()
        except BaseException:
            self.close()
            raise

    def _namespace(self) -> int:
        """The process that holds a new network namespace, once it does."""
        holder = subprocess.Popen(["unshare", "-n", "sh", "-c", "echo; exec sleep 3600"],
                                  stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self._holders.append(holder)
        assert holder.stdout is not None
        if not holder.stdout.readline():
            raise OSError("no network namespace can be made here")
        return holder.pid

    @staticmethod
    def _inside(pid: int) -> list[str]:
        return ["nsenter", "-t", str(pid), "-n"]

    def _cable(self, name: str, pid: int, router: int, address: str) -> None:
        run([*self._router, "ip", "link", "add", name, "type", "veth", "peer", "name", "up0",
             "netns", str(pid)])
        run([*self._router, "ip", "address", "add", f"{ROUTER[name]}/24", "dev", name])
        run([*self._router, "ip", "link", "set", name, "up"])
        host = self._inside(pid)
        run([*host, "ip", "address", "add", f"{address}/24", "dev", "up0"])
        for device in ("lo", "up0"):
            run([*host, "ip", "link", "set", device, "up"])
        run([*host, "ip", "route", "add", "default", "via", ROUTER[name]])

    def darken(self) -> None:
        """Packets between the hosts are dropped, both ways, without a word."""
        self._forward(0)

    def light(self) -> None:
        self._forward(1)

    def forget(self, port: int) -> None:
        """The router forgets the flow of a port of a host: its packets are dropped, both ways."""
        for end in ("sport", "dport"):
            run([*self._router, "ip", "rule", "add", "ipproto", "tcp", end, str(port), "blackhole"])

    def slow_down(self, rate: str) -> None:
        """Both directions get so much; it takes effect for what is queued from now on."""
        for name in ROUTER:
            run([*self._router, "tc", "qdisc", "add", "dev", name, "root", "tbf", "rate", rate,
                 "burst", "64k", "latency", "50ms"])

    def _forward(self, on: int) -> None:
        run([*self._router, "sh", "-c", f"echo {on} > /proc/sys/net/ipv4/ip_forward"])

    def close(self) -> None:
        for holder in self._holders:
            holder.kill()
            holder.wait()
            with contextlib.suppress(AttributeError):
                holder.stdout.close()

    def __enter__(self) -> DarkNetwork:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)


def sending(host: list[str], least_bytes: int) -> list[tuple[int, int]]:
    """(local, remote) ports of connections on a host with so much that is not acknowledged."""
    found = subprocess.run([*host, "ss", "-Htn", "state", "established"], check=True, timeout=30,
                           capture_output=True, text=True).stdout
    rows = [line.split() for line in found.splitlines()]
    return [(int(row[2].rpartition(":")[2]), int(row[3].rpartition(":")[2]))
            for row in rows if int(row[1]) >= least_bytes]


def reader(path: Path):
    """A function that gives the lines of a file that somebody else is writing."""
    return lambda: path.read_text(encoding="utf-8", errors="replace").splitlines()
