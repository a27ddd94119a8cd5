/* Every kernel in AVX-512 F, BW, DQ and VL; compiled with flags of its own, see compile.py. */
#if defined(__x86_64__)
#include "simd_avx512.h"

#define TS_EACH_ROWS(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8)
#include "vector.h"
#include "chances.h"
#include "linear.h"
#include "kv.h"
#include "attention.h"

const ts_kernels ts_kernels_avx512 = {
    .name = "avx512",
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
