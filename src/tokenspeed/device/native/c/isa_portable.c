/* Every kernel in plain C. */
#include "simd_portable.h"

#define TS_EACH_ROWS(X) X(1)
#include "vector.h"
#include "chances.h"
#include "linear.h"
#include "kv.h"
#include "attention.h"

const ts_kernels ts_kernels_portable = {
    .name = "portable",
    .norm = norm,
    .silu_mul = silu_mul,
    .gelu_mul = gelu_mul,
    .quantize = quantize,
    .project = project,
    .rotate = rotate,
    .store_key = store_key,
    .store_value = store_value,
    .attend = attend,
    .merge = merge,
    .finish = finish,
    .block_largest = block_largest,
    .chances = chances,
};
