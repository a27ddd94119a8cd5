/* Attention of a step: which thread computes which queries over which positions. */
#include "step.h"

#include <math.h>

/* ---- where runs are -------------------------------------------------------------------------------------- */

static int64_t run_bytes(const ts_step *step) {
    int64_t element = step->pool->format == TS_F32 ? 4 : 2;
    return (int64_t)step->pool->page_tokens * step->model->head_dim * element;
}

static int64_t page_bytes(const ts_step *step) {
    return (int64_t)step->pool->layers * 2 * step->model->kv_heads * run_bytes(step);
}

/* Page 0's run of keys (kind 0) or values (kind 1). */
static char *first_run(const ts_step *step, int32_t layer, int kind, int64_t head) {
    int64_t run = ((int64_t)layer * 2 + kind) * step->model->kv_heads + head;
    return (char *)step->pool->pages + run * run_bytes(step);
}

/* ---- keys and values into the pool ------------------------------------------------------------------------ */

static void write_head(const ts_step *step, int32_t layer, int64_t token, int32_t page, int64_t head) {
    const ts_model *model = step->model;
    const ts_kernels *kernels = step->kernels;
    int64_t dim = model->head_dim, keys = model->heads + model->kv_heads, page_tokens = step->pool->page_tokens;
    int64_t offset = step->rows->positions[token] % page_tokens, in_pool = (int64_t)page * page_bytes(step);
    float *x = step->space.projected + token * step->space.projected_wide + head * dim;
    if (head >= keys) {
        char *run = first_run(step, layer, 1, head - keys) + in_pool;
        kernels->store_value(run, step->pool->format, x, dim, offset);
        return;
    }
    const float *weight = model->layers[layer].qk_norm;
    if (weight) kernels->norm(x, weight + head * dim, dim, model->rms_eps, x);
    float scale = head < model->heads ? 1.0f / sqrtf((float)dim) : 1.0f;
    kernels->rotate(x, step->space.turns + token * dim, dim, scale);
    if (head >= model->heads) {
        char *run = first_run(step, layer, 0, head - model->heads) + in_pool;
        kernels->store_key(run, step->pool->format, x, dim, offset, page_tokens);
    }
}

void ts_write_kv(const ts_step *step, int32_t layer, ts_team team) {
    int64_t heads = step->model->heads + 2 * step->model->kv_heads, row = 0;
    ts_share mine = ts_share_of(step->rows->tokens * heads, team);
    for (int64_t item = mine.first; item < mine.last; item++) {
        int64_t token = item / heads;
        while (step->rows->offsets[row + 1] <= token) row++;
        const int32_t *table = step->rows->block_tables + row * step->rows->max_blocks;
        write_head(step, layer, token, table[step->rows->positions[token] / step->pool->page_tokens], item % heads);
    }
}

/* ---- queries ------------------------------------------------------------------------------------------------ */

static int64_t group_heads(const ts_model *model) { return model->heads / model->kv_heads; }

static int64_t stretches_of(int64_t context) {
    return ts_round_up(context, TS_ATTENTION_STRETCH) / TS_ATTENTION_STRETCH;
}

void ts_plan_attention(ts_step *step) {
    int64_t most = TS_QUERY_ROWS / group_heads(step->model), longest = 0;
    const ts_rows *rows = step->rows;
    step->num_tiles = 0;
    for (int64_t row = 0; row < rows->rows; row++) {
        int64_t first = rows->offsets[row], last = rows->offsets[row + 1], tokens;
        longest = rows->contexts[row] > longest ? rows->contexts[row] : longest;
        for (int64_t token = first; token < last; token += tokens) {
            tokens = last - token < most ? last - token : most < 1 ? 1 : most;
            step->space.tiles[step->num_tiles++] = (ts_query_tile){row, token, (int32_t)tokens};
        }
    }
    /* With few tiles a long context would keep one thread busy and the others waiting. */
    step->stretches = stretches_of(longest);
    int64_t slots = step->num_tiles * step->model->kv_heads * step->stretches;
    step->apart = step->call->threads > 1 && step->stretches > 1 && slots <= step->space.partial_slots;
}

static ts_queries queries_of(const ts_step *step, int32_t layer, int64_t tile, int64_t kv_head) {
    const ts_query_tile *at = step->space.tiles + tile;
    const ts_space *space = &step->space;
    int64_t heads = group_heads(step->model), first_head = kv_head * heads * step->model->head_dim;
    return (ts_queries){
        .q = space->projected + at->token * space->projected_wide + first_head,
        .q_stride = space->projected_wide,
        .out = space->normed + at->token * space->wide + first_head,
        .out_stride = space->wide,
        .tokens = at->tokens,
        .heads = (int32_t)heads,
        .head_dim = step->model->head_dim,
        .first = step->rows->positions[at->token],
        .pages = step->rows->block_tables + at->row * step->rows->max_blocks,
        .keys = first_run(step, layer, 0, kv_head),
        .values = first_run(step, layer, 1, kv_head),
        .page_bytes = page_bytes(step),
        .page_tokens = step->pool->page_tokens,
        .format = step->pool->format,
    };
}

static int64_t stretches_seen(const ts_queries *q) { return stretches_of(q->first + q->tokens); }

static ts_partial partial_at(const ts_step *step, float *memory) {
    int64_t rows = ts_query_rows(group_heads(step->model));
    return (ts_partial){memory, memory + rows, memory + 2 * rows};
}

/* One tile from its first position to its last. */
static void attend_tile(const ts_step *step, const ts_queries *q, float *scratch) {
    ts_partial sum = partial_at(step, scratch), partial = partial_at(step, scratch + step->space.partial_floats);
    for (int64_t stretch = 0; stretch < stretches_seen(q); stretch++) {
        step->kernels->attend(q, stretch, scratch + 2 * step->space.partial_floats, &partial);
        step->kernels->merge(q, stretch, &partial, &sum);
    }
    step->kernels->finish(q, &sum);
}

/* The same sums with stretches computed by whichever thread is free, then merged in order. */
static void attend_apart(const ts_step *step, int32_t layer, float *scratch) {
    const ts_space *space = &step->space;
    int64_t kv_heads = step->model->kv_heads, items = step->num_tiles * kv_heads;
#pragma omp for schedule(dynamic, 1)
    for (int64_t slot = 0; slot < items * step->stretches; slot++) {
        int64_t item = slot / step->stretches, stretch = slot % step->stretches;
        ts_queries q = queries_of(step, layer, item / kv_heads, item % kv_heads);
        ts_partial partial = partial_at(step, space->partials + slot * space->partial_floats);
        if (stretch < stretches_seen(&q)) step->kernels->attend(&q, stretch, scratch, &partial);
    }
#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; item++) {
        ts_queries q = queries_of(step, layer, item / kv_heads, item % kv_heads);
        ts_partial sum = partial_at(step, scratch);
        for (int64_t stretch = 0; stretch < stretches_seen(&q); stretch++) {
            int64_t slot = item * step->stretches + stretch;
            ts_partial partial = partial_at(step, space->partials + slot * space->partial_floats);
            step->kernels->merge(&q, stretch, &partial, &sum);
        }
        step->kernels->finish(&q, &sum);
    }
}

void ts_attention(const ts_step *step, int32_t layer, ts_team team) {
    float *scratch = step->space.attention + team.id * step->space.attention_floats;
    int64_t kv_heads = step->model->kv_heads, items = step->num_tiles * kv_heads;
    if (step->apart) {
        attend_apart(step, layer, scratch);
        return;
    }
    /* Backwards: the last tiles of a chunk see the most, and a long one must not come last. */
#pragma omp for schedule(dynamic, 1)
    for (int64_t back = 0; back < items; back++) {
        int64_t item = items - 1 - back;
        ts_queries q = queries_of(step, layer, item / kv_heads, item % kv_heads);
        attend_tile(step, &q, scratch);
    }
}
