/* Threads of a processor's runs: what shares the tasks of one parallel loop out.
 *
 *   cores.c    how many threads there are to begin with
 *   threads.c  which of the three below a run uses
 *   launch.c   a kernel's parallel loop becomes tasks
 *   pool.c     teams of our own threads; team.c one team; worth.c whether its helpers pay; places.c their CPUs
 *   openmp.c   OpenMP's threads instead, and forks.c what a fork does to them */
#ifndef APQ_THREADS_H_
#define APQ_THREADS_H_

#include <stdint.h>
#include <time.h>

#include "apq_runtime.h"

/* ---- a loop that is to be shared out ---- */

/* Tasks 0 to `count` - 1 of `work`, each called once, in any order, on any thread. */
typedef struct {
  apq_task task;
  void *work;
  int32_t count;
} apq_loop;

/* ---- a team: a thread that runs models, and helpers (team.c) ---- */

typedef struct apq_team apq_team;

/* As many helpers as can be started, at most `helpers`; NULL where there is not one. */
apq_team *apq_team_open(int32_t helpers);
/* Ends the helpers; no loop is under way. */
void apq_team_close(apq_team *team);
int32_t apq_team_helpers(const apq_team *team);
/* 0 while the thread had better run alone. */
int apq_team_pays(const apq_team *team);
/* Returns when every task is done; wakes up to `awake` helpers that sleep. */
void apq_team_loop(apq_team *team, const apq_loop *loop, int32_t awake);
/* After the loops of a run. */
void apq_team_end(apq_team *team);

/* ---- whether helpers pay (worth.c) ---- */

typedef struct {
  int64_t since, cpu_since;      /* start of the stretch that is being measured; 0 between runs */
  int64_t wall, gained, lost;    /* of the measured stretches, in nanoseconds */
  int64_t alone_until, sentence; /* until when the team runs alone, and for how many losses */
  int64_t lost_at, earned;       /* when helpers did not pay the last time, and what they gained since */
} apq_worth;

int apq_worth_alone(const apq_worth *worth, int64_t now);
void apq_worth_begin(apq_worth *worth, int64_t now);
void apq_worth_end(apq_worth *worth, int64_t now);
/* After a loop: helpers did `gained` worth of work, this thread spun for `spun` until they had. */
void apq_worth_note(apq_worth *worth, int64_t now, int64_t gained, int64_t spun);

/* ---- CPUs (places.c) ---- */

/* What the kernel calls this thread. */
int32_t apq_thread_number(void);
/* -1 where nobody can tell. */
int32_t apq_this_cpu(void);
/* Lets a thread run where this one may, but not on `cpu`; 0 where that leaves nothing or is not allowed. */
int apq_keep_off(int32_t cpu, int32_t thread);

static inline int64_t apq_clock(clockid_t which) {
  struct timespec t;
  clock_gettime(which, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* ---- teams for the threads of the process that run models (pool.c) ---- */

/* 0 where there cannot be any. */
int apq_pool_open(void);
/* So many of `threads` as the last attempt could start. */
int32_t apq_pool_usable(int32_t threads);
/* A team of up to `threads` with the caller; NULL: it runs alone. */
apq_team *apq_pool_take(int32_t threads);
void apq_pool_give(apq_team *team);

/* ---- OpenMP's (openmp.c, forks.c) ---- */

/* 0 without an OpenMP runtime. */
int apq_openmp_open(void);
int32_t apq_openmp_usable(int32_t threads);
void apq_openmp_loop(const apq_loop *loop);

/* Called before the handlers can be needed; 0 where they could not be set. */
int apq_forks_watch(void);
/* An OpenMP runtime was there before the first handle was opened. */
void apq_forks_found_openmp(void);
/* A fork took the team of the calling thread. */
int apq_forks_lost_team(void);
/* Threads of the process; -1 if nobody can tell. */
int apq_count_threads(void);

/* ---- what the run of this thread uses (threads.c) ---- */

/* How its parallel loops are cut; the numbers are of apq_call's estimate, in nanoseconds. */
typedef struct {
  int32_t threads;  /* 1: they are not cut */
  double least;     /* of a task */
  int32_t most;     /* tasks of a loop whose iterations are counted */
  int32_t uncounted; /* and of one whose are not */
} apq_cut;

apq_cut apq_run_cut(void);
/* Shares a loop out; `wanted` threads are worth it. */
void apq_run_loop(const apq_loop *loop, int32_t wanted);

#endif
