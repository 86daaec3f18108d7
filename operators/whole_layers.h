// Decoder layers whose products are operators (quantize/linear.py) as one call: what models/layers.py would call one by one
// is called from here, which takes a fraction of the time that the calls from Python take.

namespace {

// Calls an operator of ours by name, with all its arguments in order.
template <class... Arguments>
Tensor called(const std::string& name, const Arguments&... arguments) {
  StableIValue stack[] = {torch::stable::detail::from(arguments)...};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name.c_str(), "", stack, TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// x after the layers. `cache`: of each layer k and v, and k_scale and v_scale where it is quantized. `weights`: of each
// the norms before attention and before its SwiGLU, then the packed weights of qkv, o, gate_up and down, in order; `names`:
// the operators that take those four.
Tensor decoder_layers(Tensor x, const Tensor& rows, const Tensor& mask, const Tensor& cos, const Tensor& sin,
                      std::vector<Tensor> cache, std::vector<Tensor> weights, std::vector<std::string> names,
                      double eps) {
  using MaybeTensor = std::optional<Tensor>;
  const MaybeTensor none;
  const size_t layers = weights.size() / 6, parts = layers ? cache.size() / layers : 0;
  STD_TORCH_CHECK(weights.size() == 6 * layers && names.size() == 4 * layers && cache.size() == parts * layers &&
                      (parts == 2 || parts == 4 || !layers),
                  "a layer has 6 weights, 4 operators, and 2 or 4 parts of a cache");
  for (size_t i = 0; i < layers; i++) {
    const Tensor *const w = &weights[6 * i], *const c = &cache[parts * i];
    const std::string* const by = &names[4 * i];
    const auto product = [&](int which, const Tensor& input, const MaybeTensor& norm, bool gate,
                             const MaybeTensor& residual) {
      return called(by[which], input, w[2 + which], norm, norm ? eps : 0., gate, residual, int64_t(-1));
    };
    const MaybeTensor k_scale = parts == 4 ? MaybeTensor(c[2]) : none, v_scale = parts == 4 ? MaybeTensor(c[3]) : none;
    const Tensor heads = product(0, x, w[0], false, none);
    const Tensor mixed = attend_new(heads, cos, sin, rows, mask, c[0], c[1], k_scale, v_scale, -1);
    const Tensor attended = product(1, mixed, none, false, x);
    const Tensor gates = product(2, attended, w[1], false, none);
    x = product(3, gates, none, true, attended);
  }
  return x;
}

STABLE_TORCH_LIBRARY_FRAGMENT(fastdecode, m) {
  m.def("decoder_layers(Tensor x, Tensor rows, Tensor mask, Tensor cos, Tensor sin, Tensor(a!)[] cache, "
        "Tensor[] weights, str[] names, float eps) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(fastdecode, CPU, m) { m.impl("decoder_layers", TORCH_BOX(&decoder_layers)); }

}  // namespace
