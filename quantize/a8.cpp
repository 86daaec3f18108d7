// Linear layers whose input is rounded to 8 bits: y = x @ w.T in whole numbers, on the weights that cpu.py packs.
//
// A row of x is rounded group by group (the weights' groups): scale = largest magnitude / 127, q = x / scale, to nearest.
// Of a group the products q * w are summed exactly, in 32 bits; then, group after group, a row's total becomes
//   total + sum * (w's scale * x's scale)  and, for 4 bits,  + w's minimum * (x's scale * sum of q).
// So a row's result depends on nothing but the row and the weights, and every path gives the same bits.
// For the packed layout see packed.h. A lane's 4-bit columns are taken as two sets of four bytes, columns 0 4 1 5 and
// 2 6 3 7 of eight, so q is laid down in that order. Signed 8-bit weights become unsigned by adding 128, which the sum
// of q takes off again: VNNI multiplies unsigned by signed. Before VNNI, pairs of products are summed in 16 bits.

//
// Here are the operators, and the choice of the best path that the CPU has, at run time. What computes, a8_path.h, is
// included once for each instruction set (PATH).

#include "packed.h"
#include "surround.h"

#define VNNI 3

namespace {

constexpr float kLeast = 1e-30f;  // below it a group of x is nothing: 127 / it must be finite

struct Job : Sizes {
  const int8_t* q;        // [rows, in], in the order that `bits` wants
  const float* scales;    // [rows, groups]
  const int32_t* sums;    // [rows, groups]: of q
  const uint8_t* packed;  // [blocks, groups, bytes]
  void* y;                // [rows, blocks * 32]
  const void* residual;   // the same, or null
};

// Where in its eight columns a column's q is laid down.
constexpr int kPlaces4[8] = {0, 2, 4, 6, 1, 3, 5, 7};

inline float constant(const uint8_t* from, int i, bool half) {
  return half ? float(load<torch::headeronly::Half>(from + 2 * i)) : load<float>(from + 4 * i);
}

inline void store_y(const Job& job, int64_t at, float value) {
  if (!job.bf16) {
    ((float*)job.y)[at] = job.residual ? ((const float*)job.residual)[at] + value : value;
    return;
  }
  if (job.residual) {
    const uint32_t wide = uint32_t(((const uint16_t*)job.residual)[at]) << 16;
    value = load<float>(&wide) + value;
  }
  const uint32_t bits = load<uint32_t>(&value);
  const uint32_t rounded = value == value ? bits + 0x7fff + (bits >> 16 & 1) : bits | 0x400000;  // to even; NaN stays
  ((uint16_t*)job.y)[at] = rounded >> 16;
}

#define PATH PLAIN
namespace plain {
#include "a8_path.h"
}
#ifdef HAS_X86_PATHS
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define PATH AVX2
namespace avx2 {
#include "a8_path.h"
}
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#define PATH AVX512
namespace avx512 {
#include "a8_path.h"
}
#pragma GCC target("avx512vnni")
#define PATH VNNI
namespace vnni {
#include "a8_path.h"
}
#pragma GCC pop_options
#endif

int best_path() {
  const int level = cpu_level();
#ifdef HAS_X86_PATHS
  if (level == AVX512 && __builtin_cpu_supports("avx512vnni")) return VNNI;
#endif
  return level;
}

// `path`: -1 for the best.
template <int bits>
Tensor linear(const Tensor& x_given, const Tensor& packed, const std::optional<Tensor>& norm, double eps, bool gate,
              const std::optional<Tensor>& residual_given, int64_t path) {
  static const int best = best_path();
  const Tensor x = surrounded_input(x_given, norm, eps, gate);
  const Sizes sizes = sizes_of<bits>(x, packed);
  STD_TORCH_CHECK(path <= best, "this CPU lacks path ", path);
  Tensor y = new_output(x, sizes);
  const std::optional<Tensor> residual = laid_out(residual_given, y);

  if (path < 0) path = best;
  auto round = plain::round_group<bits>;
  auto run = plain::run<bits>;
#ifdef HAS_X86_PATHS
  if (path == AVX2) round = avx2::round_group<bits>, run = avx2::run<bits>;
  if (path >= AVX512) round = avx512::round_group<bits>, run = avx512::run<bits>;
  if (path == VNNI) run = vnni::run<bits>;
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
                  y.mutable_data_ptr(), residual ? residual->const_data_ptr() : nullptr}, run);
  return y;
}

int64_t path_count() { return best_path() + 1; }

STABLE_TORCH_LIBRARY_FRAGMENT(fastdecode, m) {
  m.def("linear_int4_a8(Tensor x, Tensor packed, Tensor? norm=None, float eps=0, bool gate=False, "
        "Tensor? residual=None, int path=-1) -> Tensor");
  m.def("linear_int8_a8(Tensor x, Tensor packed, Tensor? norm=None, float eps=0, bool gate=False, "
        "Tensor? residual=None, int path=-1) -> Tensor");
  m.def("a8_paths() -> int");
}
STABLE_TORCH_LIBRARY_IMPL(fastdecode, CPU, m) {
  m.impl("linear_int4_a8", TORCH_BOX(&linear<4>));
  m.impl("linear_int8_a8", TORCH_BOX(&linear<8>));
}
STABLE_TORCH_LIBRARY_IMPL(fastdecode, CompositeExplicitAutograd, m) { m.impl("a8_paths", TORCH_BOX(&path_count)); }

}  // namespace
