// Products of int8 matrices by a warp. Each function has two bodies: PTX, and plain C++ that is its meaning
// (codegen/cuda/simulator). Fragments: PTX ISA 8.8, "Matrix Fragments for mma.m16n8k32" and "mma.m8n8k16",
// .u8/.s8 integer type: words of a lane are the same for both.
#ifndef APQ_MMA_S8
#define APQ_MMA_S8

#ifdef __CUDACC__

#if __CUDA_ARCH__ < 800
// 8 rows of weights and 16 columns: both operands have one word of a lane.
__device__ __forceinline__ void apq_mma_half(int *c, unsigned a, unsigned b) {
  asm("mma.sync.aligned.m8n8k16.row.col.s32.u8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
      : "+r"(c[0]), "+r"(c[1])
      : "r"(a), "r"(b));
}
#endif

__device__ __forceinline__ void apq_mma_u8s8(int *c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                             unsigned b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
  apq_mma_half(c, a0, b0);
  apq_mma_half(c + 2, a1, b0);
  apq_mma_half(c, a2, b1);
  apq_mma_half(c + 2, a3, b1);
#endif
}

#else

// c[16][8] += a[16][32] b[32][8]. Lane l has of a: rows l / 4 and 8 more, columns 4 (l % 4) and 16 more; of b:
// column l / 4, rows 4 (l % 4) and 16 more; of c: rows l / 4 and 8 more, columns 2 (l % 4) and the next.
inline void apq_mma_u8s8(int *c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  const uint64_t mine[6] = {a0, a1, a2, a3, b0, b1};
  const cusim::Words *of = cusim::meet(~0u, mine, 6);
  const int lane = cusim::me().lane;
  for (int i = 0; i < 4; i++) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 32; k++) {
      const int part = k % 16 / 4, byte = k % 4 * 8;
      const uint8_t a = (uint8_t)(of[row % 8 * 4 + part][row / 8 + k / 16 * 2] >> byte);
      const int8_t b = (int8_t)(of[column * 4 + part][4 + k / 16] >> byte);
      c[i] += a * b;
    }
  }
}

#endif

// Products of one group, for two rows of weights by two of x, times the scales of both: sums[2 w + x]. Exact
// dots have the bits of 1.5 x 2^23 in them (apq_tvm/ops/gpu/rows.py); that times a scale of 11 bits is exact, so
// one multiply-add takes it off again.
#define APQ_MAGIC 12582912.0f

__device__ __forceinline__ float apq_bits(int bits) { return *(float *)&bits; }

__device__ __forceinline__ void apq_add_exact_scaled(float *sums, const int *dots, const float *w, const float *x) {
  for (int i = 0; i < 4; i++) {
    sums[i] = fmaf(fmaf(apq_bits(dots[i]), w[i / 2], -APQ_MAGIC * w[i / 2]), x[i % 2], sums[i]);
  }
}

__device__ __forceinline__ void apq_add_exact(float *sums, const int *dots, const float *w) {
  for (int i = 0; i < 4; i++) sums[i] = fmaf(apq_bits(dots[i]) - APQ_MAGIC, w[i / 2], sums[i]);
}

__device__ __forceinline__ void apq_add_large_scaled(float *sums, const int *dots, const float *w, const float *x) {
  for (int i = 0; i < 4; i++) sums[i] = fmaf((float)dots[i] * w[i / 2], x[i % 2], sums[i]);
}

__device__ __forceinline__ void apq_add_large(float *sums, const int *dots, const float *w) {
  for (int i = 0; i < 4; i++) sums[i] = fmaf((float)dots[i], w[i / 2], sums[i]);
}
#endif
