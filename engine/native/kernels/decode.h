/* Decode rows: what the kernels for processors with and without matrix units are given. */
#pragma once

#include <stdint.h>

#include "common.h"

/* One part of one row's context: positions [first, end), of which those before `seen_from` are hidden by a window. */
typedef struct {
    int32_t row;   /* of q and out */
    int32_t pages; /* where the request's page ids begin in `page_ids` */
    int32_t first, end, seen_from;
    int32_t part, parts;
} Part;

typedef struct {
    const bf16 *q;
    bf16 *out;
    const bf16 *k, *v; /* [pages, page_size, kv_heads, dim] */
    const int32_t *page_ids;
    const Part *parts;
    float *partial; /* [parts, q_heads, dim + 2]: sums, then the largest score and the sum of weights */
    long num_parts, q_stride, out_stride; /* strides in elements */
    long page_size, q_heads, kv_heads, dim;
    float scale;
    int threads;
} Decode;

/* One part of one row into its `partial`. */
void attend_with_tiles(const Decode *d, const Part *p, float *partial);
