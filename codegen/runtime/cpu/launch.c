/* A kernel's parallel loop: cut into tasks and shared out. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>

#include "apq_threads.h"

typedef struct {
  void *sync_handle;
  int32_t num_task;
} group_env; /* TVMParallelGroupEnv */

typedef int (*task_function)(int task, group_env *env, void *data);

typedef struct {
  task_function task;
  group_env env;
  void *data;
  atomic_int failed; /* 0, or the first error code */
  pthread_mutex_t lock;
  char text[1024]; /* the first error, which its thread would otherwise keep to itself */
} launch;

/* Of the kernel that this thread is about to run, and of the loop in it that comes next. */
static _Thread_local double kernel_work = 0;
static _Thread_local int64_t iterations = 0;
static _Thread_local double grain = 1;
/* Of the last kernel: the most threads that a loop of it was worth. */
static _Thread_local int32_t team = 1;

void apq_set_work(double nanoseconds) {
  kernel_work = nanoseconds;
  team = 1;
}

int32_t apq_shared_by(void) { return team; }

/* Kernels tell how many iterations a loop has (codegen/build/extents.py) before they launch it. */
void apq_loop_iterations(int64_t count);
void apq_loop_iterations(int64_t count) { iterations = count; }

/* And a kernel whose grain was decided, that threads and tasks of the loop need so many times the usual work. */
void apq_loop_grain(double times);
void apq_loop_grain(double times) { grain = times; }

static void run_task(void *work, int32_t task) {
  launch *l = work;
  int rc = l->task(task, &l->env, l->data);
  if (rc == 0) return;
  pthread_mutex_lock(&l->lock);
  if (atomic_load(&l->failed) == 0) {
    snprintf(l->text, sizeof l->text, "%s", apq_last_error());
    atomic_store(&l->failed, rc);
  }
  pthread_mutex_unlock(&l->lock);
}

/* A loop is worth a team of threads from this many estimated nanoseconds per thread on. Measured on
 * Zen 4: y = 3 x over [n, 64] gains from n = 512 (2.7 us alone) on. */
static const double NANOSECONDS_PER_THREAD = 4000.0;

/* Tasks of a loop: kernels deal iterations to tasks in equal shares, rounded up. */
static int32_t count_tasks(const apq_cut *cut, double work, int64_t count) {
  double fit = work / cut->least;
  int64_t most = count > 0 ? cut->most : cut->uncounted;
  if (fit < (double)most) most = fit < 1 ? 1 : (int64_t)fit;
  if (count <= 0) return (int32_t)most;
  int64_t share = (count + most - 1) / most;
  return (int32_t)((count + share - 1) / share);
}

static int run_alone(task_function task, void *data, int32_t tasks) {
  group_env env = {NULL, tasks};
  for (int t = 0; t < tasks; t++) {
    int rc = task(t, &env, data);
    if (rc != 0) return rc;
  }
  return 0;
}

static int parallel_launch(task_function task, void *data, int num_task) {
  int64_t count = num_task > 0 ? num_task : iterations;
  double work = kernel_work / grain, worth = work / NANOSECONDS_PER_THREAD;
  iterations = 0;
  grain = 1;
  if (worth < 2 || count == 1) return run_alone(task, data, num_task > 0 ? num_task : 1);
  apq_cut cut = apq_run_cut();
  int32_t tasks = num_task > 0 ? num_task : cut.threads <= 1 ? 1 : count_tasks(&cut, work, count);
  if (cut.threads <= 1 || tasks == 1) return run_alone(task, data, tasks);
  launch l = {.task = task, .env = {NULL, tasks}, .data = data};
  atomic_init(&l.failed, 0);
  pthread_mutex_init(&l.lock, NULL);
  apq_loop loop = {run_task, &l, tasks};
  int32_t threads = worth < cut.threads ? (int32_t)worth : cut.threads;
  if (threads > team) team = threads;
  apq_run_loop(&loop, threads);
  pthread_mutex_destroy(&l.lock);
  int rc = atomic_load(&l.failed);
  return rc == 0 ? 0 : apq_fail(rc, "%s", l.text);
}

typedef struct {
  int (*task)(int number, void *data);
  void *data;
} side_by_side;

static int one_of_them(int number, group_env *env, void *data) {
  const side_by_side *all = data;
  (void)env;
  return all->task(number, all->data);
}

int apq_side_by_side(int (*task)(int number, void *data), void *data, int32_t tasks) {
  side_by_side all = {task, data};
  apq_set_work(NANOSECONDS_PER_THREAD * tasks); /* at the least: it is worth as many threads */
  return parallel_launch(one_of_them, &all, tasks);
}

/* Kernels call through this pointer, which their object file holds as a weak null. */
extern int (*__TVMBackendParallelLaunch)(task_function, void *, int);
int (*__TVMBackendParallelLaunch)(task_function, void *, int) = parallel_launch;
