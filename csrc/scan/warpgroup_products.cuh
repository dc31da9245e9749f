// The products of one chunk by wgmma: the same as those of products.cuh, to the bit, but they go on while the
// warps do. A warpgroup holds 64 rows of V, each of its warps one row tile; all four read the right operands
// from shared memory once, together.
#pragma once

#include "../device/wgmma.cuh"
#include "products.cuh"

namespace flashkda::scan {

// The state as left operand of eight products.
struct StateOperand {
  uint32_t a[kHeadDim / 16][4];
};
__device__ __forceinline__ StateOperand as_operand(StateRows const& state) {
  StateOperand result;
#pragma unroll
  for (int j = 0; j < kHeadDim / 16; ++j) left_operand(result.a[j], state.c[2 * j], state.c[2 * j + 1]);
  return result;
}

// Accumulators in the order of an instruction.
template <int kCount>
__device__ __forceinline__ float (&flat(float (&c)[kCount][4]))[4 * kCount] {
  return reinterpret_cast<float (&)[4 * kCount]>(c);
}

// x = state times the rows of k_in or q_in [C, 128]: a group of products of its own.
template <class Config>
__device__ __forceinline__ void start_times_rows(TokenColumns<Config>& x,
                                                 StateOperand const& state,
                                                 bf16 const* rows) {
  constexpr int C = Config::C;
  uint64_t const b = wgmma::operand(ptx::smem_address(rows), wgmma::Swizzle::k128, 8 * 128);
#pragma unroll
  for (int j = 0; j < kHeadDim / 16; ++j) {
    uint32_t const offset = j / 4 * (C * 128) + j % 4 * 32;  // of tile_offset()
    wgmma::multiply<C, wgmma::Dense::kSummed>(flat(x.c[0]), state.a[j], wgmma::after(b, offset), j > 0);
  }
  wgmma::commit();
}

// c += x L^T for a lower triangular L [C, C]; above its diagonal there are zeros.
template <class Config>
__device__ __forceinline__ void start_times_lower(TokenColumns<Config>& c,
                                                  TokenOperand<Config> const& x,
                                                  bf16 const* square) {
  constexpr int C = Config::C;
  constexpr auto kSwizzle = C == 32 ? wgmma::Swizzle::k64 : wgmma::Swizzle::k32;  // of square_offset()
  uint64_t const b = wgmma::operand(ptx::smem_address(square), kSwizzle, 8 * 2 * C);
#pragma unroll
  for (int j = 0; j < C / 16; ++j) {
    wgmma::multiply<C, wgmma::Dense::kSummed>(flat(c.c[0]), x.a[0][j], wgmma::after(b, 32 * j));
  }
  wgmma::commit();
}

// state += x K_out, x [V rows, tokens].
template <class Config>
__device__ __forceinline__ void start_advance(StateRows& state,
                                              TokenOperand<Config> const& x,
                                              bf16 const* k_out) {
  constexpr int C = Config::C;
  uint64_t const b = wgmma::operand(ptx::smem_address(k_out), wgmma::Swizzle::k128, 8 * 128, C * 128);
#pragma unroll
  for (int j = 0; j < C / 16; ++j) {
    wgmma::multiply<kHeadDim, wgmma::Dense::kColumns>(flat(state.c), x.a[0][j],
                                                      wgmma::after(b, j * 16 * 128));
  }
  wgmma::commit();
}

__device__ __forceinline__ void decay_state(StateRows& state, float const* decay) {
  int const lane = threadIdx.x & 31;
#pragma unroll
  for (int n = 0; n < kHeadDim / 8; ++n) {
    float2 const f = *reinterpret_cast<float2 const*>(&decay[8 * n + 2 * (lane % 4)]);
    float (&c)[4] = state.c[n];
    c[0] *= f.x;
    c[1] *= f.y;
    c[2] *= f.x;
    c[3] *= f.y;
  }
}

// beta v, laid out as accumulators: read while the products that it meets are under way.
template <class Config>
__device__ __forceinline__ TokenColumns<Config> weighted_values(bf16 const* values,
                                                                float const* beta,
                                                                int size) {
  int const lane = threadIdx.x & 31;
  TokenColumns<Config> result;
#pragma unroll
  for (int n = 0; n < Config::C / 16; ++n) {
    uint32_t v[4];
    ptx::ldmatrix_x4_trans(v, values_address<Config>(values, 16 * n, 0));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const token = 16 * n + 8 * half + 2 * (lane % 4);
      float2 const b = *reinterpret_cast<float2 const*>(&beta[token]);
      float2 low = ptx::unpack_bf16(v[2 * half]), high = ptx::unpack_bf16(v[2 * half + 1]);
      clear_past_end(low, high, token, size);
      float (&r)[4] = result.c[0][2 * n + half];
      r[0] = b.x * low.x;
      r[1] = b.y * low.y;
      r[2] = b.x * high.x;
      r[3] = b.y * high.y;
    }
  }
  return result;
}

// A factor for each of the lane's columns, read ahead.
template <class Config>
struct TokenFactors {
  float2 of[Config::C / 8];
  __device__ __forceinline__ explicit TokenFactors(float const* factor) {
    int const lane = threadIdx.x & 31;
#pragma unroll
    for (int n = 0; n < Config::C / 8; ++n) {
      of[n] = *reinterpret_cast<float2 const*>(&factor[8 * n + 2 * (lane % 4)]);
    }
  }
};

template <class Config>
__device__ __forceinline__ void residual(TokenColumns<Config>& x,
                                         TokenColumns<Config> const& wanted,
                                         TokenFactors<Config> const& beta_key) {
#pragma unroll
  for (int n = 0; n < Config::C / 8; ++n) {
    float (&r)[4] = x.c[0][n];
    float const(&w)[4] = wanted.c[0][n];
    float2 const f = beta_key.of[n];
    r[0] = wrong(w[0], f.x, r[0]);
    r[1] = wrong(w[1], f.y, r[1]);
    r[2] = wrong(w[2], f.x, r[2]);
    r[3] = wrong(w[3], f.y, r[3]);
  }
}

template <class Config>
__device__ __forceinline__ void scale_columns(TokenColumns<Config>& x, TokenFactors<Config> const& factor) {
#pragma unroll
  for (int n = 0; n < Config::C / 8; ++n) {
    float (&r)[4] = x.c[0][n];
    float2 const f = factor.of[n];
    r[0] *= f.x;
    r[1] *= f.y;
    r[2] *= f.x;
    r[3] *= f.y;
  }
}

}  // namespace flashkda::scan
