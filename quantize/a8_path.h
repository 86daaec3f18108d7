// The inner loops of a8.cpp, which includes this file once for each instruction set, PATH, in a namespace of its own:
// round_group (of x, to 8 bits), run (all rows by some blocks of weights). So there is no include guard, and what all
// of them share (Job, load, the constants) is in a8.cpp and packed.h.

// Rounds one group of x, in fp32. The largest magnitude is found among the bits, where NaN is larger than all else.
template <int bits>
void round_group(const float* x, int group, int8_t* q, float* scale, int32_t* sum) {
  uint32_t most = 0;
  for (int i = 0; i < group; i++) most = std::max(most, load<uint32_t>(x + i) & 0x7fffffff);
  const float largest = load<float>(&most);
  const bool nothing = largest < kLeast;
  const float inverse = nothing ? 0.f : 127.f / largest;
  int32_t values[kMaxGroup], total = 0;
  for (int i = 0; i < group; i++) {
    const float rounded = std::nearbyint(x[i] * inverse);
    values[i] = rounded >= -127 && rounded <= 127 ? int32_t(rounded) : 0;  // 0 for NaN: the scale carries it
    total += values[i];
  }
  for (int i = 0; i < group; i += 8)
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) q[i + (bits == 4 ? kPlaces4[j] : j)] = values[i + j];
  *scale = nothing ? 0.f : largest / 127.f;
  *sum = total;
}

#if PATH == PLAIN

template <int bits>
void run(const Job& job, int64_t first_block, int64_t end_block) {
  const int n_constants = bits == 4 ? 2 : 1, constant_bytes = job.half_scales ? 2 : 4, step = 32 / bits;
  std::vector<float> totals(job.rows * kOutputs);
  for (int64_t block = first_block; block < end_block; block++) {
    std::fill(totals.begin(), totals.end(), 0.f);
    for (int64_t group = 0; group < job.groups; group++) {
      const uint8_t* part = job.packed + (block * job.groups + group) * job.bytes;
      const uint8_t* weights = part + n_constants * constant_bytes * kOutputs;
      for (int output = 0; output < kOutputs; output++) {
        const float w_scale = constant(part, output, job.half_scales);
        const float w_minimum = bits == 4 ? constant(part + kOutputs * constant_bytes, output, job.half_scales) : 0.f;
        const uint8_t* lanes = weights + (output / 16 * job.group / step * 16 + output % 16) * 4;
        for (int64_t row = 0; row < job.rows; row++) {
          const int8_t* q = job.q + row * job.in + group * job.group;
          int32_t sum = 0;
          for (int column = 0; column < job.group; column++) {
            const uint8_t* lane = lanes + column / step * 64;
            const int c = column % step;  // of q's order
            sum += q[column] * (bits == 4 ? lane[c % 4] >> (c / 4 * 4) & 15 : int8_t(lane[c]));
          }
          float& total = totals[row * kOutputs + output];
          const float x_scale = job.scales[row * job.groups + group];
          total = std::fma(float(sum), w_scale * x_scale, total);
          if (bits == 4) total = std::fma(w_minimum, x_scale * job.sums[row * job.groups + group], total);
        }
      }
    }
    for (int64_t row = 0; row < job.rows; row++)
      for (int output = 0; output < kOutputs; output++)
        store_y(job, (row * job.blocks + block) * kOutputs + output, totals[row * kOutputs + output]);
  }
}

#else

#if PATH == AVX2
#define OP(name) _mm256_##name
typedef __m256i Bytes;
typedef __m256 Floats;
#else
#define OP(name) _mm512_##name
typedef __m512i Bytes;
typedef __m512 Floats;
#endif
constexpr int kWidth = sizeof(Floats) / 4;  // outputs to a vector
constexpr int kVectors = kOutputs / kWidth;
constexpr int kTogether = PATH == AVX2 ? 2 : 8;  // rows whose sums fit the registers

inline Floats constants(const uint8_t* from, bool half) {
#if PATH == AVX2
  return half ? _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)) : load<Floats>(from);
#else
  return half ? _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from)) : load<Floats>(from);
#endif
}

// Adds to each of `sums`, 32 bits, the products of eight 4-bit columns: of two sets of four bytes of weights with x's.
// Before VNNI they are summed in 16 bits first: 32 columns of them fit, since 16 * 15 * 127 is less than 32,768.
struct Sums4 {
#if PATH == VNNI
  Bytes sum;
  void begin(Bytes so_far) { sum = so_far; }
  void add(Bytes weights, Bytes x) { sum = _mm512_dpbusd_epi32(sum, weights, x); }
  Bytes end(Bytes) const { return sum; }
#else
  Bytes pairs;
  void begin(Bytes) { pairs = Bytes{}; }
  void add(Bytes weights, Bytes x) { pairs = OP(add_epi16)(pairs, OP(maddubs_epi16)(weights, x)); }
  Bytes end(Bytes so_far) const { return OP(add_epi32)(so_far, OP(madd_epi16)(pairs, OP(set1_epi16)(1))); }
#endif
};

// `sum` and the products of four 8-bit columns. Before VNNI a weight's sign goes over to x: then two products fit in 16
// bits, since 2 * 128 * 127 is less than 32,768.
inline Bytes multiply_add8(Bytes sum, Bytes weights, Bytes x) {
#if PATH == VNNI
  return _mm512_dpbusd_epi32(sum, weights ^ _mm512_set1_epi8(char(128)), x);
#else
#if PATH == AVX2
  const Bytes signed_x = _mm256_sign_epi8(x, weights);
#else
  const Bytes signed_x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(weights), Bytes{}, x);
#endif
  const Bytes pairs = OP(maddubs_epi16)(OP(abs_epi8)(weights), signed_x);
  return OP(add_epi32)(sum, OP(madd_epi16)(pairs, OP(set1_epi16)(1)));
#endif
}

// `n` rows from `row` on, one block of outputs.
template <int bits, int n>
void run_rows(const Job& job, int64_t block, int64_t row) {
  const int constant_bytes = job.half_scales ? 2 : 4, vectors = job.group * bits / 32;  // of 16 outputs
  const int weights_at = (bits == 4 ? 2 : 1) * constant_bytes * kOutputs;
  const Bytes low = OP(set1_epi8)(15);
  Floats totals[n][kVectors];
  for (int i = 0; i < n; i++)
    for (int v = 0; v < kVectors; v++) totals[i][v] = OP(setzero_ps)();
  for (int64_t group = 0; group < job.groups; group++) {
    const uint8_t* part = job.packed + (block * job.groups + group) * job.bytes;
    for (int64_t line = 0; line < job.bytes; line += 64) __builtin_prefetch(part + kAhead + line);
    const int8_t* q = job.q + row * job.in + group * job.group;
    Bytes sums[n][kVectors] = {};
    for (int first = 0; first < vectors; first += bits)  // 32 columns
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) {
        const uint8_t* at = part + weights_at + (v * kWidth / 16 * vectors + first) * 64 + v * kWidth % 16 * 4;
        Sums4 sums4[n];
        for (int i = 0; i < n; i++) sums4[i].begin(sums[i][v]);
#pragma GCC unroll 8
        for (int vector = 0; vector < bits; vector++, at += 64) {
          const Bytes lanes = load<Bytes>(at), second = OP(srli_epi16)(lanes, 4) & low;
#pragma GCC unroll 8
          for (int i = 0; i < n; i++) {
            const int8_t* x = q + i * job.in + (first + vector) * (32 / bits);
            const Bytes four = OP(set1_epi32)(load<int32_t>(x));
            if (bits == 8) sums[i][v] = multiply_add8(sums[i][v], lanes, four);
            else sums4[i].add(lanes & low, four), sums4[i].add(second, OP(set1_epi32)(load<int32_t>(x + 4)));
          }
        }
        for (int i = 0; i < n && bits == 4; i++) sums[i][v] = sums4[i].end(sums[i][v]);
      }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) {
      const uint8_t* at = part + v * kWidth * constant_bytes;
      const Floats w_scale = constants(at, job.half_scales);
      const Floats w_minimum = bits == 4 ? constants(at + kOutputs * constant_bytes, job.half_scales) : w_scale;
#pragma GCC unroll 8
      for (int i = 0; i < n; i++) {
        const int64_t of_x = (row + i) * job.groups + group;
        Bytes sum = sums[i][v];
        if (PATH == VNNI && bits == 8) sum = OP(sub_epi32)(sum, OP(set1_epi32)(128 * job.sums[of_x]));
        const Floats scale = OP(mul_ps)(w_scale, OP(set1_ps)(job.scales[of_x]));
        totals[i][v] = OP(fmadd_ps)(OP(cvtepi32_ps)(sum), scale, totals[i][v]);
        if (bits == 4)
          totals[i][v] = OP(fmadd_ps)(w_minimum, OP(set1_ps)(job.scales[of_x] * job.sums[of_x]), totals[i][v]);
      }
    }
  }
  for (int i = 0; i < n; i++)
    for (int output = 0; output < kOutputs; output++)
      store_y(job, ((row + i) * job.blocks + block) * kOutputs + output, ((float*)totals[i])[output]);
}

template <int bits>
void run(const Job& job, int64_t first_block, int64_t end_block) {
  for (int64_t block = first_block; block < end_block; block++)
    for (int64_t row = 0; row < job.rows;) {
      const int64_t left = job.rows - row;
      if (kTogether >= 8 && left >= 8) run_rows<bits, std::min(8, kTogether)>(job, block, row), row += 8;
      else if (kTogether >= 4 && left >= 4) run_rows<bits, std::min(4, kTogether)>(job, block, row), row += 4;
      else if (left >= 2) run_rows<bits, 2>(job, block, row), row += 2;
      else run_rows<bits, 1>(job, block, row), row += 1;
    }
}
#undef OP
#endif
#undef PATH
