/* Runs a compiled module on tensors from a file: program WEIGHTS CALLS RESULTS [again]. The header of
 * the module is HEADER, its name NAME. Both files hold tensors as module_program.py writes and reads
 * them. With a fourth argument the module runs once more between two markers, warmed up. */
#include <stdio.h>
#include <stdlib.h>

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

int main(int argc, char **argv) {
  if (argc != 4 && argc != 5) return 2;
  API(_handle) *handle;
  API(_context) *context;
  int rc = API(_open)(argv[1], &handle);
  if (rc == 0) rc = API(_verify)(handle);
  if (rc == 0) rc = API(_context_create)(handle, &context);
  if (rc != 0) return failed(rc);
  puts(API(_target)(handle));

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
