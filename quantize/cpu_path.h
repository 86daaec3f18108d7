// The inner loops of cpu.cpp, which includes this file once for each instruction set, PATH, in a namespace of its own:
// prepare (x in fp32, and its sums), unpack (a group of weights), multiply (rows of x by it), run (all of it for some
// blocks). So there is no include guard, and what all of them share (Job, load, the constants) is in cpu.cpp.

constexpr int kWidth = PATH >= AVX512 ? 16 : PATH == AVX2 ? 8 : 4;  // outputs to a vector
constexpr int kVectors = kOutputs / kWidth;
typedef float Floats __attribute__((vector_size(4 * kWidth)));
typedef int32_t Ints __attribute__((vector_size(4 * kWidth)));
typedef uint16_t Shorts __attribute__((vector_size(2 * kWidth)));

inline Floats load_constants(const uint8_t* from, bool half) {
  if (!half) return load<Floats>(from);
#if PATH >= AVX512
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif PATH == AVX2
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
  Floats floats;
  for (int i = 0; i < kWidth; i++) floats[i] = load<torch::headeronly::Half>(from + 2 * i);
  return floats;
#endif
}

#if PATH <= AVX512

inline Floats load_x(const Job& job, int64_t at) {
  if (!job.bf16) return load<Floats>((const float*)job.x + at);
  return (Floats)(__builtin_convertvector(load<Shorts>((const uint16_t*)job.x + at), Ints) << 16);
}

// Fills, where given, `floats [rows, in]` with x in fp32 and `sums [rows, groups]` with its sums.
void prepare(const Job& job, float* floats, float* sums) {
  if (!floats && !sums) return;
  for (int64_t group = 0; group < job.rows * job.groups; group++) {
    Floats sum = {};
    for (int64_t at = group * job.group; at < (group + 1) * job.group; at += kWidth) {
      const Floats x = load_x(job, at);
      if (floats) std::memcpy(floats + at, &x, sizeof(x));
      sum += x;
    }
    float total = 0;
    for (int i = 0; i < kWidth; i++) total += sum[i];
    if (sums) sums[group] = total;
  }
}

typedef float X;
typedef Floats Weights[kVectors];  // of one column
constexpr int kColumns = 1;
constexpr int kTogether = PATH == AVX512 ? 8 : PATH == AVX2 ? 2 : 1;  // rows whose sums fit the registers

// Column i of those in a vector of lanes.
template <int bits>
inline Floats column_of(Ints lanes, int i) {
  const int shift = bits == 4 ? 4 * (i / 2) + 16 * (i % 2) : 24 - 8 * i;
#if PATH == AVX512
  const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);  // by an index's last 4 bits
  if (bits == 4) return (Floats)_mm512_permutexvar_ps((__m512i)(lanes >> shift), table);
#endif
  const Ints value = bits == 4 ? lanes >> shift & 15 : lanes << shift >> 24;
  return __builtin_convertvector(value, Floats);
}

template <int bits>
inline void unpack(const uint8_t* q, int group, Weights* w) {
  for (int half = 0; half < 2; half++)
    for (int column = 0; column < group; column += 32 / bits)
      for (int vector = half * kVectors / 2; vector < (half + 1) * kVectors / 2; vector++, q += 4 * kWidth) {
        const Ints lanes = load<Ints>(q);
#pragma GCC unroll 8
        for (int i = 0; i < 32 / bits; i++) w[column + i][vector] = column_of<bits>(lanes, i);
      }
}

inline Floats multiply_add(Floats sum, const X* x, Floats weights) { return sum + *x * weights; }

constexpr int kFew = PATH == AVX512 ? 4 : 1;  // rows whose sums leave registers for unpacking

// sums [n, vectors] of n rows of x, `stride` apart, over one group that is unpacked on the way; each as `multiply` has it.
template <int bits, int n>
APART void multiply_packed(const X* x, int64_t stride, const uint8_t* q, int group, Floats (*sums)[kVectors]) {
  constexpr int kHalf = kVectors / 2;  // vectors of 16 outputs
  Floats sum[n][kVectors] = {};
  for (int column = 0; column < group; column += 32 / bits, q += 64) {
    Ints lanes[kVectors];
#pragma GCC unroll 8
    for (int vector = 0; vector < kVectors; vector++)
      lanes[vector] = load<Ints>(q + vector / kHalf * group * bits * 2 + vector % kHalf * 4 * kWidth);
#pragma GCC unroll 8
    for (int i = 0; i < 32 / bits; i++)
#pragma GCC unroll 8
      for (int vector = 0; vector < kVectors; vector++) {
        const Floats weights = column_of<bits>(lanes[vector], i);
#pragma GCC unroll 8
        for (int row = 0; row < n; row++)
          sum[row][vector] = multiply_add(sum[row][vector], x + row * stride + column + i, weights);
      }
  }
  std::memcpy(sums, sum, sizeof(sum));
}

// The same for `rows` rows, of which there are at most kFew.
template <int bits>
inline void multiply_few(int rows, const X* x, int64_t stride, const uint8_t* q, int group, Floats (*sums)[kVectors]) {
  if (rows == 1) return multiply_packed<bits, 1>(x, stride, q, group, sums);
  if (rows == 2) return multiply_packed<bits, std::min(2, kFew)>(x, stride, q, group, sums);
  if (rows == 3) return multiply_packed<bits, std::min(3, kFew)>(x, stride, q, group, sums);
  return multiply_packed<bits, std::min(4, kFew)>(x, stride, q, group, sums);
}

#else

constexpr int kFew = 0;
typedef uint16_t X;
typedef __m512i Weights[kVectors];  // of a pair of columns: two bf16 to each output
constexpr int kColumns = 2;
constexpr int kTogether = 8;

template <int bits>
inline void unpack(const uint8_t* q, int group, Weights* w) {
  const __m512i table = _mm512_broadcast_i64x4(_mm256_setr_epi16(  // 0..15 in bf16, whatever an index's fifth bit is
      0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
      0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170));
  for (int half = 0; half < 2; half++)
    for (int pair = 0; pair < group / 2; pair += 16 / bits, q += 64) {
      const __m512i lanes = _mm512_loadu_si512(q);
      __m512i floats[4];  // for 8 bits; their upper halves are the same numbers in bf16
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++)
        if (bits == 4) w[pair + i][half] = _mm512_permutexvar_epi16(_mm512_srli_epi16(lanes, 4 * i), table);
        else floats[i] = (__m512i)_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(lanes, 24 - 8 * i), 24));
      for (int i = 0; i < 2 && bits == 8; i++)
        w[pair + i][half] =
            _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(floats[2 * i], 16), floats[2 * i + 1]);
    }
}

inline Floats multiply_add(Floats sum, const X* x, __m512i weights) {
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(load<int32_t>(x)), (__m512bh)weights);
}
#endif

#if PATH == AMX

// Tiles 0: rows of x; 1 and 2: weights of 16 outputs each; 3 and 4: their sums.
inline void configure_tiles(int n) {
  alignas(64) uint8_t tiles[64] = {1};  // palette 1; from 16 on, 16-bit widths in bytes; from 48 on, rows
  for (int tile = 0; tile < 5; tile++) tiles[16 + 2 * tile] = 64, tiles[48 + tile] = tile == 1 || tile == 2 ? 16 : n;
  _tile_loadconfig(tiles);
}

inline void multiply_tiles(const X* x, int64_t stride, const Weights* w, int group, Floats (*sums)[kVectors]) {
  asm volatile("" ::: "memory");  // GCC does not know that a tile load reads memory: w is written by here
  _tile_zero(3);
  _tile_zero(4);
  for (int column = 0; column < group; column += 32) {
    _tile_loadd(0, x + column, stride * 2);
    _tile_loadd(1, w[column / 2], 128);
    _tile_loadd(2, w[column / 2] + 1, 128);
    _tile_dpbf16ps(3, 0, 1);
    _tile_dpbf16ps(4, 0, 2);
  }
  _tile_stored(3, sums[0], 128);
  _tile_stored(4, sums[0] + 1, 128);
}
#else

// sums [n, vectors] of n rows of x, `stride` apart, over one group; returns n.
template <int n>
APART int multiply(const X* x, int64_t stride, const Weights* w, int group, Floats (*sums)[kVectors]) {
  Floats sum[n][kVectors] = {};
  for (int column = 0; column < group; column += kColumns)
#pragma GCC unroll 8
    for (int vector = 0; vector < kVectors; vector++) {
      const auto weights = w[column / kColumns][vector];
#pragma GCC unroll 8
      for (int row = 0; row < n; row++)
        sum[row][vector] = multiply_add(sum[row][vector], x + row * stride + column, weights);
    }
  std::memcpy(sums, sum, sizeof(sum));
  return n;
}

// The same for as many of `rows` rows as go together; returns how many.
inline int multiply_some(int rows, const X* x, int64_t stride, const Weights* w, int group, Floats (*sums)[kVectors]) {
  if (kTogether >= 8 && rows >= 8) return multiply<std::min(8, kTogether)>(x, stride, w, group, sums);
  if (kTogether >= 4 && rows >= 4) return multiply<std::min(4, kTogether)>(x, stride, w, group, sums);
  if (kTogether >= 2 && rows >= 2) return multiply<std::min(2, kTogether)>(x, stride, w, group, sums);
  return multiply<1>(x, stride, w, group, sums);
}
#endif

inline void store_y(const Job& job, int64_t at, Floats value) {
  if (job.residual && !job.bf16) value += load<Floats>((const float*)job.residual + at);
  if (job.residual && job.bf16)
    value += (Floats)(__builtin_convertvector(load<Shorts>((const uint16_t*)job.residual + at), Ints) << 16);
  if (!job.bf16) return (void)std::memcpy((float*)job.y + at, &value, sizeof(value));
  const Ints bits = (Ints)value;
  const Ints rounded = value == value ? bits + 0x7fff + (bits >> 16 & 1) : bits | 0x400000;  // to even; NaN stays
  const Shorts shorts = __builtin_convertvector(rounded >> 16, Shorts);
  std::memcpy((uint16_t*)job.y + at, &shorts, sizeof(shorts));
}

// Computes the outputs of blocks first_block .. end_block - 1 for all rows.
template <int bits>
void run(const Job& job, int64_t first_block, int64_t end_block) {
  alignas(64) Weights w[kMaxGroup / kColumns];
  alignas(64) Floats totals[kRows][kVectors], sums[kRows][kVectors], constants[2][kVectors];
  const X* const x = PATH <= AVX512 ? (const X*)job.x_floats : (const X*)job.x;
  const int n_constants = bits == 4 ? 2 : 1, constant_bytes = job.half_scales ? 2 : 4;
  [[maybe_unused]] int configured = 0;
  for (int64_t block = first_block; block < end_block; block++)
    for (int64_t row0 = 0; row0 < job.rows; row0 += kRows) {
      const int n = std::min<int64_t>(kRows, job.rows - row0);
      std::memset(totals, 0, n * sizeof(*totals));
#if PATH == AMX
      const int n_tiles = (n + 15) / 16, tile = (n + n_tiles - 1) / n_tiles;  // rows of each; the last begins early
      if (tile != configured) configure_tiles(configured = tile);
#endif
      const uint8_t* part = job.packed + block * job.groups * job.bytes;
      const int q_at = n_constants * constant_bytes * kOutputs;
      const bool whole = n > kFew;  // whether a group is unpacked before anything is multiplied
      if (whole) unpack<bits>(part + q_at, job.group, w);
      for (int64_t group = 0; group < job.groups; group++, part += job.bytes) {
        for (int64_t line = 0; line < job.bytes; line += 64) __builtin_prefetch(part + kAhead + line);
        const X* x_group = x + row0 * job.in + group * job.group;
#if PATH == AMX
        for (int row = 0; row < n; row += tile) {
          const int first = std::min(row, n - tile);
          multiply_tiles(x_group + first * job.in, job.in, w, job.group, sums + first);
        }
#else
#if PATH <= AVX512
        if (!whole) multiply_few<bits>(n, x_group, job.in, part + q_at, job.group, sums);
#endif
        for (int row = 0; row < n && whole;)
          row += multiply_some(n - row, x_group + row * job.in, job.in, w, job.group, sums + row);
#endif
        // The next group's weights before this one's sums: what has just been stored from tiles is slow to be read.
        if (whole && group + 1 < job.groups) unpack<bits>(part + job.bytes + q_at, job.group, w);
        for (int i = 0; i < n_constants * kVectors; i++)
          constants[i / kVectors][i % kVectors] = load_constants(part + i * kWidth * constant_bytes, job.half_scales);
        for (int row = 0; row < n; row++)
          for (int vector = 0; vector < kVectors; vector++) {
            Floats& total = totals[row][vector];
            total += constants[0][vector] * sums[row][vector];
            if (bits == 4) total += constants[1][vector] * job.x_sums[(row0 + row) * job.groups + group];
          }
      }
      for (int row = 0; row < n; row++)
        for (int vector = 0; vector < kVectors; vector++)
          store_y(job, ((row0 + row) * job.blocks + block) * kOutputs + kWidth * vector, totals[row][vector]);
    }
#if PATH == AMX
  _tile_release();
#endif
}

#undef PATH
