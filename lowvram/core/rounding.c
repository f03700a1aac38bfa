// What rounding.py computes, bit for bit.

#include <stdint.h>
#include <string.h>

// Few numbers are done before other threads begin.
#define PARALLEL _Pragma("omp parallel for num_threads((int)threads) schedule(static) if (numel >= 1 << 15)")

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline int is_nan(uint32_t bits) { return (bits & 0x7FFFFFFFu) > 0x7F800000u; }

void write_stochastically(uint16_t *restrict target, const float *restrict exact, const int32_t *restrict noise,
                          int64_t numel, int64_t threads) {
    PARALLEL
    for (int64_t i = 0; i < numel; i++) {
        const uint32_t given = bits_of(exact[i]);
        target[i] = is_nan(given) ? 0x7FC0u : (uint16_t)((given + (uint32_t)noise[i]) >> 16);
    }
}

// BITS: of the correction
#define SPLIT(BITS)                                                                                                   \
    void write_split_##BITS(uint16_t *restrict weight, int##BITS##_t *restrict correction,                            \
                            const float *restrict exact, int64_t numel, int64_t threads) {                            \
        const uint32_t unit = 1u << (16 - BITS);                                                                      \
        PARALLEL                                                                                                      \
        for (int64_t i = 0; i < numel; i++) {                                                                         \
            const uint32_t given = bits_of(exact[i]), is_number = !is_nan(given);                                     \
            const uint32_t bits = (given + is_number * (unit / 2)) & -unit;                                           \
            const uint32_t upper = (bits + is_number * 0x8000u) & 0xFFFF0000u;                                        \
            weight[i] = is_nan(upper) ? 0x7FC0u : (uint16_t)(upper >> 16);                                            \
            correction[i] = (int##BITS##_t)((int32_t)((bits - upper) * is_number) >> (16 - BITS));                    \
        }                                                                                                             \
    }                                                                                                                 \
    void restore_split_##BITS(float *restrict widened, const int##BITS##_t *restrict correction, int64_t numel,       \
                              int64_t threads) {                                                                      \
        const uint32_t unit = 1u << (16 - BITS);                                                                      \
        PARALLEL                                                                                                      \
        for (int64_t i = 0; i < numel; i++) {                                                                         \
            const uint32_t bits = bits_of(widened[i]) + (uint32_t)correction[i] * unit;                               \
            memcpy(widened + i, &bits, sizeof bits);                                                                  \
        }                                                                                                             \
    }

SPLIT(8)
SPLIT(16)
