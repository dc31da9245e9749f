// The state of one head as the decode kernel holds it: a rectangle of values and keys per thread.
#pragma once

#include <type_traits>

#include "../device/ptx.cuh"
#include "../params.h"

namespace flashkda {

template <class Arch, class StateT_, bool kVFirst_>
struct DecodeConfig {
  using StateT = StateT_;
  static constexpr bool kVFirst = kVFirst_;
  static constexpr int kThreads = 128, kWarps = kThreads / 32;
  // Eight lanes share out the keys: enough for whole cache lines, few enough for short sums over lanes.
  static constexpr int kKeyLanes = 8, kValueLanes = 32 / kKeyLanes;
  static constexpr int kThreadKeys = kHeadDim / kKeyLanes;
  static constexpr int kThreadValues = kVFirst && sizeof(StateT) == 4 ? 2 : 4;
  static constexpr int kGroup = kVFirst ? 16 / sizeof(StateT) : 4;  // adjacent keys of a thread
  static constexpr int kAccess = kVFirst ? kGroup : kThreadValues;  // elements of one load or store
  static constexpr int kWarpValues = kThreadValues * kValueLanes;
  static constexpr int kValues = kWarps * kWarpValues;  // of a tile
  // A [V, K] tile arrives in copies with a barrier each: by warps, or as one. Measured: 1 % for either state.
  static constexpr int kCopies = sizeof(StateT) == 4 ? kWarps : 1;
  // Tiles that one CTA can take one after the other, asked for together: at two bytes each, one alone is too
  // few bytes under way, and what is done once per CTA (the tokens) too large a part of the work.
  static constexpr int kPasses = kVFirst && sizeof(StateT) == 2 ? kHeadDim / kValues : 1;
  static constexpr int kTokens = 8;  // staged at a time
  // By registers: the state takes 32 or 64 of them, [K, V] loads as many again; code for Blackwell needs
  // twenty more than Hopper's.
  static constexpr int kCtasPerSm = !kVFirst ? 3 : sizeof(StateT) != 4 ? 4 : Arch::kMajor == 9 ? 7 : 5;
};

namespace decode {

// The thread's place in its warp: neighbours read neighbouring memory.
template <class Config>
struct Lane {
  int key_lane, value_lane;
  __device__ Lane() {
    int const lane = threadIdx.x & 31;
    key_lane = Config::kVFirst ? lane % Config::kKeyLanes : lane / Config::kValueLanes;
    value_lane = Config::kVFirst ? lane / Config::kKeyLanes : lane % Config::kValueLanes;
  }
  __device__ static int of(int key_lane, int value_lane) {
    return Config::kVFirst ? value_lane * Config::kKeyLanes + key_lane
                           : key_lane * Config::kValueLanes + value_lane;
  }
  // The thread's key i; groups of kGroup are adjacent.
  __device__ int key(int i) const {
    return i / Config::kGroup * (Config::kKeyLanes * Config::kGroup) + key_lane * Config::kGroup +
           i % Config::kGroup;
  }
  // The thread's value j, counted in the CTA.
  __device__ int value(int j) const {
    int const in_warp =
        Config::kVFirst ? j * Config::kValueLanes + value_lane : value_lane * Config::kThreadValues + j;
    return threadIdx.x / 32 * Config::kWarpValues + in_warp;
  }
};

template <class Config>
struct State {
  float s[Config::kThreadValues][Config::kThreadKeys];
};

template <class Config>
__device__ __forceinline__ void make_nan(State<Config>& state) {
#pragma unroll
  for (auto& row : state.s) {
#pragma unroll
    for (float& x : row) x = __int_as_float(0x7fffffff);
  }
}

// Adjacent elements of a state as fp32, and back.
__device__ __forceinline__ void unpack(float (&x)[4], int4 const& raw) {
  x[0] = __int_as_float(raw.x);
  x[1] = __int_as_float(raw.y);
  x[2] = __int_as_float(raw.z);
  x[3] = __int_as_float(raw.w);
}
__device__ __forceinline__ void unpack(float (&x)[4], int2 const& raw) {
  float2 const low = ptx::unpack_bf16(raw.x), high = ptx::unpack_bf16(raw.y);
  x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
}
__device__ __forceinline__ void unpack(float (&x)[8], int4 const& raw) {
  int const words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 const pair = ptx::unpack_bf16(words[i]);
    x[2 * i] = pair.x;
    x[2 * i + 1] = pair.y;
  }
}
__device__ __forceinline__ void pack(int4& raw, float const (&x)[4]) {
  raw = {__float_as_int(x[0]), __float_as_int(x[1]), __float_as_int(x[2]), __float_as_int(x[3])};
}
__device__ __forceinline__ void pack(int2& raw, float const (&x)[4]) {
  raw = {static_cast<int>(ptx::pack_bf16(x[0], x[1])), static_cast<int>(ptx::pack_bf16(x[2], x[3]))};
}
__device__ __forceinline__ void pack(int4& raw, float const (&x)[8]) {
  raw = {static_cast<int>(ptx::pack_bf16(x[0], x[1])), static_cast<int>(ptx::pack_bf16(x[2], x[3])),
         static_cast<int>(ptx::pack_bf16(x[4], x[5])), static_cast<int>(ptx::pack_bf16(x[6], x[7]))};
}

// One load or store of kAccess elements: the index of the first in the state of a head, and each element's
// place in the thread's rectangle.
template <class Config>
struct Access {
  using Raw = std::conditional_t<Config::kAccess * sizeof(typename Config::StateT) == 16, int4, int2>;
  static constexpr int kCount = Config::kThreadKeys * Config::kThreadValues / Config::kAccess;
  int at, key, value;
  // `first` is the CTA's first value.
  __device__ Access(Lane<Config> const& lane, int i, int first) {
    if (Config::kVFirst) {
      constexpr int kPerValue = Config::kThreadKeys / Config::kAccess;
      value = i / kPerValue;
      key = i % kPerValue * Config::kAccess;
      at = (first + lane.value(value)) * kHeadDim + lane.key(key);
    } else {
      value = 0;
      key = i;
      at = lane.key(key) * kHeadDim + first + lane.value(0);
    }
  }
  template <class AnyState>
  __device__ auto& element(AnyState& state, int e) const {
    return Config::kVFirst ? state.s[value][key + e] : state.s[value + e][key];
  }
};

// The thread's rectangle of the state of one head, from and to memory. Loads are asked for before any is
// used; nothing reads a state again soon, so it streams past the caches.
template <class Config>
__device__ __forceinline__ void load_state(State<Config>& state,
                                           typename Config::StateT const* base,
                                           int first) {
  using Access = Access<Config>;
  Lane<Config> const lane;
  typename Access::Raw raw[Access::kCount];
#pragma unroll
  for (int i = 0; i < Access::kCount; ++i) {
    auto const* at = reinterpret_cast<typename Access::Raw const*>(base + Access(lane, i, first).at);
    raw[i] = Config::kVFirst ? *at : __ldcs(at);
  }
#pragma unroll
  for (int i = 0; i < Access::kCount; ++i) {
    float x[Config::kAccess];
    unpack(x, raw[i]);
#pragma unroll
    for (int e = 0; e < Config::kAccess; ++e) Access(lane, i, first).element(state, e) = x[e];
  }
}

template <class Config>
__device__ __forceinline__ void store_state(State<Config> const& state,
                                            typename Config::StateT* base,
                                            int first) {
  using Access = Access<Config>;
  Lane<Config> const lane;
#pragma unroll
  for (int i = 0; i < Access::kCount; ++i) {
    Access const access(lane, i, first);
    float x[Config::kAccess];
#pragma unroll
    for (int e = 0; e < Config::kAccess; ++e) x[e] = access.element(state, e);
    typename Access::Raw raw;
    pack(raw, x);
    __stcs(reinterpret_cast<typename Access::Raw*>(base + access.at), raw);
  }
}

}  // namespace decode
}  // namespace flashkda
