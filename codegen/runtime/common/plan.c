/* Where buffers lie in the arena, found at run time because sizes depend on the input shapes.
 *
 * Greedy by size with best fit: Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net
 * Inference", 2020, section 5.2 (offset calculation). Largest first, each buffer goes into the
 * smallest gap between those already placed that are alive with it. */
#include "apq_runtime.h"

static size_t rounded(size_t bytes) {
  return (bytes + APQ_ALIGNMENT - 1) / APQ_ALIGNMENT * APQ_ALIGNMENT;
}

/* The sum, or SIZE_MAX, which nobody can allocate. */
size_t apq_sum(size_t a, size_t b) { return a > SIZE_MAX - b ? SIZE_MAX : a + b; }

static int together(apq_lifetime a, apq_lifetime b) {
  return a.first <= b.last && b.first <= a.last;
}

size_t apq_plan(int32_t n, const apq_lifetime *lifetimes, const size_t *bytes, size_t *offsets,
                int32_t *order) {
  int32_t *placed = order + n; /* buffers by rising offset */
  size_t arena = 0;
  for (int32_t i = 0; i < n; i++) { /* insertion sort by falling size; stable, so repeatable */
    int32_t j = i;
    for (; j > 0 && bytes[order[j - 1]] < bytes[i]; j--) order[j] = order[j - 1];
    order[j] = i;
  }
  for (int32_t i = 0; i < n; i++) {
    int32_t b = order[i];
    size_t need = rounded(bytes[b]), end = 0, best_gap = SIZE_MAX, best = 0;
    int found = 0;
    for (int32_t j = 0; j < i; j++) {
      int32_t other = placed[j];
      if (!together(lifetimes[b], lifetimes[other])) continue;
      size_t start = offsets[other], stop = apq_sum(start, rounded(bytes[other]));
      if (start >= end && start - end >= need && start - end < best_gap) {
        best_gap = start - end;
        best = end;
        found = 1;
      }
      if (stop > end) end = stop;
    }
    offsets[b] = found ? best : end;
    size_t top = apq_sum(offsets[b], need);
    if (top > arena) arena = top;
    int32_t j = i;
    for (; j > 0 && offsets[placed[j - 1]] > offsets[b]; j--) placed[j] = placed[j - 1];
    placed[j] = b;
  }
  return arena;
}

size_t apq_live_bytes(int32_t n, const apq_lifetime *lifetimes, const size_t *bytes) {
  size_t most = 0;
  for (int32_t i = 0; i < n; i++) { /* the peak is reached where some buffer begins */
    size_t now = 0;
    for (int32_t j = 0; j < n; j++) {
      if (lifetimes[j].first <= lifetimes[i].first && lifetimes[i].first <= lifetimes[j].last) {
        now = apq_sum(now, bytes[j]);
      }
    }
    if (now > most) most = now;
  }
  return most;
}
