/* What the instructions of AMX do, in C, under the names that immintrin.h gives them: for tests on
   CPUs without it. Source: Intel's "Software Developer's Manual", volume 2, LDTILECFG to TILEZERO.

   Each thread has its tiles. A tile that is used before its shape is known ends the process, as the
   instruction would; so does one whose shapes do not fit. */
static _Thread_local struct {
    uint8_t rows;
    uint16_t bytes;
    uint8_t data[16][64];
} emulated[8];

static int tiles_allowed(void) { return 1; }

static void emulate_config(const void *memory) {
    const uint8_t *config = memory;
    for (int i = 0; i < 8; i++) {
        memcpy(&emulated[i].bytes, config + 16 + 2 * i, 2);
        emulated[i].rows = config[48 + i];
        if (config[0] != 1 || emulated[i].rows > 16 || emulated[i].bytes > 64) abort();
        memset(emulated[i].data, 0, sizeof emulated[i].data);
    }
}

static void emulate_release(void) { memset(emulated, 0, sizeof emulated); }

static void emulate_zero(int tile) {
    if (!emulated[tile].rows) abort();
    memset(emulated[tile].data, 0, sizeof emulated[tile].data);
}

static void emulate_load(int tile, const void *from, int64_t stride) {
    emulate_zero(tile);
    for (int i = 0; i < emulated[tile].rows; i++)
        memcpy(emulated[tile].data[i], (const char *)from + i * stride, emulated[tile].bytes);
}

static void emulate_store(int tile, void *to, int64_t stride) {
    if (!emulated[tile].rows) abort();
    for (int i = 0; i < emulated[tile].rows; i++)
        memcpy((char *)to + i * stride, emulated[tile].data[i], emulated[tile].bytes);
}

/* sum [m, n] += a [m, 4 k] b [k, n, 4]; a's bytes are signed, or with `is_unsigned` not. */
static void emulate_multiply(int sum, int a, int b, int is_unsigned) {
    if (emulated[sum].rows != emulated[a].rows || emulated[sum].bytes != emulated[b].bytes
        || emulated[a].bytes != 4 * emulated[b].rows)
        abort();
    for (int m = 0; m < emulated[a].rows; m++)
        for (int n = 0; n < emulated[b].bytes / 4; n++) {
            uint32_t total;
            memcpy(&total, &emulated[sum].data[m][4 * n], 4);
            for (int k = 0; k < emulated[a].bytes; k++) {
                int x = is_unsigned ? emulated[a].data[m][k] : (int8_t)emulated[a].data[m][k];
                total += (uint32_t)(x * (int8_t)emulated[b].data[k / 4][4 * n + k % 4]);
            }
            memcpy(&emulated[sum].data[m][4 * n], &total, 4);
        }
}

/* sum [m, n] += a [m, 2 k] b [k, n, 2] of bfloat16: first the products of even columns and those of
 * odd ones, each sum rounded, then both sums together. Subnormals, which are zeros there, are not
 * looked for. */
static void emulate_multiply_bf16(int sum, int a, int b) {
    if (emulated[sum].rows != emulated[a].rows || emulated[sum].bytes != emulated[b].bytes
        || emulated[a].bytes != 4 * emulated[b].rows)
        abort();
    for (int m = 0; m < emulated[a].rows; m++)
        for (int n = 0; n < emulated[b].bytes / 4; n++) {
            float half[2] = {0, 0}, total;
            for (int k = 0; k < emulated[a].bytes / 2; k++) {
                uint32_t x = 0, y = 0; /* bfloat16 is the upper half of a float */
                memcpy((char *)&x + 2, &emulated[a].data[m][2 * k], 2);
                memcpy((char *)&y + 2, &emulated[b].data[k / 2][4 * n + k % 2 * 2], 2);
                float factor[2];
                memcpy(factor, &x, 4), memcpy(factor + 1, &y, 4);
                half[k % 2] = fmaf(factor[0], factor[1], half[k % 2]);
            }
            memcpy(&total, &emulated[sum].data[m][4 * n], 4);
            total += half[0] + half[1];
            memcpy(&emulated[sum].data[m][4 * n], &total, 4);
        }
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbusd
#undef _tile_dpbssd
#undef _tile_dpbf16ps
#define _tile_loadconfig emulate_config
#define _tile_release emulate_release
#define _tile_zero emulate_zero
#define _tile_loadd emulate_load
#define _tile_stored emulate_store
#define _tile_dpbusd(SUM, A, B) emulate_multiply(SUM, A, B, 1)
#define _tile_dpbssd(SUM, A, B) emulate_multiply(SUM, A, B, 0)
#define _tile_dpbf16ps emulate_multiply_bf16
