"""Cuts to write, and a file layer that fails where a test says. Not a test itself."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace
from typing import Any

import numpy as np

from syncer.checkpoint.atomic import WriteError
from syncer.checkpoint.facts import STATES, Cut, optimizer_facts
from syncer.checkpoint.files import Files
from syncer.checkpoint.writer import write_checkpoint
from syncer.layout import AVG, ISO, RDA, FragmentLayout, Layout
from syncer.steps import version_at

LAYOUT = Layout((FragmentLayout(AVG, (5, 2)), FragmentLayout(RDA, (13,)),
                 FragmentLayout(ISO, (6,), ((2, 3),))))
LARGE = Layout((FragmentLayout(0, (2_500_001,)), FragmentLayout(1, (3, 1_200_000))))
"""Several write calls per file."""
FINGERPRINT, CONTRACT, PROFILE = b"\x11" * 32, b"\x22" * 32, b"\x33" * 32
NAMES = {"sgd": STATES[0], "nesterov": STATES[1], "delayed-nesterov": STATES[2]}


def version_of(step: int, params: np.ndarray, state: dict[str, np.ndarray]) -> Any:
    """What a fragment version looks like to the store."""
    return SimpleNamespace(version=step, params=params, state=state)


def make_cut(step: int = 7, *, layout: Layout = LAYOUT, optimizer: str = "nesterov", seed: int = 0,
             ledger: dict | None = None) -> Cut:
    """The same cut for the same arguments."""
    rng = np.random.default_rng([seed, step])
    count = len(layout.fragments)
    versions = []
    for p, fragment in enumerate(layout.fragments):
        arrays = [rng.standard_normal(fragment.numel).astype(np.float32)
                  for _ in range(1 + len(NAMES[optimizer]))]
        versions.append(version_of(version_at(step, p, count), arrays[0],
                                   dict(zip(NAMES[optimizer], arrays[1:], strict=True))))
    facts = optimizer_facts(optimizer, lr=0.7, momentum=0.9, dn_period=4, dn_activation=0.0)
    ledger = {3: (1, 12, 4096), 0: (2, 24, 8192)} if ledger is None else ledger
    return Cut.of(step, versions, ledger, fingerprint=FINGERPRINT,
                  contract=CONTRACT, layout=layout, optimizer=facts, profile_hash=PROFILE)


def copy_of(cut: Cut) -> Cut:
    """The same cut with a list of its own, for a writer that lets go."""
    return Cut(cut.facts, list(cut.fragments))


class Faulty(Files):
    """The real file system, but call number `fail_at` (of all, or of those named) fails.

    `calls` lists what was called. times: how many calls in a row fail.
    """

    def __init__(self, fail_at: int | None = None, *, number: int = errno.EIO,
                 only: str | None = None, times: int = 1):
        self.fail_at, self.number, self.only, self.times = fail_at, number, only, times
        self.calls: list[str] = []
        self.counted = 0

    def _count(self, name: str) -> None:
        self.calls.append(name)
        if self.only is not None and name != self.only:
            return
        self.counted += 1
        if self.fail_at is not None and 0 <= self.counted - 1 - self.fail_at < self.times:
            raise OSError(self.number, os.strerror(self.number))


class Cached(Files):
    """Direct writes are cached ones: every file system takes them."""

    def create(self, path, *, direct=False):
        return super().create(path)

    def end_direct(self, descriptor):
        pass


def _faulty(name: str):
    def call(self, *given, **options):
        self._count(name)
        return getattr(Files, name)(self, *given, **options)
    return call


for _name in ("create", "write", "sync", "set_owner", "set_mode", "close", "link", "rename",
              "unlink", "sync_directory", "free_bytes", "attributes", "set_attribute"):
    setattr(Faulty, _name, _faulty(_name))


def failure_of(path, cut, files, **options) -> WriteError | None:
    try:
        write_checkpoint(path, cut, files=files, **options)
    except WriteError as error:
        return error
    return None


def names_in(directory) -> set[str]:
    return set(os.listdir(directory))
