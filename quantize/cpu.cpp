// Linear layers with 4- and 8-bit weights on the CPU: y = x @ w.T, with w read as the small integers it is stored as,
// packed as packed.h says.
//
// A group is unpacked once for up to 64 rows. For each row a group's products are summed along the columns, and
// `scale * sum + minimum * (sum of x)` goes to the row's total, group after group. Nothing in that order depends on
// how many rows there are, which of them this is, or how outputs are shared among threads. (Paths differ in the last
// bits, so one path serves all row counts: tiles are used for one row, too.)
//
// Here are the operators, their threads, and the choice of the best path that the CPU has, at run time. What computes,
// cpu_path.h, is included once for each instruction set (PATH).

#include "packed.h"
#include "surround.h"

#define BF16 3  // AVX512-BF16: products of pairs of bf16, summed in fp32; for bf16 x
#define AMX 4   // tiles of the same; for bf16 x
#define APART __attribute__((noinline)) static  // a function of its own, so that its sums get all the registers

#ifdef HAS_X86_PATHS
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int kRows = 64;  // that share one unpacking

struct Job : Sizes {
  const void* x;          // [rows, in], bf16 or fp32
  const float* x_floats;  // [rows, in]; not for the paths that multiply in bf16
  const float* x_sums;    // [rows, groups]; for 4 bits
  const uint8_t* packed;  // [blocks, groups, bytes]
  void* y;                // [rows, blocks * 32], of the type of x
  const void* residual;   // the same, or null
};

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

// The best path of this CPU and system.
int best_path() {
  const int level = cpu_level();
  if (level < AVX512) return level;
#ifdef HAS_X86_PATHS
  unsigned a, b, c, d, a1, unused;
  __get_cpuid_count(7, 0, &a, &b, &c, &d);
  __get_cpuid_count(7, 1, &a1, &unused, &unused, &unused);
  if (!(a1 >> 5 & 1)) return AVX512;
  if (!(d >> 22 & 1) || !(d >> 24 & 1)) return BF16;
  return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0 ? AMX : BF16;
#endif
  return level;
}

// y = x @ w.T, and what surrounds it: surround.h. `path`: -1 for the best. With fp32 x, those of bf16 mean AVX512.
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
  if (!sizes.bf16) path = std::min<int64_t>(path, AVX512);
  auto prepare = plain::prepare;
  auto run = plain::run<bits>;
#ifdef HAS_X86_PATHS
  if (path == AVX2) prepare = avx2::prepare, run = avx2::run<bits>;
  if (path >= AVX512) prepare = avx512::prepare, run = avx512::run<bits>;
  if (path == BF16) run = bf16::run<bits>;
  if (path == AMX) run = amx::run<bits>;
#endif
  std::vector<float> x_floats(sizes.bf16 && path < BF16 ? sizes.rows * sizes.in : 0);
  std::vector<float> x_sums(bits == 4 ? sizes.rows * sizes.groups : 0);
  Job job{sizes, x.const_data_ptr(), x_floats.data(), x_sums.data(),
          static_cast<const uint8_t*>(packed.const_data_ptr()), y.mutable_data_ptr(),
          residual ? residual->const_data_ptr() : nullptr};
  prepare(job, x_floats.empty() ? nullptr : x_floats.data(), x_sums.empty() ? nullptr : x_sums.data());
  if (!sizes.bf16) job.x_floats = static_cast<const float*>(job.x);
  over_blocks(job, run);
  return y;
}

// x after its norm, as `linear` would take it.
Tensor norm(const Tensor& x, const Tensor& weight, double eps) { return surrounded_input(x, weight, eps, false); }

int64_t path_count() { return best_path() + 1; }

STABLE_TORCH_LIBRARY_FRAGMENT(fastdecode, m) {
  m.def("linear_int4(Tensor x, Tensor packed, Tensor? norm=None, float eps=0, bool gate=False, "
        "Tensor? residual=None, int path=-1) -> Tensor");
  m.def("linear_int8(Tensor x, Tensor packed, Tensor? norm=None, float eps=0, bool gate=False, "
        "Tensor? residual=None, int path=-1) -> Tensor");
  m.def("norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("cpu_paths() -> int");
}
STABLE_TORCH_LIBRARY_IMPL(fastdecode, CPU, m) {
  m.impl("linear_int4", TORCH_BOX(&linear<4>));
  m.impl("linear_int8", TORCH_BOX(&linear<8>));
  m.impl("norm", TORCH_BOX(&norm));
}
STABLE_TORCH_LIBRARY_IMPL(fastdecode, CompositeExplicitAutograd, m) { m.impl("cpu_paths", TORCH_BOX(&path_count)); }

}  // namespace
