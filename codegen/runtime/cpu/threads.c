/* Which threads a run uses: the program's own pool, OpenMP's, or ours. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "apq_context.h"
#include "apq_threads.h"

static pthread_once_t opened = PTHREAD_ONCE_INIT;
static int openmp = 0, pool = 0;

static void open_threads(void) {
  const char *wish = getenv("APQ_THREADS");
  openmp = wish != NULL && strcmp(wish, "openmp") == 0 && apq_openmp_open();
  if (!openmp) pool = apq_pool_open();
}

int apq_has_openmp(void) {
  pthread_once(&opened, open_threads);
  return openmp;
}

int32_t apq_usable_threads(int32_t threads) {
  if (apq_has_openmp()) return apq_openmp_usable(threads);
  return pool ? apq_pool_usable(threads) : 1;
}

/* ---- of the run of this thread ---- */

static _Thread_local apq_crew mine = {NULL, NULL, NULL, 1};

apq_crew apq_threads_begin(const apq_handle *h, int32_t threads) {
  apq_crew before = mine;
  mine = (apq_crew){h->parallel, h->parallel_data, NULL, threads};
  return before;
}

void apq_threads_end(const apq_crew *before) {
  apq_pool_give(mine.team);
  mine = *before;
}

/* Another run may have all helpers there are, but not for ever. */
static int has_team(void) {
  if (mine.team == NULL) mine.team = apq_pool_take(mine.threads);
  return mine.team != NULL && apq_team_pays(mine.team);
}

/* Ours claim tasks one by one and end together if they are short; OpenMP's have one each, of the size
 * that is worth its barriers: a team of two costs 0.9 us on Zen 4. */
static const double SHORT_TASK = 1000.0, LONG_TASK = 4000.0;
enum { MOST_TASKS = 4096 }; /* team.c has 16 bits for it */

apq_cut apq_run_cut(void) {
  static const apq_cut alone = {1, 0, 1, 1};
  int32_t threads = mine.threads;
  if (threads <= 1) return alone;
  if (mine.parallel == NULL && openmp) return (apq_cut){threads, LONG_TASK, threads, threads};
  if (mine.parallel == NULL && !has_team()) return alone;
  int32_t some = threads < MOST_TASKS / 8 ? 8 * threads : MOST_TASKS;
  return (apq_cut){threads, SHORT_TASK, mine.parallel == NULL ? MOST_TASKS : some, some};
}

void apq_run_loop(const apq_loop *loop, int32_t wanted) {
  if (mine.parallel != NULL) {
    mine.parallel(mine.parallel_data, loop->count, loop->task, loop->work);
  } else if (openmp) {
    apq_openmp_loop(loop);
  } else {
    apq_team_loop(mine.team, loop, wanted - 1);
  }
}
