/* Linears with weights of 4 or 8 bits, for CPUs with AVX512-VNNI (avx512.h), AVX2 (avx2.h) or ARM's
   dot products (neon.h), and with AMX (tiles.h):

   y[t, o] = sum_i x[t, i] w[o, i] + bias[o]

   Layout: rows stand in the lanes of a register. A line is 64 bytes of `data` and holds 16 rows:
   8 columns of 4 bits (byte b of a row's 4 bytes has column b in its lower half and column b + 4
   in its upper half, as qvalue + 8 or the code of e2m1), or 4 columns of 8 bits. Two lines, 32 rows, are neighbours;
   then come the next columns. Rows are padded to 64 and columns to `group`, with zeros. Scales
   are [16 rows, groups, 16].

   Inputs are quantized to int8 and multiplied as integers. Or they are kept as float and
   multiplied with the integers (or float8 values) of the weight in float32 or bfloat16, which
   hold them exactly; on CPUs with AMX in the order of its tiles, which few tokens keep without
   them. The sum of a group is scaled once. Every output is summed by one thread in
   an order of its own, so bits depend neither on the threads nor on the other tokens of a call. */
#ifdef __x86_64__
#include <immintrin.h>
#endif
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "team.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#ifdef __aarch64__
#define IN_REGISTER(X) __asm__("" : "+w"(X))
#else
#define IN_REGISTER(X) __asm__("" : "+v"(X))
#endif
/* The magnitude below which an input of PAIRED products is a zero: a product with a weight, of which
   none is closer to 0 than 2^-9, and a sum of such products have no subnormals. */
#define SMALLEST 0x1p-100f

/* A debug build checks once a call what Python promises; a broken promise ends the process. */
#ifdef QUANTFLOW_CHECK
#define CHECK(CONDITION) \
    ((CONDITION) ? (void)0 \
                 : (fprintf(stderr, "kernels.c:%d: not %s\n", __LINE__, #CONDITION), abort()))
#else
#define CHECK(CONDITION) ((void)0)
#endif

enum kind { W4, W8, F8, F4 };         /* a weight: 4 bits, int8, e4m3, e2m1 */
enum input { ASIS, INT8, E4M3 };      /* dtype to which inputs are quantized; ASIS: none */
enum math {                           /* dtype of the products */
    INTEGER, FLOAT,
    PAIRED, /* bfloat16 in words of one float, summed as AMX's tiles do: of each 32 columns those
               that stand first in a pair, and those that stand second; then both */
    BFLOAT, /* in words of two */
};

/* A weight. kernels.py has the same fields in `_Weight` and compares their places with
 * `structure_fields`. */
struct weight {
    int64_t rows, columns; /* of the linear, unpadded */
    int64_t group, groups; /* columns of a group, a multiple of 16; number of groups */
    const uint8_t *data;
    const void *scale;     /* float, or the upper half of one (wide == 0) */
    const uint8_t *zero;   /* [16 rows, groups, 16] zero_point + 8 of W4; NULL: 8 */
    const int32_t *offset; /* [16 rows, groups, 16] -(128 + input_zero) * sum(w), at which a sum of
                              W8 by int8 begins */
    /* of a static input; 0: computed from each token, or each of its groups */
    float input_scale;
    float input_largest;   /* value to which a dynamic scale maps the largest magnitude */
    int32_t input_zero, input_grouped, kind, input, wide;
    /* multiply inputs that are not quantized as bfloat16, where the CPU can */
    int32_t bf16;
};

/* The order in which `part_of` takes columns from a weight: those of 16 words of a float each,
 * and of 8 words of two bfloat16. Inputs are arranged in the same order. The first half of a line's
 * words of a float are the lower halves of its words of two. */
#define OF_FOUR_BITS { \
    [FLOAT ... PAIRED] = {0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15}, \
    [BFLOAT] = {0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15} }
#define OF_EIGHT_BITS { \
    [FLOAT ... PAIRED] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, \
    [BFLOAT] = {0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15} }
static const int32_t orders[4][4][16] = {
    [W4] = OF_FOUR_BITS, [F4] = OF_FOUR_BITS, [W8] = OF_EIGHT_BITS, [F8] = OF_EIGHT_BITS,
};

/* Columns of a line. */
INLINE int columns_of(enum kind kind) { return kind == W4 || kind == F4 ? 8 : 4; }

/* e2m1 for INTEGER products: twice a value is a whole number. Byte shuffles find it from the code,
 * 12 higher: it is not negative then, and 12 is the zero point of all groups. kernels.py halves the
 * scales. */
#define TWICE_E2M1(NUMBERS) \
    NUMBERS(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)

/* The zero point of a group that names none, as codes are multiplied. */
INLINE int point_of(enum kind kind) { return kind == F4 ? 12 : 8; }

/* Inputs, arranged for the products. */
struct tokens {
    int64_t words; /* words of a token, each of 4 int8, 2 int16, 2 bfloat16 or 1 float, in the order
                      of the weight's columns */
    uint32_t *x;   /* tile after tile [words, tokens of the tile] */
    float *scale;  /* of each token, or of each of its groups */
    int64_t token, part; /* numbers from one token's scale to the next one's, and from a group's */
    /* [tokens, groups] of int8 inputs: their sum; of 4-bit weights minus the sum, times the zero
     * point where all groups have the same */
    int32_t *sum;
    enum math math;
    int tiled;     /* inputs are arranged for tiles.h: tile after tile, of 16 tokens */
    int bf16;      /* x, bias and y are bfloat16 instead of float */
};

#ifdef __AVX512VNNI__
#include "avx512.h"
#elif defined(__ARM_FEATURE_DOTPROD)
#include "neon.h"
#else
#include "avx2.h"
#endif

/* A linear on some tokens. */
struct job {
    const struct weight *w;
    struct tokens in;
    const void *x, *bias;
    void *y;
    int64_t tokens;
    int64_t first_token, first_unit; /* of all that the jobs of a call have, in their order */
};

#include "tiles.h"

/* The scale of columns [begin, end). `unscaled` is set where they have no scale: they hold NaN, or
 * Inf without a static scale. */
static float scale_of(const struct weight *w, const void *x, int bf16, int64_t begin, int64_t end,
                      int *unscaled) {
    floats most = splat(0);
    int nan = 0;
    for (int64_t i = begin; i < end; i += LANES) {
        floats value = load(x, i, bf16, first(end - i));
        nan |= has_nan(value);
        most = larger(most, magnitude(value));
    }
    float amax = largest_of(most), smallest = 0x1p-126f;
    *unscaled = nan || (w->input_scale == 0 && isinf(amax));
    if (w->input_scale != 0) return w->input_scale;
    if (!(amax > 0)) return 1;
    return amax / w->input_largest > smallest ? amax / w->input_largest : smallest;
}

/* Quantize and arrange a token of the tile of `size` tokens that begins at token `tile`. */
static void prepare(const struct weight *w, const void *x, int64_t token, int64_t tile, int size,
                    const struct tokens *to) {
    const void *row = (const char *)x + token * w->columns * (to->bf16 ? 2 : 4);
    uint32_t *out = to->x + tile * to->words + token - tile;
    int32_t *sums = to->sum + token * w->groups;
    int64_t parts = w->input_grouped ? w->groups : 1, width = w->group * w->groups / parts;
    for (int64_t begin = 0, p = 0; p < parts; p++, begin += width) {
        int64_t end = begin + width < w->columns ? begin + width : w->columns;
        int unscaled = 0;
        float scale = w->input == ASIS ? 1 : scale_of(w, row, to->bf16, begin, end, &unscaled);
        to->scale[token * to->token + p * to->part] = unscaled ? NAN : scale;
#if HAS_TILES
        if (to->tiled) {
            arrange_tiles(w, row, to->bf16, begin, end, begin + width, scale, to, token);
            continue;
        }
#endif
        /* `arrange` is inlined, with its math a constant */
#define ARRANGE(MATH) \
    arrange(w, row, to->bf16, begin, end, begin + width, scale, MATH, out, size, sums)
        if (to->math == INTEGER) ARRANGE(INTEGER);
        else if (to->math == FLOAT) ARRANGE(FLOAT);
        else if (to->math == PAIRED) ARRANGE(PAIRED);
        else ARRANGE(BFLOAT);
    }
    if (to->math == INTEGER && !to->tiled && columns_of(w->kind) == 8)
        for (int64_t g = 0; g < w->groups; g++) sums[g] *= w->zero ? -1 : -point_of(w->kind);
}

/* The line at `data` in each register of rows; the lines that are needed later are fetched. */
INLINE void load_lines(const uint8_t *data, int64_t pair, ints *line, const int T) {
    UNROLL for (int r = 0; r < blocks_of(T) * 16 / LANES; r++) {
        const uint8_t *at = data + r * LANES / 32 * pair + r * LANES % 32 * 4;
        line[r] = load_ints(at);
        if (r * LANES % 16) continue; /* its cache line was fetched with the register before */
        /* One token: fetch beyond the page, where the CPU's own prefetching stops. Several: fetch
         * the next 32 rows, into the second-level cache. */
        if (T == 1) __builtin_prefetch(at + 4096, 0, 3);
        else __builtin_prefetch(at + pair, 0, 2);
    }
}

/* Add INTEGER products of `lines` lines to sum [R, T], by way of sums of 16 bits. */
INLINE void add_narrow(const uint8_t *data, int64_t pair, int64_t lines, const uint32_t *x,
                       ints (*sum)[MOST], const enum kind kind, const int T) {
    const int R = blocks_of(T) * 16 / LANES, parts = words_of(kind, INTEGER);
    for (int64_t done = 0; done < lines; done += NARROW_LINES) {
        ints part[NARROW_LINES * 2][4];
        UNROLL for (int i = 0; i < NARROW_LINES; i++) {
            ints line[4];
            load_lines(data + i * 128, pair, line, T);
            UNROLL for (int v = 0; v < parts; v++)
                UNROLL for (int r = 0; r < R; r++)
                    part[i * parts + v][r] = part_of(kind, INTEGER, line[r], v, splat_int(0));
        }
        UNROLL for (int t = 0; t < T; t++) { /* the parts keep the registers */
            ints narrow[4];
            UNROLL for (int v = 0; v < NARROW_LINES * parts; v++) {
                const ints word = splat_int((int)x[v * T + t]);
                UNROLL for (int r = 0; r < R; r++)
                    narrow[r] = multiply_narrow(v ? narrow[r] : splat_int(0), part[v][r], word);
            }
            UNROLL for (int r = 0; r < R; r++) sum[r][t] = plus(sum[r][t], widened(narrow[r]));
        }
        data += NARROW_LINES * 128;
        x += NARROW_LINES * parts * T;
    }
}

#define TILE_OF \
    const struct weight *w, const struct tokens *in, int64_t block, int64_t token, floats *total

/* Add the products of group `g`, of `group` columns, to total [R, T]: R registers of rows from
 * 16-row block `block` on, T tokens from `token` on. */
INLINE void add_group(TILE_OF, int64_t g, const int64_t group, const enum kind kind,
                      const enum math math, const int T) {
    const int R = blocks_of(T) * 16 / LANES, parts = words_of(kind, math);
    const int64_t lines = group / columns_of(kind), pair = lines * w->groups * 128;
    const int64_t at = (block * w->groups + g) * 16;
    const uint8_t *data = w->data + block / 2 * pair;
    data += (blocks_of(T) == 1 ? block % 2 * 64 : 0) + g * lines * 128;
    const uint32_t *x = in->x + token * in->words + g * lines * parts * T;
    ints sum[4][MOST], zero[4];
    UNROLL for (int r = 0; r < R; r++) {
        const int64_t row = at + r * LANES / 16 * w->groups * 16 + r * LANES % 16;
        zero[r] = w->zero ? load_bytes(w->zero + row) : splat_int(point_of(kind));
        UNROLL for (int t = 0; t < T; t++) {
            /* integer sums begin at what takes out the offset of the inputs (W8), or the zero
             * points of the weight: zero * inputs, or inputs (W4, F4); float sums begin at 0 */
            const int32_t inputs = math == INTEGER ? in->sum[(token + t) * w->groups + g] : 0;
            sum[r][t] = math == INTEGER && kind == W8
                ? plus(load_ints(w->offset + row), splat_int(shift_of(inputs, group)))
                : w->zero ? times_int(zero[r], splat_int(inputs)) : splat_int(inputs);
        }
        zero[r] = zeros_of(math, zero[r]);
    }
    const int64_t turn = math == PAIRED ? 32 / columns_of(kind) : lines;
    if (math == INTEGER && columns_of(kind) == 8 && narrow(T))
        add_narrow(data, pair, lines, x, sum, kind, T);
    else for (int64_t done = 0; done < lines; done += turn) {
        ints half[2][4][MOST]; /* PAIRED's two sums */
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int t = 0; t < T; t++) half[0][r][t] = half[1][r][t] = splat_int(0);
        for (int64_t i = 0; i < turn; i++) {
            ints line[4];
            load_lines(data, pair, line, T);
            UNROLL for (int v = 0; v < parts; v++) {
                ints part[4];
                UNROLL for (int r = 0; r < R; r++) part[r] = part_of(kind, math, line[r], v, zero[r]);
                UNROLL for (int t = 0; t < T; t++) {
                    const ints word = splat_int((int)x[v * T + t]);
                    UNROLL for (int r = 0; r < R; r++) {
                        ints *to = math == PAIRED ? &half[v >= parts / 2][r][t] : &sum[r][t];
                        *to = multiply(kind, math, *to, part[r], word);
                    }
                }
            }
            data += 128;
            x += parts * T;
        }
        if (math != PAIRED) continue;
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int t = 0; t < T; t++)
                sum[r][t] = plus_float(sum[r][t], plus_float(half[0][r][t], half[1][r][t]));
    }
    UNROLL for (int r = 0; r < R; r++) {
        /* keeps the sums in registers: gcc puts some of them in memory otherwise */
        UNROLL for (int t = 0; t < T; t++) IN_REGISTER(sum[r][t]);
        const int64_t row = at + r * LANES / 16 * w->groups * 16 + r * LANES % 16;
        const floats scale = load(w->scale, row, !w->wide, ALL);
        UNROLL for (int t = 0; t < T; t++) {
            floats whole = sum_of(math, sum[r][t]);
            if (w->input_grouped)
                whole = times(whole, splat(in->scale[(token + t) * in->token + g * in->part]));
            total[r * T + t] = times_plus(whole, scale, total[r * T + t]);
        }
    }
}

/* Write the products of all groups to total [R, T]. */
INLINE void add_groups(TILE_OF, const enum kind kind, const enum math math, const int T) {
    floats sum[SUMS] = {0}; /* of its own: the compiler knows that no weight is written */
    for (int64_t g = 0; g < w->groups; g++)
        add_group(w, in, block, token, sum, g, w->group, kind, math, T);
    memcpy(total, sum, sizeof sum);
}

/* One function for each kind, math and size of a tile: they are constants in it, so that its loops
 * are unrolled and its sums stay in registers. */
#define ADDER(KIND, MATH, T) \
    static __attribute__((noinline)) void KIND##_##MATH##_##T(TILE_OF) { \
        add_groups(w, in, block, token, total, KIND, MATH, T); \
    }
#define ADDERS(KIND, MATH) TILES(ADDER, KIND, MATH)
ADDERS(W4, INTEGER)
ADDERS(W4, FLOAT)
ADDERS(W4, BFLOAT)
ADDERS(W8, INTEGER)
ADDERS(W8, FLOAT)
ADDERS(W8, BFLOAT)
ADDERS(F8, FLOAT)
ADDERS(F8, BFLOAT)
ADDERS(F4, INTEGER)
ADDERS(F4, FLOAT)
ADDERS(F4, BFLOAT)
/* PAIRED sums of FEW tokens and more are for tiles.h */
FEW_TILES(ADDER, W4, PAIRED)
FEW_TILES(ADDER, W8, PAIRED)
FEW_TILES(ADDER, F8, PAIRED)
FEW_TILES(ADDER, F4, PAIRED)
static void (*const adders[4][4][4])(TILE_OF) = {
    NAMES(W4, INTEGER), NAMES(W4, FLOAT),  NAMES(W4, BFLOAT), FEW_NAMES(W4, PAIRED),
    NAMES(W8, INTEGER), NAMES(W8, FLOAT),  NAMES(W8, BFLOAT), FEW_NAMES(W8, PAIRED),
    NAMES(F8, FLOAT),   NAMES(F8, BFLOAT), FEW_NAMES(F8, PAIRED),
    NAMES(F4, INTEGER), NAMES(F4, FLOAT),  NAMES(F4, BFLOAT), FEW_NAMES(F4, PAIRED),
};

/* The outputs of some rows, from 16-row block `block` on, and T tokens. */
static void tile(const struct weight *w, const struct tokens *in, int64_t block, int64_t token,
                 const void *bias, void *y, int T) {
    const int R = blocks_of(T) * 16 / LANES;
    floats total[SUMS];
    for (int i = 0; i < R * T; i++) /* fetch the outputs' cache lines, before they are written */
        __builtin_prefetch((char *)y + ((token + i % T) * w->rows + block * 16 + i / T * LANES)
                                           * (in->bf16 ? 2 : 4), 1);
    CHECK(adders[w->kind][in->math][place_of(T)]);
    adders[w->kind][in->math][place_of(T)](w, in, block, token, total);
    for (int r = 0; r < R; r++) {
        int64_t row = block * 16 + r * LANES;
        some mask = first(w->rows - row);
        floats offset = bias ? load(bias, row, in->bf16, mask) : splat(0);
        for (int t = 0; t < T; t++) {
            floats scale = splat(w->input_grouped ? 1 : in->scale[(token + t) * in->token]);
            store(y, (token + t) * w->rows + row, in->bf16, mask,
                  times_plus(total[r * T + t], scale, offset));
        }
    }
}

/* The linears of a call; their units are shared by all threads at once. */
struct jobs { struct job *job; int64_t many; };

/* 16-row blocks of a unit: few, so that no thread waits long for another's last one. */
static int64_t blocks_of_unit(const struct job *job) {
    return job->in.tiled || job->tokens == 1 ? 4 : 2;
}

static int64_t row_units_of(const struct job *job) {
    return (job->w->rows + 63) / 64 * 4 / blocks_of_unit(job);
}

static int64_t units_of(const struct job *job) {
    return row_units_of(job) * (job->in.tiled ? (job->tokens + STRIP - 1) / STRIP : 1);
}

/* The job that a token or a unit belongs to, whose first ones are in FIELD. */
#define JOB_OF(FIELD, AT) ({ \
    const struct job *low = jobs->job; \
    for (int64_t left = jobs->many; left > 1;) { \
        int64_t half = left / 2; \
        if (low[half].FIELD <= (AT)) low += half, left -= half; \
        else left = half; \
    } \
    low; })

/* A unit: one token's inputs. Its tile is found from the token alone, so that threads prepare them
 * in any order. */
static void prepare_token(const void *context, int64_t token) {
    const struct jobs *jobs = context;
    const struct job *job = JOB_OF(first_token, token);
    const int64_t tokens = job->tokens, t = token - job->first_token;
    const int most = most_of(job->w->kind, job->in.math);
    int64_t begin = t < tokens / most * most ? t / most * most : tokens / most * most;
    while (begin + tile_of(tokens - begin, most) <= t) begin += tile_of(tokens - begin, most);
    prepare(job->w, job->x, t, begin, tile_of(tokens - begin, most), &job->in);
}

/* A unit: the outputs of some blocks and all tokens of a linear, or in tiles those of a strip. */
static void multiply_blocks(const void *context, int64_t unit) {
    const struct jobs *jobs = context;
    const struct job *job = JOB_OF(first_unit, unit);
    int64_t piece = blocks_of_unit(job), block = (unit - job->first_unit) * piece;
#if HAS_TILES
    if (job->in.tiled) { /* rows are the inner ones: a strip's inputs stay in the second-level cache */
        const int64_t strip = (unit - job->first_unit) / row_units_of(job);
        multiply_tiles(job, block - strip * row_units_of(job) * piece, strip * STRIP);
        return;
    }
#endif
    for (int64_t t = 0, size; t < job->tokens; t += size) {
        size = tile_of(job->tokens - t, most_of(job->w->kind, job->in.math));
        /* a tile of one token spans more blocks than a unit of several tokens: every other unit
         * computes it for its neighbour too */
        int many = blocks_of((int)size);
        for (int64_t b = block; b < block + piece; b += many)
            if (b % many == 0) tile(job->w, &job->in, b, t, job->bias, job->y, (int)size);
    }
}

/* The tokens that a linear's inputs have room for: whole tiles, where they stand in such. */
static int64_t held(const struct job *job) {
    return job->in.tiled ? (job->tokens + 15) / 16 * 16 : job->tokens;
}

/* The bytes of a linear's inputs, arranged for the products, and how they are multiplied. */
static size_t arranged(struct job *job, int bf16) {
    const struct weight *w = job->w;
    CHECK(w && w->data && w->scale && w->rows > 0 && w->columns > 0);
    CHECK(w->group > 0 && w->group % 16 == 0);
    CHECK(w->groups == (w->columns + w->group - 1) / w->group);
    CHECK(w->kind >= W4 && w->kind <= F4 && w->input >= ASIS && w->input <= E4M3);
    CHECK(!(w->kind == F8 && w->input == INT8));
    CHECK(w->offset || !(w->kind == W8 && w->input == INT8));
    int narrow = w->bf16 || w->input == E4M3;
    job->in.bf16 = bf16;
    job->in.math = w->input == INT8 ? INTEGER : !narrow ? FLOAT : paired(w) ? PAIRED
        : HAS_BFLOAT ? BFLOAT : FLOAT;
    int64_t columns = w->group * w->groups;
    job->in.words = columns / columns_of(w->kind) * words_of(w->kind, job->in.math);
#if HAS_TILES
    job->in.tiled = tiled(w, job->in.math, job->tokens);
    if (job->in.tiled) job->in.words = columns * bytes_of(job->in.math) / 4;
#endif
    /* tiles want the scales of many tokens at a time, vectors those of few */
    job->in.token = job->in.tiled || !w->input_grouped ? 1 : w->groups;
    job->in.part = job->in.tiled ? job->tokens : 1;
    int64_t words = held(job) * job->in.words + job->tokens * w->groups * 2;
    return (size_t)(words * 4 + 127) / 64 * 64;
}

/* Compute the outputs of some linears. Returns 0, or 1 where there was no memory. */
static int run(const struct jobs *jobs, int bf16) {
    size_t size = 0;
    for (int64_t i = 0; i < jobs->many; i++) size += arranged(jobs->job + i, bf16);
    char *room = aligned_alloc(64, size), *at = room;
    if (!room) return 1;
    int64_t tokens = 0, units = 0;
    for (struct job *job = jobs->job; job < jobs->job + jobs->many; job++) {
        struct tokens *in = &job->in;
        in->x = (uint32_t *)at;
        in->scale = (float *)(in->x + held(job) * in->words);
        in->sum = (int32_t *)(in->scale + job->tokens * job->w->groups);
        at += arranged(job, bf16);
        job->first_token = tokens, job->first_unit = units;
        tokens += job->tokens, units += units_of(job);
    }
    team_share(prepare_token, jobs, tokens, 1);
    team_share(multiply_blocks, jobs, units, 1);
    free(room);
    return 0;
}

/* y [tokens, rows] of x [tokens, columns] and bias [rows] or NULL, all bfloat16 or all float.
 * Returns 0, or 1 where there was no memory. */
int quantflow_linear(const struct weight *w, const void *x, int64_t tokens, const void *bias,
                     void *y, int bf16) {
    CHECK(w && x && y && tokens >= 0);
    struct job job = {.w = w, .x = x, .bias = bias, .y = y, .tokens = tokens};
    return run(&(struct jobs){&job, 1}, bf16);
}

/* The same for `many` linears, each on tokens of its own: those from first[i] to first[i + 1] of x
 * and of y. No weight is read of a linear that has no token. */
int quantflow_linears(const struct weight *const *w, int64_t many, const int64_t *first,
                      const void *x, const void *const *bias, void *y, int bf16) {
    CHECK(w && first && x && bias && y && many >= 0);
    struct job *job = malloc(sizeof *job * (size_t)(many + 1));
    struct jobs jobs = {job, 0};
    if (!job) return 1;
    for (int64_t i = 0, wide = bf16 ? 2 : 4; i < many; i++) {
        CHECK(first[i] >= 0 && first[i] <= first[i + 1]);
        if (first[i] == first[i + 1]) continue;
        job[jobs.many++] = (struct job){
            .w = w[i], .x = (const char *)x + first[i] * w[i]->columns * wide, .bias = bias[i],
            .y = (char *)y + first[i] * w[i]->rows * wide, .tokens = first[i + 1] - first[i]};
    }
    int failed = jobs.many ? run(&jobs, bf16) : 0;
    free(job);
    return failed;
}

/* Codes of 4 bits as files hold them, two columns a byte, the even one in its lower half: a word has
 * 8 columns of a row. They go to rows of `data` from `first` on, which has `lines` lines a row. */
struct codes { const uint32_t *word; int64_t words, rows, first, lines; uint32_t *data; };
enum { AT_ONCE = 16 }; /* words of a row: one line of the cache */

/* The columns of a word in the order of a line: 0, 4, 1, 5, 2, 6, 3, 7. */
INLINE uint32_t in_order_of_line(uint32_t word) {
    uint32_t low = word & 0xffff, high = word >> 16; /* columns 0 to 3, and 4 to 7 */
    low = (low | low << 8) & 0x00ff00ff, high = (high | high << 8) & 0x00ff00ff;
    low = (low | low << 4) & 0x0f0f0f0f, high = (high | high << 4) & 0x0f0f0f0f;
    return low | high << 4;
}

/* A unit: the rows that share 32 rows of lines. */
static void arrange_rows(const void *context, int64_t unit) {
    const struct codes *codes = context;
    const int64_t block = codes->first / 32 + unit, last = codes->first + codes->rows;
    const int64_t begin = block * 32 > codes->first ? block * 32 : codes->first;
    const int64_t end = block * 32 + 32 < last ? block * 32 + 32 : last;
    uint32_t *to = codes->data + block * codes->lines * 32 - block * 32;
    for (int64_t at = 0; at < codes->words; at += AT_ONCE) {
        const int64_t many = codes->words - at < AT_ONCE ? codes->words - at : AT_ONCE;
        for (int64_t row = begin; row < end; row++) {
            const uint32_t *from = codes->word + (row - codes->first) * codes->words + at;
            uint32_t line[AT_ONCE];
            if (many == AT_ONCE) /* a constant count, which becomes vectors */
                for (int i = 0; i < AT_ONCE; i++) line[i] = in_order_of_line(from[i]);
            else
                for (int i = 0; i < many; i++) line[i] = in_order_of_line(from[i]);
            for (int i = 0; i < many; i++) to[(at + i) * 32 + row] = line[i];
        }
    }
}

/* Arrange the codes of `rows` rows, `words` words each, as rows `first` and on of a weight's data,
 * whose other rows and columns stay as they are. Linears that become one are so many calls. */
void quantflow_arrange(const uint32_t *word, int64_t words, int64_t rows, int64_t first,
                       int64_t lines, uint32_t *data) {
    CHECK(word && data && rows > 0 && first >= 0 && words > 0 && words <= lines);
    const struct codes codes = {word, words, rows, first, lines, data};
    team_share(arrange_rows, &codes, (first + rows + 31) / 32 - first / 32, 4);
}

/* The places of the structure's fields, which Python compares with its own; field NULL: the end of
 * the structure, structure NULL: the end of the list. */
struct field { const char *structure, *field; int64_t offset, bytes; };
#define FIELD(FIELD) \
    {"Weight", #FIELD, offsetof(struct weight, FIELD), sizeof(((struct weight *)0)->FIELD)}

const struct field *structure_fields(void) {
    static const struct field fields[] = {
        FIELD(rows), FIELD(columns), FIELD(group), FIELD(groups), FIELD(data), FIELD(scale),
        FIELD(zero), FIELD(offset), FIELD(input_scale), FIELD(input_largest), FIELD(input_zero),
        FIELD(input_grouped), FIELD(kind), FIELD(input), FIELD(wide), FIELD(bf16),
        {"Weight", NULL, sizeof(struct weight), 0}, {NULL, NULL, 0, 0},
    };
    return fields;
}
