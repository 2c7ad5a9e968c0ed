/* Prints how many threads and tasks launch.c gives loops of 100 iterations, by their work and grain. */
#include <stdio.h>

#include "apq_threads.h"

extern int (*__TVMBackendParallelLaunch)(int (*)(int, void *, void *), void *, int);
void apq_loop_iterations(int64_t count);
void apq_loop_grain(double times);

static int32_t threads, tasks;

apq_cut apq_run_cut(void) { return (apq_cut){4, 1000, 4096, 32}; }

void apq_run_loop(const apq_loop *loop, int32_t wanted) {
  threads = wanted;
  for (int32_t i = 0; i < loop->count; i++) loop->task(loop->work, i);
}

const char *apq_last_error(void) { return ""; }
int apq_fail(int code, const char *format, ...) {
  (void)format;
  return code;
}

static int count(int task, void *env, void *data) {
  (void)task, (void)env, (void)data;
  return ++tasks, 0;
}

static void loop(double grain) {
  threads = 1, tasks = 0;
  if (grain != 1) apq_loop_grain(grain);
  apq_loop_iterations(100);
  (void)__TVMBackendParallelLaunch(count, NULL, 0);
  printf("%d %d\n", (int)threads, (int)tasks);
}

int main(void) {
  apq_set_work(20000);
  loop(1), loop(4), loop(2), loop(0.25), loop(1);
  return 0;
}
