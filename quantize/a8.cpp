// Linear layers whose input is rounded to 8 bits: y = x @ w.T in whole numbers, on the weights that cpu.py packs.
//
// A row of x is rounded group by group (the weights' groups): scale = largest magnitude / 127, q = x / scale, to nearest.
// Of a group the products q * w are summed exactly, in 32 bits; then, group after group, a row's total becomes
//   total + sum * (w's scale * x's scale)  and, for 4 bits,  + w's minimum * (x's scale * sum of q).
// So a row's result depends on nothing but the row and the weights, and every path gives the same bits.
// For the packed layout see packed.h. A lane's 4-bit columns are taken as two sets of four bytes, columns 0 4 1 5 and
// 2 6 3 7 of eight, so q is laid down in that order. Signed 8-bit weights become unsigned by adding 128, which the sum
// of q takes off again: VNNI multiplies unsigned by signed.

#include "packed.h"

#include <cmath>

namespace {

constexpr float kLeast = 1e-30f;  // below it a group of x is nothing: 127 / it must be finite

struct Job : Sizes {
  const int8_t* q;        // [rows, in], in the order that `bits` wants
  const float* scales;    // [rows, groups]
  const int32_t* sums;    // [rows, groups]: of q
  const uint8_t* packed;  // [blocks, groups, bytes]
  void* y;                // [rows, blocks * 32]
};

// Where in its eight columns a column's q is laid down.
constexpr int kPlaces4[8] = {0, 2, 4, 6, 1, 3, 5, 7};

inline float constant(const uint8_t* from, int i, bool half) {
  return half ? float(load<torch::headeronly::Half>(from + 2 * i)) : load<float>(from + 4 * i);
}

inline void store_y(const Job& job, int64_t at, float value) {
  if (!job.bf16) return (void)std::memcpy((float*)job.y + at, &value, 4);
  const uint32_t bits = load<uint32_t>(&value);
  const uint32_t rounded = value == value ? bits + 0x7fff + (bits >> 16 & 1) : bits | 0x400000;  // to even; NaN stays
  ((uint16_t*)job.y)[at] = rounded >> 16;
}

// Rounds one group of x, in fp32. The largest magnitude is found among the bits, where NaN is larger than all else.
template <int bits>
void round_group(const float* x, int group, int8_t* q, float* scale, int32_t* sum) {
  uint32_t most = 0;
  for (int i = 0; i < group; i++) most = std::max(most, load<uint32_t>(x + i) & 0x7fffffff);
  const float largest = load<float>(&most);
  const bool nothing = largest < kLeast;
  const float inverse = nothing ? 0.f : 127.f / largest;
  int32_t total = 0;
  for (int i = 0; i < group; i++) {
    const float rounded = std::nearbyint(x[i] * inverse);
    const int32_t value = rounded >= -127 && rounded <= 127 ? int32_t(rounded) : 0;  // 0 for NaN: the scale carries it
    total += value;
    q[bits == 4 ? i / 8 * 8 + kPlaces4[i % 8] : i] = value;
  }
  *scale = nothing ? 0.f : largest / 127.f;
  *sum = total;
}

template <int bits>
void run_plain(const Job& job, int64_t first_block, int64_t end_block) {
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

#ifdef HAS_X86_PATHS
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c,fma")

constexpr int kTogether = 8;  // rows whose sums fit the registers

template <int bits>
void round_group_vnni(const float* x, int group, int8_t* q, float* scale, int32_t* sum) {
  __m512i most = _mm512_setzero_si512();
  for (int i = 0; i < group; i += 16)
    most = _mm512_max_epu32(most, _mm512_and_si512(_mm512_loadu_si512(x + i), _mm512_set1_epi32(0x7fffffff)));
  const uint32_t most_bits = _mm512_reduce_max_epu32(most);
  const float largest = load<float>(&most_bits);
  const bool nothing = largest < kLeast;
  const __m512 inverse = _mm512_set1_ps(nothing ? 0.f : 127.f / largest);
  const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
  __m512i total = _mm512_setzero_si512();
  for (int i = 0; i < group; i += 16) {
    const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(x + i), inverse);
    const __mmask16 sound = _mm512_cmp_ps_mask(_mm512_abs_ps(scaled), _mm512_set1_ps(127.5f), _CMP_LT_OQ);
    const __m512i rounded = _mm512_maskz_cvtps_epi32(sound, scaled);
    total = _mm512_add_epi32(total, rounded);
    const __m128i bytes = _mm512_cvtepi32_epi8(rounded);
    _mm_storeu_si128((__m128i*)(q + i), bits == 4 ? _mm_shuffle_epi8(bytes, order) : bytes);
  }
  *scale = nothing ? 0.f : largest / 127.f;
  *sum = _mm512_reduce_add_epi32(total);
}

inline __m512 constants(const uint8_t* from, bool half) {
  return half ? _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from)) : _mm512_loadu_ps(from);
}

// `n` rows from `row` on, one block of outputs.
template <int bits, int n>
void run_rows(const Job& job, int64_t block, int64_t row) {
  const int constant_bytes = job.half_scales ? 2 : 4, vectors = job.group * bits / 32;  // vectors of 16 outputs
  const int weights_at = (bits == 4 ? 2 : 1) * constant_bytes * kOutputs;
  const __m512i low = _mm512_set1_epi8(15), sign = _mm512_set1_epi8(char(128));
  __m512 totals[n][2];
  for (int i = 0; i < n; i++) totals[i][0] = totals[i][1] = _mm512_setzero_ps();
  for (int64_t group = 0; group < job.groups; group++) {
    const uint8_t* part = job.packed + (block * job.groups + group) * job.bytes;
    for (int64_t line = 0; line < job.bytes; line += 64) __builtin_prefetch(part + kAhead + line);
    const uint8_t* weights = part + weights_at;
    const int8_t* q = job.q + row * job.in + group * job.group;
    __m512i sums[n][2];
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) sums[i][0] = sums[i][1] = _mm512_setzero_si512();
    for (int vector = 0; vector < vectors; vector++)
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++) {
        const __m512i lanes = _mm512_loadu_si512(weights + (half * vectors + vector) * 64);
        if (bits == 4) {
          const __m512i first = _mm512_and_si512(lanes, low), second = _mm512_and_si512(_mm512_srli_epi16(lanes, 4), low);
#pragma GCC unroll 8
          for (int i = 0; i < n; i++) {
            const int8_t* at = q + i * job.in + vector * 8;
            sums[i][half] = _mm512_dpbusd_epi32(sums[i][half], first, _mm512_set1_epi32(load<int32_t>(at)));
            sums[i][half] = _mm512_dpbusd_epi32(sums[i][half], second, _mm512_set1_epi32(load<int32_t>(at + 4)));
          }
        } else {
          const __m512i positive = _mm512_xor_si512(lanes, sign);
#pragma GCC unroll 8
          for (int i = 0; i < n; i++)
            sums[i][half] = _mm512_dpbusd_epi32(sums[i][half], positive,
                                                _mm512_set1_epi32(load<int32_t>(q + i * job.in + vector * 4)));
        }
      }
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      const __m512 w_scale = constants(part + half * 16 * constant_bytes, job.half_scales);
      const __m512 w_minimum =
          bits == 4 ? constants(part + (2 + half) * 16 * constant_bytes, job.half_scales) : _mm512_setzero_ps();
#pragma GCC unroll 8
      for (int i = 0; i < n; i++) {
        const int64_t at = (row + i) * job.groups + group;
        const float x_scale = job.scales[at];
        __m512i sum = sums[i][half];
        if (bits == 8) sum = _mm512_sub_epi32(sum, _mm512_set1_epi32(128 * job.sums[at]));
        const __m512 scale = _mm512_mul_ps(w_scale, _mm512_set1_ps(x_scale));
        totals[i][half] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, totals[i][half]);
        if (bits == 4)
          totals[i][half] = _mm512_fmadd_ps(w_minimum, _mm512_set1_ps(x_scale * job.sums[at]), totals[i][half]);
      }
    }
  }
  alignas(64) float values[kOutputs];
  for (int i = 0; i < n; i++) {
    _mm512_store_ps(values, totals[i][0]);
    _mm512_store_ps(values + 16, totals[i][1]);
    for (int output = 0; output < kOutputs; output++)
      store_y(job, ((row + i) * job.blocks + block) * kOutputs + output, values[output]);
  }
}

template <int bits>
void run_vnni(const Job& job, int64_t first_block, int64_t end_block) {
  for (int64_t block = first_block; block < end_block; block++)
    for (int64_t row = 0; row < job.rows;) {
      const int64_t left = job.rows - row;
      if (left >= kTogether) run_rows<bits, kTogether>(job, block, row), row += kTogether;
      else if (left >= 4) run_rows<bits, 4>(job, block, row), row += 4;
      else if (left >= 2) run_rows<bits, 2>(job, block, row), row += 2;
      else run_rows<bits, 1>(job, block, row), row += 1;
    }
}
#pragma GCC pop_options
#endif

bool has_vnni() {
#ifdef HAS_X86_PATHS
  return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
#else
  return false;
#endif
}

// `path`: 0 plain, 1 VNNI, -1 the best.
template <int bits>
Tensor linear(const Tensor& x_given, const Tensor& packed, int64_t path) {
  static const int best = has_vnni();
  const Tensor x = torch::stable::contiguous(x_given);
  const Sizes sizes = sizes_of<bits>(x, packed);
  STD_TORCH_CHECK(path <= best, "this CPU lacks path ", path);
  Tensor y = new_output(x, sizes);

  auto round = round_group<bits>;
  auto run = run_plain<bits>;
#ifdef HAS_X86_PATHS
  if (path == 1 || (path < 0 && best)) round = round_group_vnni<bits>, run = run_vnni<bits>;
#endif
  const int64_t parts = sizes.rows * sizes.groups;
  std::vector<int8_t> q(parts * sizes.group);
  std::vector<float> scales(parts), floats(sizes.group);
  std::vector<int32_t> sums(parts);
  const void* const given = x.const_data_ptr();
  for (int64_t part = 0; part < parts; part++) {
    const float* values = (const float*)given + part * sizes.group;
    if (sizes.bf16) {
      for (int64_t i = 0; i < sizes.group; i++) {
        const uint32_t wide = uint32_t(((const uint16_t*)given)[part * sizes.group + i]) << 16;
        std::memcpy(&floats[i], &wide, 4);
      }
      values = floats.data();
    }
    round(values, sizes.group, q.data() + part * sizes.group, &scales[part], &sums[part]);
  }
  over_blocks(Job{sizes, q.data(), scales.data(), sums.data(), static_cast<const uint8_t*>(packed.const_data_ptr()),
                  y.mutable_data_ptr()}, run);
  return y;
}

int64_t path_count() { return has_vnni() + 1; }

STABLE_TORCH_LIBRARY_FRAGMENT(fastdecode, m) {
  m.def("linear_int4_a8(Tensor x, Tensor packed, int path=-1) -> Tensor");
  m.def("linear_int8_a8(Tensor x, Tensor packed, int path=-1) -> Tensor");
  m.def("a8_paths() -> int");
}
STABLE_TORCH_LIBRARY_IMPL(fastdecode, CPU, m) {
  m.impl("linear_int4_a8", TORCH_BOX(&linear<4>));
  m.impl("linear_int8_a8", TORCH_BOX(&linear<8>));
}
STABLE_TORCH_LIBRARY_IMPL(fastdecode, CompositeExplicitAutograd, m) { m.impl("a8_paths", TORCH_BOX(&path_count)); }

}  // namespace
