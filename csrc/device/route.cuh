// Which slots of a state pool belong to a sequence.
#pragma once

#include "inputs.cuh"

namespace flashkda {

enum class Fate : int {
  kRuns,
  kPadded,  // nothing is read or written, outputs are zeros
  kBroken,  // a slot outside its pool: the same, but outputs are NaN
};

// Where the states of one sequence come from and go to.
struct Route {
  Fate fate;
  int64_t source, target;  // slots; a negative source: a state of zeros
};

__device__ __forceinline__ int64_t slot_at(Indices const& x, int n, int column) {
  return load_integer(x.data, x.is_64, n * x.row_stride + column * x.column_stride);
}

__device__ __forceinline__ bool is_pad(Inputs const& p, int64_t slot) {
  return p.has_pads && slot <= p.pad_slot_id;
}

__device__ __forceinline__ bool is_inside(States const& states, int64_t slot) {
  return static_cast<uint64_t>(slot) < static_cast<uint64_t>(states.num_slots);
}

__device__ __forceinline__ Route route_of(Inputs const& p, int n) {
  if (p.slots.data == nullptr) return {Fate::kRuns, p.initial_state.data == nullptr ? -1 : n, n};
  int64_t column = 0;
  if (p.num_accepted.data != nullptr) column = slot_at(p.num_accepted, n, 0) - 1;
  if (column < 0 || column >= p.slots.columns) return {Fate::kBroken, -1, n};
  int64_t const source = slot_at(p.slots, n, static_cast<int>(column));
  bool const is_source = is_inside(p.initial_state, source);
  if (p.final_place != FinalPlace::kGiven) {
    int64_t const target = p.final_place == FinalPlace::kSource ? source : n;
    if (is_pad(p, source)) return {Fate::kPadded, -1, target};
    return {is_source ? Fate::kRuns : Fate::kBroken, source, target};
  }
  int64_t const target = slot_at(p.final_slots, n, 0);
  if (is_pad(p, target)) return {Fate::kPadded, -1, target};
  if (!is_inside(p.final_state, target)) return {Fate::kBroken, -1, target};
  if (is_pad(p, source)) return {Fate::kRuns, -1, target};
  return {is_source ? Fate::kRuns : Fate::kBroken, source, target};
}

// The state of one head in a slot.
template <class T>
__device__ __forceinline__ T* head_state(States const& states, int64_t slot, int head) {
  return static_cast<T*>(states.data) + slot * states.slot_stride + int64_t{head} * kHeadDim * kHeadDim;
}

}  // namespace flashkda
