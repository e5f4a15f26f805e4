"""What a checkpoint says besides its numbers, and which files say it; must not read or write.

A *cut* is the state between two commits: step, every fragment's version, parameters and optimizer
arrays, and the ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np

from syncer.checkpoint.lineage import UNTOLD, Lineage
from syncer.errors import CheckpointFormatError, CheckpointMismatch
from syncer.layout import Layout
from syncer.ranges import CHECKPOINT_FORMAT
from syncer.steps import version_at

FORMATS = CHECKPOINT_FORMAT.choices
SAFETENSORS, YETO_V3 = FORMATS
STATES = ((), ("momentum",), ("momentum", "accumulator"))
"""Optimizer arrays a file may hold, in file order."""
U32_MAX, U64_MAX = 2**32 - 1, 2**64 - 1
Ledger = Mapping[int, tuple[int, int, int]]
"""learner id -> (merges, steps, tokens)."""
NamedDims = tuple[tuple[str, tuple[int, ...]], ...]
"""The parameters of one fragment as the framework calls them: (name, dimensions) each."""


class Version(Protocol):
    """A published, immutable fragment version, as merge.fragments makes them."""

    version: int
    params: np.ndarray

    @property
    def state(self) -> Mapping[str, np.ndarray]: ...


class TensorPlace(NamedTuple):
    """One tensor of a checkpoint."""

    fragment: int
    array: str
    """"params", "momentum" or "accumulator"."""
    numel: int

    @property
    def name(self) -> str:
        """As in a safetensors file."""
        return f"fragments.{self.fragment}.{self.array}"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything but the tensors. What a format cannot hold is None.

    numels: f32 elements of each fragment. state: names of the optimizer's arrays.
    optimizer: {"name": …, constants by name}. Digests are 32 bytes. lineage: of the writer. names:
    of the parameters, one entry for each fragment.
    """

    step: int
    versions: tuple[int, ...]
    numels: tuple[int, ...]
    state: tuple[str, ...]
    ledger: Ledger
    fingerprint: bytes
    contract: bytes
    layout: Layout | None = None
    optimizer: Mapping[str, Any] | None = None
    profile_hash: bytes | None = None
    lineage: Lineage = UNTOLD
    names: tuple[NamedDims, ...] | None = None

    @property
    def tensors(self) -> Iterator[TensorPlace]:
        """Every tensor in the order of the file."""
        for fragment, numel in enumerate(self.numels):
            for array in ("params", *self.state):
                yield TensorPlace(fragment, array, numel)

    @property
    def state_bytes(self) -> int:
        """Bytes of all tensors."""
        return 4 * sum(self.numels) * (1 + len(self.state))


class Draft(NamedTuple):
    """The file of a cut in one format, before its tensors are in it."""

    size: int
    """Bytes of the whole file."""
    parts: Iterator[bytes | TensorPlace]
    """The file from front to back, once: literal bytes, and where a tensor stands."""
    fill: Callable[[Mapping[str, str]], bytes] | None = None
    """The first part again with these digests, 64 hexadecimal digits by tensor name, where it has
    zeros; None: the format has no place for them."""


class Parsed(NamedTuple):
    """What stands in a file besides the tensors."""

    facts: Facts
    places: dict[tuple[int, str], int]
    """Where each (fragment, array) begins in the file."""
    digests: dict[str, str]
    """Of each tensor by its name, 64 hexadecimal digits; empty if the format has none."""


@dataclass
class Cut:
    """A cut to be written: its facts and the versions they speak of.

    A writer that was told to let go empties `fragments` entry by entry as it goes.
    """

    facts: Facts
    fragments: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, step: int, fragments: Sequence[Version], ledger: Ledger, *, fingerprint: bytes,
           contract: bytes, layout: Layout | None, optimizer: Mapping[str, Any],
           profile_hash: bytes, lineage: Lineage = UNTOLD,
           names: tuple[NamedDims, ...] | None = None) -> Cut:
        """The cut of these versions, one per fragment in layout order."""
        facts = Facts(
            step=step, versions=tuple(v.version for v in fragments),
            numels=tuple(len(v.params) for v in fragments), state=tuple(fragments[0].state),
            ledger=dict(sorted(ledger.items())), fingerprint=fingerprint, contract=contract,
            layout=layout, optimizer=optimizer, profile_hash=profile_hash, lineage=lineage,
            names=names)
        check_contiguous(facts)
        return cls(facts, list(fragments))


def check_contiguous(facts: Facts) -> None:
    """Raises `CheckpointMismatch` unless the versions are those of one cut."""
    count = len(facts.versions)
    for fragment, found in enumerate(facts.versions):
        expected = version_at(facts.step, fragment, count)
        if found != expected:
            raise CheckpointMismatch(
                f"fragment {fragment} has version {found}, expected {expected}: after step "
                f"{facts.step} of {count} fragments every fragment is at its last merge")


def check_layout(facts: Facts) -> None:
    """Raises `CheckpointFormatError` when a layout in the file contradicts the tensor sizes."""
    if facts.layout is None:
        return
    numels = tuple(fragment.numel for fragment in facts.layout.fragments)
    if numels != facts.numels:
        raise CheckpointFormatError(
            f"layout: expected fragments of {_shown(facts.numels)} elements as the tensors have, "
            f"found {_shown(numels)}")


def check_names(facts: Facts) -> None:
    """Raises `CheckpointFormatError` when names in the file contradict the tensor sizes."""
    if facts.names is None:
        return
    sizes = tuple(sum(prod(dims) for _, dims in fragment) for fragment in facts.names)
    if sizes != facts.numels:
        raise CheckpointFormatError(
            f"names: expected fragments of {_shown(facts.numels)} elements as the tensors have, "
            f"found {_shown(sizes)}")


def _shown(values: Sequence[int]) -> str:
    words = [str(value) for value in values[:8]]
    return ", ".join(words) + (f", … ({len(values)} in all)" if len(values) > 8 else "")


def optimizer_facts(name: str, *, lr: float, momentum: float, dn_period: int,
                    dn_activation: float) -> dict[str, Any]:
    """The outer optimizer as a checkpoint states it: its name, and the constants it uses."""
    found: dict[str, Any] = {"name": name, "lr": lr}
    if name != "sgd":
        found["momentum"] = momentum
    if name == "delayed-nesterov":
        found |= {"dn_period": dn_period, "dn_activation": dn_activation}
    return found
