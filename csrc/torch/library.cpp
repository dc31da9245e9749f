// The operators flashkda::chunk_native and chunk_native_out for CUDA tensors; flashkda/_library.py has their
// schemas. Built on LibTorch's stable ABI, without a header of CUDA: one binary loads in every torch
// since 2.9, those without CUDA included.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "flashkda.h"

// Defined in libtorch_cuda, which a CPU build of torch lacks: weak, so that this library loads there.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                                   void** ret_stream);

namespace flashkda {
namespace {

using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

void* current_stream(int device) {
  void* stream = nullptr;
  if (aoti_torch_get_current_cuda_stream == nullptr ||
      aoti_torch_get_current_cuda_stream(device, &stream) != AOTI_TORCH_SUCCESS) {
    throw std::runtime_error("flashkda: torch gives no CUDA stream (is it a build without CUDA?)");
  }
  return stream;
}

// What a call needs to know of a tensor, asked for once.
struct View {
  bool given = false;
  int64_t dim = 0;
  int64_t const *sizes = nullptr, *strides = nullptr;
  void* data = nullptr;
  int32_t dtype = 0, device = 0;

  View() = default;
  explicit View(Tensor const& x) : given(true) {
    AtenTensorHandle const handle = x.get();
    int64_t *my_sizes = nullptr, *my_strides = nullptr;
    bool const failed = aoti_torch_get_dim(handle, &dim) != AOTI_TORCH_SUCCESS ||
                        aoti_torch_get_sizes(handle, &my_sizes) != AOTI_TORCH_SUCCESS ||
                        aoti_torch_get_strides(handle, &my_strides) != AOTI_TORCH_SUCCESS ||
                        aoti_torch_get_data_ptr(handle, &data) != AOTI_TORCH_SUCCESS ||
                        aoti_torch_get_dtype(handle, &dtype) != AOTI_TORCH_SUCCESS ||
                        aoti_torch_get_device_index(handle, &device) != AOTI_TORCH_SUCCESS;
    if (failed) throw std::runtime_error("flashkda: torch could not describe a tensor of the call");
    sizes = my_sizes;
    strides = my_strides;
  }
  explicit View(MaybeTensor const& x) : View(x.has_value() ? View(*x) : View()) {}

  bool is(int32_t type) const { return dtype == type; }
  bool aligned() const { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }
  bool dense() const {
    int64_t expected = 1;
    for (int64_t i = dim - 1; i >= 0; expected *= sizes[i--]) {
      if (sizes[i] > 1 && strides[i] != expected) return false;
    }
    return true;
  }
  // [B, T, heads, ...] whose batch rows are adjacent: elements from a token to the next. The stride of a
  // dimension of size 1 means nothing.
  int64_t row_stride() const {
    if (sizes[1] > 1) return strides[1];
    return sizes[0] > 1 ? strides[0] : sizes[2] * (dim == 4 ? sizes[3] : 1);
  }
  bool rows_follow() const { return sizes[0] == 1 || sizes[1] == 1 || strides[0] == sizes[1] * strides[1]; }
  TokenTensor tokens() const { return {data, row_stride()}; }
};

struct Types {
  int32_t bf16 = aoti_torch_dtype_bfloat16(), fp32 = aoti_torch_dtype_float32(),
          int32 = aoti_torch_dtype_int32(), int64 = aoti_torch_dtype_int64();

  bool is_gate(View const& x) const { return x.is(bf16) || x.is(fp32); }
  Dtype of(View const& x) const { return x.is(fp32) ? Dtype::kFloat32 : Dtype::kBfloat16; }
  States states(View const& x) const { return {x.data, of(x)}; }
};

// The operator's arguments.
struct Call {
  View q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens;
  double scale;
  std::optional<double> lower_bound;
  bool gate_in_kernel, l2norm, beta_sigmoid, neg_eigval, state_v_first, gate_is_bounded;

  int64_t num_seqs() const { return cu_seqlens.given ? cu_seqlens.sizes[0] - 1 : q.sizes[0]; }
};

// Dense heads of 128 elements, rows that follow each other in steps of 16 bytes: what TMA reads.
bool is_rows(View const& x, View const& q, int64_t heads, int64_t item_bytes) {
  return x.dim == 4 && x.sizes[0] == q.sizes[0] && x.sizes[1] == q.sizes[1] && x.sizes[2] == heads &&
         x.sizes[3] == kHeadDim && x.strides[3] == 1 && (heads == 1 || x.strides[2] == kHeadDim) &&
         x.rows_follow() && x.row_stride() >= heads * kHeadDim && x.row_stride() * item_bytes % 16 == 0 &&
         x.aligned() && x.device == q.device;
}

bool is_parameter(View const& x, Call const& call, Types const& types, int64_t per_head) {
  if (!x.given) return true;
  int64_t const heads = call.v.sizes[2];
  bool const flat = x.dim == 1 && x.sizes[0] == heads * per_head;
  bool const by_head = per_head > 1 && x.dim == 2 && x.sizes[0] == heads && x.sizes[1] == per_head;
  return (flat || by_head) && x.is(types.fp32) && x.dense() && x.device == call.q.device;
}

bool are_states(View const& x, Call const& call, Types const& types) {
  if (!x.given) return true;
  return x.dim == 4 && x.sizes[0] == call.num_seqs() && x.sizes[1] == call.v.sizes[2] &&
         x.sizes[2] == kHeadDim && x.sizes[3] == kHeadDim && types.is_gate(x) && x.dense() && x.aligned() &&
         x.device == call.q.device;
}

// Whether the kernels can take the inputs as they are. flashkda/_native.py makes others fit, or says why not.
bool serves(Call const& c, Types const& types) {
  if (c.q.dim != 4 || c.v.dim != 4 || c.q.sizes[0] * c.q.sizes[1] * c.q.sizes[2] == 0) return false;
  int64_t const heads = c.q.sizes[2], value_heads = c.v.sizes[2];
  if (value_heads < 1 || value_heads > 65535 || value_heads % heads != 0) return false;
  if (c.cu_seqlens.given) {
    View const& x = c.cu_seqlens;
    bool const integral = x.is(types.int32) || x.is(types.int64);
    if (!integral || x.dim != 1 || x.sizes[0] < 2 || !x.dense() || x.device != c.q.device) return false;
    if (c.q.sizes[0] != 1) return false;
  }
  bool const beta = c.beta.dim == 3 && c.beta.sizes[0] == c.q.sizes[0] && c.beta.sizes[1] == c.q.sizes[1] &&
                    c.beta.sizes[2] == value_heads && c.beta.rows_follow() && types.is_gate(c.beta) &&
                    c.beta.device == c.q.device;
  return beta && c.q.is(types.bf16) && c.k.is(types.bf16) && c.v.is(types.bf16) && types.is_gate(c.g) &&
         is_rows(c.q, c.q, heads, 2) && is_rows(c.k, c.q, heads, 2) && is_rows(c.v, c.q, value_heads, 2) &&
         is_rows(c.g, c.q, value_heads, c.g.is(types.fp32) ? 4 : 2) && is_parameter(c.A_log, c, types, 1) &&
         is_parameter(c.dt_bias, c, types, kHeadDim) && are_states(c.initial_state, c, types);
}

GateKind gate_of(Call const& call) {
  if (!call.gate_in_kernel) return GateKind::kLogDecay;
  return call.lower_bound.has_value() ? GateKind::kBounded : GateKind::kSoftplus;
}

BetaKind beta_of(Call const& call) {
  if (!call.beta_sigmoid) return BetaKind::kStepSize;
  return call.neg_eigval ? BetaKind::kTwiceSigmoid : BetaKind::kSigmoid;
}

// Uninitialised memory of torch's allocator, for work on the current stream. Not new_empty(), which looks its
// operator up by name at every call.
Tensor empty(int64_t dim, int64_t const* sizes, int32_t dtype, int32_t device) {
  std::array<int64_t, 4> strides = {};
  int64_t stride = 1;
  for (int64_t i = dim - 1; i >= 0; stride *= sizes[i--]) strides[i] = stride;
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(dim, sizes, strides.data(), dtype, aoti_torch_device_type_cuda(), device,
                               &handle) != AOTI_TORCH_SUCCESS) {
    throw std::runtime_error("flashkda: torch could not allocate " + std::to_string(stride) + " elements");
  }
  return Tensor(handle);
}

void run(Call const& call, Types const& types, View const& out, View const& final_state, bool clear_padding) {
  ChunkFwdParams params = {};
  params.num_seqs = static_cast<int32_t>(call.num_seqs());
  params.num_heads = static_cast<int32_t>(call.q.sizes[2]);
  params.value_heads = static_cast<int32_t>(call.v.sizes[2]);
  params.num_tokens = call.q.sizes[0] * call.q.sizes[1];
  params.seq_tokens = call.q.sizes[1];
  params.cu_seqlens = call.cu_seqlens.data;
  params.cu_seqlens_is_64 = call.cu_seqlens.given && call.cu_seqlens.is(types.int64);

  params.q = call.q.tokens();
  params.k = call.k.tokens();
  params.v = call.v.tokens();
  params.g = call.g.tokens();
  params.beta = call.beta.tokens();
  params.out = out.tokens();
  params.beta_head_stride = call.beta.strides[2];
  params.g_dtype = types.of(call.g);
  params.beta_dtype = types.of(call.beta);
  params.A_log = static_cast<float const*>(call.A_log.data);
  params.dt_bias = static_cast<float const*>(call.dt_bias.data);

  params.initial_state = types.states(call.initial_state);
  params.final_state = types.states(final_state);
  params.state_v_first = call.state_v_first;

  params.gate = gate_of(call);
  params.beta_kind = beta_of(call);
  params.l2norm = call.l2norm;
  params.gate_is_bounded = call.gate_is_bounded;
  params.scale = static_cast<float>(call.scale);
  params.lower_bound = static_cast<float>(call.lower_bound.value_or(0.0));
  params.clear_padding = clear_padding && call.cu_seqlens.given;

  int64_t const bytes = static_cast<int64_t>(flashkda_chunk_fwd_workspace_bytes(&params));
  Tensor const workspace = empty(1, &bytes, aoti_torch_dtype_uint8(), call.q.device);
  params.workspace = workspace.data_ptr();
  std::array<char, 512> message;
  if (flashkda_chunk_fwd(&params, call.q.device, current_stream(call.q.device), message.data(),
                         message.size()) != 0) {
    throw std::runtime_error(std::string("flashkda: ") + message.data());
  }
}

// Into tensors of the caller. False, and nothing is done, for tensors that the kernels can't take.
bool chunk_native_out(Tensor const& q,
                      Tensor const& k,
                      Tensor const& v,
                      Tensor const& g,
                      Tensor const& beta,
                      MaybeTensor const& A_log,
                      MaybeTensor const& dt_bias,
                      MaybeTensor const& initial_state,
                      MaybeTensor const& cu_seqlens,
                      Tensor const& out,
                      MaybeTensor const& final_state,
                      double scale,
                      std::optional<double> lower_bound,
                      bool gate_in_kernel,
                      bool l2norm,
                      bool beta_sigmoid,
                      bool neg_eigval,
                      bool state_v_first,
                      bool gate_is_bounded) {
  Types const types;
  Call const call = {View(q),          View(k),      View(v),       View(g),
                     View(beta),       View(A_log),  View(dt_bias), View(initial_state),
                     View(cu_seqlens), scale,        lower_bound,   gate_in_kernel,
                     l2norm,           beta_sigmoid, neg_eigval,    state_v_first,
                     gate_is_bounded};
  View const o(out), state(final_state);
  if (!serves(call, types) || !o.is(types.bf16) || !is_rows(o, call.q, call.v.sizes[2], 2) ||
      !are_states(state, call, types)) {
    return false;
  }
  run(call, types, o, state, /*clear_padding=*/false);
  return true;
}

// With results of its own. Throws for tensors that the kernels can't take.
std::tuple<Tensor, Tensor> chunk_native(Tensor const& q,
                                        Tensor const& k,
                                        Tensor const& v,
                                        Tensor const& g,
                                        Tensor const& beta,
                                        MaybeTensor const& A_log,
                                        MaybeTensor const& dt_bias,
                                        MaybeTensor const& initial_state,
                                        MaybeTensor const& cu_seqlens,
                                        bool output_final_state,
                                        double scale,
                                        std::optional<double> lower_bound,
                                        bool gate_in_kernel,
                                        bool l2norm,
                                        bool beta_sigmoid,
                                        bool neg_eigval,
                                        bool state_v_first,
                                        bool gate_is_bounded) {
  Types const types;
  Call const call = {View(q),          View(k),      View(v),       View(g),
                     View(beta),       View(A_log),  View(dt_bias), View(initial_state),
                     View(cu_seqlens), scale,        lower_bound,   gate_in_kernel,
                     l2norm,           beta_sigmoid, neg_eigval,    state_v_first,
                     gate_is_bounded};
  if (!serves(call, types))
    throw std::runtime_error("flashkda: the kernels can't take these tensors as they are");
  Tensor out = empty(4, call.v.sizes, types.bf16, call.q.device);
  int64_t const num_states = output_final_state ? call.num_seqs() : 0;
  std::array<int64_t, 4> const shape = {num_states, call.v.sizes[2], kHeadDim, kHeadDim};
  int32_t const dtype = call.initial_state.given ? call.initial_state.dtype : types.fp32;
  Tensor state = empty(4, shape.data(), dtype, call.q.device);
  run(call, types, View(out), output_final_state ? View(state) : View(), /*clear_padding=*/true);
  return {out, state};
}

}  // namespace
}  // namespace flashkda

STABLE_TORCH_LIBRARY_IMPL(flashkda, CUDA, m) {
  m.impl("chunk_native", TORCH_BOX(&flashkda::chunk_native));
  m.impl("chunk_native_out", TORCH_BOX(&flashkda::chunk_native_out));
}
