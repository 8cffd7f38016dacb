/* Attention of decode rows without matrix units, over paged K/V where they lie. In what order: attention.h.
 *
 * Scores have tokens side by side in a register, for which K is turned, results numbers of a head; what is read once is
 * used by up to MOST_HEADS query heads.
 */
#include "decode.h"

#ifndef __AMX_BF16__

#define MOST_HEADS 4
#define BLOCKS (STEP / 16)

/* K of one step and one K/V head, turned: pairs of dim of 16 tokens side by side. */
typedef __m512i Turned[BLOCKS][MOST_DIM / 2];

INLINE __m512bh pair_of(const bf16 *p) {
    int two;
    memcpy(&two, p, sizeof two);
    return (__m512bh)_mm512_set1_epi32(two);
}

static void turn(const Decode *d, const Span *span, long kv, Turned k) {
    for (long t = 0; t < span->count; t += 16)
        for (long i = 0; i < d->dim; i += 32) {
            __m512i r[16];
            UNROLL for (long j = 0; j < 16; j++)
                r[j] = t + j < span->count ? _mm512_loadu_si512(d->k + span->places[t + j] + kv * d->dim + i)
                                           : _mm512_setzero_si512();
            transpose(r);
            UNROLL for (long j = 0; j < 16; j++) k[t / 16][i / 2 + j] = r[j];
        }
}

/* Scores of `heads` (known to the compiler) query heads, which lie one after the other in q. */
INLINE void score(const bf16 *q, const Turned k, long dim, float scale, const int heads, __m512 (*scores)[BLOCKS]) {
    __m512 sums[MOST_HEADS][BLOCKS];
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int b = 0; b < BLOCKS; b++) sums[h][b] = _mm512_setzero_ps();
    for (long i = 0; i < dim / 2; i++)
        UNROLL for (int h = 0; h < heads; h++) {
            __m512bh pair = pair_of(q + h * dim + 2 * i);
            UNROLL for (int b = 0; b < BLOCKS; b++) sums[h][b] = _mm512_dpbf16_ps(sums[h][b], (__m512bh)k[b][i], pair);
        }
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int b = 0; b < BLOCKS; b++) scores[h][b] = _mm512_mul_ps(sums[h][b], _mm512_set1_ps(scale));
}

/* Add the step's values, weighed, to 32 * `blocks` numbers of each of `heads` sums, `stride` apart (the first and the third
 * are known to the compiler). */
INLINE void gather(const Span *span, const bf16 *v, const bf16 (*weights)[STEP], const int heads, const int blocks,
                   float *to, long stride) {
    __m512 sums[MOST_HEADS][4];
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int b = 0; b < 2 * blocks; b++) sums[h][b] = _mm512_loadu_ps(to + h * stride + 16 * b);
    for (long t = 0; t < span->count; t += 2) {
        __m512i woven[4];
        UNROLL for (int b = 0; b < blocks; b++) {
            __m512i one = _mm512_loadu_si512(v + span->places[t] + 32 * b), two = _mm512_setzero_si512();
            if (t + 1 < span->count) two = _mm512_loadu_si512(v + span->places[t + 1] + 32 * b);
            woven[2 * b] = woven_left(one, two);
            woven[2 * b + 1] = woven_right(one, two);
        }
        UNROLL for (int h = 0; h < heads; h++) {
            __m512bh pair = pair_of(weights[h] + t);
            UNROLL for (int b = 0; b < 2 * blocks; b++)
                sums[h][b] = _mm512_dpbf16_ps(sums[h][b], (__m512bh)woven[b], pair);
        }
    }
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int b = 0; b < 2 * blocks; b++) _mm512_storeu_ps(to + h * stride + 16 * b, sums[h][b]);
}

/* Functions of their own, so that sums stay in registers. */
#define HEADS(heads)                                                                                                      \
    __attribute__((noinline)) static void score_##heads(const bf16 *q, const Turned k, long dim, float scale,             \
                                                        __m512 (*scores)[BLOCKS]) {                                       \
        score(q, k, dim, scale, heads, scores);                                                                           \
    }                                                                                                                     \
    __attribute__((noinline)) static void gather_##heads(const Span *span, const bf16 *v, const bf16 (*weights)[STEP],    \
                                                         long dim, float *to, long stride) {                              \
        long i = 0;                                                                                                       \
        for (; i + 64 <= dim; i += 64) gather(span, v + i, weights, heads, 2, to + i, stride);                            \
        if (i < dim) gather(span, v + i, weights, heads, 1, to + i, stride);                                              \
    }
HEADS(1)
HEADS(2)
HEADS(3)
HEADS(4)
typedef void Score(const bf16 *q, const Turned k, long dim, float scale, __m512 (*scores)[BLOCKS]);
typedef void Gather(const Span *span, const bf16 *v, const bf16 (*weights)[STEP], long dim, float *to, long stride);
static Score *const score_heads[MOST_HEADS] = {score_1, score_2, score_3, score_4};
static Gather *const gather_heads[MOST_HEADS] = {gather_1, gather_2, gather_3, gather_4};

/* One step of the query heads of one K/V head. */
static void attend_step(const Decode *d, const Part *p, const Span *span, long kv, float *partial, Ahead *ahead, long share) {
    Turned k;
    __m512 scores[MOST_HEADS][BLOCKS];
    bf16 weights[MOST_HEADS][STEP] __attribute__((aligned(64)));
    __mmask16 seen[BLOCKS];
    long dim = d->dim, stride = dim + 2, group = d->q_heads / d->kv_heads;
    turn(d, span, kv, k);
    seen_of(span, seen);
    for (long h = 0; h < group; h += MOST_HEADS) {
        long first = kv * group + h, heads = group - h < MOST_HEADS ? group - h : MOST_HEADS;
        float *to = partial + first * stride;
        score_heads[heads - 1](d->q + p->row * d->q_stride + first * dim, (const __m512i(*)[MOST_DIM / 2])k, dim, d->scale, scores);
        fetch_tokens(ahead, share);
        for (long n = 0; n < heads; n++) {
            float *sums = to + n * stride;
            weigh_step(scores[n], seen, sums + dim, sums + dim + 1, sums, 16, dim, weights[n]);
            fetch_tokens(ahead, share);
        }
        gather_heads[heads - 1](span, d->v + kv * dim, (const bf16(*)[STEP])weights, dim, to, stride);
    }
}

/* One part of one row: all heads, step by step, so that memory is read in its own order. */
void attend(const Decode *d, const Part *p, float *partial) {
    long dim = d->dim, stride = dim + 2, times = d->q_heads, share = (STEP + times - 1) / times;
    for (long h = 0; h < d->q_heads; h++) {
        memset(partial + h * stride, 0, (size_t)stride * sizeof *partial);
        partial[h * stride + dim] = NOTHING;
    }
    Span span = span_at(d, p, p->first);
    for (long token = p->first; token < p->end; token += STEP) {
        /* What comes after a part is the next part, most often on the same thread. */
        const Part *next = token + STEP < p->end ? p : p + 1;
        Ahead ahead = {d, span, STEP, dim * d->kv_heads * 2 / 64};
        if (next < d->parts + d->num_parts)
            ahead.span = span_at(d, next, next == p ? token + STEP : next->first), ahead.token = 0;
        for (long kv = 0; kv < d->kv_heads; kv++) attend_step(d, p, &span, kv, partial, &ahead, share);
        fetch_tokens(&ahead, STEP);
        span = ahead.span;
    }
}
#endif
