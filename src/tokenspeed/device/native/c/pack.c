/* Weights from row-major matrices to panels; see the formats in native.h. Plain C: done once, at load. */
#include "kernels.h"

#include "half.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static int64_t input_bytes(int32_t format) { return format == TS_F32 ? 4 * TS_PANEL : 2 * TS_PANEL; }

static int64_t group_bytes(int32_t format) {
    switch (format) {
    case TS_Q8: return sizeof(ts_q8);
    case TS_Q8M: return sizeof(ts_q8m);
    case TS_Q4M: return sizeof(ts_q4m);
    case TS_Q8K: return sizeof(ts_q8k);
    default: return sizeof(ts_q4k);
    }
}

static int64_t panel_bytes(int32_t format, int64_t in) {
    return ts_is_quantized(format) ? ts_groups(in) * group_bytes(format) : in * input_bytes(format);
}

int64_t ts_panel_bytes(int32_t format, int64_t out, int64_t in) { return ts_panels(out) * panel_bytes(format, in); }

/* ---- one output of one group ------------------------------------------------------------------------- */

static void put_bytes(int8_t q[16][16][2], int o, const int8_t *values) {
    for (int k = 0; k < TS_GROUP; k++) q[k / 2][o][k % 2] = values[k];
}

static void put_nibbles(uint16_t q[4][16][2], int o, const int8_t *values) {
    for (int b = 0; b < 4; b++) {
        for (int i = 0; i < 2; i++) {
            unsigned packed = 0;
            for (int j = 0; j < 4; j++) packed |= (unsigned)(values[8 * b + 2 * j + i] & 15) << 4 * j;
            q[b][o][i] = (uint16_t)packed;
        }
    }
}

static void put_group(int32_t format, void *group, int o, const int8_t *q, const float *scale, const float *min) {
    static const float none[2] = {0.0f, 0.0f};
    if (!min) min = none;
    switch (format) {
    case TS_Q8: {
        ts_q8 *to = group;
        to->scale[o] = ts_float_to_half(scale[0]);
        put_bytes(to->q, o, q);
        break;
    }
    case TS_Q8M: {
        ts_q8m *to = group;
        to->scale[o] = ts_float_to_half(scale[0]);
        to->min[o] = ts_float_to_half(min[0]);
        put_bytes(to->q, o, q);
        break;
    }
    case TS_Q4M: {
        ts_q4m *to = group;
        to->scale[o] = ts_float_to_half(scale[0]);
        to->min[o] = ts_float_to_half(min[0]);
        put_nibbles(to->q, o, q);
        break;
    }
    case TS_Q8K: {
        ts_q8k *to = group;
        for (int h = 0; h < 2; h++) {
            to->scale[h][o] = scale[h];
            to->min[h][o] = min[h];
        }
        put_bytes(to->q, o, q);
        break;
    }
    default: {
        ts_q4k *to = group;
        to->scale[o] = scale[0];
        to->min[o] = min[0];
        put_nibbles(to->q, o, q);
        break;
    }
    }
}

static char *group_at(int32_t format, void *panels, int64_t in, int64_t row, int64_t group) {
    return (char *)panels + row / TS_PANEL * panel_bytes(format, in) + group * group_bytes(format);
}

/* The outputs that fill up the last panel are zeros. */
static void clear_padding(int32_t format, int64_t out, int64_t in, void *panels) {
    int64_t bytes = panel_bytes(format, in);
    if (out % TS_PANEL) memset((char *)panels + out / TS_PANEL * bytes, 0, (size_t)bytes);
}

/* ---- whole matrices ------------------------------------------------------------------------------------ */

/* 256 levels from the least weight to the greatest: q from -128 to 127, so that `min` is the middle. Scale and
 * min are what binary16 keeps of them, and the levels are chosen for those. */
static void quantize_group(const float *weight, int64_t n, int8_t *q, float *scale, float *min) {
    float least = weight[0], greatest = weight[0];
    for (int64_t k = 1; k < n; k++) {
        least = weight[k] < least ? weight[k] : least;
        greatest = weight[k] > greatest ? weight[k] : greatest;
    }
    *scale = ts_half_to_float(ts_float_to_half((greatest - least) / 255.0f));
    *min = ts_half_to_float(ts_float_to_half(least + 128.0f * *scale));
    for (int64_t k = 0; k < TS_GROUP; k++) {
        float level = k < n && *scale > 0.0f ? rintf((weight[k] - *min) / *scale) : 0.0f;
        q[k] = (int8_t)(level > 127.0f ? 127.0f : level < -128.0f ? -128.0f : level);
    }
}

static void pack_row(int32_t format, const float *weight, int64_t row, int64_t in, void *panels) {
    if (format == TS_Q8M) {
        for (int64_t g = 0; g < ts_groups(in); g++) {
            int64_t left = in - g * TS_GROUP;
            int8_t q[TS_GROUP];
            float scale, min;
            quantize_group(weight + g * TS_GROUP, left < TS_GROUP ? left : TS_GROUP, q, &scale, &min);
            put_group(format, group_at(format, panels, in, row, g), (int)(row % TS_PANEL), q, &scale, &min);
        }
        return;
    }
    char *to = (char *)panels + row / TS_PANEL * panel_bytes(format, in);
    for (int64_t k = 0; k < in; k++) {
        int64_t at = k * TS_PANEL + row % TS_PANEL;
        switch (format) {
        case TS_F32: ((float *)to)[at] = weight[k]; break;
        case TS_F16: ((uint16_t *)to)[at] = ts_float_to_half(weight[k]); break;
        default: ((uint16_t *)to)[at] = ts_float_to_bf16(weight[k]); break;
        }
    }
}

void ts_pack_floats(int32_t format, const float *weight, int64_t out, int64_t in, void *panels) {
    clear_padding(format, out, in, panels);
    for (int64_t row = 0; row < out; row++) pack_row(format, weight + row * in, row, in, panels);
}

void ts_pack_quants(int32_t format, const int8_t *q, const float *scale, const float *min, int64_t out, int64_t in,
                    void *panels) {
    int64_t groups = ts_groups(in), scales = format == TS_Q8K ? 2 : 1;
    clear_padding(format, out, in, panels);
    for (int64_t row = 0; row < out; row++) {
        for (int64_t g = 0; g < groups; g++) {
            int64_t at = row * groups + g;
            put_group(format, group_at(format, panels, in, row, g), (int)(row % TS_PANEL), q + row * in + g * TS_GROUP,
                      scale + at * scales, min ? min + at * scales : NULL);
        }
    }
}

/* Blocks of 32 weights as ggml lays them out: binary16 scale (and minimum), then bytes, or nibbles whose
 * low halves are the first 16. Source: ggml-common.h, block_q4_0, block_q4_1, block_q8_0. */
static const uint8_t *read_block(int32_t ggml_type, const uint8_t *from, int8_t q[TS_GROUP], float *scale, float *min) {
    uint16_t half;
    memcpy(&half, from, 2);
    *scale = ts_half_to_float(half);
    *min = 0.0f;
    from += 2;
    if (ggml_type == 8) {
        memcpy(q, from, TS_GROUP);
        return from + TS_GROUP;
    }
    if (ggml_type == 3) {
        memcpy(&half, from, 2);
        *min = ts_half_to_float(half);
        from += 2;
    } else {
        *min = -8.0f * *scale;
    }
    for (int k = 0; k < 16; k++) {
        q[k] = (int8_t)(from[k] & 15);
        q[k + 16] = (int8_t)(from[k] >> 4);
    }
    return from + 16;
}

void ts_pack_blocks(int32_t ggml_type, const uint8_t *blocks, int64_t out, int64_t in, void *panels) {
    int32_t format = ggml_type == 8 ? TS_Q8 : TS_Q4M;
    clear_padding(format, out, in, panels);
    for (int64_t row = 0; row < out; row++) {
        for (int64_t g = 0; g < ts_groups(in); g++) {
            int8_t q[TS_GROUP];
            float scale, min;
            blocks = read_block(ggml_type, blocks, q, &scale, &min);
            put_group(format, group_at(format, panels, in, row, g), (int)(row % TS_PANEL), q, &scale, &min);
        }
    }
}

/* ---- back ------------------------------------------------------------------------------------------------ */

static float quantized(int32_t format, const void *group, int o, int k) {
    int nibble = k / 2 % 4, quarter = k / 8;
    switch (format) {
    case TS_Q8: {
        const ts_q8 *from = group;
        return ts_half_to_float(from->scale[o]) * (float)from->q[k / 2][o][k % 2];
    }
    case TS_Q8M: {
        const ts_q8m *from = group;
        float level = (float)from->q[k / 2][o][k % 2];
        return ts_half_to_float(from->scale[o]) * level + ts_half_to_float(from->min[o]);
    }
    case TS_Q4M: {
        const ts_q4m *from = group;
        float level = (float)(from->q[quarter][o][k % 2] >> 4 * nibble & 15);
        return ts_half_to_float(from->scale[o]) * level + ts_half_to_float(from->min[o]);
    }
    case TS_Q8K: {
        const ts_q8k *from = group;
        return from->scale[k / 16][o] * (float)from->q[k / 2][o][k % 2] + from->min[k / 16][o];
    }
    default: {
        const ts_q4k *from = group;
        float level = (float)(from->q[quarter][o][k % 2] >> 4 * nibble & 15);
        return from->scale[o] * level + from->min[o];
    }
    }
}

void ts_unpack_row(const ts_linear *linear, int64_t row, float *out) {
    int64_t in = linear->in;
    int32_t format = linear->format;
    const char *panel = (const char *)linear->panels + row / TS_PANEL * panel_bytes(format, in);
    int o = (int)(row % TS_PANEL);
    for (int64_t k = 0; k < in; k++) {
        int64_t at = k * TS_PANEL + o;
        switch (format) {
        case TS_F32: out[k] = ((const float *)panel)[at]; break;
        case TS_F16: out[k] = ts_half_to_float(((const uint16_t *)panel)[at]); break;
        case TS_BF16: out[k] = ts_bf16_to_float(((const uint16_t *)panel)[at]); break;
        default: out[k] = quantized(format, panel + k / TS_GROUP * group_bytes(format), o, (int)(k % TS_GROUP)); break;
        }
    }
}

void ts_repack(const ts_linear *from, int32_t format, void *panels) {
    float *row = malloc((size_t)from->in * sizeof(float));
    clear_padding(format, from->out, from->in, panels);
    for (int64_t r = 0; row && r < from->out; r++) {
        ts_unpack_row(from, r, row);
        pack_row(format, row, r, from->in, panels);
    }
    free(row);
}
