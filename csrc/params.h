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

// Recurrent states [N, HV, V, K] (v_first) or [N, HV, K, V], dense; null when there are none.
struct States {
  void* data;
  Dtype dtype;
};

// One call of the chunked forward pass. Sequences are packed along the token axis; there is at least one
// sequence and one token.
struct ChunkFwdParams {
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

  States initial_state, final_state;  // may be the same memory
  bool state_v_first;

  GateKind gate;
  BetaKind beta_kind;
  bool l2norm;
  bool gate_is_bounded;  // g >= -5 is certain: longer chunks
  float scale;
  float lower_bound;

  bool clear_padding;  // rows past the last sequence become zeros
  void* workspace;     // chunk_fwd_workspace_bytes() bytes, 128-byte aligned
};

}  // namespace flashkda
