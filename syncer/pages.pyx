"""Large blocks of memory for everybody in the process: used again, and not faulted in again.

A fresh 64 MiB block costs more than what is written into it: its pages are faulted in one by one,
which was measured at a quarter of the speed of a block that has been used before (and at six tenths
with huge pages). So pages that have come stay: what is given back becomes part of a free range, the
next block is cut from the smallest range that holds it, and where none does, free pages of several
ranges are moved into one place (mremap: neither copied nor faulted). The system is asked for pages
only when more are in use than ever before. Received bytes, decoded pushes, results of merges and
encoded broadcasts, which take turns, so share one memory.

Where each page is to stay with the threads that use it (`keep_apart`), blocks that last have a
stock of their own.

Must not know what a block holds. Needs the GIL, which is the lock of all this; no Python code runs
in between, so a block may come back on any thread.
"""

from libc.errno cimport errno
from libc.stdint cimport uintptr_t
from libc.stdlib cimport free, realloc
from libc.string cimport memmove, memset

cdef extern from *:
    """
    #include <errno.h>
    #include <stdlib.h>
    #include <sys/mman.h>
    #ifdef __linux__
    #include <sys/syscall.h>
    #include <unistd.h>
    #endif
    #define SYNCER_PAGE ((size_t)2 << 20)
    #define SYNCER_INTERLEAVE 3
    static char *syncer_map(char *at, size_t bytes) { /* `at` is a wish */
        char *memory =
            mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        return memory == MAP_FAILED ? NULL : memory;
    }
    /* Advice: it works without, only slower. */
    static void syncer_huge(char *at, size_t bytes) {
    #ifdef MADV_HUGEPAGE
        (void)madvise(at, bytes, MADV_HUGEPAGE);
    #endif
    }
    /* One page in place of one that was never written. The system looks at all that could go wrong
     * (another VMA, too many of them) before it touches either. */
    static int syncer_move(char *from, char *to) {
    #ifdef MREMAP_FIXED
        return mremap(from, SYNCER_PAGE, SYNCER_PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to) == to;
    #else
        return 0;
    #endif
    }
    static long syncer_interleave(char *at, size_t bytes, const unsigned long *nodes,
                                  unsigned long bits) {
    #ifdef SYS_mbind
        return syscall(SYS_mbind, at, bytes, SYNCER_INTERLEAVE, nodes, bits, 0u);
    #else
        errno = ENOSYS;
        return -1;
    #endif
    }
    """
    int posix_memalign(void** memory, size_t alignment, size_t bytes)
    int munmap(void* at, size_t bytes)
    char* syncer_map(char* at, size_t bytes)
    void syncer_huge(char* at, size_t bytes)
    int syncer_move(char* start, char* to)
    long syncer_interleave(char* at, size_t bytes, const unsigned long* nodes, unsigned long bits)

cdef enum:
    PAGE = 2 << 20        # a huge page: what the system is asked for, and what is moved
    NODE_WORDS = 16
    WORD = 8 * sizeof(long)

KEPT_BYTES_MAX = 256 << 20
"""Bytes of free pages that a process keeps at most, unless it says another number."""

cdef struct Range:
    char* start
    size_t bytes

cdef struct Stock:
    Range* ranges          # free, in order of their addresses; neighbours are one
    Py_ssize_t count, room

cdef Stock stocks[2]       # of all blocks; of the lasting ones, where they are kept apart
cdef bint apart = False
cdef size_t used = 0       # bytes of blocks
cdef size_t kept = 0       # bytes of free ranges
cdef size_t kept_max = KEPT_BYTES_MAX
cdef char* lowest = NULL   # the newest mapping: the next one is best put below it
cdef unsigned long nodes[NODE_WORDS]
cdef bint spread_out = False


def used_bytes():
    """Bytes of blocks that are in use."""
    return used


def kept_bytes():
    """Bytes of free pages that are kept for the next blocks."""
    return kept


def keep_at_most(size_t bytes_max):
    """How many bytes of free pages are kept from now on; what is more goes back to the system."""
    global kept_max
    kept_max = bytes_max
    shrink(bytes_max)


def free_kept():
    """Give all free pages back to the system: memory is short."""
    shrink(0)


def keep_apart(bint yes=True):
    """Lasting blocks and others share no pages from now on: each page stays where it was written
    first, which is where the thread runs that will use it again."""
    global apart
    apart = yes


def spread(numbers):
    """New pages are dealt out to these NUMA nodes in turn; none: as the system likes.

    Raises OSError if the system does not do that, and then nothing has changed.
    """
    global spread_out
    cdef unsigned long mask[NODE_WORDS]
    cdef char* probe
    cdef long failed
    memset(mask, 0, sizeof(mask))
    for number in numbers:
        if not 0 <= number < NODE_WORDS * WORD:
            raise OSError(f"node {number} is none of the first {NODE_WORDS * WORD}")
        mask[number // WORD] |= <unsigned long>1 << (number % WORD)
    if numbers:
        probe = syncer_map(NULL, PAGE)
        if probe == NULL:
            raise OSError(errno, "no memory to try it on")
        failed = syncer_interleave(probe, PAGE, mask, NODE_WORDS * WORD)
        problem = errno
        munmap(probe, PAGE)
        if failed:
            raise OSError(problem, "mbind")
    nodes[:] = mask
    spread_out = bool(numbers)


cdef inline size_t up(size_t bytes, size_t unit) noexcept:
    return (bytes + unit - 1) // unit * unit


cdef void drop_range(Stock* stock, Py_ssize_t index) noexcept:
    stock.count -= 1
    memmove(&stock.ranges[index], &stock.ranges[index + 1],
            (stock.count - index) * sizeof(Range))


cdef void cut(Stock* stock, Py_ssize_t index, char* start, size_t bytes) noexcept:
    """Takes this part out of a free range that holds it."""
    global kept
    cdef Range whole = stock.ranges[index]
    cdef size_t before = start - whole.start, behind = whole.bytes - before - bytes
    kept -= whole.bytes
    drop_range(stock, index)
    if behind:
        add_range(stock, start + bytes, behind)
    if before:
        add_range(stock, whole.start, before)


cdef void add_range(Stock* stock, char* start, size_t bytes) noexcept:
    """Pages that are free from now on; neighbours become one range."""
    global kept
    cdef Py_ssize_t low = 0, high = stock.count, middle
    cdef Range* ranges = stock.ranges
    while low < high:
        middle = (low + high) // 2
        if ranges[middle].start < start:
            low = middle + 1
        else:
            high = middle
    cdef bint joins_left = low > 0 and ranges[low - 1].start + ranges[low - 1].bytes == start
    cdef bint joins_right = low < stock.count and start + bytes == ranges[low].start
    kept += bytes
    if joins_left:
        ranges[low - 1].bytes += bytes
        if joins_right:
            ranges[low - 1].bytes += ranges[low].bytes
            drop_range(stock, low)
        return
    if joins_right:
        ranges[low].start = start
        ranges[low].bytes += bytes
        return
    if stock.count == stock.room:
        ranges = <Range*>realloc(ranges, (2 * stock.room + 64) * sizeof(Range))
        if ranges == NULL:  # no room to remember them
            kept -= bytes
            munmap(start, bytes)
            return
        stock.ranges, stock.room = ranges, 2 * stock.room + 64
    memmove(&ranges[low + 1], &ranges[low], (stock.count - low) * sizeof(Range))
    ranges[low].start, ranges[low].bytes = start, bytes
    stock.count += 1


cdef void shrink(size_t bytes_max) noexcept:
    """Gives free pages back to the system, of the largest ranges first."""
    global kept
    cdef Py_ssize_t i, index = 0
    cdef int which
    cdef Stock* stock
    cdef Stock* owner = NULL
    cdef Range* largest
    cdef size_t less
    while kept > bytes_max:
        largest = NULL
        for which in range(2):
            stock = &stocks[which]
            for i in range(stock.count):
                if largest == NULL or stock.ranges[i].bytes > largest.bytes:
                    owner, index, largest = stock, i, &stock.ranges[i]
        if largest == NULL:
            return
        less = min(up(kept - bytes_max, GRAIN), largest.bytes)
        largest.bytes -= less
        kept -= less
        munmap(largest.start + largest.bytes, less)
        if not largest.bytes:
            drop_range(owner, index)


cdef char* map_pages(size_t bytes) noexcept:
    """New memory, all +0, that begins with a huge page. NULL if there is none."""
    global lowest
    cdef char* at = NULL
    cdef size_t before
    if <uintptr_t>lowest > bytes:
        at = syncer_map(lowest - bytes, bytes)  # one range with it, when both are free
    if at != NULL and <uintptr_t>at % PAGE:
        munmap(at, bytes)
        at = NULL
    if at == NULL:
        at = syncer_map(NULL, bytes + PAGE)
        if at == NULL:
            return NULL
        before = (PAGE - <uintptr_t>at % PAGE) % PAGE
        if before:
            munmap(at, before)
        at += before
        munmap(at + bytes, PAGE - before)
    lowest = at
    prepare(at, bytes)
    return at


cdef void prepare(char* at, size_t bytes) noexcept:
    syncer_huge(at, bytes)
    if spread_out:
        syncer_interleave(at, bytes, nodes, NODE_WORDS * WORD)


cdef size_t gather(Stock* stock, char* at, size_t bytes) noexcept:
    """Moves free huge pages to `at`, of the smallest ranges first, until there are no more or all
    is full. Returns how many bytes of new memory are left behind them."""
    cdef size_t moved = 0
    cdef char* start
    cdef Py_ssize_t i, smallest
    while moved < bytes:
        smallest = -1
        for i in range(stock.count):
            if has_page(&stock.ranges[i]) and (
                smallest < 0 or stock.ranges[i].bytes < stock.ranges[smallest].bytes
            ):
                smallest = i
        if smallest < 0:
            break
        start = <char*>up(<uintptr_t>stock.ranges[smallest].start, PAGE)
        # every mapping is of whole pages: one of them never lies in two
        if not syncer_move(start, at + moved):
            break
        cut(stock, smallest, start, PAGE)
        moved += PAGE
    return bytes - moved


cdef bint has_page(const Range* free_range) noexcept:
    """Whether a whole huge page is in it."""
    return (up(<uintptr_t>free_range.start, PAGE) + PAGE
            <= <uintptr_t>free_range.start + free_range.bytes)


cdef void* take_block(size_t bytes, bint* zero, bint lasting) noexcept:
    """Memory for so many bytes, aligned to a cache line; NULL if there is none. zero: set if all of
    it is +0; otherwise what is in it is unspecified. lasting: of a fragment, not of a message."""
    global used
    cdef Stock* stock = &stocks[lasting and apart]
    cdef void* small = NULL
    cdef char* start
    cdef Py_ssize_t i, best = -1
    cdef size_t size = up(bytes, GRAIN), mapped = up(bytes, PAGE)
    zero[0] = False
    if bytes < GRAIN:
        return NULL if posix_memalign(&small, 64, bytes) else small
    if mapped < bytes:
        return NULL
    for i in range(stock.count):
        if stock.ranges[i].bytes >= size and (
            best < 0 or stock.ranges[i].bytes < stock.ranges[best].bytes
        ):
            best = i
    if best >= 0:
        start = stock.ranges[best].start
        cut(stock, best, start, size)
        used += size
        return start
    start = map_pages(mapped)
    if start == NULL and kept:
        shrink(0)
        start = map_pages(mapped)
    if start == NULL:
        return NULL
    zero[0] = gather(stock, start, mapped) == mapped
    used += size
    if mapped > size:
        add_range(stock, start + size, mapped - size)
    return start


cdef void give_block(void* memory, size_t bytes, bint lasting) noexcept:
    """A block that `take_block` gave for so many bytes is free again."""
    global used
    if memory == NULL:
        return
    if bytes < GRAIN:
        free(memory)
        return
    used -= up(bytes, GRAIN)
    add_range(&stocks[lasting and apart], <char*>memory, up(bytes, GRAIN))
    if kept > kept_max:
        shrink(kept_max)
