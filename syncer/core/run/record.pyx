"""The records of the event tape, keys in the order in which readers know them.

Pure: builds dictionaries; writing them is the driver's.
"""

from syncer.core.deadlines cimport NEVER
from syncer.core.rounds.membership cimport Member
from syncer.core.rounds.round cimport Round, Slot

from syncer.protocol import PROTOCOL_VERSION

DELTA_SEMANTICS = "local_minus_raw_anchor"


cpdef dict merge_record(Round round, str layout_hash, Py_ssize_t quorum, long long sync_ns,
                        long long failed_saves=0):
    """The record of one committed round.

    layout_hash: the fingerprint in hex. `ms` runs from the launch of the merged attempt to the
    commit; `sync_ms` is compute + commit + broadcast. A `contribution` is a share of the total
    weight of pushes and carried deltas, 0 when that is not positive. `responded` are the expected
    learners that answered; with --carry-answers-round a carried delta is an answer.
    """
    cdef Slot slot
    cdef Member member
    cdef list missed = []
    cdef list responded = []
    cdef list carried = []
    cdef list answered = []
    cdef list expected = round.expected_members()
    cdef dict identities = {}                    # as many dictionaries as members, not three times
    cdef double total = 0.0
    for member in expected:
        slot = round.slots[member.learner]
        identities[member.learner] = identity(member)
        (answered if round.answers(slot) else missed).append(member)
    for contribution in round.contributions:
        total += contribution.weight
        if contribution.carried:
            carried.append(contribution)
        else:
            responded.append(contribution)
    record = {
        "protocol_version": PROTOCOL_VERSION,
        "delta_semantics": DELTA_SEMANTICS,
        "sync/layout_hash": layout_hash,
        "sync/base_version": round.base,
        "sync/responders": len(responded),
        "sync/quorum": quorum,
        "sync/rejected_stale_updates": round.stale_refused,
        "sync/merge_seconds": round.compute_ns / 1e9,
        "sync/global_delta_norm": round.gnorm,
        "step": round.step,
        "fragment": round.fragment,
        "launch_base_version": round.base,
        "attempt": round.attempt,
        "gnorm": round.gnorm,
        "ms": milliseconds(round.committed_ns - round.launch_ns),
        "quorum": quorum,
        "expected": [m.learner for m in expected],
        "expected_members": list(identities.values()),
        "responded": [m.learner for m in answered],
        "responded_members": [answerer(round, m) for m in answered],
        "missed_grace": [m.learner for m in missed],
        "missed_members": [identities[m.learner] for m in missed],
        "quorum_ms": (None if round.quorum_ns == NEVER
                      else milliseconds(round.quorum_ns - round.launch_ns)),
        "grace_ms": None if round.grace_ns == NEVER else milliseconds(round.grace_ns),
        "sync_ms": milliseconds(sync_ns),
        "responders": [responder(c, round.base, total) for c in responded],
    }
    if carried:
        record["carried"] = [carried_delta(c, total) for c in carried]
    if round.excluded:
        record["excluded"] = [
            {"id": c.learner, "generation": c.generation, "attempt": attempt, "element": element}
            for c, attempt, element in round.excluded]
    if round.released:
        record["released"] = sorted(round.released)
    if round.joined:
        record["joined"] = sorted(round.joined)
    if failed_saves:
        record["failed_saves"] = failed_saves
    return record


cpdef dict failure_record(str metric, str error):
    """The record of a strict failure, written just before the run ends."""
    return {"event": "rl_strict_failure", "metric": metric, "value": 1, "error": error}


cdef double milliseconds(long long ns) noexcept:
    return <double>ns / 1e6


cdef dict identity(object who):
    return {"id": who.learner, "generation": who.generation}


cdef dict answerer(Round round, Member member):
    """Who answered a member's slot: in a fixed roster that may be a newer generation."""
    cdef Slot slot = round.slots[member.learner]
    return identity(member if slot.push is None else slot.push)


cdef dict responder(object contribution, long long base, double total):
    return {
        "id": contribution.learner,
        "generation": contribution.generation,
        "base_version": contribution.base,
        "staleness": base - contribution.base,
        "c_steps": contribution.c_steps,
        "c_tokens": contribution.c_tokens,
        "weight": contribution.weight,
        "contribution": contribution.weight / total if total > 0 else 0.0,
    }


cdef dict carried_delta(object contribution, double total):
    return {
        "id": contribution.learner,
        "base_version": contribution.base,
        "lag": contribution.lag,
        "discount": contribution.discount,
        "weight": contribution.weight,
        "generation": contribution.generation,
        "c_steps": contribution.c_steps,
        "c_tokens": contribution.c_tokens,
        "contribution": contribution.weight / total if total > 0 else 0.0,
    }
