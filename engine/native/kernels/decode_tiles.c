/* Attention of decode rows on matrix units, over paged K/V where they lie. In what order a row is computed: attention.h.
 *
 * A tile of K is 16 tokens as they lie on a page; the query heads that share it are the columns of the other factor. Of V
 * two tokens at a time are woven into pairs.
 */
#include "decode.h"

#ifdef __AMX_BF16__

/* Blocks of up to 16 query heads that are computed at once: 0.4 MB of stack. */
#define MOST_BLOCKS 16

/* One K/V head of one row: its (at most 16) query heads, and what the part has come to. */
typedef struct {
    uint32_t queries[MOST_DIM / 32][16][16];
    float sums[MOST_DIM / 16][16][16]; /* [dim / 16][query heads][16 of dim] */
    float most[16], total[16];
} __attribute__((aligned(64))) Head;

/* Lines of the next step's K and V are asked for a few at a time, between products, so that they arrive meanwhile. */
typedef struct {
    const Decode *d;
    Span span;
    long token, lines; /* the next token to ask for, and the lines of a token */
} Ahead;

INLINE void fetch_token(Ahead *ahead) {
    if (ahead->token >= ahead->span.count) return;
    const char *k = (const char *)(ahead->d->k + ahead->span.places[ahead->token]);
    const char *v = (const char *)(ahead->d->v + ahead->span.places[ahead->token]);
    for (long i = 0; i < ahead->lines; i++) {
        _mm_prefetch(k + 64 * i, _MM_HINT_T1);
        _mm_prefetch(v + 64 * i, _MM_HINT_T1);
    }
    ahead->token++;
}

INLINE void fetch_tokens(Ahead *ahead, long count) {
    while (count-- > 0) fetch_token(ahead);
}

/* Scores [STEP][16 query heads] of one K/V head. */
static void score(const Decode *d, const Span *span, long kv, Head *head, float (*scores)[16], Ahead *ahead, long share) {
    num copy[16 * MOST_DIM] __attribute__((aligned(64)));
    long dim = d->dim, width = d->kv_heads * dim;
    for (long t = 0; t < span->count; t += 16) {
        const num *k = d->k + span->places[t] + kv * dim;
        long stride = width;
        if (!span->tiles) {
            for (long j = 0; j < 16; j++) {
                long from = t + j < span->count ? t + j : span->count - 1;
                memcpy(copy + j * dim, d->k + span->places[from] + kv * dim, (size_t)dim * sizeof *copy);
            }
            k = copy, stride = dim;
        }
        _tile_zero(0);
        for (long i = 0; i < dim; i += 32) {
            _tile_loadd(4, k + i, stride * 2);
            _tile_loadd(6, head->queries[i / 32], 64);
            _tile_dpbf16ps(0, 4, 6);
        }
        fetch_tokens(ahead, share);
        _tile_stored(0, scores[t], 64);
    }
}

/* Scores -> weights [16 query heads][STEP] in bfloat16; what the part has come to is brought to the same scale. */
static void soften(const Decode *d, const Span *span, int heads, Head *head, const float (*scores)[16], num (*weights)[STEP]) {
    const __m512i rows = _mm512_mullo_epi32(
        _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi32(16));
    __mmask16 seen[STEP / 16];
    seen_of(span, seen);
    for (int h = 0; h < heads; h++) {
        __m512 s[STEP / 16];
        for (int b = 0; b < STEP / 16; b++) {
            s[b] = _mm512_mask_i32gather_ps(_mm512_setzero_ps(), seen[b], rows, scores[16 * b] + h, 4);
            s[b] = _mm512_mul_ps(s[b], _mm512_set1_ps(d->scale));
        }
        weigh_step(s, seen, &head->most[h], &head->total[h], head->sums[0][h], 16 * 16, d->dim, weights[h]);
    }
}

/* Add the step's values, weighed. */
static void gather(const Decode *d, const Span *span, long kv, Head *head, const num (*weights)[STEP], Ahead *ahead, long share) {
    uint32_t woven[2][STEP / 2][16] __attribute__((aligned(64)));
    for (long i = 0; i < d->dim; i += 32) {
        for (long t = 0; t < STEP; t += 2) {
            __m512i a = t < span->count ? _mm512_loadu_si512(d->v + span->places[t] + kv * d->dim + i) : _mm512_setzero_si512();
            __m512i b = t + 1 < span->count ? _mm512_loadu_si512(d->v + span->places[t + 1] + kv * d->dim + i)
                                            : _mm512_setzero_si512();
            _mm512_store_si512(woven[0][t / 2], woven_left(a, b));
            _mm512_store_si512(woven[1][t / 2], woven_right(a, b));
        }
        for (int n = 0; n < 2; n++) {
            float *sums = head->sums[i / 16 + n][0];
            _tile_loadd(0, sums, 64);
            for (int half = 0; half < 2; half++) {
                _tile_loadd(4, weights[0] + 32 * half, STEP * 2);
                _tile_loadd(6, woven[n][16 * half], 64);
                _tile_dpbf16ps(0, 4, 6);
            }
            _tile_stored(0, sums, 64);
            fetch_tokens(ahead, share);
        }
    }
}

/* Blocks [from, until) of one row's query heads, step by step, so that memory is read in its own order. */
static void attend_some(const Decode *d, const Part *p, long from, long until, float *partial) {
    long dim = d->dim, group = d->q_heads / d->kv_heads, blocks = (group + 15) / 16, step = dim + 2;
    Head heads[MOST_BLOCKS];
    float scores[STEP][16] __attribute__((aligned(64)));
    num weights[16][STEP] __attribute__((aligned(64)));
    memset(weights, 0, sizeof weights);
    for (long n = from; n < until; n++) {
        const num *rows[16];
        Head *head = &heads[n - from];
        long first = n / blocks * group + n % blocks * 16, count = group - n % blocks * 16;
        if (count > 16) count = 16;
        for (long h = 0; h < count; h++) rows[h] = d->q + p->row * d->q_stride + (first + h) * dim;
        pack_queries(rows, (int)count, dim, head->queries);
        memset(head->sums, 0, (size_t)(dim / 16) * sizeof head->sums[0]);
        for (int h = 0; h < 16; h++) head->most[h] = NOTHING, head->total[h] = 0.0f;
    }
    set_tiles(16, 16);
    /* Times that something is asked for in a step, for each block: 4 tiles of K, and dim / 16 of V. */
    long times = (until - from) * (STEP / 16 + dim / 16), share = (STEP + times - 1) / times;
    Span span = span_at(d, p, p->first);
    for (long token = p->first; token < p->end; token += STEP) {
        Ahead ahead = {d, span, STEP, d->kv_heads * dim * 2 / 64};
        if (token + STEP < p->end) ahead.span = span_at(d, p, token + STEP), ahead.token = 0;
        for (long n = from; n < until; n++) {
            long kv = n / blocks, count = group - n % blocks * 16;
            Head *head = &heads[n - from];
            score(d, &span, kv, head, scores, &ahead, share);
            soften(d, &span, count < 16 ? (int)count : 16, head, (const float(*)[16])scores, weights);
            gather(d, &span, kv, head, (const num(*)[STEP])weights, &ahead, share);
        }
        span = ahead.span;
    }
    for (long n = from; n < until; n++) {
        const Head *head = &heads[n - from];
        long first = n / blocks * group + n % blocks * 16, count = group - n % blocks * 16;
        for (long h = 0; h < count && h < 16; h++) {
            float *to = partial + (first + h) * step;
            for (long i = 0; i < dim; i += 16) _mm512_storeu_ps(to + i, _mm512_load_ps(head->sums[i / 16][h]));
            to[dim] = head->most[h];
            to[dim + 1] = head->total[h];
        }
    }
}

/* One part of one row. All heads at once, unless they are more than a thread's stack should hold. */
void attend(const Decode *d, const Part *p, float *partial) {
    long all = d->kv_heads * ((d->q_heads / d->kv_heads + 15) / 16);
    for (long from = 0; from < all; from += MOST_BLOCKS)
        attend_some(d, p, from, from + MOST_BLOCKS < all ? from + MOST_BLOCKS : all, partial);
}
#endif
