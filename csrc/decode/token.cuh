// What all warps need of a token: gate, norms and step size, computed by one warp.
#pragma once

#include "../device/inputs.cuh"

namespace flashkda {

struct DecodeToken {
  alignas(16) float decay[kHeadDim];                // exp(g); before, each lane's channels of g
  uint2 key[kHeadDim / 4], query[kHeadDim / 4];     // bf16, as given
  uint2 value[kHeadDim / 4];                        // bf16
  float beta, key_factor, query_factor, key_query;  // factors: 1 / norm, scale; key_query: key times query
};

namespace decode {

// Asks for the warp's part of a token: a lane's four adjacent channels of each tensor. No registers wait for
// it.
__device__ __forceinline__ void request_token(DecodeToken& to,
                                              RecurrentParams const& p,
                                              int64_t token,
                                              int head) {
  int const lane = ptx::thread_anew() & 31;
  // Usually there is nothing to divide, which would be most of this function.
  int const qk_head = p.value_heads == p.num_heads ? head : head / (p.value_heads / p.num_heads);
  auto const address = [&](TokenTensor const& x, int h, int item_bytes) {
    return static_cast<char const*>(x.data) + (token * x.row_stride + h * kHeadDim + 4 * lane) * item_bytes;
  };
  ptx::async_copy<8>(&to.query[lane], address(p.q, qk_head, 2));
  ptx::async_copy<8>(&to.key[lane], address(p.k, qk_head, 2));
  ptx::async_copy<8>(&to.value[lane], address(p.v, head, 2));
  if (p.g_dtype == Dtype::kFloat32) {
    ptx::async_copy<16>(&to.decay[4 * lane], address(p.g, head, 4));
  } else {
    ptx::async_copy<8>(&to.decay[4 * lane], address(p.g, head, 2));
  }
}

// Sums of all three, step by step together: the latencies overlap.
__device__ __forceinline__ void sum_over_warp(float (&x)[3]) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
#pragma unroll
    for (float& one : x) one += __shfl_xor_sync(0xffffffffu, one, step);
  }
}

__device__ __forceinline__ void unpack_channels(float (&x)[4], uint2 raw) {
  float2 const low = ptx::unpack_bf16(raw.x), high = ptx::unpack_bf16(raw.y);
  x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
}

// Parameters of the gate of the lane's channels: asked for with the tokens, used with them.
struct LaneGate {
  GateParameters of[4];
};
__device__ __forceinline__ LaneGate lane_gate(RecurrentParams const& p, int head) {
  int const channel = 4 * (ptx::thread_anew() & 31);
  return {{{p, head, channel}, {p, head, channel + 1}, {p, head, channel + 2}, {p, head, channel + 3}}};
}

// exp(g) of the lane's channels.
template <GateKind kKind>
__device__ __forceinline__ float4 decays(RecurrentParams const& p,
                                         LaneGate const& gate,
                                         float const (&raw)[4]) {
  float x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = ptx::ex2(Gate<kKind, true>(p, gate.of[i]).log2_decay(raw[i]));
  return {x[0], x[1], x[2], x[3]};
}

// From what was asked for to what the recurrence needs.
__device__ __forceinline__ void stage_token(DecodeToken& token,
                                            RecurrentParams const& p,
                                            LaneGate const& gate,
                                            float beta) {
  int const lane = ptx::thread_anew() & 31;
  float4& decay = reinterpret_cast<float4*>(token.decay)[lane];
  float q[4], k[4], g[4] = {decay.x, decay.y, decay.z, decay.w};
  unpack_channels(q, token.query[lane]);
  unpack_channels(k, token.key[lane]);
  if (p.g_dtype == Dtype::kBfloat16) unpack_channels(g, {__float_as_uint(g[0]), __float_as_uint(g[1])});
  float sums[3] = {};  // q q, k k, q k
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sums[0] += q[i] * q[i];
    sums[1] += k[i] * k[i];
    sums[2] += q[i] * k[i];
  }
  sum_over_warp(sums);
  switch (p.gate) {
    case GateKind::kLogDecay:
      decay = decays<GateKind::kLogDecay>(p, gate, g);
      break;
    case GateKind::kSoftplus:
      decay = decays<GateKind::kSoftplus>(p, gate, g);
      break;
    case GateKind::kBounded:
      decay = decays<GateKind::kBounded>(p, gate, g);
      break;
  }
  if (lane == 0) {
    token.beta = beta;
    token.query_factor = p.l2norm ? p.scale * rsqrtf(sums[0] + 1e-6f) : p.scale;
    token.key_factor = p.l2norm ? rsqrtf(sums[1] + 1e-6f) : 1.f;
    token.key_query = token.key_factor * token.query_factor * sums[2];
  }
}

}  // namespace decode
}  // namespace flashkda
