# C surface of the policy: a configuration in the units of the round logic.
from syncer.core.rounds.round cimport Round

cdef class Policy:
    cdef readonly Py_ssize_t learners
    cdef readonly Py_ssize_t quorum
    cdef readonly Py_ssize_t pipeline
    cdef readonly long long total_steps
    cdef readonly long long max_base_lag     # < 0: no limit
    cdef readonly bint fixed_roster
    cdef readonly bint equal_weights
    cdef readonly bint final_state
    # time
    cdef readonly long long grace_cap_ns
    cdef readonly double grace_gamma
    cdef readonly double grace_tau
    cdef readonly long long launch_floor_ns
    cdef readonly double interval_steps
    cdef readonly long long quorum_timeout_ns
    cdef readonly long long final_ack_timeout_ns
    # start
    cdef readonly Py_ssize_t start_learners
    cdef readonly long long start_timeout_ns  # 0: wait for ever
    # capacity quorum
    cdef readonly object capacity_quorum     # theta in millionths, None: count quorum
    cdef readonly Py_ssize_t q_min
    cdef readonly dict capacities            # learner id -> millionths; 1 unless named
    cdef readonly long long soft_deadline_ns  # from launch; 0: none
    # folds
    cdef readonly bint folds                 # pushes are folded as they come
    cdef readonly bint exact_fold
    # late carry
    cdef readonly bint late_carry
    cdef readonly bint carry_answers
    cdef readonly double carry_gamma
    cdef readonly long long max_carry_lag
    # learner budget
    cdef readonly unsigned long long budget_steps  # 0: not in budget mode

    cdef double weight(self, object push) except? -1
    cdef object capacity_of(self, Py_ssize_t learner)
    cdef bint quorum_reached(self, Round round)
    cdef long long soft_deadline_of(self, Round round)
    cdef Py_ssize_t relaunch_needs(self)
