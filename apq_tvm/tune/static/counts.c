/* Writes how often each piece of an instrumented kernel ran (apq_tvm.tune.static.x86), at exit. */
#include <stdint.h>
#include <stdio.h>

extern uint64_t apq_counts[];
extern const uint64_t apq_counts_size;

__attribute__((destructor)) static void write_counts(void) {
  FILE *file = fopen("counts", "w");
  if (file == NULL) return;
  for (uint64_t i = 0; i < apq_counts_size; i++) fprintf(file, "%llu\n", (unsigned long long)apq_counts[i]);
  fclose(file);
}
