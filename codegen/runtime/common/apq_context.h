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
  apq_parallel parallel; /* the program's own pool; NULL for ours */
  void *parallel_data;
  atomic_int *bits; /* of every layer whose bits can be chosen */
};

typedef struct {
  int ready;
  uint64_t used; /* run number */
  int64_t *symbols, *in_dims, *out_dims;
  size_t *bytes, *offsets, *room; /* `room` is what each buffer has where it lies */
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

typedef struct apq_profile apq_profile;
typedef struct apq_images apq_images; /* cpu/images.c */

struct apq_context {
  const apq_handle *handle;
  apq_profile *profile; /* NULL where none is asked for, and on GPUs */
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
  int64_t given[2];        /* dimensions of no input: apq_symbol */
  struct apq_session *session; /* whose caches runs append to; NULL for runs that are told theirs */
  int32_t threads; /* of this run */
  apq_images *images;
};

/* Memory of the buffers that outlive a run, in the order of apq_kept. */
struct apq_session {
  apq_context *context;
  int64_t batch, capacity, length; /* tokens */
  atomic_flag busy;
  region *kept;
  region *fed;       /* for each input, what a session puts there */
  int64_t *fed_dims; /* of those that are given; inputs one after the other, as in a plan */
  DLTensor *inputs, *outputs;
  region unwanted; /* logits that nobody asked for, where kernels write */
  region aside;    /* logits of a part of the tokens, before each sequence's go to their place */
};

/* ---- what differs between processors and GPUs ---- */

/* The first of the modules (NULL at the end) that this machine, or its GPU `device`, has what it takes for. */
int apq_choose(const apq_module *const *modules, int32_t device, const apq_module **chosen);
/* Whether this process may use AMX's tiles from now on (processors, cpu/tiles.c). */
int apq_ask_for_tiles(void);
/* After the weights are mapped; `apq_handle_close` takes what there is of a handle. */
int apq_handle_open(apq_handle *h, int32_t device);
void apq_handle_close(apq_handle *h);
int apq_context_open(apq_context *c);
void apq_context_close(apq_context *c);
/* A plan that is replaced: what is kept for it goes. */
void apq_plan_dropped(apq_context *c, const plan *p);
/* Fails unless runs can use a tensor that lies where `t` does. */
int apq_check_place(const apq_handle *h, const char *kind, const char *name, const DLTensor *t);
/* Of processors: what a thread's run has threads from, from `begin` to `end`. A program's own pool may
 * let a thread that waits for one run begin another: `end` takes what `begin` gave. */
typedef struct {
  apq_parallel parallel; /* the program's own; NULL for ours */
  void *parallel_data;
  struct apq_team *team; /* NULL until a loop needs one */
  int32_t threads;
} apq_crew;

apq_crew apq_threads_begin(const apq_handle *h, int32_t threads);
void apq_threads_end(const apq_crew *before);
/* Arguments are checked, symbols are those of `p`. */
int apq_run_plan(apq_context *c, plan *p, const DLTensor *inputs, const DLTensor *outputs);
/* The same, of a module whose runs may be cut along its batch. */
int apq_run_images(apq_context *c, plan *p, const DLTensor *inputs, const DLTensor *outputs);
/* Adds what such runs have beside the context's arena, and what of it is alive. */
int apq_images_memory(apq_context *c, uint64_t *arena_bytes, uint64_t *live_bytes);

/* ---- what they share (module.c) ---- */

/* The plan of some stages for these inputs, made if it is not there; every input is checked. */
int apq_find_plan(apq_context *c, const DLTensor *inputs, int32_t first_stage, int32_t end_stage, plan **out);

/* The same for `c->symbols`. */
int apq_plan_symbols(apq_context *c, int32_t first_stage, int32_t end_stage, plan **out);
/* The bits of all layers in the next run of a context. */
int apq_take_bits(apq_context *c, int32_t bits);
/* A block of at least so many bytes, for `what`; what it held is lost where it grows. */
int apq_reserve(region *r, size_t bytes, const char *what);
/* Of a session: its caches where buffers lie, before a run; nothing for them in a plan. */
void apq_place_caches(apq_context *c);
int apq_leave_caches(apq_context *c, size_t *bytes);

/* ---- a session's memory that runs read and write where it lies (cpu/resident.c, cuda/resident.c) ---- */

/* New tokens that one run takes. */
int64_t apq_together(void);
DLDevice apq_resident_device(const apq_context *c);
int apq_reserve_resident(apq_context *c, region *r, size_t bytes, const char *what);
void apq_free_resident(apq_context *c, region *r);
/* The bytes of a contiguous tensor, which may lie in the program's memory or in such. */
int apq_put_resident(apq_context *c, region *r, const DLTensor *t, size_t bytes);
int apq_copy_resident(apq_context *c, void *to, const void *from, size_t bytes);
/* ---- profiles ---- */

uint64_t apq_now(void);
/* A run begins: what an earlier one left goes. */
void apq_profile_restart(apq_profile *p);
/* Keeps a call that began at `begin` and ends now. */
int apq_profile_call(apq_context *c, const char *kernel, uint64_t begin, const apq_any *args,
                     int32_t num_args, double products, int32_t tasks);

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
