# C surface of the phases of a run and of what each of them does with an event.

cpdef enum Phase:
    WAITING = 0      # for a session, every INIT and enough learners
    RUNNING = 1
    SAVING = 2       # every step is committed; checkpoint or final state are being written
    FINISHING = 3    # the final cut is out
    CUTOFF = 4       # a learner has spent its budget: reports, then the cut-off checkpoint
    STOPPING = 5     # a signal or a failure; the last cut is being written
    ENDED = 6

cpdef enum Handler:
    IGNORE = 0
    DEFECT = 1
    TIME = 2
    HELLO = 3
    TURN_AWAY = 4
    GONE = 5
    INIT = 6
    PROGRESS = 7
    PUSH = 8
    OUTLIVED = 9
    RELEASE = 10
    FOLDED = 11
    CAUGHT_UP = 12
    MERGED = 13
    SYNCED = 14
    SAVED = 15
    EARLY = 16
    ACK = 17
    BUDGET = 18
    STOP = 19
    MISFIT = 20
    NO_ROOM = 21
    BROKEN = 22
    STALLED = 23

cdef int handler_of(Phase phase, object event) except -1
