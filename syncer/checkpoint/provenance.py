"""Who wrote a checkpoint, for which run, and what its parameters are called: metadata as strings.

Readers can do without any of it. Must not know the rest of a file, nor judge what it says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from syncer.checkpoint.facts import U64_MAX, Facts, NamedDims
from syncer.checkpoint.fields import (
    Malformed,
    compact,
    decimal,
    instance_of,
    json_value,
    shown,
    whole_numbers,
)
from syncer.checkpoint.lineage import ENTRIES_MAX, EPOCH_MAX, Entry, Lineage
from syncer.protocol import NO_TENSOR_NAME
from syncer.ranges import RUN

PROVENANCE = ("run", "epoch", "lineage", "renumbered", "names")
SURROGATE = re.compile("[\ud800-\udfff]")


def to_metadata(facts: Facts) -> dict[str, str]:
    """What a file says of it; what nobody has said is left out."""
    lineage = facts.lineage
    found = {"run": lineage.run} if lineage.run else {}
    if lineage.epoch:
        found["epoch"] = str(lineage.epoch)
    if lineage.instance:
        found["lineage"] = compact([[f"{instance:016x}", at]
                                    for instance, at in lineage.stored(facts.step)])
    if lineage.renumbered:
        found["renumbered"] = str(lineage.renumbered)
    if facts.names is not None:
        found["names"] = compact(facts.names)
    return found


def lineage_of(metadata: Mapping[str, str], step: int) -> Lineage:
    """Of the writer of a file of this step."""
    run = metadata.get("run", "")
    if "run" in metadata and not RUN.admits(run):
        raise Malformed(f"run: expected {RUN.words}, found {shown(run)}")
    epoch = decimal("epoch", metadata["epoch"]) if "epoch" in metadata else 0
    if "epoch" in metadata and not 1 <= epoch <= EPOCH_MAX:
        raise Malformed(f"epoch: expected 1 to {EPOCH_MAX}, found {epoch}")
    renumbered = decimal("renumbered", metadata.get("renumbered", "0"))
    if renumbered > step:
        raise Malformed(f"renumbered: expected at most the step, {step}, found {renumbered}")
    entries = _entries(metadata["lineage"], step) if "lineage" in metadata else ((0, step),)
    writer, held_to = entries[-1]
    return Lineage(run, epoch, writer, entries[:-1], renumbered, sends_changes=held_to is None)


def _entries(text: str, step: int) -> tuple[Entry, ...]:
    """The processes of the run, of which the last one wrote the file of this step."""
    found = []
    for entry in json_value(text, "lineage", list):
        if type(entry) is not list or len(entry) != 2:
            raise Malformed("lineage: expected pairs of an instance and a step or null")
        instance, at = entry
        if at is not None:
            whole_numbers([at], "lineage", step)
        found.append((instance_of("lineage", instance), at))
    if not 1 <= len(found) <= ENTRIES_MAX or found[-1][1] not in (step, None):
        raise Malformed(f"lineage: expected 1 to {ENTRIES_MAX} entries, the last one of step "
                         f"{step} or null, found {len(found)}")
    return tuple(found)


def names_of(metadata: Mapping[str, str]) -> tuple[NamedDims, ...] | None:
    """Names and dimensions by fragment; that they are those of its tensors is looked at later."""
    if "names" not in metadata:
        return None
    seen: set[str] = set()
    found = []
    for index, fragment in enumerate(json_value(metadata["names"], "names", list)):
        where = f"names of fragment {index}"
        if type(fragment) is not list:
            raise Malformed(f"{where}: expected a list of names and dimensions")
        tensors = []
        for tensor in fragment:
            if type(tensor) is not list or len(tensor) != 2 or type(tensor[1]) is not list:
                raise Malformed(f"{where}: expected pairs of a name and its dimensions")
            name, dims = tensor
            if (type(name) is not str or name in ("", NO_TENSOR_NAME) or name in seen
                    or SURROGATE.search(name)):
                raise Malformed(f"{where}: expected names in UTF-8 that differ, found "
                                 f"{shown(name)}")
            seen.add(name)
            tensors.append((name, _dims(dims, where)))
        found.append(tuple(tensors))
    return tuple(found)


def _dims(dims: Sequence[Any], where: str) -> tuple[int, ...]:
    """Dimensions whose product is a number of elements that a file can have, whatever they say."""
    product = 1
    for dim in whole_numbers(dims, where, U64_MAX):
        product *= dim
        if not 1 <= product <= U64_MAX:
            raise Malformed(f"{where}: expected dimensions of 1 to {U64_MAX} elements, found "
                             f"{shown(dim)}")
    return tuple(dims)


