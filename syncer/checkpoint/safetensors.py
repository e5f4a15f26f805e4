"""The safetensors checkpoint: a plain safetensors file whose metadata make it a complete cut.

Tensors `fragments.<p>.params`, `.momentum` [, `.accumulator`], f32, one-dimensional, in that order.
All metadata are strings; FIELDS below names them. `sha256` holds a digest of every tensor;
`header_sha256` is the digest of the first bytes of the file up to the first tensor, taken with its
own 64 digits as zeros, so that no bit of the file is without one.

Must not open files: it makes the header's bytes, and reads them through a `Window`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from syncer.checkpoint.facts import (
    STATES,
    U32_MAX,
    U64_MAX,
    Draft,
    Facts,
    Parsed,
    TensorPlace,
    check_layout,
    check_names,
)
from syncer.checkpoint.fields import (
    Malformed,
    compact,
    decimal,
    digest_of,
    json_value,
    shown,
    whole_numbers,
)
from syncer.checkpoint.provenance import PROVENANCE, lineage_of, names_of, to_metadata
from syncer.checkpoint.window import Window
from syncer.errors import CheckpointError, CheckpointFormatError
from syncer.kernels import Sha256, sha256
from syncer.layout import ISO, MERGE_MODES, FragmentLayout, Layout
from syncer.streams import one_line

FORMAT, FORMAT_VERSION = "syncer-checkpoint", "1"
FIELDS = ("format", "format_version", "global_step", "versions", "ledger", "optimizer", "layout",
          "layout_fingerprint", "session_contract", "profile_hash", *PROVENANCE, "sha256",
          "header_sha256")
OPTIONAL_FIELDS = ("layout", "profile_hash", *PROVENANCE)
HEADER_BYTES_MAX = 64 * 1024 * 1024
VALUES_MAX = 4 * 1024 * 1024
"""JSON values of a header: what parsing it takes in memory is bounded by this."""
ALIGN = 4096
"""The first tensor begins at a multiple of it, so large writes are aligned in the file."""
ZERO_DIGEST = "0" * 64
DIGESTS_KEY = b'"sha256":"'
SELF_KEY = b'"header_sha256":"'
MODES = {name: mode for mode, name in MERGE_MODES.items()}
F32_BYTES = 4


# ------------------------------------------------------------------------------------ writing
def draft(facts: Facts) -> Draft:
    """The file of these facts; its header is made here, and filled with digests in the end.

    Names for which readers would refuse it as too large are left out. Raises `CheckpointError`
    when it is too large without them.
    """
    header = _header(facts)
    if facts.names is not None and not _readable(header):
        facts = replace(facts, names=None)
        header = _header(facts)
    if not _readable(header):
        raise CheckpointError(
            f"a safetensors header of {len(header)} bytes would be needed for {len(facts.numels)} "
            f"fragments, readers accept {HEADER_BYTES_MAX}; use fewer fragments or yeto-v3")
    return Draft(len(header) + facts.state_bytes, chain([header], facts.tensors),
                 partial(_filled, header, facts))


def _header(facts: Facts) -> bytes:
    """Length, JSON and padding: everything before the first tensor, with zeros for digests."""
    entries: dict[str, Any] = {"__metadata__": _metadata(facts)}
    at = 0
    for tensor in facts.tensors:
        end = at + F32_BYTES * tensor.numel
        entries[tensor.name] = {"dtype": "F32", "shape": [tensor.numel], "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGN)
    return len(text).to_bytes(8, "little") + text


def _readable(header: bytes) -> bool:
    return len(header) - 8 <= HEADER_BYTES_MAX and _values(header[8:]) <= VALUES_MAX


def _filled(header: bytes, facts: Facts, digests: Mapping[str, str]) -> bytes:
    """The header with the digests of all tensors, and its own, where it has zeros."""
    found = bytearray(header)
    at = found.index(DIGESTS_KEY)
    for tensor in facts.tensors:  # as `_metadata` lists them
        at = found.index(ZERO_DIGEST.encode(), at)
        found[at : at + 64] = digests[tensor.name].encode()
    begin = found.index(SELF_KEY) + len(SELF_KEY)
    found[begin : begin + 64] = sha256(found).hex().encode()
    return bytes(found)


def _metadata(facts: Facts) -> dict[str, str]:
    optimizer = dict(facts.optimizer or {"name": "nesterov"})
    found = {
        "format": FORMAT, "format_version": FORMAT_VERSION, "global_step": str(facts.step),
        "versions": compact(list(facts.versions)),
        "ledger": compact({str(learner): list(facts.ledger[learner])
                            for learner in sorted(facts.ledger)}),
        "optimizer": compact(optimizer),
    }
    if facts.layout is not None:
        found["layout"] = compact([_layout_entry(f) for f in facts.layout.fragments])
    found |= {"layout_fingerprint": facts.fingerprint.hex(),
              "session_contract": facts.contract.hex()}
    if facts.profile_hash is not None:
        found["profile_hash"] = facts.profile_hash.hex()
    found |= to_metadata(facts)
    found["sha256"] = compact({tensor.name: ZERO_DIGEST for tensor in facts.tensors})
    found["header_sha256"] = ZERO_DIGEST
    return found


def _layout_entry(fragment: FragmentLayout) -> dict[str, Any]:
    entry: dict[str, Any] = {"merge": MERGE_MODES[fragment.merge_mode],
                             "numels": list(fragment.numels)}
    if fragment.shapes:
        entry["shapes"] = [list(shape) for shape in fragment.shapes]
    return entry


# ------------------------------------------------------------------------------------ reading
def parse(window: Window) -> Parsed:
    """What stands in the header.

    Raises `CheckpointFormatError` naming field and offset. No memory is taken for a length before
    it was compared with the file, and the whole header is verified before any of it is believed.
    """
    if window.left < 8:
        window.refuse("first bytes", window.at, "a checkpoint (safetensors or yeto-v3)",
                      f"a file of {window.size} bytes")
    at = window.at
    length = int.from_bytes(window.take("header length", 8), "little")
    if not 2 <= length <= min(window.left, HEADER_BYTES_MAX):
        window.refuse("header length", at, f"2 to {min(window.left, HEADER_BYTES_MAX)}", length)
    text = window.take("header", length)
    if _values(text) > VALUES_MAX:
        window.refuse("header", 8, f"at most {VALUES_MAX} JSON values", _values(text))
    try:
        entries = json_value(text, "header", dict)
        metadata = _strings(entries.pop("__metadata__", None))
        _check_kind(metadata)
        _check_header_digest(text, metadata["header_sha256"])
        facts = _facts(metadata, entries)
        digests = _digests(metadata["sha256"], facts)
        offsets = _offsets(entries, facts, window.left)
        check_layout(facts)
        check_names(facts)
    except (Malformed, CheckpointFormatError) as problem:  # it may quote what stands in the file
        raise CheckpointFormatError(
            f"{window.path}: header at offset 8: {one_line(str(problem))}") from None
    data = 8 + length
    return Parsed(facts, {key: data + offset for key, offset in offsets.items()}, digests)


def _values(text: bytes) -> int:
    """An upper bound of the JSON values in the text, those inside of strings included."""
    return text.count(b",") + text.count(b"[") + text.count(b"{") + 1


def _strings(metadata: Any) -> dict[str, str]:
    if type(metadata) is not dict or not all(type(v) is str for v in metadata.values()):
        raise Malformed("__metadata__: expected an object of strings")
    return metadata


def _check_kind(metadata: Mapping[str, str]) -> None:
    for name, expected in (("format", FORMAT), ("format_version", FORMAT_VERSION)):
        found = metadata.get(name)
        if found != expected:
            shown = "nothing" if found is None else repr(found[:80])
            raise Malformed(f"{name}: expected {expected!r}, found {shown}")
    missing = [name for name in FIELDS if name not in metadata and name not in OPTIONAL_FIELDS]
    unknown = [name for name in metadata if name not in FIELDS]
    if missing or unknown:
        raise Malformed(f"__metadata__: expected {', '.join(FIELDS)}; missing: "
                         f"{', '.join(missing) or 'none'}; unknown: "
                         f"{', '.join(name[:80] for name in unknown[:5]) or 'none'}")


def _check_header_digest(text: bytes, stated: str) -> None:
    begin = text.find(SELF_KEY) + len(SELF_KEY)
    if text.count(SELF_KEY) != 1 or text[begin : begin + 64] != stated.encode("utf-8", "replace"):
        raise Malformed("header_sha256: expected 64 hexadecimal digits")
    stream = Sha256(len(text).to_bytes(8, "little"))
    for part in (memoryview(text)[:begin], ZERO_DIGEST.encode(), memoryview(text)[begin + 64 :]):
        stream.update(part)
    found = stream.hexdigest()
    if found != stated:
        raise Malformed(f"header_sha256: expected {stated}, the header has {found}; it was "
                         "changed after it was written")


def _facts(metadata: Mapping[str, str], entries: Mapping[str, Any]) -> Facts:
    versions = whole_numbers(json_value(metadata["versions"], "versions", list), "versions",
                             U64_MAX)
    state = _state_of(entries)
    if len(entries) != len(versions) * (1 + len(state)):
        raise Malformed(f"versions: expected one of each of {len(entries) // (1 + len(state))} "
                         f"fragments, found {len(versions)}")
    numels = []
    for fragment in range(len(versions)):
        name = TensorPlace(fragment, "params", 0).name
        numels.append(_numel(name, entries.get(name)))
    optimizer = json_value(metadata["optimizer"], "optimizer", dict)
    if type(optimizer.get("name")) is not str:
        raise Malformed("optimizer: expected an object with a name")
    profile = metadata.get("profile_hash")
    step = decimal("global_step", metadata["global_step"])
    return Facts(
        step=step, versions=versions,
        numels=tuple(numels), state=state, ledger=_ledger(metadata["ledger"]),
        fingerprint=digest_of("layout_fingerprint", metadata["layout_fingerprint"]),
        contract=digest_of("session_contract", metadata["session_contract"]),
        layout=_layout(metadata["layout"]) if "layout" in metadata else None,
        optimizer=optimizer,
        profile_hash=None if profile is None else digest_of("profile_hash", profile),
        lineage=lineage_of(metadata, step),
        names=names_of(metadata))


def _state_of(entries: Mapping[str, Any]) -> tuple[str, ...]:
    found = {name.rpartition(".")[2] for name in entries} - {"params"}
    for state in STATES:
        if found == set(state) and entries:
            return state
    raise Malformed("tensors: expected fragments.<p>.params, .momentum, .accumulator, found "
                     f"{', '.join(name[:80] for name in list(entries)[:3]) or 'none'}")


def _numel(name: str, entry: Any) -> int:
    """Elements of a tensor whose entry has the one form a checkpoint knows."""
    if entry is None:
        raise Malformed(f"tensor {name} is missing")
    if type(entry) is not dict or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise Malformed(f"tensor {name}: expected dtype, shape and data_offsets")
    if entry["dtype"] != "F32":
        raise Malformed(f"tensor {name}: expected dtype F32, found {shown(entry['dtype'])}")
    shape = entry["shape"]
    if type(shape) is not list or len(shape) != 1:
        raise Malformed(f"tensor {name}: expected a shape of one dimension")
    numel = whole_numbers(shape, f"shape of tensor {name}", U64_MAX)[0]
    if numel < 1:
        raise Malformed(f"tensor {name}: expected at least one element, found 0")
    return numel


def _offsets(entries: Mapping[str, Any], facts: Facts, data_bytes: int
             ) -> dict[tuple[int, str], int]:
    """Where every tensor begins behind the header: all there, without gap, overlap or rest."""
    places, spans = {}, []
    for tensor in facts.tensors:
        numel = _numel(tensor.name, entries.get(tensor.name))
        if numel != tensor.numel:
            raise Malformed(f"tensor {tensor.name}: expected {tensor.numel} elements as the "
                             f"parameters have, found {numel}")
        offsets = entries[tensor.name]["data_offsets"]
        if type(offsets) is not list or len(offsets) != 2:
            raise Malformed(f"tensor {tensor.name}: expected two data_offsets")
        begin, end = whole_numbers(offsets, f"data_offsets of tensor {tensor.name}", U64_MAX)
        if end - begin != F32_BYTES * numel:
            raise Malformed(f"tensor {tensor.name}: expected data_offsets {F32_BYTES * numel} "
                             f"bytes apart, found {begin} and {end}")
        places[tensor.fragment, tensor.array] = begin
        spans.append((begin, end, tensor.name))
    at = 0
    for begin, end, name in sorted(spans):
        if begin != at:
            kind = "overlaps the one before it" if begin < at else "leaves a gap before it"
            raise Malformed(f"tensor {name}: {kind}: expected data offset {at}, found {begin}")
        at = end
    if at != data_bytes:
        raise Malformed(f"tensors: expected {at} bytes behind the header, found {data_bytes}; the "
                         "file is cut short or has something behind it")
    return places


def _digests(text: str, facts: Facts) -> dict[str, str]:
    found = json_value(text, "sha256", dict)
    names = {tensor.name for tensor in facts.tensors}
    if set(found) != names:
        odd = sorted(set(found) ^ names)[0][:80]
        raise Malformed(f"sha256: expected one digest of every tensor, {odd!r} is missing or "
                         "unknown")
    return {name: digest_of(f"sha256 of {name}", digest).hex() for name, digest in found.items()}


def _ledger(text: str) -> dict[int, tuple[int, int, int]]:
    ledger = {}
    for key, numbers in json_value(text, "ledger", dict).items():
        learner = decimal("learner of the ledger", key)
        if learner > U32_MAX or type(numbers) is not list or len(numbers) != 3:
            raise Malformed(f"ledger: learner {learner}: expected [merges, steps, tokens]")
        merges, steps, tokens = whole_numbers(numbers, f"ledger of learner {learner}", U64_MAX)
        ledger[learner] = merges, steps, tokens
    return dict(sorted(ledger.items()))


def _layout(text: str) -> Layout:
    fragments = []
    for index, entry in enumerate(json_value(text, "layout", list)):
        where = f"layout of fragment {index}"
        if type(entry) is not dict or not {"merge", "numels"} <= set(entry) <= {
                "merge", "numels", "shapes"}:
            raise Malformed(f"{where}: expected merge, numels and, for iso, shapes")
        mode = MODES.get(entry["merge"]) if type(entry["merge"]) is str else None
        if mode is None or type(entry["numels"]) is not list:
            raise Malformed(f"{where}: expected a merge mode of {', '.join(MODES)} and numels")
        numels = whole_numbers(entry["numels"], where, U64_MAX)
        shapes = entry.get("shapes", [])
        if type(shapes) is not list or any(type(s) is not list or len(s) != 2 for s in shapes):
            raise Malformed(f"{where}: expected shapes of rows and columns")
        pairs = tuple((rows, columns) for rows, columns in (
            whole_numbers(shape, where, U64_MAX) for shape in shapes))
        if min(numels, default=0) < 1 or [r * c for r, c in pairs] != (
                list(numels) if mode == ISO else []):
            raise Malformed(f"{where}: numels and shapes do not fit each other")
        fragments.append(FragmentLayout(mode, numels, pairs))
    return Layout(tuple(fragments))
