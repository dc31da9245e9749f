// The arguments that all operators share: whether the kernels can take them, and their form for the kernels.
#pragma once

#include "view.h"

namespace flashkda {

struct Options {
  double scale;
  std::optional<double> lower_bound;
  bool gate_in_kernel, l2norm, beta_sigmoid, neg_eigval, state_v_first;
};

// What the operators with results of their own are asked for, in one argument, since each costs the host
// time. flashkda/_native.py packs them.
enum CallFlag : int64_t {
  kGateInKernel = 1 << 0,
  kL2norm = 1 << 1,
  kBetaSigmoid = 1 << 2,
  kNegEigval = 1 << 3,
  kStateVFirst = 1 << 4,
  kHasLowerBound = 1 << 5,
  kOutputFinalState = 1 << 6,
  kGateIsBounded = 1 << 7,  // of chunk_native; what follows is recurrent_native's
  kHasPads = 1 << 8,
  kInPlace = 1 << 9,
  kStateIsReady = 1 << 10,
};

inline Options options_of(int64_t flags, double scale, double lower_bound) {
  return {scale,
          flags & kHasLowerBound ? std::optional(lower_bound) : std::nullopt,
          (flags & kGateInKernel) != 0,
          (flags & kL2norm) != 0,
          (flags & kBetaSigmoid) != 0,
          (flags & kNegEigval) != 0,
          (flags & kStateVFirst) != 0};
}

struct Call {
  View q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens;
  Options options;

  int64_t num_seqs() const { return cu_seqlens.given ? cu_seqlens.sizes[0] - 1 : q.sizes[0]; }
};

// Dense heads of 128 elements, rows that follow each other in steps of 16 bytes: what TMA reads.
inline bool is_rows(View const& x, View const& q, int64_t heads, int64_t item_bytes) {
  return x.dim == 4 && x.sizes[0] == q.sizes[0] && x.sizes[1] == q.sizes[1] && x.sizes[2] == heads &&
         x.sizes[3] == kHeadDim && x.strides[3] == 1 && (heads == 1 || x.strides[2] == kHeadDim) &&
         x.rows_follow() && x.row_stride() >= heads * kHeadDim && x.row_stride() * item_bytes % 16 == 0 &&
         x.aligned() && x.device == q.device;
}

inline bool is_parameter(View const& x, Call const& call, Types const& types, int64_t per_head) {
  if (!x.given) return true;
  int64_t const heads = call.v.sizes[2];
  bool const flat = x.dim == 1 && x.sizes[0] == heads * per_head;
  bool const by_head = per_head > 1 && x.dim == 2 && x.sizes[0] == heads && x.sizes[1] == per_head;
  return (flat || by_head) && x.is(types.fp32) && x.dense() && x.device == call.q.device;
}

// States [slots, HV, 128, 128] in steps of 16 bytes from slot to slot.
inline bool is_pool(View const& x, Call const& call, Types const& types) {
  return x.dim == 4 && x.sizes[1] == call.v.sizes[2] && x.sizes[2] == kHeadDim && x.sizes[3] == kHeadDim &&
         types.is_gate(x) && x.dense(1) && x.slot_stride() * (x.is(types.fp32) ? 4 : 2) % 16 == 0 &&
         x.aligned() && x.device == call.q.device;
}

// A state for each sequence.
inline bool are_states(View const& x, Call const& call, Types const& types) {
  return !x.given || (is_pool(x, call, types) && x.sizes[0] == call.num_seqs() && x.dense());
}

// A slot table, and how it is used.
struct Slots {
  View initial, final, num_accepted;
  std::optional<int64_t> pad_slot_id;
  bool in_place = false;
};

// Integers [N], or [N, columns] if that is allowed.
inline bool are_indices(View const& x, Call const& call, Types const& types, bool may_have_columns) {
  return !x.given || ((x.dim == 1 || (x.dim == 2 && may_have_columns && x.sizes[1] >= 1)) &&
                      x.sizes[0] == call.num_seqs() && types.is_index(x) && x.device == call.q.device);
}

// Whether the kernels can take tokens, parameters and sequences as they are. flashkda/_native.py makes others
// fit, or says why not.
inline bool serves(Call const& c, Types const& types) {
  if (c.q.dim != 4 || c.v.dim != 4 || c.q.sizes[0] * c.q.sizes[1] * c.q.sizes[2] == 0) return false;
  int64_t const heads = c.q.sizes[2], value_heads = c.v.sizes[2];
  if (value_heads < 1 || value_heads > 65535 || value_heads % heads != 0) return false;
  if (c.cu_seqlens.given) {
    View const& x = c.cu_seqlens;
    if (!types.is_index(x) || x.dim != 1 || x.sizes[0] < 2 || !x.dense() || x.device != c.q.device)
      return false;
    if (c.q.sizes[0] != 1) return false;
  }
  bool const beta = c.beta.dim == 3 && c.beta.sizes[0] == c.q.sizes[0] && c.beta.sizes[1] == c.q.sizes[1] &&
                    c.beta.sizes[2] == value_heads && c.beta.rows_follow() && types.is_gate(c.beta) &&
                    c.beta.device == c.q.device;
  return beta && c.q.is(types.bf16) && c.k.is(types.bf16) && c.v.is(types.bf16) && types.is_gate(c.g) &&
         is_rows(c.q, c.q, heads, 2) && is_rows(c.k, c.q, heads, 2) && is_rows(c.v, c.q, value_heads, 2) &&
         is_rows(c.g, c.q, value_heads, c.g.is(types.fp32) ? 4 : 2) && is_parameter(c.A_log, c, types, 1) &&
         is_parameter(c.dt_bias, c, types, kHeadDim);
}

// Whether the kernels can take the states as they are; in place, the pool is `final_state`.
inline bool serves_states(Call const& c, Slots const& slots, View const& final_state, Types const& types) {
  bool const pooled = slots.initial.given;
  bool const initial = pooled ? c.initial_state.given && is_pool(c.initial_state, c, types)
                              : are_states(c.initial_state, c, types);
  bool const final = slots.in_place ? final_state.given : are_states(final_state, c, types);
  bool const target = !slots.final.given || (pooled && slots.in_place && slots.initial.dim == 1);
  // States written in place must not be one state, counts choose a column: the checks have the words for
  // both.
  bool const apart = !pooled || !initial || !slots.in_place || c.initial_state.slot_stride() != 0;
  bool const counted = !slots.num_accepted.given || slots.initial.dim == 2;
  return initial && final && target && apart && counted && are_indices(slots.initial, c, types, true) &&
         are_indices(slots.final, c, types, false) && are_indices(slots.num_accepted, c, types, false);
}

// Whether both states have the dtype that the decode kernel is compiled for.
inline bool is_one_dtype(Call const& call, View const& final_state) {
  return !call.initial_state.given || !final_state.given || call.initial_state.dtype == final_state.dtype;
}

inline bool is_out(View const& out, Call const& call, Types const& types) {
  return out.is(types.bf16) && is_rows(out, call.q, call.v.sizes[2], 2);
}

inline void fill(Inputs& inputs,
                 Call const& call,
                 Types const& types,
                 View const& out,
                 View const& final_state,
                 Slots const& slots,
                 bool clear_padding) {
  inputs.num_seqs = static_cast<int32_t>(call.num_seqs());
  inputs.num_heads = static_cast<int32_t>(call.q.sizes[2]);
  inputs.value_heads = static_cast<int32_t>(call.v.sizes[2]);
  inputs.num_tokens = call.q.sizes[0] * call.q.sizes[1];
  inputs.seq_tokens = call.q.sizes[1];
  inputs.cu_seqlens = call.cu_seqlens.data;
  inputs.cu_seqlens_is_64 = call.cu_seqlens.given && call.cu_seqlens.is(types.int64);

  inputs.q = call.q.tokens();
  inputs.k = call.k.tokens();
  inputs.v = call.v.tokens();
  inputs.g = call.g.tokens();
  inputs.beta = call.beta.tokens();
  inputs.out = out.tokens();
  inputs.beta_head_stride = call.beta.strides[2];
  inputs.g_dtype = types.of(call.g);
  inputs.beta_dtype = types.of(call.beta);
  inputs.A_log = static_cast<float const*>(call.A_log.data);
  inputs.dt_bias = static_cast<float const*>(call.dt_bias.data);

  Options const& options = call.options;
  inputs.gate = !options.gate_in_kernel ? GateKind::kLogDecay
                : options.lower_bound   ? GateKind::kBounded
                                        : GateKind::kSoftplus;
  inputs.beta_kind = !options.beta_sigmoid ? BetaKind::kStepSize
                     : options.neg_eigval  ? BetaKind::kTwiceSigmoid
                                           : BetaKind::kSigmoid;
  inputs.l2norm = options.l2norm;
  inputs.scale = static_cast<float>(options.scale);
  inputs.lower_bound = static_cast<float>(options.lower_bound.value_or(0.0));

  inputs.initial_state = types.states(call.initial_state);
  inputs.final_state = types.states(final_state);
  inputs.state_v_first = options.state_v_first;
  inputs.final_place = !final_state.given                         ? FinalPlace::kNone
                       : !(slots.initial.given && slots.in_place) ? FinalPlace::kDense
                       : slots.initial.dim == 2                   ? FinalPlace::kPerToken
                       : slots.final.given                        ? FinalPlace::kGiven
                                                                  : FinalPlace::kSource;
  inputs.slots = types.indices(slots.initial);
  inputs.final_slots = types.indices(slots.final);
  inputs.num_accepted = types.indices(slots.num_accepted);
  inputs.has_pads = slots.pad_slot_id.has_value();
  inputs.pad_slot_id = slots.pad_slot_id.value_or(0);
  inputs.clear_padding = clear_padding && call.cu_seqlens.given;
}

}  // namespace flashkda
