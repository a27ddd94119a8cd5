/* Whether a step's arguments can be computed without reading or writing outside what they describe. */
#include "step.h"

#include <stdint.h>

static int format_known(const ts_linear *linear) { return linear->format >= 0 && linear->format < TS_FORMATS; }

static int layer_known(const ts_model *model, const ts_pool *pool, const ts_layer *layer) {
    if (layer->cache < 0 || layer->cache >= pool->num_caches) return 0;
    if (layer->index < 0 || layer->index >= pool->caches[layer->cache].layers) return 0;
    if (layer->rope < 0 || layer->rope >= model->num_ropes) return 0;
    if (layer->activation < 0 || layer->activation >= TS_ACTIVATIONS) return 0;
    return format_known(&layer->q) && format_known(&layer->k) && format_known(&layer->v) && format_known(&layer->o) &&
           format_known(&layer->gate) && format_known(&layer->up) && format_known(&layer->down);
}

static int32_t check_formats(const ts_model *model, const ts_pool *pool) {
    if (pool->format != TS_F32 && pool->format != TS_F16) return TS_BAD_FORMAT;
    int64_t element = pool->format == TS_F32 ? 4 : 2;
    for (int32_t c = 0; c < pool->num_caches; c++) {
        const ts_cache *cache = pool->caches + c;
        int64_t run = (int64_t)cache->page_tokens * model->head_dim * element;
        /* Pages must not straddle stretches, nor panels of positions pages. */
        if (cache->page_tokens < 1 || TS_ATTENTION_STRETCH % cache->page_tokens) return TS_BAD_FORMAT;
        if (cache->window < 0 || cache->page_bytes < (int64_t)cache->layers * 2 * model->kv_heads * run) return TS_BAD_FORMAT;
    }
    if (!format_known(&model->embedding) || !format_known(&model->head)) return TS_BAD_FORMAT;
    for (int32_t l = 0; l < model->num_layers; l++) {
        if (!layer_known(model, pool, model->layers + l)) return TS_BAD_FORMAT;
    }
    return TS_OK;
}

static int32_t check_row(const ts_model *model, const ts_pool *pool, const ts_rows *rows, int64_t row) {
    int64_t first = rows->offsets[row], last = rows->offsets[row + 1], context = rows->contexts[row];
    if (first < 0 || last <= first || last > rows->tokens || context < last - first) return TS_BAD_ROWS;
    for (int64_t token = first; token < last; token++) {
        if (rows->positions[token] != context - (last - token)) return TS_BAD_ROWS;
        if (rows->token_ids[token] < 0 || rows->token_ids[token] >= model->vocab) return TS_BAD_TOKEN;
    }
    for (int32_t c = 0; c < pool->num_caches; c++) {
        const ts_cache *cache = pool->caches + c;
        const ts_table *table = rows->tables + c;
        int64_t blocks = ts_round_up(context, cache->page_tokens) / cache->page_tokens;
        int64_t from = cache->window ? context - (last - first) + 1 - cache->window : 0;
        if (blocks > table->max_blocks) return TS_BAD_PAGE;
        for (int64_t b = from > 0 ? from / cache->page_tokens : 0; b < blocks; b++) {
            int32_t page = table->blocks[row * table->max_blocks + b];
            if (page < 0 || page >= cache->num_pages) return TS_BAD_PAGE;
        }
    }
    return TS_OK;
}

int32_t ts_validate(const ts_model *model, const ts_pool *pool, const ts_rows *rows, const ts_call *call) {
    if (call->threads < 1) return TS_BAD_WORKSPACE;
    if (call->first < 0 || call->last <= call->first || call->last > model->num_layers) return TS_BAD_LAYERS;
    int32_t status = check_formats(model, pool);
    if (status) return status;
    if (rows->rows < 1 || rows->offsets[0] != 0 || rows->offsets[rows->rows] != rows->tokens) return TS_BAD_ROWS;
    int64_t longest = 0;
    for (int64_t row = 0; row < rows->rows; row++) {
        status = check_row(model, pool, rows, row);
        if (status) return status;
        longest = rows->contexts[row] > longest ? rows->contexts[row] : longest;
    }
    for (int64_t i = 0; i < rows->wanted; i++) {
        if (rows->logit_tokens[i] < 0 || rows->logit_tokens[i] >= rows->tokens) return TS_BAD_LOGITS;
    }
    int64_t needed = ts_workspace_bytes(model, rows->tokens, longest, call->threads);
    if ((uintptr_t)call->workspace % 64 || call->workspace_bytes < needed) return TS_BAD_WORKSPACE;
    return TS_OK;
}
