// Attention of up to 16 queries over a cache of keys and values on the CPU; see attention.py for shapes.
//
// Keys are taken in chunks of 64 at fixed places, whatever the bucket is. A task is a chunk of one kv head: it reads
// its keys and values once, for all queries of all query heads that share them, and leaves for each query the largest
// score, the sum of the weights under it, and the weighted sum of values. These are then added up, chunk by chunk. So
// a query's sums have one order, which no other query, no bucket and no thread changes: a key that it may not look at
// adds an exact zero, which is the same as a chunk that is left out because nobody may look there. (Paths differ in the
// last bits, so one path serves all.)
//
// Here are the operators, their threads, and the choice of the best path that the CPU has, at run time. What computes,
// attention_path.h, is included once for each instruction set (PATH).

#define TORCH_TARGET_VERSION (((0ULL + 2) << 56) | ((0ULL + 11) << 48))
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#define PLAIN 0
#define AVX2 1
#define AVX512 2
#define BF16 3  // AVX512-BF16: products of pairs of bf16, summed in fp32; for q and k in bf16
#define APART __attribute__((noinline)) static  // a function of its own, so that its sums get all the registers

#if defined(__x86_64__) && __GNUC__ >= 11 && !defined(__clang__)
#define HAS_X86_PATHS  // clang takes no #pragma GCC target
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kChunk = 64;     // keys
constexpr int kMostRows = 16;  // queries of a head
constexpr int kMostDim = 256;
constexpr int kTile = 48;  // queries whose weights over a chunk are kept at a time

struct Cache {  // keys or values, [batch, kv heads, keys, dim]
  const char* data;
  int64_t batch, head, key;  // strides in bytes
  const float* scale;        // [batch, kv heads, keys] for int8 codes, or null
  int64_t scale_batch, scale_head;
  ScalarType type;
  int64_t size;  // bytes of a number

  const char* at(int64_t b, int64_t h, int64_t n) const { return data + b * batch + h * head + n * key; }
};

struct Chunk {
  int64_t batch, first;
  int end;  // keys of it up to the last that anybody looks at
};

struct Job {
  const void* q;  // [batch, kv heads, queries, dim], fp32, for BF16 bf16; query g * rows + n is row n of the g-th head
  Cache k, v;
  const uint8_t* mask;  // [batch, rows, keys]
  int64_t mask_batch, mask_row;
  const Chunk* chunks;         // those that anybody looks at, in order
  const int64_t* first_chunk;  // [batch + 1]
  float* parts;                // [chunks, kv heads, queries, 2 + dim]: largest score, sum of weights, sum of values
  void* y;                     // [batch, rows, heads, dim], bf16 or fp32
  int64_t rows, kv_heads, queries, keys, dim;
  float factor;  // of scores: dim ** -0.5
  bool bf16;
};

template <class T>
inline T load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

inline float load_bf16(const uint16_t* from) {
  const uint32_t bits = uint32_t(*from) << 16;
  return load<float>(&bits);
}

}  // namespace

#include "new_rows.h"

namespace {

#define PATH PLAIN
namespace plain {
#include "attention_path.h"
}
#ifdef HAS_X86_PATHS
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define PATH AVX2
namespace avx2 {
#include "attention_path.h"
}
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#define PATH AVX512
namespace avx512 {
#include "attention_path.h"
}
#pragma GCC target("avx512bf16")
#define PATH BF16
namespace bf16 {
#include "attention_path.h"
}
#pragma GCC pop_options
#endif

// The best path of this CPU. Newer names than AVX-512's are not known to every compiler: ask the CPU.
int best_path() {
#ifdef HAS_X86_PATHS
  unsigned a = 0, b, c, d;
#define KNOWN(name) __builtin_cpu_supports(name)
  if (!(KNOWN("avx2") && KNOWN("fma"))) return PLAIN;
  if (!(KNOWN("avx512f") && KNOWN("avx512bw") && KNOWN("avx512dq") && KNOWN("avx512vl"))) return AVX2;
  __get_cpuid_count(7, 1, &a, &b, &c, &d);
  return a >> 5 & 1 ? BF16 : AVX512;
#else
  return PLAIN;
#endif
}

// Tensors whose last dimension is not contiguous are copied; prefixes of a cache are read where they are.
Tensor with_whole_rows(const Tensor& x) { return x.stride(x.dim() - 1) == 1 ? x : torch::stable::contiguous(x); }

Cache cache_of(const Tensor& x, const std::optional<Tensor>& scale) {
  const int64_t size = x.scalar_type() == ScalarType::Float ? 4 : x.scalar_type() == ScalarType::BFloat16 ? 2 : 1;
  Cache cache{static_cast<const char*>(x.const_data_ptr()), x.stride(0) * size, x.stride(1) * size, x.stride(2) * size,
              nullptr, 0, 0, x.scalar_type(), size};
  if (scale) {
    cache.scale = static_cast<const float*>(scale->const_data_ptr());
    cache.scale_batch = scale->stride(0), cache.scale_head = scale->stride(1);
  }
  return cache;
}

// The chunks that anybody looks at, those of each sequence in order; `first_chunk [batch + 1]` says where they begin.
std::vector<Chunk> chunks_in_use(const Job& job, int64_t batch, std::vector<int64_t>& first_chunk) {
  std::vector<Chunk> chunks;
  first_chunk = {0};
  for (int64_t b = 0; b < batch; b++) {
    for (int64_t first = 0; first < job.keys; first += kChunk) {
      const int count = std::min<int64_t>(kChunk, job.keys - first);
      int end = 0;
      for (int64_t row = 0; row < job.rows; row++) {
        const uint8_t* mask = job.mask + b * job.mask_batch + row * job.mask_row + first;
        for (int key = count; key > end; key--)
          if (mask[key - 1]) end = key;
      }
      if (end) chunks.push_back({b, first, end});
    }
    first_chunk.push_back(chunks.size());
  }
  return chunks;
}

// Queries `[batch, heads, rows, dim]`, of which the first three have `strides` in q, over keys and values with whole rows
// -> `[batch, rows, heads, dim]`, in `shape`. `path`: -1 for the best.
Tensor attended(const Tensor& q, int64_t heads, int64_t rows, const int64_t (&strides)[3], const Tensor& k, const Tensor& v,
                const Tensor& mask_given, const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale,
                int64_t path, const std::vector<int64_t>& shape) {
  static const int best = best_path();
  const Tensor mask = with_whole_rows(mask_given);
  const int64_t batch = q.size(0), dim = q.size(3), kv_heads = k.size(1), keys = mask.size(2);
  const bool bf16 = q.scalar_type() == ScalarType::BFloat16, codes = k.scalar_type() == ScalarType::Char;
  STD_TORCH_CHECK(bf16 || q.scalar_type() == ScalarType::Float, "q is bf16 or fp32");
  STD_TORCH_CHECK(codes || k.scalar_type() == ScalarType::BFloat16 || k.scalar_type() == ScalarType::Float,
                  "keys are bf16, fp32 or int8");
  STD_TORCH_CHECK(k.scalar_type() == v.scalar_type() && codes == k_scale.has_value() && codes == v_scale.has_value(),
                  "keys and values are of one type, with scales if they are int8");
  STD_TORCH_CHECK(mask.scalar_type() == ScalarType::Bool && mask.size(0) == batch && mask.size(1) == rows,
                  "the mask is bool [batch, rows, keys]");
  STD_TORCH_CHECK(k.size(0) == batch && v.size(0) == batch && v.size(1) == kv_heads && heads % kv_heads == 0 &&
                      k.size(2) >= keys && v.size(2) >= keys && k.size(3) == dim && v.size(3) == dim,
                  "keys and values do not fit the queries and the mask");
  STD_TORCH_CHECK(dim % 16 == 0 && dim <= kMostDim && rows <= kMostRows, "no such head size or number of rows");
  STD_TORCH_CHECK(path <= best, "this CPU lacks path ", path);

  const int64_t group = heads / kv_heads, queries = group * rows;
  Tensor y = torch::stable::new_empty(q, shape);
  if (path < 0) path = best;
  if (!bf16 || k.scalar_type() != ScalarType::BFloat16) path = std::min<int64_t>(path, AVX512);
  std::vector<float> gathered(batch * heads * rows * dim);
  Job job{gathered.data(), cache_of(k, k_scale), cache_of(v, v_scale),
          static_cast<const uint8_t*>(mask.const_data_ptr()), mask.stride(0), mask.stride(1), nullptr, nullptr, nullptr,
          y.mutable_data_ptr(), rows, kv_heads, queries, keys, dim, float(1 / std::sqrt(double(dim))), bf16};
  float* to = gathered.data();
  for (int64_t b = 0; b < batch; b++)
    for (int64_t h = 0; h < heads; h++)
      for (int64_t n = 0; n < rows; n++) {
        const int64_t at = b * strides[0] + h * strides[1] + n * strides[2];
        const uint16_t* shorts = static_cast<const uint16_t*>(q.const_data_ptr()) + at;
        if (!bf16) std::memcpy(to, static_cast<const float*>(q.const_data_ptr()) + at, dim * 4);
        else if (path == BF16) std::memcpy(to, shorts, dim * 2);
        else for (int64_t i = 0; i < dim; i++) to[i] = load_bf16(shorts + i);
        to += path == BF16 ? dim / 2 : dim;
      }
  std::vector<int64_t> first_chunk;
  const std::vector<Chunk> chunks = chunks_in_use(job, batch, first_chunk);
  const int64_t tasks = chunks.size() * kv_heads;
  // Not a vector, which would write it all to begin with.
  const std::unique_ptr<float[]> parts(new float[tasks * queries * (2 + dim)]);
  job.chunks = chunks.data(), job.first_chunk = first_chunk.data(), job.parts = parts.get();

  auto run = plain::run;
  auto combine = plain::combine;
#ifdef HAS_X86_PATHS
  if (path == AVX2) run = avx2::run, combine = avx2::combine;
  if (path == AVX512) run = avx512::run, combine = avx512::combine;
  if (path == BF16) run = bf16::run, combine = bf16::combine;
#endif
  // What is worth waking a thread, in multiplications.
  const int64_t least = 1 << 16, of_task = 2 * kChunk * dim * (queries + 2);
  torch::stable::parallel_for(0, tasks, 1 + least / of_task, [&](int64_t first, int64_t end) { run(job, first, end); });
  const int64_t of_query = (1 + chunks.size() / std::max<int64_t>(batch, 1)) * dim;
  torch::stable::parallel_for(0, batch * kv_heads * queries, 1 + 4 * least / of_query,
                              [&](int64_t first, int64_t end) { combine(job, first, end); });
  return y;
}

Tensor attend(const Tensor& q_given, const Tensor& k, const Tensor& v, const Tensor& mask,
              const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale, int64_t path) {
  const Tensor q = with_whole_rows(q_given);
  STD_TORCH_CHECK(q.dim() == 4, "q is [batch, heads, rows, dim]");
  std::optional<Tensor> scales[2];
  if (k_scale) scales[0] = with_whole_rows(*k_scale);
  if (v_scale) scales[1] = with_whole_rows(*v_scale);
  const Tensor y = attended(q, q.size(1), q.size(2), {q.stride(0), q.stride(1), q.stride(2)}, with_whole_rows(k),
                            with_whole_rows(v), mask, scales[0], scales[1], path,
                            {q.size(0), q.size(2), q.size(1), q.size(3)});
  return torch::stable::transpose(y, 1, 2);
}

// Of a projection's output: what is new is turned and stored, then its queries attend.
Tensor attend_new(const Tensor& qkv_given, const Tensor& cos_given, const Tensor& sin_given, const Tensor& rows_given,
                  const Tensor& mask, const Tensor& k, const Tensor& v, const std::optional<Tensor>& k_scale,
                  const std::optional<Tensor>& v_scale, int64_t path) {
  const Tensor qkv = torch::stable::contiguous(qkv_given), cos = torch::stable::contiguous(cos_given);
  const Tensor sin = torch::stable::contiguous(sin_given), cache_rows = torch::stable::contiguous(rows_given);
  STD_TORCH_CHECK(qkv.dim() == 3 && k.dim() == 4 && v.dim() == 4, "qkv is [batch, rows, width], and caches have heads");
  const int64_t batch = qkv.size(0), rows = qkv.size(1), kv_heads = k.size(1), dim = k.size(3);
  const int64_t heads = dim ? qkv.size(2) / dim - 2 * kv_heads : 0;
  const auto whole = [](const Tensor& x) { return x.stride(x.dim() - 1) == 1; };
  const auto angles = [&](const Tensor& x) {
    return x.scalar_type() == ScalarType::Float && (x.numel() == rows * dim || x.numel() == batch * rows * dim);
  };
  STD_TORCH_CHECK(qkv.scalar_type() == ScalarType::BFloat16 || qkv.scalar_type() == ScalarType::Float,
                  "queries, keys and values are bf16 or fp32");
  STD_TORCH_CHECK(heads > 0 && qkv.size(2) == (heads + 2 * kv_heads) * dim && v.size(1) == kv_heads && v.size(3) == dim &&
                      k.size(0) == batch && v.size(0) == batch && v.size(2) == k.size(2),
                  "the new rows do not fit the cache");
  STD_TORCH_CHECK(whole(k) && whole(v) && (!k_scale || whole(*k_scale)) && (!v_scale || whole(*v_scale)),
                  "the cache is written where it is");
  STD_TORCH_CHECK(angles(cos) && angles(sin) && cos.size(0) == sin.size(0), "cos and sin are fp32, a head's for each row");
  STD_TORCH_CHECK(cache_rows.scalar_type() == ScalarType::Long && cache_rows.numel() == batch * rows,
                  "rows are int64, one for each new row");
  STD_TORCH_CHECK((k.scalar_type() == ScalarType::Char) == k_scale.has_value() && k.scalar_type() == v.scalar_type() &&
                      k_scale.has_value() == v_scale.has_value(), "int8 caches have scales, others none");
  const Tensor q = turned_and_stored(qkv, cos, sin, cache_rows, cache_of(k, k_scale), cache_of(v, v_scale), kv_heads,
                                     k.size(2), dim);
  return attended(q, heads, rows, {rows * heads * dim, dim, heads * dim}, k, v, mask, k_scale, v_scale, path,
                  {batch, rows, heads * dim});
}

int64_t path_count() { return best_path() + 1; }

STABLE_TORCH_LIBRARY_FRAGMENT(fastdecode, m) {
  m.def("attend(Tensor q, Tensor k, Tensor v, Tensor mask, Tensor? k_scale, Tensor? v_scale, int path=-1) -> Tensor");
  m.def("attend_new(Tensor qkv, Tensor cos, Tensor sin, Tensor rows, Tensor mask, Tensor(a!) k, Tensor(b!) v, "
        "Tensor(c!)? k_scale=None, Tensor(d!)? v_scale=None, int path=-1) -> Tensor");
  m.def("attention_paths() -> int");
}
STABLE_TORCH_LIBRARY_IMPL(fastdecode, CPU, m) {
  m.impl("attend", TORCH_BOX(&attend));
  m.impl("attend_new", TORCH_BOX(&attend_new));
}
STABLE_TORCH_LIBRARY_IMPL(fastdecode, CompositeExplicitAutograd, m) {
  m.impl("attention_paths", TORCH_BOX(&path_count));
}

}  // namespace

#include "stamp.h"
#include "whole_layers.h"
