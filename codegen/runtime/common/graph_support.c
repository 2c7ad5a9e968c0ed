/* What the emitted graph calls beside kernels: arithmetic of shapes, checks, one kernel call. */
#include <stdio.h>
#include <string.h>

#include "apq_runtime.h"

/* Division by zero cannot trap here: a shape that comes out wrong is caught where it is used. */
int64_t apq_truncdiv(int64_t a, int64_t b) {
  return b == 0 ? 0 : b == -1 ? (int64_t)(0 - (uint64_t)a) : a / b;
}
int64_t apq_truncmod(int64_t a, int64_t b) { return b == 0 || b == -1 ? 0 : a % b; }
int64_t apq_floordiv(int64_t a, int64_t b) {
  int64_t rest = apq_truncmod(a, b);
  return apq_truncdiv(a, b) - (rest != 0 && (rest < 0) != (b < 0));
}
int64_t apq_floormod(int64_t a, int64_t b) {
  int64_t rest = apq_truncmod(a, b);
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

int apq_bytes(size_t *bytes, const char *name, size_t itemsize, int32_t ndim, const int64_t *dims) {
  size_t total = itemsize;
  int empty = 0;
  for (int32_t i = 0; i < ndim; i++) {
    if (dims[i] < 0) {
      return apq_fail(APQ_BAD_INPUT, "tensor %s would have size %lld along axis %d at this input shape",
                      name, (long long)dims[i], (int)i);
    }
    empty = empty || dims[i] == 0; /* the others must fit all the same: loops count them */
    size_t dim = dims[i] == 0 ? 1 : (size_t)dims[i];
    if (__builtin_mul_overflow(total, dim, &total) || total > SIZE_MAX / 4) {
      return apq_fail(APQ_BAD_INPUT, "tensor %s would be too large at this input shape", name);
    }
  }
  *bytes = empty ? 0 : total;
  return APQ_OK;
}

static int64_t id_at(const DLTensor *ids, int64_t i) {
  if (ids->dtype.bits == 64) return ((const int64_t *)ids->data)[i];
  return ((const int32_t *)ids->data)[i];
}

int apq_check_ids(const char *layer, const DLTensor *ids, int64_t first, int64_t step, int64_t lowest,
                  int64_t rows) {
  int64_t count = 1, bad = 0;
  for (int32_t i = 0; i < ids->ndim; i++) count *= ids->shape[i];
  for (int64_t i = first; i < count; i += step) {
    int64_t id = id_at(ids, i);
    bad += id < lowest || id >= rows;
  }
  if (bad == 0) return APQ_OK;
  for (int64_t i = first;; i += step) {
    int64_t id = id_at(ids, i);
    if (id < lowest || id >= rows) {
      return apq_fail(APQ_BAD_INPUT,
                      "layer %s: id %lld (element %lld) is outside its table of %lld rows; %lld of %lld "
                      "ids are",
                      layer, (long long)id, (long long)i, (long long)rows, (long long)bad,
                      (long long)(count / step));
    }
  }
}

int apq_check_size(const char *layer, int64_t size, int64_t least, int64_t most) {
  if (size >= least && size <= most) return APQ_OK;
  if (least == most) {
    return apq_fail(APQ_BAD_INPUT, "%s: a size computed from data is %lld, but must be %lld", layer,
                    (long long)size, (long long)least);
  }
  return apq_fail(APQ_BAD_INPUT, "%s: a size computed from data is %lld, not %lld to %lld", layer,
                  (long long)size, (long long)least, (long long)most);
}

/* A kernel is worth a team of threads from this many estimated nanoseconds per thread on. Measured on
 * Zen 4: a team of two costs 0.9 us, and y = 3 x over [n, 64] gains from n = 512 (2.7 us alone) on. */
static const double NANOSECONDS_PER_TASK = 4000.0;

int apq_call(const apq_frame *frame, const char *name, apq_kernel kernel, const apq_any *args,
             int32_t num_args, double work) {
  double tasks = work / NANOSECONDS_PER_TASK;
  apq_set_tasks(tasks >= frame->threads ? frame->threads : tasks < 1.0 ? 1 : (int32_t)tasks);
  apq_any result = {0, 0, {0}};
  if (kernel(NULL, args, num_args, &result) == 0) return APQ_OK;
  return apq_fail(APQ_KERNEL_FAILED, "kernel %s failed: %s", name, apq_last_error());
}
