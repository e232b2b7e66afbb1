/* Loops over independent units, shared by the threads of one team (team.c). */
#ifndef QUANTFLOW_TEAM_H
#define QUANTFLOW_TEAM_H
#include <stdint.h>

/* Does unit `unit` of a loop; `context` is what the caller of `team_share` passed. */
typedef void (*Unit)(const void *context, int64_t unit);

/* Call `work(context, unit)` once for each unit from 0 to `units` - 1, in any order, on as many
 * threads as OpenMP has for the caller (torch.set_num_threads); return when all are done. `piece`
 * neighbouring units are taken at once. A caller that finds the team at work for another, or that
 * calls from within a unit, does all units itself. */
void team_share(Unit work, const void *context, int64_t units, int64_t piece);

#endif
