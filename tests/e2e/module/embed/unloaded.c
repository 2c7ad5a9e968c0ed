/* Loads module_helpers.parallel_scale(4096, 3), runs it on two threads and unloads it, three times. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "scaled.h"

enum { ROWS = 64, COLUMNS = 4096 };
static float x[ROWS * COLUMNS], y[ROWS * COLUMNS];

static void look_up(void *library, const char *name, void *function) {
  void *symbol = dlsym(library, name);
  memcpy(function, &symbol, sizeof symbol);
}

static int threads(void) {
  struct stat tasks;
  return stat("/proc/self/task", &tasks) == 0 ? (int)tasks.st_nlink - 2 : -1;
}

static int use(void *library, const char *weights) {
  int (*open)(const char *, scaled_handle **), (*set)(scaled_handle *, int32_t);
  int (*create)(const scaled_handle *, scaled_context **);
  int (*run)(scaled_context *, const DLTensor *, const DLTensor *);
  void (*destroy)(scaled_context *), (*close)(scaled_handle *);
  look_up(library, "scaled_open", &open);
  look_up(library, "scaled_set_num_threads", &set);
  look_up(library, "scaled_context_create", &create);
  look_up(library, "scaled_run", &run);
  look_up(library, "scaled_context_destroy", &destroy);
  look_up(library, "scaled_close", &close);
  scaled_handle *handle;
  scaled_context *context;
  int64_t shape[] = {ROWS, COLUMNS};
  DLTensor in = {x, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, shape, NULL, 0}, out = in;
  out.data = y;
  if (open(weights, &handle) != 0 || set(handle, 2) != 0 || create(handle, &context) != 0) return 0;
  if (run(context, &in, &out) != 0 || threads() != 2) return 0;
  destroy(context);
  close(handle);
  return 1;
}

int main(int argc, char **argv) {
  for (int i = 0; i < 3; i++) {
    void *library = argc == 3 ? dlopen(argv[1], RTLD_NOW) : NULL;
    if (library == NULL || !use(library, argv[2])) return 1;
    dlclose(library);
    /* The kernel counts a thread for a moment after it was joined. */
    for (int j = 0; j < 100000 && threads() > 1; j++) {
    }
    if (threads() != 1) return 2;
  }
  puts("done");
  return 0;
}
