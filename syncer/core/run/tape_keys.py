"""What the event tape says: every kind of record, its keys in order, and what each one means.

Must not build a record: record.pyx and the scheduler do, the server adds what only it knows (the
keys of `ADDED`). The witness of the tests holds every record against these tables.
"""

from __future__ import annotations

from collections.abc import Mapping

MERGE = {
    "protocol_version": "4",
    "delta_semantics": "`local_minus_raw_anchor`",
    "sync/layout_hash": "fingerprint of the layout, in hex",
    "sync/base_version": "as `launch_base_version`",
    "sync/responders": "number of pushes merged, carried ones not counted",
    "sync/quorum": "as `quorum`",
    "sync/rejected_stale_updates": "pushes refused because their base was too old",
    "sync/merge_seconds": "time of the arithmetic",
    "sync/global_delta_norm": "as `gnorm`",
    "step": "the outer step, from 1",
    "fragment": "which was merged",
    "launch_base_version": "version of the fragment that the deltas are relative to",
    "attempt": "that was merged, from 1; one more per relaunch",
    "gnorm": "norm of the merged gradient",
    "ms": "from the launch of this attempt to the commit",
    "quorum": "`--quorum`",
    "expected": "ids of the learners the round waited for, ascending",
    "expected_members": "the same as `{id, generation}`",
    "responded": "ids of those who answered",
    "responded_members": "with the generation that answered",
    "missed_grace": "ids of those who did not",
    "missed_members": "the same as `{id, generation}`",
    "quorum_ms": "from the launch to quorum; null without one",
    "grace_ms": "the grace window given after quorum; null without one",
    "sync_ms": "arithmetic, commit and broadcast",
    "responders": "a list: each push that was merged",
    "carried": "a list: each late push of an earlier round that was merged here",
    "excluded": "a list: each contribution that was left out, since the merge would not be finite",
    "released": "ids whose slot was given up for a stale push",
    "joined": "ids that came into the round under way",
    "failed_saves": "checkpoints that could not be written since the newest one on the disk",
    "stats": "with `--merge-stats`: norms and cosines, see merge.md",
    "reports": "a list: the newest report of each learner that is connected",
}
EVENTS = {
    "init": {
        "step": "0",
        "fragments": "number of fragments",
        "learners": "ids that are connected",
        "sha256": "digest of each fragment's first values, as they came over the wire",
    },
    "resume": {
        "at_step": "of the checkpoint",
        "fragments": "number of fragments",
        "learners": "ids that are connected",
    },
    "checkpoint": {
        "at_step": "of the cut that is on the disk now",
        "kind": "why it was written",
    },
    "shutdown": {
        "step": "the last one committed",
        "signal": "number of the signal that ends the run",
    },
    "rl_strict_failure": {
        "metric": "which rule without exceptions was broken",
        "value": "1",
        "error": "the sentence the run ends with",
    },
}
"""By the value of the first key, `event`."""

PARTS = {
    "expected_members": {"id": "of the learner", "generation": "of its connection, shortened"},
    "responders": {
        "id": "of the learner",
        "generation": "of the connection that pushed",
        "base_version": "that its delta is relative to",
        "staleness": "how many versions that is behind",
        "c_steps": "own steps in the delta",
        "c_tokens": "tokens in the delta",
        "weight": "in the merge",
        "contribution": "share of the total weight; 0 when that is not positive",
    },
    "carried": {
        "id": "of the learner",
        "base_version": "that its delta is relative to",
        "lag": "how many versions that is behind",
        "discount": "that its weight was multiplied with",
        "weight": "in the merge",
        "generation": "of the connection that pushed",
        "c_steps": "own steps in the delta",
        "c_tokens": "tokens in the delta",
        "contribution": "share of the total weight; 0 when that is not positive",
    },
    "excluded": {
        "id": "of the learner",
        "generation": "of the connection that pushed",
        "attempt": "in which it was left out",
        "element": "first one of the fragment whose result was not finite with it",
    },
    "reports": {
        "id": "of the learner",
        "loss": "of its training; null, as all of these, when it was not told or not finite",
        "tokens_per_s": "tokens per second",
        "lr": "its learning rate",
        "goodput": "share of wall time in optimizer steps",
    },
}
PARTS["responded_members"] = PARTS["missed_members"] = PARTS["expected_members"]

OPTIONAL = {"carried", "excluded", "released", "joined", "failed_saves", "stats", "sha256",
            "reports"}
"""Only when it happened, or only on the tape of a server."""

ADDED = {"sha256", "stats", "reports"}
"""What the server adds to a record of the scheduler: digests and statistics of the arrays, and what
learners have reported since the record before."""


def misfit(record: Mapping[str, object]) -> str | None:
    """What a record says that the tables do not, or in another order; None if it fits."""
    if "event" in record:
        kind = str(record["event"])
        keys = ["event", *EVENTS.get(kind, ())]
    else:
        kind, keys = "merge", list(MERGE)
    expected = [key for key in keys if key in record or key not in OPTIONAL]
    if list(record) != expected:
        return f"{kind}: {list(record)}, not {expected}"
    for key in PARTS.keys() & record.keys():
        entries = record[key]
        assert isinstance(entries, list)
        for entry in entries:
            if list(entry) != list(PARTS[key]):
                return f"{kind}, {key}: {list(entry)}, not {list(PARTS[key])}"
    return None


def markdown_table() -> str:
    """The tables of the docs: records of a merge, their entries, and the other records."""
    rows = ["| key | of a merge, in this order |", "|---|---|"]
    rows += [f"| `{key}` | {_sometimes(key)}{meaning} |" for key, meaning in MERGE.items()]
    for title, part in (("`responders`", "responders"), ("`carried`", "carried"),
                        ("`excluded`", "excluded"), ("`reports`", "reports")):
        rows += ["", f"| key | of an entry of {title} |", "|---|---|"]
        rows += [f"| `{key}` | {meaning} |" for key, meaning in PARTS[part].items()]
    rows += ["", "| `event` | other keys |", "|---|---|"]
    for event, keys in EVENTS.items():
        told = "; ".join(f"`{key}`: {meaning}" for key, meaning in keys.items())
        rows.append(f"| `{event}` | {told} |")
    return "\n".join(rows) + "\n"


def _sometimes(key: str) -> str:
    return "only when it happened: " if key in OPTIONAL - ADDED else ""
