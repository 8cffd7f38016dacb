/* Attention of decode rows without matrix units, over paged K/V where they lie. In what order: attention.h.
 *
 * Scores have tokens side by side in a register, for which K is turned, results numbers of a head; what is read once is
 * used by up to MOST_HEADS query heads.
 */
#include "decode.h"

#ifndef __AMX_BF16__

#define MOST_HEADS 4
#define BLOCKS (STEP / 16)
#define NUMBERS 64 /* of a head, whose sums are in registers at a time */

/* Lines of the next step's K and V are asked for a few at a time, between products, so that they arrive meanwhile: more at
 * once would hold up the core until there is room for them. */
typedef struct {
    const char *k, *v;
    const long *place, *end; /* of the tokens to ask for */
    long line, lines;        /* of a token, in bytes */
    long each;               /* lines at a time */
} Ahead;

INLINE void fetch_some(Ahead *ahead) {
    for (long i = 0; i < ahead->each; i++) {
        if (ahead->place == ahead->end) return;
        long at = *ahead->place * (long)sizeof(num) + ahead->line;
        _mm_prefetch(ahead->k + at, _MM_HINT_T1);
        _mm_prefetch(ahead->v + at, _MM_HINT_T1);
        ahead->line += 64;
        if (ahead->line == ahead->lines) ahead->line = 0, ahead->place++;
    }
}

/* Times that something is asked for, while WORDS numbers of 16 tokens are turned. */
#define TURN_FETCHES 8

INLINE Ahead ahead_of(const Decode *d, const Span *next) {
    long dim = d->dim, lines = d->kv_heads * dim * (long)sizeof(num), group = d->q_heads / d->kv_heads;
    long shares = (group + MOST_HEADS - 1) / MOST_HEADS;
    long gathers = (dim + NUMBERS - 1) / NUMBERS * STEP / PER_WORD;
    long times = d->kv_heads * (dim / WORDS * BLOCKS * TURN_FETCHES + shares * (dim / PER_WORD + gathers));
    Ahead ahead = {(const char *)d->k, (const char *)d->v, next->places, next->places + next->count, 0, lines,
                   (STEP * lines / 64 + times - 1) / times};
    return ahead;
}

/* K of one step and one K/V head, turned: words of dim of 16 tokens side by side. */
typedef __m512i Turned[BLOCKS][MOST_DIM / PER_WORD];

static void turn(const Decode *d, const Span *span, long kv, Turned k, Ahead *asked) {
    Ahead ahead = *asked;
    for (long t = 0; t < span->count; t += 16)
        for (long i = 0; i < d->dim; i += WORDS) {
            __m512i r[16];
            UNROLL for (long j = 0; j < 16; j++)
                r[j] = t + j < span->count ? _mm512_loadu_si512(d->k + span->places[t + j] + kv * d->dim + i)
                                           : _mm512_setzero_si512();
            transpose(r);
            UNROLL for (long j = 0; j < 16; j++) k[t / 16][i / PER_WORD + j] = r[j];
            for (int n = 0; n < TURN_FETCHES; n++) fetch_some(&ahead);
        }
    *asked = ahead;
}

/* Scores of `heads` (known to the compiler) query heads, which lie one after the other in q. */
INLINE void score(const num *q, const Turned k, long dim, float scale, const int heads, __m512 (*scores)[BLOCKS],
                  Ahead *asked) {
    Ahead ahead = *asked;
    __m512 sums[MOST_HEADS][BLOCKS];
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int b = 0; b < BLOCKS; b++) sums[h][b] = _mm512_setzero_ps();
    for (long i = 0; i < dim / PER_WORD; i++) {
        UNROLL for (int h = 0; h < heads; h++) {
            __m512i word = spread(q + h * dim + PER_WORD * i);
            UNROLL for (int b = 0; b < BLOCKS; b++) sums[h][b] = add_product(sums[h][b], k[b][i], word);
        }
        fetch_some(&ahead);
    }
    *asked = ahead;
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int b = 0; b < BLOCKS; b++) scores[h][b] = _mm512_mul_ps(sums[h][b], _mm512_set1_ps(scale));
}

/* The values of the PER_WORD tokens from `t` on, 32 * `blocks` numbers of each, as words. */
INLINE void weave(const Span *span, const num *v, long t, const int blocks, __m512i *woven) {
#ifdef FLOAT32
    UNROLL for (int b = 0; b < 2 * blocks; b++) woven[b] = _mm512_loadu_si512(v + span->places[t] + 16 * b);
#else
    UNROLL for (int b = 0; b < blocks; b++) {
        __m512i one = _mm512_loadu_si512(v + span->places[t] + 32 * b), two = _mm512_setzero_si512();
        if (t + 1 < span->count) two = _mm512_loadu_si512(v + span->places[t + 1] + 32 * b);
        woven[2 * b] = woven_left(one, two);
        woven[2 * b + 1] = woven_right(one, two);
    }
#endif
}

/* Add the step's values, weighed, to 32 * `blocks` numbers of each of `heads` sums, `stride` apart (the first and the third
 * are known to the compiler). */
INLINE void gather(const Span *span, const num *v, const num (*weights)[STEP], const int heads, const int blocks,
                   float *to, long stride, Ahead *asked) {
    Ahead ahead = *asked;
    __m512 sums[MOST_HEADS][4];
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int b = 0; b < 2 * blocks; b++) sums[h][b] = _mm512_loadu_ps(to + h * stride + 16 * b);
    for (long t = 0; t < span->count; t += PER_WORD) {
        __m512i woven[4];
        weave(span, v, t, blocks, woven);
        UNROLL for (int h = 0; h < heads; h++) {
            __m512i word = spread(weights[h] + t);
            UNROLL for (int b = 0; b < 2 * blocks; b++) sums[h][b] = add_product(sums[h][b], woven[b], word);
        }
        fetch_some(&ahead);
    }
    *asked = ahead;
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int b = 0; b < 2 * blocks; b++) _mm512_storeu_ps(to + h * stride + 16 * b, sums[h][b]);
}

/* Functions of their own, so that sums stay in registers. */
#define HEADS(heads)                                                                                                   \
    __attribute__((noinline)) static void score_##heads(const num *q, const Turned k, long dim, float scale,          \
                                                        __m512 (*scores)[BLOCKS], Ahead *ahead) {                      \
        score(q, k, dim, scale, heads, scores, ahead);                                                                 \
    }                                                                                                                  \
    __attribute__((noinline)) static void gather_##heads(const Span *span, const num *v, const num (*weights)[STEP], \
                                                         long dim, float *to, long stride, Ahead *ahead) {             \
        long i = 0;                                                                                                    \
        for (; i + NUMBERS <= dim; i += NUMBERS) gather(span, v + i, weights, heads, 2, to + i, stride, ahead);                  \
        if (i < dim) gather(span, v + i, weights, heads, 1, to + i, stride, ahead);                                    \
    }
HEADS(1)
HEADS(2)
HEADS(3)
HEADS(4)
typedef void Score(const num *q, const Turned k, long dim, float scale, __m512 (*scores)[BLOCKS], Ahead *ahead);
typedef void Gather(const Span *span, const num *v, const num (*weights)[STEP], long dim, float *to, long stride, Ahead *ahead);
static Score *const score_heads[MOST_HEADS] = {score_1, score_2, score_3, score_4};
static Gather *const gather_heads[MOST_HEADS] = {gather_1, gather_2, gather_3, gather_4};

/* One step of the query heads of one K/V head. */
static void attend_step(const Decode *d, const Part *p, const Span *span, long kv, float *partial, Ahead *ahead) {
    Turned k;
    __m512 scores[MOST_HEADS][BLOCKS];
    num weights[MOST_HEADS][STEP] __attribute__((aligned(64)));
    __mmask16 seen[BLOCKS];
    long dim = d->dim, stride = dim + 2, group = d->q_heads / d->kv_heads;
    turn(d, span, kv, k, ahead);
    seen_of(span, seen);
    for (long h = 0; h < group; h += MOST_HEADS) {
        long first = kv * group + h, heads = group - h < MOST_HEADS ? group - h : MOST_HEADS;
        const num *q = d->q + p->row * d->q_stride + first * dim;
        float *to = partial + first * stride;
        score_heads[heads - 1](q, (const __m512i(*)[MOST_DIM / PER_WORD])k, dim, d->scale, scores, ahead);
        for (long n = 0; n < heads; n++) {
            float *sums = to + n * stride;
            weigh_step(scores[n], seen, sums + dim, sums + dim + 1, sums, 16, dim, weights[n]);
        }
        gather_heads[heads - 1](span, d->v + kv * dim, (const num(*)[STEP])weights, dim, to, stride, ahead);
    }
}

/* One part of one row: all heads, step by step, so that memory is read in its own order. */
void attend(const Decode *d, const Part *p, float *partial) {
    long dim = d->dim, stride = dim + 2;
    for (long h = 0; h < d->q_heads; h++) {
        memset(partial + h * stride, 0, (size_t)stride * sizeof *partial);
        partial[h * stride + dim] = NOTHING;
    }
    Span span = span_at(d, p, p->first), next;
    for (long token = p->first; token < p->end; token += STEP, span = next) {
        next.count = 0;
        /* What comes after a part is the next part, most often on the same thread. */
        if (token + STEP < p->end)
            next = span_at(d, p, token + STEP);
        else if (p + 1 < d->parts + d->num_parts)
            next = span_at(d, p + 1, p[1].first);
        Ahead ahead = ahead_of(d, &next);
        for (long kv = 0; kv < d->kv_heads; kv++) attend_step(d, p, &span, kv, partial, &ahead);
    }
}
#endif
