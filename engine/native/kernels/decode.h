/* Decode rows: what the kernels for processors with and without matrix units are given. */
#pragma once

#include <stdint.h>

#include "attention.h"

/* One part of one row's context: positions [first, end), of which those before `seen_from` are hidden by a window. */
typedef struct {
    int32_t row;   /* of q and out */
    int32_t pages; /* where the request's page ids begin in `page_ids` */
    int32_t first, end, seen_from;
    int32_t part, parts;
} Part;

typedef struct {
    const num *q;
    num *out;
    const num *k, *v; /* [pages, page_size, kv_heads, dim] */
    const int32_t *page_ids;
    const Part *parts;
    float *partial; /* [parts, q_heads, dim + 2]: sums, then the largest score and the sum of weights */
    long num_parts, q_stride, out_stride; /* strides in elements */
    long page_size, q_heads, kv_heads, dim;
    float scale;
    int threads;
} Decode;

/* Where the tokens of one step are. `tiles`: each 16 of them lie on one page, one after the other. */
typedef struct {
    long count, hidden; /* tokens there are, and of them those before a window */
    long places[STEP];  /* of tokens in a cache, in elements */
    int tiles;
} Span;

INLINE Span span_at(const Decode *d, const Part *p, long token) {
    Span span = {p->end - token < STEP ? p->end - token : STEP, p->seen_from > token ? p->seen_from - token : 0, {0},
                 d->page_size % 16 == 0};
    long width = d->kv_heads * d->dim;
    for (long t = 0; t < span.count;) {
        long offset = (token + t) % d->page_size, until = t + d->page_size - offset;
        long place = ((long)d->page_ids[p->pages + (token + t) / d->page_size] * d->page_size + offset) * width;
        for (; t < span.count && t < until; t++, place += width) span.places[t] = place;
    }
    return span;
}

/* Which of the step's tokens the row sees. */
INLINE void seen_of(const Span *span, __mmask16 *seen) {
    for (int b = 0; b < STEP / 16; b++) {
        long hidden = span->hidden - 16 * b;
        seen[b] = lanes(16 * b, span->count) & ~(__mmask16)((1u << (hidden < 0 ? 0 : hidden > 16 ? 16 : hidden)) - 1);
    }
}

/* 32 numbers of two tokens as pairs: of the first 16, of the others. */
INLINE __m512i woven_left(__m512i a, __m512i b) {
    static const uint16_t order[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                       8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    return _mm512_permutex2var_epi16(a, _mm512_loadu_si512(order), b);
}

INLINE __m512i woven_right(__m512i a, __m512i b) {
    static const uint16_t order[32] = {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
                                       24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
    return _mm512_permutex2var_epi16(a, _mm512_loadu_si512(order), b);
}

void decode_attention(const Decode *d);

/* One part of one row into its `partial`. */
void attend(const Decode *d, const Part *p, float *partial);
