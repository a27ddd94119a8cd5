/* Attention of a step: which thread computes which queries over which positions. */
#include "step.h"

/* ---- where runs are -------------------------------------------------------------------------------------- */

/* Page 0's run of keys (kind 0) or values (kind 1). */
static char *first_run(const ts_step *step, int32_t layer, int kind, int64_t head) {
    const ts_cache *cache = ts_cache_of(step, layer);
    int64_t run_bytes = (int64_t)cache->page_tokens * step->model->head_dim * (step->pool->format == TS_F32 ? 4 : 2);
    int64_t run = ((int64_t)step->model->layers[layer].index * 2 + kind) * step->model->kv_heads + head;
    return (char *)cache->pages + run * run_bytes;
}

static int64_t group_heads(const ts_model *model) { return model->heads / model->kv_heads; }

/* ---- keys and values into the pool ------------------------------------------------------------------------ */

static void rotate_head(const ts_step *step, int32_t layer, int64_t token, int64_t head, float scale) {
    const ts_model *model = step->model;
    int64_t dim = model->head_dim;
    float *x = step->space.projected + token * step->space.projected_wide + head * dim;
    const float *weight = model->layers[layer].qk_norm;
    if (weight) step->kernels->norm(x, weight + head * dim, dim, model->rms_eps, x);
    const float *turns = step->space.turns + model->layers[layer].rope * step->rows->tokens * dim;
    step->kernels->rotate(x, turns + token * dim, dim, scale);
}

/* A token's queries, key and value of one key-value head: rotated, and the latter two written to `page`. */
static void write_head(const ts_step *step, int32_t layer, int64_t token, int32_t page, int64_t kv_head) {
    const ts_model *model = step->model;
    const ts_cache *cache = ts_cache_of(step, layer);
    int64_t dim = model->head_dim, page_tokens = cache->page_tokens, group = group_heads(model);
    int64_t offset = step->rows->positions[token] % page_tokens, in_pool = page * cache->page_bytes;
    int64_t key = model->heads + kv_head, value = key + model->kv_heads;
    const float *x = step->space.projected + token * step->space.projected_wide;
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
        rotate_head(step, layer, token, head, model->query_scale);
    }
    rotate_head(step, layer, token, key, 1.0f);
    step->kernels->store_key(first_run(step, layer, 0, kv_head) + in_pool, step->pool->format, x + key * dim, dim,
                             offset, page_tokens);
    step->kernels->store_value(first_run(step, layer, 1, kv_head) + in_pool, step->pool->format, x + value * dim, dim,
                               offset);
}

static void write_token(const ts_step *step, int32_t layer, int64_t row, int64_t token, int64_t kv_head) {
    const ts_table *table = step->rows->tables + step->model->layers[layer].cache;
    int64_t block = step->rows->positions[token] / ts_cache_of(step, layer)->page_tokens;
    write_head(step, layer, token, table->blocks[row * table->max_blocks + block], kv_head);
}

static void write_all(const ts_step *step, int32_t layer, ts_team team) {
    int64_t heads = step->model->kv_heads, row = 0;
    ts_share mine = ts_share_of(step->rows->tokens * heads, team);
    for (int64_t item = mine.first; item < mine.last; item++) {
        int64_t token = item / heads;
        while (step->rows->offsets[row + 1] <= token) row++;
        write_token(step, layer, row, token, item % heads);
    }
}

/* ---- queries ------------------------------------------------------------------------------------------------ */

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
    step->at_once = !step->apart && step->num_tiles == rows->rows;
}

static ts_queries queries_of(const ts_step *step, int32_t layer, int64_t tile, int64_t kv_head) {
    const ts_query_tile *at = step->space.tiles + tile;
    const ts_space *space = &step->space;
    const ts_cache *cache = ts_cache_of(step, layer);
    const ts_table *table = step->rows->tables + step->model->layers[layer].cache;
    int64_t heads = group_heads(step->model), first_head = kv_head * heads * step->model->head_dim;
    return (ts_queries){
        .q = space->projected + at->token * space->projected_wide + first_head,
        .q_stride = space->projected_wide,
        .out = space->mixed.x + at->token * space->mixed.x_stride + first_head,
        .out_stride = space->mixed.x_stride,
        .tokens = at->tokens,
        .heads = (int32_t)heads,
        .head_dim = step->model->head_dim,
        .first = step->rows->positions[at->token],
        .pages = table->blocks + at->row * table->max_blocks,
        .keys = first_run(step, layer, 0, kv_head),
        .values = first_run(step, layer, 1, kv_head),
        .page_bytes = cache->page_bytes,
        .page_tokens = cache->page_tokens,
        .format = step->pool->format,
        .window = cache->window,
    };
}

/* Stretches that a tile's queries see: from the first one's window to the last one's position. */
static int64_t first_stretch(const ts_queries *q) { return ts_sees_from(q, 0) / TS_ATTENTION_STRETCH; }
static int64_t stretches_seen(const ts_queries *q) { return stretches_of(q->first + q->tokens); }

static ts_partial partial_at(const ts_step *step, float *memory) {
    int64_t rows = ts_query_rows(group_heads(step->model));
    return (ts_partial){memory, memory + rows, memory + 2 * rows};
}

/* Whether the columns of a key-value head's queries are whole groups of the output projection's input. */
static int whole_groups(const ts_step *step) {
    return group_heads(step->model) * step->model->head_dim % TS_GROUP == 0;
}

/* A tile's result, to the output projection's input. */
static void put_result(const ts_step *step, int32_t layer, int64_t item, const ts_queries *q, const ts_partial *sum) {
    const ts_query_tile *at = step->space.tiles + item / step->model->kv_heads;
    int64_t columns = (int64_t)q->heads * q->head_dim, first = item % step->model->kv_heads * columns;
    step->kernels->finish(q, sum);
    if (!whole_groups(step)) return;
    for (int64_t token = at->token; token < at->token + at->tokens; token++) {
        ts_prepare(step, step->model->layers[layer].o.format, &step->space.mixed, token, first, first + columns);
    }
}

/* One tile of one key-value head, from its first position to its last. */
static void attend_item(const ts_step *step, int32_t layer, int64_t item, float *scratch) {
    const ts_query_tile *at = step->space.tiles + item / step->model->kv_heads;
    int64_t kv_head = item % step->model->kv_heads;
    ts_queries q = queries_of(step, layer, item / step->model->kv_heads, kv_head);
    ts_partial sum = partial_at(step, scratch), partial = partial_at(step, scratch + step->space.partial_floats);
    for (int64_t token = at->token; step->at_once && token < at->token + at->tokens; token++) {
        write_token(step, layer, at->row, token, kv_head);
    }
    for (int64_t stretch = first_stretch(&q); stretch < stretches_seen(&q); stretch++) {
        step->kernels->attend(&q, stretch, scratch + 2 * step->space.partial_floats, &partial);
        step->kernels->merge(&q, stretch, &partial, &sum);
    }
    put_result(step, layer, item, &q, &sum);
}

/* The same sums with stretches computed by whichever thread is free, then merged in order. */
static void attend_apart(const ts_step *step, int32_t layer, float *scratch, ts_team team) {
    const ts_space *space = &step->space;
    int64_t kv_heads = step->model->kv_heads, items = step->num_tiles * kv_heads, slots = items * step->stretches;
    for (int64_t slot; (slot = ts_claim(slots, 1, team).first) < slots;) {
        int64_t item = slot / step->stretches, stretch = slot % step->stretches;
        ts_queries q = queries_of(step, layer, item / kv_heads, item % kv_heads);
        ts_partial partial = partial_at(step, space->partials + slot * space->partial_floats);
        if (stretch >= first_stretch(&q) && stretch < stretches_seen(&q)) step->kernels->attend(&q, stretch, scratch, &partial);
    }
    ts_meet(team);
    ts_share mine = ts_share_of(items, team);
    for (int64_t item = mine.first; item < mine.last; item++) {
        ts_queries q = queries_of(step, layer, item / kv_heads, item % kv_heads);
        ts_partial sum = partial_at(step, scratch);
        for (int64_t stretch = first_stretch(&q); stretch < stretches_seen(&q); stretch++) {
            int64_t slot = item * step->stretches + stretch;
            ts_partial partial = partial_at(step, space->partials + slot * space->partial_floats);
            step->kernels->merge(&q, stretch, &partial, &sum);
        }
        put_result(step, layer, item, &q, &sum);
    }
}

void ts_attention(const ts_step *step, int32_t layer, ts_team team) {
    const ts_model *model = step->model;
    float *scratch = step->space.attention + team.id * step->space.attention_floats;
    int64_t items = step->num_tiles * model->kv_heads;
    if (!step->at_once) {
        write_all(step, layer, team);
        ts_meet(team);
    }
    if (step->apart) {
        attend_apart(step, layer, scratch, team);
    } else {
        /* Backwards: the last tiles of a chunk see the most, and a long one must not come last. */
        for (int64_t back; (back = ts_claim(items, 1, team).first) < items;) {
            attend_item(step, layer, items - 1 - back, scratch);
        }
    }
    ts_meet(team);
    if (!whole_groups(step)) {
        ts_share mine = ts_share_of(step->rows->tokens, team);
        for (int64_t token = mine.first; token < mine.last; token++) {
            ts_prepare(step, model->layers[layer].o.format, &step->space.mixed, token, 0,
                       (int64_t)model->heads * model->head_dim);
        }
        ts_meet(team);
    }
}
