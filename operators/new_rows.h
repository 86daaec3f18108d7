// New queries, keys and values of a layer: turned by their positions (models/rope.py) and stored in its cache
// (models/cache.py), each value the one that those would store, to the last bit.

#include "each_cpu.h"

namespace {

// A head of `dim` numbers in place, its halves being the two coordinates of each pair.
EACH_CPU void turn(float* x, const float* cos, const float* sin, int64_t dim) {
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; i++) {
    const float first = x[i], second = x[half + i];
    x[i] = first * cos[i] + -second * sin[i];
    x[half + i] = second * cos[half + i] + first * sin[half + i];
  }
}

// 8-bit codes of a head, and their scale: 127 steps on either side of zero.
EACH_CPU float to_codes(const float* x, int64_t dim, int8_t* codes) {
  float largest = 0;
  for (int64_t i = 0; i < dim; i++) largest = std::abs(x[i]) > largest ? std::abs(x[i]) : largest;
  for (int64_t i = 0; i < dim; i++) largest = x[i] == x[i] ? largest : x[i];  // NaN goes over to the scale
  const float scale = largest / 127.f, divisor = scale == 0 ? 1 : scale;
  for (int64_t i = 0; i < dim; i++) {
    const float step = std::nearbyint(x[i] / divisor);
    codes[i] = int8_t(step > 127 ? 127 : step < -127 ? -127 : step == step ? step : 0);
  }
  return scale;
}

// Stores one head's key or value, `dim` numbers, at `row`.
void store(const Cache& cache, int64_t batch, int64_t head, int64_t row, const float* x, int64_t dim) {
  char* const to = const_cast<char*>(cache.at(batch, head, row));
  if (cache.type == ScalarType::Float) std::memcpy(to, x, dim * 4);
  else if (cache.type == ScalarType::BFloat16) narrow(x, dim, (uint16_t*)to);
  else const_cast<float*>(cache.scale)[batch * cache.scale_batch + head * cache.scale_head + row] =
      to_codes(x, dim, (int8_t*)to);
}

// `qkv [batch, rows, (heads + 2 * kv_heads) * dim]` -> queries `[batch, rows, heads, dim]`, in its type; keys and values
// go to `cache_rows [batch, rows]` of the caches. `cos, sin [batch or 1, 1, rows, dim]` in fp32.
Tensor turned_and_stored(const Tensor& qkv, const Tensor& cos, const Tensor& sin, const Tensor& cache_rows, const Cache& k,
                         const Cache& v, int64_t kv_heads, int64_t cache_size, int64_t dim) {
  const bool bf16 = qkv.scalar_type() == ScalarType::BFloat16;
  const int64_t batch = qkv.size(0), rows = qkv.size(1), heads = qkv.size(2) / dim - 2 * kv_heads;
  Tensor q = torch::stable::new_empty(qkv, {batch, rows, heads, dim});
  char* const to = static_cast<char*>(q.mutable_data_ptr());
  const char* const from = static_cast<const char*>(qkv.const_data_ptr());
  const int64_t* const places = static_cast<const int64_t*>(cache_rows.const_data_ptr());
  for (int64_t at = 0; at < batch * rows; at++)  // all before any is written
    STD_TORCH_CHECK(places[at] >= 0 && places[at] < cache_size, "no such row of the cache: ", places[at]);
  std::vector<float> x((heads + 2 * kv_heads) * dim);
  for (int64_t b = 0; b < batch; b++)
    for (int64_t n = 0; n < rows; n++) {
      const int64_t at = b * rows + n, place = places[at];
      if (bf16) widen((const uint16_t*)from + at * x.size(), x.size(), x.data());
      else std::memcpy(x.data(), from + at * x.size() * 4, x.size() * 4);
      const int64_t angles = (cos.size(0) == 1 ? n : at) * dim;
      const float* const c = static_cast<const float*>(cos.const_data_ptr()) + angles;
      const float* const s = static_cast<const float*>(sin.const_data_ptr()) + angles;
      for (int64_t h = 0; h < heads + kv_heads; h++) turn(x.data() + h * dim, c, s, dim);
      if (bf16) narrow(x.data(), heads * dim, (uint16_t*)to + at * heads * dim);
      else std::memcpy(to + at * heads * dim * 4, x.data(), heads * dim * 4);
      float* const keys = x.data() + heads * dim;
      if (bf16) {  // rounded once to the activations' type, whatever the cache keeps
        std::vector<uint16_t> rounded(kv_heads * dim);
        narrow(keys, kv_heads * dim, rounded.data());
        widen(rounded.data(), kv_heads * dim, keys);
      }
      for (int64_t h = 0; h < kv_heads; h++) {
        store(k, b, h, place, keys + h * dim, dim);
        store(v, b, h, place, keys + (kv_heads + h) * dim, dim);
      }
    }
  return q;
}

}  // namespace
