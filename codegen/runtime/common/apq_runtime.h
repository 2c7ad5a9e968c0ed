/* What a compiled module's emitted graph and its runtime share.
 *
 * The runtime is generic: a module is described by one `apq_module` table and two emitted functions.
 * Nothing here is exported; the public functions are the wrappers in api.c. */
#ifndef APQ_RUNTIME_H_
#define APQ_RUNTIME_H_

#include <stddef.h>
#include <stdint.h>

#include "apq_dlpack.h"

/* Return codes of every function that returns int; the public header repeats them. */
enum {
  APQ_OK = 0,
  APQ_BAD_INPUT = -1,
  APQ_BAD_WEIGHTS = -2,
  APQ_BAD_MACHINE = -3,
  APQ_NO_MEMORY = -4,
  APQ_KERNEL_FAILED = -5
};

/* Where tensors of ours lie, and where a caller's must: kernels hold no more for true, as
 * codegen/build/alignment.py has it, and whatever lies elsewhere is copied. */
#define APQ_ALIGNMENT 64
#define APQ_LEAST_ALIGNMENT 16

/* ---- kernels: the calling convention of tvm.tirx.build (tvm/ffi/c_api.h, TVMFFIAny) ---- */

typedef struct {
  int32_t type_index;
  uint32_t zero_padding;
  union {
    int64_t v_int64;
    void *v_ptr;
  };
} apq_any;

enum { APQ_TYPE_INT = 1, APQ_TYPE_DLTENSOR = 7 };

typedef int (*apq_kernel)(void *self, const apq_any *args, int32_t num_args, apq_any *result);

/* ---- the module table ---- */

typedef struct {
  const char *name; /* the ONNX name */
  DLDataType dtype;
  int32_t ndim;
  const char *const *dims; /* how each dimension is written in messages: "384", "batch_size" */
  int32_t late;            /* of an output: whether its shape is known only after a run */
  int32_t cut;             /* whether its first axis is the batch of a module whose runs may be cut */
} apq_value;

/* A symbolic dimension takes its value from one axis of one input; with input -1 the runtime gives it:
 * axis 0 are the tokens that a session's caches hold, 1 the last tokens whose logits are wanted. */
typedef struct {
  const char *name;
  int32_t input, axis;
} apq_symbol;

/* What a session gives to an input. */
typedef enum {
  APQ_FEED_PAST,      /* nothing: it is not read */
  APQ_FEED_IDS,       /* token ids of the caller */
  APQ_FEED_MASK,      /* ones */
  APQ_FEED_POSITIONS, /* of the new tokens, counted from the first of all */
  APQ_FEED_LENGTHS,   /* tokens of each sequence with the new ones, less 1 */
  APQ_FEED_TOTAL,     /* tokens with the new ones */
  APQ_FEED_GIVEN      /* what the caller said when the session was made */
} apq_feed;

/* A decoder's sessions. */
typedef struct {
  int32_t ids, past_axis, logits; /* an input; the axis of caches that counts tokens; an output */
  int32_t num_buffers;
  const int32_t *buffers; /* those that outlive a run */
  const apq_feed *feeds;  /* for each input */
} apq_kept;

/* Calls (by number) between which a buffer must keep its bytes, both inclusive. */
typedef struct {
  int32_t first, last;
} apq_lifetime;

/* Calls that take the same number of images at once, from `first` on; the last ends with the graph. */
typedef struct {
  int32_t first;
  size_t weight_bytes; /* that they read */
} apq_stage;

/* What one run of the graph works on. Every pointer is aligned to APQ_LEAST_ALIGNMENT. */
typedef struct {
  const int64_t *symbols;
  void *const *inputs;
  void *const *outputs;
  void *const *buffers;
  unsigned char *weights; /* the mapped file, read only */
  const int32_t *bits; /* of every layer in the table of precisions */
  int32_t threads;
  int64_t *sizes;       /* dimensions that the run computes from data */
  void **results;       /* of outputs whose shape depends on those: where they lie */
  int64_t *result_dims; /* and their dimensions, at the places they have among all outputs' */
  void *context;
  int32_t first_stage, end_stage; /* which of the module's stages run */
} apq_frame;

static inline int apq_has_stage(const apq_frame *frame, int32_t stage) {
  return frame->first_stage <= stage && stage < frame->end_stage;
}

/* A layer whose bits are chosen at run time, between these, both inclusive. */
typedef struct {
  const char *layer;
  int32_t least, most;
} apq_precision;

typedef struct {
  const char *name, *version;
  const char *target; /* the device profile it was compiled for */
  int32_t num_inputs, num_outputs, num_symbols, num_buffers, num_precisions;
  int32_t num_sizes;    /* dimensions computed from data */
  int32_t num_segments; /* 1, and one for each step that computes some */
  int32_t input_dims, output_dims; /* sums of ndim */
  const apq_value *inputs, *outputs;
  const apq_symbol *symbols;
  const apq_lifetime *lifetimes;
  const int32_t *segments; /* first buffer of each segment, and past the last: those of segment i get
                            * their memory when step i has computed dimensions, those of 0 at once */
  const apq_precision *precisions;
  int32_t batch;     /* the symbol along which results do not depend on each other, -1 if there is none */
  size_t near_bytes; /* working memory per thread above which a run is cut along it */
  int32_t num_stages; /* 1 where the graph is not cut */
  const apq_stage *stages;
  const char *const *cpu_flags; /* as /proc/cpuinfo spells them, NULL at the end */
  uint64_t header_bytes, file_bytes, header_checksum, data_checksum;
  /* From the symbols: every dimension of inputs and outputs, one after the other, and the bytes of
   * every buffer; -1 and 0 where they depend on data. Fails where a shape is impossible. */
  int (*shapes)(const int64_t *symbols, int64_t *inputs, int64_t *outputs, size_t *buffers);
  int (*graph)(const apq_frame *frame);
  const apq_kept *kept; /* of decoders that have sessions, else NULL */
  const struct apq_device_code *code; /* of a GPU (apq_cuda.h); NULL for processors */
} apq_module;

/* ---- errors (errors.c) ---- */

/* Stores the text for this thread and returns `code`. */
int apq_fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* What every public function answers to a NULL that it cannot do without. */
int apq_null(const char *what);
const char *apq_last_error(void);

/* ---- threads and scratch (threads.c, cores.c, launch.c, workspace.c) ---- */

enum { APQ_MAX_THREADS = 1024 };

/* One of several tasks that make up `work`. */
typedef void (*apq_task)(void *work, int32_t task);
/* A program's own way to share tasks 0 to `tasks` - 1 out: returns when each has returned. */
typedef void (*apq_parallel)(void *data, int32_t tasks, apq_task task, void *work);

/* 1 if runs use OpenMP's threads: APQ_THREADS=openmp, and a runtime was found when the first handle was
 * opened. */
int apq_has_openmp(void);
/* Physical cores this process may use: affinity, then control group quota, then OMP_NUM_THREADS. */
int32_t apq_default_threads(void);
/* `threads`, or fewer at a limit of threads; 1 where a fork took this thread's team of OpenMP's. */
int32_t apq_usable_threads(int32_t threads);
/* Nanoseconds that the next kernel of this thread takes on one thread, roughly. */
void apq_set_work(double nanoseconds);
/* How many threads that kernel was shared out to, at most. */
int32_t apq_shared_by(void);
/* Calls `task` with every number below `tasks`, each on a thread of its own where there are so many; 0, or
 * the code of one that failed, whose message is this thread's then. */
int apq_side_by_side(int (*task)(int number, void *data), void *data, int32_t tasks);

/* ---- what emitted code calls (graph_support.c, run.c) ---- */

int64_t apq_floordiv(int64_t a, int64_t b);
int64_t apq_floormod(int64_t a, int64_t b);
int64_t apq_truncdiv(int64_t a, int64_t b);
int64_t apq_truncmod(int64_t a, int64_t b);
static inline int64_t apq_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t apq_max(int64_t a, int64_t b) { return a > b ? a : b; }

/* What an input may give for a dimension: comparisons of shapes were decided for these
 * (apq_tvm/onnx_import/symbolic/dims.py), and kernels' indices proved. */
#define APQ_LARGEST_DIM 999999999

/* Sizes are computed in int64_t; whether that overflows at the symbols at hand is found out with these. */
__extension__ typedef __int128 apq_wide;
static inline apq_wide apq_wide_truncdiv(apq_wide a, apq_wide b) { return b == 0 ? 0 : a / b; }
static inline apq_wide apq_wide_truncmod(apq_wide a, apq_wide b) { return b == 0 ? 0 : a % b; }
static inline apq_wide apq_wide_floordiv(apq_wide a, apq_wide b) {
  apq_wide rest = apq_wide_truncmod(a, b);
  return apq_wide_truncdiv(a, b) - (rest != 0 && (rest < 0) != (b < 0));
}
static inline apq_wide apq_wide_floormod(apq_wide a, apq_wide b) {
  apq_wide rest = apq_wide_truncmod(a, b);
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
static inline apq_wide apq_wide_min(apq_wide a, apq_wide b) { return a < b ? a : b; }
static inline apq_wide apq_wide_max(apq_wide a, apq_wide b) { return a > b ? a : b; }
static inline int apq_fits(apq_wide v) { return v >= INT64_MIN && v <= INT64_MAX; }

/* bytes = itemsize * product of dims; fails where a dimension is negative or the product overflows. */
int apq_bytes(size_t *bytes, const char *name, size_t itemsize, int32_t ndim, const int64_t *dims);
/* Fails, naming layer and value, unless lowest <= id < rows for every id (int32 or int64). */
int apq_check_ids(const apq_frame *frame, const char *layer, const DLTensor *ids, int64_t first,
                  int64_t step, int64_t lowest, int64_t rows);
/* Fails, naming the layer, unless least <= size <= most; the message is of sizes computed from data. */
int apq_check_size(const char *layer, int64_t size, int64_t least, int64_t most);
/* Copies between tensors; they do not overlap. */
int apq_copy(const apq_frame *frame, void *to, const void *from, size_t bytes);
/* Fills a tensor with zeros; `bytes` is a multiple of 4. */
int apq_clear(const apq_frame *frame, void *to, size_t bytes);
/* Writes the number of a loop's round, an int64, where kernels read it; rounds are counted from 0. */
int apq_set_round(const apq_frame *frame, void *counter, int64_t number);
/* Gives the buffers of a segment their memory. */
int apq_plan_again(const apq_frame *frame, int32_t segment, const size_t *bytes);
/* Runs a kernel; `work` estimates its nanoseconds on one thread, `products` counts its multiply-adds. */
int apq_call(const apq_frame *frame, const char *name, apq_kernel kernel, const apq_any *args,
             int32_t num_args, double work, double products);

static inline DLTensor apq_tensor(void *data, DLDataType dtype, int32_t ndim, const int64_t *shape) {
  DLTensor t = {data, {kDLCPU, 0}, ndim, dtype, (int64_t *)(uintptr_t)shape, NULL, 0};
  return t;
}
static inline apq_any apq_arg(DLTensor *t) {
  apq_any a = {APQ_TYPE_DLTENSOR, 0, {.v_ptr = t}};
  return a;
}
static inline apq_any apq_int(int64_t v) {
  apq_any a = {APQ_TYPE_INT, 0, {.v_int64 = v}};
  return a;
}

/* ---- profiles (profile.c) ---- */

/* One of a call's tensors; the public header repeats both records. */
typedef struct {
  const void *data;
  int64_t elements, bytes;
  int64_t rows;   /* its first dimension, 1 for a scalar */
  int64_t weight; /* where it starts in the weights file, -1 for any other tensor */
} apq_profiled_tensor;

/* A kernel's call: when it ran (CLOCK_MONOTONIC, ns), and its multiply-adds. */
typedef struct {
  const char *kernel;
  uint64_t begin_ns, end_ns;
  double products;
  int32_t tasks, num_tensors;
  const apq_profiled_tensor *tensors; /* in the kernel's order: what it writes stands last */
} apq_profiled;

/* ---- memory planning (plan.c) ---- */

/* Offsets for buffers so that those alive at once do not overlap; returns the arena's bytes.
 * `order` is scratch of 2 * n. */
size_t apq_plan(int32_t n, const apq_lifetime *lifetimes, const size_t *bytes, size_t *offsets,
                int32_t *order);
/* Saturates. */
size_t apq_sum(size_t a, size_t b);
/* The most bytes alive at any one call: what no plan can be smaller than. */
size_t apq_live_bytes(int32_t n, const apq_lifetime *lifetimes, const size_t *bytes);

/* ---- weights (weights.c) ---- */

typedef struct {
  unsigned char *data; /* NULL when closed */
  size_t bytes;        /* of the file */
  size_t mapped;
} apq_weights;

/* Sum over 64-bit little-endian words w_i of (2i + 1) * mix(w_i), mod 2^64, seed included; `bytes` is
 * a multiple of 8. Finds any single altered word and nearly every other change; not cryptographic. */
uint64_t apq_checksum(const unsigned char *data, size_t bytes);
int apq_weights_open(const apq_module *module, const char *path, apq_weights *out);
void apq_weights_close(apq_weights *weights);

/* ---- handles and contexts (module.c) ---- */

typedef struct apq_handle apq_handle;
typedef struct apq_context apq_context;

int apq_open(const apq_module *const *modules, const char *weights_path, int32_t device, apq_handle **out);
/* GPUs of this machine, and their names; a processor is the one device of its modules. */
int32_t apq_num_devices(const apq_module *module);
int apq_device_name(const apq_module *module, int32_t device, char *name, int32_t size);
void apq_close(apq_handle *handle);
const char *apq_target(const apq_handle *handle);
/* Number of dimensions of an input or output, -1 past the last. */
int32_t apq_rank(const apq_handle *handle, int32_t of_output, int32_t index);
int apq_verify(const apq_handle *handle);
int apq_set_num_threads(apq_handle *handle, int32_t threads);
int32_t apq_num_threads(const apq_handle *handle);
/* NULL is the library's own pool. No run of the handle is under way. */
int apq_set_parallel(apq_handle *handle, apq_parallel parallel, void *data);
int apq_context_create(const apq_handle *handle, apq_context **out);
void apq_context_destroy(apq_context *context);
int apq_output_shape(apq_context *context, const DLTensor *inputs, int32_t index, int64_t *shape);
int apq_output_shapes(apq_context *context, const DLTensor *inputs, int64_t *shapes);
/* Bits of one layer, or of all for NULL, from the next run on. */
int apq_set_precision(apq_handle *handle, const char *layer, int32_t bits);
/* Bits of one layer; 0 if they cannot be chosen. */
int32_t apq_get_precision(const apq_handle *handle, const char *layer);
/* `bits` 0 is what apq_set_precision said. */
int apq_run(apq_context *context, const DLTensor *inputs, const DLTensor *outputs, int32_t bits);
/* An output of the last run whose shape depends on data; valid until the next run. */
int apq_result(apq_context *context, int32_t index, DLTensor *result);
int apq_memory(apq_context *context, uint64_t *arena_bytes, uint64_t *live_bytes);

/* ---- sessions of decoders (session.c); api.c tells what they do ---- */

typedef struct apq_session apq_session;

int apq_session_create(const apq_handle *handle, int64_t batch, int64_t max_tokens, const DLTensor *given,
                       apq_session **out);
int apq_session_fork(apq_session *session, apq_session **out);
void apq_session_destroy(apq_session *session);
int apq_session_run(apq_session *session, const int64_t *ids, int64_t tokens, int64_t asked, void *logits,
                    int32_t bits);
int apq_session_rewind(apq_session *session, int64_t tokens);
int64_t apq_session_length(const apq_session *session);
int64_t apq_session_width(const apq_session *session);
/* What its runs work on: for apq_memory and profiles. */
apq_context *apq_session_context(apq_session *session);
int apq_session_memory(const apq_session *session, uint64_t *cache_bytes, uint64_t *arena_bytes);
/* Whether runs keep what their calls took; the calls of the last run, valid until the next one. */
int apq_set_profile(apq_context *context, int32_t on);
int apq_profile_of(apq_context *context, const apq_profiled **calls, int32_t *count);
/* Memory of the GPU that a handle runs on, for tensors that stay there; the copies wait for their end. */
int apq_device_alloc(const apq_handle *handle, size_t bytes, void **data);
int apq_device_free(const apq_handle *handle, void *data);
int apq_device_read(const apq_handle *handle, void *to, const void *data, size_t bytes);
int apq_device_write(const apq_handle *handle, void *data, const void *from, size_t bytes);
/* The CUstream that runs of a context go to; NULL is the context's own. */
int apq_set_stream(apq_context *context, void *stream);
void *apq_stream(const apq_context *context);

#endif
