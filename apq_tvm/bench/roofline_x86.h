/* What roofline.c measures with on x86-64: AVX2 at least. */
#ifndef ROOFLINE_X86_H_
#define ROOFLINE_X86_H_

#include <immintrin.h>

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

/* Independent sums that hide the latency of the multiply on every core since Haswell. */
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

#if defined(__AVX512F__)
#define FP32_MACS 16
typedef __m512 floats;
static inline floats set_floats(float v) { return _mm512_set1_ps(v); }
static inline floats fp32_step(floats acc, floats a, floats b) { return _mm512_fmadd_ps(a, b, acc); }
#else
#define FP32_MACS 8
typedef __m256 floats;
static inline floats set_floats(float v) { return _mm256_set1_ps(v); }
static inline floats fp32_step(floats acc, floats a, floats b) { return _mm256_fmadd_ps(a, b, acc); }
#endif

#endif
