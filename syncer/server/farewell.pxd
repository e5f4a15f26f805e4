# C surface of goodbyes. Everything belongs to the loop's thread.
from syncer.server.conn cimport Channel, Owner
from syncer.server.loop cimport Timer


cdef class Farewell(Owner):
    cdef list channels
    cdef Channel main
    cdef Timer timer
    cdef object done
