// The operators flashkda::*_native for CUDA tensors; flashkda/_library.py has their schemas. Built on
// LibTorch's stable ABI, without a header of CUDA: one binary loads in every torch since 2.9, those without
// CUDA included.

#include <tuple>

#include "../flashkda.h"
#include "call.h"

namespace flashkda {
namespace {

// Calls a function of the C ABI.
template <class Params>
void enqueue(int (*function)(Params const*, int, void*, char*, size_t), Params const& params, int device) {
  std::array<char, 512> message;
  if (function(&params, device, current_stream(device), message.data(), message.size()) != 0) {
    throw std::runtime_error(std::string("flashkda: ") + message.data());
  }
}

// Up to this many tokens per sequence are taken one by one: chunks would be mostly empty.
constexpr int64_t kMaxDecodeTokens = 16;

// The chunked form of a call, on whichever kernels suit the longest sequence, as far as the host knows it.
void run_chunk(Call const& call,
               Types const& types,
               View const& out,
               View const& final_state,
               bool gate_is_bounded,
               std::optional<int64_t> max_seqlen,
               bool clear_padding) {
  int const device = call.q.device;
  bool const one_dtype =
      !call.initial_state.given || !final_state.given || call.initial_state.dtype == final_state.dtype;
  if (one_dtype && max_seqlen.value_or(call.q.sizes[1]) <= kMaxDecodeTokens) {
    RecurrentParams params = {};
    fill(params, call, types, out, final_state);
    params.clear_padding = clear_padding && call.cu_seqlens.given;
    params.final_place = final_state.given ? FinalPlace::kDense : FinalPlace::kNone;
    enqueue(flashkda_recurrent, params, device);
    return;
  }
  ChunkFwdParams params = {};
  fill(params, call, types, out, final_state);
  params.clear_padding = clear_padding && call.cu_seqlens.given;
  params.gate_is_bounded = gate_is_bounded;
  int64_t const bytes = static_cast<int64_t>(flashkda_chunk_fwd_workspace_bytes(&params));
  Tensor const workspace = empty(1, &bytes, aoti_torch_dtype_uint8(), device);
  params.workspace = workspace.data_ptr();
  enqueue(flashkda_chunk_fwd, params, device);
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
                      bool gate_is_bounded,
                      std::optional<int64_t> max_seqlen) {
  Types const types;
  Call const call = {View(q),
                     View(k),
                     View(v),
                     View(g),
                     View(beta),
                     View(A_log),
                     View(dt_bias),
                     View(initial_state),
                     View(cu_seqlens),
                     {scale, lower_bound, gate_in_kernel, l2norm, beta_sigmoid, neg_eigval, state_v_first}};
  View const o(out), state(final_state);
  if (!serves(call, types) || !are_states(call.initial_state, call, types) || !is_out(o, call, types) ||
      !are_states(state, call, types)) {
    return false;
  }
  run_chunk(call, types, o, state, gate_is_bounded, max_seqlen, /*clear_padding=*/false);
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
                                        bool gate_is_bounded,
                                        std::optional<int64_t> max_seqlen) {
  Types const types;
  Call const call = {View(q),
                     View(k),
                     View(v),
                     View(g),
                     View(beta),
                     View(A_log),
                     View(dt_bias),
                     View(initial_state),
                     View(cu_seqlens),
                     {scale, lower_bound, gate_in_kernel, l2norm, beta_sigmoid, neg_eigval, state_v_first}};
  if (!serves(call, types) || !are_states(call.initial_state, call, types)) {
    throw std::runtime_error("flashkda: the kernels can't take these tensors as they are");
  }
  Tensor out = empty(4, call.v.sizes, types.bf16, call.q.device);
  int64_t const num_states = output_final_state ? call.num_seqs() : 0;
  std::array<int64_t, 4> const shape = {num_states, call.v.sizes[2], kHeadDim, kHeadDim};
  int32_t const dtype = call.initial_state.given ? call.initial_state.dtype : types.fp32;
  Tensor state = empty(4, shape.data(), dtype, call.q.device);
  run_chunk(call, types, View(out), output_final_state ? View(state) : View(), gate_is_bounded, max_seqlen,
            /*clear_padding=*/true);
  return {out, state};
}

// Token by token, with a pool of states if there are slots. False as above.
bool recurrent_native_out(Tensor const& q,
                          Tensor const& k,
                          Tensor const& v,
                          Tensor const& g,
                          Tensor const& beta,
                          MaybeTensor const& A_log,
                          MaybeTensor const& dt_bias,
                          MaybeTensor const& initial_state,
                          MaybeTensor const& cu_seqlens,
                          MaybeTensor const& slots,
                          MaybeTensor const& final_slots,
                          MaybeTensor const& num_accepted,
                          std::optional<int64_t> pad_slot_id,
                          bool in_place,
                          bool clear_padding,
                          Tensor const& out,
                          MaybeTensor const& final_state,
                          double scale,
                          std::optional<double> lower_bound,
                          bool gate_in_kernel,
                          bool l2norm,
                          bool beta_sigmoid,
                          bool neg_eigval,
                          bool state_v_first,
                          bool state_is_ready) {
  Types const types;
  Call const call = {View(q),
                     View(k),
                     View(v),
                     View(g),
                     View(beta),
                     View(A_log),
                     View(dt_bias),
                     View(initial_state),
                     View(cu_seqlens),
                     {scale, lower_bound, gate_in_kernel, l2norm, beta_sigmoid, neg_eigval, state_v_first}};
  View const o(out), state(final_state), from(slots), to(final_slots), accepted(num_accepted);
  View const& initial = in_place ? state : call.initial_state;
  Call actual = call;
  actual.initial_state = initial;
  bool const pooled = from.given;
  bool const states_fit =
      pooled ? initial.given && is_pool(initial, call, types) : are_states(initial, call, types);
  bool const final_fits = in_place || are_states(state, call, types);
  bool const one_dtype = !initial.given || !state.given || initial.dtype == state.dtype;
  if (!serves(call, types) || !is_out(o, call, types) || !states_fit || !final_fits || !one_dtype ||
      !are_indices(from, call, types, true) || !are_indices(to, call, types, false) ||
      !are_indices(accepted, call, types, false) || (to.given && !(in_place && from.dim == 1))) {
    return false;
  }
  RecurrentParams params = {};
  fill(params, actual, types, o, state);
  params.clear_padding = clear_padding && call.cu_seqlens.given;
  params.final_place = !state.given            ? FinalPlace::kNone
                       : !(pooled && in_place) ? FinalPlace::kDense
                       : from.dim == 2         ? FinalPlace::kPerToken
                       : to.given              ? FinalPlace::kGiven
                                               : FinalPlace::kSource;
  params.slots = types.indices(from);
  params.final_slots = types.indices(to);
  params.num_accepted = types.indices(accepted);
  params.has_pads = pad_slot_id.has_value();
  params.pad_slot_id = pad_slot_id.value_or(0);
  params.state_is_ready = state_is_ready;
  enqueue(flashkda_recurrent, params, call.q.device);
  return true;
}

STABLE_TORCH_LIBRARY_IMPL(flashkda, CUDA, m) {
  m.impl("chunk_native", TORCH_BOX(&chunk_native));
  m.impl("chunk_native_out", TORCH_BOX(&chunk_native_out));
  m.impl("recurrent_native_out", TORCH_BOX(&recurrent_native_out));
}

}  // namespace
}  // namespace flashkda
