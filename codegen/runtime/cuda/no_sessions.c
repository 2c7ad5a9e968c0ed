/* Modules for GPUs have no sessions yet: their tables say so, and what is called all the same tells. */
#include "apq_context.h"

static int none(void) { return apq_fail(APQ_BAD_INPUT, "modules for GPUs have no sessions: give _run the caches"); }

int apq_leave_caches(apq_context *c, size_t *bytes) {
  (void)c, (void)bytes;
  return none();
}
int apq_session_create(const apq_handle *h, int64_t batch, int64_t max_tokens, const DLTensor *given,
                       apq_session **out) {
  (void)h, (void)batch, (void)max_tokens, (void)given, (void)out;
  return none();
}
int apq_session_fork(apq_session *s, apq_session **out) {
  (void)s, (void)out;
  return none();
}
void apq_session_destroy(apq_session *s) { (void)s; }
int apq_session_run(apq_session *s, const int64_t *ids, int64_t tokens, int64_t asked, void *logits,
                    int32_t bits) {
  (void)s, (void)ids, (void)tokens, (void)asked, (void)logits, (void)bits;
  return none();
}
int apq_session_rewind(apq_session *s, int64_t tokens) {
  (void)s, (void)tokens;
  return none();
}
int64_t apq_session_length(const apq_session *s) {
  (void)s;
  return none();
}
int64_t apq_session_width(const apq_session *s) {
  (void)s;
  return none();
}
apq_context *apq_session_context(apq_session *s) {
  (void)s, (void)none();
  return NULL;
}
int apq_session_memory(const apq_session *s, uint64_t *cache_bytes, uint64_t *arena_bytes) {
  (void)s, (void)cache_bytes, (void)arena_bytes;
  return none();
}
