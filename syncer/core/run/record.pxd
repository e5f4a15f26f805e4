# C surface of the tape records.
from syncer.core.rounds.round cimport Round

cpdef dict merge_record(Round round, str layout_hash, Py_ssize_t quorum, long long sync_ns,
                        long long failed_saves=*)
cpdef dict failure_record(str metric, str error)
