// What our C++ shares: vectors as long as the processor's registers, and numbers in float32 and bfloat16.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int64_t LANES = 16;
#elif defined(__AVX__)
constexpr int64_t LANES = 8;
#else
constexpr int64_t LANES = 4;
#endif

// Bytes that are fetched from the memory at once.
constexpr int64_t LINE = 64;

typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static inline float widened(float number) { return number; }

static inline float widened(uint16_t number) {
  uint32_t bits = (uint32_t)number << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

template <class Number>
static inline Number rounded(float number) {
  return number;
}

// To the nearest, of two to the even one.
template <>
inline uint16_t rounded<uint16_t>(float number) {
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  return number != number ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
