"""Cores and memory that a process may have, from files as containers and hosts have them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from syncer.machine import cores, memory_bytes

ALL = len(os.sched_getaffinity(0))


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(("files", "expected"), [
    ({}, ALL),
    ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, ALL),
    ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "100000 100000\n"}, 1),
    ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "20000 100000\n"}, 1),
    ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "9999900000 100000\n"}, ALL),
    ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "50000 100000\n",
      "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, 1),
    ({"proc/self/cgroup": "0::/not/in/here\n", "sys/fs/cgroup/cpu.max": "1000 100000\n"}, 1),
    ({"proc/self/cgroup": "4:cpuacct,cpu:/x\n", "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "50000\n",
      "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n"}, 1),
    ({"proc/self/cgroup": "4:cpu:/x\n", "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "-1\n",
      "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n"}, ALL),
    ({"proc/self/cgroup": "rubbish\n0::/\n", "sys/fs/cgroup/cpu.max": "1 0\n"}, ALL),
])
def test_cores_follow_the_quota_of_the_cgroup(tmp_path, files, expected):
    assert cores(tree(tmp_path, files)) == expected


def test_a_quota_of_part_of_a_core_is_rounded_up(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)))
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "210000 100000\n"}
    assert cores(tree(tmp_path, files)) == 3


@pytest.mark.parametrize("name", ["cgroup/memory.max", "cgroup/memory/memory.limit_in_bytes"])
def test_memory_is_that_of_the_cgroup(tmp_path, name):
    line = "0::/\n" if name.endswith("max") else "9:memory:/\n"
    files = {"proc/self/cgroup": line, f"sys/fs/{name}": "123456\n"}
    assert memory_bytes(tree(tmp_path, files)) == 123456


def test_memory_without_a_limit_is_that_of_the_machine(tmp_path):
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}
    assert memory_bytes(tree(tmp_path, files)) == memory_bytes(tmp_path / "nothing") > 2**20
