/* Runs on a GPU: copies in, one launch of a captured graph, copies out.
 *
 * The graph's calls are captured once for each plan and choice of bits; what they point to, the arena and
 * the staging block, stays where it is until it has to grow, and then the graphs go. */
#include <stdio.h>
#include <stdlib.h>

#include "apq_cuda.h"

enum { NON_BLOCKING = 1, CAPTURE_RELAXED = 2 };

/* ---- a context ---- */

int apq_context_open(apq_context *c) {
  apq_device *d = c->handle->device;
  int rc = apq_enter(d);
  if (rc != APQ_OK) return rc;
  apq_stream *s = c->stream = calloc(1, sizeof *s);
  if (s == NULL) {
    rc = apq_fail(APQ_NO_MEMORY, "lib%s: no memory for a context", c->handle->module->name);
  } else {
    apq_result_code result = d->cu->stream_create(&s->stream, NON_BLOCKING);
    rc = result == 0 ? APQ_OK : apq_device_fail(d, result, "cuStreamCreate");
    if (rc == APQ_OK) rc = apq_device_alloc(d, sizeof(apq_found_ids), "a context", &s->found);
  }
  apq_leave(d);
  return rc;
}

static void drop_graph(apq_device *d, apq_graph **at) {
  if (*at == NULL) return;
  if ((*at)->exec != NULL) (void)d->cu->exec_destroy((*at)->exec);
  free(*at);
  *at = NULL;
}

void apq_plan_dropped(apq_context *c, const plan *p) {
  apq_device *d = c->handle->device;
  if (apq_enter(d) != APQ_OK) return;
  for (int i = 0; i < APQ_GRAPHS; i++) {
    if (c->stream->graphs[i] != NULL && (p == NULL || c->stream->graphs[i]->of == p)) {
      drop_graph(d, &c->stream->graphs[i]);
    }
  }
  apq_leave(d);
}

static void free_region(apq_device *d, region *r) {
  if (r->data != NULL) (void)d->cu->free((apq_pointer)(uintptr_t)r->data);
  r->data = NULL;
  r->bytes = 0;
}

void apq_context_close(apq_context *c) {
  apq_device *d = c->handle->device;
  apq_stream *s = c->stream;
  if (s == NULL) return;
  if (apq_enter(d) == APQ_OK) {
    if (s->stream != NULL) (void)d->cu->synchronize(s->stream);
    for (int i = 0; i < APQ_GRAPHS; i++) drop_graph(d, &s->graphs[i]);
    for (int i = 0; i < APQ_BLOCKS; i++) {
      if (s->blocks[i].data != 0) (void)d->cu->free(s->blocks[i].data);
    }
    if (s->found != 0) (void)d->cu->free(s->found);
    free_region(d, &c->arena);
    free_region(d, &c->staging);
    if (s->stream != NULL) (void)d->cu->stream_destroy(s->stream);
    apq_leave(d);
  }
  free(s->packed);
  free(s);
}

static int grow(apq_context *c, region *r, size_t bytes, const char *what) {
  apq_device *d = c->handle->device;
  if (bytes <= r->bytes) return APQ_OK;
  apq_pointer fresh = 0;
  apq_plan_dropped(c, NULL);
  free_region(d, r);
  int rc = apq_device_alloc(d, bytes, what, &fresh);
  if (rc != APQ_OK) return rc;
  r->data = (unsigned char *)(uintptr_t)fresh;
  r->bytes = bytes;
  return APQ_OK;
}

/* ---- where tensors lie ---- */

static int place(apq_context *c, const plan *p, const DLTensor *inputs, const DLTensor *outputs) {
  const apq_module *m = c->handle->module;
  size_t staged = 0;
  for (int32_t i = 0; i < m->num_inputs; i++) staged = apq_sum(staged, apq_stage_of(&inputs[i]));
  for (int32_t i = 0; i < m->num_outputs; i++) staged = apq_sum(staged, apq_stage_of(&outputs[i]));
  int rc = grow(c, &c->staging, staged, "inputs and outputs");
  if (rc == APQ_OK) rc = grow(c, &c->arena, p->arena, "working memory");
  if (rc != APQ_OK) return rc;
  unsigned char *next = c->staging.data;
  for (int32_t i = 0; i < m->num_inputs; i++) {
    c->inputs[i] = next;
    next = apq_past(next, apq_stage_of(&inputs[i]));
  }
  for (int32_t i = 0; i < m->num_outputs; i++) {
    c->outputs[i] = next;
    next = apq_past(next, apq_stage_of(&outputs[i]));
  }
  for (int32_t i = 0; i < m->num_buffers; i++) c->buffers[i] = apq_past(c->arena.data, p->offsets[i]);
  return APQ_OK;
}

/* An input of any strides, contiguous in the host's memory. */
static int pack(apq_stream *s, const DLTensor *t, const unsigned char **from) {
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

static int copy_in(apq_context *c, const DLTensor *inputs) {
  apq_device *d = c->handle->device;
  for (int32_t i = 0; i < c->handle->module->num_inputs; i++) {
    const unsigned char *from;
    size_t bytes = apq_bytes_of(&inputs[i]);
    if (bytes == 0) continue;
    int rc = pack(c->stream, &inputs[i], &from);
    if (rc != APQ_OK) return rc;
    apq_result_code result = d->cu->upload((apq_pointer)(uintptr_t)c->inputs[i], from, bytes, c->stream->stream);
    /* The copy of a strided input is written over for the next one. */
    if (result == 0 && from == c->stream->packed) result = d->cu->synchronize(c->stream->stream);
    if (result != 0) return apq_device_fail(d, result, "copying an input");
  }
  return APQ_OK;
}

static int copy_out(apq_context *c, const DLTensor *outputs, apq_found_ids *found) {
  apq_device *d = c->handle->device;
  void *stream = c->stream->stream;
  apq_result_code rc = d->cu->download(found, c->stream->found, sizeof *found, stream);
  for (int32_t i = 0; rc == 0 && i < c->handle->module->num_outputs; i++) {
    size_t bytes = apq_bytes_of(&outputs[i]);
    if (bytes == 0) continue;
    rc = d->cu->download(apq_address(&outputs[i]), (apq_pointer)(uintptr_t)c->outputs[i], bytes, stream);
  }
  if (rc == 0) rc = d->cu->synchronize(stream);
  return rc == 0 ? APQ_OK : apq_device_fail(d, rc, "the run");
}

/* ---- graphs ---- */

static apq_graph **find_graph(apq_context *c, const plan *p) {
  size_t bytes = sizeof(int32_t) * (size_t)c->handle->module->num_precisions;
  apq_graph **oldest = &c->stream->graphs[0];
  for (int i = 0; i < APQ_GRAPHS; i++) {
    apq_graph **at = &c->stream->graphs[i];
    if (*at == NULL) return at;
    if ((*at)->of == p && memcmp((*at)->bits, c->bits, bytes) == 0) return at;
    if ((*at)->used < (*oldest)->used) oldest = at;
  }
  drop_graph(c->handle->device, oldest);
  return oldest;
}

static int capture(apq_context *c, plan *p, apq_graph *g) {
  const apq_module *m = c->handle->module;
  apq_device *d = c->handle->device;
  apq_stream *s = c->stream;
  unsigned char *weights = (unsigned char *)(uintptr_t)d->weights;
  apq_frame frame = {p->symbols, c->inputs, c->outputs, c->buffers, weights, c->bits,
                     1, c->sizes, c->results, c->result_dims, c};
  void *graph = NULL;
  apq_result_code result = d->cu->capture(s->stream, CAPTURE_RELAXED);
  if (result != 0) return apq_device_fail(d, result, "cuStreamBeginCapture");
  for (int i = 0; i < APQ_BLOCKS; i++) s->blocks[i].used = 0;
  s->capturing = g;
  apq_launch_on(c);
  result = d->cu->set(s->found, 0, sizeof(apq_found_ids) / 4, s->stream);
  int rc = result == 0 ? m->graph(&frame) : apq_device_fail(d, result, "cuMemsetD32Async");
  apq_launch_on(NULL);
  s->capturing = NULL;
  result = d->cu->captured(s->stream, &graph);
  if (rc == APQ_OK && result == 0) result = d->cu->instantiate(&g->exec, graph, 0);
  if (graph != NULL) (void)d->cu->graph_destroy(graph);
  if (rc == APQ_OK && result != 0) rc = apq_device_fail(d, result, "capturing the graph");
  return rc;
}

static int graph_of(apq_context *c, plan *p, apq_graph **out) {
  size_t bits = sizeof(int32_t) * (size_t)c->handle->module->num_precisions;
  apq_graph **at = find_graph(c, p);
  if (*at == NULL) {
    apq_graph *g = calloc(1, sizeof *g + bits);
    if (g == NULL) return apq_fail(APQ_NO_MEMORY, "no memory for a graph");
    g->of = p;
    g->bits = (int32_t *)(g + 1);
    memcpy(g->bits, c->bits, bits);
    int rc = capture(c, p, g);
    if (rc != APQ_OK) {
      drop_graph(c->handle->device, &g);
      return rc;
    }
    *at = g;
  }
  (*at)->used = c->runs;
  *out = *at;
  return APQ_OK;
}

static int bad_ids(const apq_graph *g, const apq_found_ids *found) {
  const apq_check *check = &g->checks[found->number - 1];
  return apq_fail(APQ_BAD_INPUT,
                  "layer %s: id %lld (element %lld) is outside its table of %lld rows; %lld of %lld ids are",
                  check->layer, (long long)found->id, (long long)found->first, (long long)check->rows,
                  (long long)found->bad, (long long)check->count);
}

int apq_run_plan(apq_context *c, plan *p, const DLTensor *inputs, const DLTensor *outputs) {
  apq_device *d = c->handle->device;
  apq_graph *g = NULL;
  apq_found_ids found = {0, 0, 0, 0};
  int rc = apq_enter(d);
  if (rc != APQ_OK) return rc;
  c->last = p;
  c->finished = 0;
  rc = place(c, p, inputs, outputs);
  if (rc == APQ_OK) rc = graph_of(c, p, &g);
  if (rc == APQ_OK) rc = copy_in(c, inputs);
  if (rc == APQ_OK) {
    apq_result_code result = d->cu->graph_launch(g->exec, c->stream->stream);
    rc = result == 0 ? APQ_OK : apq_device_fail(d, result, "cuGraphLaunch");
  }
  if (rc == APQ_OK) rc = copy_out(c, outputs, &found);
  if (rc == APQ_OK && found.number > 0) rc = bad_ids(g, &found);
  apq_leave(d);
  c->finished = rc == APQ_OK;
  return rc;
}

/* ---- what the graph calls ---- */

int apq_call(const apq_frame *frame, const char *name, apq_kernel kernel, const apq_any *args, int32_t num_args,
             double work) {
  (void)frame, (void)work;
  apq_any result = {0, 0, {0}};
  if (kernel(NULL, args, num_args, &result) == 0) return APQ_OK;
  char why[256];
  snprintf(why, sizeof why, "%s", apq_last_error());
  return apq_fail(APQ_KERNEL_FAILED, "kernel %s failed: %s", name, why);
}

int apq_copy(const apq_frame *frame, void *to, const void *from, size_t bytes) {
  apq_context *c = frame->context;
  apq_device *d = c->handle->device;
  if (bytes == 0) return APQ_OK;
  apq_result_code rc = d->cu->copy((apq_pointer)(uintptr_t)to, (apq_pointer)(uintptr_t)from, bytes, c->stream->stream);
  return rc == 0 ? APQ_OK : apq_device_fail(d, rc, "a copy between tensors");
}

/* Ids are checked where they lie, by a kernel (device/check_ids.cuh); a run tells at its end. */
int apq_check_ids(const apq_frame *frame, const char *layer, const DLTensor *ids, int64_t first, int64_t step,
                  int64_t lowest, int64_t rows) {
  apq_context *c = frame->context;
  apq_device *d = c->handle->device;
  apq_graph *g = c->stream->capturing;
  const struct apq_device_code *code = c->handle->module->code;
  int64_t count = 1, wide = ids->dtype.bits == 64;
  for (int32_t i = 0; i < ids->ndim; i++) count *= ids->shape[i];
  if (count == 0) return APQ_OK;
  if (g->num_checks == APQ_CHECKS) {
    return apq_fail(APQ_KERNEL_FAILED, "layer %s: more than %d layers look up ids", layer, APQ_CHECKS);
  }
  g->checks[g->num_checks++] = (apq_check){layer, rows, count / step};
  int64_t number = g->num_checks;
  void *args[] = {(void *)(uintptr_t)&ids->data, &wide, &count, &first, &step, &lowest, &rows, &number, &c->stream->found};
  apq_result_code rc = d->cu->launch(d->functions[code->num_kernels - 1], 1, 1, 1, 256, 1, 1, 0, c->stream->stream,
                                     args, NULL);
  return rc == 0 ? APQ_OK : apq_device_fail(d, rc, "checking ids");
}

int apq_plan_again(const apq_frame *frame, int32_t segment, const size_t *bytes) {
  (void)frame, (void)segment, (void)bytes;
  return apq_fail(APQ_KERNEL_FAILED, "sizes that data give are not for GPUs");
}

/* ---- threads, which a GPU's runs have none of ---- */

int apq_has_openmp(void) { return 0; }
int32_t apq_default_threads(void) { return 1; }
int32_t apq_usable_threads(int32_t threads) {
  (void)threads;
  return 1;
}
