/* Attention of prompt pieces over paged K/V.
 *
 * Query rows of all heads that share a K/V head are columns of one product, 16 to a tile or a register: scores come out as
 * [tokens, columns], so that softmax runs down columns and no register is ever summed across. In what order: attention.h.
 *
 * First K and V of each context are laid out, once for all columns:
 * K [tokens, dim], V [tokens / 32][dim / 16][16 of dim][32 tokens], in float32 V [tokens, dim], for each piece and K/V head;
 * beyond a context: zeros.
 */
#include "prefill.h"

INLINE long layout_of(const Prefill *f, const Piece *p, long kv) { return (p->offset * f->kv_heads + kv * p->padded) * f->dim; }

/* The numbers of one K/V head of STEP tokens, one token after the other. */
INLINE void copy_tokens(const num *from, const long *places, long dim, num *to) {
    for (long t = 0; t < STEP; t++, to += dim) {
        if (places[t] < 0)
            memset(to, 0, (size_t)dim * sizeof *to);
        else
            memcpy(to, from + places[t], (size_t)dim * sizeof *to);
    }
}

#ifndef FLOAT32
/* The values of one K/V head of STEP tokens, 32 tokens side by side. */
INLINE void turn_tokens(const num *from, const long *places, long dim, num *to) {
    for (long half = 0; half < STEP; half += 32)
        for (long i = 0; i < dim; i += 16, to += 512) {
            __m512i pairs[16];
            for (int j = 0; j < 16; j++) {
                __m256i two[2];
                for (int n = 0; n < 2; n++) {
                    long place = places[half + 2 * j + n];
                    two[n] = place < 0 ? _mm256_setzero_si256() : _mm256_loadu_si256((const void *)(from + place + i));
                }
                pairs[j] = _mm512_or_si512(_mm512_cvtepu16_epi32(two[0]), _mm512_slli_epi32(_mm512_cvtepu16_epi32(two[1]), 16));
            }
            transpose(pairs);
            for (int j = 0; j < 16; j++) _mm512_storeu_si512(to + 32 * j, pairs[j]);
        }
}
#endif

static void lay_out(const void *job, long number, int thread) {
    const Prefill *f = job;
    (void)thread;
    const Item *item = f->layouts + number;
    const Piece *p = f->pieces + item->piece;
    long dim = f->dim, width = f->kv_heads * dim, first = p->first + (long)item->block * STEP;
    long places[STEP]; /* of tokens in a cache; -1: beyond the context */
    for (long t = 0; t < STEP; t++) {
        long position = first + t;
        places[t] = position < p->length
                        ? ((long)f->page_ids[p->pages + position / f->page_size] * f->page_size + position % f->page_size) * width
                        : -1;
    }
    for (long kv = 0; kv < f->kv_heads; kv++) {
        long layout = layout_of(f, p, kv) + (long)item->block * STEP * dim;
        copy_tokens(f->k + kv * dim, places, dim, f->laid_k + layout);
#ifdef FLOAT32
        copy_tokens(f->v + kv * dim, places, dim, f->laid_v + layout);
#else
        turn_tokens(f->v + kv * dim, places, dim, f->laid_v + layout);
#endif
    }
}

/* 16 columns: where their rows are, what they have seen. */
typedef struct {
    const num *q[16];
    num *out[16];
    int count;               /* of columns that exist; the others repeat the last */
    __m512i position;        /* of each column's row */
    int32_t lowest, highest; /* position */
    __m512 most, total;
} Tile;

static Tile tile_at(const Prefill *f, const Piece *p, long kv, long column) {
    Tile tile;
    int32_t positions[16];
    long group = f->q_heads / f->kv_heads, columns = p->rows * group;
    tile.count = columns - column < 16 ? (int)(columns - column > 0 ? columns - column : 0) : 16;
    for (int i = 0; i < 16; i++) {
        long at = column + i < columns ? column + i : columns - 1, row = at / group, head = kv * group + at % group;
        tile.q[i] = f->q + (p->row + row) * f->q_stride + head * f->dim;
        tile.out[i] = f->out + (p->row + row) * f->out_stride + head * f->dim;
        positions[i] = (int32_t)(p->prefix + row);
    }
    tile.position = _mm512_loadu_si512(positions);
    tile.lowest = positions[0];
    tile.highest = positions[15];
    tile.most = _mm512_set1_ps(NOTHING);
    tile.total = _mm512_setzero_ps();
    return tile;
}

/* Weights of PER_WORD tokens as words: of two tokens, the first one's numbers in the lower halves. */
INLINE __m512i words_of(const __m512 *w) {
#ifdef FLOAT32
    return _mm512_castps_si512(w[0]);
#else
    __m256i a = (__m256i)_mm512_cvtneps_pbh(w[0]), b = (__m256i)_mm512_cvtneps_pbh(w[1]);
    return _mm512_or_si512(_mm512_cvtepu16_epi32(a), _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16));
#endif
}

/* Scores [STEP, 16] of tokens from `token` on -> weights as words of tokens [STEP / PER_WORD, 16], and what was computed so
 * far, `sums` [dim, 16], on the same scale. */
static void soften(Tile *tile, float (*scores)[16], uint32_t (*words)[16], float (*sums)[16], const Prefill *f, int32_t token) {
    const __m512 scale = _mm512_set1_ps(f->scale), nothing = _mm512_set1_ps(-__builtin_inff());
    __mmask16 seen[STEP];
    int everything = tile->lowest >= token + STEP - 1 && (!f->window || tile->highest - token < f->window);
    __m512 most = tile->most;
    for (int t = 0; t < STEP; t++) {
        __m512 score = _mm512_mul_ps(_mm512_load_ps(scores[t]), scale);
        if (!everything) {
            __m512i behind = _mm512_sub_epi32(tile->position, _mm512_set1_epi32(token + t));
            seen[t] = _mm512_cmpge_epi32_mask(behind, _mm512_setzero_si512());
            if (f->window) seen[t] &= _mm512_cmplt_epi32_mask(behind, _mm512_set1_epi32((int)f->window));
            score = _mm512_mask_mov_ps(nothing, seen[t], score);
        }
        _mm512_store_ps(scores[t], score);
        most = _mm512_max_ps(score, most); /* NaN leaves it as it is */
    }
    if (_mm512_cmp_ps_mask(most, tile->most, _CMP_GT_OQ)) {
        __m512 less = fading(tile->most, most);
        for (long i = 0; i < f->dim; i++) _mm512_store_ps(sums[i], _mm512_mul_ps(_mm512_load_ps(sums[i]), less));
        tile->total = _mm512_mul_ps(tile->total, less);
        tile->most = most;
    }
    /* Weights are summed as a decode row sums them, whose registers hold 16 tokens: token j with j + 16, j + 32, j + 48,
     * then the 16 sums by halves. */
    __m512 totals[16];
    for (int t = 0; t < STEP; t += PER_WORD) {
        __m512 w[PER_WORD];
        for (int n = 0; n < PER_WORD; n++) {
            w[n] = exp_ps(_mm512_sub_ps(_mm512_load_ps(scores[t + n]), most));
            if (!everything) w[n] = _mm512_maskz_mov_ps(seen[t + n], w[n]);
            int j = (t + n) % 16;
            totals[j] = t < 16 ? w[n] : _mm512_add_ps(totals[j], w[n]);
        }
        _mm512_store_si512(words[t / PER_WORD], words_of(w));
    }
    for (int half = 8; half; half /= 2)
        for (int j = 0; j < half; j++) totals[j] = _mm512_add_ps(totals[j], totals[j + half]);
    tile->total = _mm512_add_ps(tile->total, totals[0]);
}

/* A part is over: what all parts before have left, and it, become one; the next part begins with nothing. */
static void finish_part(Tile *tile, Tile *all, float (*sums)[16], float (*all_sums)[16], long dim) {
    __m512 most = _mm512_max_ps(tile->most, all->most);
    __m512 a = fading(all->most, most), b = fading(tile->most, most);
    for (long i = 0; i < dim; i++) {
        __m512 part = _mm512_mul_ps(_mm512_load_ps(sums[i]), b);
        _mm512_store_ps(all_sums[i], _mm512_add_ps(_mm512_mul_ps(_mm512_load_ps(all_sums[i]), a), part));
        _mm512_store_ps(sums[i], _mm512_setzero_ps());
    }
    all->total = _mm512_add_ps(_mm512_mul_ps(all->total, a), _mm512_mul_ps(tile->total, b));
    all->most = most;
    tile->most = _mm512_set1_ps(NOTHING);
    tile->total = _mm512_setzero_ps();
}

static void leave(const Tile *tile, float (*sums)[16], long dim) {
    __m512 share = _mm512_div_ps(_mm512_set1_ps(1.0f), tile->total);
    for (long i = 0; i < dim; i += 16) {
        __m512i rows[16];
        for (int j = 0; j < 16; j++) rows[j] = _mm512_castps_si512(_mm512_mul_ps(_mm512_load_ps(sums[i + j]), share));
        transpose(rows);
        for (int c = 0; c < tile->count; c++) store_numbers(tile->out[c] + i, _mm512_castsi512_ps(rows[c]));
    }
}

/* What the threads of `compute` keep of COLUMNS columns, 16 in each half. */
typedef struct {
    float scores[2][STEP][16];
    float sums[2][MOST_DIM][16], all_sums[2][MOST_DIM][16];
    uint32_t words[2][STEP / PER_WORD][16];
    uint32_t queries[2][MOST_DIM / WORDS][16][16];
} __attribute__((aligned(64))) Columns;

#ifdef __AMX_BF16__
/* Scores of STEP tokens, whose K is laid out at `k`. */
INLINE void score(Columns *c, const num *k, long dim, long count) {
    (void)count;
    for (int t = 0; t < STEP; t += 16, k += 16 * dim) {
        _tile_zero(0);
        _tile_zero(1);
        for (long i = 0; i < dim; i += 32) {
            _tile_loadd(4, k + i, dim * 2);
            _tile_loadd(6, c->queries[0][i / 32], 64);
            _tile_loadd(7, c->queries[1][i / 32], 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        }
        _tile_stored(0, c->scores[0][t], 64);
        _tile_stored(1, c->scores[1][t], 64);
    }
}

/* Add the values of STEP tokens, laid out at `v`, weighed. */
INLINE void gather(Columns *c, const num *v, long dim, long count) {
    (void)count;
    for (long i = 0; i < dim; i += 16, v += 512) {
        _tile_loadd(0, c->sums[0][i], 64);
        _tile_loadd(1, c->sums[1][i], 64);
        for (int half = 0; half < 2; half++) {
            _tile_loadd(4, v + half * 32 * dim, 64);
            _tile_loadd(6, c->words[0][16 * half], 64);
            _tile_loadd(7, c->words[1][16 * half], 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        }
        _tile_stored(0, c->sums[0][i], 64);
        _tile_stored(1, c->sums[1][i], 64);
    }
}
#else
#define AT_ONCE 8 /* tokens, or numbers of a head, by two registers of columns: their sums stay in registers */

/* Scores of the first `count` tokens of a step, and some more, whose K is laid out at `k`; the others are never looked at. */
__attribute__((noinline)) static void score(Columns *c, const num *k, long dim, long count) {
    const __m512i *left = (const __m512i *)c->queries[0], *right = (const __m512i *)c->queries[1];
    for (long t = 0; t < count; t += AT_ONCE, k += AT_ONCE * dim) {
        __m512 sums[AT_ONCE][2];
        UNROLL for (int j = 0; j < AT_ONCE; j++) sums[j][0] = sums[j][1] = _mm512_setzero_ps();
        for (long i = 0; i < dim / PER_WORD; i++)
            UNROLL for (int j = 0; j < AT_ONCE; j++) {
                __m512i word = spread(k + j * dim + PER_WORD * i);
                sums[j][0] = add_product(sums[j][0], word, left[i]);
                sums[j][1] = add_product(sums[j][1], word, right[i]);
            }
        UNROLL for (int j = 0; j < AT_ONCE; j++)
            for (int h = 0; h < 2; h++) _mm512_store_ps(c->scores[h][t + j], sums[j][h]);
    }
}

/* Add the values of the first `count` tokens of a step, laid out at `v`, weighed. */
__attribute__((noinline)) static void gather(Columns *c, const num *v, long dim, long count) {
    const __m512i *left = (const __m512i *)c->words[0], *right = (const __m512i *)c->words[1];
    for (long i = 0; i < dim; i += AT_ONCE) {
        __m512 sums[AT_ONCE][2];
        UNROLL for (int j = 0; j < AT_ONCE; j++)
            for (int h = 0; h < 2; h++) sums[j][h] = _mm512_load_ps(c->sums[h][i + j]);
        for (long t = 0; t < count; t += PER_WORD) {
#ifdef FLOAT32
            const num *at = v + t * dim + i;
            const long step = 1;
#else
            const num *at = v + t / 32 * 32 * dim + i * 32 + t % 32;
            const long step = 32;
#endif
            UNROLL for (int j = 0; j < AT_ONCE; j++) {
                __m512i word = spread(at + step * j);
                sums[j][0] = add_product(sums[j][0], word, left[t / PER_WORD]);
                sums[j][1] = add_product(sums[j][1], word, right[t / PER_WORD]);
            }
        }
        UNROLL for (int j = 0; j < AT_ONCE; j++)
            for (int h = 0; h < 2; h++) _mm512_store_ps(c->sums[h][i + j], sums[j][h]);
    }
}
#endif

static void compute(const void *job, long number, int thread) {
    const Prefill *f = job;
    (void)thread;
    const Item *item = f->items + number;
    const Piece *p = f->pieces + item->piece;
    long dim = f->dim, layout = layout_of(f, p, item->kv);
    Columns c;
    Tile tiles[2], all[2];
    for (int h = 0; h < 2; h++) {
        tiles[h] = tile_at(f, p, item->kv, (long)item->block * COLUMNS + 16 * h);
        all[h] = tiles[h];
        memset(c.sums[h], 0, (size_t)dim * sizeof c.sums[h][0]);
        memset(c.all_sums[h], 0, (size_t)dim * sizeof c.sums[h][0]);
        pack_queries(tiles[h].q, 16, dim, c.queries[h]);
    }
#ifdef __AMX_BF16__
    set_tiles(16, 16);
#endif
    long token = p->first, end = tiles[1].highest + 1;
    if (f->window && tiles[0].lowest - f->window + 1 > token)
        token += (tiles[0].lowest - f->window + 1 - token) / STEP * STEP;
    for (; token < end; token += STEP) {
        long at = layout + (token - p->first) * dim, count = end - token < STEP ? end - token : STEP;
        score(&c, f->laid_k + at, dim, count);
        for (int h = 0; h < 2; h++) soften(&tiles[h], c.scores[h], c.words[h], c.sums[h], f, (int32_t)token);
        gather(&c, f->laid_v + at, dim, count);
        if ((token + STEP) % PART == 0 || token + STEP >= end)
            for (int h = 0; h < 2; h++) finish_part(&tiles[h], &all[h], c.sums[h], c.all_sums[h], dim);
    }
    for (int h = 0; h < 2; h++) leave(&all[h], c.all_sums[h], dim);
}

/* q [rows, q_heads, dim] of the rows of all pieces -> out. dim: a multiple of 32, at most 256. */
EXPORT void prefill_attention(const Prefill *f) {
    run_tasks(lay_out, f, f->num_layouts, f->threads);
    run_tasks(compute, f, f->num_items, f->threads);
}

/* Whether the compiler knew the matrix units: what is asked for by -march=native is what it knows of this processor. */
EXPORT int use_tiles(void) {
#ifdef __AMX_BF16__
    return 1;
#else
    return 0;
#endif
}

/* Bytes of what rows, weights and K/V are made of: 4 of float32, 2 of bfloat16. */
EXPORT int number_bytes(void) { return (int)sizeof(num); }
