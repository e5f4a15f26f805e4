"""One push, file by file: the stops of its way from a socket to the broadcast that it leads to.

A stop is a file and what in it does the work; a test finds every name in its file. Must not import
a room.
"""

from __future__ import annotations

from typing import NamedTuple


class Stop(NamedTuple):
    """A file on the way, the name in it that does the work, and what that is."""

    path: str
    name: str
    what: str


IN = (
    Stop("syncer/server/conn.pyx", "_read", "bytes are received where their reader says"),
    Stop("syncer/wire/frames.pyx", "FrameReader", "header, limit, range, destination"),
    Stop("syncer/wire/payload.pyx", "allocate", "memory, once the length is known to be right"),
    Stop("syncer/server/group.pyx", "on_frame", "which learner's it is"),
    Stop("syncer/server/ingest.py", "arriving", "judged as bytes; events stay in order"),
    Stop("syncer/wire/messages.py", "parse_push", "the fields"),
    Stop("syncer/server/decoded.pyx", "Decoded", "whose memory the values are"),
    Stop("syncer/merge/buffers.pyx", "take", "memory for them, used again"),
    Stop("syncer/server/arrivals.py", "expect", "who decodes it, and where it is received"),
    Stop("syncer/server/arrival.pyx", "came", "decoded as far as it is there"),
    Stop("syncer/server/shortage.py", "submit", "and again, should there be no memory"),
    Stop("syncer/server/workers.py", "run_job", "off the loop's thread"),
    Stop("syncer/kernels/_native.pyx", "decode_part", "f32 values, negated, all finite"),
    Stop("csrc/arrays.c", "sk_decode", "in chunks over threads"),
    Stop("csrc/codec_x86_avx2.c", "bf16", "one file per instruction set"),
    Stop("syncer/server/loop.pyx", "post", "back to the loop's thread"),
)
JUDGED = (
    Stop("syncer/server/driver.pyx", "_step", "event in, actions to their owners"),
    Stop("syncer/core/run/scheduler.pyx", "on_push", "what a push means in this phase"),
    Stop("syncer/core/rounds/admission.pyx", "refusal", "accepted, refused or carried"),
    Stop("syncer/core/rounds/round.pyx", "accept", "its slot is filled"),
    Stop("syncer/core/rounds/membership.pyx", "observe", "a sample of the step time"),
    Stop("syncer/core/rounds/gathering.pyx", "settle", "is it time to close?"),
    Stop("syncer/core/rounds/closing.pyx", "verdict_of", "everybody, quorum, grace, deadlines"),
    Stop("syncer/core/rounds/contributions.pyx", "contributions_of", "what is merged, in order"),
)
MERGED = (
    Stop("syncer/server/merging.py", "start", "the merge as a job"),
    Stop("syncer/merge/fragments.py", "prepare", "the next version, unpublished"),
    Stop("syncer/merge/versions.py", "FragmentVersion", "what is published and never changes"),
    Stop("syncer/pages.pyx", "take_block", "memory for the next one, used again"),
    Stop("syncer/merge/plan.pyx", "Plan", "which block of which tensor"),
    Stop("syncer/merge/optimizers.py", "OPTIMIZERS", "the outer step's constants"),
    Stop("syncer/merge/engine.pyx", "merge", "the door to C"),
    Stop("csrc/merge_fragment.c", "sm_merge", "correct, sum, step: block by block"),
    Stop("csrc/merge_threads.c", "sm_", "who takes which block"),
)
OUT = (
    Stop("syncer/core/run/committing.pyx", "publish", "in step order, durable first if asked"),
    Stop("syncer/server/outgoing.py", "broadcast", "one version, every current member"),
    Stop("syncer/server/catchups.py", "broadcast", "who joins waits until it is there"),
    Stop("syncer/server/wire_version.py", "WireVersion", "its bytes, made once for all"),
    Stop("syncer/server/outbox.pyx", "next_piece", "newest only, pulls behind their broadcast"),
    Stop("syncer/wire/encode.py", "chunk_message", "frames around the pieces"),
)
WALK = (
    ("from the socket to an event", IN), ("judged", JUDGED), ("merged", MERGED),
    ("out again, through `group.pyx` and `conn.pyx`", OUT),
)


def files() -> list[str]:
    """Every file on the way, once."""
    return list(dict.fromkeys(stop.path for _, stops in WALK for stop in stops))


def table() -> str:
    """The walk as a table, and how many files it is."""
    lines = ["| # | file | there | what |", "|---|---|---|---|"]
    number = 0
    for title, stops in WALK:
        lines.append(f"| | **{title}** | | |")
        for stop in stops:
            number += 1
            lines.append(f"| {number} | `{stop.path}` | `{stop.name}` | {stop.what} |")
    return "\n".join([*lines, "", f"{len(files())} files, {len(JUDGED)} of them rules.", ""])
