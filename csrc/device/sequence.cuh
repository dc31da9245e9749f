// Where a sequence lies, and which sequence a slot belongs to. Lengths are only known here: the
// host never reads cu_seqlens.
#pragma once

#include "inputs.cuh"
#include "record.cuh"

namespace flashkda {

// A chunk: `size` tokens from `token` on.
struct Chunk {
  int64_t token;
  int size;         // at most C; <= 0: the slot is unused
  int seq, offset;  // tokens of its sequence before it
};

// The chunk of a slot. Whole warps call it: the search looks at 32 sequences at a time.
template <int C>
__device__ __forceinline__ Chunk chunk_of_slot(Inputs const& p, int64_t slot) {
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
  return {token, static_cast<int>(left < C ? left : C), low, static_cast<int>(token - start)};
}

// The sequence of a given rank by length, so that long sequences start first and short ones fill the
// gaps. More than a warp's worth of sequences balance themselves: they keep their order. Whole warps
// call it.
__device__ __forceinline__ int nth_longest(Inputs const& p, int rank) {
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

}  // namespace flashkda
