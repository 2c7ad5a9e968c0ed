/* One handle, four threads with a context each, and settings that change meanwhile: for TSan. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "fuzzed.h"

enum { ROWS = 64, COLUMNS = 4096, THREADS = 4, RUNS = 20 };

static void *work(void *data) {
  fuzzed_handle *handle = data;
  fuzzed_context *context;
  float *x = malloc(sizeof(float) * ROWS * COLUMNS), *y = malloc(sizeof(float) * ROWS * COLUMNS);
  int64_t shape[] = {ROWS, COLUMNS};
  DLTensor in = {x, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, shape, NULL, 0}, out = in;
  out.data = y;
  if (x == NULL || y == NULL || fuzzed_context_create(handle, &context) != 0) abort();
  for (int i = 0; i < ROWS * COLUMNS; i++) x[i] = (float)(i % 97);
  for (int run = 0; run < RUNS; run++) {
    shape[0] = 1 + (run * 7) % ROWS;
    if (fuzzed_set_num_threads(handle, 1 + run % 3) != 0 || fuzzed_run(context, &in, &out) != 0) abort();
    if (fuzzed_num_threads(handle) < 1 || fuzzed_verify(handle) != 0) abort();
    shape[0] = -1; /* an error, of this thread alone */
    if (fuzzed_run(context, &in, &out) == 0 || fuzzed_last_error()[0] == '\0') abort();
  }
  fuzzed_context_destroy(context);
  free(x);
  free(y);
  return NULL;
}

int main(int argc, char **argv) {
  pthread_t threads[THREADS];
  fuzzed_handle *handle;
  if (argc != 2 || fuzzed_open(argv[1], &handle) != 0) return 1;
  for (int i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, work, handle);
  for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
  fuzzed_close(handle);
  puts("done");
  return 0;
}
