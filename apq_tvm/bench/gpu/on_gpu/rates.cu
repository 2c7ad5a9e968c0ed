// How fast a GPU reads its memory and multiplies: loops of one kind of mma, whose sums go on. Nothing but time
// is asked of them, so where there is no PTX (codegen/cuda/simulator) they do any arithmetic.
//
// Shapes and types: PTX ISA 8.8, "Warp-level matrix instructions: mma".

// Nobody writes what is not a surprise: the compiler cannot leave the work out.
#define APQ_SURPRISE 0x12345678

extern "C" __global__ void __launch_bounds__(256) apq_rate_read(const uint4 *from, long long words, int *out) {
  unsigned seen = 0;
  const long long step = (long long)gridDim.x * blockDim.x;
  long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  for (; at + 3 * step < words; at += 4 * step) {
    uint4 some[4];
    for (int i = 0; i < 4; i++) some[i] = from[at + i * step];
    for (int i = 0; i < 4; i++) seen ^= some[i].x ^ some[i].y ^ some[i].z ^ some[i].w;
  }
  for (; at < words; at += step) seen ^= from[at].x;
  if (seen == APQ_SURPRISE) out[0] = 1;
}

#define APQ_CHAINS 8  // independent sums of a warp: one after the other each would wait for its last

#ifdef __CUDACC__
#define APQ_MMA4(shape, type, letter, c, a, b)                                                          \
  asm volatile("mma.sync.aligned." shape " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+" letter(c[0]), "+" letter(c[1]), "+" letter(c[2]), "+" letter(c[3])                 \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
#define APQ_MMA2(shape, type, letter, c, a, b)                                                                 \
  asm volatile("mma.sync.aligned." shape " {%0, %1}, {%2}, {%3}, {%0, %1};" : "+" letter(c[0]), "+" letter(c[1]) \
               : "r"(a[0]), "r"(b[0]))
#define APQ_MMA_HALF(shape, type, letter, c, a, b)                                                   \
  asm volatile("mma.sync.aligned." shape " {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"      \
               : "+" letter(c[0]), "+" letter(c[1]), "+" letter(c[2]), "+" letter(c[3])              \
               : "r"(a[0]), "r"(a[1]), "r"(b[0]))
#else
#define APQ_MMA4(shape, type, letter, c, a, b) c[0] += (type)(a[0] & b[0])
#define APQ_MMA2 APQ_MMA4
#define APQ_MMA_HALF APQ_MMA4
#endif

// Bits of a lane's own that are finite floats of 8 and 16 bits, too.
#define APQ_FINITE(factor) ((threadIdx.x + 1) * (factor) & 0x3f3f3f3fu)

#define APQ_RATE(name, MMA, shape, type, letter)                                              \
  extern "C" __global__ void __launch_bounds__(256) apq_rate_##name(int rounds, int *out) {   \
    type sums[APQ_CHAINS][4] = {};                                                            \
    const unsigned a[4] = {APQ_FINITE(2654435761u), APQ_FINITE(40503u), APQ_FINITE(7u), APQ_FINITE(1u)}; \
    const unsigned b[2] = {APQ_FINITE(69069u), APQ_FINITE(1664525u)}; \
    for (int round = 0; round < rounds; round++) {                                            \
      for (int chain = 0; chain < APQ_CHAINS; chain++) MMA(shape, type, letter, sums[chain], a, b); \
    }                                                                                         \
    type all = 0;                                                                             \
    for (int chain = 0; chain < APQ_CHAINS; chain++) {                                        \
      for (int i = 0; i < 4; i++) all += sums[chain][i];                                      \
    }                                                                                         \
    if (all == (type)APQ_SURPRISE) out[0] = 1;                                                \
  }

#if __CUDA_ARCH__ >= 800
APQ_RATE(s8, APQ_MMA4, "m16n8k32.row.col.s32.s8.s8.s32", int, "r")
APQ_RATE(f16, APQ_MMA4, "m16n8k16.row.col.f32.f16.f16.f32", float, "f")
#else
APQ_RATE(s8, APQ_MMA2, "m8n8k16.row.col.s32.s8.s8.s32", int, "r")
APQ_RATE(f16, APQ_MMA_HALF, "m16n8k8.row.col.f32.f16.f16.f32", float, "f")
#endif
#if __CUDA_ARCH__ >= 800 && __CUDA_ARCH__ <= 900
APQ_RATE(b1_and, APQ_MMA4, "m16n8k256.row.col.s32.b1.b1.s32.and.popc", int, "r")
#endif
#if __CUDA_ARCH__ < 800
APQ_RATE(b1_xor, APQ_MMA2, "m8n8k128.row.col.s32.b1.b1.s32.xor.popc", int, "r")
#elif __CUDA_ARCH__ < 900
APQ_RATE(b1_xor, APQ_MMA4, "m16n8k256.row.col.s32.b1.b1.s32.xor.popc", int, "r")
#endif
#if __CUDA_ARCH__ >= 800 && __CUDA_ARCH__ < 900
APQ_RATE(s4, APQ_MMA4, "m16n8k64.row.col.s32.s4.s4.s32", int, "r")
#elif __CUDA_ARCH__ < 800
APQ_RATE(s4, APQ_MMA2, "m8n8k32.row.col.s32.s4.s4.s32", int, "r")
#endif
#if __CUDA_ARCH__ == 890 || __CUDA_ARCH__ == 1200
APQ_RATE(e4m3, APQ_MMA4, "m16n8k32.row.col.f32.e4m3.e4m3.f32", float, "f")
#endif
