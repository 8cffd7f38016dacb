/* The threads that kernels share: helpers that take tasks of the caller's job.
 *
 * A forward pass is some two hundred short jobs. Teams of OpenMP meet at the end of each, so one member that the system
 * has put aside, for a listener or for another program, holds up all; here the caller waits for tasks that somebody has
 * begun, never for a helper that has not come. Helpers look for work for a moment after a job, which covers the way from
 * one kernel to the next, and then sleep: between steps their cores belong to others.
 *
 * A helper that is put aside has begun a task, so others who need a core for a moment ask for one (`limit_threads`): the
 * helpers beyond the limit end their tasks, leave the rest of the job to others, and sleep.
 */
#define _GNU_SOURCE
#include "pool.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <x86intrin.h>

/* Cycles of the time-stamp counter that a helper looks for work before it sleeps: 0.1 to 0.2 ms. */
#define PATIENCE 400000
/* Pauses of the caller before it offers its core. */
#define CALLER_PAUSES 2000
#define MOST_HELPERS 511
/* Bits of a futex's set: thread `n` sleeps as number n modulo 32. */
#define SET_BITS 32

static pthread_mutex_t one_caller = PTHREAD_MUTEX_INITIALIZER;
static int helpers; /* that exist */

/* The job at hand. Written by its caller while `open` is 0 and nobody is `inside`. */
static Work work_of_job;
static const void *job_at_hand;
static int threads_of_job;

/* Until when, by CLOCK_MONOTONIC in nanoseconds, only threads below `most_threads` take tasks; 0: all do. */
static _Atomic int64_t limited_until;
static atomic_int most_threads;

/* Each thread has a run of tasks of its own, so that it reads memory in order; one that is through takes from others. */
typedef struct {
    atomic_long next;
    long end;
} __attribute__((aligned(64))) Share;

static Share shares[MOST_HELPERS + 1];

static atomic_int is_open, inside, asleep;
static _Atomic uint32_t generation; /* a job more */

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

void limit_threads(int most, long ns) {
    atomic_store(&most_threads, most < 1 ? 1 : most);
    atomic_store(&limited_until, ns > 0 ? now_ns() + ns : 0);
}

static int is_limited(void) {
    int64_t until = atomic_load_explicit(&limited_until, memory_order_relaxed);
    return until && now_ns() < until;
}

/* Never the caller: somebody has to do the job. */
static int stays_away(int thread) {
    return thread && is_limited() && thread >= atomic_load_explicit(&most_threads, memory_order_relaxed);
}

static void sleep_until_not(uint32_t seen, int thread) {
    atomic_fetch_add(&asleep, 1);
    syscall(SYS_futex, &generation, FUTEX_WAIT_BITSET_PRIVATE, seen, NULL, NULL, (uint32_t)1 << thread % SET_BITS);
    atomic_fetch_sub(&asleep, 1);
}

/* Helpers of a job of `threads`, and of no other: one that is woken in the place of another leaves its tasks to others. */
static void wake_helpers(int threads) {
    uint32_t whom = threads > SET_BITS ? ~(uint32_t)0 : (uint32_t)(((uint64_t)1 << threads) - 2);
    syscall(SYS_futex, &generation, FUTEX_WAKE_BITSET_PRIVATE, INT_MAX, NULL, NULL, whom);
}

_Thread_local int tiles_of_thread;

/* Other libraries set tiles of their own, and a thread that has none is cheaper to put aside. */
static void leave_tiles(void) {
#ifdef __AMX_TILE__
    if (tiles_of_thread) _tile_release();
#endif
    tiles_of_thread = 0;
}

static void take_tasks(Work work, const void *job, int thread, int threads) {
    for (int i = 0; i < threads; i++) {
        Share *share = &shares[(thread + i) % threads];
        while (!stays_away(thread)) {
            long task = atomic_fetch_add(&share->next, 1);
            if (task >= share->end) break;
            work(job, task, thread);
        }
    }
    leave_tiles();
}

static void *help(void *number) {
    int thread = (int)(intptr_t)number;
    uint32_t seen = 0;
    for (;;) {
        uint64_t since = __rdtsc();
        while (atomic_load_explicit(&generation, memory_order_relaxed) == seen && __rdtsc() - since < PATIENCE &&
               !stays_away(thread))
            _mm_pause();
        while (atomic_load(&generation) == seen) sleep_until_not(seen, thread);
        seen = atomic_load(&generation);
        /* Said first, asked then: a caller that has closed its job waits for whoever is inside. */
        atomic_fetch_add(&inside, 1);
        if (atomic_load(&is_open) && thread < threads_of_job)
            take_tasks(work_of_job, job_at_hand, thread, threads_of_job);
        atomic_fetch_sub(&inside, 1);
    }
    return NULL;
}

/* A child has none of its parent's threads, and may have been made in the middle of a job. */
static void forget_helpers(void) {
    helpers = 0;
    atomic_store(&is_open, 0);
    atomic_store(&inside, 0);
    atomic_store(&asleep, 0);
    atomic_store(&limited_until, 0); /* whoever asked for a core is not here */
    pthread_mutex_init(&one_caller, NULL);
}

static void watch_forks(void) { pthread_atfork(NULL, NULL, forget_helpers); }

static void have_helpers(int wanted) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    sigset_t all, before;
    sigfillset(&all);
    /* Signals are for threads that run Python. */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (helpers < wanted && helpers < MOST_HELPERS) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, help, (void *)(intptr_t)(helpers + 1))) break;
        pthread_detach(thread);
        helpers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void run_tasks(Work work, const void *job, long count, int threads) {
    if (threads > count) threads = (int)count;
    if (threads > MOST_HELPERS + 1) threads = MOST_HELPERS + 1;
    /* Two callers at once: the second one does its work alone. */
    if (threads < 2 || pthread_mutex_trylock(&one_caller)) {
        for (long i = 0; i < count; i++) work(job, i, 0);
        leave_tiles();
        return;
    }
    if (helpers < threads - 1) have_helpers(threads - 1);
    work_of_job = work;
    job_at_hand = job;
    threads_of_job = threads;
    for (long i = 0; i < threads; i++) {
        atomic_store_explicit(&shares[i].next, count * i / threads, memory_order_relaxed);
        shares[i].end = count * (i + 1) / threads;
    }
    atomic_store(&is_open, 1);
    atomic_fetch_add(&generation, 1);
    int wanted = threads;
    if (is_limited() && wanted > atomic_load(&most_threads)) wanted = atomic_load(&most_threads);
    if (wanted > 1 && atomic_load(&asleep)) wake_helpers(wanted);
    take_tasks(work, job, 0, threads);
    atomic_store(&is_open, 0);
    for (int i = 0; atomic_load(&inside); i++) {
        if (i < CALLER_PAUSES)
            _mm_pause();
        else
            sched_yield();
    }
    pthread_mutex_unlock(&one_caller);
}
