/* AMX, the tile products of Intel's CPUs since 2023, for tiles.h and attention_tiles.h: HAS_TILES says
   whether a build has them, tiles_allowed whether the kernel lets this process use them.

   -DQUANTFLOW_EMULATE_TILES computes what the instructions do in C, on any CPU. */
#ifdef QUANTFLOW_EMULATE_TILES
#include "tiles_emulated.h"
#define HAS_TILES 1
#elif defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(__linux__)
#define HAS_TILES 1
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

static int allowed;

/* The kernel saves the tiles of a process that asked for them, since Linux 5.16. */
static void ask(void) {
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    allowed = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

static int tiles_allowed(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, ask);
    return allowed;
}
#else
#define HAS_TILES 0
#endif

#if HAS_TILES
/* Operand of LDTILECFG: the bytes and the rows of each tile. */
struct shapes { uint8_t palette, start, unused[14]; uint16_t bytes[16]; uint8_t rows[16]; };

/* What was stored below an address is in memory before the next tile instruction: gcc 12 does not
   know that these read it, and drops or moves such stores. */
#define IN_MEMORY(ADDRESS) __asm__ volatile("" : : "r"(ADDRESS) : "memory")

static inline void shape_tiles(const struct shapes *shapes) {
    IN_MEMORY(shapes);
    _tile_loadconfig(shapes);
}
#endif
