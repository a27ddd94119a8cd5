/* The forward, from token ids to logits. One parallel region a call; phases are separated by barriers. */
#include "step.h"

#include "ready.h"

#include <math.h>
#include <omp.h>

static void embed(const ts_step *step, ts_team team) {
    const ts_model *model = step->model;
    ts_share mine = ts_share_of(step->rows->tokens, team);
    for (int64_t token = mine.first; token < mine.last; token++) {
        float *hidden = step->call->hidden + token * model->hidden, scale = model->embedding_scale;
        ts_unpack_row(&model->embedding, step->rows->token_ids[token], hidden);
        for (int64_t i = 0; scale != 1.0f && i < model->hidden; i++) hidden[i] *= scale;
    }
}

static void find_turns(const ts_step *step, ts_team team) {
    const ts_model *model = step->model;
    int64_t tokens = step->rows->tokens;
    ts_share mine = ts_share_of(model->num_ropes * tokens, team);
    for (int64_t item = mine.first; item < mine.last; item++) {
        const ts_rope *rope = model->ropes + item / tokens;
        float *turns = step->space.turns + item * model->head_dim;
        float position = (float)step->rows->positions[item % tokens];
        for (int64_t pair = 0; pair < model->head_dim / 2; pair++) {
            float angle = position * rope->frequencies[pair];
            turns[2 * pair] = cosf(angle) * rope->magnitude;
            turns[2 * pair + 1] = sinf(angle) * rope->magnitude;
        }
    }
}

/* A thread's rows of space.normed: its own with few tokens, else those of all. */
static ts_input normed_rows(const ts_step *step, ts_team team) {
    ts_input rows = step->space.normed;
    if (step->rows->tokens <= TS_FEW_TOKENS) {
        int64_t first = step->rows->tokens * team.id;
        rows.x += first * rows.x_stride;
        rows.q += first * rows.q_stride;
        rows.groups += first * rows.group_stride;
    }
    return rows;
}

/* `tokens` of the hidden state (NULL: 0, 1, 2, ...) normed, as the input of projections in `format`. Ends with a
 * barrier, unless every thread does all of it. */
static ts_input norm_rows(const ts_step *step, const float *weight, int32_t format, const int64_t *tokens,
                          int64_t count, ts_team team) {
    const ts_model *model = step->model;
    const ts_input out = normed_rows(step, team);
    int shared = step->rows->tokens > TS_FEW_TOKENS;
    ts_share mine = shared ? ts_share_of(count, team) : (ts_share){0, count};
    for (int64_t row = mine.first; row < mine.last; row++) {
        const float *hidden = step->call->hidden + (tokens ? tokens[row] : row) * model->hidden;
        step->kernels->norm(hidden, weight, model->hidden, model->rms_eps, out.x + row * out.x_stride);
        ts_prepare(step, format, &out, row, 0, model->hidden);
    }
    if (shared) ts_meet(team);
    return out;
}

static int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }

/* Where a half's last projection goes: added to the hidden state, or to be normed by `norm` first. */
static ts_part last_part(const ts_step *step, const ts_linear *linear, const float *norm) {
    if (norm) return (ts_part){linear, step->space.projected, step->space.projected_wide, 0};
    return (ts_part){linear, step->call->hidden, step->model->hidden, 1};
}

/* Norm what is in space.projected and add it to the hidden state; a barrier before, and one after. */
static void add_normed(const ts_step *step, const float *norm, ts_team team) {
    const ts_model *model = step->model;
    ts_share mine = ts_share_of(step->rows->tokens, team);
    for (int64_t token = mine.first; token < mine.last; token++) {
        float *x = step->space.projected + token * step->space.projected_wide;
        float *hidden = step->call->hidden + token * model->hidden;
        step->kernels->norm(x, norm, model->hidden, model->rms_eps, x);
        for (int64_t i = 0; i < model->hidden; i++) hidden[i] += x[i];
    }
    ts_meet(team);
}

static void attention_half(const ts_step *step, int32_t index, ts_team team) {
    const ts_model *model = step->model;
    const ts_layer *layer = model->layers + index;
    const ts_space *s = &step->space;
    int64_t q_dim = (int64_t)model->heads * model->head_dim, kv_dim = (int64_t)model->kv_heads * model->head_dim;
    const ts_part qkv[] = {
        {&layer->q, s->projected, s->projected_wide, 0},
        {&layer->k, s->projected + q_dim, s->projected_wide, 0},
        {&layer->v, s->projected + q_dim + kv_dim, s->projected_wide, 0},
    };
    const ts_part out = last_part(step, &layer->o, layer->attn_post_norm);
    int32_t format = larger(layer->q.format, larger(layer->k.format, layer->v.format)); /* quantized if one is */
    const ts_input in = norm_rows(step, layer->attn_norm, format, NULL, step->rows->tokens, team);
    ts_project_parts(step, &in, step->rows->tokens, qkv, 3, team);
    if (team.id == 0) ts_wait_layer(step->call->layers_ready, index);
    ts_meet(team);
    ts_attention(step, index, team);
    ts_project_parts(step, &s->mixed, step->rows->tokens, &out, 1, team);
    ts_meet(team);
    if (layer->attn_post_norm) add_normed(step, layer->attn_post_norm, team);
}

static void feed_forward_half(const ts_step *step, int32_t index, ts_team team) {
    const ts_layer *layer = step->model->layers + index;
    const ts_part down = last_part(step, &layer->down, layer->mlp_post_norm);
    int32_t format = larger(layer->gate.format, layer->up.format);
    const ts_input in = norm_rows(step, layer->mlp_norm, format, NULL, step->rows->tokens, team);
    ts_project_gate_up(step, layer, &in, team);
    ts_meet(team);
    ts_project_parts(step, &step->space.mixed, step->rows->tokens, &down, 1, team);
    ts_meet(team);
    if (layer->mlp_post_norm) add_normed(step, layer->mlp_post_norm, team);
}

/* Logits of the wanted tokens, as many at a time as space.normed has rows. */
static void head(const ts_step *step, ts_team team) {
    const ts_model *model = step->model;
    int64_t wanted = step->rows->wanted, at_once = step->rows->tokens;
    for (int64_t done = 0; done < wanted; done += at_once) {
        int64_t rows = wanted - done < at_once ? wanted - done : at_once;
        const ts_part logits = {&model->head, step->call->logits + done * model->vocab, model->vocab, 0};
        const ts_input in =
            norm_rows(step, model->norm, model->head.format, step->rows->logit_tokens + done, rows, team);
        ts_project_parts(step, &in, rows, &logits, 1, team);
        ts_meet(team);
    }
}

static void run(const ts_step *step, ts_team team) {
    if (step->call->first == 0) embed(step, team);
    find_turns(step, team);
    ts_meet(team);
    for (int32_t layer = step->call->first; layer < step->call->last; layer++) {
        attention_half(step, layer, team);
        feed_forward_half(step, layer, team);
    }
    if (step->call->last == step->model->num_layers) head(step, team);
}

int32_t ts_run(const ts_model *model, const ts_pool *pool, const ts_rows *rows, const ts_call *call) {
    int32_t status = ts_validate(model, pool, rows, call);
    if (status) return status;
    int64_t context = 0;
    for (int64_t row = 0; row < rows->rows; row++) context = rows->contexts[row] > context ? rows->contexts[row] : context;
    ts_step step = {.model = model, .pool = pool, .rows = rows, .call = call, .kernels = ts_current_kernels()};
    step.space = ts_lay_out(model, rows->tokens, context, call->threads, call->workspace);
    ts_plan_attention(&step);
    ts_meeting meeting = {0};
    int32_t threads = ts_threads_for(call->threads);
    if (threads == 1) {
        run(&step, (ts_team){0, 1, &meeting});
        return TS_OK;
    }
#pragma omp parallel num_threads(threads)
    run(&step, (ts_team){omp_get_thread_num(), omp_get_num_threads(), &meeting});
    return TS_OK;
}

void ts_project(const ts_linear *linear, const float *x, int64_t rows, float *y, void *workspace) {
    const ts_kernels *kernels = ts_current_kernels();
    int64_t groups = ts_groups(linear->in), stride = groups * TS_GROUP;
    ts_group *scales = workspace;
    int16_t *q = (int16_t *)(scales + rows * groups);
    for (int64_t row = 0; row < rows; row++) {
        kernels->quantize(x + row * linear->in, linear->in, q + row * stride, scales + row * groups);
    }
    const ts_input in = {(float *)x, linear->in, q, stride, scales, groups}; /* only read */
    kernels->project(linear, &in, 0, rows, 0, ts_panels(linear->out), y, linear->out, 0);
}

void ts_layout(int64_t sizes[TS_LAYOUT]) {
    const int64_t all[TS_LAYOUT] = {sizeof(ts_linear), sizeof(ts_layer), sizeof(ts_rope),  sizeof(ts_model), sizeof(ts_cache),
                                    sizeof(ts_pool),   sizeof(ts_table), sizeof(ts_rows), sizeof(ts_call)};
    for (int i = 0; i < TS_LAYOUT; i++) sizes[i] = all[i];
}
