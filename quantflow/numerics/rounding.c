/* Weights rounded to the points of a scheme, for gptq and for the search of scales, on any CPU.

   Each operation is the one of quantflow/core/affine.py and float8.py, on one float32 after another
   and in their order, so bits are equal to those of torch's operators. Torch reads and writes all
   numbers once for each operation; here they stay in registers. Sums over columns are torch's own
   BLAS, since each BLAS has an order of its own. Compilers make vectors of these loops. */
#include <math.h>
#include <stdint.h>
#include <string.h>

/* A product is rounded before it is added: no fused multiply-add. gcc reads the second line alone. */
#pragma STDC FP_CONTRACT OFF
#pragma GCC optimize("fp-contract=off")

#define INLINE static inline __attribute__((always_inline))

/* The points of a scheme. */
struct points {
    float low, high; /* the smallest and the largest one */
    float tiny, eps; /* of floats: the smallest normal number, the distance of 1 and the next one;
                        of integers: not read */
};

/* BLAS: y += A x. Its integers have 4 bytes or 8; in memory their lower halves come first. */
typedef void sgemv(const char *, const int64_t *rows, const int64_t *columns, const float *,
                   const float *a, const int64_t *stride, const float *x, const int64_t *,
                   const float *, float *y, const int64_t *);

/* NaN passes both choices. */
INLINE float clamp(float x, float low, float high) {
    x = x < low ? low : x;
    return x > high ? high : x;
}

/* `affine.round_`: the point that is nearest to x / scale + zero, half to even. */
INLINE float nearest(float x, struct points points, int floats) {
    if (!floats) return clamp(rintf(x), points.low, points.high);
    x = clamp(x, points.low, points.high);
    uint32_t bits;
    float binade;
    memcpy(&bits, &x, sizeof bits);
    bits &= 0x7f800000; /* the exponent alone: the largest power of two that is not above |x| */
    memcpy(&binade, &bits, sizeof bits);
    float step = (binade < points.tiny ? points.tiny : binade) * points.eps;
    return rintf(x / step) * step;
}

INLINE void round_column(float *restrict aims, float *restrict weights, const float *restrict scale,
                         const float *restrict zero, int64_t width, struct points points,
                         int floats, int zeroed) {
    for (int64_t r = 0; r < width; r++) {
        float code = aims[r] / scale[r];
        if (zeroed) code += zero[r];
        aims[r] = code = nearest(code, points, floats);
        if (zeroed) code -= zero[r];
        weights[r] -= code * scale[r];
    }
}

/* Rounds the columns [begin, end) of a block of R rows of weights, the last one first.
   quantflow/numerics/feedback.py says what is computed.

   aims [., R]: each column and what errors from `end` on add to it; becomes its qvalues
   errors [., R]: each column; becomes weight - rounded weight
   within [., stride]: row i holds the factors of the errors that reach column i
   groups: of each column, its row of scales and zeros [., R]; zeros is NULL without them */
void round_columns(float *aims, float *errors, const float *within, int64_t stride,
                   const int64_t *groups, const float *scales, const float *zeros, int64_t begin,
                   int64_t end, int64_t width, float low, float high, float tiny, float eps,
                   int floats, sgemv *add_product) {
    const struct points points = {low, high, tiny, eps};
    const int64_t next = 1;
    const float one = 1;
    for (int64_t i = end - 1; i >= begin; i--) {
        float *aim = aims + i * width, *error = errors + i * width;
        const float *scale = scales + groups[i] * width;
        const int64_t later = end - 1 - i;
        if (later)
            add_product("n", &width, &later, &one, error + width, &width, within + i * stride + i + 1,
                        &next, &one, aim, &next);
        if (floats)
            round_column(aim, error, scale, NULL, width, points, 1, 0);
        else if (zeros)
            round_column(aim, error, scale, zeros + groups[i] * width, width, points, 0, 1);
        else
            round_column(aim, error, scale, NULL, width, points, 0, 0);
    }
}

INLINE void group_losses(const float *restrict weights, const float *restrict importance,
                         float *restrict losses, int64_t columns, float scale, float zero,
                         struct points points, int floats, int zeroed) {
    for (int64_t k = 0; k < columns; k++) {
        float code = weights[k] / scale;
        if (zeroed) code += zero;
        code = nearest(code, points, floats);
        if (zeroed) code -= zero;
        float error = code * scale - weights[k];
        losses[k] = error * error * importance[k];
    }
}

/* The importance-weighted squared error of every weight, rounded to nearest.

   weights, losses: [rows, groups, columns]; scales and zeros: [rows, groups], zeros may be NULL
   importance: [groups, columns] */
void rounding_losses(const float *weights, const float *scales, const float *zeros,
                     const float *importance, float *losses, int64_t rows, int64_t groups,
                     int64_t columns, float low, float high, float tiny, float eps, int floats) {
    const struct points points = {low, high, tiny, eps};
    for (int64_t i = 0; i < rows * groups; i++) {
        const float *from = weights + i * columns, *matters = importance + i % groups * columns;
        float *to = losses + i * columns;
        if (floats)
            group_losses(from, matters, to, columns, scales[i], 0, points, 1, 0);
        else if (zeros)
            group_losses(from, matters, to, columns, scales[i], zeros[i], points, 0, 1);
        else
            group_losses(from, matters, to, columns, scales[i], 0, points, 0, 0);
    }
}
