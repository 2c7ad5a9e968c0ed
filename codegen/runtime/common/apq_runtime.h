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

/* Kernels use aligned vector loads, so every tensor they see starts at a multiple of this. */
#define APQ_ALIGNMENT 64

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
  int32_t may_be_empty;    /* the axis of an input that may be 0 long, -1 if there is none */
  int32_t late;            /* of an output: whether its shape is known only after a run */
  int32_t cut;             /* whether its first axis is the batch of a module whose runs may be cut */
} apq_value;

/* A symbolic dimension takes its value from one axis of one input. */
typedef struct {
  const char *name;
  int32_t input, axis;
} apq_symbol;

/* Calls (by number) between which a buffer must keep its bytes, both inclusive. */
typedef struct {
  int32_t first, last;
} apq_lifetime;

/* Calls that take the same number of images at once, from `first` on; the last ends with the graph. */
typedef struct {
  int32_t first;
  size_t weight_bytes; /* that they read */
} apq_stage;

/* What one run of the graph works on. Every pointer is aligned to APQ_ALIGNMENT. */
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
  const struct apq_device_code *code; /* of a GPU (apq_cuda.h); NULL for processors */
} apq_module;

/* ---- errors (errors.c) ---- */

/* Stores the text for this thread and returns `code`. */
int apq_fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
const char *apq_last_error(void);

/* ---- threads and scratch (threads.c, workspace.c) ---- */

enum { APQ_MAX_THREADS = 1024 };

/* 1 if an OpenMP runtime was found when the first handle was opened. */
int apq_has_openmp(void);
/* Physical cores this process may use: affinity, then control group quota, then OMP_NUM_THREADS. */
int32_t apq_default_threads(void);
/* Called at the start of every run: `threads`, or fewer at a limit of threads, 1 without OpenMP and where
 * a fork took this thread's team. */
int32_t apq_usable_threads(int32_t threads);
/* How many tasks the next kernel on this thread is cut into. */
void apq_set_tasks(int32_t tasks);
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
/* Writes the number of a loop's round, an int64, where kernels read it; rounds are counted from 0. */
int apq_set_round(const apq_frame *frame, void *counter, int64_t number);
/* Gives the buffers of a segment their memory. */
int apq_plan_again(const apq_frame *frame, int32_t segment, const size_t *bytes);
/* Runs a kernel; `work` estimates its nanoseconds on one thread. */
int apq_call(const apq_frame *frame, const char *name, apq_kernel kernel, const apq_any *args,
             int32_t num_args, double work);

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
int apq_context_create(const apq_handle *handle, apq_context **out);
void apq_context_destroy(apq_context *context);
int apq_output_shape(apq_context *context, const DLTensor *inputs, int32_t index, int64_t *shape);
/* Bits of one layer, or of all for NULL, from the next run on. */
int apq_set_precision(apq_handle *handle, const char *layer, int32_t bits);
/* Bits of one layer; 0 if they cannot be chosen. */
int32_t apq_get_precision(const apq_handle *handle, const char *layer);
/* `bits` 0 is what apq_set_precision said. */
int apq_run(apq_context *context, const DLTensor *inputs, const DLTensor *outputs, int32_t bits);
/* An output of the last run whose shape depends on data; valid until the next run. */
int apq_result(apq_context *context, int32_t index, DLTensor *result);
int apq_memory(apq_context *context, uint64_t *arena_bytes, uint64_t *live_bytes);
/* Memory of the GPU that a handle runs on, for tensors that stay there; the copies wait for their end. */
int apq_device_alloc(const apq_handle *handle, size_t bytes, void **data);
int apq_device_free(const apq_handle *handle, void *data);
int apq_device_read(const apq_handle *handle, void *to, const void *data, size_t bytes);
int apq_device_write(const apq_handle *handle, void *data, const void *from, size_t bytes);
/* The CUstream that runs of a context go to; NULL is the context's own. */
int apq_set_stream(apq_context *context, void *stream);
void *apq_stream(const apq_context *context);

#endif
