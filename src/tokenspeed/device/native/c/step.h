/* One step in progress: arguments, scratch and the phases that a layer is made of.
 *
 * Every phase is called by all threads of the team and ends at a barrier of its caller's.
 */
#ifndef TS_STEP_H
#define TS_STEP_H

#include "kernels.h"
#include "team.h"

/* Queries that share a pass over their keys, before the head is known. */
typedef struct {
    int64_t row;   /* of the batch */
    int64_t token; /* the first, in the batch */
    int32_t tokens;
} ts_query_tile;

/* Up to so many tokens, every thread computes the norms of all of them for itself, which takes less time
 * than waiting for each other. */
enum { TS_FEW_TOKENS = 8 };

/* Scratch of a step with T tokens; carved out of one piece of memory. */
typedef struct {
    ts_input normed;  /* [T][hidden]; with few tokens [threads][T][hidden] */
    ts_input mixed;   /* [T]: attention's result, then the inner activations of the feed-forward */
    float *projected; /* [T][projected_wide]: q, k, v, or gate and up, or what is normed before it is added */
    float *turns;     /* [ropes][T][head_dim / 2][2]: cosine and sine */
    ts_query_tile *tiles;
    float *attention; /* [threads][attention_floats] */
    float *partials;  /* [partial_slots][partial_floats]: stretches computed apart */
    int64_t projected_wide, attention_floats, partial_floats, partial_slots;
    int64_t bytes;
} ts_space;

typedef struct {
    const ts_model *model;
    const ts_pool *pool;
    const ts_rows *rows;
    const ts_call *call;
    const ts_kernels *kernels;
    ts_space space;
    int64_t num_tiles;
    int64_t stretches; /* of the longest context */
    int apart;         /* attention: stretches of one tile are computed by different threads */
    int at_once;       /* attention: a tile's keys and values are written by who reads them, nobody else does */
} ts_step;

ts_space ts_lay_out(const ts_model *model, int64_t tokens, int64_t context, int32_t threads, void *memory);

static inline const ts_cache *ts_cache_of(const ts_step *step, int32_t layer) {
    return step->pool->caches + step->model->layers[layer].cache;
}

/* Columns first .. last - 1 of row `row` are there as floats: quantize them if `format` is. Whole groups. */
static inline void ts_prepare(const ts_step *step, int32_t format, const ts_input *rows, int64_t row, int64_t first,
                              int64_t last) {
    if (ts_is_quantized(format)) {
        step->kernels->quantize(rows->x + row * rows->x_stride + first, last - first,
                                rows->q + row * rows->q_stride + first,
                                rows->groups + row * rows->group_stride + first / TS_GROUP);
    }
}

/* ---- project.c ---- */

/* One of several projections of the same input. */
typedef struct {
    const ts_linear *linear;
    float *out; /* row 0 */
    int64_t out_stride;
    int add; /* to what is in out */
} ts_part;

void ts_project_parts(const ts_step *step, const ts_input *in, int64_t rows, const ts_part *parts, int num_parts,
                      ts_team team);

/* space.mixed = activation(gate) * up, quantized if `down` is; gate and up of a column by the same thread. */
void ts_project_gate_up(const ts_step *step, const ts_layer *layer, const ts_input *in, ts_team team);

/* ---- attend.c ---- */

/* Cut the batch into query tiles and decide how they are shared out. Called by one thread. */
void ts_plan_attention(ts_step *step);

/* From q, k and v in space.projected: rotate, write keys and values into the pool, attend; the result is in
 * space.mixed, quantized if the output projection is. Ends with a barrier of its own. */
void ts_attention(const ts_step *step, int32_t layer, ts_team team);

/* ---- validate.c ---- */

int32_t ts_validate(const ts_model *model, const ts_pool *pool, const ts_rows *rows, const ts_call *call);

#endif
