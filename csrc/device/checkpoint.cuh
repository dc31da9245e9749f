// Which states inside of a sequence are kept.
#pragma once

#include "record.cuh"
#include "route.cuh"

namespace flashkda {

constexpr int kNoCheckpoint = 0x7fffffff;

__device__ __forceinline__ int64_t checkpoint_offset(Checkpoints const& c, int n, int column) {
  return c.offsets.data == nullptr ? (column + 1) * int64_t{c.every} : slot_at(c.offsets, n, column);
}

__device__ __forceinline__ int64_t checkpoint_slot(Checkpoints const& c, int n, int column) {
  return c.slots.data == nullptr ? n : slot_at(c.slots, n, column);
}

// Offsets of a sequence have this many columns.
__device__ __forceinline__ int checkpoint_columns(Checkpoints const& c) {
  return c.offsets.data == nullptr ? c.slots.columns : c.offsets.columns;
}

// The first offset after `done`. Whole warps call it: each lane looks at its share of the columns.
__device__ __forceinline__ int next_checkpoint(Checkpoints const& c, int n, int done) {
  int const columns = checkpoint_columns(c);
  if (c.offsets.data == nullptr) {
    int const column = done / c.every;
    return column < columns ? (column + 1) * c.every : kNoCheckpoint;
  }
  int next = kNoCheckpoint;
  for (int i = threadIdx.x & 31; i < columns; i += 32) {
    int64_t const offset = checkpoint_offset(c, n, i);
    if (offset > done && offset < next) next = static_cast<int>(offset);
  }
  return __reduce_min_sync(0xffffffffu, next);
}

// Calls keep(column, slot) for the checkpoints at an offset.
template <class Function>
__device__ __forceinline__ void for_checkpoints(Checkpoints const& c,
                                                int n,
                                                int offset,
                                                Function const& keep) {
  int const columns = checkpoint_columns(c);
  bool const is_regular = c.offsets.data == nullptr;
#pragma unroll 1
  for (int i = is_regular ? offset / c.every - 1 : 0; i < columns; i = is_regular ? columns : i + 1) {
    if (checkpoint_offset(c, n, i) != offset) continue;
    int64_t const slot = checkpoint_slot(c, n, i);
    if (is_inside(c.states, slot)) keep(i, slot);
  }
}

__device__ __forceinline__ HalfChunk* half_chunk(ChunkFwdParams const& p, int n, int column, int head) {
  int64_t const row = int64_t{n} * checkpoint_columns(p.checkpoints) + column;
  return static_cast<HalfChunk*>(p.half_chunks) + row * p.value_heads + head;
}

}  // namespace flashkda
