/* Products of int8 or bfloat16 inputs in tiles, for CPUs with AMX: 16 tokens by 16 rows by 64 bytes
   of columns, 16,384 or 8,192 products, in one instruction. One of AVX-512 has 64 or 32.

   The sums are those of kernels.c, and so are the bits of the outputs: sums of integers do not
   depend on their order, those of bfloat16 are PAIRED's, and groups are scaled in the same order by
   the same operations. So a call of few tokens and one of many give the same; of int8, a CPU with
   AMX and one without too.

   A tile of the weight is what lines hold: 16 rows by 4 columns of int8, or 2 of bfloat16, in 64
   bytes, the next columns in the next line. All but int8 weights are spread to such lines first, for
   as many columns as the first-level cache has room for; all tokens take them from there. A tile of
   the inputs is 16 tokens by 64 bytes, in 1,024 bytes that follow each other. */
#include "amx.h"

enum { STRIP = 256 }; /* tokens whose sums are kept at once; a multiple of two tiles */

#if !HAS_TILES
static int paired(const struct weight *w) { (void)w; return 0; }
#else
enum {
    SIDE = 16,       /* tokens or rows of a tile */
    FEW = 4,         /* tokens of bfloat16 for which tiles are faster */
    SPAN = 64,       /* bytes of a token in a tile, at most */
    PAIRS = 2,       /* of 16-row blocks that take the same inputs from the first-level cache */
    PARTS = 2 * SIDE / LANES, /* registers of 32 rows */
    LINES = 64,     /* lines that are multiplied with all tokens of a strip before the next */
};

/* The sums of 32 rows and the tokens of a strip. */
struct strip {
    float total[STRIP][2 * SIDE]; /* sums of groups that are over, scaled */
    int32_t sum[STRIP][2 * SIDE]; /* of a group that goes on in the next lines; or floats */
    uint8_t line[LINES][2][64];   /* weights that were spread */
    int32_t tile[2][4][SIDE][SIDE]; /* of a group that is over and of the next */
} __attribute__((aligned(64)));

/* Tiles by number, as the instructions' names want it: sums of tokens 0 to 15 and 16 to 31 by both
 * halves of the rows, then inputs of both, then both halves of the weight. */
#define SUM_00 0
#define SUM_10 1
#define SUM_01 2
#define SUM_11 3
#define INPUT_0 4
#define INPUT_1 5
#define WEIGHT_0 6
#define WEIGHT_1 7

/* Bytes of an input's column. */
static int bytes_of(enum math math) { return math == INTEGER ? 1 : 2; }

/* Bytes of a token in a tile, or 0 where groups are no multiple of any. */
static int span_of(const struct weight *w, enum math math) {
    const int64_t bytes = w->group * bytes_of(math);
    return bytes % SPAN == 0 ? SPAN : bytes == SPAN / 2 ? SPAN / 2 : 0;
}

/* Whether products of bfloat16 are summed as tiles do. */
static int paired(const struct weight *w) {
    return span_of(w, PAIRED) == SPAN && tiles_allowed();
}

/* Whether a weight's products with so many tokens are computed in tiles. Vectors are faster for
 * fewer; int8 products of weights of 4 bits, which are spread first, need two tiles of tokens. */
static int tiled(const struct weight *w, enum math math, int64_t tokens) {
    if (math == PAIRED) return tokens >= FEW;
    return math == INTEGER && tokens >= (w->kind == W8 ? SIDE : 2 * SIDE) && span_of(w, INTEGER)
        && tiles_allowed();
}

/* Shape the tiles for `tokens` tokens, at most two tiles of them, and rows of `span` bytes. */
static void shape(int tokens, int span) {
    struct shapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        int left = tokens - i % 2 * SIDE; /* tiles of odd numbers have the tokens from 16 on */
        int rows = i >= WEIGHT_0 ? span / 4 : left < 1 ? 1 : left < SIDE ? left : SIDE;
        shapes.rows[i] = (uint8_t)rows;
        shapes.bytes[i] = (uint16_t)(i == INPUT_0 || i == INPUT_1 ? span : 4 * SIDE);
    }
    shape_tiles(&shapes);
}

/* Quantize columns [begin, end) of a token, and zeros up to `padded`, to its rows of tiles. */
static void arrange_tiles(const struct weight *w, const void *x, int bf16, int64_t begin,
                          int64_t end, int64_t padded, float scale, const struct tokens *to,
                          int64_t token) {
    const int64_t span = span_of(w, to->math), wide = bytes_of(to->math);
    const ints offset = splat_int(w->kind == W8 ? 128 : 0), order = load_ints(orders[w->kind][BFLOAT]);
    uint8_t *out = (uint8_t *)(to->x + token / SIDE * SIDE * to->words) + token % SIDE * span;
    for (int64_t i = begin; i < padded; i += LANES) {
        const int64_t byte = i * wide, at = byte / span * span * SIDE + byte % span;
        const some mask = first(end - i);
        if (to->math == INTEGER)
            store_bytes(out + at, plus(quantized(w, x, i, bf16, mask, scale), offset));
        else
            store(out + at, 0, 1, ALL,
                  permuted(rounded(w, x, i, bf16, mask, scale, PAIRED), order));
    }
}

/* Spread columns [begin, end) of 32 rows to lines: 4-bit weights to a byte each, less the zero
 * points; or any to bfloat16. */
INLINE void spread(const struct weight *w, int64_t block, int64_t begin, int64_t end,
                   uint8_t (*line)[2][64], const enum kind kind, const enum math math) {
    const int per = columns_of(kind), words = per * bytes_of(math) / 4;
    const uint8_t *data = w->data + block / 2 * (w->group * w->groups / per * 128) + begin / per * 128;
    for (int64_t g = begin / w->group, from = begin, to; from < end; from = to, g++) {
        to = (g + 1) * w->group < end ? (g + 1) * w->group : end;
        ints four[PARTS], point[PARTS];
        for (int p = 0; p < PARTS; p++) {
            const int64_t row = ((block + p * LANES / SIDE) * w->groups + g) * SIDE + p * LANES % SIDE;
            const ints zero = w->zero ? load_bytes(w->zero + row) : splat_int(point_of(kind));
            four[p] = times_int(zero, splat_int(0x01010101)), point[p] = zeros_of(math, zero);
        }
        for (int64_t i = from; i < to; i += per, data += 128, line += words)
            UNROLL for (int p = 0; p < PARTS; p++) {
                const ints many = load_ints(data + p * LANES * 4);
                UNROLL for (int v = 0; v < words; v++) {
                    const ints part = part_of(kind, math, many, v, point[p]);
                    store_ints(&line[v][p * LANES / SIDE][p * LANES % SIDE * 4],
                               math == INTEGER ? minus_bytes(part, four[p]) : part);
                }
            }
    }
}

/* The lines of columns [begin, end): `line`, to which they are spread, or the weight's own. */
static const uint8_t *lines_of(const struct job *job, int64_t block, int64_t begin, int64_t end,
                               uint8_t (*line)[2][64]) {
    const struct weight *w = job->w;
    if (job->in.math == INTEGER) {
        if (w->kind == W8)
            return w->data + (block / 2 * (w->group * w->groups) + begin) / 4 * 128;
        if (w->kind == W4) spread(w, block, begin, end, line, W4, INTEGER);
        else spread(w, block, begin, end, line, F4, INTEGER);
    } else if (w->kind == W4) spread(w, block, begin, end, line, W4, BFLOAT);
    else if (w->kind == W8) spread(w, block, begin, end, line, W8, BFLOAT);
    else if (w->kind == F8) spread(w, block, begin, end, line, F8, BFLOAT);
    else spread(w, block, begin, end, line, F4, BFLOAT);
    return line[0][0];
}

/* A group's sums by 32 rows and up to 32 tokens, and where they go. */
struct part {
    const struct job *job;
    struct strip *strip;
    int64_t block, token, place; /* 16-row block; first token of the call and of the strip */
    int tokens;
};

/* Add the sums of a group that is over, which stand in `tile`, to the totals. */
INLINE void add_sums(const struct part *part, int64_t g, int32_t (*tile)[SIDE][SIDE],
                     const enum kind kind, const enum math math) {
    const struct weight *w = part->job->w;
    const struct tokens *in = &part->job->in;
    const int64_t groups = w->groups;
    const int grouped = w->input_grouped, offsets = math == INTEGER && kind == W8;
    for (int at = 0; at < 2 * SIDE; at += LANES) {
        const int64_t row = ((part->block + at / SIDE) * groups + g) * SIDE + at % SIDE;
        const floats scale = load(w->scale, row, !w->wide, ALL);
        const ints offset = offsets ? load_ints(w->offset + row) : splat_int(0);
        const float *of_token = in->scale + part->token + g * in->part;
        float(*total)[2 * SIDE] = part->strip->total + part->place;
        for (int half = 0; half * SIDE < part->tokens; half++) {
            const int left = part->tokens - half * SIDE, tokens = left < SIDE ? left : SIDE;
            int32_t(*sum)[SIDE] = tile[half + at / SIDE * 2];
            for (int t = 0; t < tokens; t++, of_token++, total++) {
                const ints bits = load_ints(&sum[t][at % SIDE]);
                floats whole = sum_of(math, offsets ? plus(bits, offset) : bits);
                if (grouped) whole = times(whole, splat(*of_token));
                whole = times_plus(whole, scale, load(&total[0][at], 0, 0, ALL));
                store(&total[0][at], 0, 0, ALL, whole);
            }
        }
    }
}

/* Add the products of columns [begin, end), of which `lines` has the weights, in one tile of tokens
 * or, where `two`, in two. A group's sums are added to the totals after the products of the next
 * one were begun, so that vectors work while tiles do. */
INLINE void add_columns(const struct part *part, int64_t begin, int64_t end, const uint8_t *line,
                        const int two, const enum kind kind, const enum math math, const int span) {
    const struct weight *w = part->job->w;
    const struct tokens *in = &part->job->in;
    struct strip *s = part->strip;
    const int64_t wide = bytes_of(math), next = in->words * 4 * SIDE, place = part->place;
    const uint8_t *x = (const uint8_t *)(in->x + part->token * in->words) + begin * wide * SIDE;
    int64_t over = -1; /* group whose sums wait in a tile to be added */
    for (int64_t g = begin / w->group, from = begin, to; from < end; from = to, g++) {
        to = (g + 1) * w->group < end ? (g + 1) * w->group : end;
/* Each sum of a tile product, by its place among the tokens and among the rows. */
#define EACH_SUM(DO) do { DO(0, 0) DO(0, 1) if (two) { DO(1, 0) DO(1, 1) } } while (0)
#define ZERO(T, R) _tile_zero(SUM_##T##R);
#define TAKE(T, R) _tile_loadd(SUM_##T##R, &s->sum[place + T * SIDE][R * SIDE], 2 * SIDE * 4);
        if (from == g * w->group) EACH_SUM(ZERO);
        else EACH_SUM(TAKE);
        for (int64_t i = from * wide; i < to * wide; i += span) {
            _tile_loadd(WEIGHT_0, line, 128);
            _tile_loadd(INPUT_0, x, span);
            _tile_loadd(WEIGHT_1, line + 64, 128);
            if (two) _tile_loadd(INPUT_1, x + next, span);
            /* inputs of W8 are unsigned, 128 higher; the others and all weights are signed */
#define MULTIPLY(T, R) \
            if (math == PAIRED) _tile_dpbf16ps(SUM_##T##R, INPUT_##T, WEIGHT_##R); \
            else if (kind == W8) _tile_dpbusd(SUM_##T##R, INPUT_##T, WEIGHT_##R); \
            else _tile_dpbssd(SUM_##T##R, INPUT_##T, WEIGHT_##R);
            EACH_SUM(MULTIPLY);
            line += span / 4 * 128, x += span * SIDE;
        }
        if (over >= 0) add_sums(part, over, s->tile[over % 2], kind, math);
        over = -1;
#define KEEP(T, R) _tile_stored(SUM_##T##R, &s->sum[place + T * SIDE][R * SIDE], 2 * SIDE * 4);
#define PUT(T, R) _tile_stored(SUM_##T##R, s->tile[g % 2][T + 2 * R], SIDE * 4);
        if (to < (g + 1) * w->group) EACH_SUM(KEEP);
        else {
            EACH_SUM(PUT);
            over = g;
        }
    }
    if (over >= 0) add_sums(part, over, s->tile[over % 2], kind, math);
}

/* The columns from `begin` that are multiplied before the next ones: whole groups, or a part of one
 * that is longer than a chunk. */
static int64_t end_of_chunk(const struct weight *w, enum math math, int64_t begin) {
    const int64_t columns = w->group * w->groups, chunk = LINES * 4 / bytes_of(math);
    int64_t end, left = w->group - begin % w->group;
    if (w->group < chunk) end = begin + chunk / w->group * w->group;
    else end = begin + (chunk < left ? chunk : left);
    return end < columns ? end : columns;
}

/* Add the products of columns [begin, end) of 32 rows and of up to 32 tokens. */
static void add_chunk(const struct part *part, int64_t begin, int64_t end, const uint8_t *lines) {
    const struct weight *w = part->job->w;
    const enum math math = part->job->in.math;
    const int whole = span_of(w, math) == SPAN;
#define ADD(TWO, KIND, MATH, SPAN) add_columns(part, begin, end, lines, TWO, KIND, MATH, SPAN)
#define ADD_OF(KIND, MATH, SPAN) \
    (part->tokens > SIDE ? ADD(1, KIND, MATH, SPAN) : ADD(0, KIND, MATH, SPAN))
    if (math == PAIRED) ADD_OF(W4, PAIRED, 64); /* whatever their kind was */
    else if (w->kind == W8) whole ? ADD_OF(W8, INTEGER, 64) : ADD_OF(W8, INTEGER, 32);
    else whole ? ADD_OF(W4, INTEGER, 64) : ADD_OF(W4, INTEGER, 32); /* or F4 */
}

/* Write the outputs of 32 PAIRS rows and `tokens` tokens from `token` on. */
static void put_outputs(const struct job *job, int64_t block, int64_t token, int64_t tokens,
                        const struct strip *s) {
    const float *scales = job->w->input_grouped ? NULL : job->in.scale + token;
    const int64_t rows = job->w->rows;
    const int bf16 = job->in.bf16;
    void *const y = job->y;
    floats offset[PAIRS * PARTS];
    some mask[PAIRS * PARTS];
    for (int i = 0; i < PAIRS * PARTS; i++) {
        mask[i] = first(rows - block * SIDE - i * LANES);
        offset[i] = job->bias ? load(job->bias, block * SIDE + i * LANES, bf16, mask[i]) : splat(0);
    }
    for (int64_t t = 0; t < tokens; t++) {
        const floats scale = splat(scales ? scales[t] : 1);
        UNROLL for (int i = 0; i < PAIRS * PARTS; i++) {
            const floats total = load(&s[i / PARTS].total[t][i % PARTS * LANES], 0, 0, ALL);
            store(y, (token + t) * rows + block * SIDE + i * LANES, bf16, mask[i],
                  times_plus(total, scale, offset[i]));
        }
    }
}

/* Fetch bytes [begin, end) from `from` on into the second-level cache. */
INLINE void fetch(const uint8_t *from, int64_t begin, int64_t end) {
    for (int64_t i = begin / 64 * 64; i < end; i += 64)
        _mm_prefetch((const char *)from + i, _MM_HINT_T1);
}

/* The outputs of 32 PAIRS rows, from 16-row block `block` on, and of a strip, from `token` on. */
static void multiply_tiles(const struct job *job, int64_t block, int64_t token) {
    const struct weight *w = job->w;
    const int64_t columns = w->group * w->groups, line = 128 / columns_of(w->kind);
    const int64_t left = job->tokens - token, tokens = left < STRIP ? left : STRIP;
    struct strip s[PAIRS];
    int shaped = 0;
    for (int p = 0; p < PAIRS; p++) memset(s[p].total, 0, sizeof *s->total * (size_t)tokens);
    for (int64_t begin = 0, end; begin < columns; begin = end) {
        const uint8_t *lines[PAIRS];
        end = end_of_chunk(w, job->in.math, begin);
        for (int p = 0; p < PAIRS; p++)
            lines[p] = lines_of(job, block + 2 * p, begin, end, s[p].line);
        for (int64_t t = 0; t < tokens; t += 2 * SIDE) {
            int many = (int)(tokens - t < 2 * SIDE ? tokens - t : 2 * SIDE);
            if (many != shaped) shape(shaped = many, span_of(w, job->in.math));
            for (int p = 0; p < PAIRS; p++) {
                IN_MEMORY(&s);
                /* the next chunk, in as many parts as there are tiles of tokens */
                const int64_t bytes = (end - begin) * line, next = end == columns ? PAIRS : 0;
                fetch(w->data + ((block / 2 + p + next) * columns + end % columns) * line,
                      bytes * t / tokens, bytes * (t + many) / tokens);
                const struct part part = {job, s + p, block + 2 * p, token + t, t, many};
                add_chunk(&part, begin, end, lines[p]);
            }
        }
    }
    put_outputs(job, block, token, tokens, s);
    _tile_release();
}
#endif
