"""From parameter names and shapes to fragments: `build_layout`, its fingerprint, its JSON file.

Every learner of a session must come to the same result from the same names, so nothing here may
depend on dictionary order, locale, hash seeds or the values of a tensor; no NumPy, no I/O but
`save_layout` and `load_layout`.
"""

from __future__ import annotations

import heapq
import json
import math
import operator
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, SupportsIndex

from syncer.errors import ConfigError
from syncer.layout import AVG, ISO, MERGE_MODES, RDA, FragmentLayout, Layout
from syncer.protocol import NO_TENSOR_NAME
from syncer.wire.names import FragmentNames, Names, fingerprint

AVG_NAME_PARTS = ("embed", "wte", "wpe", "lm_head", "shared.weight")
WRAPPER_PREFIXES = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
PATTERNS = ("binpack", "strided")
MATRIX_MERGES = {"rda": RDA, "iso": ISO}
FILE_FORMAT = "syncer-layout-v1"

_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
_U64_MAX = 2**64 - 1


class NamedTensor(NamedTuple):
    """One parameter: its canonical name and its full shape in the training framework."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


class NamedFragment(NamedTuple):
    """One fragment: a merge mode (`AVG`, `RDA`, `ISO`) and its tensors in wire order."""

    merge_mode: int
    tensors: tuple[NamedTensor, ...]
    identity: bool = False
    """Whether the fingerprint covers the full shapes ("identity shapes") of these tensors."""

    @property
    def numel(self) -> int:
        """Elements of the whole fragment."""
        return sum(tensor.numel for tensor in self.tensors)


class NamedLayout(NamedTuple):
    """All fragments of a model with their names, in HELLO order."""

    fragments: tuple[NamedFragment, ...]

    @property
    def wire(self) -> Layout:
        """The same layout as it travels: element counts and iso shapes, no names."""
        return Layout(tuple(
            FragmentLayout(
                fragment.merge_mode,
                tuple(tensor.numel for tensor in fragment.tensors),
                tuple(_matrix(tensor) for tensor in fragment.tensors)
                if fragment.merge_mode == ISO else (),
            )
            for fragment in self.fragments
        ))

    @property
    def names(self) -> Names:
        """Names and full shapes, as learner 0 sends them."""
        return tuple(
            FragmentNames(tuple((tensor.name, tensor.shape) for tensor in fragment.tensors),
                          fragment.identity)
            for fragment in self.fragments)

    @property
    def numel(self) -> int:
        """Elements of the whole model."""
        return sum(fragment.numel for fragment in self.fragments)


def canonical_name(name: str) -> str:
    """`name` without the parts that sharding and checkpointing wrappers add.

    Sharded and unsharded learners must agree on names, or their fingerprints differ.
    """
    for prefix in WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


def build_layout(
    tensors: Mapping[str, int | Sequence[int]] | Iterable[tuple[str, int | Sequence[int]]],
    fragments: int,
    *,
    pattern: str = "binpack",
    avg_regex: str | None = None,
    matrix_merge: str = "rda",
    identity_shapes: bool = False,
) -> NamedLayout:
    """Divides the parameters of a model into about `fragments` fragments of even size (wire 5.3).

    tensors: name -> shape, or element count where the shape does not matter; in any order.
    pattern: "binpack" (largest first into the smallest bin) or "strided" (whole layers, dealt out
    in turn). avg_regex: tensors whose name it matches anywhere join the averaged fragment, next to
    embeddings and heads. matrix_merge: "rda" or "iso" for all others; iso averages whatever is not
    two-dimensional. identity_shapes: let the fingerprint cover the full shapes. A tensor without
    elements has nothing to merge and is left out.

    The averaged set is a fragment of its own, so one fragment more than asked for can come back;
    with few tensors it can be fewer. Time is that of sorting the names.
    Raises `ConfigError` for anything that is not such an input.
    """
    if isinstance(fragments, bool) or not isinstance(fragments, int) or fragments < 1:
        raise ConfigError(f"fragments must be an integer of at least 1, found {fragments!r}")
    if pattern not in PATTERNS:
        raise ConfigError(f"pattern must be one of {', '.join(PATTERNS)}, found {pattern!r}")
    if matrix_merge not in MATRIX_MERGES:
        raise ConfigError(
            f"matrix_merge must be one of {', '.join(MATRIX_MERGES)}, found {matrix_merge!r}")
    try:
        extra = re.compile(avg_regex) if avg_regex is not None else None
    except re.error as error:
        raise ConfigError(f"avg_regex {avg_regex!r} is not a regular expression: {error}") from None
    iso = matrix_merge == "iso"

    averaged: list[_Entry] = []
    rest: list[_Entry] = []
    for entry in sorted(_checked_tensors(tensors)):
        (averaged if _is_averaged(entry.tensor, extra, iso) else rest).append(entry)
    result = []
    if averaged:
        members = tuple(entry.tensor for entry in averaged)
        result.append(NamedFragment(AVG, members, identity_shapes))
    if rest:
        count = max(1, min(fragments - len(result), len(rest)))
        bins = _strided(rest, count) if pattern == "strided" else _binpacked(rest, count)
        mode = MATRIX_MERGES[matrix_merge]
        result += [NamedFragment(mode, tuple(members), identity_shapes)
                   for members in bins if members]
    return NamedLayout(tuple(result))


def layout_fingerprint(layout: NamedLayout) -> bytes:
    """The 32-byte SHA-256 that stands for names, order, merge modes and shapes (wire 5.1, 5.2)."""
    return fingerprint(layout.wire, layout.names)


def save_layout(path: str | os.PathLike[str], layout: NamedLayout) -> None:
    """Writes names, shapes and merge modes as JSON, whole or not at all.

    Raises `ConfigError` when the file cannot be written.
    """
    document = {
        "format": FILE_FORMAT,
        "fingerprint": layout_fingerprint(layout).hex(),
        "fragments": [
            {"merge": MERGE_MODES[fragment.merge_mode], "identity": fragment.identity,
             "tensors": [{"name": tensor.name, "shape": list(tensor.shape)}
                         for tensor in fragment.tensors]}
            for fragment in layout.fragments
        ],
    }
    target = Path(path)
    scratch = target.with_name(f"{target.name}.{os.getpid()}.new")
    try:
        scratch.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        os.replace(scratch, target)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise ConfigError(f"cannot write layout file {target}: {error.strerror}") from None


def load_layout(path: str | os.PathLike[str]) -> NamedLayout:
    """Reads a file of `save_layout` and checks it against its own fingerprint.

    Raises `ConfigError` when it cannot be read, is no such file, or has been altered.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read layout file {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"layout file {path} is not JSON: {error}") from None
    modes = {name: mode for mode, name in MERGE_MODES.items()}
    try:
        if document["format"] != FILE_FORMAT:
            raise ConfigError(f"layout file {path} has format {document['format']!r}, "
                              f"expected {FILE_FORMAT!r}")
        layout = NamedLayout(tuple(
            NamedFragment(
                modes[fragment["merge"]],
                tuple(NamedTensor(str(tensor["name"]), tuple(map(int, tensor["shape"])))
                      for tensor in fragment["tensors"]),
                bool(fragment["identity"]),
            )
            for fragment in document["fragments"]
        ))
        found = layout_fingerprint(layout).hex()
        expected = document["fingerprint"]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"layout file {path} is not of format {FILE_FORMAT}: "
                          f"{type(error).__name__} {error}") from None
    if found != expected:
        raise ConfigError(f"layout file {path} was altered: it declares fingerprint {expected}, "
                          f"its content has {found}")
    return layout


class _Entry(NamedTuple):
    """A tensor in its place of the sorted order: largest first, then by name."""

    negative_numel: int
    name: str
    tensor: NamedTensor


def _matrix(tensor: NamedTensor) -> tuple[int, int]:
    rows, cols = tensor.shape
    return rows, cols


def _checked_tensors(
    tensors: Mapping[str, int | Sequence[int]] | Iterable[tuple[str, int | Sequence[int]]],
) -> list[_Entry]:
    items = tensors.items() if isinstance(tensors, Mapping) else tensors
    result: list[_Entry] = []
    seen: set[str] = set()
    for name, size in items:
        shape = tuple(map(operator.index, (size,) if isinstance(size, SupportsIndex) else size))
        if not name or name in seen:
            raise ConfigError("parameter names must be unique and not empty, found "
                              + (f"{name!r} twice" if name else "an empty one"))
        numel = math.prod(shape)
        if not 0 <= numel <= _U64_MAX or min(shape, default=1) < 0:
            raise ConfigError(f"parameter {name!r} has shape {shape}, expected no negative "
                              "dimension and at most 2^64 - 1 elements")
        if name == NO_TENSOR_NAME:
            raise ConfigError(f"parameter name {name!r} means something else in model files; call "
                              "it otherwise")
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"parameter name {name!r} cannot be written as UTF-8") from None
        seen.add(name)
        if numel:
            result.append(_Entry(-numel, name, NamedTensor(name, shape)))
    if not result:
        raise ConfigError("a layout needs at least one parameter with elements, found "
                          + (f"only empty ones, for example {next(iter(seen))!r}" if seen
                             else "none"))
    return result


def _is_averaged(tensor: NamedTensor, extra: re.Pattern[str] | None, iso: bool) -> bool:
    lowered = tensor.name.lower()
    return (
        any(part in lowered for part in AVG_NAME_PARTS)
        or (extra is not None and extra.search(tensor.name) is not None)
        or (iso and len(tensor.shape) != 2)
    )


def _binpacked(ordered: list[_Entry], count: int) -> list[list[NamedTensor]]:
    return _fill_smallest([[] for _ in range(count)], [0] * count, ordered)


def _strided(ordered: list[_Entry], count: int) -> list[list[NamedTensor]]:
    """Layers dealt out by the rank of their number; what belongs to no layer fills the gaps."""
    layered: list[tuple[int, str, _Entry]] = []
    loose: list[_Entry] = []
    for entry in ordered:
        if match := _LAYER.search(entry.name):
            layered.append((int(match.group(1)), entry.name, entry))
        else:
            loose.append(entry)
    rank = {number: i for i, number in enumerate(sorted({layer[0] for layer in layered}))}
    bins: list[list[NamedTensor]] = [[] for _ in range(count)]
    totals = [0] * count
    for number, _, entry in sorted(layered):
        index = rank[number] % count
        bins[index].append(entry.tensor)
        totals[index] -= entry.negative_numel
    return _fill_smallest(bins, totals, loose)


def _fill_smallest(bins: list[list[NamedTensor]], totals: list[int],
                   ordered: list[_Entry]) -> list[list[NamedTensor]]:
    """Each tensor goes to the bin with the smallest total, the lowest index on a tie.

    A heap of running totals: looking through all bins for every tensor took minutes for large
    mixture-of-experts models.
    """
    heap = [(total, index) for index, total in enumerate(totals)]
    heapq.heapify(heap)
    for negative_numel, _, tensor in ordered:
        total, index = heap[0]
        bins[index].append(tensor)
        heapq.heapreplace(heap, (total - negative_numel, index))
    return bins
