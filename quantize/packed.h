// What the operators on packed weights (cpu.cpp, a8.cpp) have in common: the layout that cpu.py makes, and what fits it.
//
// Packed weights are uint8 [blocks, groups, bytes]. For 32 outputs and one group of columns they hold
//   scale [32] and, for 4 bits, minimum [32]: fp16 or fp32, as the file had them;
//   the integers of outputs 0..15, then of 16..31, as vectors of 16 lanes of 32 bits, a lane to an output:
//     4 bits: columns 8v .. 8v+7; 8v+2j in the lane's bits 4j.., 8v+2j+1 in bits 16+4j..
//     8 bits: columns 4v .. 4v+3, a byte each.

#define TORCH_TARGET_VERSION (((0ULL + 2) << 56) | ((0ULL + 11) << 48))
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <vector>

#if defined(__x86_64__) && defined(__linux__) && __GNUC__ >= 11 && !defined(__clang__)
#define HAS_X86_PATHS  // clang takes no #pragma GCC target
#include <cpuid.h>
#include <immintrin.h>
#endif

#define PLAIN 0
#define AVX2 1
#define AVX512 2

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kOutputs = 32;    // of a block
constexpr int kMaxGroup = 128;  // columns
constexpr int kAhead = 4096;    // bytes of weights to ask for early, past what the hardware prefetches

template <class T>
inline T load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

// PLAIN, AVX2 (with FMA and F16C) or AVX512 (F, BW, DQ and VL): what this CPU has. CPUID for what compilers don't know.
inline int cpu_level() {
#ifdef HAS_X86_PATHS
  unsigned a, b, c, d;
  const auto has = [](auto... known) { return (known && ...); };
#define KNOWN(name) __builtin_cpu_supports(name)
  if (!__get_cpuid(1, &a, &b, &c, &d) || !has(KNOWN("avx2"), KNOWN("fma"), c >> 29 & 1 /* f16c */)) return PLAIN;
  return has(KNOWN("avx512f"), KNOWN("avx512bw"), KNOWN("avx512dq"), KNOWN("avx512vl")) ? AVX512 : AVX2;
#else
  return PLAIN;
#endif
}

// The sizes of a product of x [rows, in] with packed weights.
struct Sizes {
  int64_t rows, in, blocks, groups, bytes;
  int group;
  bool half_scales, bf16;  // fp16 scales, or fp32; bf16 x and y, or fp32
};

// Those of a contiguous x and packed weights of `bits`; an error where they do not fit each other.
template <int bits>
Sizes sizes_of(const Tensor& x, const Tensor& packed) {
  const bool bf16 = x.scalar_type() == ScalarType::BFloat16;
  STD_TORCH_CHECK(bf16 || x.scalar_type() == ScalarType::Float, "x is bf16 or fp32");
  STD_TORCH_CHECK(packed.dim() == 3 && packed.is_contiguous() && packed.scalar_type() == ScalarType::Byte,
                  "packed weights are contiguous uint8 [blocks, groups, bytes]");
  const int64_t in = x.dim() ? x.size(x.dim() - 1) : 0, rows = in ? x.numel() / in : 0;
  const int64_t blocks = packed.size(0), groups = packed.size(1), bytes = packed.size(2);
  const int64_t group = groups ? in / groups : 0;
  const int64_t constants = kOutputs * (bits == 4 ? 2 : 1), left = bytes - kOutputs * bits * group / 8;
  STD_TORCH_CHECK(group >= 32 && group % 32 == 0 && group <= kMaxGroup && group * groups == in &&
                      (left == 2 * constants || left == 4 * constants),
                  "x has ", in, " columns, which these packed weights do not fit");
  return {rows, in, blocks, groups, bytes, int(group), left == 2 * constants, bf16};
}

inline Tensor new_output(const Tensor& x, const Sizes& sizes) {
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = sizes.blocks * kOutputs;
  return torch::stable::new_empty(x, shape);
}

// Calls run(job, first, end) for all blocks, in threads that have enough of them to be worth waking.
template <class Job, class Run>
void over_blocks(const Job& job, Run run) {
  const int64_t least = 1 + 16384 / (kOutputs * job.in);
  torch::stable::parallel_for(0, job.blocks, least, [&](int64_t first, int64_t end) { run(job, first, end); });
}

}  // namespace
