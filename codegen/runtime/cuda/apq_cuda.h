/* What the files of a GPU module's runtime share, and what is emitted for them.
 *
 * The driver is found at run time: nothing of CUDA is linked or needed to compile this. Its functions are
 * declared here from the CUDA Driver API reference (docs.nvidia.com/cuda/cuda-driver-api). */
#ifndef APQ_CUDA_H_
#define APQ_CUDA_H_

#include "apq_context.h"

/* ---- emitted (apq_tvm/codegen/cuda/tables.py) ---- */

enum { APQ_LAUNCHES = 7 }; /* grid x, y, z, block x, y, z, bytes of dynamic shared memory */

typedef struct {
  const char *name;
  const char *params; /* a letter each: p pointer, l int64, i int32, f float32 */
  int32_t launches;
  unsigned char launch[APQ_LAUNCHES]; /* which of those the call's last arguments are */
} apq_gpu_kernel;

/* Code for one compute capability, such as 86; `ptx` is text that a newer GPU's driver compiles. */
typedef struct {
  int32_t sm, ptx;
  uint32_t packed, bytes; /* as it lies here, and unpacked */
  const unsigned char *data;
} apq_gpu_image;

struct apq_device_code {
  int32_t driver; /* CUDA version that the driver must have at least: 12000 */
  const char *release; /* and which release of it that is, for messages: "525" */
  int32_t num_kernels, num_images;
  const apq_gpu_kernel *kernels;
  const apq_gpu_image *images;
};

/* ---- images (unpack.c) ---- */

/* 1 if `packed` bytes are exactly `bytes` ones made small. */
int apq_unpack(const unsigned char *in, size_t packed, unsigned char *out, size_t bytes);

/* ---- the driver (driver.c) ---- */

typedef int apq_result_code;
typedef uint64_t apq_pointer; /* of device memory */

#define APQ_DRIVER(X)                                                                         \
  X(get_error_name, cuGetErrorName, (apq_result_code, const char **))                         \
  X(init, cuInit, (unsigned))                                                                 \
  X(version, cuDriverGetVersion, (int *))                                                     \
  X(device_count, cuDeviceGetCount, (int *))                                                  \
  X(device_get, cuDeviceGet, (int *, int))                                                    \
  X(device_name, cuDeviceGetName, (char *, int, int))                                         \
  X(device_attribute, cuDeviceGetAttribute, (int *, int, int))                                \
  X(retain, cuDevicePrimaryCtxRetain, (void **, int))                                         \
  X(release, cuDevicePrimaryCtxRelease_v2, (int))                                             \
  X(push, cuCtxPushCurrent_v2, (void *))                                                      \
  X(pop, cuCtxPopCurrent_v2, (void **))                                                       \
  X(load, cuModuleLoadData, (void **, const void *))                                          \
  X(unload, cuModuleUnload, (void *))                                                         \
  X(function, cuModuleGetFunction, (void **, void *, const char *))                           \
  X(function_attribute, cuFuncSetAttribute, (void *, int, int))                               \
  X(alloc, cuMemAlloc_v2, (apq_pointer *, size_t))                                            \
  X(free, cuMemFree_v2, (apq_pointer))                                                        \
  X(memory, cuMemGetInfo_v2, (size_t *, size_t *))                                            \
  X(upload, cuMemcpyHtoDAsync_v2, (apq_pointer, const void *, size_t, void *))                \
  X(download, cuMemcpyDtoHAsync_v2, (void *, apq_pointer, size_t, void *))                    \
  X(copy, cuMemcpyDtoDAsync_v2, (apq_pointer, apq_pointer, size_t, void *))                   \
  X(set, cuMemsetD32Async, (apq_pointer, unsigned, size_t, void *))                           \
  X(stream_create, cuStreamCreate, (void **, unsigned))                                       \
  X(stream_destroy, cuStreamDestroy_v2, (void *))                                             \
  X(synchronize, cuStreamSynchronize, (void *))                                               \
  X(launch, cuLaunchKernel, (void *, unsigned, unsigned, unsigned, unsigned, unsigned,        \
                             unsigned, unsigned, void *, void **, void **))                   \
  X(capture, cuStreamBeginCapture_v2, (void *, int))                                          \
  X(captured, cuStreamEndCapture, (void *, void **))                                          \
  X(instantiate, cuGraphInstantiateWithFlags, (void **, void *, unsigned long long))          \
  X(graph_launch, cuGraphLaunch, (void *, void *))                                            \
  X(graph_destroy, cuGraphDestroy, (void *))                                                  \
  X(exec_destroy, cuGraphExecDestroy, (void *))

#define APQ_DRIVER_FIELD(field, symbol, parameters) apq_result_code(*field) parameters;
typedef struct {
  APQ_DRIVER(APQ_DRIVER_FIELD)
} apq_driver;

/* The driver's functions; NULL, with an error set, where there is no driver, or one that lacks some. */
const apq_driver *apq_driver_of(const char *module);
/* Says what failed, and gives the code: APQ_NO_MEMORY, or APQ_KERNEL_FAILED. */
int apq_cuda_fail(apq_result_code result, const char *what);

/* ---- a GPU, of a handle (device.c) ---- */

typedef struct apq_device {
  const apq_driver *cu;
  int ordinal, number; /* as the user counts, and as the driver does */
  int pid;             /* that opened it: CUDA does not survive a fork */
  atomic_int broken;   /* result of a kernel that faulted: nothing works after it */
  void *context, *module;
  void **functions; /* of `kernels` */
  apq_pointer weights;
  char name[128];
} apq_device;

/* Makes the device current on this thread, or says why it cannot be used; `apq_leave` undoes it. */
int apq_enter(apq_device *d);
void apq_leave(apq_device *d);
/* The code for a failure of the driver, remembered where it ends the device's use. */
int apq_device_fail(apq_device *d, apq_result_code result, const char *what);
int apq_gpu_alloc(apq_device *d, size_t bytes, const char *what, apq_pointer *out);

/* ---- launches (launch.c) ---- */

/* Kernels that the calling thread calls now are of this context; NULL ends that. */
void apq_launch_on(apq_context *c);
/* A block of working memory of a kernel's host half, kept as long as the context. */
typedef struct {
  apq_pointer data;
  size_t bytes;
  int used;
} apq_block;

/* ---- a context's stream (run.c) ---- */

enum { APQ_GRAPHS = 16, APQ_BLOCKS = 64, APQ_CHECKS = 256 };

/* What the kernel that checks ids writes (device/check_ids.cuh); `number` 0 is none found. */
typedef struct {
  int64_t number, bad, first, id;
} apq_found_ids;

typedef struct {
  const char *layer;
  int64_t rows, count;
} apq_check;

/* One captured run: of a plan, on tensors, with bits; `exec` is NULL before it is captured. */
typedef struct {
  const plan *of;
  void **tensors; /* inputs, then outputs */
  int32_t *bits;
  void *exec;
  uint64_t used;
  apq_check checks[APQ_CHECKS];
  int32_t num_checks;
} apq_graph;

struct apq_stream {
  void *stream; /* the context's own, where graphs are captured */
  void *queue;  /* where runs go: that, or one of the program's */
  void *now;    /* where kernels that are called go: one of those */
  apq_pointer found; /* apq_found_ids */
  apq_block blocks[APQ_BLOCKS];
  apq_graph *graphs[APQ_GRAPHS];
  apq_graph *calling; /* whose kernels are called */
  unsigned char *packed; /* host memory for inputs that are not contiguous */
  size_t packed_bytes;
};

/* A block that has at least so many bytes; every graph goes if it moves. */
int apq_grow(apq_context *c, region *r, size_t bytes, const char *what);

/* ---- where tensors lie (tensors.c) ---- */

/* Fills the context's pointers; tells whether a tensor of the program's is used where it lies. */
int apq_place(apq_context *c, const plan *p, const DLTensor *inputs, const DLTensor *outputs, int *in_place);
int apq_copy_in(apq_context *c, const DLTensor *inputs);
int apq_copy_out(apq_context *c, const DLTensor *outputs);

#endif
