// Reads of several words at once, and what is packed into a word. Each function has two bodies: PTX, and plain
// C++ that is its meaning (codegen/cuda/simulator).
#ifndef APQ_READS
#define APQ_READS

#ifdef __CUDACC__

// Weights are read once: past the first cache, in long lines of the second.
__device__ __forceinline__ void apq_read_weights(void *to, const void *from) {
  unsigned *t = (unsigned *)to;
#if __CUDA_ARCH__ >= 800
  asm("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
#else
  asm("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
#endif
      : "=r"(t[0]), "=r"(t[1]), "=r"(t[2]), "=r"(t[3])
      : "l"(from));
}

// What a kernel before this one wrote.
__device__ __forceinline__ void apq_read1(void *to, const void *from) {
  asm("ld.global.nc.u32 %0, [%1];" : "=r"(*(unsigned *)to) : "l"(from));
}

__device__ __forceinline__ void apq_read2(void *to, const void *from) {
  unsigned *t = (unsigned *)to;
  asm("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(t[0]), "=r"(t[1]) : "l"(from));
}

__device__ __forceinline__ void apq_read4(void *to, const void *from) {
  unsigned *t = (unsigned *)to;
  asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(t[0]), "=r"(t[1]), "=r"(t[2]), "=r"(t[3])
      : "l"(from));
}

// Two float16 of a word.
__device__ __forceinline__ void apq_floats(float *to, unsigned halves) {
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
      : "=f"(to[0]), "=f"(to[1])
      : "r"(halves));
}

#else

inline void apq_read(void *to, const void *from, size_t bytes) {
  if ((uintptr_t)from % bytes != 0) cusim::die("a read of several words that is not aligned");
  memcpy(to, from, bytes);
}
inline void apq_read_weights(void *to, const void *from) { apq_read(to, from, 16); }
inline void apq_read1(void *to, const void *from) { apq_read(to, from, 4); }
inline void apq_read2(void *to, const void *from) { apq_read(to, from, 8); }
inline void apq_read4(void *to, const void *from) { apq_read(to, from, 16); }

inline void apq_floats(float *to, unsigned halves) {
  half both[2];
  memcpy(both, &halves, sizeof halves);
  for (int i = 0; i < 2; i++) to[i] = (float)both[i];
}

#endif
#endif
