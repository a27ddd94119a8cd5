/* simd_portable.h with AVX-512 (F, BW, DQ, VL) and, where the compiler is told so, VNNI: a vector is one register. */
#ifndef TS_SIMD_H
#define TS_SIMD_H

#include <immintrin.h>
#include <stdint.h>

enum { TS_TILE_ROWS = 8 }; /* enough chains of additions to hide their latency */

#define TS_INLINE static inline __attribute__((always_inline, unused))

typedef struct { __m512 v; } v16;
typedef struct { __m512i v; } i32x16;
typedef struct { __m512i v; } i16x32;

TS_INLINE v16 v16_set1(float x) { return (v16){_mm512_set1_ps(x)}; }
TS_INLINE v16 v16_load(const float *p) { return (v16){_mm512_loadu_ps(p)}; }
TS_INLINE void v16_store(float *p, v16 a) { _mm512_storeu_ps(p, a.v); }
TS_INLINE v16 v16_load_f16(const uint16_t *p) {
    return (v16){_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p))};
}
TS_INLINE v16 v16_load_bf16(const uint16_t *p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return (v16){_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
TS_INLINE void v16_store_f16(uint16_t *p, v16 a) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
TS_INLINE v16 v16_add(v16 a, v16 b) { return (v16){_mm512_add_ps(a.v, b.v)}; }
TS_INLINE v16 v16_sub(v16 a, v16 b) { return (v16){_mm512_sub_ps(a.v, b.v)}; }
TS_INLINE v16 v16_mul(v16 a, v16 b) { return (v16){_mm512_mul_ps(a.v, b.v)}; }
TS_INLINE v16 v16_div(v16 a, v16 b) { return (v16){_mm512_div_ps(a.v, b.v)}; }
TS_INLINE v16 v16_max(v16 a, v16 b) { return (v16){_mm512_max_ps(a.v, b.v)}; }
TS_INLINE v16 v16_min(v16 a, v16 b) { return (v16){_mm512_min_ps(a.v, b.v)}; }
TS_INLINE v16 v16_fma(v16 a, v16 b, v16 c) { return (v16){_mm512_fmadd_ps(a.v, b.v, c.v)}; }
TS_INLINE v16 v16_round(v16 a) { return (v16){_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT)}; }
TS_INLINE v16 v16_pow2(v16 n) {
    __m512i biased = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
    return (v16){_mm512_castsi512_ps(_mm512_slli_epi32(biased, 23))};
}
TS_INLINE float v16_sum(v16 a) {
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
TS_INLINE float v16_largest(v16 a) { return _mm512_reduce_max_ps(a.v); }

TS_INLINE i32x16 i32x16_zero(void) { return (i32x16){_mm512_setzero_si512()}; }
TS_INLINE i32x16 i32x16_add(i32x16 a, i32x16 b) { return (i32x16){_mm512_add_epi32(a.v, b.v)}; }
TS_INLINE i32x16 i32x16_max(i32x16 a, i32x16 b) { return (i32x16){_mm512_max_epi32(a.v, b.v)}; }
TS_INLINE v16 i32x16_float(i32x16 a) { return (v16){_mm512_cvtepi32_ps(a.v)}; }
TS_INLINE int32_t i32x16_largest(i32x16 a) { return _mm512_reduce_max_epi32(a.v); }
TS_INLINE int32_t i32x16_sum(i32x16 a) { return _mm512_reduce_add_epi32(a.v); }
TS_INLINE i32x16 v16_magnitude_bits(v16 a) {
    return (i32x16){_mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(0x7fffffff))};
}
TS_INLINE i32x16 v16_to_i32(v16 a) { return (i32x16){_mm512_cvtps_epi32(a.v)}; }
TS_INLINE void i32x16_store_i16(int16_t *p, i32x16 a) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtsepi32_epi16(a.v));
}
TS_INLINE i32x16 i16x32_dot(i32x16 c, i16x32 w, i16x32 x) {
#if defined(__AVX512VNNI__)
    return (i32x16){_mm512_dpwssd_epi32(c.v, w.v, x.v)};
#else
    return (i32x16){_mm512_add_epi32(c.v, _mm512_madd_epi16(w.v, x.v))};
#endif
}
TS_INLINE i16x32 i16x32_pair(const int16_t *p) {
    int32_t both;
    __builtin_memcpy(&both, p, sizeof both);
    return (i16x32){_mm512_set1_epi32(both)};
}
TS_INLINE i16x32 i16x32_load_i8(const int8_t *p) {
    return (i16x32){_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p))};
}
TS_INLINE i16x32 i16x32_load(const uint16_t *p) { return (i16x32){_mm512_loadu_si512(p)}; }
TS_INLINE i16x32 i16x32_nibble(i16x32 a, int which) {
    __m512i shifted = _mm512_srli_epi16(a.v, 4 * which);
    return (i16x32){_mm512_and_si512(shifted, _mm512_set1_epi16(15))};
}

#endif
