/* The weights file: safetensors (https://github.com/huggingface/safetensors), mapped read only; or,
 * with APQ_HUGE_PAGES=1, read into huge pages: reading each weight once then misses the TLB less. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
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

enum { HUGE_PAGE = 2 << 20 }; /* x86-64 and, with 4 KiB pages, aarch64 */

/* Read a file into memory that starts and ends on huge pages; MAP_FAILED and errno on failure. */
static void *read_huge(int file, size_t bytes, size_t *mapped) {
  size_t size = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
  char *start = mmap(NULL, size + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) return MAP_FAILED;
  size_t before = (HUGE_PAGE - (uintptr_t)start % HUGE_PAGE) % HUGE_PAGE;
  char *data = start + before;
  if (before > 0) munmap(start, before);
  munmap(data + size, HUGE_PAGE - before);
  (void)madvise(data, size, MADV_HUGEPAGE); /* without it the pages are small, and right */
  for (size_t done = 0; done < bytes;) {
    ssize_t got = pread(file, data + done, bytes - done, (off_t)done);
    if (got > 0) {
      done += (size_t)got;
    } else if (got == 0 || errno != EINTR) {
      if (got == 0) errno = EIO; /* the file shrank */
      munmap(data, size);
      return MAP_FAILED;
    }
  }
  mprotect(data, size, PROT_READ);
  *mapped = size;
  return data;
}

static int wants_huge(void) {
  const char *wish = getenv("APQ_HUGE_PAGES");
  return wish != NULL && strcmp(wish, "1") == 0;
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
  size_t bytes = (size_t)st.st_size, mapped = bytes;
  void *data = wants_huge() ? read_huge(file, bytes, &mapped)
                            : mmap(NULL, bytes, PROT_READ, MAP_PRIVATE, file, 0);
  int error = errno;
  close(file);
  if (data == MAP_FAILED) {
    return apq_fail(APQ_BAD_WEIGHTS, "%s: cannot be mapped: %s", path, strerror(error));
  }
  int rc = check(m, path, data, bytes);
  if (rc != APQ_OK) {
    munmap(data, mapped);
    return rc;
  }
  out->data = data;
  out->bytes = bytes;
  out->mapped = mapped;
  return APQ_OK;
}

void apq_weights_close(apq_weights *weights) {
  if (weights->data != NULL) munmap(weights->data, weights->mapped);
  weights->data = NULL;
}
