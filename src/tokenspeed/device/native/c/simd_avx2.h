/* simd_portable.h with AVX2, FMA and F16C: a vector is a pair of registers. */
#ifndef TS_SIMD_H
#define TS_SIMD_H

#include <immintrin.h>
#include <stdint.h>

/* 6 rows x 2 registers are accumulators, 2 the panel's vector, 1 the broadcast: 15 of 16. */
enum { TS_TILE_ROWS = 6 };

#define TS_INLINE static inline __attribute__((always_inline, unused))

typedef struct { __m256 lo, hi; } v16;
typedef struct { __m256i lo, hi; } i32x16;
typedef struct { __m256i lo, hi; } i16x32;

#define TS_EACH(type, op) ((type){op(a.lo, b.lo), op(a.hi, b.hi)})

TS_INLINE v16 v16_set1(float x) { __m256 v = _mm256_set1_ps(x); return (v16){v, v}; }
TS_INLINE v16 v16_load(const float *p) { return (v16){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
TS_INLINE void v16_store(float *p, v16 a) { _mm256_storeu_ps(p, a.lo); _mm256_storeu_ps(p + 8, a.hi); }
TS_INLINE __m256 load8_f16(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
TS_INLINE v16 v16_load_f16(const uint16_t *p) { return (v16){load8_f16(p), load8_f16(p + 8)}; }
TS_INLINE __m256 load8_bf16(const uint16_t *p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
TS_INLINE v16 v16_load_bf16(const uint16_t *p) { return (v16){load8_bf16(p), load8_bf16(p + 8)}; }
TS_INLINE void v16_store_f16(uint16_t *p, v16 a) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i *)(p + 8), _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}
TS_INLINE v16 v16_add(v16 a, v16 b) { return TS_EACH(v16, _mm256_add_ps); }
TS_INLINE v16 v16_sub(v16 a, v16 b) { return TS_EACH(v16, _mm256_sub_ps); }
TS_INLINE v16 v16_mul(v16 a, v16 b) { return TS_EACH(v16, _mm256_mul_ps); }
TS_INLINE v16 v16_div(v16 a, v16 b) { return TS_EACH(v16, _mm256_div_ps); }
TS_INLINE v16 v16_max(v16 a, v16 b) { return TS_EACH(v16, _mm256_max_ps); }
TS_INLINE v16 v16_min(v16 a, v16 b) { return TS_EACH(v16, _mm256_min_ps); }
TS_INLINE v16 v16_fma(v16 a, v16 b, v16 c) {
    return (v16){_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
TS_INLINE v16 v16_round(v16 a) {
    enum { NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC };
    return (v16){_mm256_round_ps(a.lo, NEAREST), _mm256_round_ps(a.hi, NEAREST)};
}
TS_INLINE __m256 pow2_8(__m256 n) {
    __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}
TS_INLINE v16 v16_pow2(v16 n) { return (v16){pow2_8(n.lo), pow2_8(n.hi)}; }
TS_INLINE float v16_sum(v16 a) {
    __m256 eight = _mm256_add_ps(a.lo, a.hi);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
TS_INLINE float v16_largest(v16 a) {
    __m256 eight = _mm256_max_ps(a.lo, a.hi);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

TS_INLINE i32x16 i32x16_zero(void) { return (i32x16){_mm256_setzero_si256(), _mm256_setzero_si256()}; }
TS_INLINE i32x16 i32x16_add(i32x16 a, i32x16 b) { return TS_EACH(i32x16, _mm256_add_epi32); }
TS_INLINE i32x16 i32x16_max(i32x16 a, i32x16 b) { return TS_EACH(i32x16, _mm256_max_epi32); }
TS_INLINE v16 i32x16_float(i32x16 a) { return (v16){_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
TS_INLINE int32_t i32x16_largest(i32x16 a) {
    __m256i eight = _mm256_max_epi32(a.lo, a.hi);
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
TS_INLINE int32_t i32x16_sum(i32x16 a) {
    __m256i eight = _mm256_add_epi32(a.lo, a.hi);
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
TS_INLINE i32x16 v16_magnitude_bits(v16 a) {
    __m256i mask = _mm256_set1_epi32(0x7fffffff);
    return (i32x16){_mm256_and_si256(_mm256_castps_si256(a.lo), mask),
                    _mm256_and_si256(_mm256_castps_si256(a.hi), mask)};
}
TS_INLINE i32x16 v16_to_i32(v16 a) { return (i32x16){_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
TS_INLINE void i32x16_store_i16(int16_t *p, i32x16 a) {
    __m256i packed = _mm256_packs_epi32(a.lo, a.hi); /* quarters in the order 0, 2, 1, 3 */
    _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(packed, 0xd8));
}
/* a + b, in a's register: left to itself, GCC starts all rows of a tile at once and runs out of registers. */
TS_INLINE __m256i add_in_place(__m256i a, __m256i b) {
    __asm__("vpaddd %1, %0, %0" : "+x"(a) : "x"(b));
    return a;
}
TS_INLINE i32x16 i16x32_dot(i32x16 c, i16x32 w, i16x32 x) {
    return (i32x16){add_in_place(c.lo, _mm256_madd_epi16(w.lo, x.lo)),
                    add_in_place(c.hi, _mm256_madd_epi16(w.hi, x.hi))};
}
TS_INLINE i16x32 i16x32_pair(const int16_t *p) {
    int32_t both;
    __builtin_memcpy(&both, p, sizeof both);
    __m256i v = _mm256_set1_epi32(both);
    return (i16x32){v, v};
}
TS_INLINE __m256i widen_i8(const int8_t *p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)); }
TS_INLINE i16x32 i16x32_load_i8(const int8_t *p) { return (i16x32){widen_i8(p), widen_i8(p + 16)}; }
TS_INLINE i16x32 i16x32_load(const uint16_t *p) {
    return (i16x32){_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 16))};
}
TS_INLINE i16x32 i16x32_nibble(i16x32 a, int which) {
    __m256i mask = _mm256_set1_epi16(15);
    __m256i lo = _mm256_srli_epi16(a.lo, 4 * which), hi = _mm256_srli_epi16(a.hi, 4 * which);
    return (i16x32){_mm256_and_si256(lo, mask), _mm256_and_si256(hi, mask)};
}

#endif
