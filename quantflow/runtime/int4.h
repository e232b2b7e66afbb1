/* The KV caches of 4 and 5 bits of decode.c.
 *
 * A head of queries and keys is rotated by a Hadamard matrix H / sqrt(n), n the largest power of two
 * that divides its features: an outlier of the keys is spread over n features, and no score changes
 * (Ashkboos et al. 2024, arXiv:2404.00456, section 4). Values have no such outliers and stay as they
 * are. A group of features of one column has a step and a middle, both rounded to bfloat16 before
 * codes are chosen; where the numbers are equal, the middle is the number:
 *
 *     step = (largest - least) / (2 h - 1),   middle = least + h step,   h = 8, or 16 of 5 bits
 *     code = clamp(round((x - middle) / step), -h, h - 1),   x' = step * code + middle
 *
 * Codes are kept with h added, the low four bits of two in a byte, both of one column: threads that
 * write columns beside each other share no byte. The fifth bits lie behind them: those of 32
 * features of a column are a word of 32 bits, whose byte f % 4 has feature f as bit f / 4. A step
 * that is not finite, since a number of its group is not, is NaN, and so is the middle.
 *
 * Attention multiplies integers. Queries are rounded to int8 by amax / 127 of their head. The
 * probabilities of 64 columns, times the columns' steps, are rounded to 127 points of the largest.
 * Sums of integers are exact, so their bits depend on no instruction set. */

enum { INT4_MOST_GROUPS = MAX_HEAD_DIM / 16 };

/* Features that share a step: 32, or 16 where 32 does not divide the head; of 5 bits 64 where it
 * does. */
static inline int64_t int4_group(int64_t dim, int64_t kind) {
    return dim % 32 ? 16 : kind == INT5 && dim % 64 == 0 ? 64 : 32;
}

/* What is added to codes, half of their number. */
static inline int int4_half(int64_t kind) { return kind == INT5 ? 16 : 8; }

/* Words of a column's fifth bits, and bytes of a column's keys or values. */
static inline int64_t int4_fifths(int64_t dim, int64_t kind) {
    return kind == INT5 ? (dim + 31) / 32 : 0;
}
static inline int64_t int4_bytes(int64_t dim, int64_t kind) {
    return dim / 2 + 4 * int4_fifths(dim, kind);
}

/* x = H x / sqrt(n), in pieces of n, the largest power of two that divides `dim`. */
static void rotate(float *x, int64_t dim) {
    const int64_t n = dim & -dim;
    const float unit = 1.0f / sqrtf((float)n);
    for (int64_t apart = 1; apart < n; apart *= 2)
        for (int64_t i = 0; i < dim; i += 2 * apart)
#pragma omp simd
            for (int64_t j = i; j < i + apart; j++) {
                float first = x[j], second = x[j + apart];
                x[j] = first + second;
                x[j + apart] = first - second;
            }
    for (int64_t i = 0; i < dim; i++) x[i] *= unit;
}

static inline float rounded_bfloat(float x) { return bits_float((uint32_t)to_bfloat(x) << 16); }

/* The codes of a head, half of their number added, their fifth bits, and of each group the bits of
 * its step (upper half) and middle. */
static void int4_codes(const float *x, int64_t dim, int64_t kind, uint8_t *codes,
                       uint32_t *fifths, uint32_t *pairs) {
    const int64_t group = int4_group(dim, kind);
    const int half = int4_half(kind);
    for (int64_t at = 0; at < dim; at += group) {
        float low = x[at], high = x[at], odd = 0;
        for (int64_t i = at; i < at + group; i++) {
            low = x[i] < low ? x[i] : low;
            high = x[i] > high ? x[i] : high;
            odd += x[i] - x[i]; /* NaN where a number is not finite */
        }
        float step = rounded_bfloat(high / (2 * half - 1) - low / (2 * half - 1));
        const int flat = step < 0x1p-126f; /* the numbers are equal, but for subnormal steps */
        step = flat ? 0x1p-126f : step;
        float middle = rounded_bfloat(flat ? low : low + half * step);
        if (odd != 0 || !(fabsf(step) < INFINITY && fabsf(middle) < INFINITY)) step = middle = NAN;
        for (int64_t i = at; i < at + group; i++) {
            float code = rintf((x[i] - middle) / step);
            code = code < -half ? -half : code > half - 1 ? half - 1 : code == code ? code : 0;
            codes[i] = (uint8_t)(half + (int)code);
        }
        pairs[at / group] = (uint32_t)to_bfloat(step) << 16 | to_bfloat(middle);
    }
    memset(fifths, 0, 4 * (size_t)int4_fifths(dim, kind));
    for (int64_t i = 0; kind == INT5 && i < dim; i++)
        fifths[i / 32] |= (uint32_t)(codes[i] >> 4) << (i % 4 * 8 + i % 32 / 4);
}

/* Write the keys of a column. cache: [dim / 8, SIDE, 4], from the column's place on, byte k of d
 * holds features 8 d + k and 8 d + 4 + k; behind it [fifths, SIDE] words; pairs: [groups, SIDE],
 * from its place on */
static void store_int4_keys(const float *x, uint8_t *cache, uint32_t *pairs, int64_t dim,
                            int64_t kind) {
    uint8_t codes[MAX_HEAD_DIM];
    uint32_t own[INT4_MOST_GROUPS], fifths[MAX_HEAD_DIM / 32];
    int4_codes(x, dim, kind, codes, fifths, own);
    for (int64_t i = 0; i < dim / 2; i++) {
        const uint8_t *from = codes + i / 4 * 8 + i % 4;
        cache[i / 4 * SIDE * 4 + i % 4] = (uint8_t)((from[0] & 15) | from[4] << 4);
    }
    for (int64_t i = 0; i < int4_fifths(dim, kind); i++)
        memcpy(cache + (dim / 8 + i) * SIDE * 4, fifths + i, 4);
    for (int64_t g = 0; g < dim / int4_group(dim, kind); g++) pairs[g * SIDE] = own[g];
}

/* Write the values of a column. cache: [dim / 2, 4], from the column's place among four on, the
 * first and the second half of a group share bytes; behind it [fifths, 4, 4], four columns of each
 * byte of a word; pairs: as above */
static void store_int4_values(const float *x, uint8_t *cache, uint32_t *pairs, int64_t dim,
                              int64_t kind) {
    const int64_t group = int4_group(dim, kind), half = group / 2;
    uint8_t codes[MAX_HEAD_DIM];
    uint32_t own[INT4_MOST_GROUPS], fifths[MAX_HEAD_DIM / 32];
    int4_codes(x, dim, kind, codes, fifths, own);
    for (int64_t i = 0; i < dim / 2; i++) {
        const uint8_t *from = codes + i / half * group + i % half;
        cache[i * 4] = (uint8_t)((from[0] & 15) | from[half] << 4);
    }
    for (int64_t i = 0; i < 4 * int4_fifths(dim, kind); i++)
        cache[(dim / 2 + i) * 4] = (uint8_t)(fifths[i / 4] >> i % 4 * 8);
    for (int64_t g = 0; g < dim / group; g++) pairs[g * SIDE] = own[g];
}

/* Write keys and values of one head, column `index` of the cache. */
static void store_int4_column(const Layer *l, const float *keys, const float *values, int64_t index,
                              int64_t dim, int64_t kind) {
    const int64_t lane = index % SIDE, groups = dim / int4_group(dim, kind);
    const int64_t pairs = (index - lane) * groups + lane, bytes = int4_bytes(dim, kind);
    store_int4_keys(keys, (uint8_t *)l->keys + (index - lane) * bytes + lane * 4,
                    (uint32_t *)l->key_scales + pairs, dim, kind);
    store_int4_values(values, (uint8_t *)l->values + (index - index % 4) * bytes + index % 4,
                      (uint32_t *)l->value_scales + pairs, dim, kind);
}

/* sum + the products of four codes of each lane with the four int8 of a word. */
INLINE vi int4_dot(vi sum, vu codes, int32_t word) {
#ifdef __AVX512VNNI__
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(word));
#elif defined __AVX512BW__
    __m512i pairs = _mm512_maddubs_epi16((__m512i)codes, _mm512_set1_epi32(word));
    return sum + (vi)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined __AVX2__ && !defined __AVX512F__
    /* pairs lie within 16 bits: 2 x 31 x 128 */
    __m256i pairs = _mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32(word));
    return sum + (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif defined __ARM_FEATURE_DOTPROD
    return (vi)vdotq_s32((int32x4_t)sum, (int8x16_t)codes, vreinterpretq_s8_s32(vdupq_n_s32(word)));
#else
    for (int k = 0; k < 32; k += 8)
        sum += (vi)(codes >> k & 31) * (int32_t)(int8_t)((uint32_t)word >> k);
    return sum;
#endif
}

/* T queries as attention over 4 bits reads them. */
typedef struct {
    int32_t words[MAX_HEAD_DIM / 4 * TILE];  /* [dim / 4, T] four int8 each */
    int32_t sums[INT4_MOST_GROUPS * TILE];   /* [groups, T] of a group's int8 */
    float units[TILE];                       /* what they count, times the factor of scores */
} Int4Queries;

/* One copy of what is called once a block or less, for all kinds and sizes: the compiler's time. */
#define ONE_COPY static __attribute__((noinline))

/* Round queries to int8. */
ONE_COPY void int4_round_queries(const float **q, int64_t dim, float scale, Int4Queries *to,
                                 int64_t kind, int T) {
    const int64_t group = int4_group(dim, kind);
    for (int g = 0; g < T; g++) {
        float amax = 0;
        for (int64_t i = 0; i < dim; i++)
            amax = fabsf(q[g][i]) > amax || q[g][i] != q[g][i] ? fabsf(q[g][i]) : amax;
        const float unit = amax / 127 < 0x1p-126f ? 0x1p-126f : amax / 127;
        to->units[g] = unit * scale;
        for (int64_t at = 0; at < dim; at += group) {
            int32_t sum = 0;
            for (int64_t i = at; i < at + group; i += 4) {
                int8_t four[4];
                for (int k = 0; k < 4; k++) {
                    float rounded = rintf(q[g][i + k] / unit);
                    four[k] = (int8_t)(rounded == rounded ? rounded : 0);
                    sum += four[k];
                }
                memcpy(&to->words[i / 4 * T + g], four, sizeof four);
            }
            to->sums[at / group * T + g] = sum;
        }
    }
}

/* The scores of T queries with LANES columns, which lie at `at` of the cache. scores: [T, BLOCK] */
INLINE void int4_scores(const Step *s, const Layer *l, int64_t at, const Int4Queries *queries,
                        float *scores, const int kind, const int T) {
    const int64_t lane = (int)LANES < (int)SIDE ? at % SIDE : 0, dim = s->head_dim;
    const int64_t group = int4_group(dim, kind), groups = dim / group;
    const uint8_t *keys = (const uint8_t *)l->keys + (at - lane) * int4_bytes(dim, kind);
    const uint8_t *codes = keys + lane * 4;
    const uint8_t *fifths = codes + dim / 8 * SIDE * 4;
    const uint32_t *pairs = (const uint32_t *)l->key_scales + (at - lane) * groups + lane;
    vf score[TILE];
    for (int g = 0; g < T; g++) score[g] = (vf){0};
    for (int64_t part = 0; part < groups; part++) {
        const int32_t *sums = queries->sums + part * T;
        vi sum[TILE];
#pragma GCC unroll 8
        for (int g = 0; g < T; g++) sum[g] = (vi){0} - int4_half(kind) * sums[g];
        for (int64_t d = part * group / 8; d < (part + 1) * group / 8; d++) {
            const vu both = *(const vu *)(codes + d * SIDE * 4);
            vu low = both & 0x0F0F0F0F, high = both >> 4 & 0x0F0F0F0F;
            if (kind == INT5) {
                const vu bits = *(const vu *)(fifths + d / 4 * SIDE * 4) >> (int)(d % 4 * 2);
                low |= bits << 4 & 0x10101010, high |= bits << 3 & 0x10101010;
            }
            const int32_t *words = queries->words + 2 * d * T;
#pragma GCC unroll 8
            for (int g = 0; g < T; g++)
                sum[g] = int4_dot(int4_dot(sum[g], low, words[g]), high, words[T + g]);
        }
        const vf pair = *(const vf *)(pairs + part * SIDE);
#pragma GCC unroll 8
        for (int g = 0; g < T; g++) {
            score[g] = multiply_add(score[g], __builtin_convertvector(sum[g], vf), upper(pair));
            score[g] = multiply_add(score[g], splat((float)sums[g]), lower(pair));
        }
    }
    for (int g = 0; g < T; g++) {
        vf x = score[g] * queries->units[g];
        if (s->cap > 0) x = s->cap - 2 * s->cap / (1.0f + exponentials(x * (2 / s->cap)));
        *(vf *)(scores + g * BLOCK) = x;
    }
}

/* The probabilities of T queries for BLOCK columns as the values of one group read them. */
typedef struct {
    uint8_t words[TILE][BLOCK]; /* int8, four columns to a word */
    int32_t sums[TILE];         /* of the int8 */
    float units[TILE];          /* what they count, times the step */
    float middles[TILE];        /* sum of the columns' middles */
} Int4Weights;

/* Round probabilities, times the steps of their columns. scores: [T, BLOCK]; columns from the block's
 * group of LANES `first` to that of `end`; those that a query does not see have 0, and memory that
 * was never written. */
ONE_COPY void int4_round_weights(const Layer *l, const int64_t *at, int64_t first, int64_t end,
                                 const float *scores, int64_t part, int64_t groups,
                                 Int4Weights *to, int T) {
    for (int g = 0; g < T; g++) {
        vf weight[BLOCK / LANES], most = {0}, middles = {0}, sums = {0};
        for (int64_t j = first; j < end; j++) {
            const int64_t lane = (int)LANES < (int)SIDE ? at[j] % SIDE : 0;
            const vf pair = *(const vf *)((const uint32_t *)l->value_scales
                                          + (at[j] - lane) * groups + part * SIDE + lane);
            const vf p = *(const vf *)(scores + g * BLOCK + j * LANES);
            weight[j] = blend(p > 0.0f, p * upper(pair), (vf){0});
            middles = multiply_add(middles, p, blend(p > 0.0f, lower(pair), (vf){0}));
            most = larger(weight[j], most);
        }
        /* beside what is so small, its columns' middles count alone */
        const float top = max_of_lanes(most), factor = top > 0x1p-100f ? 127 / top : 0;
        for (int64_t j = first; j < end; j++) {
            /* the nearest integer: the last bit of 1.5 * 2^23 is 1. NaN becomes 127; the middle of
             * its column is NaN too */
            vf scaled = smaller(weight[j] * factor, splat(127.0f)) + 12582912.0f;
            *(vb *)(to->words[g] + j * LANES) = __builtin_convertvector((vu)scaled & 127, vb);
            sums += scaled - 12582912.0f;
        }
        to->sums[g] = (int32_t)sum_of_lanes(sums);
        to->units[g] = top / 127;
        to->middles[g] = sum_of_lanes(middles);
    }
}

/* The fifth bits of LANES features of four columns, in the place that they have in codes. bits: the
 * 16 bytes of their 32 features; from: the first of the features. */
INLINE vu int4_fifth_bits(const uint8_t *bits, int64_t from) {
    const vu lanes = {NUMBERS};
#ifdef __AVX512F__
    const vu all = (vu)_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)bits));
#elif defined __AVX__
    const __m256i zero = _mm256_setzero_si256();
    const __m128i one = _mm_loadu_si128((const __m128i *)bits);
    const vu all = (vu)_mm256_insertf128_si256(_mm256_insertf128_si256(zero, one, 0), one, 1);
#else
    const vu all = *(const vu *)bits;
#endif
    return (all >> (lanes / 4 + (uint32_t)(from % 32 / 4)) & 0x01010101) << 4;
}

/* sums = sums * shrink + probabilities @ values, for the features of group `part`, which has G of
 * them or, where G is 32, a multiple of that. The values are those of columns `from` to `to` of a
 * block, as in `accumulate_values`. */
INLINE void int4_accumulate(const Step *s, const Layer *l, const int64_t *at, int64_t from,
                            int64_t to, const float *scores, const float *shrink, float *sums,
                            int64_t part, const int kind, const int G, const int T) {
    const int64_t dim = s->head_dim, first = from / LANES, end = (to + LANES - 1) / LANES;
    const int64_t group = int4_group(dim, kind), half = group / 2, bytes = int4_bytes(dim, kind);
    const int some = G / 2 < (int)LANES ? G / 2 : (int)LANES; /* features of a register */
    Int4Weights weights;
    int4_round_weights(l, at, first, end, scores, part, dim / group, &weights, T);
    for (int64_t i = 0; i < half; i += LANES) {
        const int64_t feature = part * group + i; /* the first of `low` */
        vi low[TILE], high[TILE];
#pragma GCC unroll 8
        for (int g = 0; g < T; g++)
            low[g] = high[g] = (vi){0} - int4_half(kind) * weights.sums[g];
        for (int64_t j = first * LANES; j < end * LANES; j += 4) {
            const uint8_t *column = (const uint8_t *)l->values
                + (at[j / LANES] + j % LANES) * bytes;
            const uint8_t *codes = column + (part * half + i) * 4;
            vu both = {0};
            if (some == LANES) both = *(const vu *)codes;
            else memcpy(&both, codes, 4 * (size_t)some);
            vu lows = both & 0x0F0F0F0F, highs = both >> 4 & 0x0F0F0F0F;
            if (kind == INT5) {
                const uint8_t *fifths = column + dim / 2 * 4;
                lows |= int4_fifth_bits(fifths + feature / 32 * 16, feature);
                highs |= int4_fifth_bits(fifths + (feature + half) / 32 * 16, feature + half);
            }
#pragma GCC unroll 8
            for (int g = 0; g < T; g++) {
                int32_t word;
                memcpy(&word, weights.words[g] + j, sizeof word);
                low[g] = int4_dot(low[g], lows, word);
                high[g] = int4_dot(high[g], highs, word);
            }
        }
        for (int g = 0; g < T; g++)
            for (int side = 0; side < 2; side++) {
                float *own = sums + g * dim + feature + side * half;
                vf old = {0}, new = __builtin_convertvector(side ? high[g] : low[g], vf);
                new = multiply_add(splat(weights.middles[g]), new, splat(weights.units[g]));
                memcpy(&old, own, 4 * (size_t)some);
                new = multiply_add(new, old, splat(shrink[g]));
                memcpy(own, &new, 4 * (size_t)some);
            }
    }
}
