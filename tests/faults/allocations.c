/* An allocator that refuses one of the blocks that torch makes tensors in; preloaded into the fork server.
 *
 * Blocks that are asked for inside of libtorch_cpu are left alone: the libraries of matrix products in it do not look whether they
 * got their working memory.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define LEAST 4096 /* bytes: smaller blocks are not counted */

static long due, seen;

/* Refuse the at-th block from now on; 0 refuses none. */
void refuse_allocation(long at) {
    __atomic_store_n(&seen, 0, __ATOMIC_SEQ_CST);
    __atomic_store_n(&due, at, __ATOMIC_SEQ_CST);
}

/* Return how many blocks were asked for since then. */
long allocations(void) { return __atomic_load_n(&seen, __ATOMIC_SEQ_CST); }

/* Return whether an address is in the library that has torch's allocator. */
static int of_tensors(const void *address) {
    Dl_info found;
    return dladdr(address, &found) && found.dli_fname && strstr(found.dli_fname, "libc10");
}

/* What torch takes the memory of every tensor from. */
int posix_memalign(void **place, size_t alignment, size_t size) {
    static int (*real)(void **, size_t, size_t);
    if (!real) real = (int (*)(void **, size_t, size_t))dlsym(RTLD_NEXT, "posix_memalign");
    if (size >= LEAST && of_tensors(__builtin_return_address(0))) {
        long at = __atomic_add_fetch(&seen, 1, __ATOMIC_SEQ_CST);
        if (at == __atomic_load_n(&due, __ATOMIC_SEQ_CST)) return ENOMEM;
    }
    return real(place, alignment, size);
}
