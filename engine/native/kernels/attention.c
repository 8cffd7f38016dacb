/* Attention of decode rows over paged K/V, read where they lie: its tasks, and how parts become one.
 *
 * The context of a row is cut into parts of PART tokens, counted from its start, whatever its company and the number of
 * threads; parts are put together in order. So a row has the same bits alone and in a batch. All sums are float32.
 */
#include "decode.h"

/* Put the parts of one row together, one query head, as prefill.c does. `first` is the row's first part. */
static void merge(const Decode *d, long first, long head) {
    const Part *p = d->parts + first;
    long dim = d->dim, step = d->q_heads * (dim + 2);
    const float *from = d->partial + first * step + head * (dim + 2);
    num *out = d->out + p->row * d->out_stride + head * dim;
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
    for (long i = 0; i < dim; i += 16) store_numbers(out + i, _mm512_mul_ps(_mm512_loadu_ps(sums + i), share));
}

static void part_task(const void *job, long number, int thread) {
    const Decode *d = job;
    (void)thread;
    float *partial = d->partial + number * d->q_heads * (d->dim + 2);
    attend(d, d->parts + number, partial);
}

static void merge_task(const void *job, long number, int thread) {
    const Decode *d = job;
    (void)thread;
    if (d->parts[number].part == 0)
        for (long head = 0; head < d->q_heads; head++) merge(d, number, head);
}

/* q [rows, q_heads, dim] of the rows that parts name -> out. dim: a multiple of 32, at most 256. */
EXPORT void decode_attention(const Decode *d) {
    run_tasks(part_task, d, d->num_parts, d->threads);
    /* A pass over what the parts left: not worth threads until there is much of it. */
    run_tasks(merge_task, d, d->num_parts, d->num_parts < 4 * TASK_ROWS ? 1 : d->threads);
}
