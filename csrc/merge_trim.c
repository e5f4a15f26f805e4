/* The merged gradient without outliers: a trimmed mean in the place of a weighted one.
 *
 * Must not: share anything out by itself, or know how many learners agree.
 *
 * The learners of one element are sorted, and there are few of them (at most some dozen), but
 * thousands of elements side by side. So the sort is turned round: learners are rows of a strip, and
 * one exchange orders two rows in all their elements at once. Why not a sort per element: it
 * branches on every comparison and gathers its values over the learners' arrays; min and max of two
 * rows are two vector instructions without a branch. An insertion sort of M rows takes M(M-1)/2
 * exchanges, whatever the values are.
 */
#include "merge_internal.h"

static void exchange(float *low, float *high, size_t n) {
    for (size_t i = 0; i < n; i++) {
        float a = low[i], b = high[i];
        low[i] = a < b ? a : b;
        high[i] = a < b ? b : a;
    }
}

/* Each element of a strip: its values are sorted over the learners, and the mean of all but the `trim`
 * lowest and highest is added ascending in f64, divided there, and rounded once. Weights play no part.
 * With `directed` (rda) the values are those of unit vectors.
 * strips: [learners][SM_STRIP], short enough that all learners' stay in the cache together. */
void sm_trimmed(const sm_merge_job *job, const sm_work *work, size_t at, size_t n, float *out,
                float *strips) {
    size_t learners = job->pushes.learners, first = (size_t)job->trim, end = learners - first;
    double sum[SM_STRIP];
    for (size_t l = 0; l < learners; l++) {
        float *strip = strips + l * SM_STRIP;
        const float *d = sm_corrected(&work->term[l], job->pushes.momentum, at, n, strip);
        if (d != strip) memcpy(strip, d, n * sizeof *d);
        if (work->directed) sk_active.blend->scale(strip, work->term[l].k, n);
        for (size_t j = l; j > 0; j--)
            exchange(strips + (j - 1) * SM_STRIP, strips + j * SM_STRIP, n);
    }
    for (size_t i = 0; i < n; i++) sum[i] = 0.0;
    for (size_t l = first; l < end; l++)
        for (size_t i = 0; i < n; i++) sum[i] += (double)strips[l * SM_STRIP + i];
    for (size_t i = 0; i < n; i++) out[i] = (float)(sum[i] / (double)(end - first));
}

/* The same mean of the norms: those of the gradients as they enter, ascending, in f64. */
double sm_trimmed_radius(const sm_merge_job *job, const sm_work *work) {
    size_t learners = job->pushes.learners, first = (size_t)job->trim, end = learners - first;
    double *sorted = work->sums + work->stride; /* rows that no pass needs any more */
    double sum = 0.0;
    for (size_t l = 0; l < learners; l++) {
        size_t j = l;
        for (; j > 0 && sorted[j - 1] > work->share[l].norm; j--) sorted[j] = sorted[j - 1];
        sorted[j] = work->share[l].norm;
    }
    for (size_t l = first; l < end; l++) sum += sorted[l];
    return sum / (double)(end - first);
}
