/* Runs a compiled module on tensors from a file:
 *
 *   program WEIGHTS CALLS RESULTS [again | time THREADS ROUNDS MILLISECONDS COLD_BYTES]
 *
 * The header of the module is HEADER, its name NAME. Both files hold tensors as module_program.py writes
 * and reads them. `again` runs the module once more between two markers, warmed up. `time` runs it for a
 * while, in samples of some milliseconds, and prints `sample NANOSECONDS RUNS` of each; with COLD_BYTES it
 * writes so many bytes before each sample, which is one run then, so that caches hold nothing of it.
 * Without threads (0) it has what it starts with. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include HEADER

#define JOIN2(a, b) a##b
#define JOIN(a, b) JOIN2(a, b)
#define API(function) JOIN(NAME, function)

static void get(void *data, size_t bytes, FILE *file) {
  if (fread(data, 1, bytes, file) != bytes) {
    fputs("the file of tensors is too short\n", stderr);
    exit(2);
  }
}

static int failed(int code) {
  fprintf(stderr, "%d %s\n", code, API(_last_error)());
  return 1;
}

/* Type, rank and dimensions; no data yet. */
static DLTensor get_tensor(FILE *file) {
  DLTensor t = {NULL, {kDLCPU, 0}, 0, {0, 0, 1}, NULL, NULL, 0};
  get(&t.dtype, sizeof t.dtype, file);
  get(&t.ndim, sizeof t.ndim, file);
  t.shape = calloc((size_t)t.ndim + 1, sizeof(int64_t));
  get(t.shape, (size_t)t.ndim * sizeof(int64_t), file);
  return t;
}

static size_t bytes_of(const DLTensor *t) {
  size_t bytes = t->dtype.bits / 8;
  for (int32_t i = 0; i < t->ndim; i++) bytes *= (size_t)t->shape[i];
  return bytes;
}

/* What qemu counts is between these (trace.py). */
__attribute__((noinline)) void apq_trace_begin(void) { __asm__ volatile(""); }
__attribute__((noinline)) void apq_trace_end(void) { __asm__ volatile(""); }

/* Its shape is known only after a run. */
static int is_late(const DLTensor *t) {
  for (int32_t i = 0; i < t->ndim; i++) {
    if (t->shape[i] < 0) return 1;
  }
  return 0;
}

static int64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

enum { SAMPLE_NS = 2000000 }; /* long beside what asking the clock costs */

/* Arguments: ROUNDS, MILLISECONDS, COLD_BYTES; the module ran once already. */
static int timed(API(_context) *context, const DLTensor *inputs, DLTensor *outputs, int bits, char **argv) {
  long rounds = atol(argv[0]), cold = atol(argv[2]);
  int64_t over = now() + atol(argv[1]) * 1000000LL, began = now();
  unsigned char *other = cold > 0 ? malloc((size_t)cold) : NULL;
  if (cold > 0 && other == NULL) {
    fprintf(stderr, "no memory for %ld bytes that empty the caches\n", cold);
    return 2;
  }
  int rc = API(_run_bits)(context, inputs, outputs, bits);
  int64_t once = now() - began;
  int64_t runs = cold > 0 || once <= 0 ? 1 : 1 + SAMPLE_NS / once;
  for (long round = 0; rc == 0 && (round < 5 || (round < rounds && now() < over)); round++) {
    if (other != NULL) memset(other, (int)round, (size_t)cold);
    __asm__ volatile("" ::"r"(other) : "memory"); /* nobody reads it: compilers might leave it out */
    began = now();
    for (int64_t i = 0; rc == 0 && i < runs; i++) rc = API(_run_bits)(context, inputs, outputs, bits);
    if (rc == 0) printf("sample %lld %lld\n", (long long)(now() - began), (long long)runs);
  }
  free(other);
  return rc == 0 ? 0 : failed(rc);
}

int main(int argc, char **argv) {
  int timing = argc == 9 && strcmp(argv[4], "time") == 0;
  if (argc != 4 && argc != 5 && !timing) return 2;
  API(_handle) *handle;
  API(_context) *context;
  int rc = API(_open)(argv[1], &handle);
  if (rc == 0) rc = API(_verify)(handle);
  if (rc == 0 && timing && atoi(argv[5]) > 0) rc = API(_set_num_threads)(handle, atoi(argv[5]));
  if (rc == 0) rc = API(_context_create)(handle, &context);
  if (rc != 0) return failed(rc);
  puts(API(_target)(handle));
  if (timing) printf("threads %d\n", (int)API(_num_threads)(handle));

  FILE *file = fopen(argv[2], "rb");
  if (file == NULL) return 2;
  int32_t bits, num_inputs, num_outputs;
  get(&bits, sizeof bits, file);
  get(&num_inputs, sizeof num_inputs, file);
  DLTensor *inputs = calloc((size_t)num_inputs + 1, sizeof *inputs);
  for (int32_t i = 0; i < num_inputs; i++) {
    inputs[i] = get_tensor(file);
    inputs[i].data = malloc(bytes_of(&inputs[i]) + 1);
    get(inputs[i].data, bytes_of(&inputs[i]), file);
  }
  get(&num_outputs, sizeof num_outputs, file);
  DLTensor *outputs = calloc((size_t)num_outputs + 1, sizeof *outputs);
  for (int32_t i = 0; i < num_outputs; i++) {
    outputs[i] = get_tensor(file); /* its dimensions are what the module says */
    rc = API(_output_shape)(context, inputs, i, outputs[i].shape);
    if (rc != 0) return failed(rc);
    outputs[i].data = is_late(&outputs[i]) ? NULL : malloc(bytes_of(&outputs[i]) + 1);
  }
  fclose(file);
  rc = API(_run_bits)(context, inputs, outputs, bits); /* 0: what there is */
  if (rc == 0 && argc == 5) {
    apq_trace_begin();
    rc = API(_run_bits)(context, inputs, outputs, bits);
    apq_trace_end();
  }
  if (rc != 0) return failed(rc);
  if (timing && (rc = timed(context, inputs, outputs, bits, argv + 6)) != 0) return rc;

  for (int32_t i = 0; i < num_outputs; i++) {
    if (outputs[i].data == NULL && (rc = API(_result)(context, i, &outputs[i])) != 0) return failed(rc);
  }
  file = fopen(argv[3], "wb");
  if (file == NULL) return 2;
  for (int32_t i = 0; i < num_outputs; i++) {
    fwrite(outputs[i].shape, sizeof(int64_t), (size_t)outputs[i].ndim, file);
    fwrite(outputs[i].data, 1, bytes_of(&outputs[i]), file);
  }
  return fclose(file) == 0 ? 0 : 2;
}
