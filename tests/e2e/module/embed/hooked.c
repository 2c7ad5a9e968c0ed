/* A C program around module_helpers.parallel_scale(4096, 3): runs it on threads of its own. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "scaled.h"

enum { ROWS = 64, COLUMNS = 4096, THREADS = 3 };
static float x[ROWS * COLUMNS], y[ROWS * COLUMNS];

typedef struct {
  int32_t first, tasks;
  void (*task)(void *work, int32_t index);
  void *work;
} share;

static void *do_share(void *data) {
  share *s = data;
  for (int32_t i = s->first; i < s->tasks; i += THREADS) s->task(s->work, i);
  return NULL;
}

/* Every third task to a thread, none to the one that runs. */
static void deal(void *data, int32_t tasks, void (*task)(void *work, int32_t index), void *work) {
  pthread_t threads[THREADS];
  share shares[THREADS];
  *(int *)data += 1;
  for (int32_t i = 0; i < THREADS; i++) {
    shares[i] = (share){i, tasks, task, work};
    pthread_create(&threads[i], NULL, do_share, &shares[i]);
  }
  for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
}

static int run(scaled_context *context) {
  int64_t shape[] = {ROWS, COLUMNS};
  DLTensor in = {x, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, shape, NULL, 0}, out = in;
  out.data = y;
  memset(y, 0, sizeof y);
  if (scaled_run(context, &in, &out) != 0) return 0;
  for (int i = 0; i < ROWS * COLUMNS; i++) {
    if (y[i] != 3 * x[i]) return 0;
  }
  return 1;
}

int main(int argc, char **argv) {
  scaled_handle *handle;
  scaled_context *context;
  int calls = 0;
  for (int i = 0; i < ROWS * COLUMNS; i++) x[i] = (float)(i % 97);
  if (argc != 2 || scaled_open(argv[1], &handle) != 0) return 1;
  if (scaled_set_parallel(handle, deal, &calls) != 0) return 2;
  if (scaled_set_num_threads(handle, THREADS) != 0) return 3;
  if (scaled_num_threads(handle) != THREADS || scaled_context_create(handle, &context) != 0) return 4;
  if (!run(context) || calls != 1) return 5;
  if (scaled_set_parallel(handle, NULL, NULL) != 0) return 6;
  if (!run(context) || calls != 1) return 7;
  scaled_context_destroy(context);
  scaled_close(handle);
  puts("done");
  return 0;
}
