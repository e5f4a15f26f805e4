"""What this machine lets one process have: cores, memory and its nodes, also inside of a container.

Must not decide what they are used for. Files that are not there, or not as expected, limit nothing.
"""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path("/")


class Node(NamedTuple):
    """A part of the memory, and the cores that are near it."""

    number: int
    cores: frozenset[int]


def memory_nodes(root: Path = ROOT) -> list[Node]:
    """The nodes whose memory this process may have, with those of their cores that it may use."""
    folder = root / "sys/devices/system/node"
    numbers = _numbers_of(_text(folder / "has_memory")) or _numbers_of(_text(folder / "online"))
    for line in _text(root / "proc/self/status").splitlines():
        name, _, allowed = line.partition(":")
        if name == "Mems_allowed_list":
            numbers &= _numbers_of(allowed)
    mine = os.sched_getaffinity(0)
    return [Node(number, frozenset(
        _numbers_of(_text(folder / f"node{number}" / "cpulist")) & mine))
        for number in sorted(numbers)]


def cores(root: Path = ROOT) -> int:
    """Cores that this process may keep busy: its affinity, or the CPU quota of its cgroups."""
    allowed = len(os.sched_getaffinity(0))
    for quota in _cpu_quotas(root):
        allowed = min(allowed, max(1, math.ceil(quota)))
    return allowed


def memory_bytes(root: Path = ROOT) -> int:
    """Bytes that this process can have at most: of the machine, its cgroups and its own limit."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        found.append(limit)
    for folder in _cgroups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            found += _numbers(folder / name)[:1]
    return min(found)


def _cpu_quotas(root: Path) -> Iterator[float]:
    for folder in _cgroups(root, "cpu"):
        unified = _numbers(folder / "cpu.max")  # "max 100000" without a quota
        if len(unified) == 2 and unified[1] > 0:
            yield unified[0] / unified[1]
        quota, period = (_numbers(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        if quota and period and quota[0] > 0 and period[0] > 0:  # -1 without a quota
            yield quota[0] / period[0]


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the cgroups of this process, from its own up: of version 2, then of version 1.

    In a container the path may be that of the host, while the folder that is mounted is its own.
    """
    mounted = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            top = mounted
        elif controller in controllers.split(","):
            top = mounted / controller
        else:
            continue
        inner = PurePosixPath(path.lstrip("/"))
        yield top / inner
        for parent in inner.parents:
            yield top / parent


def _numbers_of(ranges: str) -> set[int]:
    """`0-3,8` as the kernel writes sets; none if it is something else."""
    found: set[int] = set()
    try:
        for part in ranges.strip().split(","):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    except ValueError:
        return set()
    return found


def _numbers(path: Path) -> list[int]:
    """The whole numbers of a file, none if one of its words is something else."""
    try:
        return [int(word) for word in _text(path).split()]
    except ValueError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
