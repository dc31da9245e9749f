// One chunk by wgmma: a warpgroup has 64 rows of V, and reads the record's operands from shared memory.
#pragma once

#include "../device/wgmma.cuh"
#include "products.cuh"

namespace flashkda::scan {

// Right operands of a record's fields.
template <int C>
struct RecordOperands {
  static constexpr wgmma::Swizzle kSquare = C == 32 ? wgmma::Swizzle::k64 : wgmma::Swizzle::k32;
  static constexpr int kHalf = C * 128;       // bytes of 64 channels of a tile
  static constexpr int kSquareRows = C * 16;  // bytes of eight rows of a square

  // Channels [16 j, 16 j + 16) of K_in or Q_in as rows of B, tokens as columns.
  __device__ static uint64_t rows(bf16 const* tile, int j) {
    return wgmma::advance(wgmma::descriptor(tile, wgmma::Swizzle::k128, 16, 1024),
                          j / 4 * kHalf + j % 4 * 32);
  }
  // Tokens [16 j, 16 j + 16) of the transposed square as rows.
  __device__ static uint64_t square(bf16 const* tile, int j) {
    return wgmma::advance(wgmma::descriptor(tile, kSquare, 16, kSquareRows), j * 32);
  }
  // Tokens [16 j, 16 j + 16) of K_out as rows, channels as columns.
  __device__ static uint64_t columns(bf16 const* tile, int j) {
    return wgmma::advance(wgmma::descriptor(tile, wgmma::Swizzle::k128, kHalf, 1024), j * 2048);
  }
};

template <class Config>
__device__ __forceinline__ void scale_state(StateRows& state, float const* decay) {
  int const lane = threadIdx.x & 31;
#pragma unroll
  for (int n = 0; n < kHeadDim / 8; ++n) {
    float2 const f = *reinterpret_cast<float2 const*>(&decay[8 * n + 2 * (lane % 4)]);
    state.c[n][0] *= f.x;
    state.c[n][1] *= f.y;
    state.c[n][2] *= f.x;
    state.c[n][3] *= f.y;
  }
}

// Advances the state by a chunk, leaves the outputs in `out` [C, 64].
template <class Config>
__device__ __forceinline__ void warpgroup_step(
    StateRows& state, Record<Config::C> const& record, bf16 const* values, bf16* out, int size) {
  constexpr int C = Config::C;
  using Operands = RecordOperands<C>;
  TokenColumns<Config> x, o;
  {
    uint32_t a[kHeadDim / 16][4];
#pragma unroll
    for (int j = 0; j < kHeadDim / 16; ++j) left_operand(a[j], state.c[2 * j], state.c[2 * j + 1]);
    scale_state<Config>(state, record.decay);
    wgmma::fence();
#pragma unroll
    for (int j = 0; j < kHeadDim / 16; ++j) {
      wgmma::multiply(x.c[0], a[j], Operands::rows(record.k_in, j), j > 0);
    }
    wgmma::commit();
#pragma unroll
    for (int j = 0; j < kHeadDim / 16; ++j) {
      wgmma::multiply(o.c[0], a[j], Operands::rows(record.q_in, j), j > 0);
    }
    wgmma::commit();
    wgmma::wait<1>();
    wgmma::hold(x.c[0]);
  }
  residual<Config>(x, values, record, size);
  // U = R + (T - I) R: the identity part is never rounded.
  TokenOperand<Config> const r = as_operand<Config>(x);
  wgmma::hold(x.c[0]);
  wgmma::fence();
#pragma unroll
  for (int j = 0; j < C / 16; ++j) wgmma::multiply(x.c[0], r.a[0][j], Operands::square(record.inverse, j));
  wgmma::commit();
  wgmma::wait<0>();
  wgmma::hold(x.c[0]);
  wgmma::hold(o.c[0]);
  scale_columns<Config>(x, record.inverse_key);
  TokenOperand<Config> const update = as_operand<Config>(x);
  wgmma::hold(state.c);
  wgmma::fence();
#pragma unroll
  for (int j = 0; j < C / 16; ++j)
    wgmma::multiply(state.c, update.a[0][j], Operands::columns(record.k_out, j));
  wgmma::commit();
#pragma unroll
  for (int j = 0; j < C / 16; ++j)
    wgmma::multiply(o.c[0], update.a[0][j], Operands::square(record.scores, j));
  wgmma::commit();
  wgmma::wait<0>();
  wgmma::hold(state.c);
  wgmma::hold(o.c[0]);
  scale_columns<Config>(o, record.output);
  store_outputs<Config>(as_operand<Config>(o), out);
}

}  // namespace flashkda::scan
