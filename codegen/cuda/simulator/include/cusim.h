// CUDA C++ on a processor, for tests and static counts: kernels as TVM writes them compile with g++.
//
// A block's threads are fibers, resumed in random order (CUSIM_SEED), so that what only works in one order
// fails. Barriers and warp operations wait for whom they name; a wait that never ends is reported. Shared
// memory begins as NaN: reading what nobody wrote shows.
//
// Meanings are those of the CUDA C++ Programming Guide, appendix "C++ Language Extensions".
#pragma once
#include <csetjmp>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <ucontext.h>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ thread_local  // static at block scope, and legal behind extern
#define __restrict__
#define __constant__ const
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))

// ---- types ----

using uint = unsigned;
using uchar = unsigned char;
using ushort = unsigned short;
struct dim3 { unsigned x, y, z; };

#define CUSIM_VECTORS(T, name, half, whole)                                  \
  struct name##2 { T x, y; } __attribute__((aligned(half)));                 \
  struct name##3 { T x, y, z; };                                             \
  struct name##4 { T x, y, z, w; } __attribute__((aligned(whole)));          \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                 \
  inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }         \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
CUSIM_VECTORS(signed char, char, 2, 4)
CUSIM_VECTORS(unsigned char, uchar, 2, 4)
CUSIM_VECTORS(short, short, 4, 8)
CUSIM_VECTORS(unsigned short, ushort, 4, 8)
CUSIM_VECTORS(int, int, 8, 16)
CUSIM_VECTORS(unsigned, uint, 8, 16)
CUSIM_VECTORS(long long, longlong, 16, 16)
CUSIM_VECTORS(unsigned long long, ulonglong, 16, 16)
CUSIM_VECTORS(float, float, 8, 16)
CUSIM_VECTORS(double, double, 16, 16)
#undef CUSIM_VECTORS

static dim3 threadIdx, blockIdx, blockDim, gridDim;
constexpr int warpSize = 32;
// Not inline: images of one process would share it, and only the first would know where its memory lies.
alignas(1024) thread_local unsigned char buf_dyn_shmem_ptr[232448];

// ---- a block of fibers ----

namespace cusim {

constexpr int kMaxThreads = 1024;
constexpr size_t kStack = 128 << 10;

struct Fiber {
  jmp_buf at;
  ucontext_t start;
  dim3 thread;
  int lane, warp;
  bool started = false;
  char *stack = nullptr;
};

// What lanes of a warp give to each other: those that arrived, and the words they brought.
constexpr int kWords = 8;
using Words = uint64_t[kWords];
struct Warp {
  uint32_t arrived = 0, wanted = 0, members = 0;
  bool orders = false;
  Words brought[32], seen[32];
};

struct Block {
  std::vector<Fiber *> fibers;
  std::vector<Warp> warps;
  std::vector<int> ready, waiting;  // to run; at the barrier
  int alive, current;
  jmp_buf scheduler;
  void (*body)(void *);
  void *argument;
};
static Block block;
[[noreturn]] inline void die(const char *what);

}  // namespace cusim

#ifdef CUSIM_CHECK
#include "cusim_check.h"
#define CUSIM_NOTE(what) cusim::check::what
#else
#define CUSIM_UNCHECKED
#define CUSIM_NOTE(what) (void)0
#endif

namespace cusim {

static uint64_t random_state = 0;
inline uint64_t random_number() {
  if (random_state == 0) {
    const char *seed = getenv("CUSIM_SEED");
    random_state = 88172645463325252ull + (seed ? strtoull(seed, nullptr, 10) * 2654435761u : 0);
  }
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state;
}

[[noreturn]] inline void die(const char *what) {
  fprintf(stderr, "cusim: %s (block %u,%u,%u thread %u,%u,%u)\n", what, blockIdx.x, blockIdx.y, blockIdx.z,
          threadIdx.x, threadIdx.y, threadIdx.z);
  abort();
}

inline Fiber &me() { return *block.fibers[block.current]; }

// Until somebody makes this fiber ready again.
inline void sleep() {
  if (_setjmp(me().at) == 0) _longjmp(block.scheduler, 1);
}

inline void open_barrier() {
  CUSIM_NOTE(barrier_opens());
  block.ready.insert(block.ready.end(), block.waiting.begin(), block.waiting.end());
  block.waiting.clear();
}

inline void barrier() {
  block.waiting.push_back(block.current);
  if ((int)block.waiting.size() == block.alive) open_barrier();
  sleep();
}

// Lets a warp's lanes go on once all have arrived that are still there; `own` is running already.
inline void try_to_meet(Warp &w, int first, int own) {
  uint32_t wanted = w.wanted & w.members;
  if (w.arrived == 0 || (w.arrived & wanted) != wanted) return;
  if (w.orders) CUSIM_NOTE(warp_met(first / 32));
  memcpy(w.seen, w.brought, sizeof w.seen);
  for (int lane = 0; lane < 32; lane++) {
    if (w.arrived >> lane & 1 && lane != own) block.ready.push_back(first + lane);
  }
  w.arrived = 0;
}

// Every lane of `mask` gives `count` words and sees all, until they meet again. `orders`: what they wrote before
// is what they read after, which __syncwarp alone promises (C++ Language Extensions, "Warp Shuffle Functions").
inline const Words *meet(uint32_t mask, const uint64_t *words, int count, bool orders = false) {
  Fiber &f = me();
  Warp &w = block.warps[f.warp];
  if (!(mask >> f.lane & 1)) die("a warp operation whose mask lacks its caller");
  memcpy(w.brought[f.lane], words, sizeof(uint64_t) * (size_t)count);
  w.arrived |= 1u << f.lane;
  w.wanted = mask;
  w.orders = orders;
  try_to_meet(w, block.current - f.lane, f.lane);
  if (w.arrived >> f.lane & 1) sleep();
  return w.seen;
}

inline void run_fiber() {
  for (;;) {
    block.body(block.argument);
    Warp &w = block.warps[me().warp];
    w.members &= ~(1u << me().lane);
    block.alive--;
    try_to_meet(w, block.current - me().lane, -1);
    if (block.alive > 0 && (int)block.waiting.size() == block.alive) open_barrier();
    sleep();
  }
}

inline void resume(int number, unsigned stagger) {
  Fiber &f = *block.fibers[number];
  block.current = number;
  threadIdx = f.thread;
  if (_setjmp(block.scheduler) != 0) return;
  if (f.started) _longjmp(f.at, 1);
  f.started = true;
  getcontext(&f.start);
  f.start.uc_stack.ss_sp = f.stack;
  f.start.uc_stack.ss_size = kStack - stagger;  // stacks apart, or their tops share a cache set
  f.start.uc_link = nullptr;
  makecontext(&f.start, run_fiber, 0);
  setcontext(&f.start);
}

inline void run_block(dim3 size, void (*body)(void *), void *argument) {
  int threads = (int)(size.x * size.y * size.z);
  if (threads > kMaxThreads) die("more than 1024 threads");
  CUSIM_NOTE(block_begins());
  block.alive = threads;
  block.body = body;
  block.argument = argument;
  block.ready.clear();
  block.waiting.clear();
  block.warps.assign((size_t)(threads + 31) / 32, Warp{});
  for (int i = 0; i < threads; i++) {
    if ((int)block.fibers.size() == i) {
      block.fibers.push_back(new Fiber);
      block.fibers[i]->stack = (char *)malloc(kStack);
    }
    Fiber &f = *block.fibers[i];
    unsigned u = (unsigned)i;
    f.thread = {u % size.x, u / size.x % size.y, u / (size.x * size.y)};
    f.lane = i % 32;
    f.warp = i / 32;
    block.warps[f.warp].members |= 1u << f.lane;
    block.ready.push_back(i);
  }
  while (block.alive > 0) {
    if (block.ready.empty()) die("a barrier or warp operation that not all threads reach");
    size_t pick = random_number() % block.ready.size();
    int number = block.ready[pick];
    block.ready[pick] = block.ready.back();
    block.ready.pop_back();
    resume(number, (unsigned)(number % 61) * 192);
  }
}

template <class... A, size_t... I>
void apply(void (*kernel)(A...), void **p, std::index_sequence<I...>) {
  kernel(*(A *)p[I]...);
}

template <class... A>
void launch(void (*kernel)(A...), dim3 grid, dim3 threads, unsigned shared, void **params) {
  struct Call { void (*kernel)(A...); void **params; } call{kernel, params};
  CUSIM_NOTE(launch_begins());
  gridDim = grid;
  blockDim = threads;
  auto body = [](void *c) { apply(((Call *)c)->kernel, ((Call *)c)->params, std::index_sequence_for<A...>{}); };
  for (unsigned z = 0; z < grid.z; z++) {
    for (unsigned y = 0; y < grid.y; y++) {
      for (unsigned x = 0; x < grid.x; x++) {
        blockIdx = {x, y, z};
        memset(buf_dyn_shmem_ptr, 0xff, shared);
        run_block(threads, body, &call);
      }
    }
  }
}

template <class... A>
int sizes(void (*)(A...), int *out) {
  int each[] = {(int)sizeof(A)..., 0};
  memcpy(out, each, sizeof(int) * sizeof...(A));
  return (int)sizeof...(A);
}

inline uint64_t word_of(const void *value, size_t bytes) {
  uint64_t word = 0;
  memcpy(&word, value, bytes);
  return word;
}

// A lane's value out of a warp.
template <class T>
T of_lane(unsigned mask, T value, int lane) {
  static_assert(sizeof(T) <= 8);
  uint64_t word = word_of(&value, sizeof value);
  const Words *seen = meet(mask, &word, 1);
  T out;
  memcpy((void *)&out, seen[lane & 31], sizeof out);
  return out;
}

}  // namespace cusim

// What the driver calls (simulator/driver.cc).
#define CUSIM_KERNEL(name)                                                                                    \
  extern "C" void cusim_##name(dim3 g, dim3 b, unsigned s, void **p) {                              \
    CUSIM_NOTE(kernel = #name);                                                                              \
    cusim::launch(name, g, b, s, p);                                                                         \
  }                                                                                                          \
  extern "C" int cusim_sizes_##name(int *out) { return cusim::sizes(name, out); }

// ---- what kernels call ----

inline void __syncthreads() { cusim::barrier(); }
inline void __syncwarp(unsigned mask = ~0u) {
  uint64_t nothing = 0;
  cusim::meet(mask, &nothing, 1, true);
}
inline unsigned __activemask() { return cusim::block.warps[cusim::me().warp].members; }

template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
  int own = cusim::me().lane;
  return cusim::of_lane(mask, value, (own & ~(width - 1)) | (lane & (width - 1)));
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  int own = cusim::me().lane, lane = own + (int)delta;
  return cusim::of_lane(mask, value, (lane & ~(width - 1)) == (own & ~(width - 1)) ? lane : own);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  int own = cusim::me().lane, lane = own - (int)delta;
  return cusim::of_lane(mask, value, lane >= 0 && (lane & ~(width - 1)) == (own & ~(width - 1)) ? lane : own);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  int own = cusim::me().lane, lane = own ^ bits;
  return cusim::of_lane(mask, value, (lane & ~(width - 1)) == (own & ~(width - 1)) ? lane : own);
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; i++) c += (int8_t)(a >> 8 * i) * (int8_t)(b >> 8 * i);
  return c;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
  uint64_t bytes = (uint64_t)b << 32 | a;
  unsigned out = 0;
  for (int i = 0; i < 4; i++) {
    unsigned selector = s >> 4 * i & 15, byte = (unsigned)(bytes >> 8 * (selector & 7)) & 255;
    if (selector & 8) byte = byte & 128 ? 255 : 0;
    out |= byte << 8 * i;
  }
  return out;
}
template <class T>
T __ldg(const T *p) { return *p; }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __log10f(float x) { return log10f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __tanf(float x) { return tanf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __int_as_float(int x) { float f; memcpy(&f, &x, 4); return f; }
inline int __float_as_int(float x) { int i; memcpy(&i, &x, 4); return i; }

// Of floats, the one that is a number, as fmaxf and fminf.
inline float max(float a, float b) { return fmaxf(a, b); }
inline float min(float a, float b) { return fminf(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
#define CUSIM_ORDER(T)                                   \
  inline T max(T a, T b) { return a > b ? a : b; }       \
  inline T min(T a, T b) { return a < b ? a : b; }
CUSIM_ORDER(int)
CUSIM_ORDER(unsigned)
CUSIM_ORDER(long)
CUSIM_ORDER(unsigned long)
CUSIM_ORDER(long long)
CUSIM_ORDER(unsigned long long)
#undef CUSIM_ORDER

// Fibers are interrupted only where they wait: each of these is one step.
#define CUSIM_ATOMIC(T)                                                      \
  CUSIM_UNCHECKED inline T atomicAdd(T *p, T v) { T old = *p; *p = old + v; return old; }    \
  CUSIM_UNCHECKED inline T atomicMax(T *p, T v) { T old = *p; *p = max(old, v); return old; } \
  CUSIM_UNCHECKED inline T atomicMin(T *p, T v) { T old = *p; *p = min(old, v); return old; }
CUSIM_ATOMIC(int)
CUSIM_ATOMIC(unsigned)
CUSIM_ATOMIC(unsigned long long)
CUSIM_ATOMIC(float)
CUSIM_ATOMIC(double)
#undef CUSIM_ATOMIC

#define alignas(n) __attribute__((aligned(n)))  // TVM writes it where C++ does not allow it
