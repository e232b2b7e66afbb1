/* The vector operations of kernels.c in registers of 4 lanes: ARM's NEON with dot products
   (Armv8.2's DotProd: Graviton 2, Ampere Altra, Grace and newer ones).

   A line of 16 rows is four registers. Four bytes are multiplied by four in one instruction, with
   both signed or both unsigned. Weights of 8 bits are shifted by 128 as their inputs are, and a sum
   takes out 128 times that of its inputs (`shift_of`). Sums are exact modulo 2^32, and the whole
   sums stay in an int32. */
#include <arm_neon.h>

typedef float32x4_t floats;
typedef int32x4_t ints;
typedef int64_t some;                  /* number of the lanes that are meant, the first ones */
enum { LANES = 4, ALL = 4, MOST = 4 }; /* MOST: tokens of a tile, at most */
enum { SUMS = 16 };                    /* registers of sums, at most */
enum { HAS_BFLOAT = 0 };

/* Tokens of a tile at most, by kind and math. */
INLINE int most_of(enum kind kind, enum math math) { (void)kind, (void)math; return MOST; }

/* Tokens of the next tile, of those that are left and of `most`; the place of such a tile in a row
 * of `adders`; its blocks of 16 rows. */
INLINE int tile_of(int64_t left, int most) {
    return left >= most ? most : left >= 2 ? 2 : 1;
}
INLINE int place_of(int tokens) { return tokens / 2; }
INLINE int blocks_of(int tokens) { (void)tokens; return 1; }
#define TILES(MAKE, KIND, MATH) MAKE(KIND, MATH, 1) MAKE(KIND, MATH, 2) MAKE(KIND, MATH, 4)
#define NAMES(KIND, MATH) \
    [KIND][MATH] = {KIND##_##MATH##_1, KIND##_##MATH##_2, KIND##_##MATH##_4}

/* The same for less than FEW tokens. */
#define FEW_TILES(MAKE, KIND, MATH) MAKE(KIND, MATH, 1) MAKE(KIND, MATH, 2)
#define FEW_NAMES(KIND, MATH) [KIND][MATH] = {KIND##_##MATH##_1, KIND##_##MATH##_2}

/* Words of an input for a line of a weight. */
INLINE int words_of(enum kind kind, enum math math) {
    return columns_of(kind) / (math == INTEGER ? 4 : 1);
}

INLINE floats as_floats(ints x) { return vreinterpretq_f32_s32(x); }
INLINE ints as_ints(floats x) { return vreinterpretq_s32_f32(x); }

INLINE some first(int64_t count) { return count >= LANES ? LANES : count < 0 ? 0 : count; }
INLINE ints splat_int(int32_t x) { return vdupq_n_s32(x); }
INLINE floats splat(float x) { return vdupq_n_f32(x); }
INLINE ints load_ints(const void *from) { return vreinterpretq_s32_u8(vld1q_u8(from)); }
INLINE ints load_bytes(const uint8_t *from) {
    uint32_t four;
    memcpy(&four, from, sizeof four);
    const uint16x8_t wide = vmovl_u8(vcreate_u8(four));
    return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(wide)));
}
INLINE ints times_int(ints a, ints b) { return vmulq_s32(a, b); }
INLINE ints plus(ints a, ints b) { return vaddq_s32(a, b); }
INLINE ints plus_float(ints a, ints b) {
    return as_ints(vaddq_f32(as_floats(a), as_floats(b)));
}
INLINE floats times(floats a, floats b) { return vmulq_f32(a, b); }
INLINE floats times_plus(floats a, floats b, floats c) { return vfmaq_f32(c, a, b); }
INLINE floats larger(floats a, floats b) { /* b where one is NaN */
    return vbslq_f32(vcgtq_f32(a, b), a, b);
}
INLINE floats magnitude(floats x) { return vabsq_f32(x); }
INLINE int has_nan(floats x) { return vminvq_u32(vceqq_f32(x, x)) == 0; }
INLINE float largest_of(floats x) { return vmaxvq_f32(x); }

/* All bits of the lanes that are meant. */
INLINE ints mask_of(some lanes) {
    const int32_t numbers[4] = {0, 1, 2, 3};
    return vreinterpretq_s32_u32(vcltq_s32(vld1q_s32(numbers), splat_int((int)lanes)));
}

INLINE floats load(const void *from, int64_t at, int bf16, some lanes) {
    if (!bf16) {
        if (lanes == ALL) return vld1q_f32((const float *)from + at);
        float four[4] = {0};
        memcpy(four, (const float *)from + at, (size_t)lanes * 4);
        return vld1q_f32(four);
    }
    uint16_t halves[4] = {0};
    memcpy(halves, (const uint16_t *)from + at, (size_t)lanes * 2);
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(halves), 16));
}

INLINE void store(void *to, int64_t at, int bf16, some lanes, floats value) {
    if (!bf16) {
        float four[4];
        vst1q_f32(four, value);
        memcpy((float *)to + at, four, (size_t)lanes * 4);
        return;
    }
    const uint32x4_t bits = vreinterpretq_u32_f32(value);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    uint16_t halves[4];
    vst1_u16(halves, vbsl_u16(vmovn_u32(vceqq_f32(value, value)), vshrn_n_u32(rounded, 16),
                              vdup_n_u16(0x7fc0)));
    memcpy((uint16_t *)to + at, halves, (size_t)lanes * 2);
}

/* The nearest e4m3 value, ties to even; |x| is at most 448. */
INLINE floats round_e4m3(floats x) {
    ints bits = as_ints(x), odd = vandq_s32(vshrq_n_s32(bits, 20), splat_int(1));
    bits = vaddq_s32(bits, vaddq_s32(odd, splat_int(0x7ffff)));
    floats normal = as_floats(vandq_s32(bits, splat_int((int)0xfff00000)));
    const floats step = splat(24576.0f); /* whose last bit is 2^-9, the step of subnormals */
    return vbslq_f32(vcltq_f32(magnitude(x), splat(0x1p-6f)),
                     vsubq_f32(vaddq_f32(x, step), step), normal);
}

/* Columns of a token from `at` on as int8 codes, zeros behind the first `lanes`. */
INLINE ints quantized(const struct weight *w, const void *x, int64_t at, int bf16, some lanes,
                      float scale) {
    floats value = vdivq_f32(load(x, at, bf16, lanes), splat(scale));
    value = vaddq_f32(value, splat((float)w->input_zero));
    value = vmaxq_f32(vminq_f32(value, splat(127)), splat(-128));
    return vandq_s32(vcvtnq_s32_f32(value), mask_of(lanes));
}

/* Columns of a token from `at` on as they are multiplied: divided by the scale and rounded to e4m3,
 * or to bfloat16. */
INLINE floats rounded(const struct weight *w, const void *x, int64_t at, int bf16, some lanes,
                      float scale) {
    floats value = vdivq_f32(load(x, at, bf16, lanes), splat(scale));
    if (w->input == E4M3) {
        const floats largest = splat(w->input_largest);
        return round_e4m3(vmaxq_f32(vminq_f32(value, largest), vnegq_f32(largest)));
    }
    if (!w->bf16) return value;
    uint16_t halves[LANES];
    store(halves, 0, 1, ALL, value);
    return load(halves, 0, 1, ALL);
}

/* Quantize and arrange columns of a token from `begin` on, and zeros from `end` to `padded`;
 * word i goes to out[i * stride]. */
INLINE void arrange(const struct weight *w, const void *x, int bf16, int64_t begin, int64_t end,
                    int64_t padded, float scale, const enum math math, uint32_t *out, int stride,
                    int32_t *sums) {
    const int32_t *order = orders[w->kind][FLOAT];
    int32_t sum = 0;
    for (int64_t i = begin; i < padded; i += 16) {
        uint32_t words[16];
        int per = 1; /* columns of a word */
        if (math == INTEGER) {
            per = 4;
            for (int quarter = 0; quarter < 4; quarter++) {
                const int64_t at = i + quarter * LANES;
                const ints q = quantized(w, x, at, bf16, first(end - at), scale);
                sum += vaddvq_s32(q);
                uint8x8_t bytes = vreinterpret_u8_s8(vmovn_s16(vcombine_s16(vmovn_s32(q),
                                                                            vdup_n_s16(0))));
                if (w->kind == W8) bytes = veor_u8(bytes, vdup_n_u8(128));
                words[quarter] = vget_lane_u32(vreinterpret_u32_u8(bytes), 0);
            }
            if ((i + 16) % w->group == 0) sums[i / w->group] = sum, sum = 0;
        } else {
            float columns[16];
            for (int quarter = 0; quarter < 4; quarter++) {
                const int64_t at = i + quarter * LANES;
                vst1q_f32(columns + quarter * LANES,
                          rounded(w, x, at, bf16, first(end - at), scale));
            }
            for (int k = 0; k < 16; k++) memcpy(words + k, columns + order[k], sizeof *words);
        }
        for (int64_t k = 0; k < 16 / per; k++) out[(i / per + k) * stride] = words[k];
    }
}

/* Columns of 4 rows as floats: column v of a line of 8 bits; of a line of 4 bits the v-th column in
 * the order of `orders`, in which `arrange` puts the inputs. */
INLINE floats floats_of(enum kind kind, ints line, int v, floats zero) {
    if (kind == F4) {
        const ints code = vshlq_s32(line, splat_int(-4 * v));
        /* the upper halves of 0, 0.5, 1, 1.5, 2, 3, 4, 6, byte by byte; other bytes are zeros */
        const uint8_t sizes[16] = {0x00, 0x00, 0x00, 0x3f, 0x80, 0x3f, 0xc0, 0x3f,
                                   0x00, 0x40, 0x40, 0x40, 0x80, 0x40, 0xc0, 0x40};
        const ints twice = vshlq_n_s32(vandq_s32(code, splat_int(7)), 1);
        const ints bytes = vaddq_s32(vmulq_s32(twice, splat_int(0x01010000)),
                                     splat_int(0x0100ffff));
        const uint8x16_t size = vqtbl1q_u8(vld1q_u8(sizes), vreinterpretq_u8_s32(bytes));
        const ints sign = vandq_s32(vshlq_n_s32(code, 28), splat_int((int)0x80000000));
        return as_floats(veorq_s32(vreinterpretq_s32_u8(size), sign));
    }
    if (kind == W4) {
        const ints codes = vandq_s32(vshlq_s32(line, splat_int(-4 * v)), splat_int(15));
        return vsubq_f32(vcvtq_f32_s32(codes), zero);
    }
    ints top = vshlq_s32(line, splat_int(24 - 8 * v));
    if (kind == W8) return vcvtq_f32_s32(vshrq_n_s32(top, 24));
    top = vandq_s32(vshrq_n_s32(top, 4), splat_int((int)0x87f00000));
    return times(as_floats(top), splat(0x1p120f));
}

/* The part of a line that is multiplied with an input's v-th word. */
INLINE ints part_of(enum kind kind, enum math math, ints line, int v, ints zero) {
    if (math != INTEGER) return as_ints(floats_of(kind, line, v, as_floats(zero)));
    const uint8x16_t bytes = vreinterpretq_u8_s32(line);
    if (kind == W8) return vreinterpretq_s32_u8(veorq_u8(bytes, vdupq_n_u8(128)));
    const uint8x16_t codes = v ? vshrq_n_u8(bytes, 4) : vandq_u8(bytes, vdupq_n_u8(15));
    if (kind == W4) return vreinterpretq_s32_u8(codes);
#define IN_BRACES(...) {__VA_ARGS__}
    const uint8_t twice[16] = TWICE_E2M1(IN_BRACES);
    return vreinterpretq_s32_u8(vqtbl1q_u8(vld1q_u8(twice), codes));
}

/* acc + the v-th word of an input times that part of a line. */
INLINE ints multiply(enum kind kind, enum math math, ints acc, ints part, ints x) {
    if (math != INTEGER) return as_ints(times_plus(as_floats(part), as_floats(x), as_floats(acc)));
    if (kind == W8)
        return vreinterpretq_s32_u32(vdotq_u32(vreinterpretq_u32_s32(acc),
                                               vreinterpretq_u8_s32(part),
                                               vreinterpretq_u8_s32(x)));
    return vdotq_s32(acc, vreinterpretq_s8_s32(part), vreinterpretq_s8_s32(x));
}

/* No INTEGER products are summed in 16 bits first. */
enum { NARROW_LINES = 1 };
INLINE int narrow(int T) { (void)T; return 0; }
INLINE ints multiply_narrow(ints acc, ints part, ints x) { (void)part, (void)x; return acc; }
INLINE ints widened(ints sum) { return sum; }

/* What takes out that weights of 8 bits are shifted by 128: -128 times the sum of the shifted
 * inputs of a group, modulo 2^32. */
INLINE int32_t shift_of(int32_t sum, int64_t group) {
    return (int32_t)(-128u * ((uint32_t)sum + 128u * (uint32_t)group));
}

/* The zero points of a group as `part_of` takes them. */
INLINE ints zeros_of(enum math math, ints zero) {
    return math == INTEGER ? zero : as_ints(vcvtq_f32_s32(zero));
}

/* A sum as floats. */
INLINE floats sum_of(enum math math, ints sum) {
    return math == INTEGER ? vcvtq_f32_s32(sum) : as_floats(sum);
}
