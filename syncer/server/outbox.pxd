# C surface of a connection group's queue. One thread; no sockets, no clock.


cdef class Bulk:
    # One message in the queue or under way; `pieces` is None until it starts.
    cdef readonly object image
    cdef list pieces
    cdef object pull
    cdef Py_ssize_t left, open, offset
    cdef readonly Py_ssize_t rough  # bytes at the end of the newest piece that are not encoded yet
    cdef bint final

    cdef Py_ssize_t refine(self, Py_ssize_t offset, Py_ssize_t rough) except -1


cdef class Outbox:
    cdef readonly Py_ssize_t fragments
    cdef public Py_ssize_t stripes  # sockets that each message is cut for
    cdef public bint takes_changes  # the peer has said so, and the run has some
    cdef dict queued            # fragment -> Bulk that has not started, in sending order
    cdef list under_way         # Bulks with pieces handed out or left
    cdef Bulk feeding           # the one whose next piece comes next
    cdef dict newest            # fragment -> newest version taken in
    cdef dict sent              # fragment -> newest version handed to the kernel
    cdef dict owed              # fragment -> version that the catch-up has still to send, or newer
    cdef set backlog            # fragments still queued or under way from before the tail
    cdef dict pulls             # fragment -> PULL_REQ that may go
    cdef list small             # other small frames that may go
    cdef bytes manifest
    cdef Py_ssize_t finals_left
    cdef unsigned long long next_id
    cdef readonly bint catching_up
    cdef bint finalizing

    cdef Bulk _start(self)
    cdef object _smallest(self, object image)
    cdef object _bring_forward(self)

    cpdef bint broadcast(self, object image)
    cpdef object pull(self, Py_ssize_t fragment, bytes frame)
    cdef list take_frames(self)
    cdef list take_pulls(self, Bulk behind=*)
    cpdef list take_small(self)
    cpdef tuple next_piece(self)
    cpdef object piece_sent(self, Bulk bulk)
    cpdef tuple caught_up(self)
    cpdef bint has_pieces(self)
    cpdef bint awaited(self)
