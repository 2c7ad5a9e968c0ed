/* A C program around module_helpers.mixed_model that gives NULL wherever a pointer is taken. */
#include <stdio.h>
#include <string.h>

#include "embedded.h"

static int wrong = 0;

/* A call that must fail as bad input, and say what is NULL. */
static void refused(const char *call, int code, const char *why) {
  if (code == EMBEDDED_BAD_INPUT && strstr(embedded_last_error(), why) != NULL) return;
  printf("%s gives %d: %s\n", call, code, embedded_last_error());
  wrong = 1;
}
#define REFUSED(call, why) refused(#call, call, why)

int main(int argc, char **argv) {
  embedded_handle *handle, *none = (embedded_handle *)argv;
  embedded_context *context, *nothing = (embedded_context *)argv;
  if (argc != 2 || embedded_open(argv[1], &handle) != 0) return 2;
  if (embedded_context_create(handle, &context) != 0) return 3;
  REFUSED(embedded_open(NULL, &none), "path of the weights file is NULL");
  REFUSED(embedded_open(argv[1], NULL), "handle is to be written is NULL");
  REFUSED(embedded_verify(NULL), "the handle is NULL");
  REFUSED(embedded_set_num_threads(NULL, 1), "the handle is NULL");
  REFUSED(embedded_num_threads(NULL), "the handle is NULL");
  REFUSED(embedded_set_parallel(NULL, NULL, NULL), "the handle is NULL");
  REFUSED(embedded_set_precision(NULL, NULL, 4), "the handle is NULL");
  REFUSED(embedded_precision(NULL, "layer"), "the handle is NULL");
  REFUSED(embedded_precision(handle, NULL), "the layer's name is NULL");
  REFUSED(embedded_context_create(NULL, &nothing), "the handle is NULL");
  REFUSED(embedded_context_create(handle, NULL), "context is to be written is NULL");
  if (none != NULL || nothing != NULL) wrong = printf("an old pointer is left\n");
  if (strcmp(embedded_target(NULL), "") != 0) wrong = printf("target\n");
  embedded_close(NULL);
  embedded_context_destroy(NULL);

  float x[8] = {0}, y[24];
  int64_t ids[1] = {0}, x_shape[] = {1, 8}, ids_shape[] = {1, 1}, shapes[EMBEDDED_NUM_OUTPUTS][4];
  static float data[EMBEDDED_NUM_OUTPUTS][1024];
  uint64_t bytes;
  DLTensor in[EMBEDDED_NUM_INPUTS] = {
      {x, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, x_shape, NULL, 0},
      {ids, {kDLCPU, 0}, 2, {kDLInt, 64, 1}, ids_shape, NULL, 0},
  };
  const int ranks[EMBEDDED_NUM_OUTPUTS] = {2, 2, 2, 2, 1, 0, 2, 3, 1, 1, 0};
  DLTensor out[EMBEDDED_NUM_OUTPUTS];
  for (int o = 0; o < EMBEDDED_NUM_OUTPUTS; o++) {
    if (embedded_output_shape(context, in, o, shapes[o]) != 0) return 4;
    DLTensor t = {data[o], {kDLCPU, 0}, ranks[o], {o == 2 ? kDLInt : kDLFloat, 32, 1}, shapes[o], NULL, 0};
    out[o] = t;
  }
  out[5].shape = NULL; /* of a scalar: allowed */
  if (embedded_run(context, in, out) != 0) return 5;

  REFUSED(embedded_memory(NULL, &bytes, &bytes), "the context is NULL");
  REFUSED(embedded_memory(context, NULL, &bytes), "bytes are to be written is NULL");
  REFUSED(embedded_memory(context, &bytes, NULL), "bytes are to be written is NULL");
  const embedded_call *calls;
  int32_t count;
  REFUSED(embedded_set_profile(NULL, 1), "the context is NULL");
  REFUSED(embedded_profile(NULL, &calls, &count), "the context is NULL");
  REFUSED(embedded_profile(context, NULL, &count), "calls are to be written is NULL");
  REFUSED(embedded_profile(context, &calls, NULL), "calls are to be written is NULL");
  REFUSED(embedded_profile(context, &calls, &count), "the context keeps no profile");
  REFUSED(embedded_output_shape(NULL, in, 0, shapes[0]), "the context is NULL");
  REFUSED(embedded_output_shape(context, NULL, 0, shapes[0]), "the array of inputs is NULL");
  REFUSED(embedded_output_shape(context, in, 0, NULL), "the shape is to be written is NULL");
  REFUSED(embedded_output_shapes(NULL, in, shapes[0]), "the context is NULL");
  REFUSED(embedded_output_shapes(context, NULL, shapes[0]), "the array of inputs is NULL");
  REFUSED(embedded_output_shapes(context, in, NULL), "the shapes are to be written is NULL");
  REFUSED(embedded_run(NULL, in, out), "the context is NULL");
  REFUSED(embedded_run(context, NULL, out), "the array of inputs is NULL");
  REFUSED(embedded_run(context, in, NULL), "the array of outputs is NULL");
  REFUSED(embedded_run_bits(NULL, in, out, 0), "the context is NULL");
  in[1].shape = NULL;
  REFUSED(embedded_run(context, in, out), "input 'ids' has 2 dimensions, but its shape is NULL");
  REFUSED(embedded_output_shape(context, in, 0, shapes[0]), "'ids' has 2 dimensions, but its shape");
  in[1].shape = ids_shape;
  in[0].data = NULL;
  REFUSED(embedded_run(context, in, out), "input 'x:0' has no data");
  in[0].data = x;
  out[0].shape = NULL;
  REFUSED(embedded_run(context, in, out), "output 'y' has 2 dimensions, but its shape is NULL");
  out[0].shape = shapes[0];
  out[0].data = NULL;
  REFUSED(embedded_run(context, in, out), "output 'y' has no data");
  out[0].data = y;
  if (embedded_run(context, in, out) != 0) return 6;

  /* What has no elements needs no memory. */
  x_shape[0] = ids_shape[0] = 0;
  in[0].data = in[1].data = NULL;
  if (embedded_output_shape(context, in, 0, shapes[0]) != 0 || shapes[0][0] != 0) return 9;
  for (int o = 0; o < EMBEDDED_NUM_OUTPUTS; o++) {
    if (embedded_output_shape(context, in, o, shapes[o]) != 0) return 10;
    if (o != 2 && o != 5 && o != 8 && o != 10) out[o].data = NULL;
  }
  if (embedded_run(context, in, out) != 0) wrong = printf("empty: %s\n", embedded_last_error());
  x_shape[0] = -1;
  REFUSED(embedded_run(context, in, out), "no dimension may be negative");

  embedded_session *session;
  int64_t one = 1;
  REFUSED(embedded_session_create(handle, 1, 9, NULL, NULL), "the session is to be written is NULL");
  REFUSED(embedded_session_create(NULL, 1, 9, NULL, &session), "the handle is NULL");
  REFUSED(embedded_session_create(handle, 1, 9, NULL, &session), "has no caches");
  REFUSED(embedded_session_fork(NULL, &session), "the session is NULL");
  REFUSED(embedded_session_run(NULL, &one, 1, 1, y, 0), "the session is NULL");
  REFUSED(embedded_session_run(NULL, NULL, 1, 1, y, 0), "the ids is NULL");
  REFUSED(embedded_session_rewind(NULL, 1), "the session is NULL");
  REFUSED(embedded_session_memory(NULL, &bytes, &bytes), "the session is NULL");
  if (embedded_session_length(NULL) >= 0 || embedded_session_width(NULL) >= 0) return 7;
  if (embedded_session_context(NULL) != NULL) return 8;
  embedded_session_destroy(NULL);
  embedded_context_destroy(context);
  embedded_close(handle);
  return wrong;
}
