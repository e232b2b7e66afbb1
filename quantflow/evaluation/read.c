/* What kernels that are bound by memory are compared with, for CPUs with AVX512. */

#include <immintrin.h>
#include <stdint.h>

/* Read memory with every thread and do nothing else. Returns a sum, so that the reads are not left out. */
int64_t quantflow_read(const uint8_t *data, int64_t bytes) {
    int64_t sum = 0;
    _Pragma("omp parallel for schedule(static) reduction(+ : sum)") for (int64_t part = 0; part < bytes / 4096; part++) {
        __m512i acc[4] = {0};
        for (int64_t i = 0; i < 4096; i += 256)
            _Pragma("GCC unroll 4") for (int r = 0; r < 4; r++)
                acc[r] = _mm512_add_epi32(acc[r], _mm512_loadu_si512(data + part * 4096 + i + r * 64));
        sum += _mm512_reduce_add_epi32(_mm512_add_epi32(_mm512_add_epi32(acc[0], acc[1]), _mm512_add_epi32(acc[2], acc[3])));
    }
    return sum;
}
