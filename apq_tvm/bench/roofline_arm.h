/* What roofline.c measures with on 64-bit Arm: NEON, and the best int8 product there is. */
#ifndef ROOFLINE_ARM_H_
#define ROOFLINE_ARM_H_

#include <arm_neon.h>

static uint64_t read_slice(const uint8_t *p, size_t bytes, size_t ahead) {
    uint64x2_t acc[8];
    for (int i = 0; i < 8; ++i) acc[i] = vdupq_n_u64(0);
    for (size_t at = 0; at < bytes; at += 128) {
        if (ahead) __builtin_prefetch(p + at + ahead);
        if (ahead) __builtin_prefetch(p + at + ahead + 64);
        for (int i = 0; i < 8; ++i) {
            acc[i] = vaddq_u64(acc[i], vreinterpretq_u64_u8(vld1q_u8(p + at + 16 * i)));
        }
    }
    uint64_t sum = 0;
    for (int i = 0; i < 8; ++i) sum += vaddvq_u64(acc[i]);
    return sum;
}

/* Independent sums: four pipes with a latency of four cycles on Neoverse V2. */
enum { ACCUMULATORS = 16 };

typedef int32x4_t vec;
#if defined(__ARM_FEATURE_MATMUL_INT8)
#define INT8_NAME "smmla"
#define INT8_MACS 32
static inline vec int8_step(vec acc, vec a, vec b) {
    return vmmlaq_s32(acc, vreinterpretq_s8_s32(a), vreinterpretq_s8_s32(b));
}
#elif defined(__ARM_FEATURE_DOTPROD)
#define INT8_NAME "sdot"
#define INT8_MACS 16
static inline vec int8_step(vec acc, vec a, vec b) {
    return vdotq_s32(acc, vreinterpretq_s8_s32(a), vreinterpretq_s8_s32(b));
}
#else
#define INT8_NAME "smull + sadalp"
#define INT8_MACS 8
static inline vec int8_step(vec acc, vec a, vec b) {
    const int8x8_t x = vget_low_s8(vreinterpretq_s8_s32(a)), y = vget_low_s8(vreinterpretq_s8_s32(b));
    return vpadalq_s16(acc, vmull_s8(x, y));
}
#endif
static inline vec set_bytes(int v) { return vreinterpretq_s32_s8(vdupq_n_s8((int8_t)v)); }
static inline int first(vec v) { return vgetq_lane_s32(v, 0); }

/* The operands pass through an empty asm, or the compiler would compute the product once. */
#define OPAQUE(v) __asm__ volatile("" : "+w"(v))

#define FP32_MACS 4
typedef float32x4_t floats;
static inline floats set_floats(float v) { return vdupq_n_f32(v); }
static inline floats fp32_step(floats acc, floats a, floats b) { return vfmaq_f32(acc, a, b); }

#endif
