/* The barrier of a team.
 *
 * A step has about a hundred of them, so one that sleeps at once costs as much as the step, and one that
 * spins takes the core from who is to arrive. This one spins for a little longer than two
 * threads usually differ, then sleeps. (Yielding in between is no help: beside other work, the kernel takes
 * it for leave to run that for a whole slice.) OpenMP's own leaves the choice to an environment variable.
 *
 * On a busy machine the kernel may wake two threads of a team on one core and leave them there for long:
 * whoever waits for a thread of its own core goes to another one. Nothing stays bound.
 */
#if defined(__linux__)
#define _GNU_SOURCE
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "team.h"

#include <limits.h>
#include <pthread.h>
#include <sched.h>

enum { SPINS = 1000 }; /* some 40 us */

#if defined(__linux__)
/* Whether another thread came to its last barrier on the core that this one is on. */
static int shares_core(const ts_team team, int core) {
    for (int id = 0; id < team.size && id < TS_SEATS; id++) {
        if (id != team.id && atomic_load_explicit(team.meeting->cores + id, memory_order_relaxed) == core + 1) return 1;
    }
    return 0;
}

/* To a core where no thread of the team was last, if there is one. On a machine with more cores than the set holds,
 * nobody moves. */
static void move_away(const ts_team team) {
    cpu_set_t allowed, free, now;
    if (sched_getaffinity(0, sizeof allowed, &allowed)) return;
    free = allowed;
    for (int id = 0; id < team.size && id < TS_SEATS; id++) {
        int core = atomic_load_explicit(team.meeting->cores + id, memory_order_relaxed) - 1;
        if (core >= 0) CPU_CLR(core, &free);
    }
    if (CPU_COUNT(&free) == 0 || sched_setaffinity(0, sizeof free, &free)) return;
    /* What somebody else has said meanwhile stays. */
    if (sched_getaffinity(0, sizeof now, &now) || !CPU_EQUAL(&now, &free)) return;
    sched_setaffinity(0, sizeof allowed, &allowed);
}
#endif

/* Called by who has waited for longer than usual. */
static void look_for_a_core(const ts_team team) {
#if defined(__linux__)
    int core = sched_getcpu();
    if (core >= 0 && shares_core(team, core)) move_away(team);
#else
    (void)team;
#endif
}

static void take_seat(const ts_team team) {
#if defined(__linux__)
    if (team.id < TS_SEATS) {
        atomic_store_explicit(team.meeting->cores + team.id, sched_getcpu() + 1, memory_order_relaxed);
    }
#else
    (void)team;
#endif
}

static void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Until the round is another than `seen`; may return before. */
static void sleep_through(ts_meeting *meeting, uint32_t seen) {
#if defined(__linux__)
    /* In this order: whoever ends the round either sees a sleeper, or has ended it before the kernel looks. */
    atomic_fetch_add(&meeting->asleep, 1);
    syscall(SYS_futex, &meeting->round, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    atomic_fetch_sub(&meeting->asleep, 1);
#else
    (void)meeting, (void)seen;
    sched_yield();
#endif
}

static void end_round(ts_meeting *meeting) {
    atomic_store_explicit(&meeting->arrived, 0, memory_order_relaxed);
    atomic_store_explicit(&meeting->claimed, 0, memory_order_relaxed);
    atomic_fetch_add(&meeting->round, 1);
#if defined(__linux__)
    if (atomic_load(&meeting->asleep)) syscall(SYS_futex, &meeting->round, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
#endif
}

void ts_meet(ts_team team) {
    ts_meeting *meeting = team.meeting;
    uint32_t seen = atomic_load_explicit(&meeting->round, memory_order_relaxed);
    take_seat(team);
    if (atomic_fetch_add_explicit(&meeting->arrived, 1, memory_order_acq_rel) + 1 == team.size) {
        end_round(meeting);
        return;
    }
    for (int tries = 0; atomic_load_explicit(&meeting->round, memory_order_acquire) == seen; tries++) {
        if (tries == SPINS) look_for_a_core(team);
        if (tries < SPINS) pause_briefly();
        else sleep_through(meeting, seen);
    }
}

static _Thread_local int copied;

static void note_fork(void) { copied = 1; }

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, note_fork); }

int32_t ts_threads_for(int32_t asked) { return copied ? 1 : asked; }
