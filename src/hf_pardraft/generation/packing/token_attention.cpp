// Attention of a few tokens of each text to all that is stored of it, in one reading of keys and values.
//
// Heads that share keys are one head with more queries. Scores are summed of some queries and as many columns as registers hold,
// a number after the other: keys that lie as (size, columns) are read as they are, and of others, (columns, size), a block is
// turned first, in the first cache. Values are (columns, size). Sums are made in float32, whatever the numbers are.

// So many queries are multiplied at once, by so many vectors: their sums stay in registers.
constexpr int64_t QUERIES = 4, VECTORS = LANES == 16 ? 4 : 2;
// Columns whose keys are turned, and those whose values are summed before they are added to the sums before: fewer roundings
// follow each other. Both stay in the first cache for all queries.
constexpr int64_t BLOCK = VECTORS * LANES, SUMMED = 64;
// Of so many queries the scores are kept at once.
constexpr int64_t ROWS = 32;
// What hides a column is lower.
constexpr float LOWEST = -1e30f;

typedef int32_t Integers __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef uint8_t Bytes __attribute__((vector_size(LANES), aligned(1), may_alias));

static inline Floats loaded(const float* numbers) { return *(const Floats*)numbers; }
static inline Floats loaded(const uint16_t* numbers) {
  return (Floats)(__builtin_convertvector(*(const Halves*)numbers, Words) << 16);
}

// What a mask adds to scores; one of truth values tells which columns are seen.
static inline float added(float number) { return number; }
static inline float added(uint16_t number) { return widened(number); }
static inline float added(uint8_t is_seen) { return is_seen ? 0 : -INFINITY; }
template <class Number>
static inline Floats added(const Number* numbers) {
  return loaded(numbers);
}
static inline Floats added(const uint8_t* are_seen) {
  Halves seen = __builtin_convertvector(*(const Bytes*)are_seen, Halves);
  return __builtin_convertvector(seen, Words) != 0 ? Floats{} : Floats{} - INFINITY;
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

// Of vectors that are `distance` apart, those lanes change places that have this bit, or don't.
template <int distance, int... lane>
static inline void exchange(Floats& first, Floats& second, std::integer_sequence<int, lane...>) {
  Floats old = first;
  first = SHUFFLED(old, second, uint32_t(lane & distance ? LANES + lane - distance : lane)...);
  second = SHUFFLED(old, second, uint32_t(lane & distance ? LANES + lane : lane + distance)...);
}

// Rows of LANES vectors become columns.
template <int distance = LANES / 2>
static inline void turn(Floats (&rows)[LANES]) {
#pragma GCC unroll 16
  for (int64_t row = 0; row < LANES; row++)
    if (!(row & distance)) exchange<distance>(rows[row], rows[row + distance], std::make_integer_sequence<int, LANES>());
  if constexpr (distance > 1) turn<distance / 2>(rows);
}

// Puts keys (columns, size), up to a block of them, as (size, BLOCK). The last one fills up its vector.
template <class Number>
static void turn_block(const Number* keys, int64_t size, int64_t stride, int64_t ahead, int64_t columns, float* turned) {
  for (int64_t column = 0; column < columns; column += LANES) {
    const Number* key[LANES];
    for (int64_t lane = 0; lane < LANES; lane++) {
      key[lane] = keys + std::min(column + lane, columns - 1) * stride;
      if (ahead) ask_for(key[lane] + ahead, size);
    }
    for (int64_t number = 0; number < size; number += LANES) {
      Floats rows[LANES];
#pragma GCC unroll 16
      for (int64_t lane = 0; lane < LANES; lane++) rows[lane] = loaded(key[lane] + number);
      turn(rows);
#pragma GCC unroll 16
      for (int64_t lane = 0; lane < LANES; lane++) *(Floats*)(turned + (number + lane) * BLOCK + column) = rows[lane];
    }
  }
}

// Puts the scores of queries (queries, size) with some vectors of keys (size, columns) into rows of `scores`, and asks for the
// keys of the next head, which are `ahead` of these.
template <class Number, int64_t queries, int64_t vectors>
static void score(const float* query, const Number* keys, int64_t size, int64_t stride, int64_t ahead, float* scores,
                  int64_t row) {
  Floats sum[queries][vectors];
  clear(sum);
  int64_t number = 0;
  do {
    const Number* columns = keys + number * stride;
    if (ahead) ask_for(columns + ahead, vectors * LANES);
    Floats key[vectors];
    for (int64_t vector = 0; vector < vectors; vector++) {
      key[vector] = loaded(columns + vector * LANES);
      KEEP(key[vector]);
    }
    for (int64_t which = 0; which < queries; which++)
      for (int64_t vector = 0; vector < vectors; vector++) sum[which][vector] += query[which * size + number] * key[vector];
  } while (++number < size);
  for (int64_t which = 0; which < queries; which++)
    for (int64_t vector = 0; vector < vectors; vector++) *(Floats*)(scores + which * row + vector * LANES) = sum[which][vector];
}

template <class Number, int64_t vectors>
static constexpr decltype(&score<Number, 1, vectors>) SCORE[] = {
    nullptr, score<Number, 1, vectors>, score<Number, 2, vectors>, score<Number, 3, vectors>, score<Number, 4, vectors>,
};

// The scores of all queries with the keys of a block, or of a part of it that fills vectors.
template <class Number>
static void score_block(const float* query, int64_t queries, const Number* keys, int64_t size, int64_t stride, int64_t ahead,
                        int64_t columns, float* scores, int64_t row) {
  bool is_whole = columns == BLOCK;
  for (int64_t column = 0; column < columns; column += is_whole ? BLOCK : LANES)
    for (int64_t first = 0; first < queries; first += QUERIES) {
      int64_t count = std::min(QUERIES, queries - first);
      auto few = is_whole ? SCORE<Number, VECTORS>[count] : SCORE<Number, 1>[count];
      few(query + first * size, keys + column, size, stride, first ? 0 : ahead, scores + first * row + column, row);
    }
}

// Scores (columns) become weights, in place, and those up to the end of the last vector 0; returns what to divide by. Where all
// are -inf there is nothing to see, and weights are 0.
template <class Mask>
static float weigh(float* scores, const Mask* mask, int64_t columns) {
  int64_t whole = columns / LANES * LANES, end = (columns + LANES - 1) / LANES * LANES;
  for (int64_t column = whole; mask && column < columns; column++) scores[column] += added(mask[column]);
  std::fill(scores + columns, scores + end, -INFINITY);
  Floats highest = Floats{} - INFINITY, sum = {};
  for (int64_t column = 0; column < end; column += LANES) {
    Floats vector = loaded(scores + column);
    if (mask && column < whole) *(Floats*)(scores + column) = vector += added(mask + column);
    highest = vector > highest ? vector : highest;
  }
  float most = -FLT_MAX, total = 0;
  for (int64_t lane = 0; lane < LANES; lane++) most = std::max(most, highest[lane]);
  for (int64_t column = 0; column < end; column += LANES) {
    Floats* vector = (Floats*)(scores + column);
    sum += *vector = exponential(*vector - most);
  }
  for (int64_t lane = 0; lane < LANES; lane++) total += sum[lane];
  return total == 0 ? 1 : total;
}

// Adds some vectors of each value, weighed, to the sums of queries (queries, size).
template <class Number, int64_t queries, int64_t vectors>
static void mix(const float* weights, int64_t row, const Number* values, int64_t stride, int64_t ahead, int64_t columns,
                float* sums, int64_t size) {
  Floats sum[queries][vectors];
  clear(sum);
  int64_t column = 0;
  do {
    if (ahead) ask_for(values + column * stride + ahead, vectors * LANES);
    Floats value[vectors];
    for (int64_t vector = 0; vector < vectors; vector++) {
      value[vector] = loaded(values + column * stride + vector * LANES);
      KEEP(value[vector]);
    }
    for (int64_t which = 0; which < queries; which++)
      for (int64_t vector = 0; vector < vectors; vector++) sum[which][vector] += weights[which * row + column] * value[vector];
  } while (++column < columns);
  for (int64_t which = 0; which < queries; which++)
    for (int64_t vector = 0; vector < vectors; vector++) *(Floats*)(sums + which * size + vector * LANES) += sum[which][vector];
}

template <class Number, int64_t vectors>
static constexpr decltype(&mix<Number, 1, vectors>) MIX[] = {
    nullptr, mix<Number, 1, vectors>, mix<Number, 2, vectors>, mix<Number, 3, vectors>, mix<Number, 4, vectors>,
};

// The same for the values of a block, and all queries.
template <class Number>
static void mix_block(const float* weights, int64_t queries, int64_t row, const Number* values, int64_t stride, int64_t ahead,
                      int64_t columns, float* sums, int64_t size) {
  for (int64_t first = 0; first < queries; first += QUERIES)
    for (int64_t number = 0, vectors; number < size; number += vectors * LANES) {
      vectors = number + BLOCK <= size ? VECTORS : 1;
      int64_t count = std::min(QUERIES, queries - first);
      auto few = vectors > 1 ? MIX<Number, VECTORS>[count] : MIX<Number, 1>[count];
      few(weights + first * row, row, values + number, stride, first ? 0 : ahead, columns, sums + first * size + number, size);
    }
}

struct Shape {
  // `heads` of keys, each of which has the queries of `groups` heads; `size` fills vectors.
  int64_t items, heads, groups, tokens, size, columns;
  // From one item, head, token, column or number to the next; 0 where all share a mask.
  int64_t query_item, query_head, query_token, key_item, key_head, key_column, key_number, value_item, value_head, value_column;
  int64_t mask_item, mask_head, mask_token;
};

// A thread's room for some queries of a head: what they are, their scores, sums of values, and a block of keys or values.
template <class Mask>
struct Room {
  // From the scores of one query to those of the next.
  int64_t row;
  std::vector<float> query, scores, sums, block;
  const Mask* mask[ROWS];
  float total[ROWS];

  Room(int64_t rows, const Shape& shape)
      : row((shape.columns + LANES - 1) / LANES * LANES), query(rows * shape.size), scores(rows * row), sums(rows * shape.size),
        block(shape.size * std::max(BLOCK, SUMMED)) {}
};

// The scores of some queries of a head with so many keys. The next head's are `ahead` of these, 0 if nobody needs them.
template <class Number, class Mask>
static void score_keys(const Number* keys, int64_t columns, const Shape& shape, int64_t ahead, int64_t queries,
                       Room<Mask>& room) {
  int64_t size = shape.size, row = room.row;
  const float* query = room.query.data();
  for (int64_t column = 0; column < columns; column += BLOCK) {
    int64_t few = std::min(BLOCK, columns - column), whole = few / LANES * LANES;
    const Number* key = keys + column * shape.key_column;
    float *scores = room.scores.data() + column, *turned = room.block.data();
    bool lie_turned = shape.key_column == 1;
    if (lie_turned && (whole == few || columns >= LANES)) {
      score_block(query, queries, key, size, shape.key_number, ahead, whole, scores, row);
      // The last vector has some of the columns before, too: nothing is read that belongs to others.
      int64_t back = few - LANES;
      if (whole < few) score_block(query, queries, key + back, size, shape.key_number, ahead, LANES, scores + back, row);
      continue;
    }
    if (!lie_turned)
      turn_block(key, size, shape.key_column, ahead, few, turned);
    else
      for (int64_t number = 0; number < size; number++)
        for (int64_t which = 0; which < LANES; which++)
          turned[number * BLOCK + which] = widened(key[std::min(which, few - 1) + number * shape.key_number]);
    score_block(query, queries, turned, size, BLOCK, 0, few, scores, row);
  }
}

// Sums of so many values of a head for some queries, by their weights.
template <class Number, class Mask>
static void mix_values(const Number* values, int64_t columns, const Shape& shape, int64_t ahead, int64_t queries,
                       Room<Mask>& room) {
  int64_t size = shape.size, row = room.row, stride = shape.value_column;
  std::fill(room.sums.begin(), room.sums.end(), 0.0f);
  for (int64_t column = 0; column < columns; column += SUMMED) {
    int64_t few = std::min(SUMMED, columns - column);
    const Number* value = values + column * stride;
    const float* weights = room.scores.data() + column;
    float *sums = room.sums.data(), *wide = room.block.data();
    if (sizeof(Number) == sizeof(float) || queries <= QUERIES) {
      mix_block(weights, queries, row, value, stride, ahead, few, sums, size);
      continue;
    }
    // They are widened once for all queries.
    for (int64_t which = 0; which < few; which++) {
      if (ahead) ask_for(value + which * stride + ahead, size);
      for (int64_t number = 0; number < size; number += LANES)
        *(Floats*)(wide + which * size + number) = loaded(value + which * stride + number);
    }
    mix_block(weights, queries, row, wide, size, 0, few, sums, size);
  }
}

// The columns, from `begin` to `end`, that one of these queries sees. Nothing else is read, such as padding.
template <class Mask>
static void find_seen(const Mask* const* masks, int64_t queries, int64_t columns, int64_t& begin, int64_t& end) {
  begin = 0, end = columns;
  if (!masks[0]) return;
  begin = columns, end = 0;
  for (int64_t which = 0; which < queries; which++) {
    int64_t first = 0, last = columns;
    while (first < begin && !(added(masks[which][first]) > LOWEST)) first++;
    while (last > end && !(added(masks[which][last - 1]) > LOWEST)) last--;
    begin = std::min(begin, first), end = std::max(end, last);
  }
  if (begin >= end) begin = 0, end = columns;
}

// queries (items, heads, tokens, size); mask (items, heads, tokens, columns), which may be null, is added to scaled scores;
// outputs (items, tokens, heads, size).
template <class Number, class Mask>
static void attend(const Number* queries, const Number* keys, const Number* values, const Mask* mask, Number* outputs,
                   const Shape* shape, float scale, int64_t num_threads) {
  const Shape s = *shape;
  int64_t of_head = s.groups * s.tokens, parts = (of_head + ROWS - 1) / ROWS, places = s.items * s.heads;
  // Threads share the queries of a head where there are few heads.
  if (num_threads > 1) parts = std::max(parts, std::min(of_head / (2 * QUERIES), 4 * num_threads / std::max(places, (int64_t)1)));
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    Room<Mask> room((of_head + parts - 1) / parts, s);
#pragma omp for schedule(static)
    for (int64_t place = 0; place < places * parts; place++) {
      int64_t item = place / parts / s.heads, head = place / parts % s.heads, part = place % parts;
      int64_t first = part * of_head / parts, count = (part + 1) * of_head / parts - first, begin, end;
      int64_t group[ROWS], token[ROWS];
      for (int64_t which = 0; which < count; which++) {
        group[which] = head * s.groups + (first + which) / s.tokens, token[which] = (first + which) % s.tokens;
        const Number* query = queries + item * s.query_item + group[which] * s.query_head + token[which] * s.query_token;
        for (int64_t number = 0; number < s.size; number++) room.query[which * s.size + number] = widened(query[number]) * scale;
        int64_t offset = item * s.mask_item + group[which] * s.mask_head + token[which] * s.mask_token;
        room.mask[which] = mask ? mask + offset : nullptr;
      }
      find_seen(room.mask, count, s.columns, begin, end);
      for (int64_t which = 0; mask && which < count; which++) room.mask[which] += begin;
      int64_t columns = end - begin;
      bool is_last = head + 1 == s.heads, asks = part + 1 == parts;
      score_keys(keys + item * s.key_item + head * s.key_head + begin * s.key_column, columns, s,
                 asks * (is_last ? s.key_item - head * s.key_head : s.key_head), count, room);
      for (int64_t which = 0; which < count; which++)
        room.total[which] = weigh(room.scores.data() + which * room.row, room.mask[which], columns);
      mix_values(values + item * s.value_item + head * s.value_head + begin * s.value_column, columns, s,
                 asks * (is_last ? s.value_item - head * s.value_head : s.value_head), count, room);
      for (int64_t which = 0; which < count; which++) {
        Number* output = outputs + ((item * s.tokens + token[which]) * s.heads * s.groups + group[which]) * s.size;
        for (int64_t number = 0; number < s.size; number++)
          output[number] = rounded<Number>(room.sums[which * s.size + number] / room.total[which]);
      }
    }
  }
}

#define ATTEND(name, Number, Mask)                                                                                          \
  extern "C" void name(const Number* queries, const Number* keys, const Number* values, const Mask* mask, Number* outputs,  \
                       const Shape* shape, float scale, int64_t num_threads) {                                              \
    attend(queries, keys, values, mask, outputs, shape, scale, num_threads);                                                \
  }
ATTEND(attend_float32, float, float)
ATTEND(attend_float32_by_truth, float, uint8_t)
ATTEND(attend_bfloat16, uint16_t, uint16_t)
ATTEND(attend_bfloat16_by_truth, uint16_t, uint8_t)
