/* What drawing a token does to a whole row of logits. Included once for each instruction set, behind vector.h. */

static void block_largest(const float *x, int64_t n, float *out) {
    for (int64_t at = 0; at < n; at += TS_DRAW_BLOCK) {
        int64_t left = n - at < TS_DRAW_BLOCK ? n - at : TS_DRAW_BLOCK, whole = left / 16 * 16;
        v16 most = v16_set1(-INFINITY);
        for (int64_t i = 0; i < whole; i += 16) most = v16_max(most, v16_load(x + at + i));
        float largest = v16_largest(most);
        for (int64_t i = whole; i < left; i++) largest = x[at + i] > largest ? x[at + i] : largest;
        out[at / TS_DRAW_BLOCK] = largest;
    }
}

static void chances(const float *x, int64_t n, float largest, float temperature, float *out) {
    v16 top = v16_set1(largest), heat = v16_set1(temperature);
    int64_t whole = n / 16 * 16, rest = n - whole;
    for (int64_t i = 0; i < whole; i += 16) {
        v16_store(out + i, v16_exp(v16_div(v16_sub(v16_load(x + i), top), heat)));
    }
    if (rest) {
        v16 part = v16_exp(v16_div(v16_sub(load_part(x + whole, rest), top), heat));
        store_part(out + whole, part, rest);
    }
    /* v16_exp gives 1.6e-38 for everything below -87, and a token of no weight is never drawn. */
    for (int64_t i = 0; i < n; i++) out[i] = out[i] > 1e-37f ? out[i] : 0.0f;
}
