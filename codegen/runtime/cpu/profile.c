/* What each kernel call of a run took, where a context was asked to keep it. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <time.h>

#include "apq_context.h"

/* Tensors of the calls lie one after the other, in the order of the calls. */
struct apq_profile {
  apq_profiled *calls;
  apq_profiled_tensor *tensors;
  int32_t num_calls, max_calls;
  int32_t num_tensors, max_tensors;
};

static void drop(apq_profile *p) {
  if (p == NULL) return;
  free(p->calls);
  free(p->tensors);
  free(p);
}

int apq_set_profile(apq_context *c, int32_t on) {
  if (c == NULL) return apq_fail(APQ_BAD_INPUT, "the context is NULL");
  if (!on) {
    drop(c->profile);
    c->profile = NULL;
  } else if (c->profile == NULL) {
    c->profile = calloc(1, sizeof *c->profile);
    if (c->profile == NULL) return apq_fail(APQ_NO_MEMORY, "no memory for a profile");
  }
  return APQ_OK;
}

int apq_profile_of(apq_context *c, const apq_profiled **calls, int32_t *count) {
  if (c == NULL) return apq_fail(APQ_BAD_INPUT, "the context is NULL");
  if (calls == NULL || count == NULL) return apq_fail(APQ_BAD_INPUT, "where calls are to be written is NULL");
  apq_profile *p = c->profile;
  if (p == NULL) return apq_fail(APQ_BAD_INPUT, "the context keeps no profile: ask for one before the run");
  const apq_profiled_tensor *next = p->tensors; /* the array may have moved while it grew */
  for (int32_t i = 0; i < p->num_calls; next += p->calls[i].num_tensors, i++) p->calls[i].tensors = next;
  *calls = p->calls;
  *count = p->num_calls;
  return APQ_OK;
}

void apq_profile_restart(apq_profile *p) {
  if (p != NULL) p->num_calls = p->num_tensors = 0;
}

uint64_t apq_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Room for one more call with `more` tensors; nothing is allocated once a run was kept. */
static int reserve(apq_profile *p, int32_t more) {
  if (p->num_calls == p->max_calls) {
    int32_t most = 2 * p->max_calls + 64;
    apq_profiled *calls = realloc(p->calls, (size_t)most * sizeof *calls);
    if (calls == NULL) return 0;
    p->calls = calls;
    p->max_calls = most;
  }
  if (p->num_tensors + more > p->max_tensors) {
    int32_t most = 2 * p->max_tensors + more + 256;
    apq_profiled_tensor *tensors = realloc(p->tensors, (size_t)most * sizeof *tensors);
    if (tensors == NULL) return 0;
    p->tensors = tensors;
    p->max_tensors = most;
  }
  return 1;
}

/* Where a tensor starts in the weights file, -1 for any other. */
static int64_t place_of(const apq_context *c, const void *data) {
  const apq_weights *w = &c->handle->weights;
  uintptr_t at = (uintptr_t)data, start = (uintptr_t)w->data;
  return at >= start && at < start + w->bytes ? (int64_t)(at - start) : -1;
}

static apq_profiled_tensor seen(const apq_context *c, const DLTensor *t) {
  apq_profiled_tensor s = {apq_address(t), 1, 0, 1, place_of(c, apq_address(t))};
  for (int32_t i = 0; i < t->ndim; i++) s.elements *= t->shape[i];
  if (t->ndim > 0) s.rows = t->shape[0];
  s.bytes = s.elements * (t->dtype.bits / 8);
  return s;
}

int apq_profile_call(apq_context *c, const char *kernel, uint64_t begin, const apq_any *args,
                     int32_t num_args, double products, int32_t tasks) {
  uint64_t end = apq_now();
  apq_profile *p = c->profile;
  if (!reserve(p, num_args)) return apq_fail(APQ_NO_MEMORY, "no memory for a profile");
  apq_profiled *call = &p->calls[p->num_calls++];
  *call = (apq_profiled){kernel, begin, end, products, tasks, 0, NULL};
  for (int32_t i = 0; i < num_args; i++) {
    if (args[i].type_index != APQ_TYPE_DLTENSOR) continue;
    p->tensors[p->num_tensors++] = seen(c, args[i].v_ptr);
    call->num_tensors++;
  }
  return APQ_OK;
}
