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
// Here are the operators, their threads, and the choice of the best path that the CPU has, at run time. What computes,
// cpu_path.h, is included once for each instruction set (PATH).

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
#include "cpu_path.h"
}
#ifdef HAS_X86_PATHS
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define PATH AVX2
namespace avx2 {
#include "cpu_path.h"
}
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#define PATH AVX512
namespace avx512 {
#include "cpu_path.h"
}
#pragma GCC target("avx512bf16")
#define PATH BF16
namespace bf16 {
#include "cpu_path.h"
}
#pragma GCC target("amx-tile,amx-bf16")
#define PATH AMX
namespace amx {
#include "cpu_path.h"
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
