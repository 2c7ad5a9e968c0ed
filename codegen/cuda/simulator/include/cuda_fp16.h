// float16 of CUDA: cuda_fp16.h, as far as TVM's source takes from it. Arithmetic rounds after each operation.
#pragma once
#include "cusim.h"

struct half {
  _Float16 v;
  half() = default;
  template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
  half(T x) : v((_Float16)x) {}
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
