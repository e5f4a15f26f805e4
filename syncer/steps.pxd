# C surface of the arithmetic of steps. Unsigned: a file or a peer may name any step of 64 bits.

ctypedef unsigned long long step_t

cpdef Py_ssize_t fragment_of(step_t step, Py_ssize_t fragments) noexcept
cpdef step_t version_at(step_t step, Py_ssize_t fragment, Py_ssize_t fragments) noexcept
cpdef step_t merges_at(step_t version, Py_ssize_t fragment, Py_ssize_t fragments) noexcept
