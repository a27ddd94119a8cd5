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

/* Scratch of a step with T tokens; carved out of one piece of memory. */
typedef struct {
    float *normed;    /* [T][wide]: what a projection reads */
    float *projected; /* [T][projected_wide]: q, k, v, or gate and up */
    float *turns;     /* [T][head_dim / 2][2]: cosine and sine */
    int16_t *q;       /* [T][q_stride]: `normed` quantized */
    ts_group *groups; /* [T][group_stride] */
    ts_query_tile *tiles;
    float *attention; /* [threads][attention_floats] */
    float *partials;  /* [partial_slots][partial_floats]: stretches computed apart */
    int64_t wide, projected_wide, q_stride, group_stride;
    int64_t attention_floats, partial_floats, partial_slots;
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
} ts_step;

ts_space ts_lay_out(const ts_model *model, int64_t tokens, int64_t context, int32_t threads, void *memory);

/* space.normed as a projection's input. */
static inline ts_input ts_normed(const ts_step *step) {
    const ts_space *s = &step->space;
    return (ts_input){s->normed, s->wide, s->q, s->q_stride, s->groups, s->group_stride};
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

/* ---- attend.c ---- */

/* Cut the batch into query tiles and decide how they are shared out. Called by one thread. */
void ts_plan_attention(ts_step *step);

/* Rotate queries and keys, scale queries, write keys and values of the batch into the pool. */
void ts_write_kv(const ts_step *step, int32_t layer, ts_team team);

/* Attention of all tokens, from space.projected to space.normed. Ends with a barrier of its own. */
void ts_attention(const ts_step *step, int32_t layer, ts_team team);

/* ---- validate.c ---- */

int32_t ts_validate(const ts_model *model, const ts_pool *pool, const ts_rows *rows, const ts_call *call);

#endif
