# C surface of a round. Times are ns of the scheduler's clock; NEVER means unset.
from syncer.core.membership cimport Member

cpdef enum RoundState:
    GATHERING = 0
    COMPUTING = 1
    READY = 2


cdef class Slot:
    cdef readonly Member member              # of the expected set; may be gone by now
    cdef readonly object push                # the accepted Push event, or None


cdef class Round:
    cdef readonly long long step
    cdef readonly Py_ssize_t fragment
    cdef readonly long long base
    cdef readonly unsigned int attempt
    cdef readonly RoundState state
    cdef readonly dict slots                 # learner id -> Slot: the expected set E
    cdef readonly Py_ssize_t answered        # slots with a push
    cdef readonly long long launch_ns        # of this attempt
    cdef readonly long long quorum_deadline_ns
    cdef readonly long long quorum_ns        # when quorum was first seen
    cdef readonly long long grace_deadline_ns
    cdef readonly long long grace_ns
    cdef readonly list released              # ids whose slot a stale push gave up
    cdef readonly list joined                # ids that entered by late join
    cdef readonly Py_ssize_t stale_refused
    cdef readonly tuple contributions        # once computing
    cdef readonly bint payloads_held         # contributions still own their payloads
    cdef readonly long long compute_ns
    cdef readonly double gnorm
    cdef readonly str error
    cdef readonly long long committed_ns

    cdef int launch(self, long long now_ns, list members, long long quorum_deadline_ns) except -1
    cdef list relaunch(self, long long now_ns, list members, long long quorum_deadline_ns)
    cdef list pushes(self)
    cdef int accept(self, Slot slot, object push) except -1
    cdef int arm_grace(self, long long now_ns, long long grace_ns) except -1
    cdef int release_slot(self, Py_ssize_t learner) except -1
    cdef int join(self, Member member) except -1
    cdef list expected_members(self)
    cdef int start_computing(self, tuple contributions) except -1
    cdef int finish_computing(self, object done) except -1
