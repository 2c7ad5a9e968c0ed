/* Teams for the threads of the process that run models at the same time.
 *
 * A run takes a team and gives it back, so that helpers are as many as runs at once need, whichever
 * threads those are on. All teams together have no more helpers than the machine has cores to spare, or
 * one run asks for: a run that finds none left is faster alone than beside more threads than cores.
 *
 * A pool belongs to one library. Helpers of another module's sleep a moment after its run. */
#define _GNU_SOURCE
#include <pthread.h>
#include <unistd.h>

#include "apq_threads.h"

enum { TEAMS = 64, TAKES_BETWEEN_TRIES = 1000 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static apq_team *idle[TEAMS]; /* the last was given back last */
static int32_t idle_teams = 0, helpers = 0, idle_helpers = 0;
static int32_t cores = 1;
static int32_t most = APQ_MAX_THREADS; /* threads that could be started at the last attempt */
static int32_t takes_to_try = 0;
static pid_t owner = 0;

/* A fork copies no helpers: the child forgets its parent's, and starts its own when it runs. The lock
 * may be another thread's, which the child does not have. */
static void forget(void) {
  static const pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
  lock = fresh;
  idle_teams = helpers = idle_helpers = takes_to_try = 0;
  most = APQ_MAX_THREADS;
  owner = getpid();
}

int apq_pool_open(void) {
  cores = apq_default_threads();
  owner = getpid();
  return pthread_atfork(NULL, NULL, forget) == 0;
}

int32_t apq_pool_usable(int32_t threads) {
  pthread_mutex_lock(&lock);
  int32_t usable = threads < most ? threads : most;
  pthread_mutex_unlock(&lock);
  return usable;
}

/* ---- under the lock ---- */

static apq_team *remove_idle(int32_t index) {
  apq_team *team = idle[index];
  idle_teams--;
  for (int32_t i = index; i < idle_teams; i++) idle[i] = idle[i + 1];
  idle_helpers -= apq_team_helpers(team);
  return team;
}

static void end_idle(int32_t index) {
  apq_team *team = remove_idle(index);
  helpers -= apq_team_helpers(team);
  apq_team_close(team);
}

/* The idle team with most helpers, but not more than `wanted`; -1 if there is none. */
static int32_t find_idle(int32_t wanted) {
  int32_t best = -1;
  for (int32_t i = 0; i < idle_teams; i++) {
    int32_t has = apq_team_helpers(idle[i]);
    if (has <= wanted && (best < 0 || has >= apq_team_helpers(idle[best]))) best = i;
  }
  return best;
}

static apq_team *start(int32_t wanted) {
  apq_team *team = apq_team_open(wanted);
  int32_t started = team == NULL ? 0 : apq_team_helpers(team);
  helpers += started;
  most = started < wanted ? started + 1 : APQ_MAX_THREADS;
  takes_to_try = started < wanted ? TAKES_BETWEEN_TRIES : 0;
  return team;
}

static apq_team *take(int32_t wanted) {
  int32_t best = find_idle(wanted);
  if (best >= 0 && apq_team_helpers(idle[best]) == wanted) return remove_idle(best);
  if (takes_to_try > 0) { /* a limit was met: no more threads for a while */
    takes_to_try--;
    return best < 0 ? NULL : remove_idle(best);
  }
  int32_t room = cores - 1 > wanted ? cores - 1 : wanted;
  /* Other sizes than are wanted now go; beside another run, though, sizes take turns. */
  while (helpers == idle_helpers && idle_teams > 0 && helpers + wanted > room) end_idle(0);
  if (helpers + wanted <= room) return start(wanted);
  best = find_idle(wanted);
  if (best >= 0) return remove_idle(best);
  return helpers < room ? start(room - helpers) : NULL;
}

/* ---- of a run ---- */

apq_team *apq_pool_take(int32_t threads) {
  if (threads <= 1) return NULL;
  pthread_mutex_lock(&lock);
  apq_team *team = take(threads - 1);
  pthread_mutex_unlock(&lock);
  return team;
}

void apq_pool_give(apq_team *team) {
  if (team == NULL) return;
  apq_team_end(team);
  pthread_mutex_lock(&lock);
  if (idle_teams == TEAMS) end_idle(0);
  idle[idle_teams++] = team;
  idle_helpers += apq_team_helpers(team);
  pthread_mutex_unlock(&lock);
}

/* The library may be unloaded: no helper may be in it then. A process that was made without a fork
 * known to us (clone) has none. */
__attribute__((destructor)) static void unload(void) {
  if (owner != getpid()) return;
  pthread_mutex_lock(&lock);
  while (idle_teams > 0) end_idle(0);
  pthread_mutex_unlock(&lock);
}
