/* What this machine can do at best: bytes read per second, and multiply-adds per second.
 *
 * Every function does one pass and returns a value that depends on all of it, so that nothing is
 * optimized away. Threads are the caller's: each gets its own slice, as a compiled module's do. */
#include <omp.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__aarch64__)
#include "roofline_arm.h"
#else
#include "roofline_x86.h"
#endif

/* Some cores read fastest with software prefetch `ahead` bytes before the stream, others without
 * (0): the caller takes the better one. */
uint64_t apq_read(const uint8_t *p, size_t bytes, int threads, size_t ahead) {
    uint64_t sum = 0;
    size_t part = bytes / (size_t)threads / 128 * 128;
#pragma omp parallel for schedule(static, 1) num_threads(threads) reduction(+ : sum)
    for (int t = 0; t < threads; ++t) sum += read_slice(p + (size_t)t * part, part, ahead);
    return sum;
}

/* The same slices `times` over, with no meeting of threads between: what a cache gives. */
uint64_t apq_read_again(const uint8_t *p, size_t bytes, int threads, long times) {
    uint64_t sum = 0;
    size_t part = bytes / (size_t)threads / 128 * 128;
#pragma omp parallel for schedule(static, 1) num_threads(threads) reduction(+ : sum)
    for (int t = 0; t < threads; ++t)
        for (long i = 0; i < times; ++i) {
            __asm__ volatile("" ::: "memory");
            sum += read_slice(p + (size_t)t * part, part, 0);
        }
    return sum;
}

static int int8_slice(long steps) {
    vec acc[ACCUMULATORS], a = set_bytes(3), b = set_bytes(5);
    for (int i = 0; i < ACCUMULATORS; ++i) acc[i] = set_bytes(0);
    for (long s = 0; s < steps; ++s) {
        for (int i = 0; i < ACCUMULATORS; ++i) {
            OPAQUE(a);
            acc[i] = int8_step(acc[i], a, b);
        }
    }
    int sum = 0;
    for (int i = 0; i < ACCUMULATORS; ++i) sum += first(acc[i]);
    return sum;
}

static float fp32_slice(long steps) {
    floats acc[ACCUMULATORS], a = set_floats(0.5f), b = set_floats(0.25f);
    for (int i = 0; i < ACCUMULATORS; ++i) acc[i] = set_floats(0);
    for (long s = 0; s < steps; ++s) {
        for (int i = 0; i < ACCUMULATORS; ++i) {
            OPAQUE(a);
            acc[i] = fp32_step(acc[i], a, b);
        }
    }
    float sum = 0;
    for (int i = 0; i < ACCUMULATORS; ++i)
        for (int j = 0; j < FP32_MACS; ++j) sum += acc[i][j];
    return sum;
}

const char *apq_int8_name(void) { return INT8_NAME; }
long apq_int8_macs(long steps) { return steps * ACCUMULATORS * INT8_MACS; }
long apq_fp32_macs(long steps) { return steps * ACCUMULATORS * FP32_MACS; }

double apq_int8(long steps, int threads) {
    double sum = 0;
#pragma omp parallel for schedule(static, 1) num_threads(threads) reduction(+ : sum)
    for (int t = 0; t < threads; ++t) sum += int8_slice(steps);
    return sum;
}

double apq_fp32(long steps, int threads) {
    double sum = 0;
#pragma omp parallel for schedule(static, 1) num_threads(threads) reduction(+ : sum)
    for (int t = 0; t < threads; ++t) sum += fp32_slice(steps);
    return sum;
}
