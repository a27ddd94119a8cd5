/* Projections by panels of 16 outputs. Included once for each instruction set, after vector.h.
 *
 * A tile is the outputs of one panel for up to TS_TILE_ROWS rows of activations: the accumulators stay in
 * registers while one pass over the panel feeds them. Each accumulator's additions are in the order of
 * the inputs, whatever the number of rows.
 */

/* One copy each: the compiler would else make one for every kind of call. */
#if defined(__clang__)
#define TS_ALONE __attribute__((noinline))
#else
#define TS_ALONE __attribute__((noinline, noclone))
#endif

/* ---- float weights: also the products of attention ------------------------------------------------ */

TS_INLINE v16 load_weights(int32_t format, const void *panel, int64_t at) {
    switch (format) {
    case TS_F16: return v16_load_f16((const uint16_t *)panel + at);
    case TS_BF16: return v16_load_bf16((const uint16_t *)panel + at);
    default: return v16_load((const float *)panel + at);
    }
}

/* out[r] (+)= sum of x[r][k] * panel[k], k ascending; `more`: starting from what is in out. */
TS_INLINE void float_tile(int32_t format, int rows, const float *x, int64_t x_stride, const void *panel,
                          int64_t panel_stride, int64_t count, float *out, int64_t out_stride, int more) {
    v16 sums[TS_TILE_ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) sums[r] = more ? v16_load(out + r * out_stride) : v16_set1(0.0f);
    for (int64_t k = 0; k < count; k++) {
        v16 w = load_weights(format, panel, k * panel_stride);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) sums[r] = v16_fma(v16_set1(x[r * x_stride + k]), w, sums[r]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) v16_store(out + r * out_stride, sums[r]);
}

/* One function for each number of rows, so that the loops above unroll into registers. */
#define FLOAT_TILE_CASE(r) \
    case r: float_tile(format, r, x, x_stride, panel, panel_stride, count, out, out_stride, more); break;

#define FLOAT_TILE(name, FORMAT)                                                                                  \
    static TS_ALONE void name(int rows, const float *x, int64_t x_stride, const void *panel, int64_t panel_stride, \
                     int64_t count, float *out, int64_t out_stride, int more) {                                   \
        enum { format = FORMAT };                                                                                 \
        switch (rows) { TS_EACH_ROWS(FLOAT_TILE_CASE) }                                                           \
    }

FLOAT_TILE(float_tile_f32, TS_F32)
FLOAT_TILE(float_tile_f16, TS_F16)
FLOAT_TILE(float_tile_bf16, TS_BF16)

TS_INLINE void float_tiles(int32_t format, int rows, const float *x, int64_t x_stride, const void *panel,
                           int64_t panel_stride, int64_t count, float *out, int64_t out_stride, int more) {
    switch (format) {
    case TS_F16: float_tile_f16(rows, x, x_stride, panel, panel_stride, count, out, out_stride, more); break;
    case TS_BF16: float_tile_bf16(rows, x, x_stride, panel, panel_stride, count, out, out_stride, more); break;
    default: float_tile_f32(rows, x, x_stride, panel, panel_stride, count, out, out_stride, more); break;
    }
}

/* ---- quantized weights: integer sums of a group, then scaled into the float accumulators ------------ */

TS_INLINE v16 load_scales(int32_t format, const void *group, int half) {
    switch (format) {
    case TS_Q8: return v16_load_f16(((const ts_q8 *)group)->scale);
    case TS_Q8M: return v16_load_f16(((const ts_q8m *)group)->scale);
    case TS_Q4M: return v16_load_f16(((const ts_q4m *)group)->scale);
    case TS_Q4K: return v16_load(((const ts_q4k *)group)->scale);
    default: return v16_load(((const ts_q8k *)group)->scale[half]);
    }
}

TS_INLINE v16 load_mins(int32_t format, const void *group, int half) {
    switch (format) {
    case TS_Q8M: return v16_load_f16(((const ts_q8m *)group)->min);
    case TS_Q4M: return v16_load_f16(((const ts_q4m *)group)->min);
    case TS_Q4K: return v16_load(((const ts_q4k *)group)->min);
    default: return v16_load(((const ts_q8k *)group)->min[half]);
    }
}

TS_INLINE int64_t group_bytes(int32_t format) {
    switch (format) {
    case TS_Q8: return sizeof(ts_q8);
    case TS_Q8M: return sizeof(ts_q8m);
    case TS_Q4M: return sizeof(ts_q4m);
    case TS_Q4K: return sizeof(ts_q4k);
    default: return sizeof(ts_q8k);
    }
}

TS_INLINE const uint16_t *nibbles(int32_t format, const void *group, int quarter) {
    return format == TS_Q4M ? &((const ts_q4m *)group)->q[quarter][0][0] : &((const ts_q4k *)group)->q[quarter][0][0];
}

TS_INLINE const int8_t *bytes(int32_t format, const void *group, int pair) {
    switch (format) {
    case TS_Q8: return &((const ts_q8 *)group)->q[pair][0][0];
    case TS_Q8M: return &((const ts_q8m *)group)->q[pair][0][0];
    default: return &((const ts_q8k *)group)->q[pair][0][0];
    }
}

/* Add the products of inputs first .. last - 1 of a group, whole eights, to the integer sums. */
TS_INLINE void sum_products(int32_t format, int rows, const void *group, int first, int last, const int16_t *q,
                            int64_t q_stride, i32x16 *sums) {
    if (format == TS_Q4M || format == TS_Q4K) {
#pragma GCC unroll 1
        for (int k = first; k < last; k += 8) {
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                i16x32 w = i16x32_nibble(i16x32_load(nibbles(format, group, k / 8)), j);
#pragma GCC unroll 16
                for (int r = 0; r < rows; r++) sums[r] = i16x32_dot(sums[r], w, i16x32_pair(q + r * q_stride + k + 2 * j));
            }
        }
    } else {
#pragma GCC unroll 1
        for (int k = first; k < last; k += 2) {
            i16x32 w = i16x32_load_i8(bytes(format, group, k / 2));
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) sums[r] = i16x32_dot(sums[r], w, i16x32_pair(q + r * q_stride + k));
        }
    }
}

/* Bytes between what is computed with and what is asked for: the machine's own prefetching stops at pages. */
enum { FETCH_AHEAD = 2048 };

/* out[r] = the panel's outputs for row r of `in`. */
TS_INLINE void quant_tile(int32_t format, int rows, const ts_input *in, int64_t row, const char *panel,
                          int64_t num_groups, float *out) {
    const int16_t *q = in->q + row * in->q_stride;
    const ts_group *groups = in->groups + row * in->group_stride;
    const int halves = format == TS_Q8K ? 2 : 1, with_min = format != TS_Q8;
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) v16_store(out + r * TS_PANEL, v16_set1(0.0f));
    for (int64_t g = 0; g < num_groups; g++, q += TS_GROUP, groups++, panel += group_bytes(format)) {
        for (int64_t at = 0; at < group_bytes(format); at += 64) __builtin_prefetch(panel + FETCH_AHEAD + at);
        for (int half = 0; half < halves; half++) {
            i32x16 sums[TS_TILE_ROWS];
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) sums[r] = i32x16_zero();
            sum_products(format, rows, panel, half * TS_GROUP / halves, (half + 1) * TS_GROUP / halves, q, in->q_stride,
                         sums);
            v16 scales = load_scales(format, panel, half);
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                const ts_group *group = groups + r * in->group_stride;
                v16 sum = v16_load(out + r * TS_PANEL);
                sum = v16_fma(i32x16_float(sums[r]), v16_mul(scales, v16_set1(group->scale)), sum);
                if (with_min) {
                    float inputs = halves == 1 ? group->sum : group->half[half];
                    sum = v16_fma(load_mins(format, panel, half), v16_set1(inputs), sum);
                }
                v16_store(out + r * TS_PANEL, sum);
            }
        }
    }
}

#define QUANT_TILE_CASE(r) \
    case r: quant_tile(format, r, in, row, panel, num_groups, out); break;

#define QUANT_TILE(name, FORMAT)                                                                                  \
    static TS_ALONE void name(int rows, const ts_input *in, int64_t row, const char *panel, int64_t num_groups,   \
                              float *out) {                                                                        \
        enum { format = FORMAT };                                                                                 \
        switch (rows) { TS_EACH_ROWS(QUANT_TILE_CASE) }                                                           \
    }

QUANT_TILE(quant_tile_q8, TS_Q8)
QUANT_TILE(quant_tile_q8m, TS_Q8M)
QUANT_TILE(quant_tile_q4m, TS_Q4M)
QUANT_TILE(quant_tile_q8k, TS_Q8K)
QUANT_TILE(quant_tile_q4k, TS_Q4K)

/* ---- whole panels ------------------------------------------------------------------------------------ */

static void project_tile(const ts_linear *w, const ts_input *in, int64_t row, int rows, int64_t panel, float *tile) {
    const char *panels = w->panels;
    int64_t groups = ts_groups(w->in);
    const float *x = in->x + row * in->x_stride;
    switch (w->format) {
    case TS_F32: case TS_F16: case TS_BF16: {
        int64_t bytes_each = w->format == TS_F32 ? 4 : 2;
        panels += panel * w->in * TS_PANEL * bytes_each;
        float_tiles(w->format, rows, x, in->x_stride, panels, TS_PANEL, w->in, tile, TS_PANEL, 0);
        break;
    }
    case TS_Q8: quant_tile_q8(rows, in, row, panels + panel * groups * group_bytes(TS_Q8), groups, tile); break;
    case TS_Q8M: quant_tile_q8m(rows, in, row, panels + panel * groups * group_bytes(TS_Q8M), groups, tile); break;
    case TS_Q4M: quant_tile_q4m(rows, in, row, panels + panel * groups * group_bytes(TS_Q4M), groups, tile); break;
    case TS_Q8K: quant_tile_q8k(rows, in, row, panels + panel * groups * group_bytes(TS_Q8K), groups, tile); break;
    case TS_Q4K: quant_tile_q4k(rows, in, row, panels + panel * groups * group_bytes(TS_Q4K), groups, tile); break;
    default: break;
    }
}

/* A finished tile to its place: the bias is added to the sum, the sum to what is there. */
static void place_tile(const ts_linear *w, int64_t panel, int rows, const float *tile, float *out, int64_t out_stride,
                       int add) {
    int64_t first = panel * TS_PANEL, left = w->out - first, n = left < TS_PANEL ? left : TS_PANEL;
    v16 bias = w->bias ? load_part(w->bias + first, n) : v16_set1(0.0f);
    for (int r = 0; r < rows; r++) {
        float *to = out + r * out_stride + first;
        v16 sum = v16_load(tile + r * TS_PANEL);
        if (w->bias) sum = v16_add(sum, bias);
        if (n == TS_PANEL) {
            v16_store(to, add ? v16_add(v16_load(to), sum) : sum);
        } else {
            store_part(to, add ? v16_add(load_part(to, n), sum) : sum, n);
        }
    }
}

static void project(const ts_linear *w, const ts_input *in, int64_t row, int64_t rows, int64_t first, int64_t last,
                    float *out, int64_t out_stride, int add) {
    float tile[TS_TILE_ROWS * TS_PANEL];
    int64_t tiles = ts_round_up(rows, TS_TILE_ROWS) / TS_TILE_ROWS;
    for (int64_t panel = first; panel < last; panel++) {
        for (int64_t t = 0; t < tiles; t++) {
            int64_t from = row + rows * t / tiles, to = row + rows * (t + 1) / tiles; /* tiles of like size */
            project_tile(w, in, from, (int)(to - from), panel, tile);
            place_tile(w, panel, (int)(to - from), tile, out + from * out_stride, out_stride, add);
        }
    }
}
