/* Linear layers without matrix units: how the rows of a task are computed, a few at a time, by HALF columns of a group. */
#pragma once

#include "common.h"

#define HALF 32

/* As even as may be: rows of a task in passes of at most `most`. Each asks for its share of the weights that come after
 * these, so that a core reads memory while it computes. */
typedef struct {
    long count, share; /* passes; lines, of each HALF lines of the weights to come */
} Passes;

INLINE Passes passes_of(long rows, long most) {
    long count = (rows + most - 1) / most;
    Passes passes = {count, (HALF + count - 1) / count};
    return passes;
}

/* Pass `number` has rows [first, first of the next one). */
INLINE long first_of(const Passes *passes, long number, long rows) { return rows * number / passes->count; }

/* Weights to ask for: `lines` in each HALF lines from `at` on. */
typedef struct {
    const char *at;
    long lines;
} Coming;

INLINE Coming coming_of(const Passes *passes, long number, const void *weights) {
    long first = number * passes->share, left = HALF - first;
    Coming coming = {(const char *)weights + 64 * first, left < passes->share ? left : passes->share};
    return coming;
}

/* Once for each HALF lines of the weights at hand. */
INLINE void fetch_some(Coming *coming) {
    for (long i = 0; i < coming->lines; i++) _mm_prefetch(coming->at + 64 * i, _MM_HINT_T1);
    coming->at += 64 * HALF;
}
