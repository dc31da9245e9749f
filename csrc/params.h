// Plain structs that cross the border between torch and the kernels: no torch, no CuTe.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flashkda {

constexpr int kHeadDim = 128;  // K and V, the only size that the kernels serve

enum class GateKind : int32_t {
  kLogDecay = 0,  // g is the log decay itself
  kSoftplus = 1,  // -exp(A_log) softplus(g + dt_bias)
  kBounded = 2,   // lower_bound sigmoid(exp(A_log) (g + dt_bias))
};

enum class BetaKind : int32_t {
  kStepSize = 0,  // beta itself
  kSigmoid = 1,
  kTwiceSigmoid = 2,
};

enum class Dtype : int32_t { kBfloat16 = 0, kFloat32 = 1 };

// A tensor [tokens, heads, ...] whose last dimension is dense and whose heads are adjacent.
struct TokenTensor {
  void* data;
  int64_t row_stride;  // elements from one token to the next
};

// Recurrent states [slots, HV, V, K] (v_first) or [slots, HV, K, V], dense but for the step from one slot to
// the next; null when there are none.
struct States {
  void* data;
  Dtype dtype;
  int64_t slot_stride;  // elements
  int64_t num_slots;
};

// Integers [N] or [N, columns] in device memory; null when there are none.
struct Indices {
  void const* data;
  bool is_64;
  int64_t row_stride, column_stride;  // elements
  int32_t columns;
};

// Where the states of a sequence go.
enum class FinalPlace : int32_t {
  kNone = 0,
  kDense = 1,     // the last one to final_state[n]; zeros for padded sequences
  kSource = 2,    // the last one to the slot it came from
  kGiven = 3,     // the last one to slot final_slots[n]
  kPerToken = 4,  // after token t to slot slots[n][t]
};

// What every call has. Sequences are packed along the token axis; there is at least one sequence and one
// token.
struct Inputs {
  int32_t num_seqs;        // N
  int32_t num_heads;       // H, of q and k
  int32_t value_heads;     // HV, of v, g, beta, out: a multiple of H
  int64_t num_tokens;      // of all sequences, padding included
  int64_t seq_tokens;      // of each sequence, when cu_seqlens is null
  void const* cu_seqlens;  // [N + 1] int32 or int64; null: equal lengths
  bool cu_seqlens_is_64;

  TokenTensor q, k;  // [tokens, H, 128] bf16
  TokenTensor v;     // [tokens, HV, 128] bf16
  TokenTensor g;     // [tokens, HV, 128]
  TokenTensor beta;  // [tokens, HV], any strides
  TokenTensor out;   // [tokens, HV, 128] bf16
  int64_t beta_head_stride;
  Dtype g_dtype, beta_dtype;
  float const* A_log;    // [HV]; null: exp(A_log) is 1
  float const* dt_bias;  // [HV, 128]; null: 0

  GateKind gate;
  BetaKind beta_kind;
  bool l2norm;
  float scale;
  float lower_bound;

  // A padded sequence reads and writes no state; its outputs are zeros. A slot outside the pool is not
  // touched either, and makes the outputs NaN.
  States initial_state, final_state;  // may be the same memory
  bool state_v_first;
  FinalPlace final_place;
  Indices slots;         // of initial_state; null: sequence n has slot n
  Indices final_slots;   // kGiven: of final_state
  Indices num_accepted;  // start from slots[n][num_accepted[n] - 1]; null: from slots[n][0]
  bool has_pads;
  int64_t pad_slot_id;  // slots up to this are padding; as source alone (kGiven): a state of zeros

  bool clear_padding;  // rows past the last sequence become zeros
};

// States inside of sequences that are kept: of sequence n after offset(n, p) tokens in slot slots[n][p].
// Offsets are multiples of 16; others are ignored, as are those past the end and negative slots.
struct Checkpoints {
  States states;    // null: there are none
  Indices offsets;  // null: (p + 1) every
  int32_t every;
  Indices slots;  // null: sequence n has slot n
};

// One call of the chunked forward pass.
struct ChunkFwdParams : Inputs {
  bool gate_is_bounded;  // g >= -5 is certain: longer chunks
  void* workspace;       // chunk_fwd_workspace_bytes() bytes, 128-byte aligned
  Checkpoints checkpoints;
  void* half_chunks;  // chunk_fwd_half_chunk_bytes() bytes, 16-byte aligned; null where that is 0
};

// One call of the token-by-token form.
struct RecurrentParams : Inputs {
  bool state_is_ready;  // the kernel just before on the stream writes nothing of this but tokens
};

}  // namespace flashkda
