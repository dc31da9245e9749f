// Reading what a call is given, element by element.
#pragma once

#include "gate.cuh"

namespace flashkda {

// An element of a tensor of integers.
__device__ __forceinline__ int64_t load_integer(void const* data, bool is_64, int64_t offset) {
  return is_64 ? static_cast<int64_t const*>(data)[offset] : static_cast<int32_t const*>(data)[offset];
}

__device__ __forceinline__ float load_float(void const* data, Dtype dtype, int64_t offset) {
  if (dtype == Dtype::kFloat32) return static_cast<float const*>(data)[offset];
  return __uint_as_float(uint32_t{static_cast<uint16_t const*>(data)[offset]} << 16);
}

// First token of sequence n; of the one after the last: the end.
__device__ __forceinline__ int64_t sequence_bound(Inputs const& p, int n) {
  return p.cu_seqlens == nullptr ? n * p.seq_tokens : load_integer(p.cu_seqlens, p.cu_seqlens_is_64, n);
}

// beta of one token and value head.
__device__ __forceinline__ float step_size(Inputs const& p, int64_t token, int head) {
  float const x =
      load_float(p.beta.data, p.beta_dtype, token * p.beta.row_stride + head * p.beta_head_stride);
  if (p.beta_kind == BetaKind::kStepSize) return x;
  return (p.beta_kind == BetaKind::kTwiceSigmoid ? 2.f : 1.f) * sigmoid(x);
}

}  // namespace flashkda
