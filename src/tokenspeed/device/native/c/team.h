/* How a team of threads divides work: every thread calls the same function and takes its share. */
#ifndef TS_TEAM_H
#define TS_TEAM_H

#include <stdint.h>

typedef struct {
    int32_t id, size;
} ts_team;

typedef struct {
    int64_t first, last; /* first .. last - 1 */
} ts_share;

static inline ts_share ts_share_of(int64_t total, ts_team team) {
    return (ts_share){total * team.id / team.size, total * (team.id + 1) / team.size};
}

#endif
