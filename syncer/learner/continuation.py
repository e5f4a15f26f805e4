"""What a learner's next process goes on from: it joins with what it holds, and loses nothing.

A mapping of numbers, texts and f32 arrays, for whatever keeps checkpoints of the island. Must not
read or write files, or know connections.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncer.errors import ConfigError
from syncer.learner.fragment import Floats, Fragment
from syncer.protocol import DTYPES, bulk_dtype, tensor_bytes

if TYPE_CHECKING:
    from syncer.learner.holding import LocalFragment
    from syncer.learner.session import Session

STATE_FORMAT = "syncer-learner-v1"


class FragmentMemory(NamedTuple):
    """The anchor of a fragment, and where the counters stood when it became that."""

    version: int
    source: int | None
    """The server process that it came from; None: not known."""
    steps: int
    tokens: int


class Memory(NamedTuple):
    """Of a session."""

    steps: int
    tokens: int
    known: tuple[int, int] | None
    """(epoch, instance) of the last server that was followed."""
    fragments: tuple[FragmentMemory | None, ...]


def state_of(session: Session, fragments: Sequence[LocalFragment],
             fingerprint: bytes) -> dict[str, Any]:
    """A copy of everything; the local values are the caller's own."""
    memory = session.remember()
    return {
        "format": STATE_FORMAT, "fingerprint": fingerprint.hex(), "dtype": DTYPES[session.dtype],
        "learner": session.learner, "steps": memory.steps, "tokens": memory.tokens,
        "known": memory.known,
        "fragments": [None if known is None else known._asdict() | _kept(session, index, fragment)
                      for index, (known, fragment) in enumerate(
                          zip(memory.fragments, fragments, strict=True))]}


def _kept(session: Session, index: int, fragment: LocalFragment) -> dict[str, Any]:
    """What a fragment has; the error of its last delta only if that is known to be merged."""
    kept: dict[str, Floats] = fragment.kept()
    step = session.fates.merged(index)
    if step is None or "error" not in kept:
        kept.pop("error", None)
        return {"kept": kept}
    return {"kept": kept, "merged": step}


def resume(state: Mapping[str, Any], session: Session, fragments: Sequence[LocalFragment],
           fingerprint: bytes) -> bool:
    """Goes on from a state, before the first connection; whether it had an anchor of every
    fragment. Raises `ConfigError` for one of another learner or model."""
    expected = {"format": STATE_FORMAT, "fingerprint": fingerprint.hex(),
                "dtype": DTYPES[session.dtype], "learner": session.learner}
    for name, value in expected.items():
        if state.get(name) != value:
            raise ConfigError(f"the state has {name} {state.get(name)!r}, and this learner "
                              f"{value!r}: it is one of another learner")
    try:
        records = [record and (FragmentMemory(*(record[name] for name in FragmentMemory._fields)),
                               record["kept"]) for record in state["fragments"]]
        known = state["known"] and (int(state["known"][0]), int(state["known"][1]))
        memory = Memory(int(state["steps"]), int(state["tokens"]), known,
                        tuple(record and record[0] for record in records))
        anchors = []
        for record, fragment in zip(records, fragments, strict=True):
            anchors.append(record and _bulk(fragment.keep(record[1]), session.dtype))
        session.resume(memory, anchors)
        for index, record in enumerate(state["fragments"]):
            if record and "merged" in record:
                session.fates.resume(index, int(record["merged"]))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ConfigError(f"the state is not whole: {type(error).__name__} {error}") from None
    return all(records)


def _bulk(anchor: np.ndarray, dtype: int) -> memoryview:
    """As it was broadcast: what was decoded is encoded again to the same bytes."""
    values = np.ascontiguousarray(anchor, np.float32)
    out = np.empty(tensor_bytes(values.size, bulk_dtype(dtype)), np.uint8)
    Fragment([values], dtype).pack_values(out)
    return out.data
