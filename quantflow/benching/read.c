/* A plain read of memory, which kernels that are bound by memory are compared with. */

#include <stdint.h>

#ifdef __AVX512F__
typedef int32_t lanes __attribute__((vector_size(64)));
#else
typedef int32_t lanes __attribute__((vector_size(32)));
#endif

/* Read memory with every thread and do nothing else. Returns a sum, so that the compiler does not
 * leave the reads out. */
int64_t quantflow_read(const uint8_t *data, int64_t bytes) {
    int64_t sum = 0;
    _Pragma("omp parallel for schedule(static) reduction(+ : sum)")
    for (int64_t part = 0; part < bytes / 4096; part++) {
        lanes acc[4] = {0};
        for (int64_t i = 0; i < 4096; i += 4 * sizeof(lanes))
            _Pragma("GCC unroll 4") for (int r = 0; r < 4; r++)
                acc[r] += *(const lanes *)(data + part * 4096 + i + r * sizeof(lanes));
        lanes all = acc[0] + acc[1] + acc[2] + acc[3];
        for (int i = 0; i < (int)(sizeof(lanes) / 4); i++) sum += all[i];
    }
    return sum;
}
