/* Scratch memory of kernels: a few blocks per thread, kept and reused, so that a run allocates
 * nothing once each kernel has had its block. Threads free theirs when they end. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>

#include "apq_runtime.h"

enum { BLOCKS = 32 };

typedef struct {
  void *data;
  size_t bytes;
  int used;
} block;

static pthread_key_t pool_key;
static int pool_key_made = 0;
static pthread_once_t pool_once = PTHREAD_ONCE_INIT;
static _Thread_local block *pool = NULL;

static void pool_free(void *data) {
  block *blocks = data;
  for (int i = 0; i < BLOCKS; i++) free(blocks[i].data);
  free(blocks);
}

static void pool_make_key(void) { pool_key_made = pthread_key_create(&pool_key, pool_free) == 0; }

/* The library may be unloaded before the program's threads end: they must not call into it then. Our own
 * (pool.c) have ended before, as destructors without a number come first. */
__attribute__((destructor(1000))) static void pool_unload(void) {
  if (pool_key_made) pthread_key_delete(pool_key);
}

static block *pool_get(void) {
  if (pool == NULL) {
    pthread_once(&pool_once, pool_make_key);
    if (!pool_key_made) return NULL;
    block *made = calloc(BLOCKS, sizeof(block));
    if (made == NULL) return NULL;
    if (pthread_setspecific(pool_key, made) != 0) {
      free(made);
      return NULL;
    }
    pool = made;
  }
  return pool;
}

static void *workspace_alloc(int device_type, int device_id, uint64_t bytes, int dtype_code,
                             int dtype_bits) {
  (void)device_type, (void)device_id, (void)dtype_code, (void)dtype_bits;
  block *blocks = pool_get();
  if (blocks == NULL) return NULL;
  block *fit = NULL, *grow = NULL; /* the smallest free block that fits, the largest that does not */
  for (int i = 0; i < BLOCKS; i++) {
    block *b = &blocks[i];
    if (b->used) continue;
    if (b->data != NULL && b->bytes == bytes) { /* a kernel asks for the same again and again */
      fit = b;
      break;
    }
    if (b->data != NULL && b->bytes > bytes) {
      if (fit == NULL || b->bytes < fit->bytes) fit = b;
    } else if (grow == NULL || b->bytes > grow->bytes) {
      grow = b;
    }
  }
  if (fit == NULL && grow != NULL) {
    free(grow->data);
    grow->data = NULL;
    grow->bytes = 0;
    if (posix_memalign(&grow->data, APQ_ALIGNMENT, bytes == 0 ? 1 : bytes) != 0) {
      grow->data = NULL;
    } else {
      grow->bytes = bytes;
      fit = grow;
    }
  }
  if (fit == NULL) {
    (void)apq_fail(APQ_NO_MEMORY, "no memory for %llu bytes of kernel scratch",
                   (unsigned long long)bytes);
    return NULL;
  }
  fit->used = 1;
  return fit->data;
}

static int workspace_free(int device_type, int device_id, void *data) {
  (void)device_type, (void)device_id;
  for (int i = 0; pool != NULL && i < BLOCKS; i++) {
    if (pool[i].data == data && pool[i].used) {
      pool[i].used = 0;
      return 0;
    }
  }
  return apq_fail(APQ_KERNEL_FAILED, "a kernel freed scratch it had not allocated");
}

/* Kernels call through these pointers, which their object file holds as weak nulls. */
extern void *(*__TVMBackendAllocWorkspace)(int, int, uint64_t, int, int);
extern int (*__TVMBackendFreeWorkspace)(int, int, void *);
void *(*__TVMBackendAllocWorkspace)(int, int, uint64_t, int, int) = workspace_alloc;
int (*__TVMBackendFreeWorkspace)(int, int, void *) = workspace_free;
