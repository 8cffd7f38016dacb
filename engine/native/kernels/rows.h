/* What happens to a row between two products. */
#pragma once

#include <stdint.h>

#include "common.h"

/* Heads of one step's rows, and where their K/V go. */
typedef struct {
    num *qkv; /* [rows, (q_heads + 2 kv_heads) dim] */
    num *k_slots, *v_slots; /* [slots, kv_heads, dim] */
    const int64_t *slots, *positions; /* [rows] */
    const float *cos, *sin; /* [positions, dim / 2] */
    const float *head_norm; /* [q_heads + kv_heads, dim] or NULL */
    long rows, q_heads, kv_heads, dim;
    float eps;
    int threads;
} Heads;

void norm_rows(const num *x, const float *weight, float eps, num *out, long rows, long width, int threads);
void quantize_rows(const num *x, const float *weight, float eps, int8_t *high, int8_t *low, float *scales, float *scratch,
                   long rows, long width, int threads);
void rotate_and_store(const Heads *h);
