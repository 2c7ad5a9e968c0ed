// What threads of a warp tell each other in shared memory. TVM orders what it sees stored there by barriers of
// the block, and has none inside of a condition; these it does not see.
#ifndef APQ_WARP
#define APQ_WARP

// All threads of the warp come here at once, and see what the others stored.
__device__ __forceinline__ void apq_warp_meet() { __syncwarp(); }
__device__ __forceinline__ void apq_warp_put(void *to, float value) { *(float *)to = value; }
__device__ __forceinline__ float apq_warp_get(const void *from) { return *(const float *)from; }

#endif
