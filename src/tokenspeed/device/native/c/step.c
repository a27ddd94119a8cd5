/* The forward, from token ids to logits. One parallel region a call; phases are separated by barriers. */
#include "step.h"

#include "ready.h"

#include <math.h>
#include <omp.h>

enum { ACTIVATION_PIECE = 256 }; /* columns of the feed-forward that are one item of work; whole groups */

static void embed(const ts_step *step, ts_team team) {
    const ts_model *model = step->model;
    ts_share mine = ts_share_of(step->rows->tokens, team);
    for (int64_t token = mine.first; token < mine.last; token++) {
        ts_unpack_row(&model->embedding, step->rows->token_ids[token], step->call->hidden + token * model->hidden);
    }
}

static void find_turns(const ts_step *step, ts_team team) {
    const ts_model *model = step->model;
    ts_share mine = ts_share_of(step->rows->tokens, team);
    for (int64_t token = mine.first; token < mine.last; token++) {
        float *turns = step->space.turns + token * model->head_dim, position = (float)step->rows->positions[token];
        for (int64_t pair = 0; pair < model->head_dim / 2; pair++) {
            float angle = position * model->rope_frequencies[pair];
            turns[2 * pair] = cosf(angle) * model->rope_magnitude;
            turns[2 * pair + 1] = sinf(angle) * model->rope_magnitude;
        }
    }
}

/* Columns first .. last - 1 of row `row` of space.normed, for a projection in `format`. */
static void prepare(const ts_step *step, int32_t format, int64_t row, int64_t first, int64_t last) {
    const ts_space *s = &step->space;
    if (ts_is_quantized(format)) {
        step->kernels->quantize(s->normed + row * s->wide + first, last - first, s->q + row * s->q_stride + first,
                                s->groups + row * s->group_stride + first / TS_GROUP);
    }
}

static void norm_rows(const ts_step *step, const float *weight, int32_t format, ts_team team) {
    const ts_model *model = step->model;
    ts_share mine = ts_share_of(step->rows->tokens, team);
    for (int64_t row = mine.first; row < mine.last; row++) {
        step->kernels->norm(step->call->hidden + row * model->hidden, weight, model->hidden, model->rms_eps,
                            step->space.normed + row * step->space.wide);
        prepare(step, format, row, 0, model->hidden);
    }
}

/* space.normed is there; quantize it. Ends with a barrier unless there is nothing to do. */
static void quantize_rows(const ts_step *step, int32_t format, int64_t columns, ts_team team) {
    if (!ts_is_quantized(format)) return;
    int64_t pieces = ts_round_up(columns, ACTIVATION_PIECE) / ACTIVATION_PIECE;
    ts_share mine = ts_share_of(step->rows->tokens * pieces, team);
    for (int64_t item = mine.first; item < mine.last; item++) {
        int64_t first = item % pieces * ACTIVATION_PIECE, left = columns - first;
        prepare(step, format, item / pieces, first, first + (left < ACTIVATION_PIECE ? left : ACTIVATION_PIECE));
    }
#pragma omp barrier
}

static void activate_rows(const ts_step *step, int32_t format, ts_team team) {
    const ts_space *s = &step->space;
    int64_t columns = step->model->intermediate;
    int64_t pieces = ts_round_up(columns, ACTIVATION_PIECE) / ACTIVATION_PIECE;
    ts_share mine = ts_share_of(step->rows->tokens * pieces, team);
    for (int64_t item = mine.first; item < mine.last; item++) {
        int64_t row = item / pieces, first = item % pieces * ACTIVATION_PIECE, left = columns - first;
        int64_t count = left < ACTIVATION_PIECE ? left : ACTIVATION_PIECE;
        const float *gate = s->projected + row * s->projected_wide + first;
        step->kernels->silu_mul(gate, gate + columns, count, s->normed + row * s->wide + first);
        prepare(step, format, row, first, first + count);
    }
}

/* What the projections of one input read: quantized activations if any of them does. */
static int32_t format_of(const ts_part *parts, int num_parts) {
    int32_t format = parts[0].linear->format;
    for (int p = 1; p < num_parts; p++) {
        if (parts[p].linear->format > format) format = parts[p].linear->format;
    }
    return format;
}

static void attention_half(const ts_step *step, int32_t index, ts_team team) {
    const ts_model *model = step->model;
    const ts_layer *layer = model->layers + index;
    const ts_space *s = &step->space;
    const ts_input in = ts_normed(step);
    int64_t q_dim = (int64_t)model->heads * model->head_dim, kv_dim = (int64_t)model->kv_heads * model->head_dim;
    const ts_part qkv[] = {
        {&layer->q, s->projected, s->projected_wide, 0},
        {&layer->k, s->projected + q_dim, s->projected_wide, 0},
        {&layer->v, s->projected + q_dim + kv_dim, s->projected_wide, 0},
    };
    const ts_part out = {&layer->o, step->call->hidden, model->hidden, 1};
    norm_rows(step, layer->attn_norm, format_of(qkv, 3), team);
#pragma omp barrier
    ts_project_parts(step, &in, step->rows->tokens, qkv, 3, team);
#pragma omp barrier
    ts_write_kv(step, index, team);
    if (team.id == 0) ts_wait_layer(step->call->layers_ready, index);
#pragma omp barrier
    ts_attention(step, index, team);
    quantize_rows(step, layer->o.format, q_dim, team);
    ts_project_parts(step, &in, step->rows->tokens, &out, 1, team);
#pragma omp barrier
}

static void feed_forward_half(const ts_step *step, int32_t index, ts_team team) {
    const ts_model *model = step->model;
    const ts_layer *layer = model->layers + index;
    const ts_space *s = &step->space;
    const ts_input in = ts_normed(step);
    const ts_part gate_up[] = {
        {&layer->gate, s->projected, s->projected_wide, 0},
        {&layer->up, s->projected + model->intermediate, s->projected_wide, 0},
    };
    const ts_part down = {&layer->down, step->call->hidden, model->hidden, 1};
    norm_rows(step, layer->mlp_norm, format_of(gate_up, 2), team);
#pragma omp barrier
    ts_project_parts(step, &in, step->rows->tokens, gate_up, 2, team);
#pragma omp barrier
    activate_rows(step, layer->down.format, team);
#pragma omp barrier
    ts_project_parts(step, &in, step->rows->tokens, &down, 1, team);
#pragma omp barrier
}

/* Logits of the wanted tokens, as many at a time as space.normed has rows. */
static void head(const ts_step *step, ts_team team) {
    const ts_model *model = step->model;
    const ts_space *s = &step->space;
    const ts_input in = ts_normed(step);
    int64_t wanted = step->rows->wanted, at_once = step->rows->tokens;
    for (int64_t done = 0; done < wanted; done += at_once) {
        int64_t rows = wanted - done < at_once ? wanted - done : at_once;
        ts_share mine = ts_share_of(rows, team);
        for (int64_t row = mine.first; row < mine.last; row++) {
            int64_t token = step->rows->logit_tokens[done + row];
            step->kernels->norm(step->call->hidden + token * model->hidden, model->norm, model->hidden, model->rms_eps,
                                s->normed + row * s->wide);
            prepare(step, model->head.format, row, 0, model->hidden);
        }
        const ts_part logits = {&model->head, step->call->logits + done * model->vocab, model->vocab, 0};
#pragma omp barrier
        ts_project_parts(step, &in, rows, &logits, 1, team);
#pragma omp barrier
    }
}

static void run(const ts_step *step, ts_team team) {
    if (step->call->first == 0) embed(step, team);
    find_turns(step, team);
#pragma omp barrier
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
#pragma omp parallel num_threads(call->threads)
    run(&step, (ts_team){omp_get_thread_num(), omp_get_num_threads()});
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
    const ts_input in = {x, linear->in, q, stride, scales, groups};
    kernels->project(linear, &in, 0, rows, 0, ts_panels(linear->out), y, linear->out, 0);
}

void ts_layout(int64_t sizes[6]) {
    const int64_t all[6] = {sizeof(ts_linear), sizeof(ts_layer), sizeof(ts_model),
                            sizeof(ts_pool), sizeof(ts_rows), sizeof(ts_call)};
    for (int i = 0; i < 6; i++) sizes[i] = all[i];
}
