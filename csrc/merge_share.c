/* How tensors and blocks are shared out between threads; must not know what a pass computes. */
#include "merge_passes.h"

#ifdef _OPENMP
#include <omp.h>
#endif

void sm_spread(sm_pass_fn pass, sm_job *job, sm_work *work, size_t tensor, float *scratch,
               int team) {
    size_t blocks = job->plan->block[tensor + 1] - job->plan->block[tensor];
    if (!team) {
        pass(job, work, tensor, 0, blocks, scratch);
        return;
    }
#ifdef _OPENMP
#pragma omp for schedule(dynamic, 2)
#endif
    for (size_t b = 0; b < blocks; b++) pass(job, work, tensor, b, 1, scratch);
}

void sm_once(sm_finish_fn finish, sm_job *job, sm_work *work, size_t tensor, int team) {
    if (!team) {
        finish(job, work, tensor);
        return;
    }
#ifdef _OPENMP
#pragma omp single
#endif
    finish(job, work, tensor);
}

static void serve(sm_job *job, sm_tensor_fn fn, int thread) {
    float *scratch = job->scratch + (size_t)thread * job->scratch_stride;
    const sm_plan *plan = job->plan;
    for (size_t i = 0; i < plan->shared_count; i++)
        fn(job, &job->shared, plan->shared[i], scratch, 1);
#ifdef _OPENMP
#pragma omp for schedule(dynamic, 1) nowait
#endif
    for (size_t i = 0; i < plan->whole_count; i++)
        for (size_t t = plan->whole[2 * i]; t < plan->whole[2 * i + 1]; t++)
            fn(job, &job->own[thread], t, scratch, 0);
}

void sm_each_tensor(sm_job *job, sm_tensor_fn fn) {
#ifdef _OPENMP
    if (job->threads > 1) {
#pragma omp parallel num_threads(job->threads)
        serve(job, fn, omp_get_thread_num());
        return;
    }
#endif
    for (size_t t = 0; t < job->plan->tensors; t++) fn(job, &job->shared, t, job->scratch, 0);
    (void)serve; /* unused without OpenMP */
}

double sm_total(const sm_plan *plan, const double *row) {
    double sum = 0.0;
    for (size_t t = 0; t < plan->tensors; t++) sum += sm_tensor_total(plan, t, row + plan->block[t]);
    return sum;
}
