/* A program that multiplies with one weight, for CPUs on which no Python runs here: the weight, its
   tensors and the inputs are read from the standard input, the outputs are written to the standard
   output. test_arm.py writes and reads them. */
#include "kernels.c"

#include <omp.h>

static void take(void *to, size_t bytes) {
    if (fread(to, 1, bytes, stdin) != bytes) abort();
}

/* A tensor: its bytes as int64, then they; NULL where it has none. */
static void *tensor(void) {
    int64_t bytes;
    take(&bytes, sizeof bytes);
    if (!bytes) return NULL;
    void *read = aligned_alloc(64, (size_t)(bytes + 63) / 64 * 64);
    if (!read) abort();
    take(read, (size_t)bytes);
    return read;
}

int main(void) {
    struct weight w;
    int64_t threads, tokens, bf16;
    take(&w, sizeof w);
    w.data = tensor();
    w.scale = tensor();
    w.zero = tensor();
    w.offset = tensor();
    take(&threads, sizeof threads);
    take(&tokens, sizeof tokens);
    take(&bf16, sizeof bf16);
    const void *x = tensor(), *bias = tensor();
    const size_t many = (size_t)(tokens * w.rows), wide = bf16 ? 2 : 4;
    void *y = calloc(many, wide);
    omp_set_num_threads((int)threads);
    if (!y || quantflow_linear(&w, x, tokens, bias, y, (int)bf16)) return 1;
    return fwrite(y, wide, many, stdout) != many;
}
