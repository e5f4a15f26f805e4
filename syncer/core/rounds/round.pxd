# C surface of a round. Times are ns of the scheduler's clock; NEVER means unset.
from syncer.core.rounds.carry cimport Carried
from syncer.core.rounds.membership cimport Member
from syncer.core.rounds.policy cimport Policy

cpdef enum RoundState:
    GATHERING = 0
    COMPUTING = 1
    READY = 2


cdef class Slot:
    cdef readonly Member member              # of the expected set; may be gone by now
    cdef readonly object push                # the accepted Push event, or None
    cdef readonly bint holds                 # the push's payload is still ours to give back
    cdef readonly long long again_ns         # when it is asked again; NEVER: it is not
    cdef long long pause_ns                  # between its last refusal and that; 0 before any
    cdef long long pulled_ns                 # its learner was asked for it last


cdef class Round:
    cdef readonly long long step
    cdef readonly Py_ssize_t fragment
    cdef readonly long long base
    cdef readonly unsigned int attempt
    cdef readonly RoundState state
    cdef readonly dict slots                 # learner id -> Slot: the expected set E
    cdef readonly dict carried               # learner id -> Carried: late pushes that joined
    cdef readonly dict asking                # learner id -> Slot that is to be asked again
    cdef readonly Py_ssize_t answered        # answered slots
    cdef readonly Py_ssize_t pushed          # slots with a push
    cdef readonly object capacity_expected   # of E, in millionths
    cdef readonly object capacity_answered   # of the answered slots
    cdef readonly long long begun_ns         # launch of the first attempt
    cdef readonly long long launch_ns        # of this attempt
    cdef readonly long long quorum_deadline_ns
    cdef readonly long long patience_ns      # from launch to there, of this attempt
    cdef readonly bint outrun                # in this attempt: an answer to an earlier one came
    cdef readonly long long quorum_ns        # when quorum was first seen
    cdef readonly long long verdict_ns       # before that it just waits; 0: it has changed
    cdef readonly long long grace_deadline_ns
    cdef readonly long long grace_ns
    cdef readonly list released              # ids whose slot left E
    cdef readonly list joined                # ids that entered by late join
    cdef readonly Py_ssize_t stale_refused
    cdef readonly tuple contributions        # once computing; what is merged, once computed
    cdef readonly dict weights               # (learner, carried) -> weight, of what is in a fold
    cdef readonly bint told_too_few          # in this attempt
    cdef bint told_deferred                  # in this attempt
    cdef readonly list excluded              # (contribution, attempt, element) of what was left out
    cdef readonly bint folds                 # of this attempt: pushes are added up as they come
    cdef readonly long long compute_ns
    cdef readonly double gnorm
    cdef readonly str error
    cdef readonly long long committed_ns
    cdef Policy policy

    cdef int launch(self, long long now_ns, list members) except -1
    cdef bint contributed(self) noexcept
    cdef bint mergeable(self)
    cdef bint answers(self, Slot slot)
    cdef int count_answer(self, Slot slot) except -1
    cdef int accept(self, Slot slot, object push) except -1
    cdef int attach(self, Carried late) except -1
    cdef int arm_grace(self, long long now_ns, long long grace_ns) except -1
    cdef int heard_late(self, Slot slot, object push) except -1
    cdef int drop_slot(self, Py_ssize_t learner) except -1
    cdef int ask_later(self, Slot slot, long long now_ns) except -1
    cdef int pulled(self, tuple members, long long now_ns) except -1
    cdef int asked(self, Py_ssize_t learner) except -1
    cdef int pass_on(self, Slot slot, Member member) except -1
    cdef int join(self, Member member) except -1
    cdef list expected_members(self)
    cdef list unanswered(self)
    cdef list free_pushes(self)
    cdef list free_all(self)
    cdef int start_computing(self, tuple contributions) except -1
    cdef int finish_computing(self, object done) except -1
    cdef int reopen(self) except -1
    cdef frozenset heard(self)
