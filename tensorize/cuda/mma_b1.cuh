// Products of matrices of bits by a warp. Each function has two bodies: PTX, and plain C++ that is its meaning
// (codegen/cuda/simulator). Fragments: PTX ISA 8.8, "Matrix Fragments for mma.m16n8k256".
#ifndef APQ_MMA_B1
#define APQ_MMA_B1

#ifdef __CUDACC__

#if __CUDA_ARCH__ < 800
#error "and of bits by tensor cores begins with compute capability 8.0"
#endif

__device__ __forceinline__ void apq_mma_b1(int *c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                           unsigned b1) {
  asm("mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

#else

// c[16][8] += popcount(a[16][256] & b[256][8]). Lane l has of a: rows l / 4 and 8 more, columns 32 (l % 4) and 128
// more; of b: column l / 4, rows 32 (l % 4) and 128 more; of c: rows l / 4 and 8 more, columns 2 (l % 4) and the
// next.
inline void apq_mma_b1(int *c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  const uint64_t mine[6] = {a0, a1, a2, a3, b0, b1};
  const cusim::Words *of = cusim::meet(~0u, mine, 6);
  const int lane = cusim::me().lane;
  for (int i = 0; i < 4; i++) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    for (int part = 0; part < 4; part++) {
      for (int half = 0; half < 2; half++) {
        c[i] += __popc((unsigned)(of[row % 8 * 4 + part][row / 8 + half * 2] & of[column * 4 + part][4 + half]));
      }
    }
  }
}

#endif

// Planes of weights count for 1, 2, 4, ...: a lane's sums of one row of weights and two planes of x, which count
// for factors[0] and factors[1], as one number; `from` are those of the first plane of weights.
__device__ __forceinline__ int apq_weigh_planes(const int *from, int step, int planes, const int *factors, int base) {
  int even = 0, odd = 0;
#pragma unroll
  for (int plane = planes - 1; plane >= 0; plane--) {
    even = 2 * even + from[plane * step];
    odd = 2 * odd + from[plane * step + 1];
  }
  return even * factors[0] + (odd * factors[1] + base);
}

// Of 1, 2 or 4 neighbouring lanes.
__device__ __forceinline__ float apq_sum_lanes(float value, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  return value;
}
#endif
