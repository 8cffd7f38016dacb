/* What test_pool.py runs beside pool.c: `few HELPERS`, `hammer CALLERS JOBS FORKS`. Ends with 0 where all is well. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "pool.h"

#define MOST_TASKS 300
/* Longer than any machine lets a thread wait for a processor. */
#define PATIENCE_S 60

static void pause_us(long us) {
    struct timespec time = {0, us * 1000};
    nanosleep(&time, NULL);
}

/* --- a job of two threads, with many helpers asleep: each task waits for the other thread --- */

static atomic_int begun, given_up;

static void meet(const void *job, long task, int thread) {
    (void)job, (void)task, (void)thread;
    atomic_fetch_add(&begun, 1);
    for (time_t end = time(NULL) + PATIENCE_S; atomic_load(&begun) < 2; pause_us(100))
        if (time(NULL) > end) {
            atomic_store(&given_up, 1);
            return;
        }
}

static void nothing(const void *job, long task, int thread) { (void)job, (void)task, (void)thread; }

static int few(int helpers) {
    run_tasks(nothing, NULL, helpers + 1, helpers + 1);
    for (int i = 0; i < 8; i++) {
        pause_us(5000); /* all fall asleep */
        atomic_store(&begun, 0);
        run_tasks(meet, NULL, 2, 2);
        if (atomic_load(&given_up)) {
            printf("the helper of job %d slept on\n", i);
            return 1;
        }
    }
    return 0;
}

/* --- callers at once, with any number of threads, and children made meanwhile --- */

typedef struct {
    long *out;
    long summand;
} Sum;

static void add(const void *job, long task, int thread) {
    const Sum *sum = job;
    (void)thread;
    sum->out[task] += sum->summand + task;
}

static atomic_int wrong;
static int jobs;

static void *call(void *seed) {
    static const int threads[] = {1, 2, 3, 64, 2, 5};
    unsigned state = (unsigned)(uintptr_t)seed;
    long out[MOST_TASKS];
    for (int i = 0; i < jobs; i++) {
        long count = rand_r(&state) % MOST_TASKS;
        memset(out, 0, sizeof out);
        Sum sum = {out, i};
        run_tasks(add, &sum, count, threads[rand_r(&state) % 6]);
        for (long n = 0; n < MOST_TASKS; n++)
            if (out[n] != (n < count ? i + n : 0)) atomic_fetch_add(&wrong, 1);
        if (rand_r(&state) % 50 == 0) pause_us(500);
    }
    return NULL;
}

static int hammer(int callers, int forks) {
    pthread_t threads[8];
    for (int i = 0; i < callers; i++) pthread_create(&threads[i], NULL, call, (void *)(uintptr_t)(i + 1));
    for (int i = 0; i < forks; i++) {
        pause_us(1000);
        pid_t child = fork();
        if (!child) {
            alarm(PATIENCE_S);
            jobs = 100;
            call((void *)(uintptr_t)99);
            _exit(atomic_load(&wrong) ? 1 : 0);
        }
        int status = 1;
        waitpid(child, &status, 0);
        if (status) printf("child %d ended with %d\n", i, status), atomic_fetch_add(&wrong, 1);
    }
    for (int i = 0; i < callers; i++) pthread_join(threads[i], NULL);
    printf("%d wrong\n", atomic_load(&wrong));
    return atomic_load(&wrong) ? 1 : 0;
}

int main(int count, char **words) {
    if (count == 3 && !strcmp(words[1], "few")) return few(atoi(words[2]));
    if (count != 5 || atoi(words[2]) > 8) return 2;
    jobs = atoi(words[3]);
    return hammer(atoi(words[2]), atoi(words[4]));
}
