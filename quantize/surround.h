// What stands around a product in a decoder layer, so that it needs no pass of its own: before it an RMS norm, or SwiGLU's
// gate; after it the residual (store_y). In fp32, rounded once to the input's type.
//
// A row's sums have one order, and every instruction set gives the same bits.

#include "../operators/each_cpu.h"

namespace {

constexpr int64_t kRowsOfTask = 8;  // rows that are worth waking a thread
constexpr int kSums = 16;           // in which a row's squares are added up

// y = x / sqrt(mean of squares + eps) * weight.
EACH_CPU void normed(const float* x, const float* weight, float eps, int64_t n, float* y) {
  float sums[kSums] = {}, total = 0;
  int64_t i = 0;
  for (; i + kSums <= n; i += kSums)
    for (int j = 0; j < kSums; j++) sums[j] += x[i + j] * x[i + j];
  for (; i < n; i++) sums[i % kSums] += x[i] * x[i];
  for (int j = 0; j < kSums; j++) total += sums[j];
  const float inverse = 1 / std::sqrt(total / n + eps);
  for (i = 0; i < n; i++) y[i] = x[i] * inverse * weight[i];
}

// y = gate / (1 + exp(-gate)) * up. exp(x) = 2^n * exp(r) with r = x - n * log(2), n whole and |r| <= log(2) / 2; log(2) in
// two parts, of which the first times n is exact; exp(r) by its series, good to the last bit or two.
EACH_CPU void gated(const float* gate, const float* up, int64_t n, float* y) {
  constexpr float kWhole = 12582912;  // 1.5 * 2^23: adding it leaves no room for a fraction
  for (int64_t i = 0; i < n; i++) {
    const float x = std::min(std::max(-gate[i], -87.f), 88.f);
    const float whole = x * 1.44269504f + kWhole - kWhole;
    const float r = x - whole * 0.693145752f - whole * 1.42860677e-6f;
    float series = 1.f / 5040;
    series = series * r + 1.f / 720;
    series = series * r + 1.f / 120;
    series = series * r + 1.f / 24;
    series = series * r + 1.f / 6;
    series = series * r + 0.5f;
    series = series * r + 1;
    series = series * r + 1;
    const int32_t power = (int32_t(whole) + 127) << 23;
    float scale;
    std::memcpy(&scale, &power, 4);
    y[i] = gate[i] / (1 + series * scale) * up[i];
  }
}

// The input of the product: x [..., in] itself; normed by `norm [in]`; or gated, of x [..., 2 * in], its gate first.
Tensor surrounded_input(const Tensor& x_given, const std::optional<Tensor>& norm, double eps, bool gate) {
  const Tensor x = torch::stable::contiguous(x_given);
  if (!norm && !gate) return x;
  const bool bf16 = x.scalar_type() == ScalarType::BFloat16;
  const int64_t width = x.dim() ? x.size(x.dim() - 1) : 0, rows = width ? x.numel() / width : 0;
  const int64_t in = gate ? width / 2 : width;
  STD_TORCH_CHECK(bf16 || x.scalar_type() == ScalarType::Float, "x is bf16 or fp32");
  STD_TORCH_CHECK(!(norm && gate) && (!gate || width % 2 == 0), "x is normed or gated, and gates and ups are as many");
  STD_TORCH_CHECK(!norm || (norm->numel() == in && norm->is_contiguous() && norm->scalar_type() == x.scalar_type()),
                  "the norm's weight is of x's width and type");
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = in;
  Tensor y = torch::stable::new_empty(x, shape);
  std::vector<float> weight(norm ? in : 0);
  if (norm && bf16) widen((const uint16_t*)norm->const_data_ptr(), in, weight.data());
  if (norm && !bf16) std::memcpy(weight.data(), norm->const_data_ptr(), in * 4);
  const char* const from = (const char*)x.const_data_ptr();
  char* const to = (char*)y.mutable_data_ptr();
  torch::stable::parallel_for(0, rows, kRowsOfTask, [&](int64_t first, int64_t end) {
    std::vector<float> floats(bf16 ? width + in : 0);
    for (int64_t row = first; row < end; row++) {
      const float* values = (const float*)from + row * width;
      float* result = (float*)to + row * in;
      if (bf16) {
        widen((const uint16_t*)from + row * width, width, floats.data());
        values = floats.data(), result = floats.data() + width;
      }
      if (gate) gated(values, values + in, in, result);
      else normed(values, weight.data(), eps, in, result);
      if (bf16) narrow(result, in, (uint16_t*)to + row * in);
    }
  });
  return y;
}

// The residual in memory as y is, if there is one.
std::optional<Tensor> laid_out(const std::optional<Tensor>& residual, const Tensor& y) {
  if (!residual) return residual;
  STD_TORCH_CHECK(residual->numel() == y.numel() && residual->scalar_type() == y.scalar_type(),
                  "the residual is of the result's shape and type");
  return torch::stable::contiguous(*residual);
}

}  // namespace
