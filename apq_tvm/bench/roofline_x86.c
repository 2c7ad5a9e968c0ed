/* What this machine can do at best: bytes read per second, and multiply-adds per second.
 *
 * Every function does one pass and returns a value that depends on all of it, so that nothing is
 * optimized away. Threads are the caller's: each gets its own slice, as a compiled module's do. */
#include <immintrin.h>
#include <omp.h>
#include <stddef.h>
#include <stdint.h>

static uint64_t read_slice(const uint8_t *p, size_t bytes, size_t ahead) {
    __m256i acc[4];
    for (int i = 0; i < 4; ++i) acc[i] = _mm256_setzero_si256();
    for (size_t at = 0; at < bytes; at += 128) {
        for (int i = 0; i < 4; ++i) {
            const uint8_t *q = p + at + 32 * i;
            if (i % 2 == 0) _mm_prefetch((const char *)q + ahead, _MM_HINT_T0);
            acc[i] = _mm256_add_epi64(acc[i], _mm256_loadu_si256((const __m256i *)q));
        }
    }
    uint64_t lanes[4], sum = 0;
    for (int i = 0; i < 4; ++i) {
        _mm256_storeu_si256((__m256i *)lanes, acc[i]);
        sum += lanes[0] + lanes[1] + lanes[2] + lanes[3];
    }
    return sum;
}

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

/* 8 independent accumulators hide the latency of the multiply on every core since Haswell. */
enum { ACCUMULATORS = 8 };

#if defined(__AVX512VNNI__)
#define INT8_NAME "AVX-512 vpdpbusd"
#define INT8_MACS 64
typedef __m512i vec;
static inline vec int8_step(vec acc, vec a, vec b) { return _mm512_dpbusd_epi32(acc, a, b); }
static inline vec set_bytes(int v) { return _mm512_set1_epi8((char)v); }
static inline int first(vec v) { return _mm_cvtsi128_si32(_mm512_castsi512_si128(v)); }
#elif defined(__AVXVNNI__)
#define INT8_NAME "AVX-VNNI vpdpbusd"
#define INT8_MACS 32
typedef __m256i vec;
static inline vec int8_step(vec acc, vec a, vec b) { return _mm256_dpbusd_avx_epi32(acc, a, b); }
static inline vec set_bytes(int v) { return _mm256_set1_epi8((char)v); }
static inline int first(vec v) { return _mm_cvtsi128_si32(_mm256_castsi256_si128(v)); }
#else
#define INT8_NAME "AVX2 maddubs + madd + add"
#define INT8_MACS 32
typedef __m256i vec;
static inline vec int8_step(vec acc, vec a, vec b) {
    const vec ones = _mm256_set1_epi16(1);
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), ones));
}
static inline vec set_bytes(int v) { return _mm256_set1_epi8((char)v); }
static inline int first(vec v) { return _mm_cvtsi128_si32(_mm256_castsi256_si128(v)); }
#endif

/* The operands pass through an empty asm, or the compiler would compute the product once. */
#define OPAQUE(v) __asm__ volatile("" : "+v"(v))

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
#if defined(__AVX512F__)
    __m512 acc[ACCUMULATORS], a = _mm512_set1_ps(0.5f), b = _mm512_set1_ps(0.25f);
    for (int i = 0; i < ACCUMULATORS; ++i) acc[i] = _mm512_setzero_ps();
    for (long s = 0; s < steps; ++s)
        for (int i = 0; i < ACCUMULATORS; ++i) {
            OPAQUE(a);
            acc[i] = _mm512_fmadd_ps(a, b, acc[i]);
        }
    float sum = 0;
    for (int i = 0; i < ACCUMULATORS; ++i) sum += _mm512_reduce_add_ps(acc[i]);
    return sum;
#else
    __m256 acc[ACCUMULATORS], a = _mm256_set1_ps(0.5f), b = _mm256_set1_ps(0.25f);
    for (int i = 0; i < ACCUMULATORS; ++i) acc[i] = _mm256_setzero_ps();
    for (long s = 0; s < steps; ++s)
        for (int i = 0; i < ACCUMULATORS; ++i) {
            OPAQUE(a);
            acc[i] = _mm256_fmadd_ps(a, b, acc[i]);
        }
    float lanes[8], sum = 0;
    for (int i = 0; i < ACCUMULATORS; ++i) {
        _mm256_storeu_ps(lanes, acc[i]);
        for (int j = 0; j < 8; ++j) sum += lanes[j];
    }
    return sum;
#endif
}

const char *apq_int8_name(void) { return INT8_NAME; }
long apq_int8_macs(long steps) { return steps * ACCUMULATORS * INT8_MACS; }
long apq_fp32_macs(long steps) {
#if defined(__AVX512F__)
    return steps * ACCUMULATORS * 16;
#else
    return steps * ACCUMULATORS * 8;
#endif
}

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
