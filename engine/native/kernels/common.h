/* What all kernels share: numbers in and out of registers, the exponential, tile settings.
 *
 * Needs AVX512 with BF16 and VNNI. Files that use tiles ask __AMX_TILE__ themselves. With FLOAT32 rows, weights and K/V are
 * float32, else bfloat16; tiles know no float32, so a library has either or.
 */
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "pool.h"

#define EXPORT __attribute__((visibility("default")))
/* For loops of few turns whose numbers must stay in registers. */
#define UNROLL _Pragma("GCC unroll 16")
#define INLINE static inline __attribute__((always_inline))

/* Rows of one task, for work of one pass over a row: fewer are not worth another thread. */
#define TASK_ROWS 8

/* What rows, weights and K/V are made of, 16 of them at a time. A product takes PER_WORD of them, 32 bits, at once. */
#ifdef FLOAT32
typedef float num;
#define PER_WORD 1
INLINE __m512 load_some(const num *p, __mmask16 keep) { return _mm512_maskz_loadu_ps(keep, p); }
INLINE void store_some(num *p, __mmask16 keep, __m512 v) { _mm512_mask_storeu_ps(p, keep, v); }
INLINE __m512 load_numbers(const num *p) { return _mm512_loadu_ps(p); }
INLINE void store_numbers(num *p, __m512 v) { _mm512_storeu_ps(p, v); }
/* sum + a b. */
INLINE __m512 add_product(__m512 sum, __m512i a, __m512i b) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
}
#else
typedef uint16_t num;
#define PER_WORD 2
INLINE __m512 widened(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }
INLINE __m512 load_some(const num *p, __mmask16 keep) { return widened(_mm256_maskz_loadu_epi16(keep, p)); }
INLINE void store_some(num *p, __mmask16 keep, __m512 v) { _mm256_mask_storeu_epi16(p, keep, (__m256i)_mm512_cvtneps_pbh(v)); }
INLINE __m512 load_numbers(const num *p) { return widened(_mm256_loadu_si256((const void *)p)); }
INLINE void store_numbers(num *p, __m512 v) { _mm256_storeu_si256((void *)p, (__m256i)_mm512_cvtneps_pbh(v)); }
/* sum + a b, of pairs. */
INLINE __m512 add_product(__m512 sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
#endif

/* Four bytes sixteen times: a word of numbers, or four of int8, for all columns of a register. */
INLINE __m512i spread(const void *p) {
    int four;
    memcpy(&four, p, sizeof four);
    return _mm512_set1_epi32(four);
}

/* e^x, to about one unit in the last place (Cephes' expf: Cody-Waite reduction, a polynomial of degree 5).
 * NaN stays NaN: both clamps have x as their second operand, which is what they return then. */
INLINE __m512 exp_ps(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-87.3f), x);
    x = _mm512_min_ps(_mm512_set1_ps(88.3f), x);
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}

/* x / (1 + e^-x). */
INLINE __m512 silu_ps(__m512 x) {
    __m512 e = exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), x));
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
}

/* Lanes of [column, column + 16) that exist in a row of `width`. */
INLINE __mmask16 lanes(long column, long width) {
    long left = width - column;
    return left >= 16 ? 0xFFFF : (__mmask16)((1u << (left > 0 ? left : 0)) - 1);
}

/* Where a product goes. */
enum { TO_NUMBERS = 0, ADD_TO_NUMBERS = 1, TO_FLOAT = 2, SILU_TO_NUMBERS = 3 };

/* A result of the linear kernels: [rows, stride] of numbers or float, `width` columns of it. */
typedef struct {
    void *out;
    const float *bias; /* of the packed columns, or NULL */
    long width, stride;
    int mode;
} Target;

/* 16 columns of one row leave the registers. `column` counts packed columns. */
INLINE void put(const Target *to, long row, long column, __m512 v) {
    __mmask16 keep = lanes(column, to->width);
    if (!keep) return;
    if (to->bias) v = _mm512_add_ps(v, _mm512_loadu_ps(to->bias + column));
    if (to->mode == TO_FLOAT) {
        _mm512_mask_storeu_ps((float *)to->out + row * to->stride + column, keep, v);
        return;
    }
    num *out = (num *)to->out + row * to->stride + column;
    if (to->mode == ADD_TO_NUMBERS) v = _mm512_add_ps(v, load_some(out, keep));
    store_some(out, keep, v);
}

/* Gate and up of the same 16 outputs, which packing has put side by side. `column` counts packed gate columns. */
INLINE void put_gated(const Target *to, long row, long column, __m512 gate, __m512 up) {
    if (to->bias) {
        gate = _mm512_add_ps(gate, _mm512_loadu_ps(to->bias + column));
        up = _mm512_add_ps(up, _mm512_loadu_ps(to->bias + column + 16));
    }
    long place = column / 2;
    __mmask16 keep = lanes(place, to->width);
    num *out = (num *)to->out + row * to->stride + place;
    store_some(out, keep, _mm512_mul_ps(silu_ps(gate), up));
}

#ifdef __AMX_TILE__
/* Tiles 0 to 3 are sums, 4 and 5 rows, 6 and 7 weights; `upper` and `lower` are the rows of 0, 1, 4 and of 2, 3, 5. */
INLINE void set_tiles(int upper, int lower) {
    if (tiles_of_thread == upper * 32 + lower) return;
    tiles_of_thread = upper * 32 + lower;
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } __attribute__((packed)) set;
    memset(&set, 0, sizeof set);
    set.palette = 1;
    for (int i = 0; i < 8; i++) set.bytes[i] = 64, set.rows[i] = 16;
    set.rows[0] = set.rows[1] = set.rows[4] = (uint8_t)upper;
    set.rows[2] = set.rows[3] = set.rows[5] = (uint8_t)lower;
    _tile_loadconfig(&set);
}
#endif

/* Weights are packed in groups of 64 columns. A large batch is walked in blocks of rows that stay in a core's cache
 * while all groups pass by; few rows are all one block. Tasks run group by group within a block of rows. */
#define GROUP 64
#define CHUNK_ROWS 128
#define BLOCK_CHUNKS 2

typedef struct {
    long group, first, end;
} Task;

INLINE long task_count(long rows, long groups) { return groups * ((rows + CHUNK_ROWS - 1) / CHUNK_ROWS); }

INLINE Task task_at(long number, long rows, long groups) {
    long chunks = (rows + CHUNK_ROWS - 1) / CHUNK_ROWS, whole = groups * BLOCK_CHUNKS;
    long block = number / whole, rest = number % whole;
    long in_block = chunks - block * BLOCK_CHUNKS < BLOCK_CHUNKS ? chunks - block * BLOCK_CHUNKS : BLOCK_CHUNKS;
    long first = (block * BLOCK_CHUNKS + rest % in_block) * CHUNK_ROWS;
    Task task = {rest / in_block, first, first + CHUNK_ROWS < rows ? first + CHUNK_ROWS : rows};
    return task;
}
