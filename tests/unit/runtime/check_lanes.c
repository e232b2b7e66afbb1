/* What decode.c does with registers, beside plain C: conversions of all codes to the bit, products
   with one rounding, sums in their order, products of integers, and
   `product` beside sums in double. For CPUs on which no Python runs here; test_arm.py runs it. */
#include "decode.c"

#define EXPECT(CONDITION) \
    do { if (!(CONDITION)) printf("line %d: not %s\n", __LINE__, #CONDITION), exit(1); } while (0)

static float drawn(void) { /* from -1 to 1 */
    static uint32_t state = 1;
    state = state * 1664525 + 1013904223;
    return (float)(int32_t)state * 0x1p-31f;
}

static void conversions(void) {
    uint16_t halves[LANES];
    uint8_t bytes[LANES] __attribute__((aligned(16)));
    for (int code = 0; code < 1 << 16; code += LANES) {
        for (int i = 0; i < LANES; i++) halves[i] = (uint16_t)(code + i);
        vf wide = load(halves, 0, BFLOAT16);
        for (int i = 0; i < LANES; i++)
            EXPECT(float_bits(wide[i]) == (uint32_t)(code + i) << 16);
    }
    for (int code = 0; code < 256; code += LANES) {
        for (int i = 0; i < LANES; i++) bytes[i] = (uint8_t)(code + i);
        vf integers = load(bytes, 0, INT8), floats = load(bytes, 0, FLOAT8);
        for (int i = 0; i < LANES; i++) {
            int exponent = bytes[i] >> 3 & 15, mantissa = bytes[i] & 7;
            float size = exponent ? ldexpf((float)(8 + mantissa), exponent - 10)
                                  : ldexpf((float)mantissa, -9);
            EXPECT(integers[i] == (int8_t)bytes[i]);
            if ((bytes[i] & 127) == 127) EXPECT(isnan(floats[i]));
            else EXPECT(floats[i] == (bytes[i] & 128 ? -size : size));
        }
    }
}

static void sums(void) {
    for (int turn = 0; turn < 1000; turn++) {
        float x[4][LANES] __attribute__((aligned(64)));
        for (int r = 0; r < 4; r++) for (int i = 0; i < LANES; i++) x[r][i] = drawn();
        const vf *of = (const vf *)x;
        vf fused = multiply_add(of[0], of[1], of[2]);
        for (int i = 0; i < LANES; i++) {
            EXPECT(fused[i] == fmaf(x[1][i], x[2][i], x[0][i]));
            EXPECT(larger(of[0], of[1])[i] == fmaxf(x[0][i], x[1][i]));
        }
        v4 four = sums_of_lanes(of[0], of[1], of[2], of[3]);
        for (int r = 0; r < 4; r++) EXPECT(four[r] == sum_of_lanes(of[r]));
        vf powers = exponentials(of[3] * 80.0f);
        for (int i = 0; i < LANES; i++)
            EXPECT(fabs(powers[i] / exp((double)(x[3][i] * 80.0f)) - 1) < 3e-7);
    }
}

static void products(void) {
    enum { ROWS = 13, IN = 77, OUTS = 19 };
    static float x[ROWS * IN], w[OUTS * IN], bias[OUTS], out[ROWS * OUTS];
    static uint16_t narrow_x[ROWS * IN], narrow_w[OUTS * IN];
    for (int i = 0; i < ROWS * IN; i++) narrow_x[i] = to_bfloat(x[i] = drawn());
    for (int i = 0; i < OUTS * IN; i++) narrow_w[i] = to_bfloat(w[i] = drawn());
    for (int i = 0; i < OUTS; i++) bias[i] = drawn();
    for (int turn = 0; turn < 3; turn++) {
        product(turn > 1 ? (void *)narrow_x : x, turn ? (void *)narrow_w : w, bias, out, ROWS, IN,
                OUTS, turn > 1 ? BFLOAT16 : FLOAT32, turn ? BFLOAT16 : FLOAT32);
        for (int r = 0; r < ROWS; r++)
            for (int o = 0; o < OUTS; o++) {
                double sum = bias[o];
                for (int i = 0; i < IN; i++) {
                    float a = turn > 1 ? bits_float((uint32_t)narrow_x[r * IN + i] << 16)
                                       : x[r * IN + i];
                    float b = turn ? bits_float((uint32_t)narrow_w[o * IN + i] << 16)
                                   : w[o * IN + i];
                    sum += (double)a * b;
                }
                EXPECT(fabs(out[r * OUTS + o] - sum) < 1e-5);
            }
    }
}

static void integers(void) { /* of the caches of 4 and 5 bits */
    for (int turn = 0; turn < 1000; turn++) {
        uint8_t codes[4 * LANES] __attribute__((aligned(64))), bits[16];
        int8_t four[4];
        int32_t word;
        for (int i = 0; i < 4 * LANES; i++) codes[i] = (uint8_t)(15.5f + 16 * drawn());
        for (int i = 0; i < 16; i++) bits[i] = (uint8_t)(127.5f + 128 * drawn());
        for (int i = 0; i < 4; i++) four[i] = (int8_t)(127.9f * drawn());
        memcpy(&word, four, 4);
        vi sum = int4_dot((vi){0} + turn, *(const vu *)codes, word);
        for (int i = 0; i < LANES; i++) {
            int expected = turn;
            for (int k = 0; k < 4; k++) expected += codes[4 * i + k] * four[k];
            EXPECT(sum[i] == expected);
        }
        for (int from = 0; from < 96; from += LANES) {
            vu fifths = int4_fifth_bits(bits, from);
            for (int i = 0; i < LANES; i++)
                for (int k = 0; k < 4; k++)
                    EXPECT((fifths[i] >> 8 * k & 255) ==
                           (bits[i % 4 * 4 + k] >> (from + i) % 32 / 4 & 1u) << 4);
        }
    }
}

int main(void) {
    conversions();
    integers();
    sums();
    products();
    return 0;
}
