// The products of one chunk on the tensor cores, [rows of V, tokens], and what stands between them.
#pragma once

#include "../device/record.cuh"
#include "state.cuh"

namespace flashkda::scan {

// Accumulator tiles 2 j and 2 j + 1 as the left operand of columns [16 j, 16 j + 16).
__device__ __forceinline__ void left_operand(uint32_t (&a)[4],
                                             float const (&low)[4],
                                             float const (&high)[4]) {
  a[0] = ptx::pack_bf16(low[0], low[1]);
  a[1] = ptx::pack_bf16(low[2], low[3]);
  a[2] = ptx::pack_bf16(high[0], high[1]);
  a[3] = ptx::pack_bf16(high[2], high[3]);
}

// Token row and 16-byte piece that a lane addresses to load, from rows that are columns of the
// result, the right operands of two adjacent column tiles.
struct OperandLane {
  int row, piece;
  __device__ OperandLane() {
    int const lane = threadIdx.x & 31;
    row = (lane & 7) + ((lane >> 4) << 3);
    piece = (lane >> 3) & 1;
  }
};

// Accumulators of [16 kRowTiles rows of V, C tokens].
template <class Config>
struct TokenColumns {
  float c[Config::kRowTiles][Config::C / 8][4];
};
// The same as left operands.
template <class Config>
struct TokenOperand {
  uint32_t a[Config::kRowTiles][Config::C / 16][4];
};

template <class Config>
__device__ __forceinline__ TokenOperand<Config> as_operand(TokenColumns<Config> const& x) {
  TokenOperand<Config> result;
#pragma unroll
  for (int m = 0; m < Config::kRowTiles; ++m) {
#pragma unroll
    for (int j = 0; j < Config::C / 16; ++j) {
      left_operand(result.a[m][j], x.c[m][2 * j], x.c[m][2 * j + 1]);
    }
  }
  return result;
}

// recalled, read = state times the rows of k_in, q_in [C, 128]. Both at once: twice as many
// independent accumulators cover the latency of the products.
template <class Config>
__device__ __forceinline__ void times_rows(TokenColumns<Config>& recalled,
                                           TokenColumns<Config>& read,
                                           StateRows const (&state)[Config::kRowTiles],
                                           bf16 const* k_in,
                                           bf16 const* q_in) {
  constexpr int C = Config::C;
  OperandLane const lane;
  uint32_t const k_base = ptx::smem_address(k_in), q_base = ptx::smem_address(q_in);
  recalled = {};
  read = {};
#pragma unroll
  for (int j = 0; j < kHeadDim / 16; ++j) {
    uint32_t a[Config::kRowTiles][4];
#pragma unroll
    for (int m = 0; m < Config::kRowTiles; ++m) {
      left_operand(a[m], state[m].c[2 * j], state[m].c[2 * j + 1]);
    }
#pragma unroll
    for (int n = 0; n < C / 16; ++n) {
      uint32_t const offset = tile_offset<C>(16 * n + lane.row, 2 * j + lane.piece);
      uint32_t k[4], q[4];
      ptx::ldmatrix_x4(k, k_base + offset);
      ptx::ldmatrix_x4(q, q_base + offset);
#pragma unroll
      for (int m = 0; m < Config::kRowTiles; ++m) {
        ptx::mma_bf16(recalled.c[m][2 * n], a[m], k[0], k[1]);
        ptx::mma_bf16(recalled.c[m][2 * n + 1], a[m], k[2], k[3]);
        ptx::mma_bf16(read.c[m][2 * n], a[m], q[0], q[1]);
        ptx::mma_bf16(read.c[m][2 * n + 1], a[m], q[2], q[3]);
      }
    }
  }
}

// c += x L^T for a lower triangular L [C, C].
template <class Config>
__device__ __forceinline__ void times_lower(TokenColumns<Config>& c,
                                            TokenOperand<Config> const& x,
                                            bf16 const* square) {
  constexpr int C = Config::C;
  OperandLane const lane;
  uint32_t const base = ptx::smem_address(square);
#pragma unroll
  for (int j = 0; j < C / 16; ++j) {
#pragma unroll
    for (int n = j; n < C / 16; ++n) {
      uint32_t b[4];
      ptx::ldmatrix_x4(b, base + square_offset<C>(16 * n + lane.row, 2 * j + lane.piece));
#pragma unroll
      for (int m = 0; m < Config::kRowTiles; ++m) {
        ptx::mma_bf16(c.c[m][2 * n], x.a[m][j], b[0], b[1]);
        ptx::mma_bf16(c.c[m][2 * n + 1], x.a[m][j], b[2], b[3]);
      }
    }
  }
}

// state = state diag(decay) + x K_out, x [V rows, tokens].
template <class Config>
__device__ __forceinline__ void advance(StateRows (&state)[Config::kRowTiles],
                                        TokenOperand<Config> const& x,
                                        float const* decay,
                                        bf16 const* k_out) {
  constexpr int C = Config::C;
  int const lane = threadIdx.x & 31;
  uint32_t const base = ptx::smem_address(k_out);
#pragma unroll
  for (int n = 0; n < kHeadDim / 16; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float2 const f = *reinterpret_cast<float2 const*>(&decay[16 * n + 8 * half + 2 * (lane % 4)]);
#pragma unroll
      for (int m = 0; m < Config::kRowTiles; ++m) {
        float (&c)[4] = state[m].c[2 * n + half];
        c[0] *= f.x;
        c[1] *= f.y;
        c[2] *= f.x;
        c[3] *= f.y;
      }
    }
#pragma unroll
    for (int j = 0; j < C / 16; ++j) {
      uint32_t b[4];
      int const row = 16 * j + ((lane >> 3) & 1) * 8 + (lane & 7), piece = 2 * n + (lane >> 4);
      ptx::ldmatrix_x4_trans(b, base + tile_offset<C>(row, piece));
#pragma unroll
      for (int m = 0; m < Config::kRowTiles; ++m) {
        ptx::mma_bf16(state[m].c[2 * n], x.a[m][j], b[0], b[1]);
        ptx::mma_bf16(state[m].c[2 * n + 1], x.a[m][j], b[2], b[3]);
      }
    }
  }
}

// The warp's row tile m, in units of 16 rows of the CTA's values.
template <class Config>
__device__ __forceinline__ int row_tile(int m) {
  return threadIdx.x / 32 * Config::kRowTiles + m;
}

// Shared address of the lane's row of the four 8x8 pieces that hold 16 tokens of 16 rows of V.
template <class Config>
__device__ __forceinline__ uint32_t values_address(bf16 const* tile, int token, int m) {
  int const lane = threadIdx.x & 31;
  int const row = token + (lane >> 4) * 8 + (lane & 7);
  int const piece = 2 * row_tile<Config>(m) + ((lane >> 3) & 1);
  return ptx::smem_address(tile) + tile_offset<Config::C>(row, piece);
}

// Rows past the end belong to another sequence and may be NaN: replaced, not scaled by 0.
__device__ __forceinline__ void clear_past_end(float2& low, float2& high, int token, int size) {
  if (token >= size) low.x = high.x = 0.f;
  if (token + 1 >= size) low.y = high.y = 0.f;
}

// What a state gets wrong of a value, of what is wanted, beta v, and of what it recalls, times E |k|. One
// rounding of the product, in every form of scan.
__device__ __forceinline__ float wrong(float wanted, float beta_key, float recalled) {
  return fmaf(-beta_key, recalled, wanted);
}

// x = beta v - beta_key x: from what the state recalls to what it gets wrong.
template <class Config>
__device__ __forceinline__ void residual(TokenColumns<Config>& x,
                                         bf16 const* values,
                                         Record<Config::C> const& record,
                                         int size) {
  int const lane = threadIdx.x & 31;
#pragma unroll
  for (int n = 0; n < Config::C / 16; ++n) {
#pragma unroll
    for (int m = 0; m < Config::kRowTiles; ++m) {
      uint32_t v[4];
      ptx::ldmatrix_x4_trans(v, values_address<Config>(values, 16 * n, m));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float (&r)[4] = x.c[m][2 * n + half];
        int const token = 16 * n + 8 * half + 2 * (lane % 4);
        float2 const beta = *reinterpret_cast<float2 const*>(&record.beta[token]);
        float2 const key = *reinterpret_cast<float2 const*>(&record.beta_key[token]);
        float2 low = ptx::unpack_bf16(v[2 * half]), high = ptx::unpack_bf16(v[2 * half + 1]);
        clear_past_end(low, high, token, size);
        r[0] = wrong(beta.x * low.x, key.x, r[0]);
        r[1] = wrong(beta.y * low.y, key.y, r[1]);
        r[2] = wrong(beta.x * high.x, key.x, r[2]);
        r[3] = wrong(beta.y * high.y, key.y, r[3]);
      }
    }
  }
}

// Scales the columns by a factor per token.
template <class Config>
__device__ __forceinline__ void scale_columns(TokenColumns<Config>& x, float const* factor) {
  int const lane = threadIdx.x & 31;
#pragma unroll
  for (int n = 0; n < Config::C / 8; ++n) {
    float2 const f = *reinterpret_cast<float2 const*>(&factor[8 * n + 2 * (lane % 4)]);
#pragma unroll
    for (int m = 0; m < Config::kRowTiles; ++m) {
      x.c[m][n][0] *= f.x;
      x.c[m][n][1] *= f.y;
      x.c[m][n][2] *= f.x;
      x.c[m][n][3] *= f.y;
    }
  }
}

template <class Config>
__device__ __forceinline__ void store_outputs(TokenOperand<Config> const& o, bf16* out) {
#pragma unroll
  for (int n = 0; n < Config::C / 16; ++n) {
#pragma unroll
    for (int m = 0; m < Config::kRowTiles; ++m) {
      ptx::stmatrix_x4_trans(values_address<Config>(out, 16 * n, m), o.a[m][n]);
    }
  }
}

}  // namespace flashkda::scan
