/* Attention of decode rows over paged K/V, read where they lie; the way without matrix units, and how parts become one.
 *
 * The context of a row is cut into parts of PART tokens, counted from its start, whatever its company and the number of
 * threads; parts are put together in order. So a row has the same bits alone and in a batch. All sums are float32.
 */
#include "decode.h"
#include "tiles.h"

#define MOST_HEADS 4 /* query heads that share one pass over K/V */

#ifndef __AMX_BF16__
/* Tokens [from, until) of a part that lie on one page. `k` and `v` are where the first of them begins. */
typedef struct {
    long from, until;
    const bf16 *k, *v;
} Run;

INLINE long first_seen(const Part *p) { return p->seen_from > p->first ? p->seen_from : p->first; }

INLINE Run run_at(const Decode *d, const Part *p, long from, long count) {
    long position = first_seen(p) + from, offset = position % d->page_size, until = from + d->page_size - offset;
    long slot = (long)d->page_ids[p->pages + position / d->page_size] * d->page_size + offset;
    long place = slot * d->kv_heads * d->dim;
    Run run = {from, until < count ? until : count, d->k + place, d->v + place};
    return run;
}

/* Pages lie anywhere: no processor guesses the next one. Its lines are asked for a few at a time, between products,
 * so that they arrive while there is something to do. */
typedef struct {
    const char *at, *end;
    long share;
} Ahead;

INLINE Ahead ahead_of(const bf16 *from, long bytes, long times) {
    Ahead ahead = {(const char *)from, (const char *)from + bytes, (bytes / 64 + times - 1) / times};
    return ahead;
}

INLINE void fetch_some(Ahead *ahead) {
    for (long i = 0; i < ahead->share && ahead->at < ahead->end; i++, ahead->at += 64)
        _mm_prefetch(ahead->at, _MM_HINT_T0);
}

/* Sums of 16 registers, in their order: three rounds of adding halves that lie in different registers. */
INLINE __m512 sums_of(__m512 *v) {
    for (int i = 0; i < 8; i++)
        v[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    for (int i = 0; i < 4; i++) {
        __m512d a = _mm512_castps_pd(v[2 * i]), b = _mm512_castps_pd(v[2 * i + 1]);
        v[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    for (int i = 0; i < 2; i++)
        v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x44),
                             _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xEE));
    return _mm512_add_ps(_mm512_shuffle_f32x4(v[0], v[1], 0x88), _mm512_shuffle_f32x4(v[0], v[1], 0xDD));
}

/* Scores of one query head over the tokens of one run, 16 at a time. Returns the largest, NaN aside. */
INLINE float score(const Decode *d, const bf16 *q, const bf16 *k, long count, float *scores, float most) {
    long dim = d->dim, width = d->kv_heads * dim;
    __m512 top = _mm512_set1_ps(most);
    for (long t = 0; t < count; t += 16) {
        __m512 sums[16];
        for (int j = 0; j < 16; j++) {
            /* Beyond the run its last token is computed again, and not kept. */
            const bf16 *keys = k + (t + j < count ? t + j : count - 1) * width;
            sums[j] = _mm512_setzero_ps();
            for (long i = 0; i < dim; i += 32)
                sums[j] = _mm512_dpbf16_ps(sums[j], (__m512bh)_mm512_loadu_si512(keys + i),
                                           (__m512bh)_mm512_loadu_si512(q + i));
        }
        __mmask16 keep = lanes(t, count);
        __m512 values = _mm512_mul_ps(sums_of(sums), _mm512_set1_ps(d->scale));
        _mm512_mask_storeu_ps(scores + t, keep, values);
        top = _mm512_mask_max_ps(top, keep, values, top);
    }
    return _mm512_reduce_max_ps(top);
}

/* Scores become weights, e to the power of what they are above `most`. Returns their sum. */
INLINE float weigh(float *scores, long count, float most) {
    __m512 total = _mm512_setzero_ps(), top = _mm512_set1_ps(most);
    for (long t = 0; t < count; t += 16) {
        __mmask16 keep = lanes(t, count);
        __m512 w = exp_ps(_mm512_sub_ps(_mm512_maskz_loadu_ps(keep, scores + t), top));
        _mm512_mask_storeu_ps(scores + t, keep, w);
        total = _mm512_add_ps(total, _mm512_maskz_mov_ps(keep, w));
    }
    return _mm512_reduce_add_ps(total);
}

/* Add the values of one run, weighed, to the sums of `n` heads (known to the compiler), each dim + 2 apart. */
INLINE void gather(const Decode *d, Ahead *ahead, const float *weights, const bf16 *v, long count, const int n, float *to) {
    long dim = d->dim, width = d->kv_heads * dim;
    for (long i = 0; i < dim; i += 32) {
        __m512 sums[MOST_HEADS][2];
        fetch_some(ahead);
        for (int h = 0; h < n; h++) {
            sums[h][0] = _mm512_loadu_ps(to + h * (dim + 2) + i);
            sums[h][1] = _mm512_loadu_ps(to + h * (dim + 2) + i + 16);
        }
        const bf16 *at = v + i;
        for (long t = 0; t < count; t++, at += width) {
            __m512 left = load_bf16(at), right = load_bf16(at + 16);
            for (int h = 0; h < n; h++) {
                __m512 w = _mm512_set1_ps(weights[h * PART + t]);
                sums[h][0] = _mm512_fmadd_ps(w, left, sums[h][0]);
                sums[h][1] = _mm512_fmadd_ps(w, right, sums[h][1]);
            }
        }
        for (int h = 0; h < n; h++) {
            _mm512_storeu_ps(to + h * (dim + 2) + i, sums[h][0]);
            _mm512_storeu_ps(to + h * (dim + 2) + i + 16, sums[h][1]);
        }
    }
}

/* Call `what` for the query heads of every K/V head, at most four at a time: `head`, `kv` and `n` are theirs. */
#define FOR_HEADS(d, what)                                                      \
    for (long kv = 0, group = (d)->q_heads / (d)->kv_heads; kv < (d)->kv_heads; kv++) \
        for (long head = kv * group, end = head + group; head < end;) {         \
            long left = end - head;                                             \
            if (left >= 4) { enum { n = 4 }; what; head += n; }                 \
            else if (left == 3) { enum { n = 3 }; what; head += n; }            \
            else if (left == 2) { enum { n = 2 }; what; head += n; }            \
            else { enum { n = 1 }; what; head += n; }                           \
        }

/* One part of one row: all heads, page by page, so that memory is read in its own order. */
static void attend(const Decode *d, const Part *p, float *scores, float *partial) {
    long dim = d->dim, width = d->kv_heads * dim, count = p->end - first_seen(p), step = dim + 2;
    long group = d->q_heads / d->kv_heads;
    const bf16 *q = d->q + p->row * d->q_stride;
    float most[d->q_heads];
    for (long h = 0; h < d->q_heads; h++) most[h] = -__builtin_inff();
    memset(partial, 0, (size_t)(d->q_heads * step) * sizeof(float));
    Run run = run_at(d, p, 0, count), next;
    for (long t = 0; t < count; t = run.until, run = next) {
        next = run.until < count ? run_at(d, p, run.until, count) : run_at(d, p, 0, count);
        Ahead ahead = ahead_of(run.until < count ? next.k : next.v, (next.until - next.from) * width * 2, d->q_heads);
        for (long h = 0; h < d->q_heads; h++) {
            fetch_some(&ahead);
            most[h] = score(d, q + h * dim, run.k + h / group * dim, run.until - t, scores + h * PART + t, most[h]);
        }
    }
    for (long h = 0; h < d->q_heads; h++) {
        partial[h * step + dim] = most[h];
        partial[h * step + dim + 1] = weigh(scores + h * PART, count, most[h]);
    }
    run = run_at(d, p, 0, count);
    for (long t = 0; t < count; t = run.until, run = next) {
        next = run.until < count ? run_at(d, p, run.until, count) : run;
        Ahead ahead = ahead_of(next.v, run.until < count ? (next.until - next.from) * width * 2 : 0, 2 * d->kv_heads);
        FOR_HEADS(d, gather(d, &ahead, scores + head * PART + t, run.v + kv * dim, run.until - t, n, partial + head * step))
    }
}
#endif

/* Put the parts of one row together, one query head, as prefill.c does. `first` is the row's first part. */
static void merge(const Decode *d, long first, long head) {
    const Part *p = d->parts + first;
    long dim = d->dim, step = d->q_heads * (dim + 2);
    const float *from = d->partial + first * step + head * (dim + 2);
    bf16 *out = d->out + p->row * d->out_stride + head * dim;
    float sums[dim], most = NOTHING, total = 0.0f;
    memset(sums, 0, sizeof sums);
    for (int n = 0; n < p->parts; n++, from += step) {
        __m512 before = _mm512_set1_ps(most), part_most = _mm512_set1_ps(from[dim]);
        __m512 now = _mm512_max_ps(part_most, before), a = fading(before, now), b = fading(part_most, now);
        for (long i = 0; i < dim; i += 16) {
            __m512 part = _mm512_mul_ps(_mm512_loadu_ps(from + i), b);
            _mm512_storeu_ps(sums + i, _mm512_add_ps(_mm512_mul_ps(_mm512_loadu_ps(sums + i), a), part));
        }
        most = _mm512_cvtss_f32(now);
        total = total * _mm512_cvtss_f32(a) + from[dim + 1] * _mm512_cvtss_f32(b);
    }
    __m512 share = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_set1_ps(total));
    for (long i = 0; i < dim; i += 16) store_bf16(out + i, _mm512_mul_ps(_mm512_loadu_ps(sums + i), share));
}

static void part_task(const void *job, long number, int thread) {
    const Decode *d = job;
    (void)thread;
    float *partial = d->partial + number * d->q_heads * (d->dim + 2);
#ifdef __AMX_BF16__
    attend_with_tiles(d, d->parts + number, partial);
#else
    float scores[d->q_heads * PART] __attribute__((aligned(64)));
    attend(d, d->parts + number, scores, partial);
#endif
}

static void merge_task(const void *job, long number, int thread) {
    const Decode *d = job;
    (void)thread;
    if (d->parts[number].part == 0)
        for (long head = 0; head < d->q_heads; head++) merge(d, number, head);
}

/* q [rows, q_heads, dim] of the rows that parts name -> out. dim: a multiple of 32, with matrix units at most 256. */
EXPORT void decode_attention(const Decode *d) {
    run_tasks(part_task, d, d->num_parts, d->threads);
    /* A pass over what the parts left: not worth threads until there is much of it. */
    run_tasks(merge_task, d, d->num_parts, d->num_parts < 4 * TASK_ROWS ? 1 : d->threads);
}
