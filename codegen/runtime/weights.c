/* The weights file: safetensors (https://github.com/huggingface/safetensors), mapped read only. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "apq_runtime.h"

uint64_t apq_checksum(const unsigned char *data, size_t bytes) {
  uint64_t sum = bytes;
  for (size_t i = 0; i < bytes / 8; i++) {
    uint64_t w;
    memcpy(&w, data + 8 * i, 8);
    w = (w ^ (w >> 32)) * 0x9E3779B97F4A7C15u;
    sum += (2 * (uint64_t)i + 1) * (w ^ (w >> 29));
  }
  return sum;
}

static int check(const apq_module *m, const char *path, const unsigned char *data, uint64_t bytes) {
  if (bytes < m->header_bytes || apq_checksum(data, m->header_bytes) != m->header_checksum) {
    return apq_fail(APQ_BAD_WEIGHTS,
                    "%s: its safetensors header is not the one lib%s was built with; the file was "
                    "altered, or belongs to another build. Compile the module again",
                    path, m->name);
  }
  if (bytes != m->file_bytes) {
    return apq_fail(APQ_BAD_WEIGHTS,
                    "%s: %llu bytes, expected %llu; the file was truncated or altered. Copy or compile "
                    "the module again",
                    path, (unsigned long long)bytes, (unsigned long long)m->file_bytes);
  }
  return APQ_OK;
}

int apq_weights_open(const apq_module *m, const char *path, apq_weights *out) {
  struct stat st;
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0 || fstat(file, &st) != 0) {
    int rc = apq_fail(APQ_BAD_WEIGHTS, "%s: cannot be read: %s", path, strerror(errno));
    if (file >= 0) close(file);
    return rc;
  }
  if (st.st_size == 0) {
    close(file);
    return apq_fail(APQ_BAD_WEIGHTS, "%s: the file is empty; copy or compile the module again", path);
  }
  void *data = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, file, 0);
  int error = errno;
  close(file);
  if (data == MAP_FAILED) {
    return apq_fail(APQ_BAD_WEIGHTS, "%s: cannot be mapped: %s", path, strerror(error));
  }
  int rc = check(m, path, data, (uint64_t)st.st_size);
  if (rc != APQ_OK) {
    munmap(data, (size_t)st.st_size);
    return rc;
  }
  out->data = data;
  out->bytes = (size_t)st.st_size;
  return APQ_OK;
}

void apq_weights_close(apq_weights *weights) {
  if (weights->data != NULL) munmap(weights->data, weights->bytes);
  weights->data = NULL;
}
