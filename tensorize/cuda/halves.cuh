// Neighbouring numbers of 16 bits, read at once: TVM's own vectors of them are not aligned.
#ifndef APQ_HALVES
#define APQ_HALVES

struct alignas(4) apq_halves2 { half of[2]; };
struct alignas(8) apq_halves4 { half of[4]; };

#define APQ_READ_HALVES(count)                                                               \
  __device__ __forceinline__ void apq_read_halves##count(float *to, const void *from) {      \
    apq_halves##count read = *(const apq_halves##count *)from;                               \
    for (int i = 0; i < count; i++) to[i] = (float)read.of[i];                               \
  }

APQ_READ_HALVES(2)
APQ_READ_HALVES(4)

#endif
