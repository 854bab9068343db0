// What our C++ shares: vectors as long as the processor's registers, and numbers in float32 and bfloat16.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
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

// Holds a vector in a register. GCC would read it from the memory for each of its products, which takes longer than they do.
#if defined(__AVX512F__)
#define KEEP(vector) asm("" : "+v"(vector))
#elif defined(__AVX__)
#define KEEP(vector) asm("" : "+x"(vector))
#else
#define KEEP(vector)
#endif

// Of two vectors the lanes that are named, those of the second one counted after those of the first.
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLED(first, second, ...) __builtin_shufflevector(first, second, __VA_ARGS__)
#else
#define SHUFFLED(first, second, ...) __builtin_shuffle(first, second, Words{__VA_ARGS__})
#endif

typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

// Sums begin at 0, one by one: so they are in registers from the first.
template <int64_t rows, int64_t vectors>
static inline void clear(Floats (&sums)[rows][vectors]) {
  for (int64_t row = 0; row < rows; row++)
    for (int64_t vector = 0; vector < vectors; vector++) sums[row][vector] = Floats{};
}

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
