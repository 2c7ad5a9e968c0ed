/* Calls ggml's repacked matrix products: static_ggml LIBRARY GEMM GEMV K M N ARGUMENTS RESULTS.
   ARGUMENTS holds the weights, then activations of the first M - M % 4 rows for GEMM (four rows
   interleaved), then those of the rest, row by row, for GEMV; each part preceded by its bytes.
   RESULTS gets the address the library was loaded at and y float [M, N]. The functions are
   void f(int k, float *y, size_t y_stride, const void *weights, const void *activations,
          int rows, int columns); (ggml/src/ggml-cpu/repack.h) */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef void (*product)(int, float *, size_t, const void *, const void *, int, int);

__attribute__((noinline)) void apq_trace_begin(void) { __asm__ volatile(""); }
__attribute__((noinline)) void apq_trace_end(void) { __asm__ volatile(""); }

static void *part(FILE *file, uint64_t *bytes) {
  if (fread(bytes, sizeof *bytes, 1, file) != 1) exit(2);
  void *data = aligned_alloc(64, (*bytes + 127) / 64 * 64);
  if (data == NULL || fread(data, 1, *bytes, file) != *bytes) exit(2);
  return data;
}

int main(int argc, char **argv) {
  if (argc != 9) return 2;
  void *library = dlopen(argv[1], RTLD_LAZY | RTLD_GLOBAL);
  if (library == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  /* Functions that depend on the length of SVE vectors ask what this finds out. */
  void (*init)(void) = (void (*)(void))dlsym(library, "ggml_cpu_init");
  if (init != NULL) init();
  product gemm = (product)dlsym(library, argv[2]), gemv = (product)dlsym(library, argv[3]);
  Dl_info info;
  if (gemm == NULL || gemv == NULL || dladdr((void *)gemv, &info) == 0) {
    fprintf(stderr, "%s has no %s or %s\n", argv[1], argv[2], argv[3]);
    return 1;
  }
  int k = atoi(argv[4]), m = atoi(argv[5]), n = atoi(argv[6]), fours = m - m % 4;
  FILE *file = fopen(argv[7], "rb");
  if (file == NULL) return 2;
  uint64_t bytes;
  const void *weights = part(file, &bytes), *interleaved = part(file, &bytes);
  const char *single = part(file, &bytes);
  size_t stride = bytes / (m > fours ? m - fours : 1);
  fclose(file);
  float *y = calloc((size_t)m * n, sizeof *y);
  apq_trace_begin();
  if (fours > 0) gemm(k, y, n, weights, interleaved, fours, n);
  for (int i = fours; i < m; i++)
    gemv(k, y + (size_t)i * n, n, weights, single + (i - fours) * stride, 1, n);
  apq_trace_end();
  file = fopen(argv[8], "wb");
  if (file == NULL) return 2;
  fwrite(&info.dli_fbase, sizeof info.dli_fbase, 1, file);
  fwrite(y, sizeof *y, (size_t)m * n, file);
  return fclose(file) == 0 ? 0 : 2;
}
