/* Weights files that were cut, lengthened and altered: refused, or run without harm. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "bytes.h"
#include "fuzzed.h"

static unsigned char *original;
static size_t original_size;

static void read_original(void) {
  FILE *file = fopen(getenv("FUZZ_WEIGHTS"), "rb");
  if (file == NULL || fseek(file, 0, SEEK_END) != 0) abort();
  original_size = (size_t)ftell(file);
  rewind(file);
  original = malloc(original_size);
  if (original == NULL || fread(original, 1, original_size, file) != original_size) abort();
  fclose(file);
}

/* The file with a few edits; its size. */
static size_t edited(bytes *b, unsigned char *to) {
  size_t size = original_size;
  memcpy(to, original, size);
  for (unsigned edits = byte(b) % 6; edits > 0; edits--) {
    uint64_t at = word(b) % (size + 1);
    switch (byte(b) % 6) {
      case 0: size = at; break;
      case 1: size += byte(b) % 65; break; /* there is room for it */
      case 2: if (at < size) to[at] = (unsigned char)byte(b); break;
      case 3: if (size > original_size / 2) to[size - 1 - at % (original_size / 2)] ^= (unsigned char)byte(b); break;
      case 4: if (size >= 8) memcpy(to, &(uint64_t){word(b)}, 8); break;
      default: if (at + 8 <= size) memcpy(to + at, &(uint64_t){word(b)}, 8);
    }
  }
  return size;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  bytes b = {data, data + size};
  if (original == NULL) read_original();
  unsigned char *file = calloc(1, original_size + 8 * 65);
  size_t length = edited(&b, file);
  int memory = memfd_create("weights", MFD_CLOEXEC);
  if (file == NULL || memory < 0 || write(memory, file, length) != (ssize_t)length) abort();
  char path[64];
  snprintf(path, sizeof path, "/proc/self/fd/%d", memory);
  setenv("APQ_HUGE_PAGES", byte(&b) % 8 == 0 ? "1" : "0", 1);
  fuzzed_handle *handle;
  fuzzed_context *context;
  if (fuzzed_open(path, &handle) == 0) {
    int whole = fuzzed_verify(handle) == 0;
    if (whole != (length == original_size && memcmp(file, original, length) == 0)) abort();
    if (fuzzed_context_create(handle, &context) != 0) abort();
    fuzzed_context_destroy(context);
    fuzzed_close(handle);
  }
  close(memory);
  free(file);
  return 0;
}
