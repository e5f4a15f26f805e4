# Part of _native.pyx: which variants there are, which run, and whether they are right.

def variants():
    """{family: [(name, supported by this CPU), ...]}, best first."""
    found = {}
    cdef int family, i
    for family in range(SK_FAMILIES):
        names = []
        i = 0
        while sk_variant_name(family, i) != NULL:
            names.append((sk_variant_name(family, i).decode(),
                          bool(sk_variant_supported(family, i))))
            i += 1
        found[sk_family_name(family).decode()] = names
    return found


def active():
    """{family: name of the selected variant}."""
    return {sk_family_name(f).decode(): sk_active_name(f).decode() for f in range(SK_FAMILIES)}


def select(str family, str variant):
    """Points a family at a variant, for the whole process. Raises KernelError.

    Not for use while another thread runs kernels: tests and benchmarks only."""
    status = sk_select(family.encode(), variant.encode())
    if status == SK_UNKNOWN_FAMILY:
        raise KernelError(f"no kernel family {family!r}; there are {', '.join(variants())}")
    names = [name for name, _ in variants().get(family, ())]
    if status == SK_UNKNOWN_VARIANT:
        raise KernelError(f"kernel family {family!r} has no variant {variant!r}; "
                          f"this build has {', '.join(names)}")
    if status == SK_UNSUPPORTED_VARIANT:
        usable = [name for name, supported in variants()[family] if supported]
        raise KernelError(f"this CPU cannot run the {variant!r} variant of {family!r}; "
                          f"it can run {', '.join(usable)}")


def cpu_features():
    """Names of the CPU features that the variants ask for and this CPU has."""
    found = sk_cpu_detect()
    return [sk_cpu_name(bit).decode() for bit in range(SK_CPU_COUNT) if found >> bit & 1]


def build_facts():
    """(compiler, whether the kernels were built with OpenMP)."""
    return sk_compiler().decode(), bool(sk_has_openmp())


def float_faults():
    """What differs from IEEE-754's default in how the calling thread computes; '' if nothing.

    Kernels compute as IEEE-754 says in any case. Other arithmetic of the thread does not."""
    cdef unsigned faults = sk_float_faults()
    said = []
    if faults & SK_FLOAT_FLUSHES:
        said.append("subnormal numbers are flushed to zero")
    if faults & SK_FLOAT_ROUNDS:
        said.append("results are not rounded to nearest")
    if faults and not said:
        said.append("traps or the handling of NaN are changed")
    return ", ".join(said)


def float_exact():
    """Puts the calling thread into IEEE-754's default mode; returns what it was, for float_back."""
    return sk_float_exact()


def float_back(uint64_t mode):
    """Puts the calling thread back into the mode that float_exact returned."""
    sk_float_back(mode)


cdef void *lend(void *context, size_t nbytes) noexcept:
    return PyMem_RawMalloc(nbytes if nbytes else 1)


cdef void give_back(void *context, void *memory) noexcept:
    PyMem_RawFree(memory)


cdef void note_failure(void *context, const char *family, const char *variant, const char *what,
                       size_t n) noexcept:
    (<list>context).append((family.decode(), variant.decode(), what.decode(), n))


def check():
    """Golden results of every variant this CPU runs, and each variant against portable.

    Returns the failures as (family, variant, what, length), empty when all bits are right. Takes
    about a second and selects variants meanwhile: no other thread may run kernels."""
    failures = []
    cdef sk_check_host host = [<void *>failures, lend, give_back, note_failure]
    sk_check(&host)
    return failures


sk_init()
