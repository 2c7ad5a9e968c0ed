/* Preloaded: every block that a module allocates with posix_memalign, and its weights file, ends
 * where a page ends that nobody may touch the next of. Blocks are never handed out twice. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

enum { PAGE = 4096 };
static const size_t RESERVED = (size_t)1 << 38;

static _Atomic(char *) reserved, next;

/* Readable and writable bytes, `size` of them, that end at the end of a page. */
static char *at_the_end(size_t size, size_t alignment) {
  char *base = atomic_load(&reserved);
  if (base == NULL) {
    char *fresh = (char *)syscall(9 /* mmap on x86-64 */, NULL, RESERVED, PROT_NONE,
                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (fresh == MAP_FAILED) return NULL;
    if (atomic_compare_exchange_strong(&reserved, &base, fresh)) atomic_store(&next, fresh);
  }
  while (atomic_load(&next) == NULL) {
  }
  size_t used = (size + alignment - 1) / alignment * alignment;
  size_t pages = (used + PAGE - 1) / PAGE * PAGE;
  char *start = atomic_fetch_add(&next, (ptrdiff_t)(pages + PAGE));
  if (mprotect(start, pages, PROT_READ | PROT_WRITE) != 0) return NULL;
  return start + pages - used;
}

static int is_ours(const void *p) {
  char *base = atomic_load(&reserved);
  return base != NULL && (const char *)p >= base && (const char *)p < base + RESERVED;
}

int posix_memalign(void **out, size_t alignment, size_t size) {
  *out = at_the_end(size, alignment);
  return *out == NULL ? ENOMEM : 0;
}

void free(void *p) {
  static void (*real)(void *);
  if (p == NULL || is_ours(p)) return;
  if (real == NULL) *(void **)&real = dlsym(RTLD_NEXT, "free");
  real(p);
}

void *mmap(void *wish, size_t size, int protection, int flags, int file, off_t offset) {
  if (file < 0 || protection != PROT_READ) {
    return (void *)syscall(9, wish, size, protection, flags, file, offset);
  }
  char *data = at_the_end(size, 64);
  for (size_t done = 0; data != NULL && done < size;) {
    ssize_t got = pread(file, data + done, size - done, offset + (off_t)done);
    if (got <= 0) return MAP_FAILED;
    done += (size_t)got;
  }
  return data == NULL ? MAP_FAILED : data;
}

int munmap(void *p, size_t size) { return is_ours(p) ? 0 : (int)syscall(11, p, size); }
