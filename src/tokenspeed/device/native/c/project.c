/* Sharing out projections: runs of panels, and by blocks of rows so that a block's activations stay in a core's cache. */
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

/* Panels of all parts, one part after the other, once for each block of rows: those of one share. */
static void project_share(const ts_step *step, const ts_input *in, int64_t rows, const ts_part *parts, int num_parts,
                          int64_t panels, int64_t block, ts_share mine) {
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

void ts_project_parts(const ts_step *step, const ts_input *in, int64_t rows, const ts_part *parts, int num_parts,
                      ts_team team) {
    int64_t panels = 0;
    for (int p = 0; p < num_parts; p++) panels += ts_panels(parts[p].linear->out);
    int64_t block = block_rows(parts[0].linear, rows), items = ts_round_up(rows, block) / block * panels;
    int64_t run = ts_run_of(items, team);
    for (ts_share mine; (mine = ts_claim(items, run, team)).first < items;) {
        project_share(step, in, rows, parts, num_parts, panels, block, mine);
    }
}

/* One column group of one block of rows. */
static void gate_up_group(const ts_step *step, const ts_layer *layer, const ts_input *in, int64_t group, int64_t row,
                          int64_t count) {
    enum { PANELS = TS_GROUP / TS_PANEL };
    const ts_input *mixed = &step->space.mixed;
    void (*gate_mul)(const float *, const float *, int64_t, float *) =
        layer->activation == TS_SILU ? step->kernels->silu_mul : step->kernels->gelu_mul;
    int64_t columns = layer->gate.out, panels = ts_panels(columns), stride = step->space.projected_wide;
    int64_t first = group * PANELS, last = first + PANELS < panels ? first + PANELS : panels;
    int64_t from = first * TS_PANEL, to = last * TS_PANEL < columns ? last * TS_PANEL : columns;
    float *gate = step->space.projected, *up = gate + columns;
    step->kernels->project(&layer->gate, in, row, count, first, last, gate, stride, 0);
    step->kernels->project(&layer->up, in, row, count, first, last, up, stride, 0);
    for (int64_t r = row; r < row + count; r++) {
        gate_mul(gate + r * stride + from, up + r * stride + from, to - from, mixed->x + r * mixed->x_stride + from);
        ts_prepare(step, layer->down.format, mixed, r, from, to);
    }
}

void ts_project_gate_up(const ts_step *step, const ts_layer *layer, const ts_input *in, ts_team team) {
    int64_t rows = step->rows->tokens, groups = ts_groups(layer->gate.out);
    int64_t block = block_rows(&layer->gate, rows), items = ts_round_up(rows, block) / block * groups;
    int64_t run = ts_run_of(items, team);
    for (ts_share mine; (mine = ts_claim(items, run, team)).first < items;) {
        for (int64_t item = mine.first; item < mine.last; item++) {
            int64_t row = item / groups * block, count = rows - row < block ? rows - row : block;
            gate_up_group(step, layer, in, item % groups, row, count);
        }
    }
}
