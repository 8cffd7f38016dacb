/* y = x Wᵀ in bfloat16 or float32, with float32 sums.
 *
 * A sum runs over the inputs in the same order whatever the number of rows and threads: a row has the same bits alone
 * and in company. With tiles (AMX) even one row is bound by reading weights; without them
 * products of words (a pair of bfloat16, or one float32) take them in another order of memory.
 *
 * Packed for tiles: [groups of 64 columns][inputs / 32][4 blocks][16 pairs of inputs][16 columns][2];
 * else: [groups of 64 columns][2][words of inputs][32 columns][PER_WORD].
 */
#include "linear.h"
#include "passes.h"

/* Where a group's `column` has the PER_WORD inputs of `word`, in words. */
INLINE long place_of(long inputs, long word, long column) {
#ifdef __AMX_BF16__
    (void)inputs;
    return word / 16 * 1024 + column / 16 * 256 + word % 16 * 16 + column % 16;
#else
    return column / HALF * HALF * (inputs / PER_WORD) + word * HALF + column % HALF;
#endif
}

EXPORT void pack_numbers(const num *w, num *packed, long outputs, long inputs, long first_group, long end_group) {
    for (long n = first_group * GROUP; n < end_group * GROUP; n++) {
        uint32_t *group = (uint32_t *)(packed + n / GROUP * GROUP * inputs);
        for (long word = 0; word < inputs / PER_WORD; word++) {
            uint32_t numbers = 0;
            if (n < outputs) memcpy(&numbers, w + n * inputs + PER_WORD * word, sizeof numbers);
            group[place_of(inputs, word, n % GROUP)] = numbers;
        }
    }
}

#ifdef __AMX_BF16__
#define TASKS_OF_GROUP 1
typedef float Sums[4][16][16] __attribute__((aligned(64)));

INLINE void unload(Sums t) {
    _tile_stored(0, t[0], 64);
    _tile_stored(1, t[1], 64);
    _tile_stored(2, t[2], 64);
    _tile_stored(3, t[3], 64);
}

/* `rows` (at most 16) by the 64 columns of a group: weights come once, one after the other. */
static void few(const num *x, const num *w, long row, int rows, long inputs, long column, const Target *to, Sums t) {
    const num *a = x + row * inputs;
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
        if (to->mode == SILU_TO_NUMBERS) {
            put_gated(to, row + i, column, _mm512_load_ps(t[0][i]), _mm512_load_ps(t[1][i]));
            put_gated(to, row + i, column + 32, _mm512_load_ps(t[2][i]), _mm512_load_ps(t[3][i]));
        } else {
            for (int b = 0; b < 4; b++) put(to, row + i, column + 16 * b, _mm512_load_ps(t[b][i]));
        }
    }
}

/* 16 + `lower` rows by 32 columns: two by two tiles. */
static void many(const num *x, const num *w, long row, int lower, long inputs, long column, const Target *to, Sums t) {
    const num *a = x + row * inputs;
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
            if (to->mode == SILU_TO_NUMBERS) {
                put_gated(to, to_row, column, left, right);
            } else {
                put(to, to_row, column, left);
                put(to, to_row, column + 16, right);
            }
        }
}

static void run(const num *x, const num *w, long inputs, Task task, const Target *to) {
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
/* A task is HALF columns. */
#define TASKS_OF_GROUP 2
#define MOST_ROWS 12
typedef __m512 Sums[MOST_ROWS][2];

/* `rows` (known to the compiler) by HALF columns. Sums stay in registers only while nothing else is done in a function. */
INLINE void multiply(const num *x, const num *w, long inputs, Coming coming, const int rows, Sums to) {
    __m512 sums[MOST_ROWS][2];
    UNROLL for (int i = 0; i < rows; i++) sums[i][0] = sums[i][1] = _mm512_setzero_ps();
    for (long step = 0; step < inputs; step += 16 * PER_WORD) {
        fetch_some(&coming);
        for (long k = step; k < step + 16 * PER_WORD; k += PER_WORD, w += PER_WORD * HALF) {
            __m512i left = _mm512_loadu_si512(w), right = _mm512_loadu_si512(w + 16 * PER_WORD);
            UNROLL for (int i = 0; i < rows; i++) {
                __m512i word = spread(x + i * inputs + k);
                sums[i][0] = add_product(sums[i][0], word, left);
                sums[i][1] = add_product(sums[i][1], word, right);
            }
        }
    }
    UNROLL for (int i = 0; i < rows; i++) to[i][0] = sums[i][0], to[i][1] = sums[i][1];
}

typedef void Multiply(const num *x, const num *w, long inputs, Coming coming, Sums to);
#define MULTIPLY(rows)                                                                                                         \
    __attribute__((noinline)) static void multiply_##rows(const num *x, const num *w, long inputs, Coming coming, Sums to) { \
        multiply(x, w, inputs, coming, rows, to);                                                                              \
    }
MULTIPLY(1)
MULTIPLY(2)
MULTIPLY(3)
MULTIPLY(4)
MULTIPLY(5)
MULTIPLY(6)
MULTIPLY(7)
MULTIPLY(8)
MULTIPLY(9)
MULTIPLY(10)
MULTIPLY(11)
MULTIPLY(12)
static Multiply *const multiply_rows[MOST_ROWS] = {multiply_1, multiply_2, multiply_3, multiply_4,  multiply_5,  multiply_6,
                                                   multiply_7, multiply_8, multiply_9, multiply_10, multiply_11, multiply_12};

static void run(const num *x, const num *w, long inputs, Task task, const Target *to) {
    Sums sums;
    long all = task.end - task.first, column = task.group * HALF;
    Passes passes = passes_of(all, MOST_ROWS);
    w += column * inputs;
    for (long n = 0; n < passes.count; n++) {
        long row = task.first + first_of(&passes, n, all), end = task.first + first_of(&passes, n + 1, all);
        multiply_rows[end - row - 1](x + row * inputs, w, inputs, coming_of(&passes, n, w + inputs * HALF), sums);
        for (int i = 0; row < end; i++, row++) {
            if (to->mode == SILU_TO_NUMBERS) {
                put_gated(to, row, column, sums[i][0], sums[i][1]);
            } else {
                put(to, row, column, sums[i][0]);
                put(to, row, column + 16, sums[i][1]);
            }
        }
    }
}
#endif

typedef struct {
    const num *x, *w;
    long rows, inputs, groups;
    Target to;
} Product;

static void task(const void *job, long number, int thread) {
    const Product *p = job;
    (void)thread;
    run(p->x, p->w, p->inputs, task_at(number, p->rows, p->groups * TASKS_OF_GROUP), &p->to);
}

/* x [rows, inputs] by packed weights of `groups` * 64 columns -> out, as `mode` says. inputs: a multiple of 32. */
void linear_numbers(const num *x, const num *w, const float *bias, void *out, long rows, long inputs, long groups,
                        long width, long stride, int mode, int threads) {
    Product product = {x, w, rows, inputs, groups, {out, bias, width, stride, mode}};
    run_tasks(task, &product, task_count(rows, groups * TASKS_OF_GROUP), threads);
}
