// Attention of one token of each text to all that is stored of it, in one reading of keys and values.
//
// Keys are (items, heads, size, columns), so that a number of each column stands beside that of the next, and the scores of as many
// columns as registers hold are summed at once; values are (items, heads, columns, size), so that the same holds of their numbers.
// Sums are made in float32, whatever the numbers are.

// So many queries of a head are multiplied at once, by so many vectors: their sums stay in registers.
constexpr int64_t QUERIES = 4, VECTORS = LANES == 16 ? 4 : 2;
constexpr int64_t BLOCK = VECTORS * LANES;
// Values of so many columns are summed before they are added to those before: fewer roundings follow each other.
constexpr int64_t PART = 128;
// What hides a column is lower.
constexpr float LOWEST = -1e30f;

typedef int32_t Integers __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

static inline Floats loaded(const float* numbers) { return *(const Floats*)numbers; }
static inline Floats loaded(const uint16_t* numbers) {
  return (Floats)(__builtin_convertvector(*(const Halves*)numbers, Words) << 16);
}

// Of numbers up to 0: 2^n, n a whole number, times a polynomial of what is left, which is half of ln 2 at most.
static inline Floats exponential(Floats exponent) {
  Integers power = __builtin_convertvector(exponent * 1.44269504f - 0.5f, Integers);
  Floats whole = __builtin_convertvector(power, Floats);
  Floats rest = exponent - whole * 0.693359375f + whole * 2.12194440e-4f, sum = rest * (1 / 5040.0f) + 1 / 720.0f;
  for (float factor : {1 / 120.0f, 1 / 24.0f, 1 / 6.0f, 0.5f, 1.0f, 1.0f}) sum = sum * rest + factor;
  return exponent < -87.0f ? Floats{} : sum * (Floats)((power + 127) << 23);
}

// Asks for `count` numbers that are wanted later, in the second cache.
template <class Number>
static inline void ask_for(const Number* numbers, int64_t count) {
  for (int64_t number = 0; number < count; number += LINE / sizeof(Number)) __builtin_prefetch(numbers + number, 0, 2);
}

// Puts the scores of queries (queries, size) with some vectors of columns into rows of `scores`, and asks for the keys of the next
// head, which are `ahead` of these.
template <class Number, int64_t queries, int64_t vectors>
static void score(const float* query, const Number* keys, int64_t size, int64_t stride, int64_t ahead, float* scores,
                  int64_t row) {
  Floats sum[queries][vectors] = {};
  for (int64_t number = 0; number < size; number++) {
    const Number* columns = keys + number * stride;
    ask_for(columns + ahead, vectors * LANES);
    Floats key[vectors];
    for (int64_t vector = 0; vector < vectors; vector++) key[vector] = loaded(columns + vector * LANES);
    for (int64_t which = 0; which < queries; which++)
      for (int64_t vector = 0; vector < vectors; vector++) sum[which][vector] += query[which * size + number] * key[vector];
  }
  for (int64_t which = 0; which < queries; which++)
    for (int64_t vector = 0; vector < vectors; vector++) *(Floats*)(scores + which * row + vector * LANES) = sum[which][vector];
}

template <class Number, int64_t queries>
static void score_all(const float* query, const Number* keys, int64_t size, int64_t stride, int64_t ahead, int64_t columns,
                      float* scores, int64_t row) {
  int64_t column = 0;
  for (; column + BLOCK <= columns; column += BLOCK)
    score<Number, queries, VECTORS>(query, keys + column, size, stride, ahead, scores + column, row);
  for (; column + LANES <= columns; column += LANES)
    score<Number, queries, 1>(query, keys + column, size, stride, ahead, scores + column, row);
  if (columns >= LANES && column < columns)
    // It has some of the columns before it, too: nothing is read that belongs to others.
    score<Number, queries, 1>(query, keys + columns - LANES, size, stride, ahead, scores + columns - LANES, row);
  for (; columns < LANES && column < columns; column++)
    for (int64_t which = 0; which < queries; which++) {
      float sum = 0;
      for (int64_t number = 0; number < size; number++)
        sum += query[which * size + number] * widened(keys[number * stride + column]);
      scores[which * row + column] = sum;
    }
}

// Scores become weights that sum up to 1, in place; those from `columns` to the end of the last vector become 0.
template <class Number>
static void weigh(float* scores, const Number* mask, int64_t columns) {
  float highest = -INFINITY, total = 0;
  for (int64_t column = 0; column < columns; column++) {
    if (mask) scores[column] += widened(mask[column]);
    highest = std::max(highest, scores[column]);
  }
  int64_t end = (columns + LANES - 1) / LANES * LANES;
  std::fill(scores + columns, scores + end, -INFINITY);
  Floats sum = {};
  for (int64_t column = 0; column < end; column += LANES) {
    Floats* vector = (Floats*)(scores + column);
    sum += *vector = exponential(*vector - highest);
  }
  for (int64_t lane = 0; lane < LANES; lane++) total += sum[lane];
  for (int64_t column = 0; column < end; column++) scores[column] /= total;
}

// Sums of `vectors` vectors of each value, weighed.
template <class Number, int64_t queries, int64_t vectors>
static void mix(const float* weights, int64_t row, const Number* values, int64_t stride, int64_t ahead, int64_t columns,
                Number* outputs, int64_t size) {
  Floats total[queries][vectors] = {};
  for (int64_t begin = 0; begin < columns; begin += PART) {
    Floats sum[queries][vectors] = {};
    int64_t end = std::min(columns, begin + PART);
    for (int64_t column = begin; column < end; column++) {
      ask_for(values + column * stride + ahead, vectors * LANES);
      Floats value[vectors];
      for (int64_t vector = 0; vector < vectors; vector++) value[vector] = loaded(values + column * stride + vector * LANES);
      for (int64_t which = 0; which < queries; which++)
        for (int64_t vector = 0; vector < vectors; vector++) sum[which][vector] += weights[which * row + column] * value[vector];
    }
    for (int64_t which = 0; which < queries; which++)
      for (int64_t vector = 0; vector < vectors; vector++) total[which][vector] += sum[which][vector];
  }
  for (int64_t which = 0; which < queries; which++)
    for (int64_t number = 0; number < vectors * LANES; number++)
      outputs[which * size + number] = rounded<Number>(total[which][number / LANES][number % LANES]);
}

struct Shape {
  int64_t items, heads, queries, size, columns;
  // From one item, head, number (of keys) or column (of values) to the next; 0 for a mask that all items share.
  int64_t key_item, key_head, key_number, value_item, value_head, value_column, mask_item;
};

template <class Number, int64_t queries>
static void attend_few(const float* query, const Number* keys, const Number* values, const Number* mask, Number* outputs,
                       int64_t columns, const Shape& shape, int64_t keys_ahead, int64_t values_ahead, float* scores, int64_t row) {
  int64_t size = shape.size, stride = shape.value_column;
  score_all<Number, queries>(query, keys, size, shape.key_number, keys_ahead, columns, scores, row);
  for (int64_t which = 0; which < queries; which++) weigh(scores + which * row, mask, columns);
  int64_t number = 0;
  for (; number + BLOCK <= size; number += BLOCK)
    mix<Number, queries, VECTORS>(scores, row, values + number, stride, values_ahead, columns, outputs + number, size);
  for (; number + LANES <= size; number += LANES)
    mix<Number, queries, 1>(scores, row, values + number, stride, values_ahead, columns, outputs + number, size);
  for (; number < size; number++)
    for (int64_t which = 0; which < queries; which++) {
      float sum = 0;
      for (int64_t column = 0; column < columns; column++)
        sum += scores[which * row + column] * widened(values[column * stride + number]);
      outputs[which * size + number] = rounded<Number>(sum);
    }
}

template <class Number>
static constexpr decltype(&attend_few<Number, 1>) ATTEND_FEW[] = {
    nullptr, attend_few<Number, 1>, attend_few<Number, 2>, attend_few<Number, 3>, attend_few<Number, 4>,
};

// queries and outputs (items, heads, queries, size); mask (items, columns), which may be null, is added to scaled scores.
template <class Number>
static void attend(const Number* queries, const Number* keys, const Number* values, const Number* mask, Number* outputs,
                   const Shape* shape, float scale, int64_t num_threads) {
  int64_t size = shape->size, row = (shape->columns + BLOCK) / BLOCK * BLOCK;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    std::vector<float> query(QUERIES * size), scores(QUERIES * row);
#pragma omp for schedule(static)
    for (int64_t place = 0; place < shape->items * shape->heads; place++) {
      int64_t item = place / shape->heads, head = place % shape->heads, begin = 0;
      const Number* hidden = mask ? mask + item * shape->mask_item : nullptr;
      // What pads an item is not read.
      while (hidden && begin < shape->columns && !(widened(hidden[begin]) > LOWEST)) begin++;
      if (begin == shape->columns) begin = 0;
      const Number* key = keys + item * shape->key_item + head * shape->key_head + begin;
      const Number* value = values + item * shape->value_item + head * shape->value_head + begin * shape->value_column;
      bool is_last = head + 1 == shape->heads;
      int64_t keys_ahead = is_last ? shape->key_item - head * shape->key_head : shape->key_head;
      int64_t values_ahead = is_last ? shape->value_item - head * shape->value_head : shape->value_head;
      for (int64_t first = 0; first < shape->queries; first += QUERIES) {
        int64_t count = std::min(QUERIES, shape->queries - first), offset = (place * shape->queries + first) * size;
        for (int64_t number = 0; number < count * size; number++) query[number] = widened(queries[offset + number]) * scale;
        ATTEND_FEW<Number>[count](query.data(), key, value, hidden ? hidden + begin : nullptr, outputs + offset,
                                  shape->columns - begin, *shape, keys_ahead, values_ahead, scores.data(), row);
      }
    }
  }
}

extern "C" void attend_float32(const float* queries, const float* keys, const float* values, const float* mask, float* outputs,
                               const Shape* shape, float scale, int64_t num_threads) {
  attend<float>(queries, keys, values, mask, outputs, shape, scale, num_threads);
}

extern "C" void attend_bfloat16(const uint16_t* queries, const uint16_t* keys, const uint16_t* values, const uint16_t* mask,
                                uint16_t* outputs, const Shape* shape, float scale, int64_t num_threads) {
  attend<uint16_t>(queries, keys, values, mask, outputs, shape, scale, num_threads);
}
