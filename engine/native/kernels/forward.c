/* The layers of a model, one after the other, in one call.
 *
 * Whoever calls a kernel from Python has to get the interpreter back after it, and another thread may have it: with a call
 * for each kernel a forward would stop some two hundred times a step for whatever other threads do. So what a layer is made
 * of is described once, and the interpreter is needed again when the forward is over.
 */
#include "decode.h"
#include "linear.h"
#include "prefill.h"
#include "rows.h"

/* A packed matrix. In int8 it has scales and sums, else neither. */
typedef struct {
    const void *packed;
    const float *scales;
    const int32_t *sums;
    const float *bias;           /* or NULL */
    long inputs, groups, width; /* width: columns of a result */
} Matrix;

typedef struct {
    const float *weight; /* [inputs] */
    float eps;
} Norm;

/* What layers of one window have to compute in this step, each or NULL. Where K and V are depends on the layer. */
typedef struct {
    const Decode *rows;
    const Prefill *pieces;
} Attention;

typedef struct {
    Norm attention_norm, mlp_norm;
    Matrix qkv, attention_out, gate_up, down;
    const float *head_norm; /* see Heads */
    num *k, *v;             /* caches */
    long window;            /* index of its Attention */
} Layer;

/* What rows need on their way into a product. */
typedef struct {
    void *narrow;  /* [rows, widest] numbers, or [2 rows, widest] int8: high rows, then low rows */
    float *scales; /* [rows] */
    float *wide;   /* [threads, widest] */
    long rows;
    int threads;
} Passage;

typedef struct {
    Passage passage;
    const Layer *layers;
    const Attention *attention;
    const Heads *heads;
    num *hidden;  /* [rows, hidden size] */
    num *mixed;   /* [rows, q_heads dim]: what attention leaves */
    num *between; /* [rows, intermediate size] */
} Forward;

/* out = norm(x) Wᵀ + bias, as `mode` says. `norm` may be NULL. */
EXPORT void multiply(const Passage *p, const Matrix *m, const num *x, void *out, int mode, const Norm *norm) {
    long rows = p->rows;
    if (m->scales) {
        int8_t *high = p->narrow, *low = high + rows * m->inputs;
        quantize_rows(x, norm ? norm->weight : NULL, norm ? norm->eps : 0.0f, high, low, p->scales, p->wide, rows, m->inputs,
                      p->threads);
        linear_int8(high, low, p->scales, m->packed, m->scales, m->sums, m->bias, out, rows, m->inputs, m->groups, m->width,
                    m->width, mode, p->threads);
        return;
    }
    if (norm) {
        norm_rows(x, norm->weight, norm->eps, p->narrow, rows, m->inputs, p->threads);
        x = p->narrow;
    }
    linear_numbers(x, m->packed, m->bias, out, rows, m->inputs, m->groups, m->width, m->width, mode, p->threads);
}

/* Up to the place where K and V of every row are written. */
EXPORT void begin_layer(const Forward *f, long number) {
    const Layer *l = f->layers + number;
    Heads heads = *f->heads;
    heads.head_norm = l->head_norm;
    heads.k_slots = l->k;
    heads.v_slots = l->v;
    multiply(&f->passage, &l->qkv, f->hidden, heads.qkv, TO_NUMBERS, &l->attention_norm);
    rotate_and_store(&heads);
}

EXPORT void attend_layer(const Forward *f, long number) {
    const Layer *l = f->layers + number;
    const Attention *attention = f->attention + l->window;
    if (attention->rows) {
        Decode rows = *attention->rows;
        rows.k = l->k;
        rows.v = l->v;
        decode_attention(&rows);
    }
    if (attention->pieces) {
        Prefill pieces = *attention->pieces;
        pieces.k = l->k;
        pieces.v = l->v;
        prefill_attention(&pieces);
    }
}

/* From what attention has left to the next layer's input. */
EXPORT void finish_layer(const Forward *f, long number) {
    const Layer *l = f->layers + number;
    multiply(&f->passage, &l->attention_out, f->mixed, f->hidden, ADD_TO_NUMBERS, NULL);
    multiply(&f->passage, &l->gate_up, f->hidden, f->between, SILU_TO_NUMBERS, &l->mlp_norm);
    multiply(&f->passage, &l->down, f->between, f->hidden, ADD_TO_NUMBERS, NULL);
}

/* Layers [0, count) as a whole. */
EXPORT void run_layers(const Forward *f, long count) {
    for (long number = 0; number < count; number++) {
        begin_layer(f, number);
        attend_layer(f, number);
        finish_layer(f, number);
    }
}
