/* How tensors and blocks are shared out between threads; must not know what a pass computes.
 *
 * Large tensors go to a team of all threads, small ones to one thread each (the plan says which).
 * Why not one thread per tensor: a model may have one tensor that is half of it. Why not a team for
 * every tensor: a model may have 40,000 of a few hundred elements, and each would cost up to eleven
 * barriers, of which each waits for the thread that the system runs last.
 *
 * Blocks and tensors are handed out as threads ask for them. A fixed share would be cheaper to give
 * out, but on a machine that does other things too everybody then waits for the thread that was held
 * up. No result depends on who takes what (merge_internal.h), so this is free to follow the clock.
 * Only where threads have places (merge_places.c) everybody takes the same share every time.
 */
#include "float_mode.h"
#include "merge_internal.h"

#ifdef _OPENMP
#include <omp.h>
#endif

void sm_spread(sm_pass_fn pass, void *job, const sm_task *task) {
    const size_t *first = task->plan->block + task->tensor;
    const size_t blocks = first[1] - first[0];
    if (!task->team) {
        for (size_t b = 0; b < blocks; b++) pass(job, task, b);
        return;
    }
#ifdef _OPENMP
    if (sm_placed()) {
#pragma omp for schedule(static)
        for (size_t b = 0; b < blocks; b++) pass(job, task, b);
        return;
    }
#pragma omp for schedule(dynamic, 2)
#endif
    for (size_t b = 0; b < blocks; b++) pass(job, task, b);
}

void sm_once(sm_finish_fn finish, void *job, const sm_task *task) {
    if (!task->team) {
        finish(job, task);
        return;
    }
#ifdef _OPENMP
#pragma omp single
#endif
    finish(job, task);
}

/* The tensors of one share that is not cut further. */
static void alone(sm_tensor_fn fn, void *job, sm_task *whole, size_t share) {
    const size_t *range = whole->plan->whole + 2 * share;
    for (whole->tensor = range[0]; whole->tensor < range[1]; whole->tensor++) fn(job, whole);
}

/* What one thread of the team does. The shared tensors come first, while nobody is ahead; then each
 * thread takes whole ones until there are none, and only the end of the region waits for all. */
static void serve(sm_crew *crew, sm_tensor_fn fn, void *job, int thread) {
    const sm_plan *plan = crew->plan;
    uint64_t mode = sk_mode_enter(); /* a team keeps the mode of whoever had it made */
    float *scratch = crew->scratch + (size_t)thread * crew->scratch_stride;
    sm_task shared = {plan, &crew->shared, 0, scratch, crew->own[thread].moved, 1};
    sm_task whole = {plan, &crew->own[thread], 0, scratch, crew->own[thread].moved, 0};
    if (sm_placed()) sm_take_place(thread, crew->threads);
    for (size_t i = 0; i < plan->shared_count; i++) {
        shared.tensor = plan->shared[i];
        fn(job, &shared);
    }
    if (sm_placed()) {
#ifdef _OPENMP
#pragma omp for schedule(static) nowait
#endif
        for (size_t i = 0; i < plan->whole_count; i++) alone(fn, job, &whole, i);
    } else {
#ifdef _OPENMP
#pragma omp for schedule(dynamic, 1) nowait
#endif
        for (size_t i = 0; i < plan->whole_count; i++) alone(fn, job, &whole, i);
    }
    sk_mode_leave(mode);
}

void sm_each_tensor(sm_crew *crew, sm_tensor_fn fn, void *job) {
#ifdef _OPENMP
    if (crew->threads > 1) {
#pragma omp parallel num_threads(crew->threads)
        serve(crew, fn, job, omp_get_thread_num());
        return;
    }
#endif
    sm_task task = {crew->plan, &crew->shared, 0, crew->scratch, crew->own[0].moved, 0};
    uint64_t mode = sk_mode_enter();
    for (; task.tensor < crew->plan->tensors; task.tensor++) fn(job, &task);
    sk_mode_leave(mode);
    (void)serve; /* unused without OpenMP */
}

static __attribute__((noinline)) double total(const sm_plan *plan, const double *row) {
    double sum = 0.0;
    for (size_t t = 0; t < plan->tensors; t++)
        sum += sm_tensor_total(plan, t, row + plan->block[t]);
    return sum;
}

double sm_total(const sm_plan *plan, const double *row) {
    uint64_t mode = sk_mode_enter();
    double sum = total(plan, row);
    sk_mode_leave(mode);
    return sum;
}
