/* The vector operations of kernels.c in registers of 16 lanes: AVX-512 with VNNI, and with BF16
   where the CPU has it. */
typedef __m512 floats;
typedef __m512i ints;
typedef __mmask16 some;                       /* mask of the lanes that are meant */
enum { LANES = 16, ALL = 0xffff, MOST = 12 }; /* MOST: tokens of a tile, at most */
enum { SUMS = 2 * MOST };                     /* registers of sums, at most */

#ifdef __AVX512BF16__
enum { HAS_BFLOAT = 1 };
#else
enum { HAS_BFLOAT = 0 };
#define _mm512_dpbf16_ps(acc, a, b) (acc)
#endif

/* Tokens of a tile at most, by kind and math. */
INLINE int most_of(enum kind kind, enum math math) { (void)kind, (void)math; return MOST; }

/* Tokens of the next tile, of those that are left and of `most`; the place of such a tile in a row
 * of `adders`; its blocks of 16 rows. */
INLINE int tile_of(int64_t left, int most) {
    return left >= most ? most : left >= 8 ? 8 : left >= 4 ? 4 : 1;
}
INLINE int place_of(int tokens) { return tokens / 4; }
INLINE int blocks_of(int tokens) { return tokens == 1 ? 4 : 2; }
#define TILES(MAKE, KIND, MATH) \
    MAKE(KIND, MATH, 1) MAKE(KIND, MATH, 4) MAKE(KIND, MATH, 8) MAKE(KIND, MATH, 12)
#define NAMES(KIND, MATH) \
    [KIND][MATH] = {KIND##_##MATH##_1, KIND##_##MATH##_4, KIND##_##MATH##_8, KIND##_##MATH##_12}

/* The same for less than FEW tokens. */
#define FEW_TILES(MAKE, KIND, MATH) MAKE(KIND, MATH, 1)
#define FEW_NAMES(KIND, MATH) [KIND][MATH] = {KIND##_##MATH##_1}

/* Words of an input for a line of a weight. */
INLINE int words_of(enum kind kind, enum math math) {
    return columns_of(kind) / (math == INTEGER ? 4 : math == BFLOAT ? 2 : 1);
}

INLINE some first(int64_t count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : (1u << count) - 1;
                                  }
INLINE ints splat_int(int32_t x) { return _mm512_set1_epi32(x); }
INLINE floats splat(float x) { return _mm512_set1_ps(x); }
INLINE ints load_ints(const void *from) { return _mm512_loadu_si512(from); }
INLINE ints load_bytes(const uint8_t *from) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
}
INLINE void store_ints(void *to, ints x) { _mm512_storeu_si512(to, x); }
INLINE void store_bytes(void *to, ints x) { _mm_storeu_si128(to, _mm512_cvtepi32_epi8(x)); }
INLINE ints times_int(ints a, ints b) { return _mm512_mullo_epi32(a, b); }
INLINE ints plus(ints a, ints b) { return _mm512_add_epi32(a, b); }
INLINE ints minus_bytes(ints a, ints b) { return _mm512_sub_epi8(a, b); }
INLINE ints plus_float(ints a, ints b) {
    return _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b)));
}
INLINE floats times(floats a, floats b) { return _mm512_mul_ps(a, b); }
INLINE floats times_plus(floats a, floats b, floats c) { return _mm512_fmadd_ps(a, b, c); }
INLINE floats larger(floats a, floats b) { return _mm512_max_ps(a, b); } /* b where one is NaN */
INLINE floats magnitude(floats x) { return _mm512_abs_ps(x); }
INLINE float largest_of(floats x) { return _mm512_reduce_max_ps(x); }
INLINE int has_nan(floats x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) != 0; }

INLINE __m512 widen(__m256i half) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

INLINE __m512 load(const void *from, int64_t at, int bf16, __mmask16 mask) {
    if (bf16) return widen(_mm256_maskz_loadu_epi16(mask, (const uint16_t *)from + at));
    return _mm512_maskz_loadu_ps(mask, (const float *)from + at);
}

INLINE void store(void *to, int64_t at, int bf16, __mmask16 mask, __m512 value) {
    if (!bf16) {
        _mm512_mask_storeu_ps((float *)to + at, mask, value);
        return;
    }
    __m512i bits = _mm512_castps_si512(value);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)); /* ties go to even */
    bits = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    bits = _mm512_mask_mov_epi32(bits, nan, _mm512_set1_epi32(0x7fc0));
    _mm256_mask_storeu_epi16((uint16_t *)to + at, mask, _mm512_cvtepi32_epi16(bits));
}

/* The nearest e4m3 value, ties to even; |x| is at most 448. */
INLINE __m512 round_e4m3(__m512 x) {
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 20), _mm512_set1_epi32(1));
    bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7ffff)));
    __m512 normal = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32((int)0xfff00000)));
    /* whose last bit is 2^-9, the step of subnormals */
    const __m512 step = _mm512_set1_ps(24576.0f);
    __mmask16 subnormal = _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(0x1p-6f), _CMP_LT_OQ);
    return _mm512_mask_sub_ps(normal, subnormal, _mm512_add_ps(x, step), step);
}

/* Columns of a token from `at` on as int8 codes, zeros where `mask` has no lane. */
INLINE __m512i quantized(const struct weight *w, const void *x, int64_t at, int bf16,
                         __mmask16 mask, float scale) {
    __m512 value = _mm512_div_ps(load(x, at, bf16, mask), _mm512_set1_ps(scale));
    value = _mm512_add_ps(value, _mm512_set1_ps((float)w->input_zero));
    value = _mm512_max_ps(_mm512_min_ps(value, _mm512_set1_ps(127)), _mm512_set1_ps(-128));
    return _mm512_maskz_cvtps_epi32(mask, value);
}

/* Columns of a token from `at` on as they are multiplied: divided by the scale and rounded to e4m3,
 * or to bfloat16. Tiles take subnormals for zeros and make none: what is so small that its products
 * can be subnormal becomes a zero here. */
INLINE __m512 rounded(const struct weight *w, const void *x, int64_t at, int bf16, __mmask16 mask,
                      float scale, const enum math math) {
    __m512 value = _mm512_div_ps(load(x, at, bf16, mask), _mm512_set1_ps(scale));
    if (w->input == E4M3) {
        const __m512 largest = _mm512_set1_ps(w->input_largest);
        const __m512 lowest = _mm512_sub_ps(_mm512_setzero_ps(), largest);
        return round_e4m3(_mm512_max_ps(_mm512_min_ps(value, largest), lowest));
    }
    if (!w->bf16) return value;
    uint16_t halves[16];
    store(halves, 0, 1, 0xffff, value);
    value = load(halves, 0, 1, 0xffff);
    if (math != PAIRED) return value;
    return _mm512_maskz_mov_ps(
        _mm512_cmp_ps_mask(_mm512_abs_ps(value), _mm512_set1_ps(SMALLEST), _CMP_NLT_UQ), value);
}

INLINE floats permuted(floats x, ints order) { return _mm512_permutexvar_ps(order, x); }

/* Quantize and arrange columns of a token from `begin` on, and zeros from `end` to `padded`;
 * word i goes to out[i * stride]. */
INLINE void arrange(const struct weight *w, const void *x, int bf16, int64_t begin, int64_t end,
                    int64_t padded, float scale, const enum math math, uint32_t *out, int stride,
                    int32_t *sums) {
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i at = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(stride));
    const __m512i order = _mm512_loadu_si512(orders[w->kind][math]);
    __m512i sum = _mm512_setzero_si512();
    for (int64_t i = begin; i < padded; i += 16) {
        __mmask16 mask = first(end - i);
        if (math == INTEGER) {
            __m512i q = quantized(w, x, i, bf16, mask, scale);
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
        __m512 value = permuted(rounded(w, x, i, bf16, mask, scale, math), order);
        uint16_t halves[16];
        if (math != FLOAT) store(halves, 0, 1, 0xffff, value);
        if (math != BFLOAT)
            _mm512_i32scatter_ps(out + i * stride, at, value, 4);
        else
            _mm256_i32scatter_epi32(out + i / 2 * stride, _mm512_castsi512_si256(at),
                                    _mm256_loadu_si256((__m256i *)halves), 4);
    }
}

/* bfloat16 of 0 to 7 times 2^-9, the subnormals of e4m3. */
static const uint16_t subnormals[32] = {
    0x0000, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60,
};

/* Of 16 rows of e4m3 the v-th bytes of both halves, columns v and v + 2, as pairs of bfloat16;
 * without passing through float32 subnormals, which are slow. */
INLINE __m512i pairs_of_e4m3(__m512i line, int v) {
    __m512i code = v ? _mm512_srli_epi16(line, 8) : line, sign = v ? line
        : _mm512_slli_epi16(line, 8);
    __m512i size = _mm512_and_si512(_mm512_slli_epi16(code, 4), _mm512_set1_epi16(0x07f0));
    __mmask32 subnormal = _mm512_cmplt_epu16_mask(size, _mm512_set1_epi16(0x80));
    size = _mm512_add_epi16(size, _mm512_set1_epi16(120 << 7));
    size = _mm512_mask_permutexvar_epi16(size, subnormal, code, _mm512_loadu_si512(subnormals));
    /* size | (sign & 0x8000) */
    return _mm512_ternarylogic_epi32(size, sign, _mm512_set1_epi16((short)0x8000), 0xf8);
}

/* Columns of 16 rows as floats: column v of a line of 8 bits; of a line of 4 bits the v-th
 * column in the order of `orders`, in which `arrange` puts the inputs. */
INLINE __m512 floats_of(enum kind kind, __m512i line, int v, __m512 zero) {
    if (kind == W4) {
        const __m512 values = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        return _mm512_sub_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(line, 4 * v), values), zero);
    }
    if (kind == F4) {
        const __m512 values = _mm512_set_ps(-6, -4, -3, -2, -1.5f, -1, -0.5f, -0.0f, 6, 4, 3, 2,
                                            1.5f, 1, 0.5f, 0);
        return _mm512_permutexvar_ps(_mm512_srli_epi32(line, 4 * v), values);
    }
    if (kind == W8)
        return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(line, 24 - 8 * v), 24));
    __m512i both = pairs_of_e4m3(line, v % 2);
    return _mm512_castsi512_ps(v < 2 ? _mm512_slli_epi32(both, 16)
                                     : _mm512_and_si512(both, _mm512_set1_epi32((int)0xffff0000)));
}

/* bfloat16 of the integers 0 to 15 and -16 to -1. */
static const uint16_t integers[32] = {
    0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, /* 0 to 7 */
    0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170, /* 8 to 15 */
    0xc180, 0xc170, 0xc160, 0xc150, 0xc140, 0xc130, 0xc120, 0xc110, /* -16 to -9 */
    0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, /* -8 to -1 */
};
/* bfloat16 of the codes of e2m1, twice. */
static const uint16_t quarters[32] = {
    0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, /* 0 to 6 */
    0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0, /* -0 to -6 */
    0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
    0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0,
};

/* The same columns as pairs of bfloat16; of 8 bits columns v and v + 2. */
INLINE __m512i pairs_of(enum kind kind, __m512i line, int v, __m512i zero) {
    if (kind == W4) {
        __m512i q = _mm512_and_si512(_mm512_srli_epi16(line, 4 * v), _mm512_set1_epi16(15));
        return _mm512_permutexvar_epi16(_mm512_sub_epi16(q, zero), _mm512_loadu_si512(integers));
    }
    if (kind == F4)
        return _mm512_permutexvar_epi16(_mm512_srli_epi16(line, 4 * v),
                                        _mm512_loadu_si512(quarters));
    /* floats of `floats_of` are exact in bfloat16: their lower halves are zeros */
    if (kind == W8) {
        const __m512 none = _mm512_setzero_ps();
        __m512i low = _mm512_castps_si512(floats_of(kind, line, v, none));
        return _mm512_or_si512(_mm512_srli_epi32(low, 16),
                               _mm512_castps_si512(floats_of(kind, line, v + 2, none)));
    }
    return pairs_of_e4m3(line, v);
}

/* acc + the v-th word of an input times that part of a line. */
INLINE __m512i multiply(enum kind kind, enum math math, __m512i acc, __m512i part, __m512i x) {
    /* the first factor is unsigned: 4-bit codes of the weight, or inputs that are 128 higher */
    if (math == INTEGER)
        return kind == W8 ? _mm512_dpbusd_epi32(acc, x, part) : _mm512_dpbusd_epi32(acc, part, x);
    const __m512 sum = _mm512_castsi512_ps(acc);
    if (math != BFLOAT)
        return _mm512_castps_si512(
            _mm512_fmadd_ps(_mm512_castsi512_ps(part), _mm512_castsi512_ps(x), sum));
    return _mm512_castps_si512(_mm512_dpbf16_ps(sum, (__m512bh)part, (__m512bh)x));
}

INLINE __m512i part_of(enum kind kind, enum math math, __m512i line, int v, __m512i zero) {
    if (math == FLOAT || math == PAIRED)
        return _mm512_castps_si512(floats_of(kind, line, v, _mm512_castsi512_ps(zero)));
    if (math == BFLOAT) return pairs_of(kind, line, v, zero);
    if (kind == W8) return line;
    __m512i codes = _mm512_and_si512(v ? _mm512_srli_epi16(line, 4) : line, _mm512_set1_epi8(15));
    if (kind == W4) return codes;
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(TWICE_E2M1(_mm_setr_epi8)), codes);
}

/* No INTEGER products are summed in 16 bits first. */
enum { NARROW_LINES = 1 };
INLINE int narrow(int T) { (void)T; return 0; }
INLINE ints multiply_narrow(ints acc, ints part, ints x) { (void)part, (void)x; return acc; }
INLINE ints widened(ints sum) { return sum; }

/* What takes out a shift of the weights: they have none. */
INLINE int32_t shift_of(int32_t sum, int64_t group) { (void)sum, (void)group; return 0; }

/* The zero points of a group as `part_of` takes them. */
INLINE ints zeros_of(enum math math, ints zero) {
    if (math == FLOAT || math == PAIRED) return _mm512_castps_si512(_mm512_cvtepi32_ps(zero));
    return math == BFLOAT ? _mm512_or_si512(zero, _mm512_slli_epi32(zero, 16)) : zero;
}

/* A sum as floats. */
INLINE floats sum_of(enum math math, ints sum) {
    return math == INTEGER ? _mm512_cvtepi32_ps(sum) : _mm512_castsi512_ps(sum);
}
