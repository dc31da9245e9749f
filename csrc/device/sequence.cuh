// Where a sequence lies, and which sequence a slot belongs to. Lengths are only known here: the
// host never reads cu_seqlens.
#pragma once

#include "gate.cuh"
#include "record.cuh"

namespace flashkda {

__device__ __forceinline__ int64_t sequence_bound(ChunkFwdParams const& p, int n) {
  if (p.cu_seqlens == nullptr) return n * p.seq_tokens;
  return p.cu_seqlens_is_64 ? static_cast<int64_t const*>(p.cu_seqlens)[n]
                            : static_cast<int32_t const*>(p.cu_seqlens)[n];
}

// A chunk: `size` tokens from `token` on.
struct Chunk {
  int64_t token;
  int size;  // at most C; <= 0: the slot is unused
};

// The chunk of a slot. Whole warps call it: the search looks at 32 sequences at a time.
template <int C>
__device__ __forceinline__ Chunk chunk_of_slot(ChunkFwdParams const& p, int64_t slot) {
  int const lane = threadIdx.x & 31;
  // The last n with first_slot(n) <= slot lies in [low, low + count).
  int low = 0, count = p.num_seqs;
  while (count > 1) {
    int const stride = (count + 31) / 32;
    int const n = low + lane * stride;
    bool const before = lane * stride < count && first_slot<C>(sequence_bound(p, n), n) <= slot;
    int const last = 31 - __clz(__ballot_sync(0xffffffffu, before) | 1u);
    low += last * stride;
    count = min(stride, count - last * stride);
  }
  int64_t const start = sequence_bound(p, low), stop = sequence_bound(p, low + 1);
  int64_t const token = start + (slot - first_slot<C>(start, low)) * C;
  int64_t const left = stop - token;
  return {token, static_cast<int>(left < C ? left : C)};
}

// The sequence of a given rank by length, so that long sequences start first and short ones fill the
// gaps. More than a warp's worth of sequences balance themselves: they keep their order. Whole warps
// call it.
__device__ __forceinline__ int nth_longest(ChunkFwdParams const& p, int rank) {
  if (p.cu_seqlens == nullptr || p.num_seqs > 32) return rank;
  int const lane = threadIdx.x & 31;
  int64_t const length = lane < p.num_seqs ? sequence_bound(p, lane + 1) - sequence_bound(p, lane) : -1;
  int longer = 0;
  for (int other = 0; other < p.num_seqs; ++other) {
    int64_t const theirs = __shfl_sync(0xffffffffu, length, other);
    longer += theirs > length || (theirs == length && other < lane) ? 1 : 0;
  }
  return __ffs(__ballot_sync(0xffffffffu, lane < p.num_seqs && longer == rank)) - 1;
}

// beta of one token and value head.
__device__ __forceinline__ float step_size(ChunkFwdParams const& p, int64_t token, int head) {
  int64_t const offset = token * p.beta.row_stride + head * p.beta_head_stride;
  float const x = p.beta_dtype == Dtype::kFloat32
                      ? static_cast<float const*>(p.beta.data)[offset]
                      : static_cast<float>(static_cast<bf16 const*>(p.beta.data)[offset]);
  if (p.beta_kind == BetaKind::kStepSize) return x;
  return (p.beta_kind == BetaKind::kTwiceSigmoid ? 2.f : 1.f) * sigmoid(x);
}

}  // namespace flashkda
