// The state as scan's warps hold it, from and to memory.
#pragma once

#include <type_traits>

#include "../device/checkpoint.cuh"

namespace flashkda::scan {

// Sixteen rows of the transposed state, as m16n8 accumulators: columns 8 n + 2 (lane % 4) and the
// next of K; rows lane / 4 and lane / 4 + 8 of the warp's rows of V.
struct StateRows {
  float c[kHeadDim / 8][4];
};

// Two adjacent columns of K, of one row of V, in a [V, K] or [K, V] state.
template <class T>
__device__ __forceinline__ float2 load_pair(T const* data, bool v_first, int row, int column) {
  if (!v_first) {
    T const* const at = data + column * kHeadDim + row;
    return {static_cast<float>(at[0]), static_cast<float>(at[kHeadDim])};
  }
  T const* const at = data + row * kHeadDim + column;
  if constexpr (std::is_same_v<T, float>) return *reinterpret_cast<float2 const*>(at);
  return ptx::unpack_bf16(*reinterpret_cast<uint32_t const*>(at));
}

template <class T>
__device__ __forceinline__ void store_pair(
    T* data, bool v_first, int row, int column, float first, float second) {
  if (!v_first) {
    T* const at = data + column * kHeadDim + row;
    at[0] = static_cast<T>(first);
    at[kHeadDim] = static_cast<T>(second);
  } else if constexpr (std::is_same_v<T, float>) {
    *reinterpret_cast<float2*>(data + row * kHeadDim + column) = {first, second};
  } else {
    *reinterpret_cast<uint32_t*>(data + row * kHeadDim + column) = ptx::pack_bf16(first, second);
  }
}

template <class T>
__device__ __forceinline__ void load_state(StateRows& state, T const* data, bool v_first, int row) {
  int const lane = threadIdx.x & 31;
#pragma unroll
  for (int n = 0; n < kHeadDim / 8; ++n) {
    int const column = 8 * n + 2 * (lane % 4);
    float2 const low = load_pair(data, v_first, row + lane / 4, column);
    float2 const high = load_pair(data, v_first, row + lane / 4 + 8, column);
    state.c[n][0] = low.x;
    state.c[n][1] = low.y;
    state.c[n][2] = high.x;
    state.c[n][3] = high.y;
  }
}

template <class T>
__device__ __forceinline__ void store_state(StateRows const& state, T* data, bool v_first, int row) {
  int const lane = threadIdx.x & 31;
#pragma unroll
  for (int n = 0; n < kHeadDim / 8; ++n) {
    int const column = 8 * n + 2 * (lane % 4);
    store_pair(data, v_first, row + lane / 4, column, state.c[n][0], state.c[n][1]);
    store_pair(data, v_first, row + lane / 4 + 8, column, state.c[n][2], state.c[n][3]);
  }
}

// A state of one head in memory, of either dtype.
struct HeadState {
  void* data;
  Dtype dtype;
  bool v_first;

  __device__ HeadState(States const& states, int64_t slot, int head, bool v_first)
      : data(states.dtype == Dtype::kFloat32 ? static_cast<void*>(head_state<float>(states, slot, head))
                                             : static_cast<void*>(head_state<bf16>(states, slot, head))),
        dtype(states.dtype),
        v_first(v_first) {}

  __device__ __forceinline__ void load(StateRows& state, int row) const {
    if (dtype == Dtype::kFloat32) {
      load_state(state, static_cast<float const*>(data), v_first, row);
    } else {
      load_state(state, static_cast<bf16 const*>(data), v_first, row);
    }
  }
  __device__ __forceinline__ void store(StateRows const& state, int row) const {
    if (dtype == Dtype::kFloat32) {
      store_state(state, static_cast<float*>(data), v_first, row);
    } else {
      store_state(state, static_cast<bf16*>(data), v_first, row);
    }
  }
  __device__ __forceinline__ void store_pair_at(int row, int column, float first, float second) const {
    if (dtype == Dtype::kFloat32) {
      store_pair(static_cast<float*>(data), v_first, row, column, first, second);
    } else {
      store_pair(static_cast<bf16*>(data), v_first, row, column, first, second);
    }
  }
};

}  // namespace flashkda::scan
