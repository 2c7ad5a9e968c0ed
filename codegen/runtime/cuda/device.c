/* A GPU: which one, its image, its copy of the weights. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "apq_cuda.h"

/* CUdevice_attribute and CUfunction_attribute. */
enum { MULTIPROCESSORS = 16, MAJOR = 75, MINOR = 76, SHARED_OPTIN = 97, DYNAMIC_SHARED = 8 };

enum { JETSON_ORIN = 87 };

/* The results after which a context is of no use: CUDA Driver API, CUresult, "must be relaunched". */
static int is_fatal(apq_result_code result) {
  return result == 700 || result == 702 || (result >= 710 && result <= 719);
}

int apq_device_fail(apq_device *d, apq_result_code result, const char *what) {
  if (is_fatal(result)) atomic_store(&d->broken, result);
  return apq_cuda_fail(result, what);
}

int apq_enter(apq_device *d) {
  if (d->pid != (int)getpid()) {
    return apq_fail(APQ_KERNEL_FAILED,
                    "GPU %d (%s) was opened before this process was forked, which CUDA does not survive: "
                    "import the module in the child, or start it by spawn",
                    d->ordinal, d->name);
  }
  apq_result_code rc = atomic_load(&d->broken);
  if (rc != 0) {
    return apq_cuda_fail(rc, "an earlier run's kernel faulted, and nothing can run after it: start the "
                             "process again");
  }
  rc = d->cu->push(d->context);
  return rc == 0 ? APQ_OK : apq_device_fail(d, rc, "cuCtxPushCurrent");
}

void apq_leave(apq_device *d) {
  void *context;
  (void)d->cu->pop(&context);
}

int apq_gpu_alloc(apq_device *d, size_t bytes, const char *what, apq_pointer *out) {
  apq_result_code rc = d->cu->alloc(out, bytes == 0 ? 1 : bytes);
  if (rc == 0) return APQ_OK;
  size_t left = 0, total = 0;
  (void)d->cu->memory(&left, &total);
  *out = 0;
  (void)apq_device_fail(d, rc, what);
  return apq_fail(APQ_NO_MEMORY, "GPU %d (%s): no memory for %llu bytes of %s; %llu of %llu are free",
                  d->ordinal, d->name, (unsigned long long)bytes, what, (unsigned long long)left,
                  (unsigned long long)total);
}

/* ---- which image ---- */

/* An image runs on its own capability and on later ones of the same major, but between desktops and
 * Jetsons none does (CUDA C++ Programming Guide, "Binary Compatibility"); PTX on all that are later. */
static int runs(const apq_gpu_image *image, int sm) {
  if (image->ptx || image->sm == sm) return image->sm <= sm;
  return image->sm < sm && image->sm / 10 == sm / 10 && image->sm != JETSON_ORIN && sm != JETSON_ORIN;
}

static const apq_gpu_image *image_for(const struct apq_device_code *code, int sm) {
  const apq_gpu_image *best = NULL;
  for (int32_t i = 0; i < code->num_images; i++) {
    const apq_gpu_image *image = &code->images[i];
    if (runs(image, sm) && (best == NULL || (best->ptx && !image->ptx) || (best->ptx == image->ptx && image->sm > best->sm))) {
      best = image;
    }
  }
  return best;
}

static int capability(const apq_driver *cu, int device, int *sm) {
  int major = 0, minor = 0;
  apq_result_code rc = cu->device_attribute(&major, MAJOR, device);
  if (rc == 0) rc = cu->device_attribute(&minor, MINOR, device);
  if (rc != 0) return apq_cuda_fail(rc, "cuDeviceGetAttribute");
  *sm = 10 * major + minor;
  return APQ_OK;
}

int32_t apq_num_devices(const apq_module *m) {
  const apq_driver *cu = apq_driver_of(m->name);
  int count = 0;
  if (cu == NULL) return APQ_BAD_MACHINE;
  apq_result_code rc = cu->device_count(&count);
  return rc == 0 ? (int32_t)count : apq_cuda_fail(rc, "cuDeviceGetCount");
}

static int number_of(const apq_module *m, const apq_driver *cu, int32_t ordinal, int *number) {
  int32_t count = apq_num_devices(m);
  if (count < 0) return count;
  if (count == 0) return apq_fail(APQ_BAD_MACHINE, "lib%s: this machine has no NVIDIA GPU", m->name);
  if (ordinal < 0 || ordinal >= count) {
    return apq_fail(APQ_BAD_MACHINE, "lib%s: there is no GPU %d, this machine has %d (0 to %d)", m->name,
                    (int)ordinal, (int)count, (int)count - 1);
  }
  apq_result_code rc = cu->device_get(number, ordinal);
  return rc == 0 ? APQ_OK : apq_cuda_fail(rc, "cuDeviceGet");
}

int apq_device_name(const apq_module *m, int32_t ordinal, char *name, int32_t size) {
  const apq_driver *cu = apq_driver_of(m->name);
  int number;
  if (cu == NULL) return APQ_BAD_MACHINE;
  int rc = number_of(m, cu, ordinal, &number);
  if (rc != APQ_OK) return rc;
  apq_result_code result = cu->device_name(name, size, number);
  return result == 0 ? APQ_OK : apq_cuda_fail(result, "cuDeviceGetName");
}

int apq_choose(const apq_module *const *modules, int32_t device, const apq_module **chosen) {
  const apq_module *first = modules[0];
  const apq_driver *cu = apq_driver_of(first->name);
  int number, sm, version = 0;
  if (cu == NULL) return APQ_BAD_MACHINE;
  (void)cu->version(&version);
  int rc = number_of(first, cu, device, &number);
  if (rc == APQ_OK) rc = capability(cu, number, &sm);
  if (rc != APQ_OK) return rc;
  for (const apq_module *const *at = modules; *at != NULL; at++) {
    if (image_for((*at)->code, sm) == NULL) continue;
    if (version < (*at)->code->driver) {
      return apq_fail(APQ_BAD_MACHINE,
                      "lib%s needs an NVIDIA driver of release %s or later; this one knows CUDA %d.%d", first->name,
                      (*at)->code->release, version / 1000, version % 1000 / 10);
    }
    *chosen = *at;
    return APQ_OK;
  }
  char name[128] = "";
  (void)cu->device_name(name, sizeof name, number);
  return apq_fail(APQ_BAD_MACHINE,
                  "lib%s was compiled for %s, and GPU %d (%s) has compute capability %d.%d: compile the model "
                  "for it (apq-tvm targets)",
                  first->name, first->target, (int)device, name, sm / 10, sm % 10);
}

/* ---- opening ---- */

static int load(apq_device *d, const apq_module *m) {
  const struct apq_device_code *code = m->code;
  int sm, most = 0;
  int rc = capability(d->cu, d->number, &sm);
  if (rc != APQ_OK) return rc;
  const apq_gpu_image *image = image_for(code, sm);
  unsigned char *whole = malloc((size_t)image->bytes + 1);
  if (whole == NULL) return apq_fail(APQ_NO_MEMORY, "lib%s: no memory for its code", m->name);
  whole[image->bytes] = 0; /* PTX is a string */
  int sound = apq_unpack(image->data, image->packed, whole, image->bytes);
  apq_result_code result = sound ? d->cu->load(&d->module, whole) : 200; /* CUDA_ERROR_INVALID_IMAGE */
  free(whole);
  if (result != 0) return apq_device_fail(d, result, "the module's code cannot be loaded: cuModuleLoadData");
  (void)d->cu->device_attribute(&most, SHARED_OPTIN, d->number);
  for (int32_t i = 0; i < code->num_kernels; i++) {
    const apq_gpu_kernel *k = &code->kernels[i];
    result = d->cu->function(&d->functions[i], d->module, k->name);
    if (result != 0) return apq_device_fail(d, result, k->name);
    for (int32_t j = 0; j < k->launches; j++) {
      if (k->launch[j] != APQ_LAUNCHES - 1) continue;
      result = d->cu->function_attribute(d->functions[i], DYNAMIC_SHARED, most);
      if (result != 0) return apq_device_fail(d, result, k->name);
    }
  }
  return APQ_OK;
}

static int fill(apq_device *d, const apq_weights *weights) {
  int rc = apq_gpu_alloc(d, weights->bytes, "weights", &d->weights);
  if (rc != APQ_OK) return rc;
  apq_result_code result = d->cu->upload(d->weights, weights->data, weights->bytes, NULL);
  if (result == 0) result = d->cu->synchronize(NULL);
  return result == 0 ? APQ_OK : apq_device_fail(d, result, "copying the weights");
}

int apq_handle_open(apq_handle *h, int32_t ordinal) {
  const apq_module *m = h->module;
  const apq_driver *cu = apq_driver_of(m->name);
  if (cu == NULL) return APQ_BAD_MACHINE;
  atomic_init(&h->threads, 1);
  size_t kernels = (size_t)m->code->num_kernels;
  apq_device *d = calloc(1, sizeof *d + kernels * sizeof(void *));
  if (d == NULL) return apq_fail(APQ_NO_MEMORY, "lib%s: no memory for a handle", m->name);
  d->cu = cu;
  d->functions = (void **)(d + 1);
  d->ordinal = (int)ordinal;
  d->pid = (int)getpid();
  int rc = number_of(m, cu, ordinal, &d->number);
  if (rc != APQ_OK) {
    free(d);
    return rc;
  }
  (void)cu->device_name(d->name, sizeof d->name, d->number);
  apq_result_code result = cu->retain(&d->context, d->number);
  if (result != 0) {
    rc = apq_cuda_fail(result, "cuDevicePrimaryCtxRetain");
    free(d);
    return rc;
  }
  h->device = d;
  rc = apq_enter(d);
  if (rc != APQ_OK) return rc;
  rc = load(d, m);
  if (rc == APQ_OK) rc = fill(d, &h->weights);
  apq_leave(d);
  return rc;
}

void apq_handle_close(apq_handle *h) {
  apq_device *d = h->device;
  if (d == NULL) return;
  if (d->pid == (int)getpid()) {
    if (d->cu->push(d->context) == 0) {
      if (d->weights != 0) (void)d->cu->free(d->weights);
      if (d->module != NULL) (void)d->cu->unload(d->module);
      apq_leave(d);
    }
    (void)d->cu->release(d->number);
  }
  free(d);
}
