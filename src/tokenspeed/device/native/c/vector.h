/* Functions of one vector: norm, softmax's exp, SiLU and GELU, quantized activations. Included once for each instruction set. */
#include "kernels.h"

#include <math.h>

/* The n < 16 floats at p, then zeros. */
TS_INLINE v16 load_part(const float *p, int64_t n) {
    float part[16] = {0};
    __builtin_memcpy(part, p, (size_t)n * sizeof(float));
    return v16_load(part);
}

TS_INLINE void store_part(float *p, v16 a, int64_t n) {
    float part[16];
    v16_store(part, a);
    __builtin_memcpy(p, part, (size_t)n * sizeof(float));
}

/* exp to about 1 ulp between -87 and 88, and the value there beyond; NaN stays NaN.
 * Source: Cephes (S. Moshier), expf: reduction by multiples of ln 2 in two parts, then a polynomial. */
TS_INLINE v16 v16_exp(v16 x) {
    x = v16_min(v16_set1(88.0f), v16_max(v16_set1(-87.0f), x));
    v16 n = v16_round(v16_mul(x, v16_set1(1.44269504088896341f)));
    x = v16_fma(n, v16_set1(-0.693359375f), x);
    x = v16_fma(n, v16_set1(2.12194440e-4f), x);
    v16 y = v16_set1(1.9875691500e-4f);
    y = v16_fma(y, x, v16_set1(1.3981999507e-3f));
    y = v16_fma(y, x, v16_set1(8.3334519073e-3f));
    y = v16_fma(y, x, v16_set1(4.1665795894e-2f));
    y = v16_fma(y, x, v16_set1(1.6666665459e-1f));
    y = v16_fma(y, x, v16_set1(5.0000001201e-1f));
    y = v16_fma(y, v16_mul(x, x), v16_add(x, v16_set1(1.0f)));
    return v16_mul(y, v16_pow2(n));
}

static void norm(const float *x, const float *weight, int64_t n, float eps, float *out) {
    int64_t whole = n / 16 * 16, rest = n - whole;
    v16 squares = v16_set1(0.0f);
    for (int64_t i = 0; i < whole; i += 16) {
        v16 part = v16_load(x + i);
        squares = v16_fma(part, part, squares);
    }
    if (rest) {
        v16 part = load_part(x + whole, rest);
        squares = v16_fma(part, part, squares);
    }
    v16 factor = v16_set1(1.0f / sqrtf(v16_sum(squares) / (float)n + eps));
    for (int64_t i = 0; i < whole; i += 16) {
        v16_store(out + i, v16_mul(v16_mul(v16_load(x + i), factor), v16_load(weight + i)));
    }
    if (rest) {
        v16 part = v16_mul(load_part(x + whole, rest), factor);
        store_part(out + whole, v16_mul(part, load_part(weight + whole, rest)), rest);
    }
}

TS_INLINE v16 silu(v16 x) {
    v16 one = v16_set1(1.0f);
    return v16_div(x, v16_add(one, v16_exp(v16_sub(v16_set1(0.0f), x))));
}

static void silu_mul(const float *gate, const float *up, int64_t n, float *out) {
    int64_t whole = n / 16 * 16, rest = n - whole;
    for (int64_t i = 0; i < whole; i += 16) {
        v16_store(out + i, v16_mul(silu(v16_load(gate + i)), v16_load(up + i)));
    }
    if (rest) {
        v16 product = v16_mul(silu(load_part(gate + whole, rest)), load_part(up + whole, rest));
        store_part(out + whole, product, rest);
    }
}

/* 0.5 x (1 + tanh(u)) is x / (1 + exp(-2u)). */
TS_INLINE v16 gelu_tanh(v16 x) {
    v16 one = v16_set1(1.0f), square = v16_mul(x, x);
    v16 u2 = v16_mul(v16_mul(x, v16_fma(square, v16_set1(0.044715f), one)), v16_set1(1.5957691216057308f));
    return v16_div(x, v16_add(one, v16_exp(v16_sub(v16_set1(0.0f), u2))));
}

static void gelu_mul(const float *gate, const float *up, int64_t n, float *out) {
    int64_t whole = n / 16 * 16, rest = n - whole;
    for (int64_t i = 0; i < whole; i += 16) {
        v16_store(out + i, v16_mul(gelu_tanh(v16_load(gate + i)), v16_load(up + i)));
    }
    if (rest) {
        v16 product = v16_mul(gelu_tanh(load_part(gate + whole, rest)), load_part(up + whole, rest));
        store_part(out + whole, product, rest);
    }
}

static void quantize(const float *x, int64_t n, int16_t *q, ts_group *groups) {
    for (int64_t at = 0; at < n; at += TS_GROUP) {
        v16 half[2];
        for (int h = 0; h < 2; h++) {
            int64_t left = n - at - 16 * h;
            half[h] = left >= 16 ? v16_load(x + at + 16 * h) : load_part(x + at + 16 * h, left > 0 ? left : 0);
        }
        int32_t bits = i32x16_largest(i32x16_max(v16_magnitude_bits(half[0]), v16_magnitude_bits(half[1])));
        float largest;
        __builtin_memcpy(&largest, &bits, sizeof largest);
        float scale = largest / 32767.0f;
        /* A group of values this small is 0 to float32; an infinity or NaN makes the inverse 0 or NaN. */
        v16 inverse = v16_set1(largest < 1e-30f ? 0.0f : 32767.0f / largest);
        ts_group *group = groups + at / TS_GROUP;
        int32_t sums[2];
        for (int h = 0; h < 2; h++) {
            i32x16 whole = v16_to_i32(v16_mul(half[h], inverse));
            i32x16_store_i16(q + at + 16 * h, whole);
            sums[h] = i32x16_sum(whole);
        }
        group->scale = scale;
        group->half[0] = scale * (float)sums[0];
        group->half[1] = scale * (float)sums[1];
        group->sum = scale * (float)(sums[0] + sums[1]);
    }
}
