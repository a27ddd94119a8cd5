/* The forward of a decoder of the Llama or Gemma 3 family on CPU: one call computes a range of layers for a ragged batch.
 *
 * Promise: the bits of a token's result depend on the model, the token's sequence up to it, and on
 * nothing else: not on other rows, chunk sizes, threads or where pages are. Every sum has one order,
 * which is a function of the output element alone:
 *   - a projection adds its terms k = 0, 1, 2, ... by fused multiply-add into one accumulator
 *     (quantized weights: group after group, within a group exact integers);
 *   - a score does the same over the head's dimensions, a weighted sum of values over positions;
 *   - softmax runs over stretches of ATTENTION_STRETCH positions counted from the sequence's start,
 *     which are merged from first to last; what lies behind a window is no part of any of these sums;
 *   - sums of one vector (norms, softmax) use 16 lanes, lane = index mod 16, then a fixed tree.
 * So instruction sets with fused multiply-add agree with each other bit by bit, too.
 *
 * Never build this with -ffast-math: it breaks NaN and sets flush-to-zero for the whole process.
 * The structures are mirrored in structs.py; ts_layout() lets it check that.
 */
#ifndef TS_NATIVE_H
#define TS_NATIVE_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define TS_API __attribute__((visibility("default")))
#else
#define TS_API
#endif

/* A weight matrix is cut into panels of 16 outputs, the last one padded with zeros. */
enum { TS_PANEL = 16 };

/* How the weights of a panel are stored; `in` is the number of inputs, a group is 32 of them. */
typedef enum {
    TS_F32 = 0,  /* float    [in][16] */
    TS_F16 = 1,  /* binary16 [in][16] */
    TS_BF16 = 2, /* bfloat16 [in][16] */
    TS_Q8 = 3,   /* ts_q8    [in / 32]: scale * q */
    TS_Q4M = 4,  /* ts_q4m   [in / 32]: scale * q + min */
    TS_Q8M = 5,  /* ts_q8m   [in / 32]: scale * q + min */
    TS_Q8K = 6,  /* ts_q8k   [in / 32]: scale * q + min, float32 scales, two a group */
    TS_Q4K = 7,  /* ts_q4k   [in / 32]: scale * q + min, float32 scales */
    TS_FORMATS = 8
} ts_format;

/* A group of 32 inputs for 16 outputs. In q8, q[p][o][i] is the weight of input 2p + i for output o. */
typedef struct {
    uint16_t scale[16]; /* binary16 */
    int8_t q[16][16][2];
} ts_q8;

/* Nibble j of the 16-bit number q[b][o][i] is the weight (0..15) of input 8b + 2j + i for output o. */
typedef struct {
    uint16_t scale[16]; /* binary16, as is min */
    uint16_t min[16];
    uint16_t q[4][16][2];
} ts_q4m;

typedef struct {
    uint16_t scale[16];
    uint16_t min[16];
    int8_t q[16][16][2];
} ts_q8m;

/* scale[h] is of inputs 16h to 16h + 15 of the group. */
typedef struct {
    float scale[2][16];
    float min[2][16];
    int8_t q[16][16][2];
} ts_q8k;

typedef struct {
    float scale[16];
    float min[16];
    uint16_t q[4][16][2];
} ts_q4k;

/* y = x @ W^T + bias */
typedef struct {
    int32_t format; /* ts_format */
    int32_t out;
    int32_t in;
    int32_t unused;
    const void *panels; /* 64-byte aligned */
    const float *bias;  /* [out] or NULL */
} ts_linear;

/* Of the feed-forward's gate. */
typedef enum {
    TS_SILU = 0,
    TS_GELU_TANH = 1, /* GELU by its tanh formula */
    TS_ACTIVATIONS = 2
} ts_activation;

typedef struct {
    const float *attn_norm; /* [hidden], as are the next three */
    const float *mlp_norm;
    const float *attn_post_norm; /* or NULL: what attention adds is added as it is */
    const float *mlp_post_norm;  /* likewise of the feed-forward */
    const float *qk_norm;        /* [heads + kv_heads][head_dim] or NULL */
    int32_t cache;               /* number of the ts_cache with the layer's keys and values */
    int32_t index;               /* number of the layer in it */
    int32_t rope;                /* number of the ts_rope */
    int32_t activation;          /* ts_activation */
    ts_linear q, k, v, o, gate, up, down;
} ts_layer;

/* Rotary positions. */
typedef struct {
    const float *frequencies; /* [head_dim / 2], radians a position; pair i is dimensions 2i, 2i + 1 */
    float magnitude;
    int32_t unused;
} ts_rope;

typedef struct {
    int32_t num_layers, hidden, heads, kv_heads, head_dim, intermediate, vocab, num_ropes;
    float rms_eps;
    float embedding_scale; /* embeddings are multiplied by it */
    float query_scale;     /* scores are multiplied by it */
    int32_t unused;
    const ts_rope *ropes;
    const float *norm; /* [hidden] */
    ts_linear embedding;           /* [vocab] rows of hidden */
    ts_linear head;
    const ts_layer *layers;
} ts_model;

/* The pages of one cache group, each [layers][2][kv_heads]. A run of keys is [head_dim][page_tokens], so
 * that 16 positions are one vector; a run of values is [page_tokens][head_dim]. */
typedef struct {
    void *pages;
    int64_t page_bytes; /* from one page to the next */
    int32_t num_pages;
    int32_t page_tokens;
    int32_t layers;
    int32_t window; /* tokens a query sees, itself included; 0: all before it */
} ts_cache;

typedef struct {
    const ts_cache *caches;
    int32_t num_caches;
    int32_t format; /* TS_F32 or TS_F16 */
} ts_pool;

/* Block tables of one cache group. */
typedef struct {
    const int32_t *blocks; /* [rows][max_blocks]; entries wholly behind a row's window are not looked at */
    int64_t max_blocks;
} ts_table;

/* See device/step.py, RaggedRows. */
typedef struct {
    int64_t tokens, rows, wanted;
    const int64_t *token_ids;     /* [tokens] */
    const int64_t *positions;     /* [tokens] */
    const int64_t *offsets;       /* [rows + 1] */
    const int64_t *contexts;      /* [rows] */
    const ts_table *tables;       /* one a cache group */
    const int64_t *logit_tokens;  /* [wanted] */
} ts_rows;

typedef struct {
    int32_t first, last;         /* layers first .. last - 1 */
    int32_t threads;
    int32_t unused;
    const int32_t *layers_ready; /* NULL: all are; else an atomic number of layers whose KV has arrived */
    float *hidden;               /* [tokens][hidden]; read unless first is 0, written always */
    float *logits;               /* [wanted][vocab]; written if last is num_layers */
    void *workspace;             /* 64-byte aligned */
    int64_t workspace_bytes;     /* at least ts_workspace_bytes(...) */
} ts_call;

typedef enum {
    TS_OK = 0,
    TS_BAD_LAYERS = 1,    /* first and last are not a range of the model's layers */
    TS_BAD_ROWS = 2,      /* offsets, contexts and positions contradict each other, or are empty */
    TS_BAD_TOKEN = 3,     /* a token id outside the vocabulary */
    TS_BAD_PAGE = 4,      /* a block table that is too short or names a page outside the pool */
    TS_BAD_LOGITS = 5,    /* a logit token that is not one of the batch's */
    TS_BAD_WORKSPACE = 6, /* too small or not aligned, or for no thread */
    TS_BAD_FORMAT = 7     /* a pool, weight format or kind of layer unknown here */
} ts_status;

/* Scratch for `tokens` tokens, whose longest context is `context`, by `threads` threads. */
TS_API int64_t ts_workspace_bytes(const ts_model *model, int64_t tokens, int64_t context, int32_t threads);

/* One step. Call it from one thread of the process only; `threads` is the size of its OpenMP team. */
TS_API int32_t ts_run(const ts_model *model, const ts_pool *pool, const ts_rows *rows, const ts_call *call);

/* A row to draw a token from. See device/sampling/draw.py. */
typedef struct {
    const float *logits; /* [vocab], the largest finite; only read */
    int64_t top_k;       /* 0: all */
    double number;       /* in [0, 1) */
    double top_p;        /* in (0, 1] */
    float temperature;   /* above 0 */
    float min_p;
    int64_t token;       /* the result */
} ts_draw;

TS_API int64_t ts_draw_workspace_bytes(int64_t vocab, int32_t threads);

/* Rows are shared out among at most `threads` threads. */
TS_API void ts_draw_tokens(ts_draw *draws, int64_t count, int64_t vocab, void *workspace, int32_t threads);

/* Raise an atomic counter of ready layers and wake a ts_run that waits for it. Any thread. */
TS_API void ts_raise_layers(int32_t *layers_ready, int32_t count);

/* Instruction sets built in, best first, as "avx512vnni,avx512,avx2,portable"; those this machine lacks left out. */
TS_API const char *ts_instruction_sets(void);

/* Use one of them from now on; 0 if there is no such. The library starts with the best that passes its check. */
TS_API int32_t ts_use_instruction_set(const char *name);
TS_API const char *ts_instruction_set(void);

/* ---- weights: from row-major matrices to panels ---------------------------------------------- */

TS_API int64_t ts_panel_bytes(int32_t format, int64_t out, int64_t in);

/* float32 [out][in] to TS_F32, TS_F16 or TS_BF16 panels (rounded to nearest even) or to TS_Q8M (256 levels
 * from the least to the greatest weight of a group). */
TS_API void ts_pack_floats(int32_t format, const float *weight, int64_t out, int64_t in, void *panels);

/* int8 [out][in] and float32 [out][groups] scales and mins (NULL: 0) to quantized panels. TS_Q8K has
 * in / 16 groups a row, the others in / 32; scales that do not fit binary16 exactly need a K format. */
TS_API void ts_pack_quants(int32_t format, const int8_t *q, const float *scale, const float *min, int64_t out,
                           int64_t in, void *panels);

/* The same from GGUF blocks as a file has them, [out][in / 32]: 2 = Q4_0, 3 = Q4_1, 8 = Q8_0 (ggml's numbers). */
TS_API void ts_pack_blocks(int32_t ggml_type, const uint8_t *blocks, int64_t out, int64_t in, void *panels);

/* The weights of one matrix in panels as panels of a format that ts_pack_floats takes. */
TS_API void ts_repack(const ts_linear *from, int32_t format, void *panels);

/* One row of a matrix in panels as float32 [in]: what the forward multiplies by. */
TS_API void ts_unpack_row(const ts_linear *linear, int64_t row, float *out);

/* ---- for checks ---------------------------------------------------------------------------------- */

/* Sizes of ts_linear, ts_layer, ts_rope, ts_model, ts_cache, ts_pool, ts_table, ts_rows, ts_call. */
enum { TS_LAYOUT = 9 };
TS_API void ts_layout(int64_t sizes[TS_LAYOUT]);

/* y[rows][out] = x[rows][in] @ W^T + bias with the current instruction set, by the calling thread alone. */
TS_API void ts_project(const ts_linear *linear, const float *x, int64_t rows, float *y, void *workspace);

#endif
