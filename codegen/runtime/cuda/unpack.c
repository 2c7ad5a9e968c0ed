/* What apq_tvm/codegen/cuda/squeeze.py made small: "LZ4 Block Format Description". */
#include <string.h>

#include "apq_cuda.h"

/* A count whose first 4 bits were in the token. */
static int rest(const unsigned char **in, const unsigned char *end, size_t *count) {
  unsigned more = 255;
  if (*count != 15) return 1;
  while (more == 255) {
    if (*in == end) return 0;
    more = *(*in)++;
    *count += more;
  }
  return 1;
}

int apq_unpack(const unsigned char *in, size_t packed, unsigned char *out, size_t bytes) {
  const unsigned char *end = in + packed;
  unsigned char *to = out, *last = out + bytes;
  while (in < end) {
    unsigned token = *in++;
    size_t fresh = token >> 4, copied = token & 15;
    if (!rest(&in, end, &fresh) || fresh > (size_t)(end - in) || fresh > (size_t)(last - to)) return 0;
    memcpy(to, in, fresh);
    in += fresh;
    to += fresh;
    if (in == end) return to == last;
    if (end - in < 2) return 0;
    size_t back = in[0] | (size_t)in[1] << 8;
    in += 2;
    if (!rest(&in, end, &copied) || back == 0 || back > (size_t)(to - out)) return 0;
    copied += 4;
    if (copied > (size_t)(last - to)) return 0;
    for (; copied > 0; copied--, to++) *to = to[-(ptrdiff_t)back]; /* what is copied may be copied on */
  }
  return 0;
}
