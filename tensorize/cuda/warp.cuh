// A warp's own barrier: all its threads come here at once, and see what the others stored in shared memory.
#ifndef APQ_WARP
#define APQ_WARP

__device__ __forceinline__ void apq_warp_meet() { __syncwarp(); }

#endif
