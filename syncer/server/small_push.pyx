"""A push of a small fragment, from its bytes to its event on the spot.

The short way for what every learner sends in every round of small fragments. It must not refuse or
keep anything: what is not as it should be is left to `ingest`, which finds out what is wrong.

Compiled because of fleets: with 64 learners the same in Python was half of what a round of 1 KiB
took beside its system calls.
"""

from syncer.server.decoded cimport Decoded, memory_for

from syncer.core import events
from syncer.protocol import tensor_bytes
from syncer.server import workers
from syncer.server.decoded import DECODERS
from syncer.wire.messages import PUSH_HEAD

cdef object PUSH = events.Push, NEW = tuple.__new__, UNPACKED = PUSH_HEAD.unpack_from
cdef Py_ssize_t HEAD_BYTES = PUSH_HEAD.size


def small_push(group, payload, pool, bint keep_wire):
    """The event of a PUSH of few elements, all finite, by `messages.parse_push` with nothing wrong;
    None: it has to go the long way."""
    cdef Decoded decoded
    cdef Py_ssize_t size = len(payload), numel
    hello = group.hello
    if size < HEAD_BYTES:
        return None
    sender, fragment, step, attempt, base, local_step, c_steps, c_tokens = UNPACKED(payload)
    fragments = hello.layout.fragments
    if sender != hello.learner or not attempt or not c_steps or fragment >= len(fragments):
        return None
    numel = fragments[fragment].numel
    if numel > workers.INLINE_ELEMENTS_MAX or size != HEAD_BYTES + tensor_bytes(
            numel, hello.dtype):
        return None
    tensor = payload[HEAD_BYTES:]
    try:
        decoded = memory_for(pool, numel, tensor, hello.dtype, keep_wire)
    except MemoryError:
        return None
    if DECODERS[hello.dtype](tensor, decoded.array, True, 1) >= 0:
        return None
    return NEW(PUSH, (sender, group.generation, fragment, step, attempt, base, local_step, c_steps,
                      c_tokens, decoded))
