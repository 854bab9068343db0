// Products of a few tokens with a matrix of weights, in the time in which the memory gives the weights; and sums that tell whether
// the weights are what they were, as fast.
//
// The matrix (outputs, inputs) lies in panels of COLUMNS outputs: (panels, steps, COLUMNS) words of 32 bits, which are read from
// the first to the last. A step is one input in float32, and two in bfloat16, the first in a word's low half: so a processor that
// has an instruction for products of two pairs (AVX512_BF16) takes them as they lie. Outputs and inputs that fill up the last panel
// and step are zeros.
//
// A core waits for the memory or computes, and does one after the other unless it asks for weights long before it needs them. For
// a few tokens the processor does that by itself, since they are read one after the other. For more each pass over a part of a
// panel asks for the next part, whose weights lie in the core's second cache when their turn comes, and each step asks for those
// of a later one, which then lie in its first.

// As many sums as registers hold, beside a step's weights.
constexpr int64_t VECTORS = LANES == 8 ? 2 : 3, ROWS = LANES == 8 ? 6 : 8;
constexpr int64_t COLUMNS = LANES * VECTORS;
// So many tokens are multiplied by a panel while it is in the cache.
constexpr int64_t MOST_ROWS = 8 * ROWS;
// Steps of a part of a panel, at most; parts are equal, so that each asks for all of the next. Its sums are added to those of the
// parts before: fewer roundings follow each other than in one long sum.
constexpr int64_t PART = 64;
// For so many tokens asking takes longer than it saves.
constexpr int64_t FEW_ROWS = 4;
// So many steps later weights are wanted in the first cache.
constexpr int64_t SOON = 16;
// From the highest bits of a word's numbers to others, which are no number's highest.
constexpr int64_t SHIFT = 29;

// How numbers of a dtype are multiplied: so many PRODUCTS a step, each of what it takes of a token with a vector of words.
struct Float32 {
  static constexpr int64_t INPUTS = 1, PRODUCTS = 1;
  typedef float Number;
  typedef float Token;
  typedef Floats Weights;

  static inline Weights weights(Words words, int64_t) { return (Floats)words; }
  static inline Floats added(Floats sum, Token token, Weights weights) { return sum + token * weights; }
};

struct BFloat16 {
  static constexpr int64_t INPUTS = 2;
  typedef uint16_t Number;

#if defined(__AVX512BF16__)
  static constexpr int64_t PRODUCTS = 1;
  typedef int32_t Token;
  typedef __m512bh Weights;

  static inline Weights weights(Words words, int64_t) { return (Weights)words; }
  static inline Floats added(Floats sum, Token pair, Weights pairs) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), pairs);
  }
  static inline void take(const uint16_t* numbers, int64_t count, Token* pairs) { std::memcpy(pairs, numbers, 2 * count); }
#else
  static constexpr int64_t PRODUCTS = 2;
  typedef float Token;
  typedef Floats Weights;

  static inline Weights weights(Words words, int64_t which) { return (Floats)(which ? words & 0xffff0000u : words << 16); }
  static inline Floats added(Floats sum, Token token, Weights weights) { return sum + token * weights; }
  static inline void take(const uint16_t* numbers, int64_t count, Token* tokens) {
    for (int64_t input = 0; input < count; input++) tokens[input] = widened(numbers[input]);
  }
#endif
};

template <int locality>
static inline void ask_for_step(const uint32_t* weights) {
  for (int64_t byte = 0; byte < 4 * COLUMNS; byte += LINE) __builtin_prefetch((const char*)weights + byte, 0, locality);
}

// Adds the products of `rows` tokens with a part of a panel to their sums (rows, COLUMNS), and asks for weights at `next`, as many
// as make a part in so many passes.
template <class Kind, int64_t rows>
static void add_products(const typename Kind::Token* tokens, int64_t stride, const uint32_t* part, int64_t steps, float* sums,
                         const uint32_t* next, int64_t passes) {
  Floats sum[rows][VECTORS];
  clear(sum);
  int64_t step = 0, asks = 0;
  do {
    if (rows > FEW_ROWS && step == asks) {
      ask_for_step<2>(next);
      next += COLUMNS, asks += passes;
    }
    if (rows > FEW_ROWS) ask_for_step<3>(part + (step + SOON) * COLUMNS);
    const Words* words = (const Words*)(part + step * COLUMNS);
    for (int64_t which = 0; which < Kind::PRODUCTS; which++) {
      typename Kind::Weights weights[VECTORS];
      for (int64_t vector = 0; vector < VECTORS; vector++) {
        weights[vector] = Kind::weights(words[vector], which);
        KEEP(weights[vector]);
      }
      for (int64_t row = 0; row < rows; row++) {
        typename Kind::Token token = tokens[row * stride + step * Kind::PRODUCTS + which];
        for (int64_t vector = 0; vector < VECTORS; vector++)
          sum[row][vector] = Kind::added(sum[row][vector], token, weights[vector]);
      }
    }
  } while (++step < steps);
  for (int64_t row = 0; row < rows; row++)
    for (int64_t vector = 0; vector < VECTORS; vector++) ((Floats*)(sums + row * COLUMNS))[vector] += sum[row][vector];
}

template <class Kind>
using AddProducts = decltype(&add_products<Kind, 1>);

template <class Kind>
static constexpr AddProducts<Kind> ADD_PRODUCTS[] = {
    nullptr,
    add_products<Kind, 1>, add_products<Kind, 2>, add_products<Kind, 3>, add_products<Kind, 4>,
    add_products<Kind, 5>, add_products<Kind, 6>, add_products<Kind, 7>, add_products<Kind, 8>,
};

template <class Kind>
static void multiply_by_panel(const typename Kind::Token* tokens, const uint32_t* panel, const typename Kind::Number* bias,
                              typename Kind::Number* outputs, int64_t num_tokens, int64_t num_steps, int64_t num_outputs,
                              int64_t columns) {
  alignas(LINE) float sums[MOST_ROWS * COLUMNS];
  int64_t passes = (num_tokens + ROWS - 1) / ROWS, stride = num_steps * Kind::PRODUCTS;
  std::fill(sums, sums + num_tokens * COLUMNS, 0.0f);
  for (int64_t which = 0, parts = (num_steps + PART - 1) / PART; which < parts; which++) {
    int64_t begin = which * num_steps / parts, steps = (which + 1) * num_steps / parts - begin;
    const uint32_t *part = panel + begin * COLUMNS, *next = part + steps * COLUMNS;
    for (int64_t pass = 0; pass < passes; pass++) {
      int64_t first = pass * num_tokens / passes, rows = (pass + 1) * num_tokens / passes - first;
      ADD_PRODUCTS<Kind>[rows](tokens + first * stride + begin * Kind::PRODUCTS, stride, part, steps, sums + first * COLUMNS,
                               next + pass * steps / passes * COLUMNS, passes);
    }
  }
  for (int64_t token = 0; token < num_tokens; token++) {
    float* sum = sums + token * COLUMNS;
    for (int64_t column = 0; bias && column < columns; column++) sum[column] += widened(bias[column]);
    for (int64_t column = 0; column < columns; column++)
      outputs[token * num_outputs + column] = rounded<typename Kind::Number>(sum[column]);
  }
}

// tokens (num_tokens, num_inputs), bias (num_outputs), which may be null, and outputs (num_tokens, num_outputs), in one dtype.
template <class Kind>
static void multiply(const typename Kind::Number* tokens, const uint32_t* panels, const typename Kind::Number* bias,
                     typename Kind::Number* outputs, int64_t num_tokens, int64_t num_inputs, int64_t num_outputs,
                     int64_t num_threads) {
  int64_t steps = (num_inputs + Kind::INPUTS - 1) / Kind::INPUTS, stride = steps * Kind::PRODUCTS;
  std::vector<typename Kind::Token> taken;
  if constexpr (Kind::INPUTS > 1) {
    taken.resize(num_tokens * stride);
    for (int64_t token = 0; token < num_tokens; token++)
      Kind::take(tokens + token * num_inputs, num_inputs, taken.data() + token * stride);
  }
  const typename Kind::Token* rows = Kind::INPUTS > 1 ? taken.data() : (const typename Kind::Token*)tokens;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
  for (int64_t column = 0; column < num_outputs; column += COLUMNS)
    for (int64_t first = 0; first < num_tokens; first += MOST_ROWS)
      multiply_by_panel<Kind>(rows + first * stride, panels + column * steps, bias ? bias + column : nullptr,
                              outputs + first * num_outputs + column, std::min(MOST_ROWS, num_tokens - first), steps,
                              num_outputs, std::min(COLUMNS, num_outputs - column));
}

// No two numbers become the same one if the factor is odd, and a change of high bits, such as those of signs, alters low ones, too:
// a product has those of its factors' high bits in high bits alone, where many alike would cancel each other.
static inline uint64_t mixed(uint64_t number, uint64_t factor) { return (number ^ number >> SHIFT) * factor; }

// sums (rows), modulo 2^64, of what mixed makes of numbers (rows, columns) and factors (columns).
extern "C" void sum_rows(const uint64_t* numbers, const uint64_t* factors, uint64_t* sums, int64_t rows, int64_t columns,
                         int64_t num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
  for (int64_t row = 0; row < rows; row++) {
    uint64_t sum = 0;
    for (int64_t column = 0; column < columns; column++) sum += mixed(numbers[row * columns + column], factors[column]);
    sums[row] = sum;
  }
}

extern "C" int64_t columns_of_panel() { return COLUMNS; }

extern "C" void multiply_float32(const float* tokens, const uint32_t* panels, const float* bias, float* outputs, int64_t num_tokens,
                                 int64_t num_inputs, int64_t num_outputs, int64_t num_threads) {
  multiply<Float32>(tokens, panels, bias, outputs, num_tokens, num_inputs, num_outputs, num_threads);
}

extern "C" void multiply_bfloat16(const uint16_t* tokens, const uint32_t* panels, const uint16_t* bias, uint16_t* outputs,
                                  int64_t num_tokens, int64_t num_inputs, int64_t num_outputs, int64_t num_threads) {
  multiply<BFloat16>(tokens, panels, bias, outputs, num_tokens, num_inputs, num_outputs, num_threads);
}
