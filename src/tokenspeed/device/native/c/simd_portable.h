/* Vectors of 16 floats and of 32 + 16 integers in plain C; the meaning of the other simd_*.h files.
 *
 * simd_avx2.h and simd_avx512.h have the same names with the same results, lane by lane, provided
 * TS_FMA below is fused here as well (it is where the target has such an instruction).
 */
#ifndef TS_SIMD_H
#define TS_SIMD_H

#include "half.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { TS_TILE_ROWS = 1 }; /* rows of x that share one pass over a panel */

#if defined(__FP_FAST_FMAF)
#define TS_FMA(a, b, c) __builtin_fmaf(a, b, c)
#else
#define TS_FMA(a, b, c) ((a) * (b) + (c)) /* a libm call per product would take seconds a token */
#endif

#define TS_INLINE static inline __attribute__((always_inline, unused))
#define TS_LANES(i) for (int i = 0; i < 16; i++)

typedef struct { float f[16]; } v16;       /* floats */
typedef struct { int32_t i[16]; } i32x16;  /* one for each of 16 columns */
typedef struct { int16_t i[32]; } i16x32;  /* two neighbours for each of 16 columns */

TS_INLINE v16 v16_set1(float x) { v16 r; TS_LANES(i) r.f[i] = x; return r; }
TS_INLINE v16 v16_load(const float *p) { v16 r; memcpy(r.f, p, sizeof r.f); return r; }
TS_INLINE void v16_store(float *p, v16 a) { memcpy(p, a.f, sizeof a.f); }
static v16 __attribute__((noinline, unused)) v16_load_f16(const uint16_t *p) {
    v16 r;
    TS_LANES(i) r.f[i] = ts_half_to_float(p[i]);
    return r;
}
TS_INLINE v16 v16_load_bf16(const uint16_t *p) { v16 r; TS_LANES(i) r.f[i] = ts_bf16_to_float(p[i]); return r; }
static void __attribute__((noinline, unused)) v16_store_f16(uint16_t *p, v16 a) {
    TS_LANES(i) p[i] = ts_float_to_half(a.f[i]);
}
TS_INLINE v16 v16_add(v16 a, v16 b) { TS_LANES(i) a.f[i] += b.f[i]; return a; }
TS_INLINE v16 v16_sub(v16 a, v16 b) { TS_LANES(i) a.f[i] -= b.f[i]; return a; }
TS_INLINE v16 v16_mul(v16 a, v16 b) { TS_LANES(i) a.f[i] *= b.f[i]; return a; }
TS_INLINE v16 v16_div(v16 a, v16 b) { TS_LANES(i) a.f[i] /= b.f[i]; return a; }
TS_INLINE v16 v16_fma(v16 a, v16 b, v16 c) { TS_LANES(i) c.f[i] = TS_FMA(a.f[i], b.f[i], c.f[i]); return c; }

/* b where either is NaN: pass the variable as b to keep its NaN. */
TS_INLINE v16 v16_max(v16 a, v16 b) { TS_LANES(i) a.f[i] = a.f[i] > b.f[i] ? a.f[i] : b.f[i]; return a; }
TS_INLINE v16 v16_min(v16 a, v16 b) { TS_LANES(i) a.f[i] = a.f[i] < b.f[i] ? a.f[i] : b.f[i]; return a; }
TS_INLINE v16 v16_round(v16 a) { TS_LANES(i) a.f[i] = rintf(a.f[i]); return a; }

/* 2 to the power n, n whole and -126..127; any finite number for a NaN. */
TS_INLINE v16 v16_pow2(v16 n) {
    TS_LANES(i) {
        int32_t bits = (int32_t)((uint32_t)((n.f[i] == n.f[i] ? (int32_t)n.f[i] : 0) + 127) << 23);
        memcpy(&n.f[i], &bits, sizeof bits);
    }
    return n;
}

/* Lane i with i + 8, the sums with those 4 apart, 2 apart, 1 apart. */
TS_INLINE float v16_sum(v16 a) {
    for (int apart = 8; apart; apart /= 2)
        for (int i = 0; i < apart; i++) a.f[i] += a.f[i + apart];
    return a.f[0];
}

/* The largest lane; unspecified if one is NaN. */
TS_INLINE float v16_largest(v16 a) {
    float r = a.f[0];
    TS_LANES(i) r = a.f[i] > r ? a.f[i] : r;
    return r;
}

TS_INLINE i32x16 i32x16_zero(void) { i32x16 r; memset(&r, 0, sizeof r); return r; }
TS_INLINE i32x16 i32x16_add(i32x16 a, i32x16 b) { TS_LANES(i) a.i[i] += b.i[i]; return a; }
TS_INLINE i32x16 i32x16_max(i32x16 a, i32x16 b) { TS_LANES(i) a.i[i] = a.i[i] > b.i[i] ? a.i[i] : b.i[i]; return a; }
TS_INLINE v16 i32x16_float(i32x16 a) { v16 r; TS_LANES(i) r.f[i] = (float)a.i[i]; return r; }
TS_INLINE int32_t i32x16_largest(i32x16 a) { int32_t r = a.i[0]; TS_LANES(i) r = a.i[i] > r ? a.i[i] : r; return r; }
TS_INLINE int32_t i32x16_sum(i32x16 a) { int32_t r = 0; TS_LANES(i) r += a.i[i]; return r; }

/* Bits of the magnitudes: ordered as the magnitudes are, with infinity and NaN above all numbers. */
TS_INLINE i32x16 v16_magnitude_bits(v16 a) {
    i32x16 r;
    memcpy(&r, &a, sizeof r);
    TS_LANES(i) r.i[i] &= 0x7fffffff;
    return r;
}

/* Nearest integers, ties to even; INT32_MIN for what is none. */
TS_INLINE i32x16 v16_to_i32(v16 a) {
    i32x16 r;
    TS_LANES(i) r.i[i] = fabsf(a.f[i]) < 2147483648.0f ? (int32_t)rintf(a.f[i]) : INT32_MIN;
    return r;
}

/* Saturated to 16 bits. */
TS_INLINE void i32x16_store_i16(int16_t *p, i32x16 a) {
    TS_LANES(i) p[i] = (int16_t)(a.i[i] > 32767 ? 32767 : a.i[i] < -32768 ? -32768 : a.i[i]);
}

/* c + the product of each column's pairs: no overflow for |w| <= 127, |x| <= 32767 and 16 additions. */
TS_INLINE i32x16 i16x32_dot(i32x16 c, i16x32 w, i16x32 x) {
    TS_LANES(i) c.i[i] += w.i[2 * i] * x.i[2 * i] + w.i[2 * i + 1] * x.i[2 * i + 1];
    return c;
}

/* The pair p[0], p[1] for every column. */
TS_INLINE i16x32 i16x32_pair(const int16_t *p) {
    i16x32 r;
    TS_LANES(i) { r.i[2 * i] = p[0]; r.i[2 * i + 1] = p[1]; }
    return r;
}
TS_INLINE i16x32 i16x32_load_i8(const int8_t *p) { i16x32 r; for (int i = 0; i < 32; i++) r.i[i] = p[i]; return r; }
TS_INLINE i16x32 i16x32_load(const uint16_t *p) { i16x32 r; memcpy(&r, p, sizeof r); return r; }

/* Nibble 0..3 of every lane. */
TS_INLINE i16x32 i16x32_nibble(i16x32 a, int which) {
    for (int i = 0; i < 32; i++) a.i[i] = (int16_t)(((uint16_t)a.i[i] >> (4 * which)) & 15);
    return a;
}

#endif
