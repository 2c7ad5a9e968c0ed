/* The CUDA driver, found at run time. */
#include <dlfcn.h>
#include <pthread.h>

#include "apq_cuda.h"

enum { OUT_OF_MEMORY = 2 };

static apq_driver driver;
static char problem[512]; /* why there is none, "" if there is */
static pthread_once_t once = PTHREAD_ONCE_INIT;

#define FIND(field, symbol, parameters)                                                           \
  *(void **)&driver.field = dlsym(library, #symbol);                                              \
  if (driver.field == NULL && problem[0] == '\0') {                                               \
    snprintf(problem, sizeof problem,                                                             \
             "the NVIDIA driver is too old: it lacks " #symbol "; install release 525 or later"); \
  }

#include <stdio.h>

static void find(void) {
  void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) {
    snprintf(problem, sizeof problem,
             "no NVIDIA driver on this machine (%s); install one, or compile the model for the processor "
             "(--target host)",
             dlerror());
    return;
  }
  APQ_DRIVER(FIND)
  if (problem[0] != '\0') return;
  apq_result_code rc = driver.init(0);
  if (rc != 0) {
    const char *name = "unknown error";
    (void)driver.get_error_name(rc, &name);
    snprintf(problem, sizeof problem, "the NVIDIA driver does not start: %s (%d)", name, rc);
  }
}

const apq_driver *apq_driver_of(const char *module) {
  pthread_once(&once, find);
  if (problem[0] == '\0') return &driver;
  (void)apq_fail(APQ_BAD_MACHINE, "lib%s: %s", module, problem);
  return NULL;
}

int apq_cuda_fail(apq_result_code result, const char *what) {
  const char *name = "unknown error";
  (void)driver.get_error_name(result, &name);
  return apq_fail(result == OUT_OF_MEMORY ? APQ_NO_MEMORY : APQ_KERNEL_FAILED, "CUDA: %s: %s (%d)", what,
                  name, result);
}
