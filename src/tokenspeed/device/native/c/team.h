/* How a team of threads divides work and waits for each other; every thread calls the same function.
 *
 * Shares are for work of a known size. Claims are for the rest: a thread whose core is wanted by somebody
 * else takes fewer of them, instead of keeping the whole team waiting. Who computes what changes no bit.
 */
#ifndef TS_TEAM_H
#define TS_TEAM_H

#include <stdatomic.h>
#include <stdint.h>

enum { TS_SEATS = 64 }; /* threads whose cores are looked at */

/* What a team writes to; one a parallel region. */
typedef struct {
    _Alignas(64) _Atomic int32_t arrived; /* at the barrier */
    _Atomic int64_t claimed;              /* of the work between two barriers */
    _Atomic int32_t cores[TS_SEATS];      /* where each thread came to its last barrier, plus 1 */
    _Alignas(64) _Atomic uint32_t round;  /* barriers passed */
    _Atomic int32_t asleep;
} ts_meeting;

typedef struct {
    int32_t id, size;
    ts_meeting *meeting;
} ts_team;

typedef struct {
    int64_t first, last; /* first .. last - 1 */
} ts_share;

static inline ts_share ts_share_of(int64_t total, ts_team team) {
    return (ts_share){total * team.id / team.size, total * (team.id + 1) / team.size};
}

/* Items to take at once: few enough that nobody waits long for the last, many enough that they follow each other. */
static inline int64_t ts_run_of(int64_t total, ts_team team) {
    enum { RUNS = 3 };
    int64_t run = team.size == 1 ? total : total / (team.size * RUNS);
    return run < 1 ? 1 : run;
}

/* The next `run` of `total` items that nobody has, empty when all are taken. Between two barriers all claims
 * must be of the same work. */
static inline ts_share ts_claim(int64_t total, int64_t run, ts_team team) {
    int64_t first = atomic_fetch_add_explicit(&team.meeting->claimed, run, memory_order_relaxed);
    if (first > total) first = total;
    return (ts_share){first, first + run < total ? first + run : total};
}

/* Wait until all threads of the team are here. */
void ts_meet(ts_team team);

/* How many threads a region of the calling thread may have: those asked for, or 1 in a thread that a fork has copied.
 * Its team is still in the parent; OpenMP does not know, and would wait for it for ever. Threads that were
 * started after the fork have teams of their own. */
int32_t ts_threads_for(int32_t asked);

#endif
