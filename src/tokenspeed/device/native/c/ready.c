#if defined(__linux__)
#define _GNU_SOURCE
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "ready.h"

#include "native.h"

#include <limits.h>
#include <sched.h>

void ts_wait_layer(const int32_t *layers_ready, int32_t layer) {
    if (!layers_ready) return;
    for (;;) {
        int32_t seen = __atomic_load_n(layers_ready, __ATOMIC_ACQUIRE);
        if (seen > layer) return;
#if defined(__linux__)
        syscall(SYS_futex, layers_ready, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
#else
        sched_yield();
#endif
    }
}

void ts_raise_layers(int32_t *layers_ready, int32_t count) {
    __atomic_store_n(layers_ready, count, __ATOMIC_RELEASE);
#if defined(__linux__)
    syscall(SYS_futex, layers_ready, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
#endif
}
