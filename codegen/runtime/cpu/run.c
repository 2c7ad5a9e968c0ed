/* Runs on a processor: memory, where tensors lie, and the graph's calls one after the other. */
#include <stdlib.h>

#include "apq_images.h"

int apq_handle_open(apq_handle *h, int32_t device) {
  (void)device; /* apq_choose saw to it */
  (void)apq_has_openmp();
  atomic_init(&h->threads, apq_default_threads());
  return APQ_OK;
}

void apq_handle_close(apq_handle *h) { (void)h; }

int apq_context_open(apq_context *c) {
  (void)c;
  return APQ_OK;
}

void apq_context_close(apq_context *c) {
  (void)apq_set_profile(c, 0);
  apq_images_close(c);
  for (int32_t i = 0; i < c->handle->module->num_segments; i++) free(c->late[i].data);
  free(c->arena.data);
  free(c->staging.data);
}

void apq_plan_dropped(apq_context *c, const plan *p) { (void)c, (void)p; }

static int ready_to_use(const DLTensor *t) {
  return apq_contiguous(t) && (uintptr_t)apq_address(t) % APQ_LEAST_ALIGNMENT == 0;
}

/* Fills the context's pointers; what is not aligned or not contiguous goes through `staging`. */
static int place(apq_context *c, const plan *p, const DLTensor *inputs, const DLTensor *outputs) {
  const apq_module *m = c->handle->module;
  size_t staged = 0;
  for (int32_t i = 0; i < m->num_inputs; i++) {
    staged = apq_sum(staged, ready_to_use(&inputs[i]) ? 0 : apq_stage_of(&inputs[i]));
  }
  for (int32_t i = 0; i < m->num_outputs; i++) {
    if (m->outputs[i].late) continue;
    staged = apq_sum(staged, ready_to_use(&outputs[i]) ? 0 : apq_stage_of(&outputs[i]));
  }
  int rc = apq_reserve(&c->staging, staged, "copies of unaligned tensors");
  if (rc == APQ_OK) rc = apq_reserve(&c->arena, p->arena, "working memory");
  if (rc != APQ_OK) return rc;
  unsigned char *next = c->staging.data;
  for (int32_t i = 0; i < m->num_inputs; i++) {
    const DLTensor *t = &inputs[i];
    c->inputs[i] = apq_address(t);
    if (ready_to_use(t) || apq_bytes_of(t) == 0) continue;
    if (apq_contiguous(t)) {
      memcpy(next, apq_address(t), apq_bytes_of(t));
    } else {
      (void)apq_gather(next, apq_address(t), t, 0);
    }
    c->inputs[i] = next;
    next = apq_past(next, apq_stage_of(t));
  }
  for (int32_t i = 0; i < m->num_outputs; i++) {
    if (m->outputs[i].late) continue;
    int ready = ready_to_use(&outputs[i]);
    c->outputs[i] = ready ? apq_address(&outputs[i]) : next;
    if (!ready) next = apq_past(next, apq_stage_of(&outputs[i]));
  }
  for (int32_t i = 0; i < m->segments[1]; i++) c->buffers[i] = apq_past(c->arena.data, p->offsets[i]);
  apq_place_kept(c);
  if (c->session != NULL) apq_place_caches(c);
  return APQ_OK;
}

int apq_plan_again(const apq_frame *frame, int32_t segment, const size_t *bytes) {
  apq_context *c = frame->context;
  const apq_module *m = c->handle->module;
  int32_t first = m->segments[segment], count = m->segments[segment + 1] - first;
  size_t arena = apq_plan(count, m->lifetimes + first, bytes, c->offsets, c->order);
  int rc = apq_reserve(&c->late[segment], arena, "working memory");
  if (rc != APQ_OK) return rc;
  for (int32_t i = 0; i < count; i++) {
    c->last->bytes[first + i] = bytes[i];
    c->buffers[first + i] = apq_past(c->late[segment].data, c->offsets[i]);
  }
  return APQ_OK;
}

int apq_check_place(const apq_handle *h, const char *kind, const char *name, const DLTensor *t) {
  (void)h;
  if (t->device.device_type == kDLCPU || t->device.device_type == kDLCUDAHost) return APQ_OK;
  return apq_fail(APQ_BAD_INPUT, "%s '%s' is on DLPack device type %d, wanted memory of the CPU", kind, name,
                  (int)t->device.device_type);
}

int apq_run_plan(apq_context *c, plan *p, const DLTensor *inputs, const DLTensor *outputs) {
  const apq_module *m = c->handle->module;
  int rc = place(c, p, inputs, outputs);
  if (rc != APQ_OK) return rc;
  c->last = p;
  p->ran = c->runs;
  c->finished = 0;
  memset(c->sizes, 0, 8 * (size_t)m->num_sizes);
  apq_frame frame = {p->symbols, c->inputs, c->outputs, c->buffers, c->handle->weights.data, c->bits,
                     c->threads, c->sizes, c->results, c->result_dims, c, p->first_stage, p->end_stage};
  apq_crew before = apq_threads_begin(c->handle, c->threads);
  rc = m->graph(&frame);
  apq_threads_end(&before);
  c->finished = rc == APQ_OK;
  for (int32_t i = 0; rc == APQ_OK && i < m->num_outputs; i++) {
    const DLTensor *t = &outputs[i];
    if (m->outputs[i].late) continue;
    size_t bytes = apq_bytes_of(t);
    if (bytes > 0 && c->outputs[i] != apq_address(t)) memcpy(apq_address(t), c->outputs[i], bytes);
  }
  return rc;
}

/* ---- what the graph calls ---- */

int apq_call(const apq_frame *frame, const char *name, apq_kernel kernel, const apq_any *args,
             int32_t num_args, double work, double products) {
  apq_context *c = frame->context;
  apq_set_work(work);
  apq_any result = {0, 0, {0}};
  uint64_t begin = c->profile == NULL ? 0 : apq_now();
  if (kernel(NULL, args, num_args, &result) != 0) {
    return apq_fail(APQ_KERNEL_FAILED, "kernel %s failed: %s", name, apq_last_error());
  }
  return c->profile == NULL ? APQ_OK : apq_profile_call(c, name, begin, args, num_args, products, apq_shared_by());
}

int apq_copy(const apq_frame *frame, void *to, const void *from, size_t bytes) {
  (void)frame;
  if (bytes > 0) memcpy(to, from, bytes); /* NULL, where there are none */
  return APQ_OK;
}

int apq_clear(const apq_frame *frame, void *to, size_t bytes) {
  (void)frame;
  if (bytes > 0) memset(to, 0, bytes);
  return APQ_OK;
}

int apq_set_round(const apq_frame *frame, void *counter, int64_t number) {
  (void)frame;
  memcpy(counter, &number, sizeof number);
  return APQ_OK;
}

static int64_t id_at(const DLTensor *ids, int64_t i) {
  if (ids->dtype.bits == 64) return ((const int64_t *)ids->data)[i];
  return ((const int32_t *)ids->data)[i];
}

int apq_check_ids(const apq_frame *frame, const char *layer, const DLTensor *ids, int64_t first,
                  int64_t step, int64_t lowest, int64_t rows) {
  int64_t count = 1, bad = 0;
  (void)frame;
  for (int32_t i = 0; i < ids->ndim; i++) count *= ids->shape[i];
  for (int64_t i = first; i < count; i += step) {
    int64_t id = id_at(ids, i);
    bad += id < lowest || id >= rows;
  }
  if (bad == 0) return APQ_OK;
  for (int64_t i = first;; i += step) {
    int64_t id = id_at(ids, i);
    if (id < lowest || id >= rows) {
      return apq_fail(APQ_BAD_INPUT,
                      "layer %s: id %lld (element %lld) is outside its table of %lld rows; %lld of %lld "
                      "ids are",
                      layer, (long long)id, (long long)i, (long long)rows, (long long)bad,
                      (long long)(count / step));
    }
  }
}
