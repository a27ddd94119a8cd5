/* Rotary positions and writes into the pool. Included once for each instruction set, after vector.h. */

/* Pairs (a, b) as complex numbers times (cosine, sine), all times `scale`. */
static void rotate(float *head, const float *turns, int64_t dim, float scale) {
    for (int64_t i = 0; i < dim; i += 2) {
        float a = head[i], b = head[i + 1], cosine = turns[i], sine = turns[i + 1];
        head[i] = (a * cosine - b * sine) * scale;
        head[i + 1] = (b * cosine + a * sine) * scale;
    }
}

/* Up to 16 numbers as binary16. */
TS_INLINE void to_half(const float *x, int64_t n, uint16_t half[16]) {
    v16_store_f16(half, n < 16 ? load_part(x, n) : v16_load(x));
}

static void store_key(void *run, int32_t format, const float *key, int64_t dim, int64_t offset, int64_t page_tokens) {
    for (int64_t d = 0; d < dim; d += 16) {
        int64_t n = dim - d < 16 ? dim - d : 16;
        uint16_t half[16];
        if (format == TS_F16) to_half(key + d, n, half);
        for (int64_t i = 0; i < n; i++) {
            int64_t at = (d + i) * page_tokens + offset;
            if (format == TS_F16) {
                ((uint16_t *)run)[at] = half[i];
            } else {
                ((float *)run)[at] = key[d + i];
            }
        }
    }
}

static void store_value(void *run, int32_t format, const float *value, int64_t dim, int64_t offset) {
    if (format == TS_F32) {
        __builtin_memcpy((float *)run + offset * dim, value, (size_t)dim * sizeof(float));
        return;
    }
    for (int64_t d = 0; d < dim; d += 16) {
        int64_t n = dim - d < 16 ? dim - d : 16;
        uint16_t half[16];
        to_half(value + d, n, half);
        __builtin_memcpy((uint16_t *)run + offset * dim + d, half, (size_t)n * sizeof(uint16_t));
    }
}
