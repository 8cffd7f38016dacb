/* What attention of decode rows and of prompt pieces share.
 *
 * Both compute a row in the same order, so that it has the same bits as a decode row, in a prompt, in any piece of it and
 * behind any prefix: scores in steps of STEP tokens, counted from the start of the context; softmax online from step to
 * step (FlashAttention, arXiv:2205.14135) within a part of PART tokens; parts put together one after the other
 * (Flash-Decoding). A step or a part of which a row sees nothing leaves its numbers as they are.
 *
 * A score is summed over words of dim (a pair of bfloat16, or one float32), a result over words of tokens, both from the first
 * on, whether a tile does it or VDPBF16PS. With matrix units the bits are others than without.
 */
#pragma once

#include "common.h"

#define STEP 64
#define PART 256
#define MOST_DIM 256
/* Below every score, and finite: what is scaled by e to the power of it is 0 already. */
#define NOTHING (-1e30f)

/* Rows become columns, 16 by 16 of 32 bits. */
INLINE void transpose(__m512i *r) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xDD);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xDD);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xDD);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xDD);
    }
}

/* Numbers in 16 words. */
#define WORDS (16 * PER_WORD)

/* Up to 16 rows of q as the second factor of a product: [dim / WORDS][16 words][16 rows]. */
INLINE void pack_queries(const num *const *rows, int count, long dim, uint32_t (*to)[16][16]) {
    for (long i = 0; i < dim; i += WORDS) {
        __m512i r[16];
        for (int c = 0; c < 16; c++) r[c] = c < count ? _mm512_loadu_si512(rows[c] + i) : _mm512_setzero_si512();
        transpose(r);
        for (int j = 0; j < 16; j++) _mm512_store_si512(to[i / WORDS][j], r[j]);
    }
}

/* How much less what was computed so far counts, once `most` is the largest score. */
INLINE __m512 fading(__m512 before, __m512 most) { return exp_ps(_mm512_sub_ps(before, most)); }

/* One query head of a decode row, one step: scores of STEP tokens, scaled -> weights as numbers. `most`, `total` and
 * `sums` (dim / 16 registers, each `stride` numbers after the one before) are brought to the same scale. */
INLINE void weigh_step(const __m512 *scores, const __mmask16 *seen, float *most_so_far, float *total, float *sums, long stride,
                       long dim, num *weights) {
    __m512 before = _mm512_set1_ps(*most_so_far), top = _mm512_set1_ps(NOTHING);
    for (int b = 0; b < STEP / 16; b++) top = _mm512_mask_max_ps(top, seen[b], scores[b], top);
    __m512 most = _mm512_max_ps(_mm512_set1_ps(_mm512_reduce_max_ps(top)), before);
    if (_mm512_cmp_ps_mask(most, before, _CMP_GT_OQ)) {
        __m512 less = fading(before, most);
        for (long i = 0; i < dim / 16; i++)
            _mm512_storeu_ps(sums + i * stride, _mm512_mul_ps(_mm512_loadu_ps(sums + i * stride), less));
        *total *= _mm512_cvtss_f32(less);
        *most_so_far = _mm512_cvtss_f32(most);
    }
    __m512 totals = _mm512_setzero_ps();
    for (int b = 0; b < STEP / 16; b++) {
        __m512 w = _mm512_maskz_mov_ps(seen[b], exp_ps(_mm512_sub_ps(scores[b], most)));
        totals = b ? _mm512_add_ps(totals, w) : w;
        store_numbers(weights + 16 * b, w);
    }
    /* By halves: 16 sums, 8, 4, 2, 1. */
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(totals), _mm512_extractf32x8_ps(totals, 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    *total += _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
