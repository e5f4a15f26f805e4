/* How the calling thread computes with floats: enter a kernel as IEEE-754 has it, leave it as found.
 *
 * Must not: touch the sticky exception flags, which belong to whoever runs here (kernels set them, and
 * blend_x86_avx2_faint.c clears two).
 *
 * The mode is a register of each thread. Libraries change it (flush-to-zero and denormals-are-zero
 * for speed, a rounding direction, traps), threads inherit it from whoever makes them, and an OpenMP
 * team keeps what it was made with. So no caller can promise it: every entry of csrc looks at it,
 * and so does each thread of a team. Looking takes some 30 ns, once per array and thread.
 *
 * A compiler may move arithmetic on registers over these statements, but nothing that is read from
 * or written to memory. So what lies between them must take its floats from memory and leave its
 * results there, or be a call that is not inlined.
 */
#ifndef SYNCER_FLOAT_MODE_H
#define SYNCER_FLOAT_MODE_H

#include <stdint.h>

#if defined(__x86_64__)

#define SK_MODE_USUAL 0x1F80u /* all exceptions masked, to nearest, nothing flushed */
#define SK_MODE_FLAGS 0x003Fu
#define SK_MODE_FLUSH 0x8040u /* results (FTZ) and operands (DAZ) */
#define SK_MODE_ROUND 0x6000u

static inline uint64_t sk_mode_read(void) {
    uint32_t mode;
    __asm__ volatile("stmxcsr %0" : "=m"(mode) : : "memory");
    return mode;
}

static inline void sk_mode_write(uint64_t value) {
    uint32_t mode = (uint32_t)value;
    __asm__ volatile("ldmxcsr %0" : : "m"(mode) : "memory");
}

#elif defined(__aarch64__)

#define SK_MODE_USUAL 0u
#define SK_MODE_FLAGS 0u         /* they are in FPSR */
#define SK_MODE_FLUSH 0x1080001u /* FZ, FZ16, FIZ */
#define SK_MODE_ROUND 0x0C00000u

static inline uint64_t sk_mode_read(void) {
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode) : : "memory");
    return mode;
}

static inline void sk_mode_write(uint64_t mode) {
    __asm__ volatile("msr fpcr, %0" : : "r"(mode) : "memory");
}

#else /* what the thread has is used; the self-check at import tells when that is not IEEE-754 */

#define SK_MODE_USUAL 0u
#define SK_MODE_FLAGS 0u
#define SK_MODE_FLUSH 0u
#define SK_MODE_ROUND 0u

static inline uint64_t sk_mode_read(void) { return 0; }
static inline void sk_mode_write(uint64_t mode) { (void)mode; }

#endif

/* Whether a mode computes as IEEE-754 says by default. */
static inline int sk_mode_usual(uint64_t mode) {
    return (mode & ~(uint64_t)SK_MODE_FLAGS) == SK_MODE_USUAL;
}

/* The mode as found, for sk_mode_leave; from here on it is the usual one. */
static inline uint64_t sk_mode_enter(void) {
    uint64_t found = sk_mode_read();
    if (!sk_mode_usual(found)) sk_mode_write(SK_MODE_USUAL | (found & SK_MODE_FLAGS));
    return found;
}

static inline void sk_mode_leave(uint64_t found) {
    if (!sk_mode_usual(found)) sk_mode_write(found);
}

#endif
