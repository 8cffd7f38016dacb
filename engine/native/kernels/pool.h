/* The threads that kernels share. */
#pragma once

/* One task of a job. `thread` is 0 for the caller and below the number of threads that were asked for. */
typedef void (*Work)(const void *job, long task, int thread);

/* Run tasks [0, count) of a job on at most `threads` threads, the caller among them, in any order. */
void run_tasks(Work work, const void *job, long count, int threads);

/* For `ns` nanoseconds from now at most `most` threads of each job take tasks, the caller among them; 0: as many as it asked
 * for, at once. What was begun is ended first. From any thread, also in the middle of a job; the last call counts.
 */
void limit_threads(int most, long ns) __attribute__((visibility("default")));

/* How the matrix units of this thread are set, in whatever code `set_tiles` uses; 0: not. A job ends with 0. */
extern _Thread_local int tiles_of_thread;
