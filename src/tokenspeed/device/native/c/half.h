/* binary16 and bfloat16 without special instructions; rounding to nearest, ties to even. */
#ifndef TS_HALF_H
#define TS_HALF_H

#include <stdint.h>
#include <string.h>

static inline __attribute__((unused)) float ts_bits_to_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline __attribute__((unused)) uint32_t ts_float_to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline __attribute__((unused)) float ts_half_to_float(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = (half >> 10) & 31, fraction = half & 0x3ff;
    if (exponent == 31) {
        return ts_bits_to_float(sign | 0x7f800000 | fraction << 13 | (fraction ? 0x400000 : 0));
    }
    if (exponent == 0) {
        float magnitude = (float)fraction * 0x1p-24f; /* exact, subnormals included */
        return sign ? -magnitude : magnitude;
    }
    return ts_bits_to_float(sign | (exponent + 112) << 23 | fraction << 13);
}

static inline __attribute__((unused)) uint16_t ts_float_to_half(float value) {
    uint32_t bits = ts_float_to_bits(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) {
        return (uint16_t)(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
    }
    if (magnitude >= 0x47800000) { /* 65536 and infinity */
        return (uint16_t)(sign | 0x7c00);
    }
    if (magnitude < 0x38800000) { /* below 2^-14: the sum's unit is 2^-24, so the addition rounds */
        uint32_t shifted = ts_float_to_bits(ts_bits_to_float(magnitude) + 0.5f);
        return (uint16_t)(sign | (shifted - ts_float_to_bits(0.5f)));
    }
    uint32_t rounded = magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1);
    return (uint16_t)(sign | rounded >> 13);
}

static inline __attribute__((unused)) float ts_bf16_to_float(uint16_t half) {
    return ts_bits_to_float((uint32_t)half << 16);
}

static inline __attribute__((unused)) uint16_t ts_float_to_bf16(float value) {
    uint32_t bits = ts_float_to_bits(value);
    if ((bits & 0x7fffffff) > 0x7f800000) {
        return (uint16_t)(bits >> 16 | 0x40);
    }
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#endif
