/* y = x Wᵀ with int8 weights, one scale per output, and activations in two int8 rows, one scale per row:
 * x ≈ scale (high + low / 254). Sums are int32, so exact: the same bits in any order, by tiles or by VNNI.
 *
 * Packed: [groups of 64 columns][inputs / 64][4 blocks][16 fours of inputs][16 columns][4].
 */
#include "common.h"

#define STRETCH 254.0f

EXPORT void pack_int8(const int8_t *w, int8_t *packed, int32_t *sums, long outputs, long inputs, long groups) {
    long steps = inputs / 64;
    for (long g = 0; g < groups; g++)
        for (int column = 0; column < GROUP; column++) {
            long n = g * GROUP + column;
            int32_t sum = 0;
            for (long k = 0; k < steps; k++) {
                int8_t *block = packed + (g * steps + k) * 4096 + (column / 16) * 1024 + (column % 16) * 4;
                for (int four = 0; four < 16; four++)
                    for (int i = 0; i < 4; i++) {
                        int8_t value = n < outputs ? w[n * inputs + k * 64 + four * 4 + i] : 0;
                        block[four * 64 + i] = value;
                        sum += value;
                    }
            }
            sums[n] = sum;
        }
}

/* Rows of activations in two parts: high and low, each [rows, inputs], and scales [rows]. */
typedef struct {
    const int8_t *high, *low;
    const float *scales;
    long inputs;
} Rows;

typedef struct {
    const int8_t *packed;
    const float *scales;  /* of the packed columns */
    const int32_t *sums; /* of the packed columns, which VNNI's unsigned operand asks for */
} Weights;

INLINE __m512 scaled(__m512i high, __m512i low, float row_scale, const float *column_scales) {
    __m512 both = _mm512_fmadd_ps(_mm512_cvtepi32_ps(low), _mm512_set1_ps(1.0f / STRETCH), _mm512_cvtepi32_ps(high));
    return _mm512_mul_ps(_mm512_mul_ps(both, _mm512_set1_ps(row_scale)), _mm512_loadu_ps(column_scales));
}

/* Two blocks of 16 columns of one row. */
INLINE void put_pair(const Target *to, long row, long column, __m512 left, __m512 right) {
    if (to->mode == SILU_TO_BF16) {
        put_gated(to, row, column, left, right);
    } else {
        put(to, row, column, left);
        put(to, row, column + 16, right);
    }
}

#ifdef __AMX_INT8__
typedef int32_t Sums[4][16][16] __attribute__((aligned(64)));

/* `rows` (at most 16) by 32 columns; the upper tiles are the high part, the lower ones the low part. */
static void pair(const Rows *x, const Weights *w, const int8_t *packed, long row, int rows, long column,
                 const Target *to, Sums t) {
    long inputs = x->inputs;
    const int8_t *high = x->high + row * inputs, *low = x->low + row * inputs;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long k = 0; k < inputs; k += 64, packed += 4096) {
        _tile_loadd(6, packed, 64);
        _tile_loadd(7, packed + 1024, 64);
        _tile_loadd(4, high + k, inputs);
        _tile_loadd(5, low + k, inputs);
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
    }
    _tile_stored(0, t[0], 64);
    _tile_stored(1, t[1], 64);
    _tile_stored(2, t[2], 64);
    _tile_stored(3, t[3], 64);
    for (int i = 0; i < rows; i++) {
        float scale = x->scales[row + i];
        put_pair(to, row + i, column,
                 scaled(_mm512_load_si512(t[0][i]), _mm512_load_si512(t[2][i]), scale, w->scales + column),
                 scaled(_mm512_load_si512(t[1][i]), _mm512_load_si512(t[3][i]), scale, w->scales + column + 16));
    }
}

/* `rows` (at most 8), all there are, by 64 columns: the low rows lie behind the high ones and share their tile, and
 * weights come once, one after the other. */
static void few(const Rows *x, const Weights *w, const int8_t *packed, int rows, long column, const Target *to, Sums t) {
    long inputs = x->inputs;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long k = 0; k < inputs; k += 64, packed += 4096) {
        _tile_loadd(4, x->high + k, inputs);
        _tile_loadd(6, packed, 64);
        _tile_dpbssd(0, 4, 6);
        _tile_loadd(7, packed + 1024, 64);
        _tile_dpbssd(1, 4, 7);
        _tile_loadd(6, packed + 2048, 64);
        _tile_dpbssd(2, 4, 6);
        _tile_loadd(7, packed + 3072, 64);
        _tile_dpbssd(3, 4, 7);
    }
    _tile_stored(0, t[0], 64);
    _tile_stored(1, t[1], 64);
    _tile_stored(2, t[2], 64);
    _tile_stored(3, t[3], 64);
    for (int i = 0; i < rows; i++)
        for (int b = 0; b < 4; b += 2) {
            float scale = x->scales[i];
            long at = column + 16 * b;
            put_pair(to, i, at,
                     scaled(_mm512_load_si512(t[b][i]), _mm512_load_si512(t[b][rows + i]), scale, w->scales + at),
                     scaled(_mm512_load_si512(t[b + 1][i]), _mm512_load_si512(t[b + 1][rows + i]), scale, w->scales + at + 16));
        }
}

static void run(const Rows *x, const Weights *w, Task task, const Target *to) {
    Sums t;
    long column = task.group * GROUP, all = task.end - task.first;
    const int8_t *packed = w->packed + task.group * (x->inputs / 64) * 4096;
    if (all <= 8 && x->low == x->high + all * x->inputs) {
        set_tiles(2 * (int)all, 2 * (int)all);
        few(x, w, packed, (int)all, column, to, t);
        return;
    }
    for (long row = task.first; row < task.end; row += 16) {
        int rows = task.end - row < 16 ? (int)(task.end - row) : 16;
        set_tiles(rows, rows);
        pair(x, w, packed, row, rows, column, to, t);
        pair(x, w, packed + 2048, row, rows, column + 32, to, t);
    }
}
#else
/* VNNI multiplies unsigned by signed: activations are raised by 128, and 128 times the weights' sum comes off. */
INLINE __m512i raised(const int8_t *p) {
    int four;
    memcpy(&four, p, sizeof four);
    return _mm512_xor_si512(_mm512_set1_epi32(four), _mm512_set1_epi8((char)0x80));
}

/* `rows` (at most 3, known to the compiler) by 64 columns. */
INLINE void rows_of(const Rows *x, const Weights *w, const int8_t *packed, long row, const int rows, long column,
                    const Target *to) {
    __m512i high[3][4], low[3][4];
    for (int b = 0; b < 4; b++) {
        __m512i off = _mm512_slli_epi32(_mm512_loadu_si512(w->sums + column + 16 * b), 7);
        for (int i = 0; i < rows; i++) high[i][b] = low[i][b] = _mm512_sub_epi32(_mm512_setzero_si512(), off);
    }
    for (long k = 0; k < x->inputs; k += 64, packed += 4096)
        for (int four = 0; four < 16; four++)
            for (int b = 0; b < 4; b++) {
                __m512i weights = _mm512_loadu_si512(packed + b * 1024 + four * 64);
                for (int i = 0; i < rows; i++) {
                    long at = (row + i) * x->inputs + k + 4 * four;
                    high[i][b] = _mm512_dpbusd_epi32(high[i][b], raised(x->high + at), weights);
                    low[i][b] = _mm512_dpbusd_epi32(low[i][b], raised(x->low + at), weights);
                }
            }
    for (int i = 0; i < rows; i++)
        for (int b = 0; b < 4; b += 2) {
            float scale = x->scales[row + i];
            long at = column + 16 * b;
            put_pair(to, row + i, at, scaled(high[i][b], low[i][b], scale, w->scales + at),
                     scaled(high[i][b + 1], low[i][b + 1], scale, w->scales + at + 16));
        }
}

static void run(const Rows *x, const Weights *w, Task task, const Target *to) {
    long column = task.group * GROUP, row = task.first;
    const int8_t *packed = w->packed + task.group * (x->inputs / 64) * 4096;
    for (; row + 3 <= task.end; row += 3) rows_of(x, w, packed, row, 3, column, to);
    for (; row < task.end; row++) rows_of(x, w, packed, row, 1, column, to);
}
#endif

typedef struct {
    Rows x;
    Weights w;
    long rows, groups;
    Target to;
} Product;

static void task(const void *job, long number, int thread) {
    const Product *p = job;
    (void)thread;
    run(&p->x, &p->w, task_at(number, p->rows, p->groups), &p->to);
}

/* high, low [rows, inputs] and row_scales [rows] by packed weights -> out, as `mode` says. inputs: multiple of 64. */
EXPORT void linear_int8(const int8_t *high, const int8_t *low, const float *row_scales, const int8_t *packed,
                        const float *scales, const int32_t *sums, const float *bias, void *out, long rows, long inputs,
                        long groups, long width, long stride, int mode, int threads) {
    Product product = {{high, low, row_scales, inputs}, {packed, scales, sums}, rows, groups, {out, bias, width, stride, mode}};
    run_tasks(task, &product, task_count(rows, groups), threads);
}
