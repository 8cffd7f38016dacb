/* What happens to a row between two products: norms, quantization, rotation, the way into the cache. */
#include "rows.h"

/* What RMS norm multiplies x [width] by. Four sums at a time, which do not wait for each other. */
INLINE float mean_square_scale(const num *x, long width, float eps) {
    __m512 sums[4];
    for (int j = 0; j < 4; j++) sums[j] = _mm512_setzero_ps();
    long i = 0;
    for (; i + 64 <= width; i += 64)
        for (int j = 0; j < 4; j++) {
            __m512 v = load_numbers(x + i + 16 * j);
            sums[j] = _mm512_fmadd_ps(v, v, sums[j]);
        }
    for (; i < width; i += 16) {
        __m512 v = load_numbers(x + i);
        sums[0] = _mm512_fmadd_ps(v, v, sums[0]);
    }
    __m512 all = _mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3]));
    return 1.0f / __builtin_sqrtf(_mm512_reduce_add_ps(all) / (float)width + eps);
}

/* 16 numbers of a row, as they go into a product: normed where `weight` is given. */
INLINE __m512 entering(const num *x, __m512 scale, const float *weight, long i) {
    __m512 v = load_numbers(x + i);
    return weight ? _mm512_mul_ps(_mm512_mul_ps(v, scale), _mm512_loadu_ps(weight + i)) : v;
}

INLINE long row_tasks(long rows) { return (rows + TASK_ROWS - 1) / TASK_ROWS; }

/* Rows [first, end) of a task. */
#define ROWS_OF(task, rows)                                                         \
    for (long row = (task) * TASK_ROWS,                                             \
              end = row + TASK_ROWS < (rows) ? row + TASK_ROWS : (rows);            \
         row < end; row++)

typedef struct {
    const num *x;
    const float *weight;
    num *out;
    long rows, width;
    float eps;
} Norming;

static void norm_task(const void *job, long task, int thread) {
    const Norming *n = job;
    (void)thread;
    ROWS_OF(task, n->rows) {
        const num *in = n->x + row * n->width;
        __m512 scale = _mm512_set1_ps(mean_square_scale(in, n->width, n->eps));
        for (long i = 0; i < n->width; i += 16)
            store_numbers(n->out + row * n->width + i, entering(in, scale, n->weight, i));
    }
}

/* RMS norm of x [rows, width] times weight [width] -> out. width: a multiple of 16. */
EXPORT void norm_rows(const num *x, const float *weight, float eps, num *out, long rows, long width, int threads) {
    Norming norming = {x, weight, out, rows, width, eps};
    run_tasks(norm_task, &norming, row_tasks(rows), threads);
}

/* A row to float32. Returns its largest number without sign, NaN where one is NaN. */
INLINE float widen(const num *x, __m512 scale, const float *weight, float *wide, long width) {
    __m512 most[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    __mmask16 unordered = 0;
    for (long i = 0; i < width; i += 32)
        for (int j = 0; j < 2; j++) {
            long at = i + 16 * j;
            if (at >= width) break;
            __m512 v = entering(x, scale, weight, at);
            _mm512_storeu_ps(wide + at, v);
            unordered |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
            most[j] = _mm512_max_ps(most[j], _mm512_abs_ps(v));
        }
    return unordered ? __builtin_nanf("") : _mm512_reduce_max_ps(_mm512_max_ps(most[0], most[1]));
}

/* Steps as products take them. VNNI multiplies unsigned by signed: without matrix units they are raised by 128. */
INLINE __m128i narrowed(__m512i steps) {
    __m128i narrow = _mm512_cvtsepi32_epi8(steps);
#ifndef __AMX_INT8__
    narrow = _mm_xor_si128(narrow, _mm_set1_epi8((char)0x80));
#endif
    return narrow;
}

/* A row in float32 to two int8 rows and their scale: x ≈ scale (high + low / 254). NaN gives a scale of NaN. */
INLINE float quantize(const float *x, float largest, int8_t *high, int8_t *low, long width) {
    /* A row of zeros, or of numbers so small that steps of them would be infinitely many to 1. */
    if (largest < 127 * 1.17549435e-38f) largest = 127 * 1.17549435e-38f;
    __m512 to_steps = _mm512_set1_ps(127.0f / largest);
    for (long i = 0; i < width; i += 16) {
        __m512 steps = _mm512_mul_ps(_mm512_loadu_ps(x + i), to_steps);
        __m512 coarse = _mm512_roundscale_ps(steps, 8);
        __m512 rest = _mm512_mul_ps(_mm512_sub_ps(steps, coarse), _mm512_set1_ps(254.0f));
        _mm_storeu_si128((void *)(high + i), narrowed(_mm512_cvtps_epi32(coarse)));
        _mm_storeu_si128((void *)(low + i), narrowed(_mm512_cvtps_epi32(rest)));
    }
    return largest / 127.0f;
}

typedef struct {
    const num *x;
    const float *weight;
    int8_t *high, *low;
    float *scales, *scratch;
    long rows, width;
    float eps;
} Quantizing;

static void quantize_task(const void *job, long task, int thread) {
    const Quantizing *q = job;
    long width = q->width;
    float *wide = q->scratch + thread * width;
    ROWS_OF(task, q->rows) {
        const num *in = q->x + row * width;
        __m512 scale = _mm512_set1_ps(q->weight ? mean_square_scale(in, width, q->eps) : 1.0f);
        float largest = widen(in, scale, q->weight, wide, width);
        q->scales[row] = quantize(wide, largest, q->high + row * width, q->low + row * width, width);
    }
}

/* x [rows, width], after an RMS norm where `weight` is given -> high, low [rows, width], scales [rows].
 * `scratch` holds threads * width floats. */
void quantize_rows(const num *x, const float *weight, float eps, int8_t *high, int8_t *low, float *scales,
                          float *scratch, long rows, long width, int threads) {
    Quantizing quantizing = {x, weight, high, low, scales, scratch, rows, width, eps};
    run_tasks(quantize_task, &quantizing, row_tasks(rows), threads);
}

static void heads_task(const void *job, long task, int thread) {
    const Heads *h = job;
    (void)thread;
    long dim = h->dim, half = dim / 2, turned = h->q_heads + h->kv_heads;
    long stride = (turned + h->kv_heads) * dim, kv_width = h->kv_heads * dim;
    ROWS_OF(task, h->rows) {
        num *in = h->qkv + row * stride, *k_out = h->k_slots + h->slots[row] * kv_width;
        const float *cos = h->cos + h->positions[row] * half, *sin = h->sin + h->positions[row] * half;
        for (long head = 0; head < turned; head++) {
            num *x = in + head * dim, *out = head < h->q_heads ? x : k_out + (head - h->q_heads) * dim;
            const float *weight = h->head_norm ? h->head_norm + head * dim : NULL;
            __m512 scale = _mm512_set1_ps(weight ? mean_square_scale(x, dim, h->eps) : 1.0f);
            for (long i = 0; i < half; i += 16) {
                __m512 a = load_numbers(x + i), b = load_numbers(x + half + i);
                if (weight) {
                    a = _mm512_mul_ps(_mm512_mul_ps(a, scale), _mm512_loadu_ps(weight + i));
                    b = _mm512_mul_ps(_mm512_mul_ps(b, scale), _mm512_loadu_ps(weight + half + i));
                }
                __m512 c = _mm512_loadu_ps(cos + i), s = _mm512_loadu_ps(sin + i);
                store_numbers(out + i, _mm512_fnmadd_ps(b, s, _mm512_mul_ps(a, c)));
                store_numbers(out + half + i, _mm512_fmadd_ps(a, s, _mm512_mul_ps(b, c)));
            }
        }
        memcpy(h->v_slots + h->slots[row] * kv_width, in + turned * dim, (size_t)kv_width * sizeof(num));
    }
}

/* Norm (if any) and turn q and k; q stays where it is, k and v go to their slots. dim: a multiple of 32. */
EXPORT void rotate_and_store(const Heads *h) { run_tasks(heads_task, h, row_tasks(h->rows), h->threads); }
