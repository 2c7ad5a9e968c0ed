/* Blocks of the program's memory that grow; what a block held is lost then. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/mman.h>

#include "apq_context.h"

enum { HUGE_PAGE = 2 << 20 }; /* x86-64 and, with 4 KiB pages, aarch64 */

/* Large blocks ask for huge pages, none of which reaches past the block: activations of images are read
 * and written once a layer, and each small page would miss the TLB. */
int apq_reserve(region *r, size_t bytes, const char *what) {
  size_t alignment = bytes >= 2 * HUGE_PAGE ? HUGE_PAGE : APQ_ALIGNMENT;
  if (bytes <= r->bytes) return APQ_OK;
  void *fresh = NULL;
  free(r->data);
  r->data = NULL;
  r->bytes = 0;
  if (posix_memalign(&fresh, alignment, bytes) != 0) {
    return apq_fail(APQ_NO_MEMORY, "no memory for %llu bytes of %s", (unsigned long long)bytes, what);
  }
#ifdef MADV_HUGEPAGE
  if (alignment == HUGE_PAGE) (void)madvise(fresh, bytes / HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE);
#endif
  r->data = fresh;
  r->bytes = bytes;
  return APQ_OK;
}
