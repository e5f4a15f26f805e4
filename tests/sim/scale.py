"""Sizes and limits of the server, as small as the tensors and crowds of a simulated run.

Must not draw them: a seed does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from syncer.protocol import DTYPE_BF16, DTYPE_F32
from syncer.server import arrival, arrivals, door, farewell, run_session, workers
from syncer.wire import encode
from tests.sim import turns

LIMITS = (door, "STRANGERS_MAX", "strangers"), (door, "STRANGER_BYTES_MAX", "stranger_bytes"), (
    farewell, "FAREWELLS_MAX", "farewells"), (run_session, "CONNECTIONS_MAX", "connections")
"""(module, constant, setting) of what strangers and goodbyes may have."""
SIZES = (encode, "CHUNK_SIZE", "chunk_bytes"), (
    encode, "STRIPE_BYTES_MIN", "inline_elements"), (
    workers, "INLINE_ELEMENTS_MAX", "inline_elements"), (
    door, "HELLO_INLINE_MAX", "hello_inline"), (
    arrivals, "STEP_ELEMENTS", "inline_elements"), (
    arrivals, "HASH_STEP_BYTES", "inline_elements"), (
    arrivals, "HASH_UNIT_BYTES", "hash_unit"), (arrival, "UNITS", "units"), (
    arrival, "NEWS_BYTES", "news")
"""The same of what is large."""
REAL = {(module, name): getattr(module, name) for module, name, _ in (*LIMITS, *SIZES)}


def forgive() -> None:
    """Limits that no honest learner of a simulation can meet."""
    for module, name, _ in LIMITS:
        setattr(module, name, REAL[module, name])


@contextmanager
def scaled(settings: dict[str, Any]) -> Iterator[None]:
    given = dict(settings)
    small = settings["inline_elements"] < REAL[workers, "INLINE_ELEMENTS_MAX"]
    given["news"] = settings["inline_elements"] if small else REAL[arrival, "NEWS_BYTES"]
    given["hash_unit"] = 1 if small else REAL[arrivals, "HASH_UNIT_BYTES"]
    given["units"] = REAL[arrival, "UNITS"] | ({DTYPE_F32: (4, 1), DTYPE_BF16: (2, 1)}
                                                if small else {})
    for module, name, setting in (*LIMITS, *SIZES):
        setattr(module, name, given[setting])
    try:
        with turns.small(settings["catchup_bytes"]):
            yield
    finally:
        for module, name, _ in (*LIMITS, *SIZES):
            setattr(module, name, REAL[module, name])
