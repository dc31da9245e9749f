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

// What else a chunked call may be given.
struct ChunkOptions {
  bool gate_is_bounded;
  std::optional<int64_t> max_seqlen;
  bool clear_padding;
  Checkpoints checkpoints = {};
  void* workspace = nullptr;  // null: torch's allocator gives it
};

// The chunked form of a call, on whichever kernels suit the longest sequence, as far as the host knows it.
void run_chunk(Call const& call,
               Types const& types,
               View const& out,
               View const& final_state,
               Slots const& slots,
               ChunkOptions const& options) {
  int const device = call.q.device;
  bool const is_short = options.max_seqlen.value_or(call.q.sizes[1]) <= kMaxDecodeTokens;
  if (is_short && options.checkpoints.states.data == nullptr && is_one_dtype(call, final_state)) {
    RecurrentParams params = {};
    fill(params, call, types, out, final_state, slots, options.clear_padding);
    enqueue(flashkda_recurrent, params, device);
    return;
  }
  ChunkFwdParams params = {};
  fill(params, call, types, out, final_state, slots, options.clear_padding);
  params.gate_is_bounded = options.gate_is_bounded;
  params.checkpoints = options.checkpoints;
  int32_t const uint8 = aoti_torch_dtype_uint8();
  std::optional<Tensor> workspace, half_chunks;
  params.workspace = options.workspace;
  if (params.workspace == nullptr) {
    int64_t const bytes = static_cast<int64_t>(flashkda_chunk_fwd_workspace_bytes(&params));
    params.workspace = workspace.emplace(empty(1, &bytes, uint8, device)).data_ptr();
  }
  if (int64_t const bytes = static_cast<int64_t>(flashkda_chunk_fwd_half_chunk_bytes(&params)); bytes > 0) {
    params.half_chunks = half_chunks.emplace(empty(1, &bytes, uint8, device)).data_ptr();
  }
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
  Options const options = {scale,        lower_bound, gate_in_kernel, l2norm,
                           beta_sigmoid, neg_eigval,  state_v_first};
  Call const call = {q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, options};
  View const o(out), state(final_state);
  if (!serves(call, types) || !are_states(call.initial_state, call, types) || !is_out(o, call, types) ||
      !are_states(state, call, types)) {
    return false;
  }
  run_chunk(call, types, o, state, {}, {gate_is_bounded, max_seqlen, /*clear_padding=*/false});
  return true;
}

// New final states of a call, if it is asked for them.
MaybeTensor new_final_state(Call const& call, Types const& types, int64_t flags) {
  if ((flags & kOutputFinalState) == 0) return std::nullopt;
  std::array<int64_t, 4> const shape = {call.num_seqs(), call.v.sizes[2], kHeadDim, kHeadDim};
  int32_t const dtype = call.initial_state.given ? call.initial_state.dtype : types.fp32;
  return empty(4, shape.data(), dtype, call.q.device);
}

// With results of its own: outputs, and final states if the flags, of CallFlag, ask for them. Neither, and
// nothing is done, for tensors that the kernels can't take.
std::tuple<MaybeTensor, MaybeTensor> chunk_native(Tensor const& q,
                                                  Tensor const& k,
                                                  Tensor const& v,
                                                  Tensor const& g,
                                                  Tensor const& beta,
                                                  MaybeTensor const& A_log,
                                                  MaybeTensor const& dt_bias,
                                                  MaybeTensor const& initial_state,
                                                  MaybeTensor const& cu_seqlens,
                                                  int64_t flags,
                                                  double scale,
                                                  double lower_bound) {
  Types const types;
  Options const options = options_of(flags, scale, lower_bound);
  Call const call = {q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, options};
  if (!serves(call, types) || !are_states(call.initial_state, call, types)) {
    return {std::nullopt, std::nullopt};
  }
  Tensor out = empty(4, call.v.sizes, types.bf16, call.q.device);
  MaybeTensor state = new_final_state(call, types, flags);
  bool const gate_is_bounded = flags & kGateIsBounded;
  run_chunk(call, types, View(out), View(state), {}, {gate_is_bounded, std::nullopt, /*clear_padding=*/true});
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
  Options const options = {scale,        lower_bound, gate_in_kernel, l2norm,
                           beta_sigmoid, neg_eigval,  state_v_first};
  Call call = {q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, options};
  View const o(out), state(final_state);
  Slots const table = {slots, final_slots, num_accepted, pad_slot_id, in_place};
  if (in_place) call.initial_state = state;
  if (!serves(call, types) || !serves_states(call, table, state, types) || !is_out(o, call, types) ||
      !is_one_dtype(call, state)) {
    return false;
  }
  RecurrentParams params = {};
  fill(params, call, types, o, state, table, clear_padding);
  params.state_is_ready = state_is_ready;
  enqueue(flashkda_recurrent, params, call.q.device);
  return true;
}

// The same with results of its own, as chunk_native; in place, without a second one.
std::tuple<MaybeTensor, MaybeTensor> recurrent_native(Tensor const& q,
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
                                                      int64_t flags,
                                                      double scale,
                                                      double lower_bound,
                                                      int64_t pad_slot_id) {
  Types const types;
  Options const options = options_of(flags, scale, lower_bound);
  Call const call = {q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, options};
  bool const in_place = flags & kInPlace;
  auto const pads = flags & kHasPads ? std::optional(pad_slot_id) : std::nullopt;
  Slots const table = {slots, final_slots, num_accepted, pads, in_place};
  View const kept = in_place ? call.initial_state : View();
  if (!serves(call, types) || !serves_states(call, table, kept, types)) {
    return {std::nullopt, std::nullopt};
  }
  Tensor out = empty(4, call.v.sizes, types.bf16, call.q.device);
  MaybeTensor state;
  if (!in_place) state = new_final_state(call, types, flags);
  RecurrentParams params = {};
  fill(params, call, types, View(out), in_place ? kept : View(state), table, /*clear_padding=*/true);
  params.state_is_ready = flags & kStateIsReady;
  enqueue(flashkda_recurrent, params, call.q.device);
  return {out, state};
}

// In chunks, with a pool of states if there are slots, with checkpoints, in memory of the caller. False as
// above.
bool chunk_pool_native_out(Tensor const& q,
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
                           std::optional<int64_t> pad_slot_id,
                           bool in_place,
                           bool clear_padding,
                           Tensor const& out,
                           MaybeTensor const& final_state,
                           MaybeTensor const& checkpoint_states,
                           MaybeTensor const& checkpoint_offsets,
                           int64_t checkpoint_every,
                           MaybeTensor const& checkpoint_slots,
                           MaybeTensor const& workspace,
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
  Options const options = {scale,        lower_bound, gate_in_kernel, l2norm,
                           beta_sigmoid, neg_eigval,  state_v_first};
  Call call = {q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, options};
  View const o(out), state(final_state);
  Slots const table = {slots, final_slots, View(), pad_slot_id, in_place};
  if (in_place) call.initial_state = state;
  View const kept(checkpoint_states), offsets(checkpoint_offsets), kept_slots(checkpoint_slots),
      memory(workspace);
  bool const kept_fits =
      !kept.given || (is_pool(kept, call, types) && are_indices(offsets, call, types, true) &&
                      are_indices(kept_slots, call, types, true) && (offsets.given || kept_slots.given));
  if (!serves(call, types) || !serves_states(call, table, state, types) || !is_out(o, call, types) ||
      table.initial.dim == 2 || !kept_fits || (memory.given && memory.device != call.q.device)) {
    return false;
  }
  ChunkOptions chunk_options = {gate_is_bounded, max_seqlen, clear_padding};
  chunk_options.workspace = memory.data;
  if (kept.given) {
    chunk_options.checkpoints = {types.states(kept), types.indices(offsets),
                                 static_cast<int32_t>(checkpoint_every), types.indices(kept_slots)};
  }
  run_chunk(call, types, o, state, table, chunk_options);
  return true;
}

STABLE_TORCH_LIBRARY_IMPL(flashkda, CUDA, m) {
  m.impl("chunk_native", TORCH_BOX(&chunk_native));
  m.impl("chunk_native_out", TORCH_BOX(&chunk_native_out));
  m.impl("chunk_pool_native_out", TORCH_BOX(&chunk_pool_native_out));
  m.impl("recurrent_native", TORCH_BOX(&recurrent_native));
  m.impl("recurrent_native_out", TORCH_BOX(&recurrent_native_out));
}

}  // namespace
}  // namespace flashkda
