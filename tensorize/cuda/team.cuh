// What threads find together: of a warp or a part of it by shuffles, of a block in shared memory. All threads
// of a warp, or of a block of one row of threads, come here at once.
#ifndef APQ_TEAM
#define APQ_TEAM

__device__ __forceinline__ int apq_larger(int a, int b) { return a > b ? a : b; }
__device__ __forceinline__ float apq_larger(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ int apq_added(int a, int b) { return a + b; }
__device__ __forceinline__ float apq_added(float a, float b) { return a + b; }

#define APQ_TEAM_FUNCTIONS(name, type, both)                                                    \
  __device__ __forceinline__ type apq_team_##name(type value, int size) {                       \
    for (int step = size / 2; step > 0; step /= 2) {                                            \
      value = both(value, __shfl_xor_sync(0xffffffffu, value, step));                           \
    }                                                                                           \
    return value;                                                                               \
  }                                                                                             \
  __device__ __forceinline__ type apq_block_##name(type value, void *scratch) {                 \
    type *of_warps = (type *)scratch;                                                           \
    value = apq_team_##name(value, 32);                                                         \
    __syncthreads(); /* all have read what lies there */                                        \
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;                              \
    __syncthreads();                                                                            \
    value = of_warps[0];                                                                        \
    for (int warp = 1; warp < (int)blockDim.x / 32; warp++) value = both(value, of_warps[warp]); \
    return value;                                                                               \
  }

APQ_TEAM_FUNCTIONS(max_int32, int, apq_larger)
APQ_TEAM_FUNCTIONS(sum_int32, int, apq_added)
APQ_TEAM_FUNCTIONS(max_float32, float, apq_larger)
APQ_TEAM_FUNCTIONS(sum_float32, float, apq_added)

#endif
