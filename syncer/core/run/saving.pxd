# C surface of the writes of a run: which one is under way, which one waits, what is on disk.

cdef class Saves:
    cdef readonly bint on                    # a checkpoint path is set
    cdef readonly bint every_commit          # a step is durable before it is visible
    cdef readonly object outstanding         # SaveKind of the one Save that is under way
    cdef readonly bint in_background         # rounds go on meanwhile
    cdef readonly object wanted              # SaveKind of the Save that waits for it
    cdef readonly long long durable_step     # newest cut that is known to be on disk; -1: none
    cdef readonly str failure                # of a write in the background; told at the next wait
    cdef readonly long long step             # of the newest Save
    cdef long long every
    cdef bint background
    cdef readonly bint goes_on               # when a save fails that is not the last one
    cdef readonly bint begun                 # a file is there, or version 0 could not be written
    cdef readonly long long failures         # saves that have failed since the newest file

    cdef bint first_due(self)
    cdef bint forgives(self, object kind)
    cdef bint hold_commits(self)
    cdef bint gives_way(self)
    cdef bint due(self, long long step)
    cdef int start(self, object kind, long long step, bint running) except -1
    cdef object done(self, object error)
