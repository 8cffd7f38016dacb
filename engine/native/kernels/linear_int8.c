/* y = x Wᵀ with int8 weights, one scale per output, and activations in two int8 rows, one scale per row:
 * x ≈ scale (high + low / 254). Sums are int32, so exact: the same bits in any order, by tiles or by VNNI.
 *
 * Packed for tiles: [groups of 64 columns][inputs / 64][4 blocks][16 fours of inputs][16 columns][4];
 * else: [groups of 64 columns][2][inputs / 4][32 columns][4].
 */
#include "linear.h"
#include "passes.h"

#define STRETCH 254.0f

/* Where the four inputs from 4 * `four` on of a group's `column` begin. */
INLINE long place_of(long inputs, long four, long column) {
#ifdef __AMX_INT8__
    (void)inputs;
    return four / 16 * 4096 + column / 16 * 1024 + four % 16 * 64 + column % 16 * 4;
#else
    return column / HALF * HALF * inputs + four * 4 * HALF + column % HALF * 4;
#endif
}

EXPORT void pack_int8(const int8_t *w, int8_t *packed, int32_t *sums, long outputs, long inputs, long groups) {
    for (long n = 0; n < groups * GROUP; n++) {
        int8_t *group = packed + n / GROUP * GROUP * inputs;
        int32_t sum = 0;
        for (long k = 0; k < inputs; k++) {
            int8_t value = n < outputs ? w[n * inputs + k] : 0;
            group[place_of(inputs, k / 4, n % GROUP) + k % 4] = value;
            sum += value;
        }
        sums[n] = sum;
    }
}

/* Rows of activations in two parts: high and low, each [rows, inputs], and scales [rows]. Without matrix units both
 * parts come raised by 128 (rows.c). */
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
    if (to->mode == SILU_TO_NUMBERS) {
        put_gated(to, row, column, left, right);
    } else {
        put(to, row, column, left);
        put(to, row, column + 16, right);
    }
}

#ifdef __AMX_INT8__
#define TASKS_OF_GROUP 1
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
/* A task is HALF columns. */
#define TASKS_OF_GROUP 2
#define MOST_ROWS 6
typedef __m512i Sums[MOST_ROWS][4]; /* of each row: high and low part, 16 columns and 16 more of each */

/* `rows` (known to the compiler) by HALF columns. Sums stay in registers only while nothing else is done in a function. */
INLINE void multiply(const int8_t *high_rows, const int8_t *low_rows, const int8_t *w, long inputs, Coming coming,
                     const int rows, Sums to) {
    __m512i sums[MOST_ROWS][4];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < 4; j++) sums[i][j] = _mm512_setzero_si512();
    for (long step = 0; step < inputs; step += 64) {
        fetch_some(&coming);
        for (long k = step; k < step + 64; k += 4, w += 4 * HALF) {
            __m512i left = _mm512_loadu_si512(w), right = _mm512_loadu_si512(w + 64);
            UNROLL for (int i = 0; i < rows; i++) {
                __m512i high = spread(high_rows + i * inputs + k), low = spread(low_rows + i * inputs + k);
                sums[i][0] = _mm512_dpbusd_epi32(sums[i][0], high, left);
                sums[i][1] = _mm512_dpbusd_epi32(sums[i][1], high, right);
                sums[i][2] = _mm512_dpbusd_epi32(sums[i][2], low, left);
                sums[i][3] = _mm512_dpbusd_epi32(sums[i][3], low, right);
            }
        }
    }
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < 4; j++) to[i][j] = sums[i][j];
}

typedef void Multiply(const int8_t *high, const int8_t *low, const int8_t *w, long inputs, Coming coming, Sums to);
#define MULTIPLY(rows)                                                                                            \
    __attribute__((noinline)) static void multiply_##rows(const int8_t *high, const int8_t *low, const int8_t *w, \
                                                          long inputs, Coming coming, Sums to) {                  \
        multiply(high, low, w, inputs, coming, rows, to);                                                         \
    }
MULTIPLY(1)
MULTIPLY(2)
MULTIPLY(3)
MULTIPLY(4)
MULTIPLY(5)
MULTIPLY(6)
static Multiply *const multiply_rows[MOST_ROWS] = {multiply_1, multiply_2, multiply_3, multiply_4, multiply_5, multiply_6};

static void run(const Rows *x, const Weights *w, Task task, const Target *to) {
    Sums sums;
    long all = task.end - task.first, inputs = x->inputs, column = task.group * HALF;
    const int8_t *packed = w->packed + column * inputs;
    Passes passes = passes_of(all, MOST_ROWS);
    /* 128 times the weights' sum comes off what raised rows come to. */
    __m512i left_off = _mm512_slli_epi32(_mm512_loadu_si512(w->sums + column), 7);
    __m512i right_off = _mm512_slli_epi32(_mm512_loadu_si512(w->sums + column + 16), 7);
    for (long n = 0; n < passes.count; n++) {
        long row = task.first + first_of(&passes, n, all), end = task.first + first_of(&passes, n + 1, all);
        Coming coming = coming_of(&passes, n, packed + inputs * HALF);
        multiply_rows[end - row - 1](x->high + row * inputs, x->low + row * inputs, packed, inputs, coming, sums);
        for (int i = 0; row < end; i++, row++)
            put_pair(to, row, column,
                     scaled(_mm512_sub_epi32(sums[i][0], left_off), _mm512_sub_epi32(sums[i][2], left_off),
                            x->scales[row], w->scales + column),
                     scaled(_mm512_sub_epi32(sums[i][1], right_off), _mm512_sub_epi32(sums[i][3], right_off),
                            x->scales[row], w->scales + column + 16));
    }
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
    run(&p->x, &p->w, task_at(number, p->rows, p->groups * TASKS_OF_GROUP), &p->to);
}

/* high, low [rows, inputs] and row_scales [rows] by packed weights -> out, as `mode` says. inputs: multiple of 64. */
void linear_int8(const int8_t *high, const int8_t *low, const float *row_scales, const int8_t *packed,
                        const float *scales, const int32_t *sums, const float *bias, void *out, long rows, long inputs,
                        long groups, long width, long stride, int mode, int threads) {
    Product product = {{high, low, row_scales, inputs}, {packed, scales, sums}, rows, groups, {out, bias, width, stride, mode}};
    run_tasks(task, &product, task_count(rows, groups * TASKS_OF_GROUP), threads);
}
