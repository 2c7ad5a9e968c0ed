/* What a session keeps for runs on a processor lies in its memory. */
#include <stdlib.h>

#include "apq_context.h"

/* Their activations stay near the processor. */
int64_t apq_together(void) { return 256; }

DLDevice apq_resident_device(const apq_context *c) {
  (void)c;
  return (DLDevice){kDLCPU, 0};
}

int apq_reserve_resident(apq_context *c, region *r, size_t bytes, const char *what) {
  (void)c;
  return apq_reserve(r, bytes, what);
}

void apq_free_resident(apq_context *c, region *r) {
  (void)c;
  free(r->data);
  *r = (region){NULL, 0};
}

int apq_put_resident(apq_context *c, region *r, const DLTensor *t, size_t bytes) {
  return apq_copy_resident(c, r->data, apq_address(t), bytes);
}

int apq_copy_resident(apq_context *c, void *to, const void *from, size_t bytes) {
  (void)c;
  memcpy(to, from, bytes);
  return APQ_OK;
}
