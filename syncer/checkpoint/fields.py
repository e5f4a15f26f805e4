"""Fields of a file's header, read without belief: JSON, numbers, digests. Must not know which.

Whatever stands there, a refusal is one short sentence, without where the field stands.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from syncer.checkpoint.facts import U64_MAX
from syncer.protocol import HASH_BYTES

DIGEST = re.compile(f"[0-9a-f]{{{2 * HASH_BYTES}}}", re.ASCII)
INSTANCE = re.compile(r"[0-9a-f]{16}", re.ASCII)


class Malformed(Exception):
    """What is wrong with one field, without where."""


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _first_twice(keys: Sequence[str]) -> str:
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            break
        seen.add(key)
    return key


def json_value(text: bytes | str, field: str, kind: type) -> Any:
    def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = _first_twice([key for key, _ in pairs])
            raise Malformed(f"{field}: key {twice[:80]!r} stands there twice")
        return found

    def constant(name: str) -> Any:
        raise Malformed(f"{field}: {name} is no JSON number")

    try:
        found = json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except RecursionError:
        raise Malformed(f"{field}: nested too deeply for a checkpoint") from None
    except ValueError as error:
        raise Malformed(f"{field}: not JSON: {error}") from None
    if type(found) is not kind:
        raise Malformed(f"{field}: expected a JSON {kind.__name__}, found "
                         f"{type(found).__name__}")
    return found


def whole_numbers(values: Sequence[Any], field: str, most: int) -> tuple[int, ...]:
    for value in values:
        if type(value) is not int or not 0 <= value <= most:
            raise Malformed(f"{field}: expected whole numbers from 0 to {most}, found "
                             f"{shown(value)}")
    return tuple(values)


def decimal(field: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 20
            and (text == "0" or text[0] != "0") and int(text) <= U64_MAX):
        raise Malformed(f"{field}: expected a whole number below 2^64, found {text[:40]!r}")
    return int(text)


def digest_of(field: str, text: Any) -> bytes:
    if type(text) is not str or not DIGEST.fullmatch(text):  # fromhex alone would skip blanks
        raise Malformed(f"{field}: expected 64 hexadecimal digits, found {shown(text)}")
    return bytes.fromhex(text)


def instance_of(field: str, text: Any) -> int:
    """The number of a server process."""
    if type(text) is not str or not INSTANCE.fullmatch(text) or not int(text, 16):
        raise Malformed(f"{field}: expected an instance of 16 hexadecimal digits that is not 0, "
                        f"found {shown(text)}")
    return int(text, 16)


def shown(value: Any) -> str:
    """A value for an error, short whatever it is."""
    if type(value) is str:
        return repr(value[:80])
    return str(value)[:40] if type(value) in (int, float, bool) else type(value).__name__
