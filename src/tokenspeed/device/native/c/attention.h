/* Attention over pages. Included once for each instruction set, after linear.h.
 *
 * Scores and weighted values are float tiles: keys of a page are [head_dim][positions] and values
 * [positions][head_dim], which is how panels are laid out. Scores of positions that a query does not see
 * are computed where they share a vector with visible ones, and dropped; values there are never read.
 */

#include <float.h>

TS_INLINE int64_t query_rows(const ts_queries *q) { return (int64_t)q->tokens * q->heads; }
TS_INLINE int64_t padded_dim(const ts_queries *q) { return ts_round_up(q->head_dim, TS_PANEL); }

/* Row `row` sees positions hidden() .. visible() - 1 of the stretch; neither decreases with `row`. */
TS_INLINE int64_t hidden(const ts_queries *q, int64_t stretch, int64_t row) {
    int64_t n = ts_sees_from(q, row / q->heads) - stretch * TS_ATTENTION_STRETCH;
    return n < 0 ? 0 : n > TS_ATTENTION_STRETCH ? TS_ATTENTION_STRETCH : n;
}

TS_INLINE int64_t visible(const ts_queries *q, int64_t stretch, int64_t row) {
    int64_t n = q->first + row / q->heads + 1 - stretch * TS_ATTENTION_STRETCH;
    return n < 0 ? 0 : n > TS_ATTENTION_STRETCH ? TS_ATTENTION_STRETCH : n;
}

TS_INLINE const char *page_run(const ts_queries *q, const char *runs, int64_t position) {
    return runs + q->pages[position / q->page_tokens] * q->page_bytes;
}

TS_INLINE int64_t element_bytes(const ts_queries *q) { return q->format == TS_F32 ? 4 : 2; }

/* Ask for a page's run while the one before it is computed: runs are scattered over the pool, so the
 * machine cannot guess where the next one is. */
TS_INLINE void fetch_run(const ts_queries *q, const char *runs, int64_t position, int64_t end) {
    if (position >= end) return;
    const char *run = page_run(q, runs, position);
    int64_t bytes = (int64_t)q->page_tokens * q->head_dim * element_bytes(q);
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(run + at);
}

/* scores[row][j] for positions base + j, from <= j < count; rows are TS_ATTENTION_STRETCH + TS_PANEL apart, since the
 * last vector of a page of 8 tokens runs over. */
static void score(const ts_queries *q, const float *packed, int64_t base, int64_t from, int64_t count, float *scores,
                  int64_t stride) {
    int64_t rows = query_rows(q), width = q->page_tokens < TS_PANEL ? q->page_tokens : TS_PANEL;
    for (int64_t j = from / width * width; j < count; j += width) {
        int64_t in_page = (base + j) % q->page_tokens;
        const char *keys = page_run(q, q->keys, base + j) + in_page * element_bytes(q);
        if (in_page == 0) fetch_run(q, q->keys, base + j + q->page_tokens, base + count);
        for (int64_t r = 0; r < rows; r += TS_TILE_ROWS) {
            int n = (int)(rows - r < TS_TILE_ROWS ? rows - r : TS_TILE_ROWS);
            float_tiles(q->format, n, packed + r * q->head_dim, q->head_dim, keys, q->page_tokens, q->head_dim,
                        scores + r * stride + j, stride, 0);
        }
    }
}

/* Turn the scores from `from` to n into exp(score - largest), zeros before and behind them up to whole vectors. */
static void soften(float *scores, int64_t from, int64_t n, float *largest, float *total) {
    int64_t start = from / 16 * 16, padded = ts_round_up(n, 16);
    for (int64_t j = start; j < from; j++) scores[j] = -FLT_MAX;
    for (int64_t j = n; j < padded; j++) scores[j] = -FLT_MAX;
    v16 top = v16_load(scores + start);
    for (int64_t j = start + 16; j < padded; j += 16) top = v16_max(top, v16_load(scores + j));
    *largest = v16_largest(top);
    v16 sum = v16_set1(0.0f);
    for (int64_t j = start; j < padded; j += 16) {
        v16 weight = v16_exp(v16_sub(v16_load(scores + j), v16_set1(*largest)));
        v16_store(scores + j, weight);
        if (j < from || j + 16 > n) {
            for (int64_t i = j; i < from; i++) scores[i] = 0.0f;
            for (int64_t i = n; i < padded; i++) scores[i] = 0.0f;
            weight = v16_load(scores + j);
        }
        sum = v16_add(sum, weight);
    }
    *total = v16_sum(sum);
}

/* values[r] (+)= weights[r][j] * value of position base + j, for j from `from` to `to`; `more`: starting from
 * what is in values. */
static void weigh(const ts_queries *q, int rows, const float *weights, int64_t stride, int64_t base, int64_t from,
                  int64_t to, float *values, int more) {
    for (int64_t j = from, n; j < to; j += n) {
        int64_t in_page = (base + j) % q->page_tokens, left = q->page_tokens - in_page;
        n = left < to - j ? left : to - j;
        const char *run = page_run(q, q->values, base + j) + in_page * q->head_dim * element_bytes(q);
        if (in_page == 0) fetch_run(q, q->values, base + j + q->page_tokens, base + to);
        for (int64_t d = 0; d < q->head_dim; d += TS_PANEL) {
            float_tiles(q->format, rows, weights + j, stride, run + d * element_bytes(q), q->head_dim, n, values + d,
                        padded_dim(q), more || j > from);
        }
    }
}

/* values of rows r .. r + n - 1, each over the positions it sees in ascending order: those that all see in one
 * pass, the others row by row. */
static void weigh_rows(const ts_queries *q, int64_t stretch, int64_t r, int n, const float *scores, int64_t stride,
                       float *values) {
    int64_t dim = padded_dim(q), base = stretch * TS_ATTENTION_STRETCH;
    int64_t from = hidden(q, stretch, r + n - 1), to = visible(q, stretch, r);
    int together = from < to, begun = together && hidden(q, stretch, r) < from;
    for (int64_t one = r; begun && one < r + n; one++) {
        int64_t own = hidden(q, stretch, one);
        weigh(q, 1, scores + one * stride, stride, base, own, from, values + one * dim, 0);
        if (own == from) __builtin_memset(values + one * dim, 0, (size_t)dim * sizeof(float));
    }
    if (together) weigh(q, n, scores + r * stride, stride, base, from, to, values + r * dim, begun);
    for (int64_t one = r; one < r + n; one++) {
        int64_t own = together ? to : hidden(q, stretch, one);
        weigh(q, 1, scores + one * stride, stride, base, own, visible(q, stretch, one), values + one * dim, together);
    }
}

static void attend(const ts_queries *q, int64_t stretch, float *scratch, ts_partial *partial) {
    enum { STRIDE = TS_ATTENTION_STRETCH + TS_PANEL };
    int64_t rows = query_rows(q), base = stretch * TS_ATTENTION_STRETCH;
    float *packed = scratch, *scores = scratch + rows * q->head_dim;
    for (int64_t r = 0; r < rows; r++) {
        const float *from = q->q + r / q->heads * q->q_stride + r % q->heads * q->head_dim;
        __builtin_memcpy(packed + r * q->head_dim, from, (size_t)q->head_dim * sizeof(float));
    }
    score(q, packed, base, hidden(q, stretch, 0), visible(q, stretch, rows - 1), scores, STRIDE);
    for (int64_t r = 0; r < rows; r++) {
        int64_t from = hidden(q, stretch, r), n = visible(q, stretch, r);
        if (from < n) soften(scores + r * STRIDE, from, n, partial->largest + r, partial->total + r);
    }
    for (int64_t r = 0; r < rows; r += TS_TILE_ROWS) {
        int n = (int)(rows - r < TS_TILE_ROWS ? rows - r : TS_TILE_ROWS);
        weigh_rows(q, stretch, r, n, scores, STRIDE, partial->values);
    }
}

TS_INLINE float exp_of(float x) {
    float lanes[16];
    v16_store(lanes, v16_exp(v16_set1(x)));
    return lanes[0];
}

static void merge(const ts_queries *q, int64_t stretch, const ts_partial *partial, ts_partial *sum) {
    int64_t rows = query_rows(q), dim = padded_dim(q);
    for (int64_t r = 0; r < rows; r++) {
        const float *values = partial->values + r * dim;
        float *sums = sum->values + r * dim;
        if (hidden(q, stretch, r) >= visible(q, stretch, r)) continue;
        if (stretch == ts_sees_from(q, r / q->heads) / TS_ATTENTION_STRETCH) {
            sum->largest[r] = partial->largest[r];
            sum->total[r] = partial->total[r];
            __builtin_memcpy(sums, values, (size_t)dim * sizeof(float));
            continue;
        }
        float before = sum->largest[r], here = partial->largest[r], largest = before > here ? before : here;
        float old = exp_of(before - largest), new = exp_of(here - largest);
        sum->largest[r] = largest;
        sum->total[r] = sum->total[r] * old + partial->total[r] * new;
        for (int64_t d = 0; d < dim; d += 16) {
            v16 kept = v16_mul(v16_load(sums + d), v16_set1(old));
            v16_store(sums + d, v16_fma(v16_load(values + d), v16_set1(new), kept));
        }
    }
}

static void finish(const ts_queries *q, const ts_partial *sum) {
    int64_t rows = query_rows(q), dim = padded_dim(q);
    for (int64_t r = 0; r < rows; r++) {
        float *out = q->out + r / q->heads * q->out_stride + r % q->heads * q->head_dim;
        v16 factor = v16_set1(1.0f / sum->total[r]);
        for (int64_t d = 0; d < q->head_dim; d += 16) {
            v16 value = v16_mul(v16_load(sum->values + r * dim + d), factor);
            if (q->head_dim - d >= 16) {
                v16_store(out + d, value);
            } else {
                store_part(out + d, value, q->head_dim - d);
            }
        }
    }
}
