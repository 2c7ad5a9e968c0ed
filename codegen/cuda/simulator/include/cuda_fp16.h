// float16 of CUDA: cuda_fp16.h, as far as TVM's source takes from it. Arithmetic rounds after each operation.
#pragma once
#include "cusim.h"

#ifdef __aarch64__
using cusim_half = __fp16;  // g++ 12 has no _Float16 there
#else
using cusim_half = _Float16;
#endif

struct half {
  cusim_half v;
  half() = default;
  template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
  half(T x) : v((cusim_half)x) {}
  operator float() const { return (float)v; }
};
using __half = half;
struct half2 { half x, y; } __attribute__((aligned(4)));
using __half2 = half2;

inline half operator+(half a, half b) { return half((float)a + (float)b); }
inline half operator-(half a, half b) { return half((float)a - (float)b); }
inline half operator*(half a, half b) { return half((float)a * (float)b); }
inline half operator/(half a, half b) { return half((float)a / (float)b); }
inline bool __hgt(half a, half b) { return (float)a > (float)b; }
inline bool __hlt(half a, half b) { return (float)a < (float)b; }
inline float __half2float(half a) { return (float)a; }
inline half __float2half(float a) { return half(a); }
inline half __float2half_rn(float a) { return half(a); }
inline half2 __halves2half2(half a, half b) { return {a, b}; }
