// A decoder layer whose products are operators (quantize/linear.py) as one: what models/layers.py would call one by one is
// called from here, which takes a fraction of the time that the calls from Python take.

namespace {

// Calls an operator of ours by name, with all its arguments in order.
template <class... Arguments>
Tensor called(const std::string& name, const Arguments&... arguments) {
  StableIValue stack[] = {torch::stable::detail::from(arguments)...};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name.c_str(), "", stack, TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// x after the layer. `qkv`, `o`, `gate_up`, `down`: packed weights, and the names of the operators that take them.
Tensor decoder_layer(const Tensor& x, const Tensor& rows, const Tensor& mask, const Tensor& cos, const Tensor& sin,
                     const Tensor& k, const Tensor& v, const std::optional<Tensor>& k_scale,
                     const std::optional<Tensor>& v_scale, const Tensor& first_norm, double first_eps,
                     const Tensor& second_norm, double second_eps, const Tensor& qkv, const Tensor& o,
                     const Tensor& gate_up, const Tensor& down, std::string by_qkv, std::string by_o,
                     std::string by_gate_up, std::string by_down) {
  using MaybeTensor = std::optional<Tensor>;
  const MaybeTensor none;
  const auto product = [&](const std::string& name, const Tensor& input, const Tensor& weights, const MaybeTensor& norm,
                           double eps, bool gate, const MaybeTensor& residual) {
    return called(name, input, weights, norm, eps, gate, residual, int64_t(-1));
  };
  const Tensor heads = product(by_qkv, x, qkv, first_norm, first_eps, false, none);
  const Tensor mixed = attend_new(heads, cos, sin, rows, mask, k, v, k_scale, v_scale, -1);
  const Tensor attended = product(by_o, mixed, o, none, 0, false, x);
  const Tensor gates = product(by_gate_up, attended, gate_up, second_norm, second_eps, false, none);
  return product(by_down, gates, down, none, 0, true, attended);
}

STABLE_TORCH_LIBRARY_FRAGMENT(fastdecode, m) {
  m.def("decoder_layer(Tensor x, Tensor rows, Tensor mask, Tensor cos, Tensor sin, Tensor(a!) k, Tensor(b!) v, "
        "Tensor(c!)? k_scale, Tensor(d!)? v_scale, Tensor first_norm, float first_eps, Tensor second_norm, "
        "float second_eps, Tensor qkv, Tensor o, Tensor gate_up, Tensor down, str by_qkv, str by_o, str by_gate_up, "
        "str by_down) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(fastdecode, CPU, m) { m.impl("decoder_layer", TORCH_BOX(&decoder_layer)); }

}  // namespace
