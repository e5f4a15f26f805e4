"""The yeto-v3 file: byte-compatible with existing tooling; Nesterov only, no digests.

Little-endian, no padding:

    magic u32, iso backend u8 (0), fingerprint 32 B, global_step u64, fragments u32
    per fragment: version u64, n u64, n f32 parameters, n f32 momentum
    learners u32, per learner: id u32, merges u64, steps u64, tokens u64 (ascending id)
    fingerprint 32 B again, then nothing or u32 0x52544353 and the session contract 32 B

Must not open files: it makes bytes, and reads them through a `Window`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

from syncer.checkpoint.facts import Draft, Facts, Parsed, TensorPlace
from syncer.checkpoint.window import Window
from syncer.errors import CheckpointError, CheckpointFormatError
from syncer.protocol import HASH_BYTES

YETO_MAGIC = 0xD1705A80
YETO_MAGIC_BYTES = YETO_MAGIC.to_bytes(4, "little")
CONTRACT_MAGIC = 0x52544353
HEAD = struct.Struct("<IB32sQI")
FRAGMENT = struct.Struct("<QQ")
LEARNER = struct.Struct("<IQQQ")
CONTRACT = struct.Struct("<I32s")
STATE = ("momentum",)


def draft(facts: Facts) -> Draft:
    """The file of these facts. Raises `CheckpointError` when the format cannot hold the state."""
    if facts.state != STATE or (facts.optimizer or {"name": "nesterov"})["name"] != "nesterov":
        name = (facts.optimizer or {}).get("name", f"arrays {facts.state}")
        raise CheckpointError(f"the yeto-v3 format holds nesterov only, not {name}; use "
                              "safetensors")
    tail = _tail(facts)
    size = HEAD.size + len(facts.numels) * FRAGMENT.size + facts.state_bytes + len(tail)
    return Draft(size, _parts(facts, tail))


def _parts(facts: Facts, tail: bytes) -> Iterator[bytes | TensorPlace]:
    yield HEAD.pack(YETO_MAGIC, 0, facts.fingerprint, facts.step, len(facts.numels))
    for fragment, (version, numel) in enumerate(zip(facts.versions, facts.numels, strict=True)):
        yield FRAGMENT.pack(version, numel)
        for array in ("params", *STATE):
            yield TensorPlace(fragment, array, numel)
    yield tail


def _tail(facts: Facts) -> bytes:
    """Everything behind the last fragment."""
    ledger = b"".join(LEARNER.pack(learner, *facts.ledger[learner])
                      for learner in sorted(facts.ledger))
    return (len(facts.ledger).to_bytes(4, "little") + ledger + facts.fingerprint
            + CONTRACT.pack(CONTRACT_MAGIC, facts.contract))


def parse(window: Window) -> Parsed:
    """What stands around the tensors; no digests. Raises `CheckpointFormatError`.

    Takes memory for what was really found only: a length is compared with the bytes that are left
    before anything is done with it.
    """
    _, backend, fingerprint, step, count = window.unpack("head", HEAD)  # by its magic it is known
    if backend != 0:
        window.refuse("iso backend", 4, "0", backend)
    if not 1 <= count <= window.left // (FRAGMENT.size + 8):
        window.refuse("fragment count", 45, f"1 to {window.left // (FRAGMENT.size + 8)}, as many "
                      "as the file has room for", count)
    versions, numels, places = [], [], {}
    for fragment in range(count):
        at = window.at
        version, numel = window.unpack(f"head of fragment {fragment}", FRAGMENT)
        if not 1 <= numel <= window.left // 8:
            window.refuse(f"elements of fragment {fragment}", at + 8,
                          f"1 to {window.left // 8}, as many as are left", numel)
        versions.append(version)
        numels.append(numel)
        places[fragment, "params"] = window.at
        places[fragment, "momentum"] = window.at + 4 * numel
        window.skip(8 * numel)
    ledger = _parse_ledger(window)
    contract = _parse_identity(window, fingerprint)
    facts = Facts(step=step, versions=tuple(versions), numels=tuple(numels), state=STATE,
                  ledger=ledger, fingerprint=fingerprint, contract=contract)
    return Parsed(facts, places, {})


def _parse_ledger(window: Window) -> Mapping[int, Any]:
    at = window.at
    (count,) = window.unpack("ledger count", struct.Struct("<I"))
    most = max(0, window.left - HASH_BYTES) // LEARNER.size
    if count > most:
        window.refuse("ledger count", at, f"at most {most}, as many as are left", count)
    ledger: dict[int, tuple[int, int, int]] = {}
    last = -1
    for index in range(count):
        at = window.at
        learner, *numbers = window.unpack(f"ledger entry {index}", LEARNER)
        if learner <= last:
            window.refuse(f"learner of ledger entry {index}", at, f"more than {last} (ascending)",
                          learner)
        ledger[learner] = tuple(numbers)
        last = learner
    return ledger


def _parse_identity(window: Window, fingerprint: bytes) -> bytes:
    at = window.at
    (again,) = window.unpack("second fingerprint", struct.Struct(f"<{HASH_BYTES}s"))
    if again != fingerprint:
        window.refuse("second fingerprint", at, fingerprint.hex(), again.hex())
    if window.left == 0:
        return fingerprint
    at = window.at
    if window.left != CONTRACT.size:
        raise CheckpointFormatError(
            f"{window.path}: session contract at offset {at}: expected {CONTRACT.size} bytes or "
            f"the end of the file, found {window.left} bytes")
    contract: bytes
    magic, contract = window.unpack("session contract", CONTRACT)
    if magic != CONTRACT_MAGIC:
        window.refuse("contract magic", at, f"{CONTRACT_MAGIC:#x}", f"{magic:#x}")
    return contract
