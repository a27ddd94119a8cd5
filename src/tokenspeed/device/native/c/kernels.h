/* What an instruction set provides; the step is written against this table. */
#ifndef TS_KERNELS_H
#define TS_KERNELS_H

#include "native.h"

enum {
    TS_GROUP = 32,              /* inputs that share a scale */
    TS_ATTENTION_STRETCH = 128, /* positions whose softmax is computed at once; part of the order of sums */
    TS_DRAW_BLOCK = 64,         /* logits whose largest is looked at before them */
    TS_QUERY_ROWS = 24          /* queries times heads of a group that share a pass over keys and values */
};

/* A group of 32 activations is scale * q with q in -32767..32767, so close to the float32 values that
 * results are those of the weights, not of the activations' rounding. The rest serves the mins. */
typedef struct {
    float scale;
    float sum;     /* scale times the sum of q */
    float half[2]; /* the same of the first and the last 16 */
} ts_group;

/* Rows of activations, as floats and, where a projection with quantized weights reads them, quantized. */
typedef struct {
    float *x;
    int64_t x_stride; /* in elements, as are the others */
    int16_t *q;
    int64_t q_stride;
    ts_group *groups;
    int64_t group_stride;
} ts_input;

/* Queries of consecutive tokens of one row, for the heads that share one key-value head. */
typedef struct {
    const float *q; /* rotated and scaled; token t, head g at q + t * q_stride + g * head_dim */
    int64_t q_stride;
    float *out; /* likewise */
    int64_t out_stride;
    int32_t tokens, heads, head_dim;
    int64_t first; /* position of token 0 */
    const int32_t *pages;
    const char *keys; /* page 0's run of this layer and key-value head */
    const char *values;
    int64_t page_bytes; /* from a page's run to the next page's */
    int32_t page_tokens;
    int32_t format; /* TS_F32 or TS_F16 */
    int64_t window; /* positions a query sees, its own included; 0: all before it */
} ts_queries;

/* The first position that token `token` of the queries sees. */
static inline int64_t ts_sees_from(const ts_queries *q, int64_t token) {
    int64_t from = q->first + token + 1 - q->window;
    return q->window && from > 0 ? from : 0;
}

/* Softmax-weighted values of tokens * heads rows over some positions; head_dim padded to 16s. */
typedef struct {
    float *largest; /* [rows], of the scores */
    float *total;   /* [rows], of exp(score - largest) */
    float *values;  /* [rows][padded head_dim], weighted by exp(score - largest) */
} ts_partial;

typedef struct {
    const char *name;

    /* out = x / sqrt(mean(x^2) + eps) * weight */
    void (*norm)(const float *x, const float *weight, int64_t n, float eps, float *out);

    /* out = gate / (1 + exp(-gate)) * up */
    void (*silu_mul)(const float *gate, const float *up, int64_t n, float *out);

    /* out = gate / (1 + exp(-2u)) * up, u = sqrt(2 / pi) * (gate + 0.044715 gate^3): GELU's tanh formula */
    void (*gelu_mul)(const float *gate, const float *up, int64_t n, float *out);

    /* n is padded with zeros to whole groups. A group with an infinity or NaN gets a scale that passes it on. */
    void (*quantize)(const float *x, int64_t n, int16_t *q, ts_group *groups);

    /* Outputs of panels first .. last - 1 for rows row .. row + rows - 1 of `in`. `out` is of row 0;
     * add: to what is there, else in its place. */
    void (*project)(const ts_linear *w, const ts_input *in, int64_t row, int64_t rows, int64_t first, int64_t last,
                    float *out, int64_t out_stride, int add);

    /* Rotary position: pairs times (cosine, sine) of `turns`, and all times `scale`. */
    void (*rotate)(float *head, const float *turns, int64_t dim, float scale);

    /* One token's key or value of one head to its place in a page's run. */
    void (*store_key)(void *run, int32_t format, const float *key, int64_t dim, int64_t offset, int64_t page_tokens);
    void (*store_value)(void *run, int32_t format, const float *value, int64_t dim, int64_t offset);

    /* Queries over positions [stretch * TS_ATTENTION_STRETCH, + TS_ATTENTION_STRETCH), as far as each may see.
     * scratch: ts_attention_scratch() floats. Rows that see none of it are left as they are. */
    void (*attend)(const ts_queries *q, int64_t stretch, float *scratch, ts_partial *partial);

    /* Take the result of `stretch` into `sum`, which holds those before it. */
    void (*merge)(const ts_queries *q, int64_t stretch, const ts_partial *partial, ts_partial *sum);

    void (*finish)(const ts_queries *q, const ts_partial *sum);

    /* The largest of each TS_DRAW_BLOCK of x. */
    void (*block_largest)(const float *x, int64_t n, float *out);

    /* out = exp((x - largest) / temperature); what is below 1e-37 is 0. out may be x. */
    void (*chances)(const float *x, int64_t n, float largest, float temperature, float *out);
} ts_kernels;

extern const ts_kernels ts_kernels_portable;
#if defined(__x86_64__)
extern const ts_kernels ts_kernels_avx2, ts_kernels_avx512, ts_kernels_avx512vnni;
#endif

const ts_kernels *ts_current_kernels(void);

static inline int64_t ts_round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
static inline int64_t ts_panels(int64_t out) { return ts_round_up(out, TS_PANEL) / TS_PANEL; }
static inline int64_t ts_groups(int64_t in) { return ts_round_up(in, TS_GROUP) / TS_GROUP; }
static inline int ts_is_quantized(int32_t format) { return format >= TS_Q8; }

/* Rows of a ts_queries at most. */
static inline int64_t ts_query_rows(int64_t heads) { return heads > TS_QUERY_ROWS ? heads : TS_QUERY_ROWS; }

static inline int64_t ts_attention_scratch(int64_t heads, int64_t head_dim) {
    return ts_query_rows(heads) * (ts_round_up(head_dim, TS_PANEL) + TS_ATTENTION_STRETCH + TS_PANEL);
}

static inline int64_t ts_partial_floats(int64_t heads, int64_t head_dim) {
    return ts_round_up(ts_query_rows(heads) * (ts_round_up(head_dim, TS_PANEL) + 2), TS_PANEL);
}

#endif
