"""The layout inside a HELLO: merge modes, numels and iso shapes, bytes to `Layout`.

Compiled because a HELLO may hold over a million fragments and is read before its sender is known to
belong here: in Python that stops everybody else for seconds. What the bytes must hold is checked
without the GIL and without making an object; whether objects are made is the caller's choice. Must
not read the rest of HELLO.
"""

from libc.stdint cimport uint8_t, uint64_t
from libc.string cimport memcmp

from struct import Struct

from syncer.errors import RemoteProtocolError
from syncer.layout import AVG, ISO, RDA, FragmentLayout, Layout

FRAGMENT_HEAD = Struct("<BI")
"""merge_mode, num_tensors."""
cdef Py_ssize_t HEAD = FRAGMENT_HEAD.size
cdef int MODE_ISO = ISO
cdef int MODE_MAX = max(AVG, RDA, ISO)
cdef object new_tuple = tuple.__new__
# Numbers made into objects before other threads get their turn: a fraction of a millisecond. No
# bytecode runs meanwhile, where Python would look whether anybody waits.
cdef Py_ssize_t TURN = 8192


cdef enum Fault:
    NONE, TRUNCATED, MODE, NO_TENSORS, TENSORS, NO_ELEMENTS, TOO_LARGE, ALL_TOO_LARGE, SHAPE


cdef struct Scan:
    Fault fault
    Py_ssize_t at, size         # of the fault: offset, and bytes or tensors that were expected
    Py_ssize_t fragment, tensor
    uint64_t numel, largest


cdef inline uint64_t load(const uint8_t* at, int size) noexcept nogil:
    cdef uint64_t value = 0
    cdef int n
    for n in range(size - 1, -1, -1):
        value = value << 8 | at[n]
    return value


cdef Fault scan_fragment(const uint8_t* base, Py_ssize_t end, Scan* found) noexcept nogil:
    """One fragment at `found.at`, which is behind it afterwards."""
    cdef uint64_t numel, sum_numel = 0, rows, cols
    cdef const uint8_t* numels
    cdef const uint8_t* shape
    cdef Py_ssize_t count, n
    cdef int mode
    found.size = HEAD
    if HEAD > end - found.at:
        return TRUNCATED
    mode, count = base[found.at], <Py_ssize_t>load(base + found.at + 1, 4)
    found.size = mode
    if mode > MODE_MAX:
        return MODE
    if count == 0:
        return NO_TENSORS
    found.at += HEAD
    found.size = count
    if count > (end - found.at) // 8:
        return TENSORS
    numels = base + found.at
    for n in range(count):
        found.tensor = n
        numel = load(numels + 8 * n, 8)
        if numel == 0:
            return NO_ELEMENTS
        sum_numel += numel
        if sum_numel < numel:
            return TOO_LARGE
    found.numel += sum_numel
    if found.numel < sum_numel:
        return ALL_TOO_LARGE
    found.largest = max(found.largest, sum_numel)
    found.at += 8 * count
    if mode != MODE_ISO:
        return NONE
    found.size = 16 * count
    if found.size > end - found.at:
        return TRUNCATED
    for n in range(count):
        found.tensor = n
        shape = base + found.at + 16 * n
        numel, rows, cols = load(numels + 8 * n, 8), load(shape, 8), load(shape + 8, 8)
        # By division, because the product may not fit in 64 bits.
        if rows == 0 or numel % rows or numel // rows != cols:
            return SHAPE
    found.at += found.size
    return NONE


cdef str refusal(const uint8_t* base, Py_ssize_t end, Scan* found):
    """What is wrong with a layout that was scanned."""
    fragment, left = found.fragment, end - found.at
    shape = base + found.at + 16 * found.tensor
    if found.fault == TRUNCATED:
        return (f"payload truncated: {found.size} bytes expected at offset {found.at}, {left} are "
                "left")
    if found.fault == MODE:
        return f"fragment {fragment} has unknown merge mode {found.size}"
    if found.fault == NO_TENSORS:
        return f"fragment {fragment} must contain at least one tensor"
    if found.fault == TENSORS:
        return (f"fragment {fragment} has num_tensors {found.size}, which does not fit in the "
                f"{left} bytes left")
    if found.fault == NO_ELEMENTS:
        return f"fragment {fragment} tensor {found.tensor} has no elements"
    if found.fault == TOO_LARGE:
        return f"fragment {fragment} numel overflows 64 bits"
    if found.fault == ALL_TOO_LARGE:
        return "layout numel overflows 64 bits"
    numel = load(base + found.at - found.size // 2 + 8 * found.tensor, 8)
    return (f"fragment {fragment} tensor {found.tensor} has shape {load(shape, 8)} x "
            f"{load(shape + 8, 8)}, which is not its numel {numel}")


cdef class LayoutBytes:
    """A layout as it travels: whole, its sums known, and no object made of it.

    Equal to every other one of the same bytes, and these are the same for equal layouts.
    """

    cdef readonly object data
    cdef readonly Py_ssize_t fragments
    cdef readonly uint64_t numel, largest

    def __len__(self):
        """Bytes."""
        return len(self.data)

    def __eq__(self, other):
        cdef LayoutBytes that
        if not isinstance(other, LayoutBytes):
            return NotImplemented
        that = other
        return (self.fragments == that.fragments and self.numel == that.numel
                and self.begins(that.data) and len(self) == len(that))

    __hash__ = None

    def begins(self, const uint8_t[::1] data):
        """Whether `data` begins with these bytes."""
        cdef const uint8_t[::1] own = self.data
        cdef size_t size = len(own)
        cdef bint same
        if <size_t>len(data) < size:
            return False
        with nogil:
            same = memcmp(&own[0], &data[0], size) == 0
        return same

    def kept(self):
        """The same, without the message that it came in."""
        return _layout_bytes(bytes(self.data), self.fragments, self.numel, self.largest)

    def numels(self):
        """Elements of each fragment."""
        return tuple([fragment.numel for fragment in self.read().fragments])

    def read(self):
        """The `Layout`. Other threads get their turns meanwhile."""
        cdef const uint8_t[::1] data = self.data
        cdef const uint8_t* base = &data[0]
        cdef Py_ssize_t at = 0, count, turn = 0
        cdef int mode
        cdef tuple sizes, shapes
        cdef list found = []
        for _ in range(self.fragments):
            mode, count = base[at], <Py_ssize_t>load(base + at + 1, 4)
            at += HEAD
            sizes, shapes = numbers(base + at, count, 8), ()
            at += 8 * count
            if mode == MODE_ISO:
                shapes = tuple(zip(numbers(base + at, count, 16),
                                   numbers(base + at + 8, count, 16)))
                at += 16 * count
            found.append(new_tuple(FragmentLayout, (mode, sizes, shapes)))
            turn += 1 + count
            if turn >= TURN:
                turn = 0
                with nogil:
                    pass
        return Layout(tuple(found))


cdef tuple numbers(const uint8_t* at, Py_ssize_t count, Py_ssize_t stride):
    """`count` u64 values, `stride` bytes apart."""
    cdef Py_ssize_t n, begin
    cdef list found = []
    for begin in range(0, count, TURN):
        if begin:
            with nogil:
                pass
        found += [load(at + n * stride, 8) for n in range(begin, min(count, begin + TURN))]
    return tuple(found)


cdef LayoutBytes _layout_bytes(object data, Py_ssize_t fragments, uint64_t numel, uint64_t largest):
    cdef LayoutBytes made = LayoutBytes.__new__(LayoutBytes)
    made.data, made.fragments, made.numel, made.largest = data, fragments, numel, largest
    return made


def scan_layout(const uint8_t[::1] data, Py_ssize_t start, Py_ssize_t fragments):
    """The layout of `fragments` > 0 fragments that begins at `start` of `data`, as `LayoutBytes`.

    Every count is compared with the bytes that are there. Raises RemoteProtocolError for the first
    fragment that no layout can have.
    """
    cdef const uint8_t* base = &data[0]
    cdef Py_ssize_t end = len(data), n
    cdef Scan found
    if fragments > (end - start) // HEAD:
        raise RemoteProtocolError(
            f"num_fragments {fragments} does not fit in the {end - start} bytes left"
        )
    found.fault, found.at, found.size = NONE, start, 0
    found.fragment, found.tensor, found.numel, found.largest = 0, 0, 0, 0
    with nogil:
        for n in range(fragments):
            found.fragment = n
            found.fault = scan_fragment(base, end, &found)
            if found.fault != NONE:
                break
    if found.fault != NONE:
        raise RemoteProtocolError(refusal(base, end, &found))
    return _layout_bytes(data.base[start:found.at], fragments, found.numel, found.largest)
