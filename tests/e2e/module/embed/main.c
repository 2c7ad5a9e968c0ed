/* A C program around the test model of module_helpers.mixed_model: prints what run() would return. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "embedded.h"

static int failed(const char *what) {
  fprintf(stderr, "%s: %s\n", what, embedded_last_error());
  return 1;
}

int main(int argc, char **argv) {
  if (argc != 2) return 2;
  embedded_handle *handle;
  embedded_context *context;
  if (embedded_open("no such file", &handle) != EMBEDDED_BAD_WEIGHTS || handle != NULL) return 3;
  if (embedded_open(argv[1], &handle) != 0) return failed("open");
  if (embedded_verify(handle) != 0) return failed("verify");
  if (embedded_set_num_threads(handle, 1) != 0) return failed("threads");
  if (embedded_context_create(handle, &context) != 0) return failed("context");

  float x[2 * 8];
  int64_t ids[2 * 3] = {0, 1, 2, 3, 4, 5}, x_shape[] = {2, 8}, ids_shape[] = {2, 3};
  for (int i = 0; i < 16; i++) x[i] = (float)i / 8 - 1;
  DLTensor inputs[EMBEDDED_NUM_INPUTS] = {
      {x, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, x_shape, NULL, 0},
      {ids, {kDLCPU, 0}, 2, {kDLInt, 64, 1}, ids_shape, NULL, 0},
  };
  const DLDataType types[EMBEDDED_NUM_OUTPUTS] = {
      {kDLFloat, 32, 1}, {kDLFloat, 32, 1}, {kDLInt, 32, 1},   {kDLFloat, 32, 1},
      {kDLFloat, 32, 1}, {kDLFloat, 32, 1}, {kDLFloat, 32, 1}, {kDLFloat, 32, 1},
      {kDLFloat, 32, 1}, {kDLFloat, 32, 1}, {kDLFloat, 32, 1},
  };
  const int ranks[EMBEDDED_NUM_OUTPUTS] = {2, 2, 2, 2, 1, 0, 2, 3, 1, 1, 0};
  DLTensor outputs[EMBEDDED_NUM_OUTPUTS];
  int64_t shapes[EMBEDDED_NUM_OUTPUTS][EMBEDDED_MAX_RANK];
  for (int o = 0; o < EMBEDDED_NUM_OUTPUTS; o++) {
    if (embedded_output_shape(context, inputs, o, shapes[o]) != 0) return failed("shape");
    size_t count = 1;
    for (int d = 0; d < ranks[o]; d++) count *= (size_t)shapes[o][d];
    /* Not aligned to 64 bytes on purpose: the library copies. */
    void *data = calloc(count + 1, 4);
    DLTensor t = {data, {kDLCPU, 0}, ranks[o], types[o], shapes[o], NULL, 4};
    outputs[o] = t;
  }
  for (int run = 0; run < 3; run++) {
    if (embedded_run(context, inputs, outputs) != 0) return failed("run");
  }
  const float *y = (const float *)outputs[0].data + 1;
  for (int i = 0; i < 48; i++) printf("%.6f\n", (double)y[i]);

  uint64_t arena, live;
  embedded_memory(context, &arena, &live);
  if (live == 0 || arena < live) return 4;
  inputs[0].dtype.bits = 64;
  if (embedded_run(context, inputs, outputs) != EMBEDDED_BAD_INPUT) return 5;
  inputs[0].dtype.bits = 32;
  inputs[0].device.device_type = 8; /* kDLMetal */
  if (embedded_run(context, inputs, outputs) != EMBEDDED_BAD_INPUT) return 6;
  inputs[0].device.device_type = kDLCPU;
  ids[3] = 1000;
  if (embedded_run(context, inputs, outputs) != EMBEDDED_BAD_INPUT) return 7;
  ids[3] = 3;
  shapes[0][0] = 3;
  if (embedded_run(context, inputs, outputs) != EMBEDDED_BAD_INPUT) return 8;
  int64_t none[EMBEDDED_MAX_RANK];
  if (embedded_output_shape(context, inputs, 99, none) != EMBEDDED_BAD_INPUT) return 9;

  void *none_there = NULL; /* it was compiled for processors */
  if (embedded_device_alloc(handle, 64, &none_there) != EMBEDDED_BAD_INPUT || none_there != NULL) return 10;
  if (embedded_set_stream(context, NULL) != EMBEDDED_BAD_INPUT || embedded_stream(context) != NULL) return 11;

  for (int o = 0; o < EMBEDDED_NUM_OUTPUTS; o++) free(outputs[o].data);
  embedded_context_destroy(context);
  embedded_close(handle);
  fprintf(stderr, "version %s\n", embedded_version());
  return 0;
}
