/* Handles, contexts and plans: what module.c makes, and what runs of a processor (cpu/run.c) or of a GPU
 * (cuda/run.c) work on. */
#ifndef APQ_CONTEXT_H_
#define APQ_CONTEXT_H_

#include <stdatomic.h>
#include <string.h>

#include "apq_runtime.h"

/* Plans a context keeps, one per set of symbol values; the one unused for longest is replaced. */
enum { PLANS = 16 };

struct apq_handle {
  const apq_module *module;
  apq_weights weights;
  struct apq_device *device; /* a GPU with a copy of the weights; NULL for processors */
  atomic_int threads;
  atomic_int *bits; /* of every layer whose bits can be chosen */
};

typedef struct {
  int ready;
  uint64_t used; /* run number */
  int64_t *symbols, *in_dims, *out_dims;
  size_t *bytes, *offsets;
  size_t arena;
  int32_t first_stage, end_stage; /* what it is for; bytes of buffers that lie elsewhere are 0 */
  int32_t *at_once;               /* images of each stage that run together */
  int32_t measured;               /* for so many threads; 0 for not yet */
  uint64_t ran;                   /* number of the run it last was part of */
} plan;

/* A block that only grows. */
typedef struct {
  unsigned char *data;
  size_t bytes;
} region;

typedef struct apq_images apq_images; /* cpu/images.c */

struct apq_context {
  const apq_handle *handle;
  struct apq_stream *stream; /* of a GPU */
  uint64_t runs;
  plan plans[PLANS];
  plan *last; /* of the last run */
  region arena, staging;
  region *late;    /* of each segment but the first */
  size_t *offsets; /* scratch for planning those */
  int64_t *sizes, *result_dims;
  void **results;
  int finished; /* whether the last run succeeded */
  int32_t *order;
  int64_t *symbols;
  int32_t *bits;
  void **inputs, **outputs, **buffers;
  DLTensor *parts; /* inputs, then outputs of a part of a run */
  int64_t *part_dims;
  int32_t threads; /* of this run */
  apq_images *images;
};

/* ---- what differs between processors and GPUs ---- */

/* The first of the modules (NULL at the end) that this machine, or its GPU `device`, has what it takes for. */
int apq_choose(const apq_module *const *modules, int32_t device, const apq_module **chosen);
/* After the weights are mapped; `apq_handle_close` takes what there is of a handle. */
int apq_handle_open(apq_handle *h, int32_t device);
void apq_handle_close(apq_handle *h);
int apq_context_open(apq_context *c);
void apq_context_close(apq_context *c);
/* A plan that is replaced: what is kept for it goes. */
void apq_plan_dropped(apq_context *c, const plan *p);
/* Fails unless runs can use a tensor that lies where `t` does. */
int apq_check_place(const apq_handle *h, const char *kind, const char *name, const DLTensor *t);
/* Arguments are checked, symbols are those of `p`. */
int apq_run_plan(apq_context *c, plan *p, const DLTensor *inputs, const DLTensor *outputs);
/* The same, of a module whose runs may be cut along its batch. */
int apq_run_images(apq_context *c, plan *p, const DLTensor *inputs, const DLTensor *outputs);
/* Adds what such runs have beside the context's arena, and what of it is alive. */
int apq_images_memory(apq_context *c, uint64_t *arena_bytes, uint64_t *live_bytes);

/* ---- what they share (module.c) ---- */

/* The plan of some stages for these inputs, made if it is not there; every input is checked. */
int apq_find_plan(apq_context *c, const DLTensor *inputs, int32_t first_stage, int32_t end_stage, plan **out);

/* ---- tensors ---- */

static inline size_t apq_bytes_of(const DLTensor *t) {
  size_t bytes = t->dtype.bits / 8;
  for (int32_t i = 0; i < t->ndim; i++) bytes *= (size_t)t->shape[i];
  return bytes;
}

/* What a copy of the tensor takes up in the staging block. */
static inline size_t apq_stage_of(const DLTensor *t) {
  return (apq_bytes_of(t) + APQ_ALIGNMENT - 1) / APQ_ALIGNMENT * APQ_ALIGNMENT;
}

static inline int apq_contiguous(const DLTensor *t) {
  int64_t step = 1;
  for (int32_t i = t->ndim - 1; t->strides != NULL && i >= 0; i--) {
    if (t->shape[i] != 1 && t->strides[i] != step) return 0;
    step *= t->shape[i];
  }
  return 1;
}

/* Of NULL too, which C does not let anything be added to, not even 0. */
static inline unsigned char *apq_past(void *data, size_t bytes) {
  return (unsigned char *)((uintptr_t)data + bytes);
}

static inline unsigned char *apq_address(const DLTensor *t) { return apq_past(t->data, t->byte_offset); }

/* Copies a tensor of any strides to contiguous memory; returns the end of what it wrote. */
unsigned char *apq_gather(unsigned char *to, const unsigned char *from, const DLTensor *t, int32_t axis);

#endif
