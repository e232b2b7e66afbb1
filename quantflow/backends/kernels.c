/* Linears with weights of 4 or 8 bits for CPUs with AVX512-VNNI:  y[t, o] = sum_i x[t, i] w[o, i] + bias[o].

   Rows stand in the lanes of a register. 64 bytes of `data` hold 16 rows: of 4 bits 8 columns (byte b of a row's 4 bytes has
   column b below and column b + 4 above, as qvalue + 8), of 8 bits 4 columns. Two such lines, 32 rows, are neighbours; then
   come the next columns; rows are padded to 64 and columns to `group`, with zeros. Scales are [16 rows, groups, 16].

   Inputs are quantized to int8 and multiplied as integers, or kept as float and multiplied with the integers (or float8
   values) of the weight in float32 or bfloat16, which hold them exactly; a group's sum is scaled once. Every output is summed by one
   thread in an order of its own, so bits depend neither on the threads nor on the other tokens of a call. */
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define MOST 12 /* tokens of a tile */

#ifdef QUANTFLOW_CHECK /* a debug build: what Python promises is looked at once a call, and a broken promise ends the process */
#define CHECK(CONDITION) ((CONDITION) ? (void)0 : (fprintf(stderr, "kernels.c:%d: not %s\n", __LINE__, #CONDITION), abort()))
#else
#define CHECK(CONDITION) ((void)0)
#endif

enum kind { W4, W8, F8 };            /* weights: 4-bit, int8, e4m3 */
enum input { ASIS, INT8, E4M3 };     /* what happens to the input */
enum math { INTEGER, FLOAT, BFLOAT }; /* what is multiplied */
#ifdef __AVX512BF16__
enum { HAS_BFLOAT = 1 };
#else
enum { HAS_BFLOAT = 0 };
#define _mm512_dpbf16_ps(acc, a, b) (acc)
#endif

struct weight {
    int64_t rows, columns;   /* of the linear, unpadded */
    int64_t group, groups;   /* columns of a group, a multiple of 16; how many of them */
    const uint8_t *data;
    const void *scale;       /* float, or the upper half of one (wide == 0) */
    const uint8_t *zero;     /* [16 rows, groups, 16] zero_point + 8 of W4; NULL: 8 */
    const int32_t *offset;   /* [16 rows, groups, 16] what a sum of W8 by int8 begins with: -(128 + input_zero) * sum(w) */
    float input_scale;       /* of a static input; 0: from each token, or each of its groups */
    float input_largest;     /* what a dynamic scale maps the largest magnitude to */
    int32_t input_zero, input_grouped, kind, input, wide;
    int32_t bf16;            /* inputs that are not quantized are multiplied as bfloat16, where the CPU can */
};

/* The columns of 16 words of floats, and of 8 words of two bfloat16, as `part_of` takes them from a weight. */
static const int32_t orders[3][3][16] = {
    [W4][FLOAT] = {0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15},
    [W4][BFLOAT] = {0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15},
    [W8] = {[FLOAT ... BFLOAT] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}},
    [F8][FLOAT] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    [F8][BFLOAT] = {0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15},
};

/* bfloat16 of 0 to 15 and -16 to -1; of 0 to 7 times 2^-9. */
static const uint16_t integers[32] = {
    0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170,
    0xc180, 0xc170, 0xc160, 0xc150, 0xc140, 0xc130, 0xc120, 0xc110, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80};
static const uint16_t subnormals[32] = {0x0000, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};

struct tokens { /* inputs as the products want them */
    int64_t words; /* of a token: 4 int8, 2 bfloat16 or 1 float, in the order of the weight's columns */
    uint32_t *x;   /* tile after tile [words, tokens of the tile] */
    float *scale;  /* [tokens, input_grouped ? groups : 1] */
    int32_t *sum;  /* [tokens, groups], of int8 */
    enum math math;
    int bf16; /* x, bias and y are bfloat16 instead of float */
};

INLINE __m512 widen(__m256i half) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16)); }

INLINE __m512 load(const void *from, int64_t at, int bf16, __mmask16 mask) {
    if (bf16) return widen(_mm256_maskz_loadu_epi16(mask, (const uint16_t *)from + at));
    return _mm512_maskz_loadu_ps(mask, (const float *)from + at);
}

INLINE void store(void *to, int64_t at, int bf16, __mmask16 mask, __m512 value) {
    if (!bf16) {
        _mm512_mask_storeu_ps((float *)to + at, mask, value);
        return;
    }
    __m512i bits = _mm512_castps_si512(value), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    bits = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    bits = _mm512_mask_mov_epi32(bits, _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
    _mm256_mask_storeu_epi16((uint16_t *)to + at, mask, _mm512_cvtepi32_epi16(bits));
}

INLINE __mmask16 first(int64_t count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : (1u << count) - 1; }

/* The nearest e4m3 value, ties to even; |x| is at most 448. */
INLINE __m512 round_e4m3(__m512 x) {
    __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 20), _mm512_set1_epi32(1));
    bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7ffff)));
    __m512 normal = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32((int)0xfff00000)));
    const __m512 step = _mm512_set1_ps(24576.0f); /* whose last bit is 2^-9, the step of subnormals */
    __mmask16 subnormal = _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(0x1p-6f), _CMP_LT_OQ);
    return _mm512_mask_sub_ps(normal, subnormal, _mm512_add_ps(x, step), step);
}

/* The scale of columns [begin, end); what it cannot scale (NaN; without a static scale Inf too) becomes NaN, in `unscaled`. */
static float scale_of(const struct weight *w, const void *x, int bf16, int64_t begin, int64_t end, int *unscaled) {
    __m512 most = _mm512_setzero_ps();
    __mmask16 nan = 0;
    for (int64_t i = begin; i < end; i += 16) {
        __m512 value = load(x, i, bf16, first(end - i));
        nan |= _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
        most = _mm512_max_ps(most, _mm512_abs_ps(value));
    }
    float amax = _mm512_reduce_max_ps(most), smallest = 0x1p-126f;
    *unscaled = nan || (w->input_scale == 0 && isinf(amax));
    if (w->input_scale != 0) return w->input_scale;
    if (!(amax > 0)) return 1;
    return amax / w->input_largest > smallest ? amax / w->input_largest : smallest;
}

/* Quantize and arrange columns of a token from `begin` on, and zeros from `end` to `padded`; word i goes to out[i * stride]. */
INLINE void arrange(const struct weight *w, const void *x, int bf16, int64_t begin, int64_t end, int64_t padded, float scale,
                    const enum math math, uint32_t *out, int stride, int32_t *sums) {
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i at = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(stride)), order = _mm512_loadu_si512(orders[w->kind][math]);
    const __m512 step = _mm512_set1_ps(scale), zero = _mm512_set1_ps((float)w->input_zero);
    const __m512 largest = _mm512_set1_ps(w->input_largest);
    __m512i sum = _mm512_setzero_si512();
    for (int64_t i = begin; i < padded; i += 16) {
        __mmask16 mask = first(end - i);
        __m512 value = _mm512_div_ps(load(x, i, bf16, mask), step);
        if (math == INTEGER) {
            value = _mm512_max_ps(_mm512_min_ps(_mm512_add_ps(value, zero), _mm512_set1_ps(127)), _mm512_set1_ps(-128));
            __m512i q = _mm512_maskz_cvtps_epi32(mask, value);
            __m128i bytes = _mm512_cvtepi32_epi8(q);
            if (w->kind == W8) bytes = _mm_xor_si128(bytes, _mm_set1_epi8((char)0x80));
            _mm_i32scatter_epi32(out + i / 4 * stride, _mm512_castsi512_si128(at), bytes, 4);
            sum = _mm512_add_epi32(sum, q);
            if ((i + 16) % w->group == 0) {
                sums[i / w->group] = _mm512_reduce_add_epi32(sum);
                sum = _mm512_setzero_si512();
            }
            continue;
        }
        if (w->input == E4M3)
            value = round_e4m3(_mm512_max_ps(_mm512_min_ps(value, largest), _mm512_sub_ps(_mm512_setzero_ps(), largest)));
        value = _mm512_permutexvar_ps(order, value);
        uint16_t halves[16];
        const int narrow = math == BFLOAT || (w->bf16 && w->input == ASIS);
        if (narrow) store(halves, 0, 1, 0xffff, value);
        if (math == FLOAT)
            _mm512_i32scatter_ps(out + i * stride, at, narrow ? load(halves, 0, 1, 0xffff) : value, 4);
        else
            _mm256_i32scatter_epi32(out + i / 2 * stride, _mm512_castsi512_si256(at), _mm256_loadu_si256((__m256i *)halves), 4);
    }
}

/* How many of the tokens left are multiplied at once. */
INLINE int tile_of(int64_t left) { return left >= MOST ? MOST : left >= 8 ? 8 : left >= 4 ? 4 : 1; }

static void prepare(const struct weight *w, const void *x, int64_t token, int64_t tile, int size, const struct tokens *to) {
    const void *row = (const char *)x + token * w->columns * (to->bf16 ? 2 : 4);
    uint32_t *out = to->x + tile * to->words + token - tile;
    int32_t *sums = to->sum + token * w->groups;
    int64_t parts = w->input_grouped ? w->groups : 1, width = w->group * w->groups / parts;
    for (int64_t begin = 0, p = 0; p < parts; p++, begin += width) {
        int64_t end = begin + width < w->columns ? begin + width : w->columns;
        int unscaled = 0;
        float scale = w->input == ASIS ? 1 : scale_of(w, row, to->bf16, begin, end, &unscaled);
        to->scale[token * parts + p] = unscaled ? NAN : scale;
        if (to->math == INTEGER) arrange(w, row, to->bf16, begin, end, begin + width, scale, INTEGER, out, size, sums);
        else if (to->math == FLOAT) arrange(w, row, to->bf16, begin, end, begin + width, scale, FLOAT, out, size, sums);
        else arrange(w, row, to->bf16, begin, end, begin + width, scale, BFLOAT, out, size, sums);
    }
}

/* Columns of 16 rows as floats: column v of a line of 8 bits; of 4 bits the v-th in the order that `arrange` knows. */
INLINE __m512 floats_of(enum kind kind, __m512i line, int v, __m512 zero) {
    if (kind == W4) {
        const __m512 values = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        return _mm512_sub_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(line, 4 * v), values), zero);
    }
    __m512i top = _mm512_slli_epi32(line, 24 - 8 * v);
    if (kind == W8) return _mm512_cvtepi32_ps(_mm512_srai_epi32(top, 24));
    top = _mm512_and_si512(_mm512_srai_epi32(top, 4), _mm512_set1_epi32((int)0x87f00000));
    return _mm512_mul_ps(_mm512_castsi512_ps(top), _mm512_set1_ps(0x1p120f));
}

/* The same as pairs of bfloat16; of e4m3 the v-th bytes of both halves, without the float32 subnormals that would be slow. */
INLINE __m512i pairs_of(enum kind kind, __m512i line, int v, __m512i zero) {
    if (kind == W4) {
        __m512i q = _mm512_and_si512(_mm512_srli_epi16(line, 4 * v), _mm512_set1_epi16(15));
        return _mm512_permutexvar_epi16(_mm512_sub_epi16(q, zero), _mm512_loadu_si512(integers));
    }
    if (kind == W8) { /* what `floats_of` returns has zeros where bfloat16 has no bits */
        __m512i low = _mm512_castps_si512(floats_of(kind, line, 2 * v, _mm512_setzero_ps()));
        return _mm512_or_si512(_mm512_srli_epi32(low, 16),
                               _mm512_castps_si512(floats_of(kind, line, 2 * v + 1, _mm512_setzero_ps())));
    }
    __m512i code = v ? _mm512_srli_epi16(line, 8) : line, sign = v ? line : _mm512_slli_epi16(line, 8);
    __m512i size = _mm512_and_si512(_mm512_slli_epi16(code, 4), _mm512_set1_epi16(0x07f0));
    __mmask32 subnormal = _mm512_cmplt_epu16_mask(size, _mm512_set1_epi16(0x80));
    size = _mm512_add_epi16(size, _mm512_set1_epi16(120 << 7));
    size = _mm512_mask_permutexvar_epi16(size, subnormal, code, _mm512_loadu_si512(subnormals));
    return _mm512_ternarylogic_epi32(size, sign, _mm512_set1_epi16((short)0x8000), 0xf8); /* size | (sign & 0x8000) */
}

/* acc + the v-th word of an input times that part of a line. */
INLINE __m512i multiply(enum kind kind, enum math math, __m512i acc, __m512i part, __m512i x) {
    if (math == INTEGER) return kind == W4 ? _mm512_dpbusd_epi32(acc, part, x) : _mm512_dpbusd_epi32(acc, x, part);
    if (math == FLOAT)
        return _mm512_castps_si512(_mm512_fmadd_ps(_mm512_castsi512_ps(part), _mm512_castsi512_ps(x), _mm512_castsi512_ps(acc)));
    return _mm512_castps_si512(_mm512_dpbf16_ps(_mm512_castsi512_ps(acc), (__m512bh)part, (__m512bh)x));
}

INLINE __m512i part_of(enum kind kind, enum math math, __m512i line, int v, __m512i zero) {
    if (math == FLOAT) return _mm512_castps_si512(floats_of(kind, line, v, _mm512_castsi512_ps(zero)));
    if (math == BFLOAT) return pairs_of(kind, line, v, zero);
    if (kind == W8) return line;
    return _mm512_and_si512(v ? _mm512_srli_epi16(line, 4) : line, _mm512_set1_epi8(15));
}

#define PLACE const struct weight *w, const struct tokens *in, int64_t block, int64_t token, int64_t g, __m512 *total

/* Add group `g` to total [R, T]: R times 16 rows from 16-row block `block` on, T tokens from `token` on. */
INLINE void add(PLACE, const enum kind kind, const enum math math, const int R, const int T) {
    const int parts = (kind == W4 ? 8 : 4) / (math == INTEGER ? 4 : math == BFLOAT ? 2 : 1);
    const int64_t lines = w->group / (kind == W4 ? 8 : 4), pair = lines * w->groups * 128, at = (block * w->groups + g) * 16;
    const uint8_t *data = w->data + block / 2 * pair + g * lines * 128;
    const uint32_t *x = in->x + token * in->words + g * lines * parts * T;
    __m512i sum[4][MOST], zero[4];
    UNROLL for (int r = 0; r < R; r++) {
        const int64_t row = at + r * w->groups * 16;
        zero[r] = w->zero ? _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(w->zero + row))) : _mm512_set1_epi32(8);
        UNROLL for (int t = 0; t < T; t++) {
            const __m512i other = _mm512_set1_epi32(math == INTEGER ? -in->sum[(token + t) * w->groups + g] : 0);
            sum[r][t] = math == INTEGER && kind == W8 ? _mm512_loadu_si512(w->offset + row) : _mm512_mullo_epi32(zero[r], other);
        }
        if (math == FLOAT) zero[r] = _mm512_castps_si512(_mm512_cvtepi32_ps(zero[r]));
        if (math == BFLOAT) zero[r] = _mm512_or_si512(zero[r], _mm512_slli_epi32(zero[r], 16));
    }
    for (int64_t i = 0; i < lines; i++) {
        __m512i line[4];
        UNROLL for (int r = 0; r < R; r++) {
            const uint8_t *at = data + r / 2 * pair + r % 2 * 64;
            line[r] = _mm512_loadu_si512(at);
            if (T == 1) _mm_prefetch((const char *)at + 4096, _MM_HINT_T0); /* past a page, where the CPU itself stops */
            else _mm_prefetch((const char *)at + pair, _MM_HINT_T1);        /* of the next 32 rows, for the second cache */
        }
        UNROLL for (int v = 0; v < parts; v++) {
            __m512i part[4];
            UNROLL for (int r = 0; r < R; r++) part[r] = part_of(kind, math, line[r], v, zero[r]);
            UNROLL for (int t = 0; t < T; t++) {
                const __m512i word = _mm512_set1_epi32((int)x[v * T + t]);
                UNROLL for (int r = 0; r < R; r++) sum[r][t] = multiply(kind, math, sum[r][t], part[r], word);
            }
        }
        data += 128;
        x += parts * T;
    }
    UNROLL for (int r = 0; r < R; r++) {
        UNROLL for (int t = 0; t < T; t++) __asm__("" : "+v"(sum[r][t])); /* else gcc keeps some of them in memory */
        const __m512 scale = load(w->scale, at + r * w->groups * 16, !w->wide, 0xffff);
        UNROLL for (int t = 0; t < T; t++) {
            __m512 whole = math == INTEGER ? _mm512_cvtepi32_ps(sum[r][t]) : _mm512_castsi512_ps(sum[r][t]);
            if (w->input_grouped) whole = _mm512_mul_ps(whole, _mm512_set1_ps(in->scale[(token + t) * w->groups + g]));
            total[r * T + t] = _mm512_fmadd_ps(whole, scale, total[r * T + t]);
        }
    }
}

#define ADDER(KIND, MATH, R, T) \
    static __attribute__((noinline)) void KIND##_##MATH##_##T(PLACE) { add(w, in, block, token, g, total, KIND, MATH, R, T); }
#define ADDERS(KIND, MATH) \
    ADDER(KIND, MATH, 4, 1) ADDER(KIND, MATH, 2, 4) ADDER(KIND, MATH, 2, 8) ADDER(KIND, MATH, 2, 12)
#define NAMES(KIND, MATH) [KIND][MATH] = {KIND##_##MATH##_1, KIND##_##MATH##_4, KIND##_##MATH##_8, KIND##_##MATH##_12}
ADDERS(W4, INTEGER) ADDERS(W4, FLOAT) ADDERS(W4, BFLOAT) ADDERS(W8, INTEGER) ADDERS(W8, FLOAT) ADDERS(W8, BFLOAT)
ADDERS(F8, FLOAT) ADDERS(F8, BFLOAT)
static void (*const adders[3][3][4])(PLACE) = {NAMES(W4, INTEGER), NAMES(W4, FLOAT),  NAMES(W4, BFLOAT), NAMES(W8, INTEGER),
                                               NAMES(W8, FLOAT),   NAMES(W8, BFLOAT), NAMES(F8, FLOAT),  NAMES(F8, BFLOAT)};

/* The outputs of R times 16 rows, from 16-row block `block` on, and T tokens. */
static void tile(const struct weight *w, const struct tokens *in, int64_t block, int64_t token, const void *bias, void *y, int R,
                 int T) {
    __m512 total[2 * MOST] = {0};
    for (int i = 0; i < R * T; i++) /* the outputs' lines, which are not in a cache */
        __builtin_prefetch((char *)y + ((token + i % T) * w->rows + (block + i / T) * 16) * (in->bf16 ? 2 : 4), 1);
    for (int64_t g = 0; g < w->groups; g++) adders[w->kind][in->math][T / 4](w, in, block, token, g, total);
    for (int r = 0; r < R; r++) {
        int64_t row = (block + r) * 16;
        __mmask16 mask = first(w->rows - row);
        __m512 offset = bias ? load(bias, row, in->bf16, mask) : _mm512_setzero_ps();
        for (int t = 0; t < T; t++) {
            __m512 scale = _mm512_set1_ps(w->input_grouped ? 1 : in->scale[token + t]);
            store(y, (token + t) * w->rows + row, in->bf16, mask, _mm512_fmadd_ps(total[r * T + t], scale, offset));
        }
    }
}

/* y [tokens, rows] of x [tokens, columns] and bias [rows] or NULL, all bfloat16 or all float. Returns 0, or 1 without memory. */
int quantflow_linear(const struct weight *w, const void *x, int64_t tokens, const void *bias, void *y, int bf16) {
    CHECK(w && x && y && tokens >= 0 && w->data && w->scale && w->rows > 0 && w->columns > 0);
    CHECK(w->group > 0 && w->group % 16 == 0 && w->groups == (w->columns + w->group - 1) / w->group);
    CHECK(w->kind >= W4 && w->kind <= F8 && w->input >= ASIS && w->input <= E4M3 && !(w->kind == F8 && w->input == INT8));
    CHECK(w->offset || !(w->kind == W8 && w->input == INT8));
    int narrow = HAS_BFLOAT && (w->bf16 || w->input == E4M3);
    struct tokens in = {.bf16 = bf16, .math = w->input == INT8 ? INTEGER : narrow ? BFLOAT : FLOAT};
    int64_t columns = w->group * w->groups;
    in.words = columns / (in.math == INTEGER ? 4 : in.math == BFLOAT ? 2 : 1);
    size_t size = (size_t)(tokens * (in.words + w->groups * 2) * 4 + 127) / 64 * 64;
    in.x = aligned_alloc(64, size);
    if (!in.x) return 1;
    in.scale = (float *)(in.x + tokens * in.words);
    in.sum = (int32_t *)(in.scale + tokens * w->groups);
    _Pragma("omp parallel") {
        _Pragma("omp for schedule(static)") for (int64_t t = 0; t < tokens; t++) {
            int64_t begin = t < tokens / MOST * MOST ? t / MOST * MOST : tokens / MOST * MOST;
            while (begin + tile_of(tokens - begin) <= t) begin += tile_of(tokens - begin);
            prepare(w, x, t, begin, tile_of(tokens - begin), &in);
        }
        const int64_t piece = tokens == 1 ? 4 : 2; /* small pieces, so that no thread waits long for the others' last one */
        _Pragma("omp for schedule(static)") for (int64_t block = 0; block < (w->rows + 63) / 64 * 4; block += piece) {
            for (int64_t t = 0, size; t < tokens; t += size) {
                size = tile_of(tokens - t);
                int rows = size == 1 ? 4 : 2; /* a token that is left over: of every other piece, for its neighbour too */
                if (block % rows == 0) tile(w, &in, block, t, bias, y, rows, (int)size);
            }
        }
    }
    free(in.x);
    return 0;
}
