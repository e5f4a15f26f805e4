"""How log and tape name a connection: by the first 8 of the 16 hex digits of its generation.

Who knows a learner's id and the whole generation can dial data sockets of that connection, and log
and tape have more readers than the run has learners. Everything on its way there comes by here, so
that nobody who writes a line has to think of it. Must not change what is sent to a peer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

GENERATIONS = {"generation", "died"}
"""Fields that hold a generation."""
WITH_GENERATION = {"expected_members", "responded_members", "missed_members", "responders",
                   "carried", "excluded"}
"""Keys of a tape record whose entries have one."""
IN_TEXT = re.compile(r"\bgeneration[ =](\d+)")


def short(generation: int) -> str:
    return f"{generation:016x}"[:8]


def in_text(text: str) -> str:
    """A sentence, which may quote what was said to a peer."""
    if "generation" not in text:  # as nearly always: a tenth of the time of a search
        return text
    return IN_TEXT.sub(lambda found: f"generation {short(int(found[1]))}", text)


def in_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Of a log line."""
    return {name: (short(value) if name in GENERATIONS and isinstance(value, int) else
                   in_text(value) if isinstance(value, str) else value)
            for name, value in fields.items()}


def in_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Of the tape, where a generation has been a number and stays one: that of these digits."""
    return {key: _in_members(value) if key in WITH_GENERATION else
            in_text(value) if isinstance(value, str) else value for key, value in record.items()}


def _in_members(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**entry, "generation": entry["generation"] >> 32} for entry in entries]
