/* The vector operations of kernels.c in registers of 8 lanes: AVX2 with FMA.

   A line of 16 rows is two registers. Integers are multiplied in pairs: unsigned by signed bytes
   where sums of two fit into 16 bits, as those of 4-bit weights do, and 16-bit numbers by 16-bit
   numbers where they do not. Sums are exact in both cases. */
typedef __m256 floats;
typedef __m256i ints;
typedef int64_t some;                  /* number of the lanes that are meant, the first ones */
enum { LANES = 8, ALL = 8, MOST = 6 }; /* MOST: tokens of a tile, at most */
enum { SUMS = 2 * MOST };              /* registers of sums, at most */
enum { HAS_BFLOAT = 0 };

/* Tokens of a tile at most, by kind and math: codes of 4 bits are spread to many floats, and the
 * words of 6 tokens leave the first-level cache. */
INLINE int most_of(enum kind kind, enum math math) {
    return columns_of(kind) == 8 && math == FLOAT ? 4 : MOST;
}

/* Tokens of the next tile, of those that are left and of `most`; the place of such a tile in a row
 * of `adders`; its blocks of 16 rows. */
INLINE int tile_of(int64_t left, int most) {
    return left >= most ? most : left >= 4 ? 4 : left >= 2 ? 2 : 1;
}
INLINE int place_of(int tokens) { return tokens / 2; }
INLINE int blocks_of(int tokens) { return tokens == 1 ? 2 : 1; }
#define TILES(MAKE, KIND, MATH) \
    MAKE(KIND, MATH, 1) MAKE(KIND, MATH, 2) MAKE(KIND, MATH, 4) MAKE(KIND, MATH, 6)
#define NAMES(KIND, MATH) \
    [KIND][MATH] = {KIND##_##MATH##_1, KIND##_##MATH##_2, KIND##_##MATH##_4, KIND##_##MATH##_6}

/* The same for less than FEW tokens. */
#define FEW_TILES(MAKE, KIND, MATH) MAKE(KIND, MATH, 1) MAKE(KIND, MATH, 2)
#define FEW_NAMES(KIND, MATH) [KIND][MATH] = {KIND##_##MATH##_1, KIND##_##MATH##_2}

/* Words of an input for a line of a weight. */
INLINE int words_of(enum kind kind, enum math math) {
    return math == INTEGER ? 2 : columns_of(kind);
}

INLINE some first(int64_t count) { return count >= LANES ? LANES : count < 0 ? 0 : count; }
INLINE ints splat_int(int32_t x) { return _mm256_set1_epi32(x); }
INLINE floats splat(float x) { return _mm256_set1_ps(x); }
INLINE ints load_ints(const void *from) { return _mm256_loadu_si256(from); }
INLINE ints load_bytes(const uint8_t *from) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from));
}
INLINE void store_ints(void *to, ints x) { _mm256_storeu_si256(to, x); }
INLINE void store_bytes(void *to, ints x) { /* the lowest byte of each lane */
    x = _mm256_and_si256(x, splat_int(255));
    x = _mm256_permute4x64_epi64(_mm256_packus_epi32(x, x), 0xd8);
    _mm_storel_epi64(to, _mm256_castsi256_si128(_mm256_packus_epi16(x, x)));
}
INLINE ints times_int(ints a, ints b) { return _mm256_mullo_epi32(a, b); }
INLINE ints plus(ints a, ints b) { return _mm256_add_epi32(a, b); }
INLINE ints minus_bytes(ints a, ints b) { return _mm256_sub_epi8(a, b); }
INLINE ints plus_float(ints a, ints b) {
    return _mm256_castps_si256(_mm256_add_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b)));
}
INLINE floats times(floats a, floats b) { return _mm256_mul_ps(a, b); }
INLINE floats times_plus(floats a, floats b, floats c) { return _mm256_fmadd_ps(a, b, c); }
INLINE floats larger(floats a, floats b) { return _mm256_max_ps(a, b); } /* b where one is NaN */
INLINE floats magnitude(floats x) { return _mm256_andnot_ps(splat(-0.0f), x); }
INLINE int has_nan(floats x) { return _mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)); }

INLINE float largest_of(floats x) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

/* All bits of the lanes that are meant. */
INLINE ints mask_of(some lanes) {
    return _mm256_cmpgt_epi32(splat_int((int)lanes), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

INLINE floats load(const void *from, int64_t at, int bf16, some lanes) {
    if (!bf16)
        return lanes == ALL ? _mm256_loadu_ps((const float *)from + at)
                            : _mm256_maskload_ps((const float *)from + at, mask_of(lanes));
    __m128i half = _mm_setzero_si128();
    if (lanes == ALL) half = _mm_loadu_si128((const __m128i *)((const uint16_t *)from + at));
    else memcpy(&half, (const uint16_t *)from + at, (size_t)lanes * 2);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

INLINE void store(void *to, int64_t at, int bf16, some lanes, floats value) {
    if (!bf16) {
        if (lanes == ALL) _mm256_storeu_ps((float *)to + at, value);
        else _mm256_maskstore_ps((float *)to + at, mask_of(lanes), value);
        return;
    }
    ints bits = _mm256_castps_si256(value), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16),
        splat_int(1));
    ints nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    bits = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, splat_int(0x7fff))), 16);
    bits = _mm256_blendv_epi8(bits, splat_int(0x7fc0), nan);
    __m128i half = _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(bits, bits),
        0x08));
    memcpy((uint16_t *)to + at, &half, (size_t)lanes * 2);
}

/* The nearest e4m3 value, ties to even; |x| is at most 448. */
INLINE floats round_e4m3(floats x) {
    ints bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 20),
        splat_int(1));
    bits = _mm256_add_epi32(bits, _mm256_add_epi32(odd, splat_int(0x7ffff)));
    floats normal = _mm256_castsi256_ps(_mm256_and_si256(bits, splat_int((int)0xfff00000)));
    const floats step = splat(24576.0f); /* whose last bit is 2^-9, the step of subnormals */
    floats subnormal = _mm256_cmp_ps(magnitude(x), splat(0x1p-6f), _CMP_LT_OQ);
    return _mm256_blendv_ps(normal, _mm256_sub_ps(_mm256_add_ps(x, step), step), subnormal);
}

/* Columns of a token from `at` on as int8 codes, zeros behind the first `lanes`. */
INLINE ints quantized(const struct weight *w, const void *x, int64_t at, int bf16, some lanes,
                      float scale) {
    floats value = _mm256_div_ps(load(x, at, bf16, lanes), splat(scale));
    value = _mm256_min_ps(_mm256_add_ps(value, splat((float)w->input_zero)), splat(127));
    value = _mm256_max_ps(value, splat(-128));
    return _mm256_and_si256(_mm256_cvtps_epi32(value), mask_of(lanes));
}

/* Columns of a token from `at` on as they are multiplied: divided by the scale and rounded to e4m3,
 * or to bfloat16; `SMALLEST` says which become zeros. */
INLINE floats rounded(const struct weight *w, const void *x, int64_t at, int bf16, some lanes,
                      float scale, const enum math math) {
    floats value = _mm256_div_ps(load(x, at, bf16, lanes), splat(scale));
    if (w->input == E4M3) {
        const floats largest = splat(w->input_largest), lowest = _mm256_sub_ps(splat(0), largest);
        return round_e4m3(_mm256_max_ps(_mm256_min_ps(value, largest), lowest));
    }
    if (!w->bf16) return value;
    uint16_t halves[LANES];
    store(halves, 0, 1, ALL, value);
    value = load(halves, 0, 1, ALL);
    if (math != PAIRED) return value;
    return _mm256_and_ps(value, _mm256_cmp_ps(magnitude(value), splat(SMALLEST), _CMP_NLT_UQ));
}

INLINE floats permuted(floats x, ints order) { return _mm256_permutevar8x32_ps(x, order); }

/* e2m1 for FLOAT products: byte shuffles find the values of 32 codes at once, as integers that are
 * twice as large. Such a byte at the top of a lane is an integer 2^24 times as large, which one
 * instruction makes a float. The inputs are divided by 2^25: a product is the same number, and so is
 * every sum. (An input below 2^-101, or of bfloat16 below 2^-117, may lose bits by that.) */
#define OF_BYTE 0x1p-25f

/* Quantize and arrange columns of a token from `begin` on, and zeros from `end` to `padded`;
 * word i goes to out[i * stride]. */
INLINE void arrange(const struct weight *w, const void *x, int bf16, int64_t begin, int64_t end,
                    int64_t padded, float scale, const enum math math, uint32_t *out, int stride,
                    int32_t *sums) {
    const ints order = load_ints(orders[w->kind][FLOAT]);
    const ints pairs = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
    int32_t sum = 0;
    for (int64_t i = begin; i < padded; i += 16) {
        uint32_t words[16];
        ints q[2];
        for (int half = 0; half < 2; half++) {
            some lanes = first(end - i - half * LANES);
            if (math == INTEGER) {
                q[half] = quantized(w, x, i + half * LANES, bf16, lanes, scale);
                continue;
            }
            floats value = rounded(w, x, i + half * LANES, bf16, lanes, scale, math);
            if (math == FLOAT && w->kind == F4) value = times(value, splat(OF_BYTE));
            _mm256_storeu_ps((float *)words + half * LANES, permuted(value, order));
        }
        int per = 1; /* columns of a word */
        if (math == INTEGER) {
            ints shorts = _mm256_permute4x64_epi64(_mm256_packs_epi32(q[0], q[1]), 0xd8);
            __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(shorts),
                                            _mm256_extracti128_si256(shorts, 1));
            /* the sum of the 16 columns: by twos, by fours, then the two that are left */
            ints ones = _mm256_set1_epi16(1), twos = _mm256_madd_epi16(shorts, ones);
            __m128i fours = _mm_add_epi32(_mm256_castsi256_si128(twos),
                                          _mm256_extracti128_si256(twos, 1));
            fours = _mm_hadd_epi32(fours, fours);
            sum += _mm_extract_epi32(fours, 0) + _mm_extract_epi32(fours, 1);
            per = w->kind == W8 ? 2 : 4;
            if (per == 4) {
                _mm_storeu_si128((__m128i *)words, bytes);
            } else {
                ints shifted = _mm256_add_epi16(shorts, _mm256_set1_epi16(128));
                _mm256_storeu_si256((__m256i *)words, _mm256_shuffle_epi8(shifted, pairs));
            }
            if ((i + 16) % w->group == 0) sums[i / w->group] = sum, sum = 0;
        }
        for (int64_t k = 0; k < 16 / per; k++) out[(i / per + k) * stride] = words[k];
    }
}

/* Column v of 8 rows, in the order of `orders`, times 2^25. */
INLINE floats large_e2m1(ints line, int v) {
    const ints doubled = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
    ints codes = _mm256_and_si256(v % 2 ? _mm256_srli_epi16(line, 4) : line, _mm256_set1_epi8(15));
    ints values = _mm256_shuffle_epi8(doubled, codes); /* of four columns, those that v / 2 counts */
    const char byte = (char)(v / 2);
    const ints top = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        -1, -1, -1, byte, -1, -1, -1, byte + 4, -1, -1, -1, byte + 8, -1, -1, -1, byte + 12));
    if (byte == 0) values = _mm256_slli_epi32(values, 24);
    else if (byte == 3) values = _mm256_and_si256(values, splat_int((int)0xff000000));
    else values = _mm256_shuffle_epi8(values, top);
    return _mm256_cvtepi32_ps(values);
}

/* Columns of 8 rows as floats: column v of a line of 8 bits; of a line of 4 bits the v-th column in
 * the order of `orders`, in which `arrange` puts the inputs. */
INLINE floats floats_of(enum kind kind, ints line, int v, floats zero) {
    if (kind == F4) {
        ints code = _mm256_srli_epi32(line, 4 * v); /* its lower 3 bits are the size's */
        ints sign = _mm256_and_si256(_mm256_slli_epi32(code, 28), splat_int((int)0x80000000));
        const floats sizes = _mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6);
        return _mm256_xor_ps(_mm256_permutevar8x32_ps(sizes, code), _mm256_castsi256_ps(sign));
    }
    if (kind == W4) {
        ints codes = _mm256_and_si256(_mm256_srli_epi32(line, 4 * v), splat_int(15));
        return _mm256_sub_ps(_mm256_cvtepi32_ps(codes), zero);
    }
    ints top = _mm256_slli_epi32(line, 24 - 8 * v);
    if (kind == W8) return _mm256_cvtepi32_ps(_mm256_srai_epi32(top, 24));
    top = _mm256_and_si256(_mm256_srai_epi32(top, 4), splat_int((int)0x87f00000));
    return times(_mm256_castsi256_ps(top), splat(0x1p120f));
}

/* The part of a line that is multiplied with an input's v-th word; of 8 bits as integers, columns v
 * and v + 2 in 16 bits each. Two bfloat16 are for tiles alone. */
INLINE ints part_of(enum kind kind, enum math math, ints line, int v, ints zero) {
    if (math == BFLOAT) { /* these floats' lower halves are zeros */
        const floats none = _mm256_castsi256_ps(zero);
        floats low = floats_of(kind, line, v, none);
        floats high = floats_of(kind, line, v + columns_of(kind) / 2, none);
        return _mm256_or_si256(_mm256_srli_epi32(_mm256_castps_si256(low), 16),
                               _mm256_castps_si256(high));
    }
    if (math == FLOAT && kind == F4) return _mm256_castps_si256(large_e2m1(line, v));
    if (math != INTEGER)
        return _mm256_castps_si256(floats_of(kind, line, v, _mm256_castsi256_ps(zero)));
    if (kind == W8) return _mm256_srai_epi16(v ? line : _mm256_slli_epi16(line, 8), 8);
    ints codes = _mm256_and_si256(v ? _mm256_srli_epi16(line, 4) : line, _mm256_set1_epi8(15));
    if (kind == W4) return codes;
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(TWICE_E2M1(_mm_setr_epi8)), codes);
}

/* acc + the v-th word of an input times that part of a line. */
INLINE ints multiply(enum kind kind, enum math math, ints acc, ints part, ints x) {
    if (math == INTEGER) {
        if (kind == W8) return _mm256_add_epi32(acc, _mm256_madd_epi16(part, x));
        ints pairs = _mm256_maddubs_epi16(part, x);
        return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    return _mm256_castps_si256(times_plus(_mm256_castsi256_ps(part), _mm256_castsi256_ps(x),
                                          _mm256_castsi256_ps(acc)));
}

/* Lines of 4-bit weights whose INTEGER products are summed in 16 bits: each has two words, and the sum
 * of a word's two products is at most 2 * 24 * 128. A group has an even number of lines. */
enum { NARROW_LINES = 2 };

/* Whether a tile of T tokens sums so: of fewer, the memory takes the time. */
INLINE int narrow(int T) { return T >= 4; }

/* acc, in 16 bits, + a word of an input times a part of a line of 4 bits. */
INLINE ints multiply_narrow(ints acc, ints part, ints x) {
    return _mm256_add_epi16(acc, _mm256_maddubs_epi16(part, x));
}

/* Sums of 16 bits, two in 32 bits. */
INLINE ints widened(ints sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }

/* What takes out a shift of the weights: they have none. */
INLINE int32_t shift_of(int32_t sum, int64_t group) { (void)sum, (void)group; return 0; }

/* The zero points of a group as `part_of` takes them. */
INLINE ints zeros_of(enum math math, ints zero) {
    return math == INTEGER ? zero : _mm256_castps_si256(_mm256_cvtepi32_ps(zero));
}

/* A sum as floats. */
INLINE floats sum_of(enum math math, ints sum) {
    return math == INTEGER ? _mm256_cvtepi32_ps(sum) : _mm256_castsi256_ps(sum);
}
