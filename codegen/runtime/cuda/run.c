/* Runs on a GPU: copies in, one launch of a captured graph, copies out.
 *
 * The graph's calls are captured once for each plan and choice of bits, and place of tensors; what else they
 * point to, the arena and the staging block, stays where it is until it has to grow, and then the graphs go. */
#include <stdio.h>
#include <stdlib.h>

#include "apq_cuda.h"

enum { NON_BLOCKING = 1, CAPTURE_RELAXED = 2 };

/* ---- a context ---- */

int apq_context_open(apq_context *c) {
  apq_device *d = c->handle->device;
  int rc = apq_enter(d);
  if (rc != APQ_OK) return rc;
  struct apq_stream *s = c->stream = calloc(1, sizeof *s);
  if (s == NULL) {
    rc = apq_fail(APQ_NO_MEMORY, "lib%s: no memory for a context", c->handle->module->name);
  } else {
    apq_result_code result = d->cu->stream_create(&s->stream, NON_BLOCKING);
    rc = result == 0 ? APQ_OK : apq_device_fail(d, result, "cuStreamCreate");
    s->queue = s->stream;
    if (rc == APQ_OK) rc = apq_gpu_alloc(d, sizeof(apq_found_ids), "a context", &s->found);
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
  struct apq_stream *s = c->stream;
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

int apq_grow(apq_context *c, region *r, size_t bytes, const char *what) {
  apq_device *d = c->handle->device;
  if (bytes <= r->bytes) return APQ_OK;
  apq_pointer fresh = 0;
  apq_plan_dropped(c, NULL);
  free_region(d, r);
  int rc = apq_gpu_alloc(d, bytes, what, &fresh);
  if (rc != APQ_OK) return rc;
  r->data = (unsigned char *)(uintptr_t)fresh;
  r->bytes = bytes;
  return APQ_OK;
}

/* ---- graphs ---- */

/* Everything that a captured run holds: what it points to, and bits. */
static int is_of(const apq_context *c, const plan *p, const apq_graph *g) {
  const apq_module *m = c->handle->module;
  return g->of == p && memcmp(g->bits, c->bits, sizeof(int32_t) * (size_t)m->num_precisions) == 0 &&
         memcmp(g->tensors, c->inputs, sizeof(void *) * (size_t)m->num_inputs) == 0 &&
         memcmp(g->tensors + m->num_inputs, c->outputs, sizeof(void *) * (size_t)m->num_outputs) == 0;
}

static apq_graph *new_graph(const apq_context *c, const plan *p) {
  const apq_module *m = c->handle->module;
  size_t tensors = (size_t)(m->num_inputs + m->num_outputs);
  apq_graph *g = calloc(1, sizeof *g + tensors * sizeof(void *) + sizeof(int32_t) * (size_t)m->num_precisions);
  if (g == NULL) {
    (void)apq_fail(APQ_NO_MEMORY, "no memory for a graph");
    return NULL;
  }
  g->of = p;
  g->tensors = (void **)(g + 1);
  g->bits = (int32_t *)(g->tensors + tensors);
  memcpy(g->tensors, c->inputs, sizeof(void *) * (size_t)m->num_inputs);
  memcpy(g->tensors + m->num_inputs, c->outputs, sizeof(void *) * (size_t)m->num_outputs);
  memcpy(g->bits, c->bits, sizeof(int32_t) * (size_t)m->num_precisions);
  return g;
}

/* The graph of this run, which may be new: then `exec` is NULL. */
static apq_graph *find_graph(apq_context *c, const plan *p) {
  apq_graph **oldest = &c->stream->graphs[0];
  if (c->session != NULL) { /* each of its runs is another: what is kept of one is its checks */
    if (*oldest == NULL) *oldest = new_graph(c, NULL);
    return *oldest;
  }
  for (int i = 0; i < APQ_GRAPHS; i++) {
    apq_graph **at = &c->stream->graphs[i];
    if (*at == NULL) {
      oldest = at;
      break;
    }
    if (is_of(c, p, *at)) return *at;
    if ((*at)->used < (*oldest)->used) oldest = at;
  }
  drop_graph(c->handle->device, oldest);
  return *oldest = new_graph(c, p);
}

/* The module's kernels, to `stream`. */
static int call_kernels(apq_context *c, const plan *p, apq_graph *g, void *stream) {
  apq_device *d = c->handle->device;
  struct apq_stream *s = c->stream;
  unsigned char *weights = (unsigned char *)(uintptr_t)d->weights;
  apq_frame frame = {p->symbols, c->inputs, c->outputs, c->buffers, weights, c->bits,
                     1, c->sizes, c->results, c->result_dims, c, p->first_stage, p->end_stage};
  for (int i = 0; i < APQ_BLOCKS; i++) s->blocks[i].used = 0;
  g->num_checks = 0;
  s->calling = g;
  s->now = stream;
  apq_launch_on(c);
  apq_result_code result = d->cu->set(s->found, 0, sizeof(apq_found_ids) / 4, stream);
  int rc = result == 0 ? c->handle->module->graph(&frame) : apq_device_fail(d, result, "cuMemsetD32Async");
  apq_launch_on(NULL);
  s->calling = NULL;
  return rc;
}

static int capture(apq_context *c, const plan *p, apq_graph *g) {
  apq_device *d = c->handle->device;
  void *own = c->stream->stream, *graph = NULL;
  apq_result_code result = d->cu->capture(own, CAPTURE_RELAXED);
  if (result != 0) return apq_device_fail(d, result, "cuStreamBeginCapture");
  int rc = call_kernels(c, p, g, own);
  result = d->cu->captured(own, &graph);
  if (rc == APQ_OK && result == 0) result = d->cu->instantiate(&g->exec, graph, 0);
  if (graph != NULL) (void)d->cu->graph_destroy(graph);
  if (rc == APQ_OK && result != 0) rc = apq_device_fail(d, result, "capturing the graph");
  return rc;
}

/* ---- runs ---- */

static int bad_ids(const apq_graph *g, const apq_found_ids *found) {
  const apq_check *check = &g->checks[found->number - 1];
  return apq_fail(APQ_BAD_INPUT,
                  "layer %s: id %lld (element %lld) is outside its table of %lld rows; %lld of %lld ids are",
                  check->layer, (long long)found->id, (long long)found->first, (long long)check->rows,
                  (long long)found->bad, (long long)check->count);
}

/* Kernels, by the graph or one by one. A program's own tensors may lie elsewhere in every run: what they
 * are part of is worth a graph when it comes the second time. A session's runs have another length each: to
 * capture one would cost more than its calls. */
static int launch(apq_context *c, const plan *p, apq_graph *g, int in_place) {
  apq_device *d = c->handle->device;
  struct apq_stream *s = c->stream;
  if (c->session != NULL || (g->exec == NULL && in_place && g->used == 0)) return call_kernels(c, p, g, s->queue);
  int rc = g->exec == NULL ? capture(c, p, g) : APQ_OK;
  if (rc != APQ_OK) return rc;
  apq_result_code result = d->cu->graph_launch(g->exec, s->queue);
  return result == 0 ? APQ_OK : apq_device_fail(d, result, "cuGraphLaunch");
}

/* Waits for the run's end; found ids are the last word on it. */
static int finish(apq_context *c, const apq_graph *g) {
  apq_device *d = c->handle->device;
  apq_found_ids found = {0, 0, 0, 0};
  apq_result_code result = d->cu->download(&found, c->stream->found, sizeof found, c->stream->queue);
  if (result == 0) result = d->cu->synchronize(c->stream->queue);
  if (result != 0) return apq_device_fail(d, result, "the run");
  return found.number > 0 ? bad_ids(g, &found) : APQ_OK;
}

int apq_run_plan(apq_context *c, plan *p, const DLTensor *inputs, const DLTensor *outputs) {
  apq_device *d = c->handle->device;
  apq_graph *g = NULL;
  int in_place = 0, rc = apq_enter(d);
  if (rc != APQ_OK) return rc;
  c->last = p;
  c->finished = 0;
  rc = apq_place(c, p, inputs, outputs, &in_place);
  if (rc == APQ_OK && (g = find_graph(c, p)) == NULL) rc = APQ_NO_MEMORY;
  if (rc == APQ_OK) rc = apq_copy_in(c, inputs);
  if (rc == APQ_OK) rc = launch(c, p, g, in_place);
  if (rc == APQ_OK) rc = apq_copy_out(c, outputs);
  if (rc == APQ_OK) rc = finish(c, g);
  if (g != NULL) g->used = c->runs;
  apq_leave(d);
  c->finished = rc == APQ_OK;
  return rc;
}

int apq_run_images(apq_context *c, plan *p, const DLTensor *inputs, const DLTensor *outputs) {
  return apq_run_plan(c, p, inputs, outputs);
}

int apq_images_memory(apq_context *c, uint64_t *arena_bytes, uint64_t *live_bytes) {
  (void)c, (void)arena_bytes, (void)live_bytes;
  return APQ_OK;
}

int apq_set_stream(apq_context *context, void *stream) {
  if (context == NULL) return apq_fail(APQ_BAD_INPUT, "the context is NULL");
  context->stream->queue = stream == NULL ? context->stream->stream : stream;
  return APQ_OK;
}

void *apq_stream(const apq_context *context) { return context == NULL ? NULL : context->stream->queue; }

/* ---- profiles: a run is one launch of a graph, whose kernels NVIDIA's own tools time ---- */

void apq_profile_restart(apq_profile *p) { (void)p; }

static int no_profile(const apq_context *c) {
  if (c == NULL) return apq_fail(APQ_BAD_INPUT, "the context is NULL");
  return apq_fail(APQ_BAD_INPUT, "kernels of a GPU are not profiled by the module: nsys and ncu do that");
}

int apq_set_profile(apq_context *c, int32_t on) { return c != NULL && !on ? APQ_OK : no_profile(c); }

int apq_profile_of(apq_context *c, const apq_profiled **calls, int32_t *count) {
  (void)calls, (void)count;
  return no_profile(c);
}

/* ---- what the graph calls ---- */

int apq_call(const apq_frame *frame, const char *name, apq_kernel kernel, const apq_any *args, int32_t num_args,
             double work, double products) {
  (void)frame, (void)work, (void)products;
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
  apq_result_code rc = d->cu->copy((apq_pointer)(uintptr_t)to, (apq_pointer)(uintptr_t)from, bytes, c->stream->now);
  return rc == 0 ? APQ_OK : apq_device_fail(d, rc, "a copy between tensors");
}

int apq_clear(const apq_frame *frame, void *to, size_t bytes) {
  apq_context *c = frame->context;
  apq_device *d = c->handle->device;
  if (bytes == 0) return APQ_OK;
  apq_result_code rc = d->cu->set((apq_pointer)(uintptr_t)to, 0, bytes / 4, c->stream->now);
  return rc == 0 ? APQ_OK : apq_device_fail(d, rc, "clearing a tensor");
}

/* The upper half stays what the first round made it: 0. */
int apq_set_round(const apq_frame *frame, void *counter, int64_t number) {
  apq_context *c = frame->context;
  apq_device *d = c->handle->device;
  apq_result_code rc = d->cu->set((apq_pointer)(uintptr_t)counter, (unsigned)number, number == 0 ? 2 : 1, c->stream->now);
  return rc == 0 ? APQ_OK : apq_device_fail(d, rc, "a loop's counter");
}

/* The number of a check, which rounds of a loop share; 0 if there are too many. */
static int32_t number_of_check(apq_graph *g, apq_check check) {
  for (int32_t i = 0; i < g->num_checks; i++) {
    const apq_check *other = &g->checks[i];
    if (other->layer == check.layer && other->rows == check.rows && other->count == check.count) return i + 1;
  }
  if (g->num_checks == APQ_CHECKS) return 0;
  g->checks[g->num_checks++] = check;
  return g->num_checks;
}

/* Ids are checked where they lie, by a kernel (device/check_ids.cuh); a run tells at its end. */
int apq_check_ids(const apq_frame *frame, const char *layer, const DLTensor *ids, int64_t first, int64_t step,
                  int64_t lowest, int64_t rows) {
  apq_context *c = frame->context;
  apq_device *d = c->handle->device;
  apq_graph *g = c->stream->calling;
  const struct apq_device_code *code = c->handle->module->code;
  int64_t count = 1, wide = ids->dtype.bits == 64;
  for (int32_t i = 0; i < ids->ndim; i++) count *= ids->shape[i];
  if (count == 0) return APQ_OK;
  int64_t number = number_of_check(g, (apq_check){layer, rows, count / step});
  if (number == 0) {
    return apq_fail(APQ_KERNEL_FAILED, "layer %s: more than %d layers look up ids", layer, APQ_CHECKS);
  }
  void *args[] = {(void *)(uintptr_t)&ids->data, &wide, &count, &first, &step, &lowest, &rows, &number, &c->stream->found};
  apq_result_code rc = d->cu->launch(d->functions[code->num_kernels - 1], 1, 1, 1, 256, 1, 1, 0, c->stream->now,
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
