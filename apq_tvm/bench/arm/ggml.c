/* Calls ggml's repacked matrix products, or what they need done to x first:
   static_ggml LIBRARY GEMM GEMV QUANTIZE4 product|prepare K M N ARGUMENTS RESULTS.
   ARGUMENTS is x float [M, K] and then the weights. Rows of x by fours are interleaved by QUANTIZE4
   and go to GEMM, the rest go one by one through quantize_row_q8_0 and GEMV, as in ggml's own
   ggml/src/ggml-cpu/repack.cpp. RESULTS gets the address the library is at and y float [M, N]. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void (*product)(int k, float *y, size_t y_stride, const void *weights, const void *x,
                        int rows, int columns);
typedef void (*quantize)(const float *x, void *to, int64_t k);

__attribute__((noinline)) void apq_trace_begin(void) { __asm__ volatile(""); }
__attribute__((noinline)) void apq_trace_end(void) { __asm__ volatile(""); }

static void *library;

static void *find(const char *name) {
  void *function = dlsym(library, name);
  if (function != NULL) return function;
  fprintf(stderr, "%s\n", dlerror());
  exit(1);
}

int main(int argc, char **argv) {
  if (argc != 11) return 2;
  library = dlopen(argv[1], RTLD_LAZY | RTLD_GLOBAL);
  if (library == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  /* Functions that depend on the length of SVE vectors ask what this finds out. */
  void (*init)(void) = (void (*)(void))dlsym(library, "ggml_cpu_init");
  if (init != NULL) init();
  product gemm = (product)find(argv[2]), gemv = (product)find(argv[3]);
  quantize four = (quantize)find(argv[4]), row = (quantize)find("quantize_row_q8_0");
  int prepare = strcmp(argv[5], "prepare") == 0;
  int k = atoi(argv[6]), m = atoi(argv[7]), n = atoi(argv[8]), fours = m - m % 4;
  size_t wide = (size_t)k / 32 * 34; /* bytes of a row of q8_0: a float16 scale, 32 codes */

  FILE *file = fopen(argv[9], "rb");
  if (file == NULL) return 2;
  fseek(file, 0, SEEK_END);
  size_t bytes = (size_t)ftell(file);
  rewind(file);
  char *arguments = aligned_alloc(64, (bytes + 127) / 64 * 64);
  if (arguments == NULL || fread(arguments, 1, bytes, file) != bytes) return 2;
  fclose(file);
  const float *x = (const float *)arguments;
  const char *weights = arguments + sizeof(float) * m * k;
  char *codes = aligned_alloc(64, (m * wide + 127) / 64 * 64);
  float *y = calloc((size_t)m * n, sizeof *y);

  if (prepare) apq_trace_begin();
  for (int i = 0; i < fours; i += 4) four(x + (size_t)i * k, codes + i * wide, k);
  for (int i = fours; i < m; i++) row(x + (size_t)i * k, codes + i * wide, k);
  if (prepare) apq_trace_end();
  if (!prepare) {
    apq_trace_begin();
    if (fours > 0) gemm(k, y, n, weights, codes, fours, n);
    for (int i = fours; i < m; i++) gemv(k, y + (size_t)i * n, n, weights, codes + i * wide, 1, n);
    apq_trace_end();
  }

  Dl_info info;
  if (dladdr((void *)gemv, &info) == 0) return 1;
  file = fopen(argv[10], "wb");
  if (file == NULL) return 2;
  fwrite(&info.dli_fbase, sizeof info.dli_fbase, 1, file);
  fwrite(y, sizeof *y, (size_t)m * n, file);
  return fclose(file) == 0 ? 0 : 2;
}
