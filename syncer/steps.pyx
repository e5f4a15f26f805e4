"""Step <-> fragment <-> version: the arithmetic of a session of P fragments; must not know a run.

Steps count from 1, and step t merges fragment (t - 1) mod P. The *version* of a fragment is the
step that merged it last, 0 before its first merge. So a cut after step t, the state between two
commits, has exactly one version of each fragment: the largest step <= t that is the fragment's own.
"""


cpdef Py_ssize_t fragment_of(step_t step, Py_ssize_t fragments) noexcept:
    """The fragment that step `step` (>= 1) merges, of `fragments` (>= 1)."""
    return <Py_ssize_t>((step - 1) % <step_t>fragments)


cpdef step_t version_at(step_t step, Py_ssize_t fragment, Py_ssize_t fragments) noexcept:
    """Version of a fragment in the cut after `step`: the last step that merged it, 0 if none."""
    cdef step_t first = <step_t>fragment + 1
    return 0 if step < first else step - (step - first) % <step_t>fragments


cpdef step_t merges_at(step_t version, Py_ssize_t fragment, Py_ssize_t fragments) noexcept:
    """How many merges of a fragment lie at or before a version or step; 0 for version 0."""
    cdef step_t first = <step_t>fragment + 1
    return 0 if version < first else (version - first) // <step_t>fragments + 1
