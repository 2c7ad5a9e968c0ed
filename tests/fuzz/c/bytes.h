/* Numbers out of a fuzzer's bytes; 0 once they are used up. */
#ifndef FUZZ_BYTES_H_
#define FUZZ_BYTES_H_
#include <stddef.h>
#include <stdint.h>

typedef struct {
  const uint8_t *at, *end;
} bytes;

static inline unsigned byte(bytes *b) { return b->at < b->end ? *b->at++ : 0; }
static inline uint64_t word(bytes *b) {
  uint64_t w = 0;
  for (int i = 0; i < 8; i++) w = w << 8 | byte(b);
  return w;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
#endif
