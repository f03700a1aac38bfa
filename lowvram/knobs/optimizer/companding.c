// The formulas of companding.py, number for number.

#include <math.h>
#include <stdint.h>

// Few numbers are done before other threads begin.
#define PARALLEL _Pragma("omp parallel for num_threads((int)threads) schedule(static) if (numel >= 1 << 15)")

enum { BLOCK = 64 };

// bits_at_random of core/rounding.py
static inline float noise_at(uint32_t bits) {
    bits = (bits ^ (bits >> 16)) * 0x7FEB352Du;
    bits = (bits ^ (bits >> 15)) * 0x846CA68Bu;
    bits = (bits ^ (bits >> 16)) & 0xFFFFFFu;
    return (float)(int32_t)bits * 0x1p-24f;
}

static inline float largest_of(const float *values) {
    uint32_t largest = 0;  // bits of floats without their signs are in the order of the floats, and nan above all
    for (int i = 0; i < BLOCK; i++) {
        union { float value; uint32_t bits; } at = {values[i]};
        uint32_t bits = at.bits & 0x7FFFFFFFu;
        largest = bits > largest ? bits : largest;
    }
    union { uint32_t bits; float value; } found = {largest};
    return found.value;
}

static inline float softsign_place(float share) { return 254.0f * share / (1.0f + fabsf(share)); }
static inline float softsign_share(float place) { return place / (254.0f - fabsf(place)); }

static inline float root_place(float share) { return sqrtf(share) * 256.0f - 1.0f; }
static inline float root_share(float place) {
    float root = (place + 1.0f) / 256.0f;
    return root * root;
}

static inline int in_block(int64_t numel, int64_t begin) {
    return numel - begin < BLOCK ? (int)(numel - begin) : BLOCK;
}

#define COMPANDER(NAME, CODE, LEAST, MOST)                                                                            \
    void NAME##_to_codes(CODE *restrict codes, float *restrict scales, const float *restrict values, int64_t numel,   \
                         int64_t seed, int64_t threads) {                                                             \
        PARALLEL                                                                                                      \
        for (int64_t begin = 0; begin < numel; begin += BLOCK) {                                                      \
            const int in = in_block(numel, begin);                                                                    \
            float block[BLOCK] = {0};                                                                                 \
            CODE found[BLOCK];                                                                                        \
            for (int i = 0; i < in; i++) block[i] = values[begin + i];                                                \
            const float scale = scales[begin / BLOCK] = largest_of(block);                                            \
            const float by = scale < 0x1p-126f ? 0x1p-126f : scale;                                                   \
            for (int i = 0; i < BLOCK; i++) {                                                                         \
                const float share = block[i] / by;                                                                    \
                float below = floorf(NAME##_place(share));                                                            \
                below = below < LEAST ? LEAST : below > MOST - 1 ? MOST - 1 : below;                                  \
                const float low = NAME##_share(below), high = NAME##_share(below + 1.0f);                             \
                const float noise = noise_at((uint32_t)(begin + i) + (uint32_t)seed);                                 \
                const float place = below + (noise * (high - low) < share - low ? 1.0f : 0.0f);                       \
                found[i] = (CODE)(int32_t)(place == place ? place : 0.0f);                                            \
            }                                                                                                         \
            for (int i = 0; i < in; i++) codes[begin + i] = found[i];                                                 \
        }                                                                                                             \
    }                                                                                                                 \
    void NAME##_from_codes(float *restrict values, const CODE *restrict codes, const float *restrict scales,          \
                           int64_t numel, int64_t threads) {                                                          \
        PARALLEL                                                                                                      \
        for (int64_t begin = 0; begin < numel; begin += BLOCK) {                                                      \
            const int in = in_block(numel, begin);                                                                    \
            const float scale = scales[begin / BLOCK];                                                                \
            for (int i = 0; i < in; i++) values[begin + i] = NAME##_share((float)codes[begin + i]) * scale;           \
        }                                                                                                             \
    }

COMPANDER(softsign, int8_t, -127.0f, 127.0f)
COMPANDER(root, uint8_t, 0.0f, 255.0f)
