/* Products by packed weights. */
#pragma once

#include <stdint.h>

#include "common.h"

void linear_numbers(const num *x, const num *w, const float *bias, void *out, long rows, long inputs, long groups, long width,
                    long stride, int mode, int threads);
void linear_int8(const int8_t *high, const int8_t *low, const float *row_scales, const int8_t *packed, const float *scales,
                 const int32_t *sums, const float *bias, void *out, long rows, long inputs, long groups, long width,
                 long stride, int mode, int threads);
