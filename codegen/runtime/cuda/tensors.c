/* Where tensors lie: those of the program's memory are copied to and from the GPU, those of the GPU's own
 * are used where they are. */
#include <stdlib.h>

#include "apq_cuda.h"

enum { ALIGNMENT = 16 }; /* bytes of the longest load of a kernel */

static int in_gpu_memory(const DLTensor *t) {
  return t->device.device_type == kDLCUDA || t->device.device_type == kDLCUDAManaged;
}

static int used_in_place(const DLTensor *t) {
  return in_gpu_memory(t) && t->data != NULL && (uintptr_t)apq_address(t) % ALIGNMENT == 0;
}

int apq_check_place(const apq_handle *h, const char *kind, const char *name, const DLTensor *t) {
  const apq_device *d = h->device;
  switch (t->device.device_type) {
    case kDLCPU:
    case kDLCUDAHost:
    case kDLCUDAManaged: return APQ_OK;
    case kDLCUDA: break;
    default:
      return apq_fail(APQ_BAD_INPUT, "%s '%s' is on DLPack device type %d, wanted memory of the CPU (%d) or of GPU %d (%d)",
                      kind, name, (int)t->device.device_type, kDLCPU, d->ordinal, kDLCUDA);
  }
  if (t->device.device_id == d->ordinal) return APQ_OK;
  return apq_fail(APQ_BAD_INPUT,
                  "%s '%s' is in the memory of GPU %d, and the module runs on GPU %d (%s): copy it there, or open the "
                  "module on GPU %d",
                  kind, name, (int)t->device.device_id, d->ordinal, d->name, (int)t->device.device_id);
}

/* An output that a session's run does not make. */
static int left_out(const apq_context *c, const DLTensor *output) { return c->session != NULL && output->data == NULL; }

static size_t staged(const DLTensor *t) { return used_in_place(t) ? 0 : apq_stage_of(t); }

/* The tensor's address, or the next of the staging block's. */
static void *address(const DLTensor *t, unsigned char **next, int *in_place) {
  void *at = *next;
  *next = apq_past(*next, staged(t));
  if (!used_in_place(t)) return at;
  *in_place = 1;
  return apq_address(t);
}

int apq_place(apq_context *c, const plan *p, const DLTensor *inputs, const DLTensor *outputs, int *in_place) {
  const apq_module *m = c->handle->module;
  size_t bytes = 0;
  for (int32_t i = 0; i < m->num_inputs; i++) {
    if (in_gpu_memory(&inputs[i]) && !apq_contiguous(&inputs[i])) {
      return apq_fail(APQ_BAD_INPUT, "input '%s' lies in the GPU's memory and is not contiguous: copy it (.contiguous())",
                      m->inputs[i].name);
    }
    bytes = apq_sum(bytes, staged(&inputs[i]));
  }
  for (int32_t i = 0; i < m->num_outputs; i++) {
    if (!left_out(c, &outputs[i])) bytes = apq_sum(bytes, staged(&outputs[i]));
  }
  int rc = apq_grow(c, &c->staging, bytes, "inputs and outputs");
  if (rc == APQ_OK) rc = apq_grow(c, &c->arena, p->arena, "working memory");
  if (rc != APQ_OK) return rc;
  unsigned char *next = c->staging.data;
  *in_place = 0;
  for (int32_t i = 0; i < m->num_inputs; i++) c->inputs[i] = address(&inputs[i], &next, in_place);
  for (int32_t i = 0; i < m->num_outputs; i++) {
    c->outputs[i] = left_out(c, &outputs[i]) ? NULL : address(&outputs[i], &next, in_place);
  }
  for (int32_t i = 0; i < m->num_buffers; i++) c->buffers[i] = apq_past(c->arena.data, p->offsets[i]);
  if (c->session != NULL) apq_place_caches(c);
  return APQ_OK;
}

/* An input of any strides, contiguous in the host's memory. */
static int pack(struct apq_stream *s, const DLTensor *t, const unsigned char **from) {
  size_t bytes = apq_bytes_of(t);
  *from = apq_address(t);
  if (apq_contiguous(t)) return APQ_OK;
  if (bytes > s->packed_bytes) {
    free(s->packed);
    s->packed = malloc(bytes);
    s->packed_bytes = s->packed == NULL ? 0 : bytes;
    if (s->packed == NULL) {
      return apq_fail(APQ_NO_MEMORY, "no memory for %llu bytes of an input's copy", (unsigned long long)bytes);
    }
  }
  (void)apq_gather(s->packed, apq_address(t), t, 0);
  *from = s->packed;
  return APQ_OK;
}

int apq_copy_in(apq_context *c, const DLTensor *inputs) {
  apq_device *d = c->handle->device;
  struct apq_stream *s = c->stream;
  for (int32_t i = 0; i < c->handle->module->num_inputs; i++) {
    const DLTensor *t = &inputs[i];
    const unsigned char *from;
    apq_pointer to = (apq_pointer)(uintptr_t)c->inputs[i];
    apq_result_code result;
    size_t bytes = apq_bytes_of(t);
    if (bytes == 0 || used_in_place(t)) continue;
    if (in_gpu_memory(t)) {
      result = d->cu->copy(to, (apq_pointer)(uintptr_t)apq_address(t), bytes, s->queue);
    } else {
      int rc = pack(s, t, &from);
      if (rc != APQ_OK) return rc;
      result = d->cu->upload(to, from, bytes, s->queue);
      /* The copy of a strided input is written over for the next one. */
      if (result == 0 && from == s->packed) result = d->cu->synchronize(s->queue);
    }
    if (result != 0) return apq_device_fail(d, result, "copying an input");
  }
  return APQ_OK;
}

int apq_copy_out(apq_context *c, const DLTensor *outputs) {
  apq_device *d = c->handle->device;
  for (int32_t i = 0; i < c->handle->module->num_outputs; i++) {
    const DLTensor *t = &outputs[i];
    apq_pointer from = (apq_pointer)(uintptr_t)c->outputs[i];
    size_t bytes = apq_bytes_of(t);
    if (bytes == 0 || used_in_place(t) || left_out(c, t)) continue;
    apq_result_code rc = in_gpu_memory(t)
                             ? d->cu->copy((apq_pointer)(uintptr_t)apq_address(t), from, bytes, c->stream->queue)
                             : d->cu->download(apq_address(t), from, bytes, c->stream->queue);
    if (rc != 0) return apq_device_fail(d, rc, "copying an output");
  }
  return APQ_OK;
}

/* ---- memory for tensors that stay ---- */

int apq_device_alloc(const apq_handle *handle, size_t bytes, void **data) {
  apq_pointer found = 0;
  if (handle == NULL || data == NULL) return apq_fail(APQ_BAD_INPUT, "the handle or where the address is to be written is NULL");
  *data = NULL;
  int rc = apq_enter(handle->device);
  if (rc != APQ_OK) return rc;
  rc = apq_gpu_alloc(handle->device, bytes, "a tensor", &found);
  apq_leave(handle->device);
  *data = (void *)(uintptr_t)found;
  return rc;
}

int apq_device_free(const apq_handle *handle, void *data) {
  if (handle == NULL) return apq_fail(APQ_BAD_INPUT, "the handle is NULL");
  if (data == NULL) return APQ_OK;
  int rc = apq_enter(handle->device);
  if (rc != APQ_OK) return rc;
  apq_result_code result = handle->device->cu->free((apq_pointer)(uintptr_t)data);
  apq_leave(handle->device);
  return result == 0 ? APQ_OK : apq_device_fail(handle->device, result, "cuMemFree");
}

/* From `from` to the GPU where that is not NULL, else from the GPU to `to`. */
static int copy(const apq_handle *handle, void *data, void *to, const void *from, size_t bytes) {
  if (handle == NULL || data == NULL || (to == NULL && from == NULL)) {
    return apq_fail(APQ_BAD_INPUT, "the handle or an address of a copy is NULL");
  }
  apq_device *d = handle->device;
  int rc = apq_enter(d);
  if (rc != APQ_OK) return rc;
  apq_pointer at = (apq_pointer)(uintptr_t)data;
  apq_result_code result = from != NULL ? d->cu->upload(at, from, bytes, NULL) : d->cu->download(to, at, bytes, NULL);
  if (result == 0) result = d->cu->synchronize(NULL);
  apq_leave(d);
  return result == 0 ? APQ_OK : apq_device_fail(d, result, "a copy to or from the GPU");
}

int apq_device_read(const apq_handle *handle, void *to, const void *data, size_t bytes) {
  return copy(handle, (void *)(uintptr_t)data, to, NULL, bytes);
}

int apq_device_write(const apq_handle *handle, void *data, const void *from, size_t bytes) {
  return copy(handle, data, NULL, from, bytes);
}
