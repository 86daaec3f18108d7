// Linear layers with 4- and 8-bit weights on the CPU: y = x @ w.T, with w read as the small integers it is stored as.
//
// Packed weights are uint8 [blocks, groups, bytes], made by cpu.py. For 32 outputs and one group of columns they hold
//   scale [32] and, for 4 bits, minimum [32]: fp16 or fp32, as the file had them;
//   the integers of outputs 0..15, then of 16..31, as vectors of 16 lanes of 32 bits, a lane to an output:
//     4 bits: columns 8v .. 8v+7; 8v+2j in the lane's bits 4j.., 8v+2j+1 in bits 16+4j..
//     8 bits: columns 4v .. 4v+3, a byte each.
// A group is unpacked once for up to 64 rows. For each row a group's products are summed along the columns, and
// `scale * sum + minimum * (sum of x)` goes to the row's total, group after group. Nothing in that order depends on
// how many rows there are, which of them this is, or how outputs are shared among threads. (Paths differ in the last
// bits, so one path serves all row counts: tiles are used for one row, too.)
//
// The file includes itself once for each instruction set (PATH); the best that the CPU has is chosen at run time.

#ifndef PATH

#define TORCH_TARGET_VERSION (((0ULL + 2) << 56) | ((0ULL + 11) << 48))
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cstring>
#include <vector>

#define PLAIN 0
#define AVX2 1
#define AVX512 2
#define BF16 3  // AVX512-BF16: products of pairs of bf16, summed in fp32; for bf16 x
#define AMX 4   // tiles of the same; for bf16 x
#define APART __attribute__((noinline)) static  // a function of its own, so that its sums get all the registers

#if defined(__x86_64__) && defined(__linux__) && __GNUC__ >= 11 && !defined(__clang__)
#define HAS_X86_PATHS  // clang takes no #pragma GCC target
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kOutputs = 32;    // of a block
constexpr int kRows = 64;       // that share one unpacking
constexpr int kMaxGroup = 128;  // columns
constexpr int kAhead = 4096;    // bytes of weights to ask for early, past what the hardware prefetches

struct Job {
  const void* x;          // [rows, in], bf16 or fp32
  const float* x_floats;  // [rows, in]; not for the paths that multiply in bf16
  const float* x_sums;    // [rows, groups]; for 4 bits
  const uint8_t* packed;  // [blocks, groups, bytes]
  void* y;                // [rows, blocks * 32], of the type of x
  int64_t rows, in, blocks, groups, bytes;
  int group;
  bool half_scales, bf16;
};

template <class T>
inline T load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

#define PATH PLAIN
namespace plain {
#include __FILE__
}
#ifdef HAS_X86_PATHS
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define PATH AVX2
namespace avx2 {
#include __FILE__
}
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#define PATH AVX512
namespace avx512 {
#include __FILE__
}
#pragma GCC target("avx512bf16")
#define PATH BF16
namespace bf16 {
#include __FILE__
}
#pragma GCC target("amx-tile,amx-bf16")
#define PATH AMX
namespace amx {
#include __FILE__
}
#pragma GCC pop_options
#endif

// The best path of this CPU and system. Newer names than AVX-512's are not known to every compiler: ask the CPU.
int best_path() {
#ifdef HAS_X86_PATHS
  unsigned a, b, c, d, leaf7[4] = {}, leaf7_1[4] = {};
  const auto has = [](auto... known) { return (known && ...); };
#define KNOWN(name) __builtin_cpu_supports(name)
  if (!__get_cpuid(1, &a, &b, &c, &d) || !has(KNOWN("avx2"), KNOWN("fma"), c >> 29 & 1 /* f16c */)) return PLAIN;
  if (!has(KNOWN("avx512f"), KNOWN("avx512bw"), KNOWN("avx512dq"), KNOWN("avx512vl"))) return AVX2;
  __get_cpuid_count(7, 0, &leaf7[0], &leaf7[1], &leaf7[2], &leaf7[3]);
  __get_cpuid_count(7, 1, &leaf7_1[0], &leaf7_1[1], &leaf7_1[2], &leaf7_1[3]);
  if (!(leaf7_1[0] >> 5 & 1)) return AVX512;
  if (!has(leaf7[3] >> 22 & 1, leaf7[3] >> 24 & 1)) return BF16;
  return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0 ? AMX : BF16;
#else
  return PLAIN;
#endif
}

// `path`: -1 for the best. With fp32 x, those that need bf16 mean AVX512.
template <int bits>
Tensor linear(const Tensor& x_given, const Tensor& packed, int64_t path) {
  static const int best = best_path();
  const Tensor x = torch::stable::contiguous(x_given);
  const bool bf16 = x.scalar_type() == ScalarType::BFloat16;
  STD_TORCH_CHECK(bf16 || x.scalar_type() == ScalarType::Float, "x is bf16 or fp32");
  STD_TORCH_CHECK(packed.dim() == 3 && packed.is_contiguous() && packed.scalar_type() == ScalarType::Byte,
                  "packed weights are contiguous uint8 [blocks, groups, bytes]");
  STD_TORCH_CHECK(path <= best, "this CPU lacks path ", path);
  const int64_t in = x.dim() ? x.size(x.dim() - 1) : 0, rows = in ? x.numel() / in : 0;
  const int64_t blocks = packed.size(0), groups = packed.size(1), bytes = packed.size(2);
  const int64_t group = groups ? in / groups : 0;
  const int64_t constants = kOutputs * (bits == 4 ? 2 : 1), left = bytes - kOutputs * bits * group / 8;
  STD_TORCH_CHECK(group >= 32 && group % 32 == 0 && group <= kMaxGroup && group * groups == in &&
                      (left == 2 * constants || left == 4 * constants),
                  "x has ", in, " columns, which these packed weights do not fit");
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = blocks * kOutputs;
  Tensor y = torch::stable::new_empty(x, shape);

  if (path < 0) path = best;
  if (!bf16) path = std::min<int64_t>(path, AVX512);
  auto prepare = plain::prepare;
  auto run = plain::run<bits>;
#ifdef HAS_X86_PATHS
  if (path == AVX2) prepare = avx2::prepare, run = avx2::run<bits>;
  if (path >= AVX512) prepare = avx512::prepare, run = avx512::run<bits>;
  if (path == BF16) run = bf16::run<bits>;
  if (path == AMX) run = amx::run<bits>;
#endif
  std::vector<float> x_floats(bf16 && path < BF16 ? rows * in : 0), x_sums(bits == 4 ? rows * groups : 0);
  Job job{x.const_data_ptr(), x_floats.data(), x_sums.data(), static_cast<const uint8_t*>(packed.const_data_ptr()),
          y.mutable_data_ptr(), rows, in, blocks, groups, bytes, int(group), left == 2 * constants, bf16};
  prepare(job, x_floats.empty() ? nullptr : x_floats.data(), x_sums.empty() ? nullptr : x_sums.data());
  if (!bf16) job.x_floats = static_cast<const float*>(job.x);
  const int64_t least = 1 + 16384 / (kOutputs * in);  // blocks that are worth waking a thread
  torch::stable::parallel_for(0, blocks, least, [&](int64_t first, int64_t end) { run(job, first, end); });
  return y;
}

int64_t path_count() { return best_path() + 1; }

STABLE_TORCH_LIBRARY_FRAGMENT(fastdecode, m) {
  m.def("linear_int4(Tensor x, Tensor packed, int path=-1) -> Tensor");
  m.def("linear_int8(Tensor x, Tensor packed, int path=-1) -> Tensor");
  m.def("cpu_paths() -> int");
}
STABLE_TORCH_LIBRARY_IMPL(fastdecode, CPU, m) {
  m.impl("linear_int4", TORCH_BOX(&linear<4>));
  m.impl("linear_int8", TORCH_BOX(&linear<8>));
}
STABLE_TORCH_LIBRARY_IMPL(fastdecode, CompositeExplicitAutograd, m) { m.impl("cpu_paths", TORCH_BOX(&path_count)); }

}  // namespace

#else  // what is compiled once for each instruction set

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

template <int bits>
inline void unpack(const uint8_t* q, int group, Weights* w) {
  for (int half = 0; half < 2; half++)
    for (int column = 0; column < group; column += 32 / bits)
      for (int vector = half * kVectors / 2; vector < (half + 1) * kVectors / 2; vector++, q += 4 * kWidth) {
        const Ints lanes = load<Ints>(q);
#pragma GCC unroll 8
        for (int i = 0; i < 32 / bits; i++) {
          const Ints value = bits == 4 ? lanes >> (4 * (i / 2) + 16 * (i % 2)) & 15 : lanes << (24 - 8 * i) >> 24;
          w[column + i][vector] = __builtin_convertvector(value, Floats);
        }
      }
}

inline Floats multiply_add(Floats sum, const X* x, Floats weights) { return sum + *x * weights; }

#else

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
      unpack<bits>(part + q_at, job.group, w);
      for (int64_t group = 0; group < job.groups; group++, part += job.bytes) {
        for (int64_t line = 0; line < job.bytes; line += 64) __builtin_prefetch(part + kAhead + line);
        const X* x_group = x + row0 * job.in + group * job.group;
#if PATH == AMX
        for (int row = 0; row < n; row += tile) {
          const int first = std::min(row, n - tile);
          multiply_tiles(x_group + first * job.in, job.in, w, job.group, sums + first);
        }
#else
        for (int row = 0; row < n;)
          row += multiply_some(n - row, x_group + row * job.in, job.in, w, job.group, sums + row);
#endif
        // The next group's weights before this one's sums: what has just been stored from tiles is slow to be read.
        if (group + 1 < job.groups) unpack<bits>(part + job.bytes + q_at, job.group, w);
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
#endif
