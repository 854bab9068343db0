// RMS norms of a few rows, to the last bit as torch computes them in eight operations: squares are summed in its order, by vectors of
// eight numbers (aten/src/ATen/native/cpu/SumKernel.cpp; on ARM they have four). Nothing may be contracted here.

constexpr int64_t SUMMED = 8;
// Sums that are made side by side, of vectors in turn; and levels at which these are summed again, so that long rows lose less.
constexpr int64_t CHAINS = 4, LEVELS = 4, LEAST_POWER = 4;

typedef float Sums[CHAINS][SUMMED];

static inline void add(Sums& sums, const Sums& others) {
  for (int64_t chain = 0; chain < CHAINS; chain++)
    for (int64_t lane = 0; lane < SUMMED; lane++) sums[chain][lane] += others[chain][lane];
}

static inline void add_squares(float (&sums)[SUMMED], const float* numbers) {
  for (int64_t lane = 0; lane < SUMMED; lane++) sums[lane] += numbers[lane] * numbers[lane];
}

// The exponent of the smallest power of two that is no smaller.
static inline int64_t power_of_two(int64_t number) {
  int64_t power = 0;
  while (((int64_t)1 << power) < number) power++;
  return power;
}

static inline float sum_of_squares(const float* row, int64_t size) {
  const int64_t vectors = size / SUMMED, turns = vectors / CHAINS, power = std::max(LEAST_POWER, power_of_two(turns) / LEVELS);
  const int64_t last = ((int64_t)1 << power) - 1;
  Sums levels[LEVELS] = {};
  Sums& sums = levels[0];
  for (int64_t turn = 0; turn < turns;) {
    for (int64_t chain = 0; chain < CHAINS; chain++) add_squares(sums[chain], row + (turn * CHAINS + chain) * SUMMED);
    turn++;
    if (turn & last) continue;
    for (int64_t level = 1; level < LEVELS; level++) {
      add(levels[level], levels[level - 1]);
      std::memset(levels[level - 1], 0, sizeof(Sums));
      if (turn & (last << (level * power))) break;
    }
  }
  for (int64_t level = 1; level < LEVELS; level++) add(sums, levels[level]);
  for (int64_t vector = turns * CHAINS; vector < vectors; vector++) add_squares(sums[0], row + vector * SUMMED);
  for (int64_t chain = 1; chain < CHAINS; chain++)
    for (int64_t lane = 0; lane < SUMMED; lane++) sums[0][lane] += sums[chain][lane];
  float sum = 0;
  for (int64_t place = vectors * SUMMED; place < size; place++) sum += row[place] * row[place];
  for (int64_t lane = 0; lane < SUMMED; lane++) sum += sums[0][lane];
  return sum;
}

// states, normed (rows, size), and weight (size).
template <class Number>
static inline void norm(const Number* states, const Number* weight, Number* normed, int64_t rows, int64_t size, float epsilon) {
  std::vector<float> wide(size);
  for (int64_t row = 0; row < rows; row++, states += size, normed += size) {
    for (int64_t place = 0; place < size; place++) wide[place] = widened(states[place]);
    const float scale = 1 / std::sqrt(sum_of_squares(wide.data(), size) / size + epsilon);
    for (int64_t place = 0; place < size; place++)
      normed[place] = rounded<Number>(widened(weight[place]) * widened(rounded<Number>(wide[place] * scale)));
  }
}

extern "C" void norm_float32(const float* states, const float* weight, float* normed, int64_t rows, int64_t size, float epsilon) {
  norm(states, weight, normed, rows, size, epsilon);
}

extern "C" void norm_bfloat16(const uint16_t* states, const uint16_t* weight, uint16_t* normed, int64_t rows, int64_t size,
                              float epsilon) {
  norm(states, weight, normed, rows, size, epsilon);
}
