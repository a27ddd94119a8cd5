/* Draw tokens from rows of logits cut by top-k, min-p and top-p, without sorting a vocabulary.
 *
 * A cut is a threshold. The k-th largest logit is at least the k-th largest of the blocks' largest ones,
 * so only what reaches that is looked at. Top-p takes ever smaller weights until they have the mass, and
 * selects among those. The number drawn is looked up in the order of token ids. One thread does all of a row, in
 * one order: a token depends on its row alone.
 */
#include "kernels.h"
#include "team.h"

#include <math.h>
#include <string.h>

/* Scratch of one thread: weights and candidates of a row, their ids, and the blocks' largest logits. */
typedef struct {
    float *weights, *some, *blocks;
    int32_t *ids;
} scratch;

static int64_t floats_of(int64_t vocab) { return ts_round_up(vocab, 16); }
static int64_t blocks_of(int64_t vocab) { return ts_round_up(vocab, TS_DRAW_BLOCK) / TS_DRAW_BLOCK; }

static int64_t scratch_floats(int64_t vocab) { return 3 * floats_of(vocab) + ts_round_up(blocks_of(vocab), 16); }

int64_t ts_draw_workspace_bytes(int64_t vocab, int32_t threads) {
    return threads * scratch_floats(vocab) * (int64_t)sizeof(float);
}

static scratch scratch_of(void *workspace, int64_t vocab, int32_t thread) {
    float *base = (float *)workspace + thread * scratch_floats(vocab);
    int64_t row = floats_of(vocab);
    return (scratch){base, base + row, base + 3 * row, (int32_t *)(base + 2 * row)};
}

/* The k-th largest of x (k from 1), whose order is lost. Source: Hoare 1961, algorithm 65 (FIND). */
static float kth_largest(float *x, int64_t n, int64_t k) {
    int64_t low = 0, high = n - 1, want = k - 1;
    while (low < high) {
        float pivot = x[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (x[i] > pivot) i++;
            while (x[j] < pivot) j--;
            if (i <= j) {
                float other = x[i];
                x[i++] = x[j];
                x[j--] = other;
            }
        }
        if (want <= j) high = j;
        else if (want >= i) low = i;
        else break;
    }
    return x[want];
}

/* The logits of the k likeliest tokens, and of those as likely as the last; returns how many. */
static int64_t likeliest(const float *logits, int64_t vocab, int64_t k, scratch s) {
    int64_t blocks = blocks_of(vocab), count = 0;
    float bound = -INFINITY;
    if (k <= blocks) {
        memcpy(s.some, s.blocks, (size_t)blocks * sizeof(float));
        bound = kth_largest(s.some, blocks, k);
    }
    for (int64_t b = 0; b < blocks; b++) {
        if (s.blocks[b] < bound) continue;
        int64_t last = (b + 1) * TS_DRAW_BLOCK < vocab ? (b + 1) * TS_DRAW_BLOCK : vocab;
        for (int64_t i = b * TS_DRAW_BLOCK; i < last; i++) {
            if (logits[i] < bound) continue;
            s.ids[count] = (int32_t)i;
            s.weights[count++] = logits[i];
        }
    }
    memcpy(s.some, s.weights, (size_t)count * sizeof(float));
    float least = kth_largest(s.some, count, k);
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++) {
        if (s.weights[i] < least) continue;
        s.ids[kept] = s.ids[i];
        s.weights[kept++] = s.weights[i];
    }
    return kept;
}

/* The largest t such that the values of x from t on sum up to `needed` at least; the least of x if all do not.
 * The order of x is lost. It is FIND with sums in place of counts. */
static float threshold_of_mass(float *x, int64_t n, double needed) {
    int64_t low = 0, high = n - 1;
    double above = 0.0; /* sum of what is left of low, all of it larger */
    while (low < high) {
        float pivot = x[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (x[i] > pivot) i++;
            while (x[j] < pivot) j--;
            if (i <= j) {
                float other = x[i];
                x[i++] = x[j];
                x[j--] = other;
            }
        }
        double left = 0.0, middle = 0.0; /* low .. j are not below the pivot, j + 1 .. i - 1 are equal to it */
        for (int64_t at = low; at <= j; at++) left += x[at];
        for (int64_t at = j + 1; at < i; at++) middle += x[at];
        if (above + left >= needed) high = j;
        else if (above + left + middle >= needed || i > high) return pivot;
        else {
            above += left + middle;
            low = i;
        }
    }
    return x[low];
}

/* The smallest weight of the smallest set of largest weights whose sum reaches `share` of all. */
static float least_of_mass(const float *weights, int64_t n, double share, float *some) {
    double total = 0.0;
    for (int64_t i = 0; i < n; i++) total += weights[i];
    double needed = share * total;
    for (float least = 0.0625f;; least *= 0.0625f) {
        if (least < 1e-37f) least = 0.0f;
        double mass = 0.0;
        int64_t count = 0;
        for (int64_t i = 0; i < n; i++) {
            if (weights[i] < least) continue;
            mass += weights[i];
            some[count++] = weights[i];
        }
        if (mass >= needed || least == 0.0f) return threshold_of_mass(some, count, needed);
    }
}

static void cut(float *weights, int64_t n, float least) {
    for (int64_t i = 0; i < n; i++) weights[i] = weights[i] < least ? 0.0f : weights[i];
}

/* The first index at which the running sum exceeds the number's share; never one of weight 0. */
static int64_t find(const float *weights, int64_t n, double number) {
    double total = 0.0, sum = 0.0;
    int64_t last = 0;
    for (int64_t i = 0; i < n; i++) total += weights[i];
    double share = number * total;
    for (int64_t i = 0; i < n; i++) {
        if (weights[i] == 0.0f) continue;
        sum += weights[i];
        last = i;
        if (sum > share) break;
    }
    return last;
}

static int64_t draw(const ts_draw *d, int64_t vocab, scratch s) {
    const ts_kernels *kernels = ts_current_kernels();
    kernels->block_largest(d->logits, vocab, s.blocks);
    float largest = -INFINITY;
    for (int64_t b = 0; b < blocks_of(vocab); b++) largest = s.blocks[b] > largest ? s.blocks[b] : largest;
    int some = d->top_k > 0 && d->top_k < vocab;
    int64_t count = some ? likeliest(d->logits, vocab, d->top_k, s) : vocab;
    kernels->chances(some ? s.weights : d->logits, count, largest, d->temperature, s.weights);
    if (d->min_p > 0.0f) cut(s.weights, count, d->min_p);
    if (d->top_p < 1.0) cut(s.weights, count, least_of_mass(s.weights, count, d->top_p, s.some));
    int64_t index = find(s.weights, count, d->number);
    return some ? s.ids[index] : index;
}

/* Rows first, first + step, ... */
static void draw_every(ts_draw *draws, int64_t first, int64_t step, int64_t count, int64_t vocab, scratch s) {
    for (int64_t row = first; row < count; row += step) draws[row].token = draw(draws + row, vocab, s);
}

void ts_draw_tokens(ts_draw *draws, int64_t count, int64_t vocab, void *workspace, int32_t threads) {
    int32_t team = ts_threads_for(count < threads ? (int32_t)count : threads);
    if (team == 1) {
        draw_every(draws, 0, 1, count, vocab, scratch_of(workspace, vocab, 0));
        return;
    }
#pragma omp parallel for num_threads(team) schedule(static, 1)
    for (int32_t thread = 0; thread < team; thread++) {
        draw_every(draws, thread, team, count, vocab, scratch_of(workspace, vocab, thread));
    }
}
