/* A decoder layer between its linears, for quantflow/runtime/operations.py; all sums are float32.
 *
 * How families differ is data: which norms there are and whether they subtract the mean, which
 * activation, how many features of a head are rotated, where the branches read and are added. No
 * function knows a family.
 *
 * Rows, heads and positions are independent work. Each is computed by one thread in one order, so
 * bits do not depend on the number of threads. Loops marked `omp simd` may be summed in vector
 * lanes, in an order that the compiler fixes.
 *
 * The KV cache holds float32, bfloat16, float8 (e4m3, saturating), int8, int5 or int4. float8 and int8
 * have a scale per head where it was measured: scores are multiplied by that of the keys, outputs by
 * that of the values. Otherwise int8 has a scale per head and position, amax / 127.5. int4.h has
 * int4 and int5.
 *
 * `rounds` lets attention over a bfloat16 cache round queries and attention probabilities to
 * bfloat16. CPUs that multiply pairs of bfloat16, or tiles of them, do so then; sums stay float32.
 *
 * Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1) has one kv head. Its
 * last `latent` features are a column's keys and its values, and lie in the cache once.
 *
 * Sparse attention (DeepSeek-AI 2025, arXiv:2512.02556, section 2.1) chooses the columns that a query
 * may see by the scores of an index, which has heads and keys of its own. Columns that are not chosen
 * have scores of -inf: they are read, where one of their neighbours is chosen, and add nothing.
 *
 * Lightning attention (Qin et al. 2024, arXiv:2401.04658) keeps states too, by a simpler rule.
 *
 * A gated delta net (Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464) stands in the place of
 * attention in some layers. It keeps no columns: each sequence has a state of one size, which every
 * column changes in turn. So what it gives does not depend on how columns are put into steps.
 */
#ifdef __x86_64__
#include <immintrin.h>
#elif defined __aarch64__
#include <arm_neon.h>
#endif
#include <math.h>
#include <omp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "team.h"

#define INLINE static inline __attribute__((always_inline))

enum kind { FLOAT32, BFLOAT16, FLOAT8, INT8, INT4, INT5 };
enum activation { SILU, GELU, GELU_TANH, RELU, CLAMPED_SWIGLU };
enum scores { SOFTMAX, SIGMOID, SPARSE_MIXER, SIGMOID_OF_CHOSEN };
enum { SIDE = 16 }; /* columns whose keys lie side by side in the cache */
#ifdef __AVX512F__
enum { LANES = 16 }; /* floats of a register */
#define NUMBERS 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
#elif defined __AVX__
enum { LANES = 8 };
#define NUMBERS 0, 1, 2, 3, 4, 5, 6, 7
#else
enum { LANES = 4 };
#define NUMBERS 0, 1, 2, 3
#endif
#if defined __AVX512F__ || defined __aarch64__
enum { REGISTERS = 32 };
#else
enum { REGISTERS = 16 };
#endif
enum { TILE = 8 };   /* queries that attention computes at once, at most */
enum { QUERIES = (int)TILE > (int)LANES ? (int)TILE : (int)LANES }; /* the same in whole registers */
enum { BLOCK = 64 }; /* columns of one step of the online softmax */
/* Numbers and products below which a second thread costs more than it saves. */
enum { WORTH_A_THREAD = 8192, PRODUCTS_WORTH_A_THREAD = 32768 };
enum { MAX_HEAD_DIM = 1024 }; /* that of operations.py, which refuses larger heads */
enum { MAX_KERNEL = 8 };      /* columns that a convolution sees; operations.py refuses more */

/* A debug build checks once a call what Python promises; a broken promise ends the process. */
#ifdef QUANTFLOW_CHECK
#define CHECK(CONDITION) \
    ((CONDITION) ? (void)0 \
                 : (fprintf(stderr, "decode.c:%d: not %s\n", __LINE__, #CONDITION), abort()))
#else
#define CHECK(CONDITION) ((void)0)
#endif

/* How `struct weight` of kernels.c begins; the function `call` below is that file's. */
typedef struct { int64_t rows, columns; } Weight;

/* A linear of the layer. */
typedef struct {
    const Weight *weight;
    const float *bias;
    int (*call)(const Weight *, const float *x, int64_t tokens, const float *bias, float *y,
                int bf16);
    const int64_t *order; /* [weight->columns] input that each column multiplies; NULL: its own */
} Product;

/* A norm of the features; weight NULL: there is no norm, and its input stays as it is. */
typedef struct { const float *weight, *bias; } Norm;

/* The mixture of experts of a layer. operations.py has the same fields in `_Experts`. */
typedef struct {
    Product router, shared_up, shared_down, shared_score; /* weight NULL: there is none */
    /* [experts] gate and up, and down, of each expert; all `up` have one shape, all `down` too */
    const Weight *const *up, *const *down;
    const float *const *up_bias, *const *down_bias; /* NULL: no bias */
    /* `quantflow_linears` of kernels.c, or `plain_linears` */
    int (*linears)(const Weight *const *, int64_t many, const int64_t *first, const float *x,
                   const float *const *bias, float *y, int bf16);
    const float *correction; /* [experts] added to scores where experts are chosen; NULL: nothing */
    int64_t experts, chosen; /* chosen: of each token */
    int64_t scores, groups, chosen_groups;
    int64_t counted; /* of a group, its best scores that are added up: 1 or 2 */
    int64_t normalized;
    int64_t scales_inputs; /* an expert's input is multiplied by its weight, not its output */
    int64_t activation, gated; /* as in Step */
    float near, least, factor, alpha, limit;
} Experts;

/* A gated delta net in the place of attention. operations.py has the same fields in `_DeltaNet`.
 * channels: 2 key_heads key_dim + value_heads value_dim, queries, keys and values of all heads. */
typedef struct {
    Product scores; /* [2 value_heads] of each head: how much a value counts; how much stays */
    const float *convolution;  /* [kernel, channels] */
    const float *rate, *shift; /* [value_heads] */
    const float *norm;         /* [value_dim] */
    float *inputs; /* [slots, kernel - 1, channels] last inputs of each sequence's convolution */
    float *states; /* [slots, value_heads, key_dim, value_dim] */
    int64_t key_heads, value_heads, key_dim, value_dim, kernel;
    /* Lightning attention: no convolution, no scores, a head's state fades by exp(-rate) a column,
     * and `norm` is of all heads at once, [value_heads * value_dim], with the epsilon `eps`. */
    int64_t lightning;
    float eps;
} DeltaNet;

/* A layer; a pointer is NULL where the layer has no such thing. operations.py has the same fields
 * in `_Layer` and compares their places with `structure_fields`. */
typedef struct {
    /* Of `kind`: keys [blocks, kv_heads, block / SIDE, head_dim, SIDE], values [blocks, kv_heads,
     * block, head_dim]. In bfloat16 two features of the keys are neighbours,
     * [.., head_dim / 2, SIDE, 2], and two columns of the values, [.., block / 2, head_dim, 2]. In
     * int4 two codes are a byte: keys [.., block / SIDE, head_dim / 8, SIDE, 4], values
     * [.., block / 4, head_dim / 2, 4]. int5 has fifth bits behind 16 columns of the keys and four of
     * the values. values is NULL where the keys hold them (`latent`). */
    void *keys, *values;
    /* int8, not measured: float [blocks, kv_heads, block]; int4 and int5: pairs of bfloat16,
     * middle and step, [blocks, kv_heads, block / SIDE, groups, SIDE, 2] */
    void *key_scales, *value_scales;
    const float *key_steps, *value_steps; /* [kv_heads] measured scales; float8 and int8 */
    const float *cos, *sin;               /* [capacity, rotary_dim] by position in the text */
    const float *sinks; /* [query_heads] score of a column without a value, unscaled */
    Norm q_norm, k_norm; /* [head_dim], or of all heads at once where `whole_norms` */
    /* `run` alone reads the fields from here to `down`. */
    Norm attention_norm, attended_norm; /* [hidden] before attention; of what attention adds */
    Norm mlp_norm, gated_norm;          /* [hidden] before the MLP; of what the MLP adds */
    Product qkv, output, up, down;      /* up: gate and up where `gated` */
    const Experts *experts;             /* in the place of up and down */
    const DeltaNet *delta_net;          /* in the place of attention, with qkv and output */
    int64_t window;     /* positions that a query sees, itself included; 0: all before it */
    int64_t chunk;      /* positions of a chunk, of which a query sees its own alone; 0: no chunks */
    int64_t rotary_dim; /* first features of a head, which are rotated; 0: none */
    /* queries are multiplied by 1 + attn_scale log(1 + floor((position + 1) / floor_scale)) behind
     * norm and rotation; floor_scale 0: they stay */
    float floor_scale, attn_scale;
} Layer;

/* A step: new columns of several sequences, one sequence after the other. operations.py has the
 * same fields in `_Step` and compares their places with `structure_fields`. */
typedef struct {
    const int64_t *padding; /* [rows] columns at the left of a sequence that are no text */
    const int64_t *first;   /* [rows + 1] begin of each sequence in the new columns; their end */
    const int64_t *start;   /* [rows] first new column of a sequence */
    const int64_t *table;   /* [rows, width] blocks that hold its columns, `block` columns each */
    const int64_t *tiles;   /* [rows + 1] as `first`, in tiles of TILE queries of a kv head */
    const int64_t *slots;   /* [rows] place of a sequence's state in each gated delta net */
    /* [new columns, words] a bit for each column of the sequence, BLOCK to a word: those that a
     * query may see; NULL: all */
    const uint64_t *selected;
    int64_t words;
    const float *slopes;    /* [query_heads] of ALiBi; NULL: distances count nothing */
    int64_t rounded_alibi;  /* ALiBi as Falcon has it, see `add_rounded_distances` */
    int64_t rows, block, width; /* rows: sequences */
    int64_t query_heads, kv_heads, head_dim, kind;
    int64_t latent;            /* last features of a key that are its value too; 0: values apart */
    int64_t output_gate;       /* gates of the heads' outputs come behind the values */
    int64_t whole_norms;       /* q_norm and k_norm are of all heads at once */
    int64_t centered;          /* norms subtract the mean first (LayerNorm) */
    int64_t parallel;          /* the MLP reads what attention reads, not what it added to */
    int64_t post; /* norms are of sums and take their place: mlp_norm, then gated_norm (post-LN) */
    int64_t activation, gated; /* MLP: activation(gate) * up where gated, else activation(up) */
    int64_t rounds;  /* queries and attention probabilities may be rounded to bfloat16 */
    float scale;     /* factor of scores */
    float eps;       /* epsilon of norms */
    float cap;       /* scores become cap * tanh(score / cap); 0: they stay */
    float clip;      /* queries, keys and values lie between -clip and clip; 0: they stay */
    float residual;  /* factor of what a branch adds */
    float alpha, limit; /* of CLAMPED_SWIGLU */
} Step;

/* The promises that every function of a step relies on. */
static inline void check_step(const Step *s, const Layer *l) {
    CHECK(s->padding && s->first && s->start && s->table && s->tiles && l->keys);
    CHECK(!(s->latent && s->output_gate) && !(s->clip && (s->latent || s->output_gate)));
    CHECK(s->latent >= 0 && s->latent <= s->head_dim && s->latent % LANES == 0 &&
          !s->latent == !!l->values);
    CHECK(!l->rotary_dim || (l->cos && l->sin));
    CHECK(s->rows > 0 && s->block > 0 && s->block % SIDE == 0 && s->width > 0 && s->first[0] == 0 &&
          s->tiles[0] == 0);
    CHECK(l->rotary_dim >= 0 && l->rotary_dim <= s->head_dim && l->rotary_dim % 2 == 0 &&
          s->activation >= SILU && s->activation <= CLAMPED_SWIGLU);
    CHECK(!s->selected || s->words > 0);
    CHECK(s->kv_heads > 0 && s->query_heads > 0 && s->query_heads % s->kv_heads == 0);
    CHECK(s->head_dim > 0 && s->head_dim <= MAX_HEAD_DIM && s->head_dim % LANES == 0);
    CHECK(s->kind >= FLOAT32 && s->kind <= INT5 && l->window >= 0 && l->chunk >= 0);
    CHECK(l->floor_scale >= 0);
    CHECK((s->latent || (!l->key_scales == !l->value_scales && !l->key_steps == !l->value_steps)) &&
          !(l->key_scales && s->kind < INT8));
    CHECK(s->kind < INT4 ||
          (l->key_scales && !l->key_steps && !s->latent && s->head_dim % SIDE == 0));
    for (int64_t row = 0, group = s->query_heads / s->kv_heads; row < s->rows; row++) {
        int64_t count = s->first[row + 1] - s->first[row];
        CHECK(s->padding[row] >= 0 && count > 0 && s->start[row] >= 0);
        CHECK(s->start[row] + count <= s->block * s->width);
        CHECK(s->tiles[row + 1] - s->tiles[row] == (count * group + TILE - 1) / TILE);
        for (int64_t i = 0; i * s->block < s->start[row] + count; i++)
            CHECK(s->table[row * s->width + i] >= 0);
        (void)group, (void)count;
    }
}

/* The sequence `row` with firsts[row] <= at < firsts[row + 1]. */
static inline int64_t sequence_of(const int64_t *firsts, int64_t rows, int64_t at) {
    int64_t low = 0;
    while (rows - low > 1) {
        int64_t middle = (low + rows) / 2;
        if (firsts[middle] <= at) low = middle;
        else rows = middle;
    }
    return low;
}

/* The place of a column of a sequence in the cache, counted in columns of one kv head. */
static inline int64_t cache_column(const Step *s, int64_t row, int64_t head, int64_t column) {
    return (s->table[row * s->width + column / s->block] * s->kv_heads + head) * s->block
        + column % s->block;
}

#define VECTOR(bytes) __attribute__((vector_size(bytes), aligned(1), may_alias))
/* Registers of LANES numbers: f, u, i have 32 bits, h 16, b and c 8; v8 and v4 are floats. */
typedef float vf VECTOR(4 * LANES);
typedef uint32_t vu VECTOR(4 * LANES);
typedef int32_t vi VECTOR(4 * LANES);
typedef uint16_t vh VECTOR(2 * LANES);
typedef uint8_t vb VECTOR(LANES);
typedef int8_t vc VECTOR(LANES);
typedef float v8 VECTOR(32);
typedef float v4 VECTOR(16);

static inline float bits_float(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline uint32_t float_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }

/* LANES narrow numbers as 32 bits each; gcc's own conversion takes them apart first. */
#ifdef __AVX512F__
static inline vu widen(vh x) { return (vu)_mm512_cvtepu16_epi32((__m256i)x); }
static inline vu widen_bytes(vb x) { return (vu)_mm512_cvtepu8_epi32((__m128i)x); }
static inline vi widen_signed(vc x) { return (vi)_mm512_cvtepi8_epi32((__m128i)x); }
#elif defined __AVX2__
static inline vu widen(vh x) { return (vu)_mm256_cvtepu16_epi32((__m128i)x); }
static inline vu widen_bytes(vb x) {
    return (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)&x));
}
static inline vi widen_signed(vc x) {
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)&x));
}
#elif defined __aarch64__
static inline vu widen(vh x) { return (vu)vmovl_u16((uint16x4_t)x); }
static inline vu widen_bytes(vb x) {
    uint32_t four;
    memcpy(&four, &x, sizeof four);
    return (vu)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
}
static inline vi widen_signed(vc x) {
    uint32_t four;
    memcpy(&four, &x, sizeof four);
    return (vi)vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(four))));
}
#else
static inline vu widen(vh x) { return __builtin_convertvector(x, vu); }
static inline vu widen_bytes(vb x) { return __builtin_convertvector(x, vu); }
static inline vi widen_signed(vc x) { return __builtin_convertvector(x, vi); }
#endif

/* sum + x * w, rounded once. Written out, since gcc fuses only some of them where registers are
 * few, and bits would depend on the tile. */
static inline vf multiply_add(vf sum, vf x, vf w) {
#ifdef __AVX512F__
    return (vf)_mm512_fmadd_ps((__m512)x, (__m512)w, (__m512)sum);
#elif defined __FMA__
    return (vf)_mm256_fmadd_ps((__m256)x, (__m256)w, (__m256)sum);
#elif defined __aarch64__
    return (vf)vfmaq_f32((float32x4_t)sum, (float32x4_t)x, (float32x4_t)w);
#else
    return sum + x * w;
#endif
}

/* a in the lanes where `where` is -1, b where it is 0. */
static inline vf blend(vi where, vf a, vf b) {
#ifdef __AVX512DQ__
    return (vf)_mm512_mask_blend_ps(_mm512_movepi32_mask((__m512i)where), (__m512)b, (__m512)a);
#else
    return (vf)((where & (vi)a) | (~where & (vi)b));
#endif
}

/* a > b ? a : b, and a < b ? a : b: of two of which one is NaN, b. */
#ifdef __AVX512F__
static inline vf larger(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
static inline vf smaller(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
#elif defined __AVX2__
static inline vf larger(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
static inline vf smaller(vf a, vf b) { return (vf)_mm256_min_ps((__m256)a, (__m256)b); }
#else
static inline vf larger(vf a, vf b) { return blend(a > b, a, b); }
static inline vf smaller(vf a, vf b) { return blend(a < b, a, b); }
#endif

static inline vf splat(float x) { return (vf)((vi){0} + (int32_t)float_bits(x)); }

/* The nearest bfloat16, ties to even; NaN is 0x7FC0. */
static inline uint16_t to_bfloat(float x) {
    uint32_t bits = float_bits(x);
    return (uint16_t)(x != x ? 0x7FC0 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

/* exp with an error of about 1 ulp (Cephes' expf) of numbers from -87 to 88, and of those as of
 * these beyond. NaN stays NaN. */
static inline vf exponentials(vf x) {
    x = larger(splat(-87.0f), smaller(splat(88.0f), x));
    /* the nearest integer: the last bit of 1.5 * 2^23 is 1 */
    vf n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    vf r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vf p = ((1.9875691500e-4f * r + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r;
    p = (p + 4.1665795894e-2f) * r;
    p = ((p + 1.6666665459e-1f) * r + 5.0000001201e-1f) * (r * r) + r + 1.0f;
    return p * (vf)(__builtin_convertvector(n + 127.0f, vi) << 23);
}

/* out = x / rms(x) * weight; out may be x. Always inlined: a function of its own would be summed in
 * another order. */
INLINE void normalize(const float *x, const float *weight, float *out, int64_t width, float eps) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; i++) sum += x[i] * x[i];
    float inverse = 1.0f / sqrtf(sum / (float)width + eps);
#pragma omp simd
    for (int64_t i = 0; i < width; i++) out[i] = weight[i] * (x[i] * inverse);
}

/* out = the norm of x, or x where there is none; `centered`: x less its mean is normalized. out may
 * be x. */
INLINE void apply_norm(Norm norm, const float *x, float *out, int64_t width, float eps,
                       int64_t centered) {
    if (!norm.weight && out != x) memcpy(out, x, sizeof *out * (size_t)width);
    if (!norm.weight) return;
    if (centered) {
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < width; i++) sum += x[i];
        float mean = sum / (float)width;
        for (int64_t i = 0; i < width; i++) out[i] = x[i] - mean;
        x = out;
    }
    normalize(x, norm.weight, out, width, eps);
    for (int64_t i = 0; norm.bias && i < width; i++) out[i] += norm.bias[i];
}

/* Do the units of a loop of `size` numbers or products: on all threads where that saves more than
 * it costs. */
static void share(Unit work, const void *context, int64_t units, int64_t size, int64_t worth) {
    team_share(work, context, units, size > worth ? 1 : units > 0 ? units : 1);
}

typedef struct {
    float *x, *delta, *out;
    Norm after, before;
    int64_t width, centered, late;
    float eps, residual, kept;
} AddNorm;

static void add_norm_of_row(const void *context, int64_t row) {
    const AddNorm *t = context;
    float *at = t->x + row * t->width, *to = t->out + row * t->width;
    float *add = t->delta ? t->delta + row * t->width : NULL;
    const float residual = t->residual, kept = t->kept;
    if (t->late) apply_norm(t->before, at, to, t->width, t->eps, t->centered);
    if (add) {
        apply_norm(t->after, add, add, t->width, t->eps, t->centered);
        for (int64_t i = 0; kept != 1 && i < t->width; i++) at[i] *= kept;
#pragma omp simd
        for (int64_t i = 0; i < t->width; i++) at[i] += residual * add[i];
    }
    if (!t->late) apply_norm(t->before, at, to, t->width, t->eps, t->centered);
}

/* x = kept * x + residual * after(delta), where there is a delta; out = before(x), with `late` of x
 * as it was before that. x, delta, out: [rows, width]; delta is changed where `after` is a norm. out may
 * be x without `late`. */
void add_norm(float *x, float *delta, Norm after, Norm before, float *out, int64_t rows,
              int64_t width, float eps, int64_t centered, float residual, int64_t late,
              float kept) {
    CHECK(x && out && rows >= 0 && width > 0 && !(late && out == x));
    AddNorm context = {x, delta, out, after, before, width, centered, late, eps, residual, kept};
    share(add_norm_of_row, &context, rows, rows * width, WORTH_A_THREAD);
}

/* An activation: x / (1 + exp(-x)); x P(Z < x) of a normal Z, by formula 7.1.26 of Abramowitz
 * and Stegun 1964 with an error of 1e-7 |x|, and its usual approximation by tanh (Hendrycks and
 * Gimpel 2016, arXiv:1606.08415); max(x, 0). */
static inline vf activate(vf x, int64_t kind) {
    if (kind == SILU) return x / (1.0f + exponentials(-x));
    if (kind == GELU_TANH)
        return x / (1.0f + exponentials(-1.5957691216f * (x + 0.044715f * x * x * x)));
    if (kind == RELU) return blend(x < 0.0f, (vf){0}, x);
    vf z = blend(x < 0.0f, -x, x) * 0.70710678119f, t = 1.0f / (1.0f + 0.3275911f * z);
    vf tail = (((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t;
    tail = (tail + 0.254829592f) * t;
    tail *= 0.5f * exponentials(-(z * z)); /* P(Z > |x|) */
    return x * blend(x < 0.0f, tail, 1.0f - tail);
}

/* activation(gate) * up; CLAMPED_SWIGLU: gate / (1 + exp(-alpha gate)) * (up + 1), with gate at most
 * `limit` and up from -limit to limit. NaN stays NaN. */
INLINE vf gate_of(vf gate, vf up, int64_t kind, float alpha, float limit) {
    if (kind != CLAMPED_SWIGLU) return activate(gate, kind) * up;
    gate = smaller(splat(limit), gate);
    up = larger(splat(-limit), smaller(splat(limit), up));
    return gate / (1.0f + exponentials(gate * -alpha)) * (up + 1.0f);
}

typedef struct {
    const float *in;
    float *out;
    int64_t width, activation, gated;
    float alpha, limit;
} Gate;

static void gate_row(const void *context, int64_t row) {
    const Gate *t = context;
    const int64_t width = t->width, activation = t->activation, gated = t->gated;
    const float *g = t->in + row * (gated ? 2 : 1) * width, *u = g + (gated ? width : 0);
    float *out = t->out + row * width;
    for (int64_t i = 0; i < width; i += LANES) {
        vf x = {0}, up = {0};
        size_t bytes = 4 * (size_t)(width - i < LANES ? width - i : LANES);
        if (bytes == sizeof x) x = *(const vf *)(g + i), up = *(const vf *)(u + i);
        else memcpy(&x, g + i, bytes), memcpy(&up, u + i, bytes);
        x = gated ? gate_of(x, up, activation, t->alpha, t->limit) : activate(x, activation);
        /* a whole register is stored as one: a copy of unknown length is slow */
        if (bytes == sizeof x) *(vf *)(out + i) = x;
        else memcpy(out + i, &x, bytes);
    }
}

/* out = activation(gate) * up, or activation(up) where there is no gate. in: [rows, 2 width] or
 * [rows, width]; out: [rows, width] */
void gate(const float *in, float *out, int64_t rows, int64_t width, int64_t activation,
          int64_t gated, float alpha, float limit) {
    CHECK(in && out && rows >= 0 && width > 0 && (gated || activation != CLAMPED_SWIGLU));
    Gate context = {in, out, width, activation, gated, alpha, limit};
    share(gate_row, &context, rows, rows * width, WORTH_A_THREAD);
}

/* The sum of all lanes, always in the same order. sums_of_lanes: the sums of four registers,
 * side by side, each in that order. */
#ifdef __AVX512F__
static inline float sum_of_lanes(vf x) {
    v8 eight = *(const v8 *)&x + *((const v8 *)&x + 1);
    v4 four = *(const v4 *)&eight + *((const v4 *)&eight + 1);
    return (four[0] + four[2]) + (four[1] + four[3]);
}

static inline v4 sums_of_lanes(vf a, vf b, vf c, vf d) {
    const vi low = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
    const vi even = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
    const vi lanes = {NUMBERS}, firsts = {0, 4, 8, 12};
    vf ab = __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, low + 8);
    vf cd = __builtin_shuffle(c, d, low) + __builtin_shuffle(c, d, low + 8);
    /* four lanes each */
    vf all = __builtin_shuffle(ab, cd, even) + __builtin_shuffle(ab, cd, even + 4);
    all += __builtin_shuffle(all, lanes ^ 2);
    all += __builtin_shuffle(all, lanes ^ 1);
    all = __builtin_shuffle(all, firsts);
    return *(const v4 *)&all;
}
#elif defined __AVX__
static inline float sum_of_lanes(vf x) {
    v4 four = *(const v4 *)&x + *((const v4 *)&x + 1);
    return (four[0] + four[2]) + (four[1] + four[3]);
}

static inline v4 sums_of_lanes(vf a, vf b, vf c, vf d) {
    const vi low = {0, 1, 2, 3, 8, 9, 10, 11}, even = {0, 1, 4, 5, 8, 9, 12, 13};
    const vi firsts = {0, 2, 4, 6};
    vf ab = __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, low + 4);
    vf cd = __builtin_shuffle(c, d, low) + __builtin_shuffle(c, d, low + 4);
    /* two lanes each */
    vf all = __builtin_shuffle(ab, cd, even) + __builtin_shuffle(ab, cd, even + 2);
    all = __builtin_shuffle(all, firsts) + __builtin_shuffle(all, firsts + 1);
    return *(const v4 *)&all;
}
#else
static inline float sum_of_lanes(vf x) { return (x[0] + x[2]) + (x[1] + x[3]); }

static inline v4 sums_of_lanes(vf a, vf b, vf c, vf d) {
    const vi low = {0, 1, 4, 5}, even = {0, 2, 4, 6};
    vf ab = __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, low + 2);
    vf cd = __builtin_shuffle(c, d, low) + __builtin_shuffle(c, d, low + 2);
    /* two lanes each */
    return __builtin_shuffle(ab, cd, even) + __builtin_shuffle(ab, cd, even + 1);
}
#endif

/* The largest of all lanes, none of them NaN. */
static inline float max_of_lanes(vf x) {
    const vi lanes = {NUMBERS};
    for (int apart = LANES / 2; apart; apart /= 2) {
        x = larger(__builtin_shuffle(x, lanes ^ apart), x);
    }
    return x[0];
}

/* LANES weights from element `at` on, or `left` of them and zeros. */
INLINE vf weights(const void *weight, int64_t at, int64_t left, const int kind) {
    vf wide = {0};
    vh narrow = {0};
    size_t some = left < LANES ? (size_t)left : LANES;
    if (kind == FLOAT32 && some == LANES) return *(const vf *)((const float *)weight + at);
    if (kind == FLOAT32) return memcpy(&wide, (const float *)weight + at, 4 * some), wide;
    if (some == LANES) narrow = *(const vh *)((const uint16_t *)weight + at);
    else memcpy(&narrow, (const uint16_t *)weight + at, 2 * some);
    return (vf)(widen(narrow) << 16);
}

/* One operand of a product's step, from element `at` on, or `left` elements and zeros: LANES
 * numbers, or the bits of twice as many in bfloat16, two to a lane. */
INLINE vf operand(const void *from, int64_t at, int64_t left, const int kind, const int paired) {
    vu bits = {0};
    if (!paired) return weights(from, at, left, kind);
    if (left >= 2 * LANES) return *(const vf *)((const uint16_t *)from + at);
    memcpy(&bits, (const uint16_t *)from + at, 2 * (size_t)left);
    return (vf)bits;
}

/* The first and the second of two bfloat16 in each lane, as floats. */
static inline vf lower(vf pairs) { return (vf)((vu)pairs << 16); }
static inline vf upper(vf pairs) { return (vf)((vu)pairs & 0xFFFF0000); }

/* sum + x * w in each lane; where a lane has two numbers (`paired`), plus the products of both. */
INLINE vf multiply_add_pairs(vf sum, vf x, vf w, const int paired) {
    if (!paired) return multiply_add(sum, x, w);
#ifdef __AVX512BF16__
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)w);
#else
    return multiply_add(multiply_add(sum, lower(x), lower(w)), upper(x), upper(w));
#endif
}

/* R rows of x, `apart` elements from each other, by O outputs from `o` on, to out [R, LANES]. Each
 * is summed in all lanes, in an order that no other row or output changes. Where x is in bfloat16 as well, a lane takes two numbers a
 * step. */
INLINE void product_tile(const void *x, int64_t apart, const void *weight, float *out, int64_t in,
                         int64_t o, const int x_kind, const int kind, const int R, const int O) {
    const int paired = x_kind == BFLOAT16, STEP = paired ? 2 * LANES : LANES;
    vf sum[6][4];
    for (int r = 0; r < R; r++) for (int j = 0; j < O; j++) sum[r][j] = (vf){0};
    for (int64_t i = 0; i + STEP <= in; i += STEP) {
        vf w[4];
#pragma GCC unroll 4
        for (int j = 0; j < O; j++) {
            const int64_t at = (o + j) * in + i, bytes = kind == BFLOAT16 ? 2 : 4;
            w[j] = operand(weight, at, STEP, kind, paired);
            /* one row: fetch the outputs after these, which begin in other pages */
            if (R == 1) __builtin_prefetch((const char *)weight + (at + O * in) * bytes, 0, 3);
        }
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            vf value = operand(x, r * apart + i, STEP, x_kind, paired);
#pragma GCC unroll 4
            for (int j = 0; j < O; j++)
                sum[r][j] = multiply_add_pairs(sum[r][j], value, w[j], paired);
        }
    }
    int64_t rest = in % STEP, from = in - rest;
    for (int r = 0; r < R && rest; r++)
        for (int j = 0; j < O; j++) {
            vf value = operand(x, r * apart + from, rest, x_kind, paired);
            vf w = operand(weight, (o + j) * in + from, rest, kind, paired);
            sum[r][j] = multiply_add_pairs(sum[r][j], value, w, paired);
        }
    for (int r = 0; r < R; r++)
        if (O == 4)
            *(v4 *)(out + r * LANES) = sums_of_lanes(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
        else for (int j = 0; j < O; j++) out[r * LANES + j] = sum_of_lanes(sum[r][j]);
}

enum { PANEL = 96 }; /* rows of a product, in bfloat16 */

typedef struct {
    const void *x, *weight;
    const float *bias;
    float *out;
    int64_t rows, in, outs, x_kind, kind, most;
    int64_t x_row, out_row;   /* elements from row to row */
    int64_t x_head, out_head; /* elements from head to head, each with a weight of its own */
} Multiply;

static inline int64_t panels_of(const Multiply *t) {
    return (t->rows + t->most - 1) / t->most * ((t->outs + LANES - 1) / LANES);
}

/* LANES outputs of a panel of rows, of one head. */
static void product_of_panel(const void *context, int64_t unit) {
    const Multiply *t = context;
    const float *bias = t->bias;
    const int64_t in = t->in, outs = t->outs, x_kind = t->x_kind, kind = t->kind;
    const int64_t bytes = x_kind == BFLOAT16 ? 2 : 4, lines = (outs + LANES - 1) / LANES;
    const int64_t apart = t->x_row, head = unit / panels_of(t), place = unit % panels_of(t);
    const int64_t panel = place / lines * t->most, line = place % lines;
    const char *x = (const char *)t->x + head * t->x_head * bytes;
    const char *weight = (const char *)t->weight + head * outs * in * (kind == BFLOAT16 ? 2 : 4);
    float *out = t->out + head * t->out_head;
    const int64_t many = t->rows - panel < t->most ? t->rows - panel : t->most;
    float sums[PANEL][LANES];
    int64_t begin = line * LANES, width = outs - begin < LANES ? outs - begin : LANES;
    for (int64_t at = 0, some; at < width; at += some) {
        some = REGISTERS == 16 && many >= 4 ? 2 : 4;
        some = width - at < some ? 1 : some;
        for (int64_t row = 0, size; row < many; row += size) {
            const char *from = x + (panel + row) * apart * bytes;
            /* pairs are halved into registers of their own, which 16 have for 4 rows */
            const int six = !(REGISTERS == 16 && x_kind == BFLOAT16);
            size = six && many - row >= 6 ? 6 : many - row >= 4 ? 4 : many - row >= 2 ? 2 : 1;
#define TILE_OF(X, KIND, R, O) \
    if (x_kind == X && kind == KIND && size == R && some == O) \
        product_tile(from, apart, weight, &sums[row][at], in, begin + at, X, KIND, R, O);
#define TILES_OF(X, KIND) \
    TILE_OF(X, KIND, 6, 4) TILE_OF(X, KIND, 4, 4) TILE_OF(X, KIND, 2, 4) TILE_OF(X, KIND, 1, 4) \
    TILE_OF(X, KIND, 6, 1) TILE_OF(X, KIND, 4, 1) TILE_OF(X, KIND, 2, 1) TILE_OF(X, KIND, 1, 1) \
    if (REGISTERS == 16) { \
        TILE_OF(X, KIND, 6, 2) TILE_OF(X, KIND, 4, 2) TILE_OF(X, KIND, 2, 2) TILE_OF(X, KIND, 1, \
            2) \
    }
            /* sizes are constants within each call, so that its sums stay in registers */
            TILES_OF(FLOAT32, FLOAT32)
            TILES_OF(FLOAT32, BFLOAT16)
            TILES_OF(BFLOAT16, BFLOAT16)
        }
    }
    for (int64_t row = 0; row < many; row++)
        for (int64_t j = 0; j < width; j++)
            out[(panel + row) * t->out_row + begin + j] = sums[row][j]
                + (bias ? bias[begin + j] : 0);
}

/* out = x @ weight.T + bias.
 * x: [rows, in]; weight: [outs, in]; out: [rows, outs]. The weight is in float32 or bfloat16
 * (`kind`), x in float32, or in bfloat16 (`x_kind`) where the weight is too.
 *
 * A panel of rows stays in the CPU's second-level cache while all weights pass by; LANES outputs of
 * the panel are written at once. Where there are 16 registers, a tile of several rows has half of the
 * outputs. */
void product(const void *x, const void *weight, const float *bias, float *out, int64_t rows,
             int64_t in, int64_t outs, int64_t x_kind, int64_t kind) {
    CHECK(x && weight && out && rows > 0 && in > 0 && outs > 0 &&
          (kind == FLOAT32 || kind == BFLOAT16));
    CHECK(x_kind == FLOAT32 || (x_kind == BFLOAT16 && kind == BFLOAT16));
    const int64_t most = x_kind == BFLOAT16 ? PANEL : PANEL / 2;
    Multiply context = {x, weight, bias, out, rows, in, outs, x_kind, kind, most, in, outs, 0, 0};
    share(product_of_panel, &context, panels_of(&context), rows * outs * in, PRODUCTS_WORTH_A_THREAD);
}

/* The same for each head: out[:, h] = x[:, h] @ weight[h].T.
 * x: [rows, heads, in], out: [rows, heads, outs], which may be parts of wider tensors: rows and
 * heads are so many elements apart; weight: [heads, outs, in] */
void product_of_heads(const void *x, const void *weight, float *out, int64_t rows, int64_t heads,
                      int64_t in, int64_t outs, int64_t x_row, int64_t x_head, int64_t out_row,
                      int64_t out_head, int64_t x_kind, int64_t kind) {
    CHECK(x && weight && out && rows > 0 && heads > 0 && in > 0 && outs > 0 &&
          (kind == FLOAT32 || kind == BFLOAT16));
    CHECK(x_kind == FLOAT32 || (x_kind == BFLOAT16 && kind == BFLOAT16));
    CHECK(x_row >= in && x_head >= in && out_row >= outs && out_head >= outs);
    const int64_t most = x_kind == BFLOAT16 ? PANEL : PANEL / 2;
    Multiply context = {x, weight, NULL, out, rows, in, outs, x_kind, kind, most,
                     x_row, out_row, x_head, out_head};
    share(product_of_panel, &context, heads * panels_of(&context), heads * rows * outs * in,
          PRODUCTS_WORTH_A_THREAD);
}

/* A matrix that is not quantized, as a Product's weight; `narrow`: inputs are rounded to bfloat16,
 * as the matrix is. operations.py has the same fields in `_Plain`. */
typedef struct {
    Weight weight;
    const void *data;
    int64_t kind, narrow;
} Plain;

typedef struct {
    const float *x;
    uint16_t *out;
    int64_t width;
} Narrow;

static void narrow_row(const void *context, int64_t row) {
    const Narrow *t = context;
    for (int64_t i = row * t->width; i < (row + 1) * t->width; i++) t->out[i] = to_bfloat(t->x[i]);
}

/* `call` of a Product whose weight is a Plain. */
int plain(const Weight *weight, const float *x, int64_t tokens, const float *bias, float *y,
          int bf16) {
    const Plain *p = (const Plain *)weight;
    CHECK(weight && x && y && tokens > 0 && !bf16);
    (void)bf16;
    const int64_t rows = weight->rows, columns = weight->columns;
    if (!p->narrow) {
        product(x, p->data, bias, y, tokens, columns, rows, FLOAT32, p->kind);
        return 0;
    }
    uint16_t *inputs = malloc(sizeof *inputs * (size_t)(tokens * columns));
    if (!inputs) return 1;
    Narrow context = {x, inputs, columns};
    share(narrow_row, &context, tokens, tokens * columns, WORTH_A_THREAD);
    product(inputs, p->data, bias, y, tokens, columns, rows, BFLOAT16, BFLOAT16);
    free(inputs);
    return 0;
}

/* `plain` of several weights, each on the rows from first[i] to first[i + 1] of x and of y. */
int plain_linears(const Weight *const *w, int64_t many, const int64_t *first, const float *x,
                  const float *const *bias, float *y, int bf16) {
    int failed = 0;
    for (int64_t i = 0; i < many; i++)
        if (first[i] < first[i + 1])
            failed |= plain(w[i], x + first[i] * w[i]->columns, first[i + 1] - first[i], bias[i],
                            y + first[i] * w[i]->rows, bf16);
    return failed;
}

/* The index of the largest of some numbers, the lowest of several; -1 where none is above -inf. */
static int64_t largest_of(const float *x, int64_t count) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; i++)
        if (x[i] > (best < 0 ? -INFINITY : x[best])) best = i;
    return best;
}

static int chosen_before(const int64_t *numbers, int64_t count, int64_t number) {
    for (int64_t j = 0; j < count; j++) if (numbers[j] == number) return 1;
    return 0;
}

/* The same of numbers that are no choice yet; where none is above -inf, the lowest. */
static int64_t next_of(const float *x, int64_t count, const int64_t *numbers, int64_t chosen) {
    int64_t best = largest_of(x, count);
    if (best < 0) while (chosen_before(numbers, chosen, ++best)) {}
    return best;
}

/* Leave -inf of all groups of experts but those whose best ones, `counted` of each, sum up to most.
 */
static void choose_groups(const Experts *e, float *wanted) {
    const int64_t groups = e->groups, size = e->experts / groups;
    for (int64_t left = groups - e->chosen_groups; left > 0; left--) {
        int64_t worst = -1;
        float least = INFINITY;
        /* of several the last: those before it stay */
        for (int64_t group = 0; group < groups; group++) {
            float first = -INFINITY, second = -INFINITY;
            for (const float *x = wanted + group * size; x < wanted + (group + 1) * size; x++) {
                if (*x > first) second = first, first = *x;
                else if (*x > second) second = *x;
            }
            if (first == -INFINITY) continue; /* left out already */
            float sum = e->counted > 1 ? first + second : first;
            if (sum <= least) least = sum, worst = group;
        }
        for (int64_t i = 0; worst >= 0 && i < size; i++) wanted[worst * size + i] = -INFINITY;
    }
}

/* SparseMixer: experts one after the other, each weighed by its share among those that are left and
 * whose logit is near. The first `chosen` numbers of `weights` and `numbers` are written. */
static void mix(const Experts *e, const float *logits, float *left, float *weights,
                int64_t *numbers) {
    memcpy(left, logits, sizeof *left * (size_t)e->experts);
    for (int64_t j = 0; j < e->chosen; j++) {
        int64_t best = next_of(left, e->experts, numbers, j);
        float top = left[best], sum = 0;
        for (int64_t i = 0; i < e->experts; i++) {
            float size = fabsf(logits[i]) > top ? fabsf(logits[i]) : top;
            if (!((top - logits[i]) / size > e->near)) sum += expf(left[i] - top);
        }
        numbers[j] = best, weights[j] = 1 / sum, left[best] = -INFINITY;
    }
}

typedef struct {
    const Experts *e;
    float *logits, *wanted; /* [rows, experts], both changed */
    float *weights;         /* [rows, chosen] */
    int64_t *numbers;
} Route;

static void route_row(const void *context, int64_t row) {
    const Route *t = context;
    const Experts *e = t->e;
    float *x = t->logits + row * e->experts, *wanted = t->wanted + row * e->experts;
    float *weights = t->weights + row * e->chosen, sum = 0;
    int64_t *numbers = t->numbers + row * e->chosen, best = largest_of(x, e->experts);
    if (e->scores == SPARSE_MIXER) mix(e, x, wanted, weights, numbers);
    else {
        const float top = best < 0 ? 0 : x[best];
        for (int64_t i = 0; i < e->experts; i++) {
            wanted[i] = x[i];
            x[i] = e->scores == SOFTMAX ? expf(x[i] - top) : 1 / (1 + expf(-x[i]));
            sum += x[i];
        }
        for (int64_t i = 0; i < e->experts; i++) {
            if (e->scores == SOFTMAX) x[i] /= sum;
            if (e->scores == SIGMOID_OF_CHOSEN) continue; /* large logits have equal sigmoids */
            wanted[i] = e->correction ? x[i] + e->correction[i] : x[i];
        }
        if (e->groups > 1) choose_groups(e, wanted);
        for (int64_t j = 0; j < e->chosen; j++) {
            best = next_of(wanted, e->experts, numbers, j);
            numbers[j] = best, weights[j] = x[best], wanted[best] = -INFINITY;
        }
    }
    for (int64_t j = 1; j < e->chosen; j++) /* in ascending order */
        for (int64_t i = j; i > 0 && numbers[i] < numbers[i - 1]; i--) {
            int64_t number = numbers[i];
            float weight = weights[i];
            numbers[i] = numbers[i - 1], weights[i] = weights[i - 1];
            numbers[i - 1] = number, weights[i - 1] = weight;
        }
    sum = 0;
    for (int64_t j = 0; j < e->chosen; j++) sum += weights[j];
    sum = sum < e->least ? e->least : sum;
    for (int64_t j = 0; j < e->chosen; j++)
        weights[j] = e->factor * (e->normalized ? weights[j] / sum : weights[j]);
}

/* The experts of each of some rows, in ascending order, and their weights. logits, wanted: [rows,
 * experts], both changed; weights, numbers: [rows, chosen] */
void route(const Experts *e, float *logits, float *wanted, int64_t rows, float *weights,
           int64_t *numbers) {
    CHECK(e && logits && wanted && weights && numbers && rows >= 0);
    CHECK(e->chosen > 0 && e->chosen <= e->experts && e->groups > 0);
    CHECK(e->experts % e->groups == 0 && e->experts / e->groups * e->chosen_groups >= e->chosen);
    Route context = {e, logits, wanted, weights, numbers};
    share(route_row, &context, rows, rows * e->experts * 8, WORTH_A_THREAD);
}

/* Sort the choices of all rows by expert. first: [experts + 1] where those of each begin; slots:
 * [rows, chosen] the place of each choice. */
void sort_rows(const Experts *e, const int64_t *numbers, int64_t rows, int64_t *first,
               int64_t *slots) {
    memset(first, 0, sizeof *first * (size_t)(e->experts + 1));
    for (int64_t i = 0; i < rows * e->chosen; i++) {
        CHECK(numbers[i] >= 0 && numbers[i] < e->experts);
        first[numbers[i] + 1]++;
    }
    for (int64_t i = 0; i < e->experts; i++) first[i + 1] += first[i];
    for (int64_t i = 0; i < rows * e->chosen; i++) slots[i] = first[numbers[i]]++;
    for (int64_t i = e->experts; i > 0; i--) first[i] = first[i - 1];
    first[0] = 0;
}

typedef struct {
    const float *from, *weights; /* weights NULL: rows stay as they are */
    const int64_t *slots;
    float *to;
    int64_t chosen, width;
} Gather;

/* Put the row of a choice to its place, times its weight. */
static void gather_row(const void *context, int64_t choice) {
    const Gather *t = context;
    const float *from = t->from + choice / t->chosen * t->width;
    float *to = t->to + t->slots[choice] * t->width;
    if (!t->weights) {
        memcpy(to, from, sizeof *to * (size_t)t->width);
        return;
    }
    const float weight = t->weights[choice];
#pragma omp simd
    for (int64_t i = 0; i < t->width; i++) to[i] = weight * from[i];
}

typedef struct {
    const float *of_experts, *weights; /* weights NULL: each counts 1 */
    const int64_t *slots;
    const float *shared, *scores;
    float *out;
    int64_t chosen, width;
} Combine;

static void combine_row(const void *context, int64_t row) {
    const Combine *t = context;
    float *out = t->out + row * t->width;
    memset(out, 0, sizeof *out * (size_t)t->width);
    for (int64_t j = row * t->chosen; j < (row + 1) * t->chosen; j++) {
        const float *from = t->of_experts + t->slots[j] * t->width;
        const float weight = t->weights ? t->weights[j] : 1;
#pragma omp simd
        for (int64_t i = 0; i < t->width; i++) out[i] += weight * from[i];
    }
    if (!t->shared) return;
    const float *from = t->shared + row * t->width;
    const float weight = t->scores ? 1 / (1 + expf(-t->scores[row])) : 1;
#pragma omp simd
    for (int64_t i = 0; i < t->width; i++) out[i] += weight * from[i];
}

/* out = the sum of each row's experts, by their weights, and of the shared one. of_experts: [rows *
 * chosen, width] by slot; weights: [rows, chosen]; NULL: each counts 1; shared, out: [rows, width];
 * scores: [rows] logit of the shared one's weight; NULL: it counts 1. */
void combine(const Experts *e, const float *of_experts, const float *weights, const int64_t *slots,
             const float *shared, const float *scores, float *out, int64_t rows, int64_t width) {
    Combine context = {of_experts, weights, slots, shared, scores, out, e->chosen, width};
    share(combine_row, &context, rows, rows * width * e->chosen, WORTH_A_THREAD);
}

/* `count` numbers of `bytes` bytes each of the room that *at is, on a line of their own. */
static void *taken(char **at, int64_t count, int64_t bytes) {
    char *own = *at;
    *at += (count * bytes + 63) / 64 * 64;
    return own;
}

/* What the experts of a layer put out: out [rows, hidden] of x [rows, hidden]. Returns 1 where
 * there was no memory. */
int mixture(const Experts *e, const float *x, int64_t rows, float *out) {
    CHECK(e && x && out && rows > 0 && e->linears && e->router.weight && e->up && e->down);
    const Weight *shared = e->shared_down.weight;
    const int64_t hidden = e->down[0]->rows, width = e->down[0]->columns, of_up = e->up[0]->rows;
    const int64_t many = rows * e->chosen, inner = shared ? shared->columns : 0;
    CHECK(e->up[0]->columns == hidden && of_up == width * (e->gated ? 2 : 1));
    CHECK(e->router.weight->rows == e->experts && e->router.weight->columns == hidden);
    const int64_t counts[] = {
        rows * e->experts, rows * e->experts, many, many * hidden, many * of_up, many * width,
        shared ? rows * e->shared_up.weight->rows : 0, rows * inner, shared ? rows * hidden : 0,
        rows,
    };
    const int64_t wholes[] = {many, e->experts + 1, many};
    enum { FLOATS = sizeof counts / sizeof *counts, WHOLES = sizeof wholes / sizeof *wholes };
    int64_t bytes = 0;
    for (int i = 0; i < FLOATS; i++) bytes += (counts[i] * 4 + 63) / 64 * 64;
    for (int i = 0; i < WHOLES; i++) bytes += (wholes[i] * 8 + 63) / 64 * 64;
    char *room = aligned_alloc(64, (size_t)bytes), *at = room;
    if (!room) return 1;
    float *f[FLOATS];
    int64_t *n[WHOLES];
    for (int i = 0; i < FLOATS; i++) f[i] = taken(&at, counts[i], 4);
    for (int i = 0; i < WHOLES; i++) n[i] = taken(&at, wholes[i], 8);
    float *logits = f[0], *weights = f[2], *sorted = f[3], *up = f[4], *gated = f[5];
    int64_t *numbers = n[0], *first = n[1], *slots = n[2];
    const float *of_inputs = e->scales_inputs ? weights : NULL;
#define LINEAR_OF(PRODUCT, X, Y) \
    e->PRODUCT.call(e->PRODUCT.weight, X, rows, e->PRODUCT.bias, Y, 0)
    int failed = LINEAR_OF(router, x, logits);
    route(e, logits, f[1], rows, weights, numbers);
    sort_rows(e, numbers, rows, first, slots);
    Gather context = {x, of_inputs, slots, sorted, e->chosen, hidden};
    share(gather_row, &context, many, many * hidden, WORTH_A_THREAD);
    failed |= e->linears(e->up, e->experts, first, sorted, e->up_bias, up, 0);
    gate(up, gated, many, width, e->activation, e->gated, e->alpha, e->limit);
    failed |= e->linears(e->down, e->experts, first, gated, e->down_bias, sorted, 0);
    if (shared) {
        failed |= LINEAR_OF(shared_up, x, f[6]);
        gate(f[6], f[7], rows, inner, e->activation, e->gated, e->alpha, e->limit);
        failed |= LINEAR_OF(shared_down, f[7], f[8]);
        if (e->shared_score.weight) failed |= LINEAR_OF(shared_score, x, f[9]);
    }
    combine(e, sorted, of_inputs ? NULL : weights, slots, shared ? f[8] : NULL,
            shared && e->shared_score.weight ? f[9] : NULL, out, rows, hidden);
    free(room);
    return failed;
}

typedef struct {
    const float *logits;
    int64_t width, *best;
    float *log_total;
} Largest;

static void argmax_logsumexp_of_row(const void *context, int64_t row) {
    const Largest *t = context;
    const int64_t width = t->width;
    const float *x = t->logits + row * width;
    enum { PIECE = 64 * LANES }; /* so many terms are summed in float, their sums in double */
    vf tops = (vf){0} - INFINITY;
    int64_t whole = width / LANES * LANES, at = 0;
    for (int64_t i = 0; i < whole; i += LANES) tops = larger(*(const vf *)(x + i), tops);
    float top = max_of_lanes(tops);
    for (int64_t i = whole; i < width; i++) top = x[i] > top ? x[i] : top;
    while (at < width - 1 && !(x[at] == top)) at++;
    double total = 0;
    for (int64_t piece = 0; piece < width; piece += PIECE) {
        vf sums = {0};
        for (int64_t i = piece; i < width && i < piece + PIECE; i += LANES) {
            vf values = weights(x, i, width - i, FLOAT32);
            if (width - i < LANES)
                for (int64_t j = width - i; j < LANES; j++) values[j] = -INFINITY;
            vf terms = exponentials(values - top);
            sums += blend(values == (vf){0} - INFINITY, (vf){0}, terms);
        }
        total += sum_of_lanes(sums);
    }
    t->best[row] = at, t->log_total[row] = (float)((double)top + log(total));
}

/* Of each row of logits [rows, width]: the index of the largest, the lowest of several, and
 * log(sum(exp(logit))), NaN where a logit is NaN. */
void argmax_logsumexp(const float *logits, int64_t rows, int64_t width, int64_t *best,
                      float *log_total) {
    CHECK(logits && best && log_total && rows > 0 && width > 0);
    Largest context = {logits, width, best, log_total};
    share(argmax_logsumexp_of_row, &context, rows, rows * width, WORTH_A_THREAD);
}

static inline uint8_t to_float8(float x) {
    float size = fabsf(x) < 448.0f ? fabsf(x) : 448.0f;
    uint32_t bits = float_bits(size), sign = float_bits(x) >> 24 & 0x80;
    uint32_t normal = ((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - (120 << 3);
    /* below 2^-6: multiples of 2^-9 */
    uint32_t code = size < 0.015625f ? (uint32_t)(int32_t)rintf(size * 512.0f) : normal;
    return (uint8_t)(sign | (x != x ? 0x7F : code));
}

/* Write `dim` floats, in units of `step`, from element `at` of the cache on, `stride` apart. Where
 * there are `scales`, the step is computed from the numbers and kept as element `index`. bfloat16
 * has functions of its own. */
static void store(const float *x, void *cache, int64_t at, int64_t stride, float step,
                  float *scales, int64_t index, int64_t dim, int64_t kind) {
    float amax = 0;
    for (int64_t i = 0; scales && i < dim; i++)
        amax = fabsf(x[i]) > amax || x[i] != x[i] ? fabsf(x[i]) : amax;
    /* !(amax <= 0) holds for NaN too, which then is the step */
    if (scales && !(amax <= 0)) step = amax / 127.5f < 0x1p-126f ? 0x1p-126f : amax / 127.5f;
    if (scales) scales[index] = step;
    for (int64_t i = 0; i < dim; i++, at += stride) {
        float q = rintf(x[i] / step);
        if (kind == FLOAT32) ((float *)cache)[at] = x[i];
        if (kind == FLOAT8) ((uint8_t *)cache)[at] = to_float8(x[i] / step);
        if (kind == INT8)
            ((int8_t *)cache)[at] = (int8_t)(q < -128 ? -128 : q > 127 ? 127 : q == q ? q : 0);
    }
}

/* Write the keys of a column in bfloat16, two features at a time. cache: [head_dim / 2, SIDE],
 * from the column's place on */
static void store_keys(const float *x, uint32_t *cache, int64_t dim) {
    for (int64_t i = 0; i < dim; i += 2)
        cache[i / 2 * SIDE] = to_bfloat(x[i]) | (uint32_t)to_bfloat(x[i + 1]) << 16;
}

/* Write the values of a column in bfloat16 beside its neighbour's. cache: [head_dim, 2], the
 * place of both. The `last` column of a step writes zeros for a neighbour that does not exist
 * yet: attention multiplies it by 0, and the memory may have held NaN. */
static void store_values(const float *x, uint16_t *cache, int64_t column, int last, int64_t dim) {
    for (int64_t i = 0; i < dim; i++) cache[2 * i + column % 2] = to_bfloat(x[i]);
    for (int64_t i = 0; last && column % 2 == 0 && i < dim; i++) cache[2 * i + 1] = 0;
}

/* LANES numbers of the cache from element `at` on, int8 without its scale. */
INLINE vf load(const void *cache, int64_t at, int64_t kind) {
    if (kind == FLOAT32) return *(const vf *)((const float *)cache + at);
    if (kind == BFLOAT16) return (vf)(widen(*(const vh *)((const uint16_t *)cache + at)) << 16);
    if (kind == INT8)
        return __builtin_convertvector(widen_signed(*(const vc *)((const int8_t *)cache + at)), vf);
    vu code = widen_bytes(*(const vb *)((const uint8_t *)cache + at)), size = code & 0x7F;
    /* A float has the code's exponent and mantissa, and an exponent that is 127 - 7 higher. Codes
     * below 8 are subnormals, steps of 2^-9 from 0: they are read as the steps from 2^-6 on, less
     * 2^-6, as Intel's CPUs need 100 cycles for a subnormal float. 0x7F is NaN. */
    vu small = (vu)(size < 8);
    vu bits = (size << 20) + (120u << 23) + (small & 1u << 23);
    bits = (vu)((vf)bits - (vf)(small & float_bits(0x1p-6f)));
    return (vf)(bits | (code & 0x80) << 24 | ((vu)(size == 0x7F) & 0x7FC00000));
}

#include "int4.h"

/* cap * tanh(x / cap), by tanh(y) = 1 - 2 / (1 + exp(2 y)) */
INLINE vf capped(const Step *s, vf x) {
    return s->cap - 2 * s->cap / (1.0f + exponentials(x * (2 / s->cap)));
}

#include "amx.h"
#if HAS_TILES
#include "attention_tiles.h"
#endif

/* How attention multiplies: floats; or queries and probabilities that it rounds to bfloat16, as pairs
 * or in tiles. */
enum products { OF_FLOATS, OF_PAIRS, OF_TILES };

typedef struct {
    const Step *s;
    const Layer *l;
    float *qkv;
    float *out;     /* attention alone writes it */
    enum products products;
} Heads;

/* Features of queries, keys, values and output gates of a column; values that are a part of the keys
 * count once. */
static inline int64_t width_of(const Step *s) {
    const int64_t queries = s->query_heads * (s->output_gate ? 2 : 1);
    return (queries + (s->latent ? 1 : 2) * s->kv_heads) * s->head_dim;
}

static void rope_store_column(const void *context, int64_t at) {
    const Heads *t = context;
    const Step *s = t->s;
    const Layer *l = t->l;
    const int64_t dim = s->head_dim, width = width_of(s);
    int64_t row = sequence_of(s->first, s->rows, at);
    int64_t column = s->start[row] + at - s->first[row];
    int64_t position = column < s->padding[row] ? 0 : column - s->padding[row];
    const float *cos = l->cos + position * l->rotary_dim;
    const float *sin = l->sin + position * l->rotary_dim;
    int64_t half = l->rotary_dim / 2;
    float *x = t->qkv + at * width;
    if (s->whole_norms) {
        apply_norm(l->q_norm, x, x, s->query_heads * dim, s->eps, s->centered);
        apply_norm(l->k_norm, x + s->query_heads * dim, x + s->query_heads * dim,
                   s->kv_heads * dim, s->eps, s->centered);
    }
    if (s->clip)
        for (int64_t i = 0; i < width; i += LANES)
            *(vf *)(x + i) = larger(smaller(*(vf *)(x + i), splat(s->clip)), splat(-s->clip));
    for (int64_t h = 0; h < s->query_heads + s->kv_heads; h++, x += dim) {
        if (!s->whole_norms)
            apply_norm(h < s->query_heads ? l->q_norm : l->k_norm, x, x, dim, s->eps,
                       s->centered);
        /* features i and i + half are a pair, rotated by the angle of the position */
#pragma omp simd
        for (int64_t i = 0; i < half; i++) {
            float low = x[i], high = x[i + half];
            x[i] = low * cos[i] - high * sin[i];
            x[i + half] = high * cos[i + half] + low * sin[i + half];
        }
    }
    if (l->floor_scale) {
        float *queries = t->qkv + at * width, steps = floorf((float)(position + 1) / l->floor_scale);
        const float factor = 1 + l->attn_scale * log1pf(steps);
        for (int64_t i = 0; i < s->query_heads * dim; i++) queries[i] *= factor;
    }
    if (s->kind >= INT4)
        for (int64_t h = 0; h < s->query_heads + s->kv_heads; h++)
            rotate(t->qkv + at * width + h * dim, dim);
    /* x has passed queries and keys: it is a head of values, if any, its keys kv_heads before it */
    for (int64_t h = 0; h < s->kv_heads; h++, x += dim) {
        int64_t index = cache_column(s, row, h, column), lane = column % SIDE;
        float k = l->key_steps ? l->key_steps[h] : 1;
        float v = l->value_steps ? l->value_steps[h] : 1;
        const float *keys = x - s->kv_heads * dim;
        if (s->kind == BFLOAT16) {
            store_keys(keys, (uint32_t *)l->keys + (index - lane) * dim / 2 + lane, dim);
            if (s->latent) continue;
            store_values(x, (uint16_t *)l->values + (index - index % 2) * dim, column,
                         at + 1 == s->first[row + 1], dim);
            continue;
        }
        if (s->kind >= INT4) {
            store_int4_column(l, keys, x, index, dim, s->kind);
            continue;
        }
        store(keys, l->keys, (index - lane) * dim + lane, SIDE, k, l->key_scales, index, dim,
              s->kind);
        if (s->latent) continue;
        store(x, l->values, index * dim, 1, v, l->value_scales, index, dim, s->kind);
    }
}

/* Clip, apply the norms and the rotary embedding (RoPE) to queries and keys in place, and scale
 * queries by their positions; write keys and values to the cache.  qkv: [columns, query_heads +
 * 2 kv_heads, head_dim], without the values where the keys hold them, and with a gate for each
 * query head behind them where there are gates */
void rope_store(const Step *s, const Layer *l, float *qkv) {
    check_step(s, l);
    int64_t width = width_of(s), columns = s->first[s->rows];
    Heads context = {.s = s, .l = l, .qkv = qkv};
    share(rope_store_column, &context, columns, columns * width, WORTH_A_THREAD);
}

/* A step of the online softmax of T queries. `scores` [T, BLOCK] of the columns from `begin` on
 * become exp(score - largest), and 0 outside of the columns [first, end) that a query sees.
 * largest, total [QUERIES], [T]: the largest score and the sum of exponentials so far, updated.
 * shrink [QUERIES]: exp(old largest - new largest), by which every earlier sum has to be
 * multiplied. */
INLINE void online_softmax_step(float *scores, const int64_t *first, const int64_t *end,
                                int64_t begin, float *largest, float *total, float *shrink,
                                const int T) {
    enum { GROUPS = BLOCK / LANES };
    const vf none = splat(-INFINITY);
    const vi lanes = {NUMBERS};
    float tops[QUERIES] __attribute__((aligned(64)));
    vf sums[TILE];
    for (int g = 0; g < T; g++) {
        vf *own = (vf *)(scores + g * BLOCK), most = none;
        int from = first[g] < begin ? 0 : (int)(first[g] - begin);
        int to = end[g] - begin > BLOCK ? BLOCK : (int)(end[g] - begin);
        /* mask the columns that the query does not see, where the block has any */
        for (int j = 0; j < GROUPS && (from > 0 || to < BLOCK); j++)
            own[j] = blend((lanes >= from - j * LANES) & (lanes < to - j * LANES), own[j], none);
        for (int j = 0; j < GROUPS; j++) most = larger(own[j], most);
        tops[g] = max_of_lanes(most);
    }
    for (int g = T; g < QUERIES; g++) tops[g] = -INFINITY;
    for (int g = 0; g < QUERIES; g += LANES) {
        const vf old = *(vf *)(largest + g), top = larger(*(vf *)(tops + g), old);
        /* a query that has seen no column, or -inf alone, is shifted by 0: -inf - -inf would be NaN */
        const vf unit = blend(top == none, (vf){0}, top);
        *(vf *)(largest + g) = top, *(vf *)(tops + g) = unit;
        *(vf *)(shrink + g) = exponentials(old - unit);
    }
    for (int g = 0; g < T; g++) {
        vf *own = (vf *)(scores + g * BLOCK);
        sums[g] = (vf){0};
        for (int j = 0; j < GROUPS; j++) {
            own[j] = blend(own[j] == none, (vf){0}, exponentials(own[j] - splat(tops[g])));
            sums[g] += own[j];
        }
    }
    for (int g = 0; g < T; g++) total[g] = total[g] * shrink[g] + sum_of_lanes(sums[g]);
}

/* ALiBi (Press et al. 2022, arXiv:2108.12409): a score of T queries loses slope for each column that
 * lies between. `scores` [T, BLOCK] are those of the columns from `begin` on; end: as above. */
INLINE void add_distances(float *scores, const float *slope, const int64_t *end, int64_t begin,
                          const int T) {
    const vi lanes = {NUMBERS};
    for (int g = 0; g < T; g++)
        for (int j = 0; j < BLOCK; j += LANES) {
            vi distance = lanes + (int)(begin + j - (end[g] - 1));
            *(vf *)(scores + g * BLOCK + j) += slope[g] * __builtin_convertvector(distance, vf);
        }
}

/* The scores [T, BLOCK] of columns that a query may not see become -inf. word: the columns' place in
 * the bits of each query. */
INLINE void hide_unselected(float *scores, const uint64_t *const *selected, int64_t word,
                            const int T) {
    const vi lanes = {NUMBERS};
    for (int g = 0; g < T; g++)
        for (int j = 0; j < BLOCK; j += LANES) {
            const vi bits = (vi){0} + (int32_t)(uint32_t)(selected[g][word] >> j);
            vf *own = (vf *)(scores + g * BLOCK + j);
            *own = blend((bits >> lanes & 1) != 0, *own, splat(-INFINITY));
        }
}

/* Whether one of T queries may see one of the BLOCK columns of a word. */
INLINE int any_selected(const uint64_t *const *selected, int64_t word, const int T) {
    uint64_t any = 0;
    for (int g = 0; g < T; g++) any |= selected[g][word];
    return any != 0;
}

/* The nearest bfloat16 as a float, ties to even, of finite numbers. */
static inline vf rounded_to_bfloat(vf x) {
    vu bits = (vu)x;
    return (vf)((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000u);
}

/* ALiBi as Falcon has it: the places of a column and of the query are counted from the begin of the
 * text; they and their products with the slope are rounded to bfloat16; the difference of the
 * products is multiplied by the factor of the scores. */
INLINE void add_rounded_distances(float *scores, const float *slope, const int64_t *end,
                                  int64_t begin, int64_t padding, float scale, const int T) {
    const vi lanes = {NUMBERS};
    for (int g = 0; g < T; g++) {
        vf query = rounded_to_bfloat(splat((float)(end[g] - 1 - padding)));
        query = rounded_to_bfloat(query * slope[g]);
        for (int j = 0; j < BLOCK; j += LANES) {
            vf place = __builtin_convertvector(lanes + (int)(begin + j - padding), vf);
            vf column = rounded_to_bfloat(rounded_to_bfloat(place) * slope[g]);
            *(vf *)(scores + g * BLOCK + j) += (column - query) * scale;
        }
    }
}

#if defined __AVX512BF16__ && !HAS_TILES
enum { HAS_PAIRS = 1 }; /* pairs of bfloat16 can be multiplied as they are */
#else
enum { HAS_PAIRS = 0 };
#endif

/* Keep a sum in a register: gcc keeps some of them in memory otherwise. */
#ifdef __AVX2__
#define IN_REGISTER(X) __asm__("" : "+v"(X))
#elif defined __aarch64__
#define IN_REGISTER(X) __asm__("" : "+w"(X))
#else
#define IN_REGISTER(X) ((void)0)
#endif

/* The place of the first feature of LANES columns among the keys, from their place in the cache. */
static inline int64_t keys_of(const Step *s, int64_t at, int64_t kind) {
    int64_t lane = (int)LANES < (int)SIDE ? at % SIDE : 0;
    return (at - lane) * s->head_dim + lane * (kind == BFLOAT16 ? 2 : 1);
}

/* The scores of T queries with W groups of LANES columns, which lie at `at` of the cache.
 * queries: [dim, T], or pairs of bfloat16 [dim / 2, T]; scores: [T, BLOCK] */
INLINE void query_key_scores(const Step *s, const Layer *l, const int64_t *at, const float *queries,
                             float *scores, const int kind, const int narrow, const int T,
                             const int W) {
    const int paired = kind == BFLOAT16;
    vf sum[4][TILE];
    for (int w = 0; w < W; w++) for (int g = 0; g < T; g++) sum[w][g] = (vf){0};
    for (int64_t i = 0; i < s->head_dim; i += paired ? 2 : 1) {
        const float *query = queries + (narrow ? i / 2 : i) * T;
        vf k[4];
#pragma GCC unroll 4
        for (int w = 0; w < W; w++) {
            int64_t from = keys_of(s, at[w], kind) + i * SIDE;
            k[w] = paired ? *(const vf *)((const uint16_t *)l->keys + from)
                          : load(l->keys, from, kind);
        }
#pragma GCC unroll 8
        for (int g = 0; g < T; g++) {
            vf q = splat(query[g]), next = splat(paired && !narrow ? query[T + g] : 0);
#pragma GCC unroll 4
            for (int w = 0; w < W; w++) {
                if (narrow) sum[w][g] = multiply_add_pairs(sum[w][g], q, k[w], 1);
                else if (paired)
                    sum[w][g] = multiply_add(multiply_add(sum[w][g], lower(k[w]), q), upper(k[w]),
                                             next);
                else sum[w][g] = multiply_add(sum[w][g], k[w], q);
            }
        }
    }
    for (int w = 0; w < W; w++)
        for (int g = 0; g < T; g++) {
            IN_REGISTER(sum[w][g]);
            vf x = sum[w][g];
            if (kind == INT8 && l->key_scales) x *= load(l->key_scales, at[w], FLOAT32);
            if (s->cap > 0) x = capped(s, x);
            *(vf *)(scores + g * BLOCK + w * LANES) = x;
        }
}

/* sums = sums * shrink + probabilities @ values, for W groups of LANES features from feature `i`
 * on. The values are those of columns `from` to `to` of a block, whose groups of LANES columns
 * lie at `at` of the cache. Columns of bfloat16 are read by twos; the probability of one beyond
 * is 0. scores: [T, BLOCK] probabilities in float; probabilities: the same as pairs of bfloat16
 * [T, BLOCK / 2], read where `narrow`; sums: [T, head_dim] */
INLINE void accumulate_values(const Step *s, const Layer *l, const int64_t *at, int64_t from,
                              int64_t to, const float *scores, const float *probabilities,
                              const float *shrink, float *sums, int64_t i, const int kind,
                              const int narrow, const int T, const int W) {
    const int paired = kind == BFLOAT16;
    vf sum[4][TILE];
    for (int w = 0; w < W; w++)
        for (int g = 0; g < T; g++)
            sum[w][g] = *(const vf *)(sums + g * s->head_dim + i + w * LANES) * shrink[g];
    for (int64_t j = paired ? from - from % 2 : from; j < to;) {
        const int64_t first = at[j / LANES] - j / LANES * LANES, until = (j / LANES + 1) * LANES;
        for (; j < to && j < until; j += paired ? 2 : 1) {
            const float *probability = narrow ? probabilities + j / 2 : scores + j;
            vf v[4];
#pragma GCC unroll 4
            for (int w = 0; w < W; w++) {
                int64_t place = (first + j) * s->head_dim + (i + w * LANES) * (paired ? 2 : 1);
                v[w] = paired ? *(const vf *)((const uint16_t *)l->values + place)
                              : load(l->values, place, kind);
            }
#pragma GCC unroll 8
            for (int g = 0; g < T; g++) {
                const int own = g * (narrow ? BLOCK / 2 : BLOCK);
                vf p = splat(probability[own]), next =
                    splat(paired && !narrow ? probability[own + 1] : 0);
#pragma GCC unroll 4
                for (int w = 0; w < W; w++) {
                    if (narrow) sum[w][g] = multiply_add_pairs(sum[w][g], p, v[w], 1);
                    else if (paired)
                        sum[w][g] = multiply_add(multiply_add(sum[w][g], lower(v[w]), p),
                                                 upper(v[w]), next);
                    else sum[w][g] = multiply_add(sum[w][g], v[w], p);
                }
            }
        }
    }
    for (int w = 0; w < W; w++)
        for (int g = 0; g < T; g++) *(vf *)(sums + g * s->head_dim + i + w * LANES) = sum[w][g];
}

/* The same of values that are features of the keys: sums * shrink + probabilities @ keys, for four
 * features from `i` on. A register holds a feature of LANES columns, so a block of columns is summed
 * in lanes first; its order does not depend on the other queries. Columns outside of [from, to) may
 * never have been written. */
INLINE void accumulate_latent(const Step *s, const Layer *l, const int64_t *at, int64_t from,
                              int64_t to, const float *scores, const float *shrink, float *sums,
                              int64_t i, const int kind, const int T) {
    enum { GROUPS = BLOCK / LANES };
    const int MOST = REGISTERS == 16 ? 2 : 4; /* queries whose sums fit in registers */
    const vi lanes = {NUMBERS};
    for (int first = 0; first < T; first += MOST) {
        vf sum[4][4];
        const int some = T - first < MOST ? T - first : MOST;
        for (int f = 0; f < 4; f++) for (int g = 0; g < some; g++) sum[f][g] = (vf){0};
        for (int w = 0; w < GROUPS && w * LANES < to; w++) {
            vf k[4];
            if ((w + 1) * LANES <= from) continue;
            for (int f = 0; f < 4; f++) {
                const int64_t place = keys_of(s, at[w], kind)
                    + (kind == BFLOAT16 ? (i + f) / 2 * 2 : i + f) * SIDE;
                if (kind == BFLOAT16) {
                    vf pair = *(const vf *)((const uint16_t *)l->keys + place);
                    k[f] = f % 2 ? upper(pair) : lower(pair);
                } else k[f] = load(l->keys, place, kind);
            }
            if (w * LANES < from || (w + 1) * LANES > to) {
                vi seen = (lanes >= (int)from - w * LANES) & (lanes < (int)to - w * LANES);
                for (int f = 0; f < 4; f++) k[f] = blend(seen, k[f], (vf){0});
            }
            for (int g = 0; g < some; g++) {
                vf p = *(const vf *)(scores + (first + g) * BLOCK + w * LANES);
                for (int f = 0; f < 4; f++) sum[f][g] = multiply_add(sum[f][g], p, k[f]);
            }
        }
        for (int g = 0; g < some; g++) {
            v4 *own = (v4 *)(sums + (first + g) * s->head_dim + i);
            *own = *own * shrink[first + g]
                + sums_of_lanes(sum[0][g], sum[1][g], sum[2][g], sum[3][g]);
        }
    }
}

/* Round pairs of floats to bfloat16: out[i * stride] = x[2 * i], x[2 * i + 1].  2 * pairs is a
 * multiple of LANES. */
INLINE void round_pairs(const float *x, float *out, int64_t pairs, int64_t stride) {
#ifdef __AVX512BF16__
    for (int64_t i = 0; i < pairs; i += LANES / 2) {
        v8 rounded = (v8)_mm512_cvtneps_pbh((__m512)*(const vf *)(x + 2 * i));
        if (stride == 1) *(v8 *)(out + i) = rounded;
        else for (int j = 0; j < LANES / 2; j++) out[(i + j) * stride] = rounded[j];
    }
#else
    for (int64_t i = 0; i < pairs; i++) {
        const uint32_t pair = to_bfloat(x[2 * i]) | (uint32_t)to_bfloat(x[2 * i + 1]) << 16;
        memcpy(out + i * stride, &pair, sizeof pair);
    }
#endif
}

/* Attention of T queries of one kv head over the columns that they see, by the online softmax of
 * Milakov and Gimelshein 2018 (arXiv:1805.02867), BLOCK columns at a time. q, out: [head_dim] of
 * each query, out the latent where there is one; first, end: the columns [first, end) of sequence
 * `row` that each query sees; sink: where the layer has sinks, the score of each query's, which
 * counts in its sum alone; slope: ALiBi's of each query, where there is one; selected: the bits of
 * each query's `Step.selected`, or NULL. A block of columns that none of them may see is passed over:
 * it would add zeros.
 *
 * The sums of a query have the same order whichever queries are computed with it and however the
 * columns lie in blocks. */
INLINE void attend_tile(const Step *s, const Layer *l, const float **q, float **out, int64_t row,
                        int64_t h, const int64_t *first, const int64_t *end, const float *sink,
                        const float *slope, const uint64_t *const *selected, const int kind,
                        const enum products products, const int T) {
    enum { GROUPS = BLOCK / LANES };
    const int narrow = products == OF_PAIRS;
    const int W = (T > 4 ? 2 : 4) / (REGISTERS == 16 && T > 1 ? 2 : 1); /* T * W sums fit in registers */
    int64_t dim = s->head_dim, low = first[0], high = end[T - 1]; /* ends grow with queries */
    int64_t dynamic = kind == INT8 && l->key_scales;              /* scales of each column */
    Int4Queries rounded;
    float unit = l->key_steps ? s->scale * l->key_steps[h] : s->scale;
    const float *value_scales = s->latent ? l->key_scales : l->value_scales;
    const float *value_steps = s->latent ? l->key_steps : l->value_steps;
    const int64_t values = s->latent ? dim - s->latent : 0; /* first feature of a key in the sums */
    float step = value_steps ? value_steps[h] : 1;
    float scores[TILE * BLOCK] __attribute__((aligned(64)));
    float probabilities[TILE * BLOCK / 2] __attribute__((aligned(64)));
    float largest[QUERIES] __attribute__((aligned(64)));
    float shrink[QUERIES] __attribute__((aligned(64)));
    float total[TILE];
    /* [head_dim, T], or pairs [head_dim / 2, T], or for tiles [T, head_dim] in bfloat16 */
    float queries[MAX_HEAD_DIM * TILE];
    float sums[MAX_HEAD_DIM * TILE];    /* [T, head_dim] */
    for (int g = 0; g < QUERIES; g++) largest[g] = g < T && l->sinks ? sink[g] : -INFINITY;
    for (int g = 0; g < T; g++) total[g] = l->sinks ? 1 : 0; /* exp(sink - sink) */
    if (kind >= INT4) int4_round_queries(q, dim, s->scale, &rounded, kind, T);
    for (int g = 0; kind < INT4 && g < T; g++) {
        float *own = sums + g * dim;
        for (int64_t i = 0; i < dim; i++) own[i] = q[g][i] * unit;
        if (narrow) round_pairs(own, queries + g, dim / 2, T);
#if HAS_TILES
        else if (products == OF_TILES) {
            const int64_t whole = (dim + DEPTH - 1) / DEPTH * DEPTH;
            memset(queries + (g * whole + dim) / 2, 0, (size_t)(whole - dim) * 2);
            round_pairs(own, queries + g * whole / 2, dim / 2, 1);
        }
#endif
        else for (int64_t i = 0; i < dim; i++) queries[i * T + g] = own[i];
    }
    memset(sums, 0, sizeof *sums * T * dim);
    /* Blocks begin at multiples of BLOCK, not at the first column that a query sees: the sums of a
     * query then do not depend on its neighbours. */
    for (int64_t begin = low - low % BLOCK; begin < high; begin += BLOCK) {
        if (selected && !any_selected(selected, begin / BLOCK, T)) continue;
        int64_t from = low > begin ? low - begin : 0;
        int64_t to = high - begin < BLOCK ? high - begin : BLOCK;
        int64_t at[GROUPS], groups = (to + LANES - 1) / LANES, group = 0, i = 0;
        for (int64_t j = 0; j < groups; j++) at[j] = cache_column(s, row, h, begin + j * LANES);
        for (; kind >= INT4 && group < groups; group++)
            int4_scores(s, l, at[group], &rounded, scores + group * LANES, kind, T);
#if HAS_TILES
        if (products == OF_TILES) {
            tile_scores(s, l, at, (to + SIDE - 1) / SIDE, queries, scores, T);
            group = groups;
        }
#endif
        for (; kind < INT4 && group + W <= groups; group += W)
            query_key_scores(s, l, at + group, queries, scores + group * LANES, kind, narrow, T, W);
        for (; group < groups; group++)
            query_key_scores(s, l, at + group, queries, scores + group * LANES, kind, narrow, T, 1);
        if (s->slopes && s->rounded_alibi)
            add_rounded_distances(scores, slope, end, begin, s->padding[row], s->scale, T);
        else if (s->slopes) add_distances(scores, slope, end, begin, T);
        if (selected) hide_unselected(scores, selected, begin / BLOCK, T);
        online_softmax_step(scores, first, end, begin, largest, total, shrink, T);
        /* int8 values without measured scales: the scale of a column goes into its probability */
        for (int g = 0; g < T && dynamic; g++)
            for (int64_t j = from; j < to; j++)
                scores[g * BLOCK + j] *= value_scales[at[j / LANES] + j % LANES];
        for (i = values; s->latent && i < dim; i += 4)
            accumulate_latent(s, l, at, from, to, scores, shrink, sums, i, kind, T);
        if (s->latent) continue;
        for (int64_t part = 0; kind >= INT4 && i < dim; part++, i += int4_group(dim, kind)) {
            if (dim % 32)
                int4_accumulate(s, l, at, from, to, scores, shrink, sums, part, kind, 16, T);
            else int4_accumulate(s, l, at, from, to, scores, shrink, sums, part, kind, 32, T);
        }
        if (products != OF_FLOATS) round_pairs(scores, probabilities, T * BLOCK / 2, 1);
#if HAS_TILES
        if (products == OF_TILES) {
            tile_values(s, l, at, from, to, probabilities, shrink, sums, T);
            continue;
        }
#endif
        for (; i + W * LANES <= dim; i += W * LANES)
            accumulate_values(s, l, at, from, to, scores, probabilities, shrink, sums, i, kind,
                              narrow, T, W);
        for (; i < dim; i += LANES)
            accumulate_values(s, l, at, from, to, scores, probabilities, shrink, sums, i, kind,
                              narrow, T, 1);
    }
    for (int g = 0; g < T; g++)
        for (int64_t i = values; i < dim; i++) /* a query of padding sees nothing: 0 */
            out[g][i - values] = end[g] > first[g] ? sums[g * dim + i] / total[g] * step : 0;
}

/* A unit is a tile of a kv head. The last tiles, which see most columns, come first, so that no
 * thread is left with one of them at the end. */
static void attend_unit(const void *context, int64_t unit) {
    const Heads *t = context;
    const Step *s = t->s;
    const Layer *l = t->l;
    const float *qkv = t->qkv;
    float *out = t->out;
    const int64_t dim = s->head_dim, width = width_of(s), outs = s->latent ? s->latent : dim;
    const int64_t group = s->query_heads / s->kv_heads;
    const enum products products = t->products;
    int64_t head = unit % s->kv_heads, tile = s->tiles[s->rows] - 1 - unit / s->kv_heads;
    int64_t row = sequence_of(s->tiles, s->rows, tile), from = s->first[row];
    int64_t left = (s->first[row + 1] - from) * group - (tile - s->tiles[row]) * TILE;
    int64_t first[TILE], end[TILE];
    float sink[TILE], slope[TILE];
    const float *q[TILE];
    const uint64_t *own[TILE], *const *selected = s->selected ? own : NULL;
    float *to[TILE];
    for (int64_t g = 0; g < TILE; g++) { /* those beyond the last query repeat it */
        int64_t at = (tile - s->tiles[row]) * TILE + (g < left ? g : left - 1);
        int64_t column = at / group, query = head * group + at % group;
        q[g] = qkv + (from + column) * width + query * dim;
        to[g] = out + ((from + column) * s->query_heads + query) * outs;
        sink[g] = l->sinks ? l->sinks[query] : 0;
        slope[g] = s->slopes ? s->slopes[query] : 0;
        own[g] = s->selected ? s->selected + (from + column) * s->words : NULL;
        first[g] = s->padding[row], end[g] = s->start[row] + column + 1;
        if (l->chunk && end[g] > first[g])
            first[g] += (end[g] - 1 - first[g]) / l->chunk * l->chunk;
        if (l->window && end[g] - l->window > first[g]) first[g] = end[g] - l->window;
    }
#define ATTEND_TILE(KIND, PRODUCTS, T) \
    if (s->kind == KIND && products == PRODUCTS && size == T) \
        attend_tile(s, l, q, to, row, head, first, end, sink, slope, selected, KIND, PRODUCTS, T);
#define ATTEND(KIND, PRODUCTS) \
    ATTEND_TILE(KIND, PRODUCTS, 1) \
    ATTEND_TILE(KIND, PRODUCTS, 3) \
    ATTEND_TILE(KIND, PRODUCTS, 4) \
    ATTEND_TILE(KIND, PRODUCTS, 8)
    /* 1, 3, 4 or 8 queries at once: kinds and sizes are constants within each call. int4, int5 and
     * tiles have no 3, which would take the compiler seconds. */
    int64_t size = left > 4 ? TILE : left == 2 ? 3 : left;
    if (size == 3 && (s->kind >= INT4 || products == OF_TILES)) size = 4;
    ATTEND(FLOAT32, OF_FLOATS) ATTEND(BFLOAT16, OF_FLOATS)
    ATTEND(FLOAT8, OF_FLOATS) ATTEND(INT8, OF_FLOATS)
    ATTEND_TILE(INT4, OF_FLOATS, 1) ATTEND_TILE(INT4, OF_FLOATS, 4) ATTEND_TILE(INT4, OF_FLOATS, 8)
    ATTEND_TILE(INT5, OF_FLOATS, 1)
    for (int g = 0; s->kind == INT5 && size > 1 && g < size; g += 4) /* for the compiler's sake too */
        attend_tile(s, l, q + g, to + g, row, head, first + g, end + g, sink + g, slope + g,
                    selected ? selected + g : NULL, INT5, OF_FLOATS, 4);
    if (HAS_PAIRS) { ATTEND(BFLOAT16, OF_PAIRS) }
#if HAS_TILES
    if (products != OF_TILES) return;
    shape_attention((int)size);
    ATTEND_TILE(BFLOAT16, OF_TILES, 1)
    ATTEND_TILE(BFLOAT16, OF_TILES, 4)
    ATTEND_TILE(BFLOAT16, OF_TILES, 8)
    _tile_release();
#endif
}

/* Multiply what the heads of a column put out by the sigmoids of their gates. */
static void gate_heads(const void *context, int64_t column) {
    const Heads *t = context;
    const int64_t width = width_of(t->s), gates = t->s->query_heads * t->s->head_dim;
    const float *gate = t->qkv + (column + 1) * width - gates;
    float *out = t->out + column * gates;
    for (int64_t i = 0; i < gates; i += LANES)
        *(vf *)(out + i) /= 1.0f + exponentials(-*(const vf *)(gate + i));
}

static enum products products_of(const Step *s) {
    if (!s->rounds || s->kind != BFLOAT16) return OF_FLOATS;
#if HAS_TILES
    if (s->head_dim % SIDE == 0 && tiles_allowed()) return OF_TILES;
#endif
    return HAS_PAIRS ? OF_PAIRS : OF_FLOATS;
}

/* Attention of the new columns over the cache.  qkv: as rope_store left it; out: [columns,
 * query_heads * head_dim], or a latent for each head */
void attend(const Step *s, const Layer *l, const float *qkv, float *out) {
    check_step(s, l);
    int64_t seen = 0, tiles = s->tiles[s->rows];
    for (int64_t row = 0; row < s->rows; row++)
        seen += (s->tiles[row + 1] - s->tiles[row]) * (s->start[row] + 1);
    Heads context = {.s = s, .l = l, .qkv = (float *)qkv, .out = out,
                     .products = products_of(s)};
    share(attend_unit, &context, tiles * s->kv_heads, seen * TILE * s->kv_heads * s->head_dim,
          PRODUCTS_WORTH_A_THREAD);
    if (!s->output_gate) return;
    const int64_t columns = s->first[s->rows];
    share(gate_heads, &context, columns, columns * s->query_heads * s->head_dim, WORTH_A_THREAD);
}

typedef struct {
    const Step *s;
    const Layer *l;
    const float *queries, *weights;
    int64_t most;
    uint64_t *selected;
    int *failed;
} Select;

/* A number as an integer of the same order. */
static inline uint32_t ordered_bits(float x) {
    const uint32_t bits = float_bits(x + 0.0f); /* -0 becomes 0 */
    return bits >> 31 ? ~bits : bits | 1u << 31;
}

/* The largest number that is at most `most` of `keys`, where there are more than that. */
static uint32_t least_of_most(const uint32_t *keys, int64_t count, int64_t most) {
    uint32_t least = 0;
    for (int bit = 31; bit >= 0; bit--) {
        const uint32_t trial = least | 1u << bit;
        int64_t many = 0;
#pragma omp simd reduction(+ : many)
        for (int64_t i = 0; i < count; i++) many += keys[i] >= trial;
        if (many >= most) least = trial;
    }
    return least;
}

/* The index's scores of the columns [begin, begin + to) for one query, which has `query_heads` heads:
 *
 *     score = sum over heads h of weights[h] * max(0, queries[h] . key)
 *
 * queries: 8 heads together [.., head_dim, 8], then one by one; out: [BLOCK] */
INLINE void index_scores(const Step *s, const Layer *l, int64_t row, int64_t begin, int64_t to,
                         const float *queries, const float *weights, float *out, const int kind) {
    float scores[TILE * BLOCK] __attribute__((aligned(64)));
    int64_t h = 0;
    memset(out, 0, sizeof *out * BLOCK);
    while (h < s->query_heads) {
        const int T = s->query_heads - h >= TILE ? TILE : 1;
        for (int64_t j = 0; j < to; j += LANES) {
            const int64_t at = cache_column(s, row, 0, begin + j);
            const float *own = queries + h * s->head_dim;
            if (T == TILE) query_key_scores(s, l, &at, own, scores + j, kind, 0, TILE, 1);
            else query_key_scores(s, l, &at, own, scores + j, kind, 0, 1, 1);
            for (int g = 0; g < T; g++) {
                vf *sum = (vf *)(out + j), most = *(vf *)(scores + g * BLOCK + j);
                *sum = multiply_add(*sum, splat(weights[h + g]), larger(most, (vf){0}));
            }
        }
        h += T;
    }
}

/* The columns that the query of a new column may see: of those before it and its own the `most` of
 * the largest scores, of equal ones the earlier. */
static void select_unit(const void *context, int64_t at) {
    const Select *t = context;
    const Step *s = t->s;
    const int64_t row = sequence_of(s->first, s->rows, at), dim = s->head_dim;
    const int64_t heads = s->query_heads, whole = heads - heads % TILE;
    const int64_t first = s->padding[row], end = s->start[row] + at - s->first[row] + 1;
    const float *q = t->queries + at * (heads + 1) * dim;
    uint64_t *selected = t->selected + at * s->words;
    memset(selected, 0, sizeof *selected * (size_t)s->words);
    if (end - first <= t->most) {
        for (int64_t i = first; i < end; i++) selected[i / BLOCK] |= (uint64_t)1 << i % BLOCK;
        return;
    }
    float *queries = malloc(sizeof *queries * (size_t)(heads * dim));
    uint32_t *keys = malloc(sizeof *keys * (size_t)(end - first));
    if (!queries || !keys) {
        free(queries), free(keys);
        __atomic_store_n(t->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    for (int64_t h = 0; h < heads; h++) {
        const int64_t group = h < whole ? h / TILE * TILE : h, T = h < whole ? TILE : 1;
        for (int64_t i = 0; i < dim; i++)
            queries[group * dim + i * T + h - group] = q[h * dim + i];
    }
    for (int64_t begin = first - first % BLOCK; begin < end; begin += BLOCK) {
        float scores[BLOCK] __attribute__((aligned(64)));
        const int64_t to = end - begin < BLOCK ? end - begin : BLOCK;
        const float *weights = t->weights + at * heads;
#define SCORES(KIND)     if (s->kind == KIND) index_scores(s, t->l, row, begin, to, queries, weights, scores, KIND);
        SCORES(FLOAT32) SCORES(BFLOAT16) SCORES(FLOAT8) SCORES(INT8)
#undef SCORES
        for (int64_t i = begin < first ? first - begin : 0; i < to; i++)
            keys[begin + i - first] = ordered_bits(scores[i]);
    }
    const uint32_t least = least_of_most(keys, end - first, t->most);
    int64_t equal = t->most; /* columns of that score that are chosen */
    for (int64_t i = 0; i < end - first; i++) equal -= keys[i] > least;
    for (int64_t i = 0; i < end - first; i++)
        if (keys[i] > least || (keys[i] == least && equal-- > 0))
            selected[(first + i) / BLOCK] |= (uint64_t)1 << (first + i) % BLOCK;
    free(queries), free(keys);
}

/* Choose the columns that the queries of new columns may see.  s, l: the index's heads, and its
 * keys in the place of a layer's; queries: [columns, query_heads + 1, head_dim] as rope_store left
 * them; weights: [columns, query_heads]; selected: [columns, s->words], written. Returns 1 where
 * there was no memory. */
int select_columns(const Step *s, const Layer *l, const float *queries, const float *weights,
                   int64_t most, uint64_t *selected) {
    check_step(s, l);
    CHECK(queries && weights && selected && most > 0 && s->words > 0 && s->kv_heads == 1);
    CHECK(s->latent == s->head_dim && s->kind < INT4);
    int failed = 0;
    int64_t seen = 0;
    for (int64_t row = 0; row < s->rows; row++) {
        CHECK(s->start[row] + s->first[row + 1] - s->first[row] <= s->words * BLOCK);
        seen += (s->first[row + 1] - s->first[row]) * (s->start[row] + 1);
    }
    Select context = {s, l, queries, weights, most, selected, &failed};
    share(select_unit, &context, s->first[s->rows], seen * s->query_heads * s->head_dim,
          PRODUCTS_WORTH_A_THREAD);
    return failed;
}

typedef struct {
    const Step *s;
    const DeltaNet *d;
    float *x;            /* [columns, channels + value_heads * value_dim] */
    const float *scores; /* [columns, 2 value_heads] */
    float *out;          /* [columns, value_heads, value_dim] */
} DeltaStep;

/* The new columns of a sequence. Its state begins with zeros where no text lies before them. */
typedef struct {
    int64_t row, first, count, skip, fresh, slot; /* skip: the first of them, which are padding */
} Columns;

static inline Columns columns_of(const Step *s, int64_t row) {
    int64_t count = s->first[row + 1] - s->first[row], skip = s->padding[row] - s->start[row];
    skip = skip < 0 ? 0 : skip > count ? count : skip;
    return (Columns){row, s->first[row], count, skip, s->start[row] <= s->padding[row],
                     s->slots[row]};
}

static inline int64_t channels_of(const DeltaNet *d) {
    return 2 * d->key_heads * d->key_dim + d->value_heads * d->value_dim;
}

/* The causal convolution of a head of queries, keys or values over the columns of a sequence, in
 * place, and silu; queries and keys are then divided by their length, queries by key_dim^0.5 too. */
static void convolve_unit(const void *context, int64_t unit) {
    const DeltaStep *t = context;
    const DeltaNet *d = t->d;
    const int64_t heads = 2 * d->key_heads + d->value_heads, head = unit % heads;
    const int64_t before = d->kernel - 1, channels = channels_of(d);
    const int64_t width = channels + d->value_heads * d->value_dim;
    const int64_t keys = head < 2 * d->key_heads, dim = keys ? d->key_dim : d->value_dim;
    const int64_t from = keys ? head * dim
                              : 2 * d->key_heads * d->key_dim + (head - 2 * d->key_heads) * dim;
    const Columns c = columns_of(t->s, unit / heads);
    float *x = t->x + c.first * width + from;
    float *window = before ? d->inputs + c.slot * before * channels + from : NULL;
    const float *weight = d->convolution + from;
    float last[(MAX_KERNEL - 1) * MAX_HEAD_DIM]; /* the window of the next step */
    if (c.skip == c.count) return;
    /* A column's input is one of this step, one of the window before it, or none: 0. */
#define INPUT(COLUMN) \
    ((COLUMN) >= c.skip ? x + (COLUMN) * width \
                        : c.fresh ? NULL : window + (before + (COLUMN)) * channels)
    for (int64_t j = 0; j < before; j++) {
        const float *input = INPUT(c.count - before + j);
        if (input) memcpy(last + j * dim, input, sizeof *last * (size_t)dim);
        else memset(last + j * dim, 0, sizeof *last * (size_t)dim);
    }
    /* from the last column on: what it reads lies before it, and is no output yet */
    for (int64_t column = c.count - 1; column >= c.skip; column--) {
        float *own = x + column * width;
        vf squares = {0};
        for (int64_t i = 0; i < dim; i += LANES) {
            vf sum = {0};
            for (int64_t j = 0; j <= before; j++) {
                const float *input = INPUT(column - before + j);
                if (input)
                    sum = multiply_add(sum, *(const vf *)(input + i),
                                       *(const vf *)(weight + j * channels + i));
            }
            sum = activate(sum, SILU);
            squares = multiply_add(squares, sum, sum);
            *(vf *)(own + i) = sum;
        }
        if (!keys) continue;
        float inverse = 1.0f / sqrtf(sum_of_lanes(squares) + 1e-6f);
        if (head < d->key_heads) inverse /= sqrtf((float)d->key_dim);
        for (int64_t i = 0; i < dim; i += LANES) *(vf *)(own + i) *= inverse;
    }
#undef INPUT
    for (int64_t j = 0; j < before; j++)
        memcpy(window + j * channels, last + j * dim, sizeof *last * (size_t)dim);
}

/* The gated delta rule on W registers of values of a head, over the columns of a sequence:
 *
 *     S <- exp(-rate * softplus(a + shift)) S;    S <- S + k (sigmoid(b) (v - S'k))';    out = S'q
 *
 * S [key_dim, value_dim], a and b the head's two scores. No value changes another one's sums. */
INLINE void delta_tile(const DeltaStep *t, const Columns *c, int64_t head, int64_t from,
                       const int W) {
    const DeltaNet *d = t->d;
    const int64_t dim = d->value_dim, keys = d->key_dim, channels = channels_of(d);
    const int64_t width = channels + d->value_heads * dim, all = d->key_heads * keys;
    float *state = d->states + (c->slot * d->value_heads + head) * keys * dim + from;
    for (int64_t column = c->first + c->skip; column < c->first + c->count; column++) {
        const float *x = t->x + column * width, *scores = t->scores + column * 2 * d->value_heads;
        const float *q = x + head / (d->value_heads / d->key_heads) * keys, *k = q + all;
        const float *v = x + 2 * all + head * dim + from;
        const float a = scores[d->value_heads + head] + d->shift[head];
        const float decay = expf(-d->rate[head] * (a > 20 ? a : log1pf(expf(a))));
        const float counts = 1 / (1 + expf(-scores[head]));
        vf known[4], change[4], out[4];
        for (int w = 0; w < W; w++) known[w] = out[w] = (vf){0};
        for (int64_t i = 0; i < keys; i++) {
            const vf key = splat(k[i]);
#pragma GCC unroll 4
            for (int w = 0; w < W; w++)
                known[w] = multiply_add(known[w], key, *(vf *)(state + i * dim + w * LANES));
        }
        for (int w = 0; w < W; w++)
            change[w] = counts * (*(const vf *)(v + w * LANES) - decay * known[w]);
        for (int64_t i = 0; i < keys; i++) {
            const vf key = splat(k[i]), query = splat(q[i]);
#pragma GCC unroll 4
            for (int w = 0; w < W; w++) {
                vf *own = (vf *)(state + i * dim + w * LANES);
                *own = multiply_add(*own * decay, key, change[w]);
                out[w] = multiply_add(out[w], query, *own);
            }
        }
        for (int w = 0; w < W; w++)
            *(vf *)(t->out + (column * d->value_heads + head) * dim + from + w * LANES) = out[w];
    }
}

/* The gated delta rule of a value head over the columns of a sequence, then its norm and its gate. */
static void delta_unit(const void *context, int64_t unit) {
    const DeltaStep *t = context;
    const DeltaNet *d = t->d;
    const int64_t head = unit % d->value_heads, dim = d->value_dim, channels = channels_of(d);
    const int64_t outs = d->value_heads * dim;
    const Columns c = columns_of(t->s, unit / d->value_heads);
    for (int64_t column = 0; column < c.skip; column++)
        memset(t->out + (c.first + column) * outs + head * dim, 0, sizeof *t->out * (size_t)dim);
    if (c.skip == c.count) return;
    if (c.fresh)
        memset(d->states + (c.slot * d->value_heads + head) * d->key_dim * dim, 0,
               sizeof *d->states * (size_t)(d->key_dim * dim));
    int64_t from = 0;
    for (; from + 4 * LANES <= dim; from += 4 * LANES) delta_tile(t, &c, head, from, 4);
    for (; from < dim; from += LANES) delta_tile(t, &c, head, from, 1);
    for (int64_t column = c.first + c.skip; column < c.first + c.count; column++) {
        const float *z = t->x + column * (channels + outs) + channels + head * dim;
        float *out = t->out + column * outs + head * dim;
        normalize(out, d->norm, out, dim, t->s->eps);
        for (int64_t i = 0; i < dim; i += LANES)
            *(vf *)(out + i) *= activate(*(const vf *)(z + i), SILU);
    }
}

/* Lightning attention on W registers of values of a head, over the columns of a sequence:
 *
 *     S <- exp(-rate) S + k v';    out = S'q
 *
 * x has queries, keys and values behind silu. */
INLINE void lightning_tile(const DeltaStep *t, const Columns *c, int64_t head, int64_t from,
                           const int W) {
    const DeltaNet *d = t->d;
    const int64_t dim = d->value_dim, keys = d->key_dim, channels = channels_of(d);
    const int64_t width = channels + d->value_heads * dim, all = d->key_heads * keys;
    const float decay = expf(-d->rate[head]);
    float *state = d->states + (c->slot * d->value_heads + head) * keys * dim + from;
    for (int64_t column = c->first + c->skip; column < c->first + c->count; column++) {
        const float *x = t->x + column * width;
        const float *q = x + head * keys, *k = q + all, *v = x + 2 * all + head * dim + from;
        vf value[4], out[4];
        for (int w = 0; w < W; w++) value[w] = *(const vf *)(v + w * LANES), out[w] = (vf){0};
        for (int64_t i = 0; i < keys; i++) {
            const vf key = splat(k[i]), query = splat(q[i]);
#pragma GCC unroll 4
            for (int w = 0; w < W; w++) {
                vf *own = (vf *)(state + i * dim + w * LANES);
                *own = multiply_add(*own * decay, key, value[w]);
                out[w] = multiply_add(out[w], query, *own);
            }
        }
        for (int w = 0; w < W; w++)
            *(vf *)(t->out + (column * d->value_heads + head) * dim + from + w * LANES) = out[w];
    }
}

/* The activation of a column's queries, keys and values. */
static void lightning_activate(const void *context, int64_t column) {
    const DeltaStep *t = context;
    const int64_t channels = channels_of(t->d), outs = t->d->value_heads * t->d->value_dim;
    float *x = t->x + column * (channels + outs);
    for (int64_t i = 0; i < channels; i += LANES) *(vf *)(x + i) = activate(*(vf *)(x + i), SILU);
}

/* Lightning attention of a head over the columns of a sequence. */
static void lightning_unit(const void *context, int64_t unit) {
    const DeltaStep *t = context;
    const DeltaNet *d = t->d;
    const int64_t head = unit % d->value_heads, dim = d->value_dim, outs = d->value_heads * dim;
    const Columns c = columns_of(t->s, unit / d->value_heads);
    for (int64_t column = 0; column < c.skip; column++)
        memset(t->out + (c.first + column) * outs + head * dim, 0, sizeof *t->out * (size_t)dim);
    if (c.skip == c.count) return;
    if (c.fresh)
        memset(d->states + (c.slot * d->value_heads + head) * d->key_dim * dim, 0,
               sizeof *d->states * (size_t)(d->key_dim * dim));
    int64_t from = 0;
    for (; from + 4 * LANES <= dim; from += 4 * LANES) lightning_tile(t, &c, head, from, 4);
    for (; from < dim; from += LANES) lightning_tile(t, &c, head, from, 1);
}

/* The norm of all heads of a column, times the sigmoid of their gates. */
static void lightning_gate(const void *context, int64_t column) {
    const DeltaStep *t = context;
    const DeltaNet *d = t->d;
    const int64_t channels = channels_of(d), outs = d->value_heads * d->value_dim;
    const float *gate = t->x + column * (channels + outs) + channels;
    float *out = t->out + column * outs;
    normalize(out, d->norm, out, outs, d->eps);
    for (int64_t i = 0; i < outs; i += LANES)
        *(vf *)(out + i) /= 1.0f + exponentials(-*(const vf *)(gate + i));
}

/* A gated delta net on the new columns, whose states change; or lightning attention.  x: [columns, channels and output
 * gates], changed; scores: [columns, 2 value_heads]; out: [columns, value_heads * value_dim] */
void delta_rule(const Step *s, const Layer *l, float *x, const float *scores, float *out) {
    const DeltaNet *d = l->delta_net;
    CHECK(d && x && out && s->slots && s->padding && s->first && s->start);
    CHECK(d->rate && d->norm && d->states);
    CHECK(d->lightning ? d->kernel == 1 && d->key_heads == d->value_heads
                       : scores && d->convolution && d->shift);
    CHECK(d->kernel == 1 || d->inputs);
    CHECK(d->key_heads > 0 && d->value_heads > 0 && d->value_heads % d->key_heads == 0);
    CHECK(d->key_dim > 0 && d->key_dim <= MAX_HEAD_DIM && d->key_dim % LANES == 0);
    CHECK(d->value_dim > 0 && d->value_dim <= MAX_HEAD_DIM && d->value_dim % LANES == 0);
    CHECK(d->kernel > 0 && d->kernel <= MAX_KERNEL && s->rows > 0);
    for (int64_t row = 0; row < s->rows; row++)
        CHECK(s->first[row + 1] > s->first[row] && s->slots[row] >= 0 && s->start[row] >= 0);
    DeltaStep context = {s, d, x, scores, out};
    const int64_t heads = 2 * d->key_heads + d->value_heads, columns = s->first[s->rows];
    if (d->lightning) {
        const int64_t outs = d->value_heads * d->value_dim;
        share(lightning_activate, &context, columns, columns * channels_of(d), WORTH_A_THREAD);
        share(lightning_unit, &context, s->rows * d->value_heads, columns * outs * d->key_dim * 2,
              PRODUCTS_WORTH_A_THREAD);
        share(lightning_gate, &context, columns, columns * outs, WORTH_A_THREAD);
        return;
    }
    share(convolve_unit, &context, s->rows * heads, columns * channels_of(d) * d->kernel,
          WORTH_A_THREAD);
    share(delta_unit, &context, s->rows * d->value_heads,
          columns * d->value_heads * d->key_dim * d->value_dim * 2, PRODUCTS_WORTH_A_THREAD);
}

typedef struct {
    const float *x;
    const int64_t *order;
    float *room;
    int64_t width;
} InOrder;

static void order_row(const void *context, int64_t row) {
    const InOrder *t = context;
    for (int64_t i = 0; i < t->width; i++)
        t->room[row * t->width + i] = t->x[row * t->width + t->order[i]];
}

/* The inputs of a product [rows, its columns] in the order of its columns, written to `room` where
 * that is another order. */
static const float *in_order(const Product *p, const float *x, int64_t rows, float *room) {
    if (!p->order) return x;
    int64_t width = p->weight->columns;
    for (int64_t i = 0; i < width; i++) CHECK(p->order[i] >= 0 && p->order[i] < width);
    InOrder context = {x, p->order, room, width};
    share(order_row, &context, rows, rows * width, WORTH_A_THREAD);
    return room;
}

/* All layers on x [columns, hidden]; `delta` is left to add. The other pointers are room for the
 * parts of a layer, `ordered` for the widest input of a product with an order. Returns 1 where
 * there was no memory. */
int run(const Step *s, const Layer *layers, int64_t many, float *x, float *norm, float *qkv,
        float *scores, float *heads, float *up, float *gated, float *ordered, float *delta) {
    int64_t n = s->first[s->rows], hidden = layers->qkv.weight->columns, failed = 0;
    for (const Layer *l = layers; l < layers + many; l++) {
        const DeltaNet *d = l->delta_net;
        if (!d) check_step(s, l);
        CHECK(l->qkv.weight->columns == hidden);
        CHECK(!s->latent); /* its products are called one by one */
        const int64_t outs = d ? d->value_heads * d->value_dim : s->query_heads * s->head_dim;
        CHECK(l->qkv.weight->rows == (d ? channels_of(d) + outs : width_of(s)));
        CHECK(!d || (d->scores.weight->rows == 2 * d->value_heads &&
                     d->scores.weight->columns == hidden));
        CHECK(l->output.weight->rows == hidden);
        CHECK(l->output.weight->columns == outs);
        (void)outs;
        if (l->experts) continue;
        CHECK(l->up.weight->columns == hidden);
        CHECK(l->up.weight->rows == (s->gated ? 2 : 1) * l->down.weight->columns);
        CHECK(l->down.weight->rows == hidden);
    }
#define LINEAR(PRODUCT, X, Y) \
    failed |= l->PRODUCT.call(l->PRODUCT.weight, in_order(&l->PRODUCT, X, n, ordered), n, \
                              l->PRODUCT.bias, Y, 0)
#define ADD_NORM(DELTA, AFTER, BEFORE, LATE) \
    add_norm(x, DELTA, AFTER, BEFORE, norm, n, hidden, s->eps, s->centered, s->residual, LATE, 1.0f)
    CHECK(!(s->post && s->parallel));
    if (s->post) norm = x;
    for (const Layer *l = layers; l < layers + many && !failed; l++) {
        /* what the MLP of the layer before adds is added here: one pass over x instead of two */
        float *before = l == layers ? NULL : delta;
        const Norm after = l == layers ? (Norm){0} : l[-1].gated_norm;
        ADD_NORM(before, s->post ? (Norm){0} : after, s->post ? after : l->attention_norm, 0);
        LINEAR(qkv, norm, qkv);
        if (l->delta_net) {
            LINEAR(delta_net->scores, norm, scores);
            delta_rule(s, l, qkv, scores, heads);
        } else {
            rope_store(s, l, qkv);
            attend(s, l, qkv, heads);
        }
        LINEAR(output, heads, delta);
        ADD_NORM(delta, l->attended_norm, l->mlp_norm, s->parallel);
        if (l->experts) {
            failed |= mixture(l->experts, norm, n, delta);
            continue;
        }
        LINEAR(up, norm, up);
        gate(up, gated, n, l->down.weight->columns, s->activation, s->gated, s->alpha, s->limit);
        LINEAR(down, gated, delta);
    }
    return (int)failed;
}

/* Give back the threads that loops of the calling thread have used; its next loop makes new ones.
 * Returns 0. */
int release_threads(void) { return omp_pause_resource_all(omp_pause_soft); }

/* The places of the structures' fields, which Python compares with its own; field NULL: the end of
 * a structure, structure NULL: the end of the list. */
struct field { const char *structure, *field; int64_t offset, bytes; };
#define FIELD(STRUCTURE, FIELD) \
    {#STRUCTURE, #FIELD, offsetof(STRUCTURE, FIELD), sizeof(((STRUCTURE *)0)->FIELD)}
#define END(STRUCTURE) {#STRUCTURE, NULL, sizeof(STRUCTURE), 0}

const struct field *structure_fields(void) {
    static const struct field fields[] = {
        FIELD(Norm, weight), FIELD(Norm, bias), END(Norm),
        FIELD(Product, weight), FIELD(Product, bias), FIELD(Product, call), FIELD(Product, order),
        END(Product), FIELD(Plain, weight), FIELD(Plain, data), FIELD(Plain, kind),
        FIELD(Plain, narrow), END(Plain), FIELD(Experts, router), FIELD(Experts, shared_up),
        FIELD(Experts, shared_down), FIELD(Experts, shared_score), FIELD(Experts, up),
        FIELD(Experts, down), FIELD(Experts, up_bias), FIELD(Experts, down_bias),
        FIELD(Experts, linears), FIELD(Experts, correction), FIELD(Experts, experts),
        FIELD(Experts, chosen), FIELD(Experts, scores), FIELD(Experts, groups),
        FIELD(Experts, chosen_groups), FIELD(Experts, counted), FIELD(Experts, normalized),
        FIELD(Experts, scales_inputs), FIELD(Experts, activation),
        FIELD(Experts, gated), FIELD(Experts, near), FIELD(Experts, least), FIELD(Experts, factor),
        FIELD(Experts, alpha), FIELD(Experts, limit), END(Experts),
        FIELD(DeltaNet, scores), FIELD(DeltaNet, convolution), FIELD(DeltaNet, rate),
        FIELD(DeltaNet, shift), FIELD(DeltaNet, norm), FIELD(DeltaNet, inputs),
        FIELD(DeltaNet, states), FIELD(DeltaNet, key_heads), FIELD(DeltaNet, value_heads),
        FIELD(DeltaNet, key_dim), FIELD(DeltaNet, value_dim), FIELD(DeltaNet, kernel),
        FIELD(DeltaNet, lightning), FIELD(DeltaNet, eps), END(DeltaNet),
        FIELD(Layer, keys), FIELD(Layer, values), FIELD(Layer, key_scales),
        FIELD(Layer, value_scales), FIELD(Layer, key_steps), FIELD(Layer, value_steps),
        FIELD(Layer, cos), FIELD(Layer, sin), FIELD(Layer, sinks), FIELD(Layer, q_norm),
        FIELD(Layer, k_norm), FIELD(Layer, attention_norm), FIELD(Layer, attended_norm), FIELD(Layer, mlp_norm),
        FIELD(Layer, gated_norm), FIELD(Layer, qkv), FIELD(Layer, output), FIELD(Layer, up),
        FIELD(Layer, down), FIELD(Layer, experts), FIELD(Layer, delta_net),
        FIELD(Layer, window), FIELD(Layer, chunk), FIELD(Layer, rotary_dim),
        FIELD(Layer, floor_scale), FIELD(Layer, attn_scale), END(Layer),
        FIELD(Step, padding), FIELD(Step, first), FIELD(Step, start), FIELD(Step, table),
        FIELD(Step, tiles), FIELD(Step, slots),
        FIELD(Step, selected), FIELD(Step, words), FIELD(Step, slopes),
        FIELD(Step, rounded_alibi), FIELD(Step, rows),
        FIELD(Step, block), FIELD(Step, width),
        FIELD(Step, query_heads), FIELD(Step, kv_heads), FIELD(Step, head_dim), FIELD(Step, kind),
        FIELD(Step, latent), FIELD(Step, output_gate), FIELD(Step, whole_norms), FIELD(Step, centered), FIELD(Step, parallel),
        FIELD(Step, post),
        FIELD(Step, activation), FIELD(Step, gated), FIELD(Step, rounds), FIELD(Step, scale),
        FIELD(Step, eps), FIELD(Step, cap), FIELD(Step, clip), FIELD(Step, residual), FIELD(Step, alpha),
        FIELD(Step, limit), END(Step),
        {NULL, NULL, 0, 0},
    };
    return fields;
}
