# Deadlines are ns of the scheduler's clock, in 64 bits. NEVER is one that does not exist.

cdef extern from *:
    """
    #define SYNCER_NEVER 0x7FFFFFFFFFFFFFFFLL
    """
    const long long NEVER "SYNCER_NEVER"
