// The gate: log2 of the decay from raw values.
#pragma once

#include "../params.h"
#include "ptx.cuh"

namespace flashkda {

constexpr float kLog2E = 1.4426950408889634f;

// sigmoid(x); relative error below 1e-6 on the whole axis (a tanh form is wrong in the tail).
__device__ __forceinline__ float sigmoid(float x) { return ptx::rcp(1.f + ptx::ex2(-kLog2E * x)); }

// log2(1 + exp(z)). Exact: to a few units in the last place. Else to 2^-22, exp(z) below 2^-8 by its series,
// where 1 + exp(z) would lose digits.
template <bool kExact>
__device__ __forceinline__ float softplus_log2(float z) {
  float const e = ptx::ex2(-kLog2E * fabsf(z));
  if constexpr (kExact) return kLog2E * (fmaxf(z, 0.f) + log1pf(e));
  float const small = kLog2E * (e - 0.5f * e * e);
  float const tail = e < 0x1p-8f ? small : ptx::lg2(1.f + e);
  return kLog2E * fmaxf(z, 0.f) + tail;
}

// What a call says of the gate of one head and channel.
struct GateParameters {
  float A_log = 0.f, bias = 0.f;

  GateParameters() = default;
  __device__ __forceinline__ GateParameters(Inputs const& p, int head, int channel)
      : A_log(p.A_log == nullptr ? 0.f : p.A_log[head]),
        bias(p.dt_bias == nullptr ? 0.f : p.dt_bias[head * kHeadDim + channel]) {}
};

// Constants of one head and channel; log2_decay(raw) for each token.
template <GateKind kKind, bool kExact = false>
struct Gate {
  // bounded: lower_bound / (1 + 2^(slope raw + offset)); softplus: factor log2(1 + e^(raw + offset))
  float slope, offset, factor;

  __device__ __forceinline__ Gate(Inputs const& p, GateParameters const& given) {
    if constexpr (kKind != GateKind::kLogDecay) {
      float const amplitude = expf(given.A_log), bias = given.bias;
      bool const bounded = kKind == GateKind::kBounded;
      slope = -kLog2E * amplitude;
      offset = bounded ? slope * bias : bias;
      factor = bounded ? kLog2E * p.lower_bound : -amplitude;
    }
  }

  __device__ __forceinline__ float log2_decay(float raw) const {
    if constexpr (kKind == GateKind::kLogDecay) {
      return raw * kLog2E;
    } else if constexpr (kKind == GateKind::kSoftplus) {
      return factor * softplus_log2<kExact>(raw + offset);
    } else {
      return factor * ptx::rcp(1.f + ptx::ex2(fmaf(slope, raw, offset)));
    }
  }
};

}  // namespace flashkda
