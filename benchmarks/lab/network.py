"""Hosts and cables that exist for one process alone: network namespaces, veth, a token bucket each.

Takes Linux, ip and tc, and root or user namespaces. `apart` runs the lab in a child that is the
first process of its own process namespace and dies with its parent: whatever ends either of them,
a signal that cannot be caught included, the kernel ends every process in there, and with the last
of them the namespaces and their links are gone. Nothing of the machine's own network is touched.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True)
OWN_NETWORK = "/proc/thread-self/ns/net"
BURST = {False: "64kb", True: "256kb"}
"""Of the token bucket, below and from 500 Mb/s: some milliseconds, and never less than a packet."""


class NotPermitted(Exception):
    """This machine does not let us have such a network; one sentence says why."""


def die_with_parent(number: int) -> None:
    """This process gets the signal when the one that started it ends, however it does."""
    _call("prctl", PR_SET_PDEATHSIG, number)


def _call(name: str, *given: int) -> None:
    if getattr(LIBC, name)(*given) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Puts this process, and for process ids its children, into new namespaces."""
    _call("unshare", flags)


def _separate() -> None:
    """A network of our own, as root of the machine or else of a user namespace."""
    user, group = os.geteuid(), os.getegid()
    try:
        with suppress(PermissionError):
            return unshare(CLONE_NEWPID | CLONE_NEWNET)
        unshare(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET)
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"),
                           ("gid_map", f"0 {group} 1")):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
    except (OSError, AttributeError) as error:
        raise NotPermitted("the lab needs network namespaces, which take root or user namespaces "
                           f"on Linux: {error}") from None


def apart(body: Callable[[], int]) -> int:
    """What `body` returns, run in a child with a network and processes of its own.

    Raises `NotPermitted`. For a process without threads.
    """
    _separate()
    alive, hold = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(hold)
        die_with_parent(signal.SIGKILL)
        # The parent says that it was still there when the line above was done.
        status = 1
        try:
            status = body() if os.read(alive, 1) else 1
        except KeyboardInterrupt:
            pass  # the parent says so
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.write(hold, b"\0")
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except KeyboardInterrupt:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return 130


class Host:
    """One machine of the lab: a network namespace that commands run in."""

    def __init__(self) -> None:
        home = os.open(OWN_NETWORK, os.O_RDONLY | os.O_CLOEXEC)
        try:
            unshare(CLONE_NEWNET)
            self.network = os.open(OWN_NETWORK, os.O_RDONLY | os.O_CLOEXEC)
            _call("setns", home, CLONE_NEWNET)
        finally:
            os.close(home)
        self.run("ip", "link", "set", "lo", "up")

    def _enter(self) -> None:
        _call("setns", self.network, CLONE_NEWNET)

    def run(self, *command: str, fds: tuple[int, ...] = ()) -> None:
        """A command to its end. Raises `NotPermitted` with what it said if it fails."""
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, pass_fds=fds,
                           preexec_fn=self._enter)
        except FileNotFoundError:
            raise NotPermitted(f"the lab needs {command[0]}, of iproute2") from None
        except subprocess.CalledProcessError as error:
            said = (error.stderr or error.stdout).strip().splitlines() or ["nothing said"]
            raise NotPermitted(f"the lab cannot have its network: {' '.join(command)}: {said[0]}"
                               ) from None

    def start(self, *command: str, **options: Any) -> subprocess.Popen[str]:
        """A command that runs beside us."""
        return subprocess.Popen(command, text=True, preexec_fn=self._enter,  # noqa: PLW1509
                                **options)  # nothing in the lab has threads

    def close(self) -> None:
        """Without it and its processes the namespace is gone."""
        os.close(self.network)


def cable(number: int, near: Host, far: Host, bits_per_s: float) -> tuple[str, str]:
    """Addresses of both ends of a link between two hosts, so fast in either direction."""
    addresses = f"10.77.{number}.1", f"10.77.{number}.2"
    name = f"c{number}"
    near.run("ip", "link", "add", "name", name, "type", "veth", "peer", "name", name, "netns",
             f"/proc/self/fd/{far.network}", fds=(far.network,))
    for host, address in zip((near, far), addresses, strict=True):
        host.run("ip", "address", "add", f"{address}/24", "dev", name)
        host.run("ip", "link", "set", name, "up")
        host.run("tc", "qdisc", "add", "dev", name, "root", "tbf", "rate", f"{bits_per_s:.0f}bit",
                 "burst", BURST[bits_per_s >= 5e8], "latency", "50ms")
    return addresses
