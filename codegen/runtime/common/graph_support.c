/* What the emitted graph calls beside kernels: arithmetic and checks of shapes. */
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

int apq_check_size(const char *layer, int64_t size, int64_t least, int64_t most) {
  if (size >= least && size <= most) return APQ_OK;
  if (least == most) {
    return apq_fail(APQ_BAD_INPUT, "%s: a size computed from data is %lld, but must be %lld", layer,
                    (long long)size, (long long)least);
  }
  return apq_fail(APQ_BAD_INPUT, "%s: a size computed from data is %lld, not %lld to %lld", layer,
                  (long long)size, (long long)least, (long long)most);
}
