/* What a session keeps for runs on a GPU lies in the GPU's memory: caches, masks, what the program gave once. */
#include "apq_cuda.h"

/* A GPU's products of weights are full from some hundred rows on. */
int64_t apq_together(void) { return 512; }

DLDevice apq_resident_device(const apq_context *c) { return (DLDevice){kDLCUDA, c->handle->device->ordinal}; }

/* What grows loses what it held, as apq_reserve says. */
int apq_reserve_resident(apq_context *c, region *r, size_t bytes, const char *what) {
  apq_pointer fresh = 0;
  if (bytes <= r->bytes) return APQ_OK;
  apq_free_resident(c, r);
  int rc = apq_enter(c->handle->device);
  if (rc != APQ_OK) return rc;
  rc = apq_gpu_alloc(c->handle->device, bytes, what, &fresh);
  apq_leave(c->handle->device);
  if (rc == APQ_OK) *r = (region){(unsigned char *)(uintptr_t)fresh, bytes};
  return rc;
}

void apq_free_resident(apq_context *c, region *r) {
  apq_device *d = c->handle->device;
  if (r->data != NULL && apq_enter(d) == APQ_OK) {
    (void)d->cu->free((apq_pointer)(uintptr_t)r->data);
    apq_leave(d);
  }
  *r = (region){NULL, 0};
}

/* Waits for the copy's end: what it was copied from may go then. */
static int copied(apq_context *c, void *to, const DLTensor *t, size_t bytes) {
  apq_device *d = c->handle->device;
  apq_pointer at = (apq_pointer)(uintptr_t)to, from = (apq_pointer)(uintptr_t)apq_address(t);
  void *queue = c->stream->queue;
  if (bytes == 0) return APQ_OK;
  int rc = apq_enter(d);
  if (rc != APQ_OK) return rc;
  int of_gpu = t->device.device_type == kDLCUDA || t->device.device_type == kDLCUDAManaged;
  apq_result_code result =
      of_gpu ? d->cu->copy(at, from, bytes, queue) : d->cu->upload(at, apq_address(t), bytes, queue);
  if (result == 0) result = d->cu->synchronize(queue);
  apq_leave(d);
  return result == 0 ? APQ_OK : apq_device_fail(d, result, "copying what a session keeps");
}

int apq_put_resident(apq_context *c, region *r, const DLTensor *t, size_t bytes) { return copied(c, r->data, t, bytes); }

int apq_copy_resident(apq_context *c, void *to, const void *from, size_t bytes) {
  DLTensor t = apq_tensor((void *)(uintptr_t)from, (DLDataType){kDLUInt, 8, 1}, 0, NULL);
  t.device = apq_resident_device(c);
  return copied(c, to, &t, bytes);
}
