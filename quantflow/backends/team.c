/* The threads that share loops, on cores that other programs may use too.
 *
 * A loop is cut in pieces, and each member of the team has a share of them, its own neighbouring
 * ones: their weights stay in its core's cache from one token to the next. A member that is done
 * takes pieces of the others. So a loop waits for a member alone that has begun a piece, never for
 * one that the system has not let run yet: on a busy machine the caller does what the others do not
 * come to. libgomp's loops wait for every thread of a team.
 *
 * A member that waits, for the next loop or for the last pieces of this one, looks for WAIT
 * nanoseconds and sleeps then. Loops follow each other more closely while a token is computed, so
 * that on an idle machine nobody sleeps and no loop costs a system call. On a busy one, whoever
 * looked longer would take the time of the thread that it looks for.
 *
 * A share is one number: the loop's number in its upper half, the pieces that nobody has begun in
 * its lower half. It is taken from by compare and swap, so a member that comes late, with the
 * number of a loop that is over, gets nothing. What a loop consists of is written only while all
 * shares are empty and all pieces done; a piece that was got is therefore of the loop that was
 * read.
 */
#define _GNU_SOURCE
#include "team.h"

#include <linux/futex.h>
#include <omp.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 512 };     /* members */
enum { WAIT = 200000 };  /* nanoseconds; benchmarks/busy.py compares */
enum { LOOKS = 32 };     /* between two looks at the clock */

typedef struct { _Alignas(64) _Atomic uint64_t left; } Share;

static struct {
    pthread_mutex_t used; /* by the caller of the loop that runs */
    int threads;          /* that were started: members 1 to `threads` */
    /* the loop */
    _Atomic(Unit) work;
    _Atomic(const void *) context;
    _Atomic int64_t units, piece;
    _Atomic uint32_t members;
    _Alignas(64) _Atomic uint32_t loop; /* its number; members wait for another one */
    _Atomic uint32_t asleep;            /* members that wait so */
    _Alignas(64) _Atomic uint32_t open; /* pieces that are not done */
    _Atomic uint32_t waits;             /* whether the caller sleeps until there are none */
    Share shares[MOST];
} team = {.used = PTHREAD_MUTEX_INITIALIZER};

static void sleep_while(_Atomic uint32_t *word, uint32_t value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake_all(_Atomic uint32_t *word) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1 << 30, NULL, NULL, 0);
}

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Look until the word is `value`, or, without `until_equal`, another one; 0 after WAIT. */
static int seen_soon(_Atomic uint32_t *word, uint32_t value, int until_equal) {
    for (int64_t end = 0;;) {
        for (int i = 0; i < LOOKS; i++) {
            uint32_t now = atomic_load_explicit(word, memory_order_acquire);
            if ((now == value) == until_equal) return 1;
#ifdef __x86_64__
            __builtin_ia32_pause();
#endif
        }
        int64_t time = nanoseconds();
        if (!end) end = time + WAIT;
        if (time > end) return 0;
    }
}

/* The first piece of a member's share. */
static int64_t first_of(int64_t pieces, uint32_t member, uint32_t members) {
    return pieces * member / members;
}

/* Do pieces of a loop until nobody has one to begin: a member's own first. */
static void take_part(uint32_t loop, uint32_t own) {
    const Unit work = atomic_load_explicit(&team.work, memory_order_relaxed);
    const void *context = atomic_load_explicit(&team.context, memory_order_relaxed);
    const int64_t units = atomic_load_explicit(&team.units, memory_order_relaxed);
    const int64_t piece = atomic_load_explicit(&team.piece, memory_order_relaxed);
    const uint32_t members = atomic_load_explicit(&team.members, memory_order_relaxed);
    if (own >= members) return;
    const int64_t pieces = (units + piece - 1) / piece;
    for (uint32_t i = 0; i < members; i++) {
        uint32_t member = own + i < members ? own + i : own + i - members;
        _Atomic uint64_t *left = &team.shares[member].left;
        uint64_t share = atomic_load_explicit(left, memory_order_acquire);
        while (share >> 32 == loop && (uint32_t)share) {
            if (!atomic_compare_exchange_weak_explicit(left, &share, share - 1,
                                                       memory_order_acq_rel, memory_order_acquire))
                continue;
            int64_t at = first_of(pieces, member + 1, members) - (int64_t)(uint32_t)share;
            int64_t end = (at + 1) * piece < units ? (at + 1) * piece : units;
            for (int64_t unit = at * piece; unit < end; unit++) work(context, unit);
            if (atomic_fetch_sub(&team.open, 1) == 1 && atomic_load(&team.waits))
                wake_all(&team.open);
            share = atomic_load_explicit(left, memory_order_acquire);
        }
    }
}

static void *member(void *own) {
    uint32_t loop = 0;
    for (;;) {
        if (!seen_soon(&team.loop, loop, 0)) {
            atomic_fetch_add(&team.asleep, 1);
            while (atomic_load(&team.loop) == loop) sleep_while(&team.loop, loop);
            atomic_fetch_sub(&team.asleep, 1);
        }
        loop = atomic_load(&team.loop);
        take_part(loop, (uint32_t)(uintptr_t)own);
    }
    return NULL;
}

/* Start threads until there are so many; those that the system does not give are done without. */
static void have(int threads) {
    sigset_t all, before;
    sigfillset(&all); /* signals are for the threads that Python knows */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (pthread_t thread; team.threads < threads; team.threads++) {
        if (pthread_create(&thread, NULL, member, (void *)(uintptr_t)(team.threads + 1))) break;
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void team_share(Unit work, const void *context, int64_t units, int64_t piece) {
    int64_t pieces = (units + piece - 1) / piece, wanted = omp_get_max_threads();
    wanted = wanted < MOST ? wanted : MOST;
    wanted = wanted < pieces ? wanted : pieces;
    if (wanted < 2 || pieces >= UINT32_MAX || pthread_mutex_trylock(&team.used)) {
        for (int64_t unit = 0; unit < units; unit++) work(context, unit);
        return;
    }
    have((int)wanted - 1);
    uint32_t members = (uint32_t)(wanted <= team.threads ? wanted : team.threads + 1);
    uint32_t loop = atomic_load(&team.loop) + 1;
    atomic_store_explicit(&team.work, work, memory_order_relaxed);
    atomic_store_explicit(&team.context, context, memory_order_relaxed);
    atomic_store_explicit(&team.units, units, memory_order_relaxed);
    atomic_store_explicit(&team.piece, piece, memory_order_relaxed);
    atomic_store_explicit(&team.members, members, memory_order_relaxed);
    atomic_store_explicit(&team.open, (uint32_t)pieces, memory_order_relaxed);
    for (uint32_t m = 0; m < members; m++) {
        int64_t share = first_of(pieces, m + 1, members) - first_of(pieces, m, members);
        atomic_store_explicit(&team.shares[m].left, (uint64_t)loop << 32 | (uint64_t)share,
                              memory_order_release);
    }
    atomic_store(&team.loop, loop);
    if (atomic_load(&team.asleep)) wake_all(&team.loop);
    take_part(loop, 0);
    if (!seen_soon(&team.open, 0, 1)) {
        atomic_store(&team.waits, 1);
        for (uint32_t open; (open = atomic_load(&team.open));) sleep_while(&team.open, open);
        atomic_store(&team.waits, 0);
    }
    pthread_mutex_unlock(&team.used);
}

/* A forked process has the caller's thread alone. */
static void forked(void) {
    pthread_mutex_init(&team.used, NULL);
    team.threads = 0;
    atomic_store(&team.asleep, 0);
    atomic_store(&team.waits, 0);
}

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, forked); }
