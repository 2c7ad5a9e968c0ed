/* Kernels' host halves, which TVM makes, reach the driver through these: TVM 0.27's codegen calls packed
 * functions by three pointers that the object file holds as weak nulls (src/target/llvm/codegen_cpu.cc). */
#include <stdio.h>
#include <stdlib.h>

#include "apq_cuda.h"

enum { MOST_PARAMS = 512, SET_DEVICE = 1 }; /* parameters: 4096 bytes */

static _Thread_local apq_context *now;

void apq_launch_on(apq_context *c) { now = c; }

static int look_up(void *library, const char *name, void **out) {
  (void)library;
  if (strcmp(name, "__tvm_set_device") == 0) { /* it is current already */
    *out = (void *)(uintptr_t)SET_DEVICE;
    return 0;
  }
  const struct apq_device_code *code = now->handle->module->code;
  for (int32_t i = 0; i < code->num_kernels; i++) {
    if (strcmp(code->kernels[i].name, name) == 0) {
      *out = (void *)(uintptr_t)&code->kernels[i];
      return 0;
    }
  }
  return apq_fail(APQ_KERNEL_FAILED, "the module has no kernel %s", name);
}

static int init_once(void **handle, int (*init)(void **)) {
  /* Threads may meet here: they find the same, and a pointer is stored whole. */
  return *handle != NULL ? 0 : init(handle);
}

/* CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". */
static int grid_fits(const int64_t *size) {
  return size[0] >= 1 && size[0] <= INT32_MAX && size[1] >= 1 && size[1] <= 65535 && size[2] >= 1 &&
         size[2] <= 65535;
}

static int call(void *handle, const apq_any *args, int32_t count, apq_any *result) {
  (void)result;
  if ((uintptr_t)handle == SET_DEVICE) return 0;
  const apq_gpu_kernel *k = handle;
  apq_device *d = now->handle->device;
  const struct apq_device_code *code = now->handle->module->code;
  int32_t params = (int32_t)strlen(k->params);
  if (count != params + k->launches || params > MOST_PARAMS) {
    return apq_fail(APQ_KERNEL_FAILED, "kernel %s: %d arguments", k->name, (int)count);
  }
  union {
    int64_t whole;
    int32_t half;
    float real;
  } values[MOST_PARAMS];
  void *pointers[MOST_PARAMS];
  for (int32_t i = 0; i < params; i++) {
    pointers[i] = &values[i];
    values[i].whole = args[i].v_int64;
    if (k->params[i] == 'i') values[i].half = (int32_t)args[i].v_int64;
    if (k->params[i] == 'f') { /* a double on the host's side */
      double real;
      memcpy(&real, &args[i].v_int64, sizeof real);
      values[i].real = (float)real;
    }
  }
  int64_t size[APQ_LAUNCHES] = {1, 1, 1, 1, 1, 1, 0};
  for (int32_t i = 0; i < k->launches; i++) size[k->launch[i]] = args[params + i].v_int64;
  if (size[0] == 0 || size[1] == 0 || size[2] == 0) return 0; /* nothing to do */
  if (!grid_fits(size)) {
    return apq_fail(APQ_KERNEL_FAILED,
                    "kernel %s: a grid of %lld x %lld x %lld blocks is beyond the GPU's: give a run fewer rows",
                    k->name, (long long)size[0], (long long)size[1], (long long)size[2]);
  }
  apq_result_code rc = d->cu->launch(d->functions[k - code->kernels], (unsigned)size[0], (unsigned)size[1],
                                     (unsigned)size[2], (unsigned)size[3], (unsigned)size[4], (unsigned)size[5],
                                     (unsigned)size[6], now->stream->now, pointers, NULL);
  return rc == 0 ? 0 : apq_device_fail(d, rc, k->name);
}

extern void *__tvm_ffi__library_ctx; /* what look_up gets first */
void *__tvm_ffi__library_ctx = NULL;
extern int (*__TVMFFIEnvModLookupFromImports)(void *, const char *, void **);
extern int (*__TVMFFIFunctionCall)(void *, const apq_any *, int32_t, apq_any *);
extern int (*__TVMFFIHandleInitOnce)(void **, int (*)(void **));
int (*__TVMFFIEnvModLookupFromImports)(void *, const char *, void **) = look_up;
int (*__TVMFFIFunctionCall)(void *, const apq_any *, int32_t, apq_any *) = call;
int (*__TVMFFIHandleInitOnce)(void **, int (*)(void **)) = init_once;

/* ---- working memory between the kernels of one host half ---- */

/* Runs of a session are never captured: a block that is free, and too small, makes place for a larger one.
 * Kernels of this run may still be at it. */
static void drop_small_block(void) {
  apq_device *d = now->handle->device;
  apq_block *largest = NULL;
  for (int i = 0; i < APQ_BLOCKS; i++) {
    apq_block *b = &now->stream->blocks[i];
    if (b->data != 0 && !b->used && (largest == NULL || b->bytes > largest->bytes)) largest = b;
  }
  if (largest == NULL) return;
  (void)d->cu->synchronize(now->stream->now);
  (void)d->cu->free(largest->data);
  *largest = (apq_block){0, 0, 0};
}

static apq_block *free_block(uint64_t bytes, apq_block **fresh) {
  apq_block *fit = NULL;
  *fresh = NULL;
  for (int i = 0; i < APQ_BLOCKS; i++) {
    apq_block *b = &now->stream->blocks[i];
    if (b->data == 0 && *fresh == NULL) *fresh = b;
    if (b->data != 0 && !b->used && b->bytes >= bytes && (fit == NULL || b->bytes < fit->bytes)) fit = b;
  }
  return fit;
}

static void *workspace_alloc(int device_type, int device_id, uint64_t bytes, int dtype_code, int dtype_bits) {
  (void)device_type, (void)device_id, (void)dtype_code, (void)dtype_bits;
  apq_block *fresh, *fit = free_block(bytes, &fresh); /* else none is ever freed: graphs know it */
  if (fit == NULL && now->session != NULL) {
    drop_small_block();
    fit = free_block(bytes, &fresh);
  }
  if (fit == NULL && fresh != NULL &&
      apq_gpu_alloc(now->handle->device, bytes, "kernel scratch", &fresh->data) == APQ_OK) {
    fresh->bytes = bytes;
    fit = fresh;
  }
  if (fit == NULL) {
    if (fresh == NULL) (void)apq_fail(APQ_NO_MEMORY, "a kernel wants more than %d blocks of scratch", APQ_BLOCKS);
    return NULL;
  }
  fit->used = 1;
  return (void *)(uintptr_t)fit->data;
}

static int workspace_free(int device_type, int device_id, void *data) {
  (void)device_type, (void)device_id;
  for (int i = 0; i < APQ_BLOCKS; i++) {
    apq_block *b = &now->stream->blocks[i];
    if (b->used && b->data == (apq_pointer)(uintptr_t)data) {
      b->used = 0;
      return 0;
    }
  }
  return apq_fail(APQ_KERNEL_FAILED, "a kernel freed scratch it had not allocated");
}

extern void *(*__TVMBackendAllocWorkspace)(int, int, uint64_t, int, int);
extern int (*__TVMBackendFreeWorkspace)(int, int, void *);
void *(*__TVMBackendAllocWorkspace)(int, int, uint64_t, int, int) = workspace_alloc;
int (*__TVMBackendFreeWorkspace)(int, int, void *) = workspace_free;
