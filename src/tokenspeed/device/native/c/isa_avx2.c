/* Every kernel in AVX2, FMA and F16C; compiled with flags of its own, see compile.py. */
#if defined(__x86_64__)
#include "simd_avx2.h"

#define TS_EACH_ROWS(X) X(1) X(2) X(3) X(4) X(5) X(6)
#include "vector.h"
#include "chances.h"
#include "linear.h"
#include "kv.h"
#include "attention.h"

const ts_kernels ts_kernels_avx2 = {
    .name = "avx2",
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
#endif
