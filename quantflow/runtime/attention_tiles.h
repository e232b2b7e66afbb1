/* Products of attention over a bfloat16 cache in tiles, for CPUs with AMX (amx.h): of T queries, at
   most 8, by 16 columns or 16 features, 32 features or columns at a time.

   The cache lies as the instructions take their second operand: 16 columns by a pair of features,
   or 16 features by a pair of columns, in 64 bytes. Their first operand has a row for each query.
   No row of a sum depends on another, so a query's bits are those that it has alone. */
enum { DEPTH = 32, WIDE = 4 * SIDE }; /* features or columns of a product; what four sums have */

/* Tiles by number: four sums, the first operand, the second of an even and of an odd sum. */
#define SUM(W) W
#define ROWS 4
#define LINES_0 5
#define LINES_1 6
#define EACH_SUM(DO) do { DO(0, 0) DO(1, 1) DO(2, 0) DO(3, 1) } while (0)

/* Shape the tiles for T queries. */
static void shape_attention(int T) {
    struct shapes shapes = {.palette = 1};
    for (int i = 0; i <= LINES_1; i++) {
        shapes.rows[i] = (uint8_t)(i < LINES_0 ? T : DEPTH / 2);
        shapes.bytes[i] = 64;
    }
    shape_tiles(&shapes);
}

/* The scores of T queries with `groups` groups of 16 columns, at most four; the LANES columns of a
 * register lie at `at` of the cache. queries: [T, head_dim] in bfloat16, zeros up to whole DEPTHs;
 * scores: [T, BLOCK] */
INLINE void tile_scores(const Step *s, const Layer *l, const int64_t *at, int64_t groups,
                        const float *queries, float *scores, const int T) {
    const int64_t dim = s->head_dim, whole = (dim + DEPTH - 1) / DEPTH * DEPTH;
    IN_MEMORY(queries);
#define ZERO(W, ODD) if (W < groups) _tile_zero(SUM(W));
#define MULTIPLY(W, ODD) \
    if (W < groups) { \
        const uint16_t *keys = (const uint16_t *)l->keys + at[W * SIDE / LANES] * dim + i * SIDE; \
        uint16_t half[DEPTH * SIDE] __attribute__((aligned(64))); \
        if (i + DEPTH > dim) { /* the last 16 features: zeros stand behind them */ \
            memcpy(half, keys, sizeof half / 2); \
            memset(half + DEPTH / 2 * SIDE, 0, sizeof half / 2); \
            IN_MEMORY(half); \
            keys = half; \
        } \
        _tile_loadd(LINES_##ODD, keys, 64); \
        _tile_dpbf16ps(SUM(W), ROWS, LINES_##ODD); \
    }
#define STORE(W, ODD) if (W < groups) _tile_stored(SUM(W), scores + W * SIDE, BLOCK * 4);
    EACH_SUM(ZERO);
    for (int64_t i = 0; i < dim; i += DEPTH) {
        _tile_loadd(ROWS, (const uint16_t *)queries + i, whole * 2);
        EACH_SUM(MULTIPLY);
    }
    EACH_SUM(STORE);
#undef ZERO
#undef MULTIPLY
#undef STORE
    for (int g = 0; s->cap > 0 && g < T; g++)
        for (int64_t j = 0; j < groups * SIDE; j += LANES)
            *(vf *)(scores + g * BLOCK + j) = capped(s, *(vf *)(scores + g * BLOCK + j));
}

/* Copy features [i, i + WIDE) of the columns [from, to) among 32, by pairs, and zeros for the other
 * columns, which may never have been written. The second 16 columns lie at `other`. */
INLINE void copy_seen(const Step *s, const Layer *l, int64_t one, int64_t other, int64_t from,
                      int64_t to, int64_t i, uint32_t (*copy)[WIDE]) {
    const int64_t dim = s->head_dim, some = dim - i < WIDE ? dim - i : WIDE;
    for (int64_t j = 0; j < DEPTH; j += 2) {
        const int64_t place = j < SIDE ? one + j : other + j - SIDE;
        if (j + 1 < from || j >= to) memset(copy[j / 2], 0, sizeof *copy);
        else memcpy(copy[j / 2], (const uint16_t *)l->values + place * dim + 2 * i, 4 * some);
    }
}

/* sums = sums * shrink + probabilities @ values of the columns [from, to) of a block. shrink: of
 * each query; probabilities: [T, BLOCK] in bfloat16, 0 of columns that a query does not see;
 * sums: [T, head_dim] */
INLINE void tile_values(const Step *s, const Layer *l, const int64_t *at, int64_t from, int64_t to,
                        const float *probabilities, const float *shrink, float *sums,
                        const int T) {
    const int64_t dim = s->head_dim;
    float products[TILE][WIDE] __attribute__((aligned(64)));
    uint32_t copy[DEPTH / 2][WIDE] __attribute__((aligned(64)));
    for (int64_t i = 0; i < dim; i += WIDE) {
        const int64_t some = dim - i < WIDE ? dim - i : WIDE;
#define ZERO(W, ODD) if (W * SIDE < some) _tile_zero(SUM(W));
#define MULTIPLY(W, ODD) \
    if (W * SIDE < some) { \
        _tile_loadd(LINES_##ODD, values + W * SIDE, stride); \
        _tile_dpbf16ps(SUM(W), ROWS, LINES_##ODD); \
    }
#define STORE(W, ODD) if (W * SIDE < some) _tile_stored(SUM(W), products[0] + W * SIDE, WIDE * 4);
        EACH_SUM(ZERO);
        for (int64_t j = from / DEPTH * DEPTH; j < to; j += DEPTH) {
            const int64_t one = at[j / LANES];
            const int64_t other = j + SIDE < to ? at[(j + SIDE) / LANES] : one + SIDE;
            const uint32_t *values = (const uint32_t *)l->values + one / 2 * dim + i;
            int64_t stride = dim * 4;
            if (j < from || j + DEPTH > to || other != one + SIDE) {
                copy_seen(s, l, one, other, from - j, to - j, i, copy);
                values = copy[0], stride = sizeof *copy;
                IN_MEMORY(copy);
            }
            IN_MEMORY(probabilities);
            _tile_loadd(ROWS, (const uint16_t *)probabilities + j, BLOCK * 2);
            EACH_SUM(MULTIPLY);
        }
        EACH_SUM(STORE);
#undef ZERO
#undef MULTIPLY
#undef STORE
        for (int g = 0; g < T; g++)
            for (int64_t w = 0; w < some; w += LANES) {
                vf *own = (vf *)(sums + g * dim + i + w);
                *own = multiply_add(*(const vf *)(products[g] + w), *own, splat(shrink[g]));
            }
    }
}
