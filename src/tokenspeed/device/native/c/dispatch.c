/* Which instruction set computes: the best that this machine has and that agrees with plain C. */
#include "kernels.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const ts_kernels *const candidates[] = {
#if defined(__x86_64__)
    &ts_kernels_avx512vnni, &ts_kernels_avx512, &ts_kernels_avx2,
#endif
    &ts_kernels_portable,
};
enum { CANDIDATES = sizeof candidates / sizeof *candidates };

static const ts_kernels *current = &ts_kernels_portable;

const ts_kernels *ts_current_kernels(void) { return current; }

static int machine_has(const ts_kernels *kernels) {
    if (kernels == &ts_kernels_portable) return 1;
#if defined(__x86_64__)
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
    if (kernels == &ts_kernels_avx2) return 1; /* F16C is older than AVX2: every processor with this has that */
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl")) return 0;
    return kernels == &ts_kernels_avx512 || __builtin_cpu_supports("avx512vnni");
#else
    return 0;
#endif
}

enum { ROWS = 13, IN = 64, OUT = 16 }; /* more rows than any tile has, two groups, one panel */

typedef struct {
    float norm[IN], silu[IN], gelu[IN], product[2][ROWS * OUT];
} sample;

/* A little of everything that an instruction set computes. */
static void take_sample(const ts_kernels *kernels, sample *result) {
    static _Alignas(64) float float_panel[IN * OUT];
    static _Alignas(64) ts_q4m quant_panel[IN / TS_GROUP];
    static float x[ROWS * IN];
    static int16_t q[ROWS * IN];
    static ts_group groups[ROWS * IN / TS_GROUP];
    uint32_t noise = 1;
    for (int i = 0; i < ROWS * IN; i++) {
        noise = noise * 1664525u + 1013904223u;
        x[i] = (float)(noise >> 8) * 0x1p-23f - 1.0f;
        if (i < IN * OUT) float_panel[i] = x[i];
    }
    for (int g = 0; g < IN / TS_GROUP; g++) {
        for (int o = 0; o < 16; o++) {
            quant_panel[g].scale[o] = (uint16_t)(0x2c00 + 16 * o);
            quant_panel[g].min[o] = (uint16_t)(0xb000 + 16 * o);
        }
        for (size_t i = 0; i < sizeof quant_panel[g].q / 2; i++) {
            noise = noise * 1664525u + 1013904223u;
            (&quant_panel[g].q[0][0][0])[i] = (uint16_t)(noise >> 16);
        }
    }
    const ts_linear weights[2] = {{TS_F32, OUT, IN, 0, float_panel, NULL}, {TS_Q4M, OUT, IN, 0, quant_panel, NULL}};
    const ts_input in = {x, IN, q, IN, groups, IN / TS_GROUP};
    for (int r = 0; r < ROWS; r++) kernels->quantize(x + r * IN, IN, q + r * IN, groups + r * (IN / TS_GROUP));
    for (int w = 0; w < 2; w++) kernels->project(&weights[w], &in, 0, ROWS, 0, 1, result->product[w], OUT, 0);
    kernels->norm(x, x + IN, IN, 1e-5f, result->norm);
    kernels->silu_mul(x, x + IN, IN, result->silu);
    kernels->gelu_mul(x, x + IN, IN, result->gelu);
}

/* Not bit by bit: plain C may have no fused multiply-add. */
static int agrees(const ts_kernels *kernels) {
    static sample expected, result;
    take_sample(&ts_kernels_portable, &expected);
    take_sample(kernels, &result);
    const float *a = (const float *)&expected, *b = (const float *)&result;
    for (size_t i = 0; i < sizeof expected / sizeof(float); i++) {
        if (!(fabsf(a[i] - b[i]) <= 1e-4f)) return 0;
    }
    return 1;
}

int32_t ts_use_instruction_set(const char *name) {
    for (int i = 0; i < CANDIDATES; i++) {
        if (strcmp(candidates[i]->name, name) == 0 && machine_has(candidates[i]) && agrees(candidates[i])) {
            current = candidates[i];
            return 1;
        }
    }
    return 0;
}

const char *ts_instruction_set(void) { return current->name; }

const char *ts_instruction_sets(void) {
    static char names[64];
    names[0] = 0;
    for (int i = 0; i < CANDIDATES; i++) {
        if (machine_has(candidates[i]) && agrees(candidates[i])) {
            size_t used = strlen(names);
            snprintf(names + used, sizeof names - used, "%s%s", used ? "," : "", candidates[i]->name);
        }
    }
    return names;
}

__attribute__((constructor)) static void choose(void) {
    for (int i = 0; i < CANDIDATES; i++) {
        if (machine_has(candidates[i]) && agrees(candidates[i])) {
            current = candidates[i];
            return;
        }
    }
}
