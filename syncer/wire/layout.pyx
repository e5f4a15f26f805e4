"""The layout inside a HELLO: merge modes, numels and iso shapes, bytes to `Layout`.

Compiled because a HELLO may hold over a million fragments and is read before its sender is known to
belong here: in Python that stops everybody else for seconds. Every count is checked against the
bytes that are there before anything is made for it. Must not read the rest of HELLO.
"""

from libc.stdint cimport uint8_t, uint64_t

from struct import Struct

from syncer.errors import RemoteProtocolError
from syncer.layout import AVG, ISO, RDA, FragmentLayout, Layout

FRAGMENT_HEAD = Struct("<BI")
"""merge_mode, num_tensors."""
cdef Py_ssize_t HEAD = FRAGMENT_HEAD.size
cdef int MODE_ISO = ISO
cdef int MODE_MAX = max(AVG, RDA, ISO)
cdef object new_tuple = tuple.__new__


cdef inline uint64_t load(const uint8_t* at, int size) noexcept nogil:
    cdef uint64_t value = 0
    cdef int n
    for n in range(size - 1, -1, -1):
        value = value << 8 | at[n]
    return value


cdef tuple numbers(const uint8_t* at, Py_ssize_t count, Py_ssize_t stride):
    """`count` u64 values, `stride` bytes apart."""
    cdef Py_ssize_t n
    return tuple([load(at + n * stride, 8) for n in range(count)])


cdef object check_shapes(const uint8_t* numels, const uint8_t* shapes, Py_ssize_t count,
                         Py_ssize_t fragment):
    cdef Py_ssize_t n
    cdef uint64_t numel, rows, cols
    for n in range(count):
        numel = load(numels + 8 * n, 8)
        rows, cols = load(shapes + 16 * n, 8), load(shapes + 16 * n + 8, 8)
        # By division, because the product may not fit in 64 bits.
        if rows == 0 or numel % rows or numel // rows != cols:
            raise RemoteProtocolError(
                f"fragment {fragment} tensor {n} has shape {rows} x {cols}, "
                f"which is not its numel {numel}"
            )


def parse_layout(const uint8_t[::1] data, Py_ssize_t start, Py_ssize_t fragments):
    """(Layout, offset behind it) of `fragments` > 0 fragments that begin at `start`.

    Raises RemoteProtocolError for the first one that no layout can have.
    """
    cdef const uint8_t* base = &data[0]
    cdef Py_ssize_t at = start, end = len(data), fragment, count, n
    cdef uint64_t numel, fragment_numel, layout_numel = 0
    cdef int mode
    cdef tuple numels, shapes
    cdef list found = []
    if fragments > (end - at) // HEAD:
        raise RemoteProtocolError(
            f"num_fragments {fragments} does not fit in the {end - at} bytes left"
        )
    for fragment in range(fragments):
        require(HEAD, at, end)
        mode, count = base[at], <Py_ssize_t>load(base + at + 1, 4)
        at += HEAD
        if mode > MODE_MAX:
            raise RemoteProtocolError(f"fragment {fragment} has unknown merge mode {mode}")
        if count == 0:
            raise RemoteProtocolError(f"fragment {fragment} must contain at least one tensor")
        if count > (end - at) // 8:
            raise RemoteProtocolError(
                f"fragment {fragment} has num_tensors {count}, which does not fit in the "
                f"{end - at} bytes left"
            )
        fragment_numel = 0
        for n in range(count):
            numel = load(base + at + 8 * n, 8)
            if numel == 0:
                raise RemoteProtocolError(f"fragment {fragment} tensor {n} has no elements")
            fragment_numel += numel
            if fragment_numel < numel:
                raise RemoteProtocolError(f"fragment {fragment} numel overflows 64 bits")
        layout_numel += fragment_numel
        if layout_numel < fragment_numel:
            raise RemoteProtocolError("layout numel overflows 64 bits")
        numels, shapes = numbers(base + at, count, 8), ()
        at += 8 * count
        if mode == MODE_ISO:
            require(16 * count, at, end)
            check_shapes(base + at - 8 * count, base + at, count, fragment)
            shapes = tuple(zip(numbers(base + at, count, 16), numbers(base + at + 8, count, 16)))
            at += 16 * count
        found.append(new_tuple(FragmentLayout, (mode, numels, shapes)))
    return Layout(tuple(found)), at


cdef object require(Py_ssize_t size, Py_ssize_t at, Py_ssize_t end):
    if size > end - at:
        raise RemoteProtocolError(
            f"payload truncated: {size} bytes expected at offset {at}, {end - at} are left"
        )
