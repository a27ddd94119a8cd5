/* Sharing out projections: by panels, and by blocks of rows so that a block's activations stay in a core's cache. */
#include "step.h"

enum {
    CACHE_BYTES = 256 * 1024,
    WHOLE_TILES = 24, /* a multiple of every instruction set's rows of a tile */
};

static int64_t block_rows(const ts_linear *linear, int64_t rows) {
    int64_t row_bytes = linear->in * (ts_is_quantized(linear->format) ? 3 : 4); /* with a group's 16 bytes, nearly */
    int64_t most = CACHE_BYTES / row_bytes / WHOLE_TILES * WHOLE_TILES;
    if (most < WHOLE_TILES) most = WHOLE_TILES;
    int64_t blocks = ts_round_up(rows, most) / most;
    return (rows + blocks - 1) / blocks;
}

void ts_project_parts(const ts_step *step, const ts_input *in, int64_t rows, const ts_part *parts, int num_parts,
                      ts_team team) {
    int64_t panels = 0;
    for (int p = 0; p < num_parts; p++) panels += ts_panels(parts[p].linear->out);
    int64_t block = block_rows(parts[0].linear, rows), blocks = ts_round_up(rows, block) / block;
    ts_share mine = ts_share_of(blocks * panels, team);
    for (int64_t b = mine.first / panels; b * panels < mine.last; b++) {
        int64_t row = b * block, count = rows - row < block ? rows - row : block;
        int64_t start = b * panels; /* number of the part's first panel in this block */
        for (int p = 0; p < num_parts; p++) {
            const ts_part *part = parts + p;
            int64_t own = ts_panels(part->linear->out);
            int64_t first = mine.first > start ? mine.first - start : 0;
            int64_t last = mine.last - start < own ? mine.last - start : own;
            if (first < last) {
                step->kernels->project(part->linear, in, row, count, first, last, part->out, part->out_stride,
                                       part->add);
            }
            start += own;
        }
    }
}

void ts_project_gate_up(const ts_step *step, const ts_layer *layer, const ts_input *in, ts_team team) {
    enum { PANELS = TS_GROUP / TS_PANEL }; /* a column group of the next projection's input */
    const ts_input *mixed = &step->space.mixed;
    int64_t rows = step->rows->tokens, columns = layer->gate.out, panels = ts_panels(columns);
    int64_t groups = ts_groups(columns), stride = step->space.projected_wide;
    void (*gate_mul)(const float *, const float *, int64_t, float *) =
        layer->activation == TS_SILU ? step->kernels->silu_mul : step->kernels->gelu_mul;
    int64_t block = block_rows(&layer->gate, rows), blocks = ts_round_up(rows, block) / block;
    ts_share mine = ts_share_of(blocks * groups, team);
    for (int64_t item = mine.first; item < mine.last; item++) {
        int64_t row = item / groups * block, count = rows - row < block ? rows - row : block;
        int64_t first = item % groups * PANELS, last = first + PANELS < panels ? first + PANELS : panels;
        int64_t from = first * TS_PANEL, to = last * TS_PANEL < columns ? last * TS_PANEL : columns;
        float *gate = step->space.projected, *up = gate + columns;
        step->kernels->project(&layer->gate, in, row, count, first, last, gate, stride, 0);
        step->kernels->project(&layer->up, in, row, count, first, last, up, stride, 0);
        for (int64_t r = row; r < row + count; r++) {
            gate_mul(gate + r * stride + from, up + r * stride + from, to - from,
                     mixed->x + r * mixed->x_stride + from);
            ts_prepare(step, layer->down.format, mixed, r, from, to);
        }
    }
}
