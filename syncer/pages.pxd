cdef enum:
    GRAIN = 65536  # blocks are whole ones of these; smaller ones are malloc's

cdef void* take_block(size_t bytes, bint* zero, bint lasting) noexcept
cdef void give_block(void* memory, size_t bytes, bint lasting) noexcept
