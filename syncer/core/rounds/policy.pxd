# C surface of the policy: a configuration in the units of the round logic.

cdef enum:
    MILLION = 1_000_000                      # parts of a capacity or of a share


cdef class Policy:
    cdef readonly Py_ssize_t learners
    cdef readonly Py_ssize_t quorum
    cdef readonly Py_ssize_t pipeline
    cdef readonly long long total_steps
    cdef readonly long long max_base_lag     # < 0: no limit
    cdef readonly bint fixed_roster
    cdef readonly bint equal_weights         # of --learner-weight
    cdef readonly bint final_state
    # time
    cdef readonly long long grace_ns
    cdef readonly double grace_gamma
    cdef readonly double grace_tau
    cdef readonly long long min_round_interval_ns
    cdef readonly double sync_interval_steps
    cdef readonly long long quorum_timeout_ns
    cdef readonly long long longest_attempt_ns
    cdef readonly long long final_ack_timeout_ns
    # start
    cdef readonly Py_ssize_t start_learners
    cdef readonly long long linger_ns
    cdef readonly bint lingers_until_all_have_it
    cdef readonly long long start_timeout_ns  # 0: wait for ever
    # capacity quorum
    cdef readonly object quorum_capacity     # theta in millionths, None: count quorum
    cdef readonly Py_ssize_t q_min
    cdef readonly dict learner_capacity      # learner id -> millionths; 1 unless named
    cdef readonly long long soft_deadline_ns  # from launch; 0: none
    # of --fold
    cdef readonly bint folds                 # pushes are folded as they come
    cdef readonly bint exact_fold
    # what a merge leaves out
    cdef readonly long long nonfinite_limit
    cdef readonly Py_ssize_t least_values    # of --robust
    # late carry
    cdef readonly bint late_carry
    cdef readonly bint carry_answers_round
    cdef readonly double carry_gamma
    cdef readonly long long max_carry_lag
    # learner budget
    cdef readonly unsigned long long learner_budget_steps  # 0: not in budget mode

    cdef double weight(self, object push) except? -1
    cdef object capacity_of(self, Py_ssize_t learner)
