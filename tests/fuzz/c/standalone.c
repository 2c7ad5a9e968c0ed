/* In place of libFuzzer: random inputs, and mutations of them, for some seconds. The input at hand is
 * always in the file that is named first, so that it is there after a crash; files behind it are run
 * once each instead. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "bytes.h"

enum { MOST = 4096, POOL = 64 };

static uint64_t state = 88172645463325252u;
static uint64_t draw(void) { /* xorshift64, Marsaglia 2003 */
  state ^= state << 13;
  state ^= state >> 7;
  return state ^= state << 17;
}

static int run_file(const char *path) {
  static uint8_t data[1 << 20];
  FILE *file = fopen(path, "rb");
  if (file == NULL) return 1;
  size_t size = fread(data, 1, sizeof data, file);
  fclose(file);
  return LLVMFuzzerTestOneInput(data, size);
}

int main(int argc, char **argv) {
  if (argc < 3) return 2;
  for (int i = 3; i < argc; i++) {
    if (run_file(argv[i]) != 0) return 1;
  }
  if (argc > 3) return 0;
  static uint8_t pool[POOL][MOST];
  static size_t sizes[POOL];
  int file = open(argv[1], O_RDWR | O_CREAT | O_TRUNC, 0644);
  if (file < 0 || ftruncate(file, MOST) != 0) return 2;
  uint8_t *kept = mmap(NULL, MOST, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (kept == MAP_FAILED) return 2;
  time_t end = time(NULL) + atol(argv[2]);
  state ^= (uint64_t)time(NULL) << 20 ^ (uint64_t)getpid();
  unsigned long count = 0;
  for (; time(NULL) < end; count++) {
    size_t at = draw() % POOL;
    if (draw() % 4 == 0 || sizes[at] == 0) {
      sizes[at] = draw() % MOST;
      for (size_t i = 0; i < sizes[at]; i++) pool[at][i] = draw() % 3 ? 0 : (uint8_t)draw();
    }
    for (int i = 0; i < 1 + (int)(draw() % 8) && sizes[at] > 0; i++) {
      pool[at][draw() % sizes[at]] = draw() % 2 ? (uint8_t)draw() : (uint8_t)(240 + draw() % 16);
    }
    memcpy(kept, pool[at], MOST);
    (void)LLVMFuzzerTestOneInput(pool[at], sizes[at]);
  }
  printf("%lu inputs\n", count);
  return 0;
}
