/* Prompt pieces: what their kernel is given. */
#pragma once

#include <stdint.h>

#include "attention.h"

#define COLUMNS 32 /* of one task: two tiles */

/* Query rows [row, row + rows) sit at positions [prefix, prefix + rows) of a context of `length` tokens. */
typedef struct {
    int32_t row, rows, prefix, length;
    int32_t pages;  /* where the request's page ids begin in `page_ids` */
    int32_t first;  /* tokens before it are hidden from every row; a multiple of STEP */
    int32_t padded; /* tokens of the layout: length - first, up to a multiple of STEP */
    int32_t offset; /* tokens of the layouts before this one */
} Piece;

/* A block of STEP tokens to lay out, or a block of COLUMNS of one K/V head to compute. */
typedef struct {
    int32_t piece, kv, block;
} Item;

typedef struct {
    const num *q;
    num *out;
    const num *k, *v; /* [pages, page_size, kv_heads, dim] */
    const int32_t *page_ids;
    const Piece *pieces;
    const Item *layouts, *items;
    num *laid_k, *laid_v;
    long num_layouts, num_items, q_stride, out_stride; /* strides in elements */
    long page_size, q_heads, kv_heads, dim;
    long window; /* tokens that a row sees, itself included; 0: all */
    float scale;
    int threads;
} Prefill;

void prefill_attention(const Prefill *f);
