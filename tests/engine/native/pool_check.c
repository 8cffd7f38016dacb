/* What test_pool.py runs beside pool.c: `few HELPERS`, `limited`, `hammer CALLERS JOBS FORKS`. Ends with 0 where all is well. */
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

/* --- who asks for cores gets them: no task is begun beyond the limit, and all work again once it is over --- */

#define LONG_NS (PATIENCE_S * 1000000000L)

static atomic_int tasks_of[3];

static void count_tasks(const void *job, long task, int thread) {
    (void)job, (void)task;
    atomic_fetch_add(&tasks_of[thread], 1);
}

static atomic_int asked;

/* Both threads are in a task; the caller's asks for the core, and ends first. */
static void ask_in_the_middle(const void *job, long task, int thread) {
    meet(job, task, thread);
    atomic_fetch_add(&tasks_of[thread], 1);
    if (thread) {
        while (!atomic_load(&asked)) pause_us(100);
    } else if (!atomic_load(&asked)) {
        limit_threads(1, LONG_NS);
        atomic_store(&asked, 1);
    }
}

static int meets(const char *when) {
    atomic_store(&begun, 0);
    run_tasks(meet, NULL, 2, 3);
    if (atomic_load(&given_up)) printf("no helper came %s\n", when);
    return atomic_load(&given_up);
}

static int limited(void) {
    run_tasks(nothing, NULL, 3, 3);
    limit_threads(1, LONG_NS);
    for (int i = 0; i < 1000; i++) run_tasks(count_tasks, NULL, 30, 3);
    if (atomic_load(&tasks_of[0]) != 30000) return printf("a helper took tasks that were not for it\n"), 1;
    limit_threads(2, LONG_NS);
    pause_us(5000); /* all are asleep */
    if (meets("within the limit")) return 1;
    for (int i = 0; i < 1000; i++) run_tasks(count_tasks, NULL, 30, 3);
    if (atomic_load(&tasks_of[2])) return printf("helper 2 took tasks with a limit of 2\n"), 1;
    limit_threads(1, 10000000);
    pause_us(20000);
    if (meets("after the time")) return 1;
    limit_threads(1, LONG_NS);
    limit_threads(1, 0);
    if (meets("after it was given back")) return 1;
    pause_us(5000);
    for (int i = 0; i < 3; i++) atomic_store(&tasks_of[i], 0);
    atomic_store(&begun, 0);
    run_tasks(ask_in_the_middle, NULL, 100, 2);
    if (atomic_load(&given_up)) return printf("no helper came to the last job\n"), 1;
    if (atomic_load(&tasks_of[0]) + atomic_load(&tasks_of[1]) != 100 || atomic_load(&tasks_of[1]) != 1)
        return printf("%d tasks of the helper, of 100\n", atomic_load(&tasks_of[1])), 1;
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
        if (rand_r(&state) % 10 == 0) limit_threads(rand_r(&state) % 4, rand_r(&state) % 3 * 100000L);
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
    if (count == 2 && !strcmp(words[1], "limited")) return limited();
    if (count != 5 || atoi(words[2]) > 8) return 2;
    jobs = atoi(words[3]);
    return hammer(atoi(words[2]), atoi(words[4]));
}
