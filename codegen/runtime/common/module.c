/* Handles own weights, contexts own memory; a run checks its arguments, plans and runs the graph. */
#include <stdio.h>
#include <stdlib.h>

#include "apq_context.h"

/* ---- handle ---- */

int apq_open(const apq_module *const *modules, const char *weights_path, int32_t device, apq_handle **out) {
  const apq_module *m;
  if (out == NULL) return apq_null("where the handle is to be written");
  *out = NULL;
  if (weights_path == NULL) return apq_null("the path of the weights file");
  int rc = apq_choose(modules, device, &m);
  if (rc != APQ_OK) return rc;
  apq_handle *h = calloc(1, sizeof *h + (size_t)m->num_precisions * sizeof(atomic_int));
  if (h == NULL) return apq_fail(APQ_NO_MEMORY, "lib%s: no memory for a handle", m->name);
  h->module = m;
  h->bits = (atomic_int *)(h + 1);
  for (int32_t i = 0; i < m->num_precisions; i++) atomic_init(&h->bits[i], m->precisions[i].most);
  rc = apq_weights_open(m, weights_path, &h->weights);
  if (rc != APQ_OK) {
    free(h);
    return rc;
  }
  rc = apq_handle_open(h, device);
  if (rc != APQ_OK) {
    apq_close(h);
    return rc;
  }
  *out = h;
  return APQ_OK;
}

void apq_close(apq_handle *h) {
  if (h == NULL) return;
  apq_handle_close(h);
  apq_weights_close(&h->weights);
  free(h);
}

const char *apq_target(const apq_handle *h) {
  if (h != NULL) return h->module->target;
  (void)apq_null("the handle");
  return "";
}

int32_t apq_rank(const apq_handle *h, int32_t of_output, int32_t index) {
  if (h == NULL) return apq_null("the handle");
  const apq_module *m = h->module;
  if (index < 0 || index >= (of_output ? m->num_outputs : m->num_inputs)) return -1;
  return (of_output ? m->outputs : m->inputs)[index].ndim;
}

int apq_verify(const apq_handle *h) {
  if (h == NULL) return apq_null("the handle");
  const apq_module *m = h->module;
  uint64_t sum = apq_checksum(h->weights.data + m->header_bytes, h->weights.bytes - m->header_bytes);
  if (sum == m->data_checksum) return APQ_OK;
  return apq_fail(APQ_BAD_WEIGHTS, "the weights of %s were altered: checksum %016llx, expected %016llx",
                  m->name, (unsigned long long)sum, (unsigned long long)m->data_checksum);
}

int apq_set_num_threads(apq_handle *h, int32_t threads) {
  if (h == NULL) return apq_null("the handle");
  if (threads < 1 || threads > APQ_MAX_THREADS) {
    return apq_fail(APQ_BAD_INPUT, "number of threads is %d, wanted 1 to %d", (int)threads,
                    APQ_MAX_THREADS);
  }
  atomic_store(&h->threads, threads);
  return APQ_OK;
}

int32_t apq_num_threads(const apq_handle *h) {
  if (h == NULL) return apq_null("the handle");
  int32_t threads = atomic_load(&((apq_handle *)(uintptr_t)h)->threads);
  return h->parallel != NULL ? threads : apq_usable_threads(threads);
}

int apq_set_parallel(apq_handle *h, apq_parallel parallel, void *data) {
  if (h == NULL) return apq_null("the handle");
  h->parallel = parallel;
  h->parallel_data = data;
  return APQ_OK;
}

/* ---- bits at run time ---- */

static int check_bits(const apq_module *m, const apq_precision *p, int32_t bits) {
  if (bits >= p->least && bits <= p->most) return APQ_OK;
  return apq_fail(APQ_BAD_INPUT, "bits=%d: layer '%s' of %s has %d to %d", (int)bits, p->layer, m->name,
                  (int)p->least, (int)p->most);
}

/* Fails unless every layer that is meant (NULL: all) can have so many bits. */
static int check_all_bits(const apq_module *m, const char *layer, int32_t bits) {
  int32_t found = 0;
  for (int32_t i = 0; i < m->num_precisions; i++) {
    const apq_precision *p = &m->precisions[i];
    if (layer != NULL && strcmp(layer, p->layer) != 0) continue;
    int rc = check_bits(m, p, bits);
    if (rc != APQ_OK) return rc;
    found++;
  }
  if (found > 0) return APQ_OK;
  if (layer != NULL) {
    return apq_fail(APQ_BAD_INPUT, "%s has no layer '%s' whose bits can be chosen", m->name, layer);
  }
  return apq_fail(APQ_BAD_INPUT, "bits=%d: no layer of %s has bits to choose; compile it with a scheme such as anyprec3-8",
                  (int)bits, m->name);
}

int apq_set_precision(apq_handle *h, const char *layer, int32_t bits) {
  if (h == NULL) return apq_null("the handle");
  const apq_module *m = h->module;
  int rc = check_all_bits(m, layer, bits);
  if (rc != APQ_OK) return rc;
  for (int32_t i = 0; i < m->num_precisions; i++) {
    if (layer == NULL || strcmp(layer, m->precisions[i].layer) == 0) atomic_store(&h->bits[i], bits);
  }
  return APQ_OK;
}

int32_t apq_get_precision(const apq_handle *h, const char *layer) {
  if (h == NULL) return apq_null("the handle");
  if (layer == NULL) return apq_null("the layer's name");
  const apq_module *m = h->module;
  for (int32_t i = 0; i < m->num_precisions; i++) {
    if (strcmp(layer, m->precisions[i].layer) == 0) return atomic_load(&h->bits[i]);
  }
  return 0;
}

/* ---- context ---- */

/* Cuts `count` items of `size` bytes from a zeroed block; all sizes here are multiples of 4. */
static void *cut(unsigned char **at, int32_t count, size_t size) {
  void *taken = *at;
  *at += (size_t)count * size;
  return taken;
}

int apq_context_create(const apq_handle *h, apq_context **out) {
  if (out == NULL) return apq_null("where the context is to be written");
  *out = NULL;
  if (h == NULL) return apq_null("the handle");
  const apq_module *m = h->module;
  int32_t values = m->num_inputs + m->num_outputs + m->num_buffers;
  size_t plan_bytes = 8 * (size_t)(m->num_symbols + m->input_dims + m->output_dims) +
                      3 * sizeof(size_t) * (size_t)m->num_buffers +
                      sizeof(int32_t) * (size_t)m->num_stages;
  size_t total = sizeof(apq_context) + PLANS * plan_bytes + 8 * (size_t)m->num_symbols +
                 sizeof(void *) * (size_t)(values + m->num_outputs) +
                 sizeof(DLTensor) * (size_t)(m->num_inputs + m->num_outputs) +
                 8 * (size_t)(m->input_dims + m->output_dims) +
                 sizeof(region) * (size_t)m->num_segments + sizeof(size_t) * (size_t)m->num_buffers +
                 8 * (size_t)(m->num_sizes + m->output_dims) +
                 sizeof(int32_t) * (size_t)(2 * m->num_buffers + m->num_precisions);
  apq_context *c = *out = calloc(1, total);
  if (c == NULL) return apq_fail(APQ_NO_MEMORY, "lib%s: no memory for a context", m->name);
  c->handle = h;
  unsigned char *at = (unsigned char *)(c + 1);
  for (int32_t i = 0; i < PLANS; i++) {
    plan *p = &c->plans[i];
    p->symbols = cut(&at, m->num_symbols, 8);
    p->in_dims = cut(&at, m->input_dims, 8);
    p->out_dims = cut(&at, m->output_dims, 8);
    p->bytes = cut(&at, m->num_buffers, sizeof(size_t));
    p->offsets = cut(&at, m->num_buffers, sizeof(size_t));
    p->room = cut(&at, m->num_buffers, sizeof(size_t));
  }
  c->symbols = cut(&at, m->num_symbols, 8);
  c->inputs = cut(&at, m->num_inputs, sizeof(void *));
  c->outputs = cut(&at, m->num_outputs, sizeof(void *));
  c->buffers = cut(&at, m->num_buffers, sizeof(void *));
  c->results = cut(&at, m->num_outputs, sizeof(void *));
  c->parts = cut(&at, m->num_inputs + m->num_outputs, sizeof(DLTensor));
  c->part_dims = cut(&at, m->input_dims + m->output_dims, 8);
  c->late = cut(&at, m->num_segments, sizeof(region));
  c->offsets = cut(&at, m->num_buffers, sizeof(size_t));
  c->sizes = cut(&at, m->num_sizes, 8);
  c->result_dims = cut(&at, m->output_dims, 8);
  c->order = cut(&at, 2 * m->num_buffers, sizeof(int32_t));
  c->bits = cut(&at, m->num_precisions, sizeof(int32_t));
  for (int32_t i = 0; i < PLANS; i++) c->plans[i].at_once = cut(&at, m->num_stages, sizeof(int32_t));
  int rc = apq_context_open(c);
  if (rc != APQ_OK) {
    apq_context_destroy(c);
    *out = NULL;
  }
  return rc;
}

void apq_context_destroy(apq_context *c) {
  if (c == NULL) return;
  apq_context_close(c);
  free(c);
}

int apq_memory(apq_context *c, uint64_t *arena_bytes, uint64_t *live_bytes) {
  if (c == NULL) return apq_null("the context");
  if (arena_bytes == NULL || live_bytes == NULL) return apq_null("where bytes are to be written");
  const apq_module *m = c->handle->module;
  *arena_bytes = c->arena.bytes + c->staging.bytes;
  for (int32_t i = 0; i < m->num_segments; i++) *arena_bytes += c->late[i].bytes;
  *live_bytes = c->last == NULL ? 0 : apq_live_bytes(m->num_buffers, m->lifetimes, c->last->bytes);
  return apq_images_memory(c, arena_bytes, live_bytes);
}

/* ---- arguments ---- */

/* Writes "(2, 17)" or, with names, "(batch_size, 384)". */
static void write_shape(char *text, size_t size, int32_t ndim, const int64_t *dims,
                        const char *const *names) {
  size_t used = (size_t)snprintf(text, size, "(");
  for (int32_t i = 0; i < ndim && used < size; i++) {
    const char *comma = i == 0 ? "" : ", ";
    if (names != NULL) {
      used += (size_t)snprintf(text + used, size - used, "%s%s", comma, names[i]);
    } else {
      used += (size_t)snprintf(text + used, size - used, "%s%lld", comma, (long long)dims[i]);
    }
  }
  if (used < size) snprintf(text + used, size - used, ")");
}

static int bad_shape(const char *kind, const apq_value *want, const DLTensor *t, const char *why) {
  char got[256], wanted[512];
  write_shape(got, sizeof got, t->ndim, t->shape, NULL);
  write_shape(wanted, sizeof wanted, want->ndim, NULL, want->dims);
  return apq_fail(APQ_BAD_INPUT, "%s '%s' has shape %s, wanted %s%s", kind, want->name, got, wanted, why);
}

/* Type, device and rank: what does not depend on other tensors. */
static int check_tensor(const apq_handle *h, const char *kind, const apq_value *want, const DLTensor *t) {
  int rc = apq_check_place(h, kind, want->name, t);
  if (rc != APQ_OK) return rc;
  if (t->dtype.code != want->dtype.code || t->dtype.bits != want->dtype.bits || t->dtype.lanes != 1) {
    return apq_fail(APQ_BAD_INPUT, "%s '%s' has DLPack type code %d with %d bits, wanted code %d with %d",
                    kind, want->name, t->dtype.code, t->dtype.bits, want->dtype.code, want->dtype.bits);
  }
  if (t->shape == NULL && t->ndim > 0) {
    return apq_fail(APQ_BAD_INPUT, "%s '%s' has %d dimensions, but its shape is NULL", kind, want->name,
                    (int)t->ndim);
  }
  if (t->ndim != want->ndim) return bad_shape(kind, want, t, "");
  return APQ_OK;
}

/* What kernels never see: an input without memory, or of more bytes than can be counted (strides of 0
 * make any shape). */
static int check_memory(const apq_value *want, const DLTensor *t) {
  size_t bytes;
  for (int32_t i = 0; i < t->ndim; i++) {
    if (t->shape[i] < 0) return bad_shape("input", want, t, "; no dimension may be negative");
  }
  int rc = apq_bytes(&bytes, want->name, t->dtype.bits / 8, t->ndim, t->shape);
  if (rc != APQ_OK || bytes == 0) return rc;
  if (t->data == NULL) return apq_fail(APQ_BAD_INPUT, "input '%s' has no data", want->name);
  return APQ_OK;
}

static int check_dims(const char *kind, const apq_value *want, const DLTensor *t, const int64_t *dims) {
  for (int32_t i = 0; i < want->ndim; i++) {
    if (t->shape[i] != dims[i]) {
      char expected[256], why[320];
      write_shape(expected, sizeof expected, want->ndim, dims, NULL);
      snprintf(why, sizeof why, ", here %s", expected);
      return bad_shape(kind, want, t, why);
    }
  }
  return APQ_OK;
}

/* Another plan of a session's context in whose memory this one has room too: planning costs more than
 * a token's arithmetic, and caches grow by every token. The smallest such plan. */
static plan *roomy_plan(apq_context *c, const plan *p) {
  const apq_module *m = c->handle->module;
  plan *found = NULL;
  for (int32_t i = 0; i < PLANS; i++) {
    plan *q = &c->plans[i];
    int32_t b = 0;
    if (q == p || !q->ready || (found != NULL && found->arena <= q->arena)) continue;
    while (b < m->segments[1] && p->bytes[b] <= q->room[b]) b++;
    if (b == m->segments[1]) found = q;
  }
  return found;
}

/* A plan for `c->symbols`, with memory for the buffers that only these stages touch. */
static int make_plan(apq_context *c, int32_t first_stage, int32_t end_stage, plan *p) {
  const apq_module *m = c->handle->module;
  size_t count = (size_t)m->segments[1];
  int32_t first = m->stages[first_stage].first;
  int32_t end = end_stage < m->num_stages ? m->stages[end_stage].first : INT32_MAX;
  int rc = m->shapes(c->symbols, p->in_dims, p->out_dims, p->bytes);
  if (rc == APQ_OK && c->session != NULL) rc = apq_leave_caches(c, p->bytes);
  if (rc != APQ_OK) return rc;
  for (int32_t i = 0; i < m->segments[1]; i++) {
    if (m->lifetimes[i].first < first || m->lifetimes[i].last >= end) p->bytes[i] = 0;
  }
  p->first_stage = first_stage;
  p->end_stage = end_stage;
  p->measured = 0;
  p->ran = 0;
  plan *q = c->session != NULL ? roomy_plan(c, p) : NULL;
  if (q != NULL) {
    memcpy(p->offsets, q->offsets, count * sizeof *p->offsets);
    memcpy(p->room, q->room, count * sizeof *p->room);
    p->arena = q->arena;
    q->used = c->runs;
  } else {
    p->arena = apq_plan(m->segments[1], m->lifetimes, p->bytes, p->offsets, c->order);
    memcpy(p->room, p->bytes, count * sizeof *p->room);
  }
  memcpy(p->symbols, c->symbols, 8 * (size_t)m->num_symbols);
  p->ready = 1;
  return APQ_OK;
}

int apq_plan_symbols(apq_context *c, int32_t first_stage, int32_t end_stage, plan **out) {
  const apq_module *m = c->handle->module;
  plan *p = NULL, *oldest = &c->plans[0];
  for (int32_t i = 0; i < PLANS && p == NULL; i++) {
    plan *q = &c->plans[i];
    int same = q->first_stage == first_stage && q->end_stage == end_stage;
    if (q->ready && same && memcmp(q->symbols, c->symbols, 8 * (size_t)m->num_symbols) == 0) p = q;
    if (q->used < oldest->used) oldest = q;
  }
  c->runs++;
  if (p == NULL) {
    p = oldest;
    if (p->ready) apq_plan_dropped(c, p);
    p->ready = 0;
    if (c->last == p) c->last = NULL;
    int rc = make_plan(c, first_stage, end_stage, p);
    if (rc != APQ_OK) return rc;
  }
  p->used = c->runs;
  *out = p;
  return APQ_OK;
}

int apq_find_plan(apq_context *c, const DLTensor *inputs, int32_t first_stage, int32_t end_stage, plan **out) {
  const apq_module *m = c->handle->module;
  plan *p;
  int rc;
  if (inputs == NULL && m->num_inputs > 0) return apq_null("the array of inputs");
  for (int32_t i = 0; i < m->num_inputs; i++) {
    if ((rc = check_tensor(c->handle, "input", &m->inputs[i], &inputs[i])) != APQ_OK) return rc;
    if ((rc = check_memory(&m->inputs[i], &inputs[i])) != APQ_OK) return rc;
  }
  if (m->kept != NULL) {
    c->given[0] = 0;
    c->given[1] = inputs[m->kept->ids].shape[1];
  }
  for (int32_t i = 0; i < m->num_symbols; i++) {
    const apq_symbol *symbol = &m->symbols[i];
    c->symbols[i] = symbol->input < 0 ? c->given[symbol->axis] : inputs[symbol->input].shape[symbol->axis];
    if (c->symbols[i] > APQ_LARGEST_DIM) {
      return apq_fail(APQ_BAD_INPUT, "%s is %lld, no dimension may be larger than %d", m->symbols[i].name,
                      (long long)c->symbols[i], APQ_LARGEST_DIM);
    }
  }
  if ((rc = apq_plan_symbols(c, first_stage, end_stage, &p)) != APQ_OK) return rc;
  const int64_t *dims = p->in_dims;
  for (int32_t i = 0; i < m->num_inputs; dims += m->inputs[i].ndim, i++) {
    if ((rc = check_dims("input", &m->inputs[i], &inputs[i], dims)) != APQ_OK) return rc;
  }
  *out = p;
  return APQ_OK;
}

static int find_all(apq_context *c, const DLTensor *inputs, plan **out) {
  return apq_find_plan(c, inputs, 0, c->handle->module->num_stages, out);
}

/* Copies a tensor of any strides to contiguous memory; returns the end of what it wrote. */
unsigned char *apq_gather(unsigned char *to, const unsigned char *from, const DLTensor *t,
                          int32_t axis) {
  size_t item = t->dtype.bits / 8;
  if (axis == t->ndim) {
    memcpy(to, from, item);
    return to + item;
  }
  for (int64_t i = 0; i < t->shape[axis]; i++) {
    to = apq_gather(to, from + i * t->strides[axis] * (int64_t)item, t, axis + 1);
  }
  return to;
}

int apq_result(apq_context *c, int32_t index, DLTensor *result) {
  if (c == NULL) return apq_null("the context");
  if (result == NULL) return apq_null("where the result is to be written");
  const apq_module *m = c->handle->module;
  if (index < 0 || index >= m->num_outputs) {
    return apq_fail(APQ_BAD_INPUT, "output %d does not exist, %s has %d", (int)index, m->name,
                    (int)m->num_outputs);
  }
  const apq_value *value = &m->outputs[index];
  int64_t first = 0;
  for (int32_t i = 0; i < index; i++) first += m->outputs[i].ndim;
  if (!value->late) {
    return apq_fail(APQ_BAD_INPUT, "output '%s' is where _run was told to write it", value->name);
  }
  if (!c->finished) return apq_fail(APQ_BAD_INPUT, "output '%s': the last run did not succeed", value->name);
  *result = apq_tensor(c->results[index], value->dtype, value->ndim, c->result_dims + first);
  return APQ_OK;
}

int apq_output_shape(apq_context *c, const DLTensor *inputs, int32_t index, int64_t *shape) {
  if (c == NULL) return apq_null("the context");
  if (shape == NULL) return apq_null("where the shape is to be written");
  const apq_module *m = c->handle->module;
  if (index < 0 || index >= m->num_outputs) {
    return apq_fail(APQ_BAD_INPUT, "output %d does not exist, %s has %d", (int)index, m->name,
                    (int)m->num_outputs);
  }
  plan *p;
  int rc = find_all(c, inputs, &p);
  if (rc != APQ_OK) return rc;
  const int64_t *dims = p->out_dims;
  for (int32_t i = 0; i < index; i++) dims += m->outputs[i].ndim;
  memcpy(shape, dims, 8 * (size_t)m->outputs[index].ndim);
  return APQ_OK;
}

int apq_output_shapes(apq_context *c, const DLTensor *inputs, int64_t *shapes) {
  if (c == NULL) return apq_null("the context");
  const apq_module *m = c->handle->module;
  if (shapes == NULL && m->output_dims > 0) return apq_null("where the shapes are to be written");
  plan *p;
  int rc = find_all(c, inputs, &p);
  if (rc == APQ_OK && m->output_dims > 0) memcpy(shapes, p->out_dims, 8 * (size_t)m->output_dims);
  return rc;
}

static int check_outputs(const apq_handle *h, const plan *p, const DLTensor *outputs) {
  const apq_module *m = h->module;
  int rc;
  if (outputs == NULL && m->num_outputs > 0) return apq_null("the array of outputs");
  const int64_t *dims = p->out_dims;
  for (int32_t i = 0; i < m->num_outputs; dims += m->outputs[i].ndim, i++) {
    if (m->outputs[i].late) continue;
    if ((rc = check_tensor(h, "output", &m->outputs[i], &outputs[i])) != APQ_OK) return rc;
    if ((rc = check_dims("output", &m->outputs[i], &outputs[i], dims)) != APQ_OK) return rc;
    if (outputs[i].data == NULL && apq_bytes_of(&outputs[i]) > 0) {
      return apq_fail(APQ_BAD_INPUT, "output '%s' has no data", m->outputs[i].name);
    }
    if (!apq_contiguous(&outputs[i])) {
      return apq_fail(APQ_BAD_INPUT, "output '%s' is not contiguous", m->outputs[i].name);
    }
  }
  return APQ_OK;
}

int apq_take_bits(apq_context *c, int32_t bits) {
  const apq_module *m = c->handle->module;
  int rc = bits == 0 ? APQ_OK : check_all_bits(m, NULL, bits);
  for (int32_t i = 0; rc == APQ_OK && i < m->num_precisions; i++) {
    c->bits[i] = bits == 0 ? atomic_load(&c->handle->bits[i]) : bits;
  }
  return rc;
}

int apq_run(apq_context *c, const DLTensor *inputs, const DLTensor *outputs, int32_t bits) {
  if (c == NULL) return apq_null("the context");
  const apq_module *m = c->handle->module;
  plan *p;
  int rc = apq_take_bits(c, bits);
  if (rc == APQ_OK) rc = find_all(c, inputs, &p);
  if (rc != APQ_OK) return rc;
  if ((rc = check_outputs(c->handle, p, outputs)) != APQ_OK) return rc;
  if (c->profile != NULL) apq_profile_restart(c->profile);
  c->threads = apq_num_threads(c->handle);
  /* A profile is of one thread's calls: where it is wanted, threads share kernels, not images. */
  int apart = m->batch >= 0 && (c->profile == NULL || c->threads == 1);
  return apart ? apq_run_images(c, p, inputs, outputs) : apq_run_plan(c, p, inputs, outputs);
}
