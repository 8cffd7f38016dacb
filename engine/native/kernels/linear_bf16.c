/* y = x Wᵀ in bfloat16 with float32 sums.
 *
 * A sum runs over the inputs in the same order whatever the number of rows and threads: a row has the same bits alone
 * and in company. With tiles (AMX) even one row is bound by reading weights; without them the same packed weights feed
 * the dot products of AVX512-BF16.
 *
 * Packed: [groups of 64 columns][inputs / 32][4 blocks][16 pairs of inputs][16 columns][2].
 */
#include "common.h"

EXPORT void pack_bf16(const bf16 *w, bf16 *packed, long outputs, long inputs, long first_group, long end_group) {
    long steps = inputs / 32;
    for (long g = first_group; g < end_group; g++)
        for (long k = 0; k < steps; k++) {
            uint32_t *block = (uint32_t *)(packed + (g * steps + k) * 2048);
            for (int column = 0; column < GROUP; column++) {
                long n = g * GROUP + column;
                for (int pair = 0; pair < 16; pair++) {
                    uint32_t two = 0;
                    if (n < outputs) memcpy(&two, w + n * inputs + k * 32 + pair * 2, sizeof two);
                    block[(column / 16) * 256 + pair * 16 + column % 16] = two;
                }
            }
        }
}

#ifdef __AMX_BF16__
typedef float Sums[4][16][16] __attribute__((aligned(64)));

INLINE void unload(Sums t) {
    _tile_stored(0, t[0], 64);
    _tile_stored(1, t[1], 64);
    _tile_stored(2, t[2], 64);
    _tile_stored(3, t[3], 64);
}

/* `rows` (at most 16) by the 64 columns of a group: weights come once, one after the other. */
static void few(const bf16 *x, const bf16 *w, long row, int rows, long inputs, long column, const Target *to, Sums t) {
    const bf16 *a = x + row * inputs;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long k = 0; k < inputs; k += 32, w += 2048) {
        _tile_loadd(4, a + k, inputs * 2);
        _tile_loadd(6, w, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + 512, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, w + 1024, 64);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, w + 1536, 64);
        _tile_dpbf16ps(3, 4, 7);
    }
    unload(t);
    for (int i = 0; i < rows; i++) {
        if (to->mode == SILU_TO_BF16) {
            put_gated(to, row + i, column, _mm512_load_ps(t[0][i]), _mm512_load_ps(t[1][i]));
            put_gated(to, row + i, column + 32, _mm512_load_ps(t[2][i]), _mm512_load_ps(t[3][i]));
        } else {
            for (int b = 0; b < 4; b++) put(to, row + i, column + 16 * b, _mm512_load_ps(t[b][i]));
        }
    }
}

/* 16 + `lower` rows by 32 columns: two by two tiles. */
static void many(const bf16 *x, const bf16 *w, long row, int lower, long inputs, long column, const Target *to, Sums t) {
    const bf16 *a = x + row * inputs;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long k = 0; k < inputs; k += 32, w += 2048) {
        _tile_loadd(6, w, 64);
        _tile_loadd(7, w + 512, 64);
        _tile_loadd(4, a + k, inputs * 2);
        _tile_loadd(5, a + 16 * inputs + k, inputs * 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    unload(t);
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < (half ? lower : 16); i++) {
            __m512 left = _mm512_load_ps(t[2 * half][i]), right = _mm512_load_ps(t[2 * half + 1][i]);
            long to_row = row + 16 * half + i;
            if (to->mode == SILU_TO_BF16) {
                put_gated(to, to_row, column, left, right);
            } else {
                put(to, to_row, column, left);
                put(to, to_row, column + 16, right);
            }
        }
}

static void run(const bf16 *x, const bf16 *w, long inputs, Task task, const Target *to) {
    Sums t;
    long column = task.group * GROUP;
    w += task.group * (inputs / 32) * 2048;
    for (long row = task.first; row < task.end;) {
        long left = task.end - row;
        int upper = left < 16 ? (int)left : 16;
        int lower = left < 32 ? (int)left - 16 : 16;
        /* `few` uses tiles 2 and 3 for the same rows. */
        if (left <= 16) lower = upper;
        set_tiles(upper, lower);
        if (left <= 16) {
            few(x, w, row, upper, inputs, column, to, t);
            row += upper;
        } else {
            many(x, w, row, lower, inputs, column, to, t);
            many(x, w + 1024, row, lower, inputs, column + 32, to, t);
            row += 16 + lower;
        }
    }
}
#else
/* `rows` (at most 6, known to the compiler) by 64 columns. */
INLINE void rows_of(const bf16 *x, const bf16 *w, long row, const int rows, long inputs, long column, const Target *to) {
    __m512 sums[6][4];
    for (int i = 0; i < rows; i++)
        for (int b = 0; b < 4; b++) sums[i][b] = _mm512_setzero_ps();
    for (long k = 0; k < inputs; k += 32, w += 2048)
        for (int pair = 0; pair < 16; pair++)
            for (int b = 0; b < 4; b++) {
                __m512bh weights = (__m512bh)_mm512_loadu_si512(w + b * 512 + pair * 32);
                for (int i = 0; i < rows; i++) {
                    int two;
                    memcpy(&two, x + (row + i) * inputs + k + 2 * pair, sizeof two);
                    sums[i][b] = _mm512_dpbf16_ps(sums[i][b], (__m512bh)_mm512_set1_epi32(two), weights);
                }
            }
    for (int i = 0; i < rows; i++) {
        if (to->mode == SILU_TO_BF16) {
            put_gated(to, row + i, column, sums[i][0], sums[i][1]);
            put_gated(to, row + i, column + 32, sums[i][2], sums[i][3]);
        } else {
            for (int b = 0; b < 4; b++) put(to, row + i, column + 16 * b, sums[i][b]);
        }
    }
}

static void run(const bf16 *x, const bf16 *w, long inputs, Task task, const Target *to) {
    long column = task.group * GROUP, row = task.first;
    w += task.group * (inputs / 32) * 2048;
    for (; row + 6 <= task.end; row += 6) rows_of(x, w, row, 6, inputs, column, to);
    for (; row + 2 <= task.end; row += 2) rows_of(x, w, row, 2, inputs, column, to);
    for (; row < task.end; row++) rows_of(x, w, row, 1, inputs, column, to);
}
#endif

typedef struct {
    const bf16 *x, *w;
    long rows, inputs, groups;
    Target to;
} Product;

static void task(const void *job, long number, int thread) {
    const Product *p = job;
    (void)thread;
    run(p->x, p->w, p->inputs, task_at(number, p->rows, p->groups), &p->to);
}

/* x [rows, inputs] by packed weights of `groups` * 64 columns -> out, as `mode` says. inputs: a multiple of 32. */
EXPORT void linear_bf16(const bf16 *x, const bf16 *w, const float *bias, void *out, long rows, long inputs, long groups,
                        long width, long stride, int mode, int threads) {
    Product product = {x, w, rows, inputs, groups, {out, bias, width, stride, mode}};
    run_tasks(task, &product, task_count(rows, groups), threads);
}
