/* A C program whose tensors lie in the GPU's memory: argv[1] is the weights file; prints y. */
#include <stdio.h>
#include <stdlib.h>

#include "small.h"

static int failed(const char *what) {
  fprintf(stderr, "%s: %s\n", what, small_last_error());
  return 1;
}

int main(int argc, char **argv) {
  small_handle *handle;
  small_context *context;
  if (argc < 2 || small_open(argv[1], &handle)) return failed("open");
  if (small_context_create(handle, &context)) return failed("context");
  float x[3 * 64], y[3 * 48];
  for (int i = 0; i < 3 * 64; i++) x[i] = (float)i / 64;
  void *x_there, *y_there, *z_there;
  if (small_device_alloc(handle, sizeof x, &x_there) || small_device_alloc(handle, sizeof y, &y_there) ||
      small_device_alloc(handle, sizeof y, &z_there) || small_device_write(handle, x_there, x, sizeof x)) {
    return failed("memory");
  }
  int64_t in_shape[] = {3, 64}, out_shape[] = {3, 48};
  DLTensor in = {x_there, {kDLCUDA, 0}, 2, {kDLFloat, 32, 1}, in_shape, NULL, 0};
  DLTensor out[] = {{y_there, {kDLCUDA, 0}, 2, {kDLFloat, 32, 1}, out_shape, NULL, 0},
                    {z_there, {kDLCUDA, 0}, 2, {kDLFloat, 32, 1}, out_shape, NULL, 0}};
  void *stream = small_stream(context);
  if (stream == NULL || small_set_stream(context, stream) || small_stream(context) != stream) return failed("stream");
  for (int run = 0; run < 3; run++) {
    if (small_run(context, &in, out)) return failed("run");
  }
  if (small_set_stream(context, NULL) || small_stream(context) != stream) return failed("own stream");
  if (small_device_read(handle, y, y_there, sizeof y)) return failed("read");
  for (int i = 0; i < 3 * 48; i++) printf("%.6f\n", (double)y[i]);

  in.device.device_id = 1;
  if (small_run(context, &in, out) != SMALL_BAD_INPUT) return 2;
  if (small_device_alloc(handle, (size_t)1 << 40, &x_there) != SMALL_NO_MEMORY || x_there != NULL) return 3;
  if (small_device_read(handle, NULL, y_there, 4) != SMALL_BAD_INPUT) return 4;
  if (small_device_read(handle, y, y_there, (size_t)1 << 40) != SMALL_KERNEL_FAILED) return 5;
  if (small_device_free(handle, y_there) || small_device_free(handle, NULL)) return failed("free");
  small_context_destroy(context);
  small_close(handle);
  return 0;
}
