/* Block sums of several gradients at once, for any instruction set that has `lanes`: which header those
 * are from, its file includes before this one. Must not name an instruction. */
#ifndef SYNCER_REDUCE_TOGETHER_H
#define SYNCER_REDUCE_TOGETHER_H

/* The sums of one gradient are in registers for a chunk, and in the cache while others have theirs:
 * there are too few registers for those of several. */
FMA static void measure_some(const sk_term *terms, size_t count, const float *m, size_t at,
                             size_t n, double *sums, size_t stride, int first) {
    double cc[TOGETHER][SK_LANES] = {{0}}, cm[TOGETHER][SK_LANES] = {{0}}, left[SK_LANES];
    double wide[CHUNK];
    float buffer[CHUNK];
    lanes mm = all(0.0);
    size_t i = 0;
    for (; i + CHUNK <= n; i += CHUNK) {
        for (size_t j = 0; m != NULL && j < CHUNK; j += 8) {
            lanes v = widen(m + at + i + j);
            store(wide + j, v);
            if (first) mm = plus_exact(mm, v, v);
        }
        for (size_t l = 0; l < count; l++) {
            const float *d = clipped(&terms[l], at + i, buffer);
            lanes x = load(cc[l]), y = load(cm[l]);
            for (size_t j = 0; j < CHUNK; j += 8) {
                lanes u = widen(d + j);
                x = plus_exact(x, u, u);
                if (m != NULL) y = plus_exact(y, u, load(wide + j));
            }
            store(cc[l], x);
            store(cm[l], y);
        }
    }
    for (size_t l = 0; l < count; l++) {
        for (size_t j = i; j < n; j++) {
            double c = sk_clipped(&terms[l], at + j);
            cc[l][j % SK_LANES] += c * c;
            if (m != NULL) cm[l][j % SK_LANES] += c * (double)m[at + j];
        }
        sums[3 * l * stride] = sk_fold_lanes(cc[l]);
        if (m != NULL) sums[(3 * l + 1) * stride] = sk_fold_lanes(cm[l]);
    }
    if (m == NULL || !first) return;
    store(left, mm);
    for (size_t j = i; j < n; j++) left[j % SK_LANES] += (double)m[at + j] * (double)m[at + j];
    sums[2 * stride] = sk_fold_lanes(left);
}

static void measure(const sk_term *terms, size_t count, const float *m, size_t at, size_t n,
                    double *sums, size_t stride) {
    for (size_t l = 0, some; l < count; l += some) {
        some = count - l < TOGETHER ? count - l : TOGETHER;
        measure_some(terms + l, some, m, at, n, sums + 3 * l * stride, stride, l == 0);
    }
}

static void rotated_some(const sk_term *terms, size_t count, const float *m, size_t at, size_t n,
                         double *sums, size_t stride) {
    double squares[TOGETHER][SK_LANES] = {{0}}, wide[CHUNK];
    float buffer[CHUNK];
    size_t i = 0;
    for (; i + CHUNK <= n; i += CHUNK) {
        for (size_t j = 0; j < CHUNK; j += 8) store(wide + j, widen(m + at + i + j));
        for (size_t l = 0; l < count; l++) {
            if (terms[l].turn != SK_ROTATE) continue;
            const float *d = clipped(&terms[l], at + i, buffer);
            const lanes us = all(terms[l].wu), vs = all(terms[l].wv);
            lanes a = load(squares[l]);
            for (size_t j = 0; j < CHUNK; j += 8) {
                lanes t = plus(product(us, widen(d + j)), product(vs, load(wide + j)));
                a = plus(a, product(t, t));
            }
            store(squares[l], a);
        }
    }
    for (size_t l = 0; l < count; l++) {
        if (terms[l].turn != SK_ROTATE) continue;
        for (size_t j = i; j < n; j++) {
            double t = terms[l].wu * (double)sk_clipped(&terms[l], at + j) +
                       terms[l].wv * (double)m[at + j];
            squares[l][j % SK_LANES] += t * t;
        }
        sums[l * stride] = sk_fold_lanes(squares[l]);
    }
}

static void rotated(const sk_term *terms, size_t count, const float *m, size_t at, size_t n,
                    double *sums, size_t stride) {
    for (size_t l = 0, some; l < count; l += some) {
        some = count - l < TOGETHER ? count - l : TOGETHER;
        rotated_some(terms + l, some, m, at, n, sums + l * stride, stride);
    }
}

#endif
