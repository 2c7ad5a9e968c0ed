/* Memory and streams of a GPU, of which modules for processors have none. */
#include "apq_context.h"

static int no_gpu(void) {
  return apq_fail(APQ_BAD_INPUT, "the module was compiled for processors: it has neither GPU memory nor streams");
}

int apq_device_alloc(const apq_handle *handle, size_t bytes, void **data) {
  (void)handle, (void)bytes, (void)data;
  return no_gpu();
}

int apq_device_free(const apq_handle *handle, void *data) {
  (void)handle, (void)data;
  return no_gpu();
}

int apq_device_read(const apq_handle *handle, void *to, const void *data, size_t bytes) {
  (void)handle, (void)to, (void)data, (void)bytes;
  return no_gpu();
}

int apq_device_write(const apq_handle *handle, void *data, const void *from, size_t bytes) {
  (void)handle, (void)data, (void)from, (void)bytes;
  return no_gpu();
}

int apq_set_stream(apq_context *context, void *stream) {
  (void)context, (void)stream;
  return no_gpu();
}

void *apq_stream(const apq_context *context) {
  (void)context;
  return NULL;
}
