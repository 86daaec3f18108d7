// The inner loops of attention.cpp, which includes this file once for each instruction set, PATH, in a namespace of its
// own: run (tasks: chunks of keys of one kv head) and combine (their parts, for some queries). So there is no include
// guard, and what all of them share (Job, load, the constants) is in attention.cpp.

constexpr int kWidth = PATH >= AVX512 ? 16 : PATH == AVX2 ? 8 : 4;  // floats to a vector
constexpr int kVectors = PATH >= AVX512 ? 4 : 2;                    // whose sums, for kRows rows, fit the registers
constexpr int kRows = 6;
typedef float Floats __attribute__((vector_size(4 * kWidth)));
typedef int32_t Ints __attribute__((vector_size(4 * kWidth)));
typedef uint16_t Shorts __attribute__((vector_size(2 * kWidth)));
typedef int8_t Chars __attribute__((vector_size(kWidth)));

inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof(value)); }

// e ** x for x <= 0, 0 where x < -87: 2 ** n times the series for what is left, at most log(2) / 2.
inline Floats exponential(Floats x) {
  const Floats shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2 ** 23: the sum's last bits are n
  const Floats n = shifted - 12582912.0f;
  const Floats left = x - n * 0.693145752f - n * 1.42860677e-6f;  // log(2) in two parts; n times the first is exact
  Floats sum = left * (1 / 5040.0f) + 1 / 720.0f;
  sum = sum * left + 1 / 120.0f;
  sum = sum * left + 1 / 24.0f;
  sum = sum * left + 1 / 6.0f;
  sum = sum * left + 0.5f;
  sum = sum * left + 1.0f;
  sum = sum * left + 1.0f;
  const Floats power = (Floats)(((Ints)shifted << 23) + 0x3f800000);
  return x < -87.0f ? Floats{} : sum * power;
}

#if PATH != PLAIN
// One step of a transposition: of two rows that are `step` apart, blocks of `step` off the diagonal change places.
template <int step, size_t... j>
inline void exchange(Ints* rows, std::index_sequence<j...>) {
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; i++) {
    if (i & step) continue;
    const Ints a = rows[i], b = rows[i + step];
    rows[i] = __builtin_shuffle(a, b, Ints{int(j & step ? kWidth + j - step : j)...});
    rows[i + step] = __builtin_shuffle(a, b, Ints{int(j & step ? kWidth + j : j + step)...});
  }
}
#endif

// rows[i][j] <-> rows[j][i]
inline void transpose(Ints* rows) {
#if PATH == PLAIN
  for (int i = 0; i < kWidth; i++)
    for (int j = 0; j < i; j++) {
      const int32_t one = rows[i][j];
      rows[i][j] = rows[j][i];
      rows[j][i] = one;
    }
#else
  const auto lanes = std::make_index_sequence<kWidth>();
  exchange<1>(rows, lanes);
  exchange<2>(rows, lanes);
  exchange<4>(rows, lanes);
  if (kWidth > 8) exchange<8 % kWidth>(rows, lanes);
#endif
}

// Keys `[count, dim]` of type T, `stride` bytes apart -> floats `[dim, kChunk]`; what is beyond `count` is undefined.
template <class T>
APART void transpose_keys(const char* from, int64_t stride, int count, int dim, float* to) {
  constexpr int kParts = 4 / sizeof(T);  // of 32 bits
  const int words = dim / kParts;
  for (int key = 0; key < count; key += kWidth)
    for (int word = 0; word < words; word += kWidth) {
      const int n_words = std::min(kWidth, words - word);
      Ints rows[kWidth] = {};
      const char* row = from + key * stride + 4 * word;
      const int n_rows = std::min(kWidth, count - key);
      if (n_rows == kWidth && n_words == kWidth)
#pragma GCC unroll 16
        for (int i = 0; i < kWidth; i++) rows[i] = load<Ints>(row + i * stride);
      else
        for (int i = 0; i < n_rows; i++) std::memcpy(&rows[i], row + i * stride, 4 * n_words);
      transpose(rows);
      float* column = to + word * kParts * kChunk + key;
      for (int i = 0; i < n_words; i++)
#pragma GCC unroll 4
        for (int part = 0; part < kParts; part++, column += kChunk) {
          if (kParts == 1) store(column, (Floats)rows[i]);
          if (kParts == 2) store(column, (Floats)(part ? rows[i] & int32_t(0xffff0000) : rows[i] << 16));
          if (kParts == 4) store(column, __builtin_convertvector(rows[i] << (24 - 8 * part) >> 24, Floats));
        }
    }
}

// Values `[count, dim]` of type T, `stride` bytes apart -> floats `[count, dim]`.
template <class T>
APART void read_values(const char* from, int64_t stride, int count, int dim, float* to) {
  for (int key = 0; key < count; key++, from += stride)
    for (int i = 0; i < dim; i += kWidth, to += kWidth) {
      const char* at = from + i * sizeof(T);
      if (sizeof(T) == 4) store(to, load<Floats>(at));
      if (sizeof(T) == 2) store(to, (Floats)(__builtin_convertvector(load<Shorts>(at), Ints) << 16));
      if (sizeof(T) == 1) store(to, __builtin_convertvector(load<Chars>(at), Floats));
    }
}

inline Floats multiply_add(Floats sum, float a, Floats b) { return sum + a * b; }
#if PATH == BF16
inline Floats multiply_add(Floats sum, int32_t a, Ints b) {  // of pairs of bf16
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(a), (__m512bh)b);
}
#endif

template <class T>
using Vector = std::conditional_t<std::is_same_v<T, float>, Floats, Ints>;

// `y [rows, vectors] = a [rows, n] @ b [n, vectors]`, summed along n; returns `rows`. T: float, or int32_t for pairs.
template <int rows, int vectors, class T>
APART int multiply(const T* a, int64_t a_row, int n, const T* b, int64_t b_row, float* y, int64_t y_row) {
  Floats sum[rows][vectors] = {};
  for (int i = 0; i < n; i++)
#pragma GCC unroll 4
    for (int vector = 0; vector < vectors; vector++) {
      const Vector<T> column = load<Vector<T>>(b + i * b_row + vector * kWidth);
#pragma GCC unroll 8
      for (int row = 0; row < rows; row++)
        sum[row][vector] = multiply_add(sum[row][vector], a[row * a_row + i], column);
    }
  for (int row = 0; row < rows; row++)
    for (int vector = 0; vector < vectors; vector++) store(y + row * y_row + vector * kWidth, sum[row][vector]);
  return rows;
}

// The same for any number of rows and of columns, a multiple of 16.
template <class T>
void multiply_all(
    int rows, int columns, const T* a, int64_t a_row, int n, const T* b, int64_t b_row, float* y, int64_t y_row) {
  const auto some = [&](auto vectors, int row, int column) {
    const T *a_at = a + row * a_row, *b_at = b + column;
    float* y_at = y + row * y_row + column;
    constexpr int v = decltype(vectors)::value;
    if (rows - row >= kRows) return multiply<kRows, v>(a_at, a_row, n, b_at, b_row, y_at, y_row);
    if (rows - row >= 3) return multiply<3, v>(a_at, a_row, n, b_at, b_row, y_at, y_row);
    if (rows - row >= 2) return multiply<2, v>(a_at, a_row, n, b_at, b_row, y_at, y_row);
    return multiply<1, v>(a_at, a_row, n, b_at, b_row, y_at, y_row);
  };
  for (int row = 0, done; row < rows; row += done)
    for (int column = 0; column < columns;)
      if (columns - column >= kVectors * kWidth) {
        done = some(std::integral_constant<int, kVectors>(), row, column);
        column += kVectors * kWidth;
      } else {
        done = some(std::integral_constant<int, 1>(), row, column);
        column += kWidth;
      }
}

// Turns a query's products with keys into weights, in place; `allowed [kChunk]`, scales (or null) likewise.
inline void weigh(float* scores, float factor, const uint8_t* allowed, const float* k_scale, const float* v_scale,
                  float* top, float* total) {
  Floats vectors[kChunk / kWidth], most = Floats{} - FLT_MAX, sum = {};
  Ints may[kChunk / kWidth];
  for (int i = 0; i < kChunk / kWidth; i++) {
    vectors[i] = load<Floats>(scores + i * kWidth) * factor;
    if (k_scale) vectors[i] *= load<Floats>(k_scale + i * kWidth);
    may[i] = __builtin_convertvector(load<Chars>(allowed + i * kWidth), Ints) != 0;
    const Floats seen = may[i] ? vectors[i] : Floats{} - FLT_MAX;
    most = seen > most ? seen : most;
  }
  float largest = most[0];
  for (int i = 1; i < kWidth; i++) largest = std::max(largest, most[i]);
  for (int i = 0; i < kChunk / kWidth; i++) {
    const Floats weight = may[i] ? exponential(vectors[i] - largest) : Floats{};
    sum += weight;
    store(scores + i * kWidth, v_scale ? weight * load<Floats>(v_scale + i * kWidth) : weight);
  }
  float whole = 0;
  for (int i = 0; i < kWidth; i++) whole += sum[i];
  *top = largest, *total = whole;
}

// Asks for the keys or the values of a task early: the hardware does not see where the next ones are.
inline void prefetch(const Job& job, const Cache& cache, int64_t task) {
  const Chunk chunk = job.chunks[task / job.kv_heads];
  const char* row = cache.at(chunk.batch, task % job.kv_heads, chunk.first);
  for (int key = 0; key < chunk.end; key++, row += cache.key)
    for (int64_t line = 0; line < job.dim * cache.size; line += 64) __builtin_prefetch(row + line);
}

void run(const Job& job, int64_t first_task, int64_t end_task) {
  alignas(64) float keys[kMostDim * kChunk], values[kChunk * kMostDim], scores[kTile * kChunk];
  alignas(64) float k_scale[kChunk] = {}, v_scale[kChunk] = {};
  alignas(64) uint8_t allowed[kMostRows][kChunk];
  const int dim = job.dim, words = PATH == BF16 ? dim / 2 : dim;  // of 32 bits in a query
  typedef std::conditional_t<PATH == BF16, int32_t, float> Word;
  for (int64_t task = first_task; task < end_task; task++) {
    const Chunk chunk = job.chunks[task / job.kv_heads];
    const int64_t head = task % job.kv_heads;
    const char* k = job.k.at(chunk.batch, head, chunk.first);
    const char* v = job.v.at(chunk.batch, head, chunk.first);
    auto transpose_any = transpose_keys<float>;
    auto read_any = read_values<float>;
    if (job.k.type == ScalarType::BFloat16) transpose_any = transpose_keys<uint16_t>, read_any = read_values<uint16_t>;
    if (job.k.type == ScalarType::Char) transpose_any = transpose_keys<int8_t>, read_any = read_values<int8_t>;
    prefetch(job, job.v, task);
    if (PATH == BF16) transpose_keys<float>(k, job.k.key, chunk.end, words, keys);  // pairs stay together
    else transpose_any(k, job.k.key, chunk.end, dim, keys);
    if (task + 1 < end_task) prefetch(job, job.k, task + 1);
    read_any(v, job.v.key, chunk.end, dim, values);
    std::memset(allowed, 0, sizeof(allowed));
    for (int64_t row = 0; row < job.rows; row++)
      std::memcpy(allowed[row], job.mask + chunk.batch * job.mask_batch + row * job.mask_row + chunk.first, chunk.end);
    const bool codes = job.k.scale;
    if (codes) {
      const int64_t at_k = chunk.batch * job.k.scale_batch + head * job.k.scale_head + chunk.first;
      const int64_t at_v = chunk.batch * job.v.scale_batch + head * job.v.scale_head + chunk.first;
      std::memcpy(k_scale, job.k.scale + at_k, chunk.end * 4);
      std::memcpy(v_scale, job.v.scale + at_v, chunk.end * 4);
    }
    const Word* q = (const Word*)job.q + (chunk.batch * job.kv_heads + head) * job.queries * words;
    float* part = job.parts + task * job.queries * (2 + dim);
    float *tops = part, *totals = tops + job.queries, *sums = totals + job.queries;
    for (int64_t query = 0; query < job.queries; query += kTile) {
      const int n = std::min<int64_t>(kTile, job.queries - query);
      multiply_all<Word>(n, kChunk, q + query * words, words, words, (const Word*)keys, kChunk, scores, kChunk);
      for (int i = 0; i < n; i++)
        weigh(scores + i * kChunk, job.factor, allowed[(query + i) % job.rows], codes ? k_scale : nullptr,
              codes ? v_scale : nullptr, tops + query + i, totals + query + i);
      multiply_all<float>(n, dim, scores, kChunk, chunk.end, values, dim, sums + query * dim, dim);
    }
  }
}

inline void store_y(const Job& job, int64_t at, Floats value) {
  if (!job.bf16) return store((float*)job.y + at, value);
  const Ints bits = (Ints)value;
  const Ints rounded = value == value ? bits + 0x7fff + (bits >> 16 & 1) : bits | 0x400000;  // to even; NaN stays
  const Shorts shorts = __builtin_convertvector(rounded >> 16, Shorts);
  std::memcpy((uint16_t*)job.y + at, &shorts, sizeof(shorts));
}

// For queries `first .. end - 1` of `[batch, kv heads, queries]`: adds up the parts.
void combine(const Job& job, int64_t first, int64_t end) {
  const int dim = job.dim;
  for (int64_t i = first; i < end; i++) {
    const int64_t query = i % job.queries, head = i / job.queries % job.kv_heads, b = i / job.queries / job.kv_heads;
    const int64_t row = query % job.rows, q_head = head * (job.queries / job.rows) + query / job.rows;
    const auto part_of = [&](int64_t chunk) {
      return job.parts + (chunk * job.kv_heads + head) * job.queries * (2 + dim);
    };
    float top = -FLT_MAX, total = 0;
    for (int64_t chunk = job.first_chunk[b]; chunk < job.first_chunk[b + 1]; chunk++)
      top = std::max(top, part_of(chunk)[query]);
    alignas(64) float sum[kMostDim] = {};
    for (int64_t chunk = job.first_chunk[b]; chunk < job.first_chunk[b + 1]; chunk++) {
      const float* part = part_of(chunk);
      const float factor = exponential(Floats{} + (part[query] - top))[0];
      total += part[job.queries + query] * factor;
      const float* values = part + 2 * job.queries + query * dim;
      for (int d = 0; d < dim; d += kWidth) store(sum + d, load<Floats>(sum + d) + load<Floats>(values + d) * factor);
    }
    total = std::max(total, 1e-30f);
    const int64_t at = ((b * job.rows + row) * job.kv_heads * (job.queries / job.rows) + q_head) * dim;
    for (int d = 0; d < dim; d += kWidth) store_y(job, at + d, load<Floats>(sum + d) / total);
  }
}

#undef PATH
