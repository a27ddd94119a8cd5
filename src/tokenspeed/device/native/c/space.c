/* The scratch of a step: how much, and what is where. */
#include "step.h"

enum { ALIGNMENT = 64 };

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* The next piece of `bytes`; `at` is where in the memory. Without memory only `at` counts. */
static void *carve(char *memory, int64_t *at, int64_t bytes) {
    char *piece = memory ? memory + *at : 0;
    *at = ts_round_up(*at + bytes, ALIGNMENT);
    return piece;
}

static ts_input carve_rows(char *memory, int64_t *at, int64_t rows, int64_t columns) {
    int64_t groups = ts_groups(columns);
    return (ts_input){
        .x = carve(memory, at, rows * ts_round_up(columns, TS_PANEL) * (int64_t)sizeof(float)),
        .x_stride = ts_round_up(columns, TS_PANEL),
        .q = carve(memory, at, rows * groups * TS_GROUP * (int64_t)sizeof(int16_t)),
        .q_stride = groups * TS_GROUP,
        .groups = carve(memory, at, rows * groups * (int64_t)sizeof(ts_group)),
        .group_stride = groups,
    };
}

ts_space ts_lay_out(const ts_model *model, int64_t tokens, int64_t context, int32_t threads, void *memory) {
    int64_t q_dim = (int64_t)model->heads * model->head_dim, kv_dim = (int64_t)model->kv_heads * model->head_dim;
    int64_t group = model->heads / model->kv_heads, at = 0;
    int64_t stretches = ts_round_up(context, TS_ATTENTION_STRETCH) / TS_ATTENTION_STRETCH;
    ts_space s = {0};
    int64_t wide = larger(q_dim + 2 * kv_dim, 2 * (int64_t)model->intermediate);
    s.projected_wide = ts_round_up(larger(wide, model->hidden), TS_PANEL);
    s.partial_floats = ts_partial_floats(group, model->head_dim);
    s.attention_floats = ts_round_up(2 * s.partial_floats + ts_attention_scratch(group, model->head_dim), TS_PANEL);
    s.partial_slots = (threads > 1 ? 4 * (int64_t)threads : 0) * stretches;
    s.normed = carve_rows(memory, &at, tokens <= TS_FEW_TOKENS ? threads * tokens : tokens, model->hidden);
    s.mixed = carve_rows(memory, &at, tokens, larger(q_dim, model->intermediate));
    s.projected = carve(memory, &at, tokens * s.projected_wide * (int64_t)sizeof(float));
    s.turns = carve(memory, &at, model->num_ropes * tokens * model->head_dim * (int64_t)sizeof(float));
    s.tiles = carve(memory, &at, tokens * (int64_t)sizeof(ts_query_tile));
    s.attention = carve(memory, &at, threads * s.attention_floats * (int64_t)sizeof(float));
    s.partials = carve(memory, &at, s.partial_slots * s.partial_floats * (int64_t)sizeof(float));
    s.bytes = at;
    return s;
}

int64_t ts_workspace_bytes(const ts_model *model, int64_t tokens, int64_t context, int32_t threads) {
    return ts_lay_out(model, tokens, context, threads, 0).bytes;
}
