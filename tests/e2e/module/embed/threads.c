/* A C program around module_helpers.parallel_scale(4096, 3): runs it on two threads, if it has them. */
#include <stdio.h>

#include "scaled.h"

enum { ROWS = 64, COLUMNS = 4096 };
static float x[ROWS * COLUMNS], y[ROWS * COLUMNS];

int main(int argc, char **argv) {
  scaled_handle *handle;
  scaled_context *context;
  int64_t shape[] = {ROWS, COLUMNS};
  DLTensor in = {x, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, shape, NULL, 0};
  DLTensor out = {y, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, shape, NULL, 0};
  for (int i = 0; i < ROWS * COLUMNS; i++) x[i] = (float)(i % 97);
  if (argc != 2 || scaled_open(argv[1], &handle) != 0) return 1;
  if (scaled_set_num_threads(handle, 2) != 0) return 2;
  if (scaled_context_create(handle, &context) != 0) return 3;
  for (int run = 0; run < 3; run++) {
    if (scaled_run(context, &in, &out) != 0) return 4;
  }
  for (int i = 0; i < ROWS * COLUMNS; i++) {
    if (y[i] != 3 * x[i]) return 5;
  }
  printf("%d threads%s\n", (int)scaled_num_threads(handle), scaled_has_openmp() ? " of OpenMP" : "");
  scaled_context_destroy(context);
  scaled_close(handle);
  return 0;
}
