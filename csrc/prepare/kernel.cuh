// prepare: everything of one chunk that does not depend on the state. One CTA per slot and value
// head turns q, k, g, beta into a record. 128 threads; an element's thread is fixed, so operands
// may overwrite the raw tiles they came from.
#pragma once

#include "../device/checkpoint.cuh"
#include "../device/inverse.cuh"
#include "../device/sequence.cuh"
#include "../device/tma.cuh"

namespace flashkda {

template <class Arch, int C_, class GateT_>
struct PrepareConfig {
  static constexpr int C = C_;
  using GateT = GateT_;
  static constexpr int kThreads = 128;
  static constexpr int kBlock = Blocks<C>::kSize;
  // Four CTAs fill the shared memory of an SM (C = 32, bf16 gates; three with fp32 gates); their loads and
  // stores cover each other. Of the smaller one of sm_120, one takes more than half.
  static constexpr int kCtasPerSm = Arch::kSharedMemory < 227 * 1024 ? 1 : 4;
  // wgmma multiplies by whole squares of a record, mma.sync by their lower triangles of blocks.
  static constexpr bool kClearsAboveDiagonal = Arch::kHasWgmma;
};

template <class Config>
struct PrepareMaps {
  using GateT = typename Config::GateT;
  decltype(make_token_map<bf16, Config::C, kHeadDim>(cute::SM90_TMA_LOAD{}, {}, 0, 0)) q, k;
  decltype(make_token_map<GateT, Config::C, kHeadDim>(cute::SM90_TMA_LOAD{}, {}, 0, 0)) g;
};

// Keys of block 0 decayed to its end. At C = 32 they replace raw keys of block 0, whose k~ are rows of
// k_in; at C = 16 the clip makes k~ differ from k_in, so that place is taken.
template <int C>
struct BlockEnd {};
template <>
struct BlockEnd<16> {
  alignas(1024) bf16 keys[8 * kHeadDim];
};

template <class Config>
struct PrepareStorage {
  static constexpr int C = Config::C;
  // Written by TMA; then each thread replaces its elements by operands of the block products.
  alignas(1024) bf16 q[C * kHeadDim];                    // then q~: rows decayed from their block's start
  alignas(1024) bf16 k[C * kHeadDim];                    // then k~; at C = 32, block 0: see BlockEnd
  alignas(1024) typename Config::GateT g[C * kHeadDim];  // then k^: keys grown against the decay
  alignas(1024) Record<C> record;
  float block_log2[2][kHeadDim];  // log2 of the decay over each block
  float beta[C], inverse_q[C], inverse_k[C];
  uint32_t exchange[2][32][4];  // diagonal blocks of the inverse as MMA operands
  alignas(8) uint64_t raw_full;
  Chunk chunk;            // until the end, for which registers are too few
  bool keeps_half_chunk;  // there is a checkpoint in its middle
  [[no_unique_address]] BlockEnd<C> block_end;
};

namespace prepare {

// Two adjacent bf16 channels of a tile: 4 bytes.
template <int kRows>
__device__ __forceinline__ uint32_t& pair_at(bf16* tile, int row, int channel) {
  return *reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(tile) + tile_offset<kRows>(row, channel >> 3) +
                                      (channel & 7) * 2);
}

template <int C>
__device__ __forceinline__ float2 raw_gate(bf16* tile, int row, int channel) {
  return ptx::unpack_bf16(pair_at<C>(tile, row, channel));
}
// fp32 rows are four quarters of 32 channels, 128 bytes each.
template <int C>
__device__ __forceinline__ float2 raw_gate(float* tile, int row, int channel) {
  uint32_t const piece = (channel & 31) >> 2;
  uint32_t const offset =
      (channel >> 5) * (C * 128) + row * 128 + ((piece ^ (row & 7)) << 4) + (channel & 3) * 4;
  return *reinterpret_cast<float2*>(reinterpret_cast<char*>(tile) + offset);
}

// log2 decays of one thread's channel pair in its block's rows.
template <class Config, GateKind kKind>
__device__ __forceinline__ void log2_decays(float2 (&decay)[Config::kBlock],
                                            PrepareStorage<Config>& smem,
                                            ChunkFwdParams const& p,
                                            int head,
                                            int channel,
                                            int first_row) {
  Gate<kKind> const even(p, {p, head, channel}), odd(p, {p, head, channel + 1});
#pragma unroll
  for (int t = 0; t < Config::kBlock; ++t) {
    float2 const raw = raw_gate<Config::C>(smem.g, first_row + t, channel);
    decay[t].x = even.log2_decay(raw.x);
    decay[t].y = odd.log2_decay(raw.y);
  }
}

// 1 / |row| of 16 rows of a raw tile: the diagonal of X X^T on the tensor cores, exact products.
template <int C>
__device__ __forceinline__ void inverse_norms(
    float* result, bf16 const* tile, int first_row, int size, bool normalise) {
  int const lane = threadIdx.x & 31;
  float c[2][4] = {};
  uint32_t const base = ptx::smem_address(tile);
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    uint32_t a[4];
    ptx::ldmatrix_x4(a, base + tile_offset<C>(first_row + (lane & 15), 2 * step + (lane >> 4)));
    // The rows of X are the columns of X^T: the same registers serve as right operand.
    ptx::mma_bf16(c[0], a, a[0], a[2]);
    ptx::mma_bf16(c[1], a, a[1], a[3]);
  }
  // The diagonal: rows 0-7 in the first column tile, rows 8-15 in the second.
  int const row = lane / 4, column = 2 * (lane % 4);
  if (row == column || row == column + 1) {
    float const squares[2] = {row == column ? c[0][0] : c[0][1], row == column ? c[1][2] : c[1][3]};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const i = first_row + row + 8 * half;
      float const inverse = normalise ? rsqrtf(squares[half] + 1e-6f) : 1.f;
      result[i] = i < size ? inverse : 0.f;
    }
  }
}

// A tile and the number of rows it was laid out with.
template <int kRows>
struct Tile {
  bf16 const* data;
};

// c += rows [a_row, +16) of `a` times rows [b_row, +8 kTiles) of `b`, over the 128 channels.
template <int kTiles, int kRowsA, int kRowsB>
__device__ __forceinline__ void add_products(
    float (*c)[4], Tile<kRowsA> a_tile, int a_row, Tile<kRowsB> b_tile, int b_row) {
  int const lane = threadIdx.x & 31;
  uint32_t const a_base = ptx::smem_address(a_tile.data);
  uint32_t const b_base = ptx::smem_address(b_tile.data);
  int const b_lane_row = kTiles == 2 ? (lane & 7) + ((lane >> 4) << 3) : lane & 7;
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    uint32_t a[4], b[4];
    ptx::ldmatrix_x4(a, a_base + tile_offset<kRowsA>(a_row + (lane & 15), 2 * step + (lane >> 4)));
    ptx::ldmatrix_x4(b, b_base + tile_offset<kRowsB>(b_row + b_lane_row, 2 * step + ((lane >> 3) & 1)));
    ptx::mma_bf16(c[0], a, b[0], b[1]);
    if constexpr (kTiles == 2) ptx::mma_bf16(c[1], a, b[2], b[3]);
  }
}

// bf16 of two adjacent columns of a row, rounded up or down by thresholds that differ from row to row. Equal
// keys and step sizes make an entry of the inverse the same in every row: rounded to nearest, its error is
// the same for every token and adds up, 32-fold over a chunk; rounded so, it averages out.
__device__ __forceinline__ uint32_t pack_dithered(float low, float high, int row, int column) {
  auto const rounded = [&](float x, int j) {
    // Rows take thresholds in bit-reversed order, so that any few adjacent ones are spread out.
    uint32_t const threshold = ((__brev(row) >> 16) + j * 25033u) & 0xffffu;
    uint32_t const bits = __float_as_uint(x);
    return x == x ? bits + threshold : bits;  // a NaN must not wrap around
  };
  return __byte_perm(rounded(low, column), rounded(high, column + 1), 0x7632);
}

enum class Rounding { kNearest, kDithered };

// Writes a 16x16 block to rows i0.. and columns j0.. of a square record field.
template <int C, Rounding kRounding = Rounding::kNearest>
__device__ __forceinline__ void store_square(bf16* field, Square16 const& x, int i0, int j0) {
  int const lane = threadIdx.x & 31;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const i = i0 + Square16::row(lane, 2 * half), j = j0 + Square16::column(lane, n, 0);
      uint32_t const offset = square_offset<C>(i, j >> 3) + (j & 7) * 2;
      float const low = x.c[n][2 * half], high = x.c[n][2 * half + 1];
      *reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(field) + offset) =
          kRounding == Rounding::kDithered ? pack_dithered(low, high, i, j) : ptx::pack_bf16(low, high);
    }
  }
}

// The block's key products to entries of A: strictly lower (diagonal blocks), scaled by row and
// column. `kept` is selected, not multiplied: masked entries may be infinite.
template <bool kDiagonal>
__device__ __forceinline__ void scale_keys(
    Square16& x, float const* beta, float const* inverse_k, int i0, int j0, float factor) {
  int const lane = threadIdx.x & 31;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      int const i = i0 + Square16::row(lane, r), j = j0 + Square16::column(lane, n, r);
      float const scale = factor * beta[i] * inverse_k[i] * inverse_k[j];
      x.c[n][r] = !kDiagonal || i > j ? scale * x.c[n][r] : 0.f;
    }
  }
}

__device__ __forceinline__ void mask_scores(Square16& x, float factor) {
  int const lane = threadIdx.x & 31;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      bool const kept = Square16::row(lane, r) >= Square16::column(lane, n, r);
      x.c[n][r] = kept ? factor * x.c[n][r] : 0.f;
    }
  }
}

__device__ __forceinline__ void subtract_identity(Square16& x) {
  int const lane = threadIdx.x & 31;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      if (Square16::row(lane, r) == Square16::column(lane, n, r)) x.c[n][r] -= 1.f;
    }
  }
}

// Rows past the end belong to another sequence and may be NaN: replaced, not scaled by 0.
template <class Config>
__device__ __forceinline__ void clear_rows(PrepareStorage<Config>& smem, int size) {
  constexpr int kPieces = kHeadDim / 8;
  for (int i = size * kPieces + threadIdx.x; i < Config::C * kPieces; i += Config::kThreads) {
    uint32_t const offset = tile_offset<Config::C>(i / kPieces, i % kPieces);
    *reinterpret_cast<int4*>(reinterpret_cast<char*>(smem.q) + offset) = {};
    *reinterpret_cast<int4*>(reinterpret_cast<char*>(smem.k) + offset) = {};
  }
  __syncthreads();  // before whole rows are read
}

// Raw rows to operands, in place. A thread owns two channels of one block's rows.
template <class Config>
__device__ __forceinline__ void make_operands(PrepareStorage<Config>& smem,
                                              ChunkFwdParams const& p,
                                              int head,
                                              int size) {
  constexpr int C = Config::C, kBlock = Config::kBlock;
  using B = Blocks<C>;
  int const warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  int const block = warp / 2, channel = (warp & 1) * 64 + 2 * lane, first_row = block * kBlock;

  float2 decay[kBlock];  // log2, then the factor itself
  switch (p.gate) {
    case GateKind::kLogDecay:
      log2_decays<Config, GateKind::kLogDecay>(decay, smem, p, head, channel, first_row);
      break;
    case GateKind::kSoftplus:
      log2_decays<Config, GateKind::kSoftplus>(decay, smem, p, head, channel, first_row);
      break;
    case GateKind::kBounded:
      log2_decays<Config, GateKind::kBounded>(decay, smem, p, head, channel, first_row);
      break;
  }
  if (size < C) {
#pragma unroll
    for (int t = 0; t < kBlock; ++t) {
      if (first_row + t >= size) decay[t] = {0.f, 0.f};
    }
  }
  float2 clipped[B::kClips ? kBlock : 1];  // decays of the diagonal blocks
  float2 sum = {0.f, 0.f};
#pragma unroll
  for (int t = 0; t < kBlock; ++t) {
    sum.x += decay[t].x;
    sum.y += decay[t].y;
    if constexpr (B::kClips) {
      clipped[t].x = ptx::ex2(fmaxf(decay[t].x, -B::kClip * kLog2E));
      clipped[t].y = ptx::ex2(fmaxf(decay[t].y, -B::kClip * kLog2E));
    }
    decay[t].x = ptx::ex2(decay[t].x);
    decay[t].y = ptx::ex2(decay[t].y);
  }
  *reinterpret_cast<float2*>(&smem.block_log2[block][channel]) = sum;
  __syncthreads();  // the sums are there; g and whole rows of q, k have been read

  float2 const other = *reinterpret_cast<float2*>(&smem.block_log2[1 - block][channel]);
  float2 const across = {ptx::ex2(other.x), ptx::ex2(other.y)};  // decay over the other block
  float2 const one = {1.f, 1.f};
  float2 const before = block == 0 ? one : across;
  if (block == 0) {
    *reinterpret_cast<float2*>(&smem.record.decay[channel]) = {ptx::ex2(sum.x + other.x),
                                                               ptx::ex2(sum.y + other.y)};
  }

  uint32_t keys[kBlock];
  float2 prefix = {kBalance, kBalance}, clipped_prefix = {B::kBlockBalance, B::kBlockBalance};
#pragma unroll
  for (int t = 0; t < kBlock; ++t) {
    int const row = first_row + t;
    float2 const q = ptx::unpack_bf16(pair_at<C>(smem.q, row, channel));
    keys[t] = pair_at<C>(smem.k, row, channel);
    float2 const k = ptx::unpack_bf16(keys[t]);
    prefix.x *= decay[t].x;
    prefix.y *= decay[t].y;
    float2 const from_start = {prefix.x * before.x, prefix.y * before.y};
    pair_at<C>(smem.record.q_in, row, channel) = ptx::pack_bf16(q.x * from_start.x, q.y * from_start.y);
    pair_at<C>(smem.record.k_in, row, channel) = ptx::pack_bf16(k.x * from_start.x, k.y * from_start.y);
    if constexpr (B::kClips) {
      clipped_prefix.x *= clipped[t].x;
      clipped_prefix.y *= clipped[t].y;
    } else {
      clipped_prefix = prefix;
    }
    if (B::kClips || block == 1) {
      pair_at<C>(smem.q, row, channel) = ptx::pack_bf16(q.x * clipped_prefix.x, q.y * clipped_prefix.y);
      pair_at<C>(smem.k, row, channel) = ptx::pack_bf16(k.x * clipped_prefix.x, k.y * clipped_prefix.y);
    }
  }

  // Read anew: `across` would not stay in a register.
  float2 const next = *reinterpret_cast<float2*>(&smem.block_log2[1][channel]);
  float2 const after = block == 0 ? float2{ptx::ex2(next.x), ptx::ex2(next.y)} : one;
  float2 suffix = one;
  float2 growth = {ptx::rcp(clipped_prefix.x), ptx::rcp(clipped_prefix.y)};  // 1 / (E e^l)
  bf16* const grown = reinterpret_cast<bf16*>(smem.g);
#pragma unroll
  for (int t = kBlock - 1; t >= 0; --t) {
    int const row = first_row + t;
    float2 const k = ptx::unpack_bf16(keys[t]);
    pair_at<C>(grown, row, channel) = ptx::pack_bf16(k.x * growth.x, k.y * growth.y);
    float2 const to_end = {k.x * suffix.x, k.y * suffix.y};
    if (block == 0) {
      uint32_t const packed = ptx::pack_bf16(to_end.x, to_end.y);
      if constexpr (B::kClips) {
        pair_at<kBlock>(smem.block_end.keys, row, channel) = packed;
      } else {
        pair_at<C>(smem.k, row, channel) = packed;
      }
    }
    pair_at<C>(smem.record.k_out, row, channel) = ptx::pack_bf16(to_end.x * after.x, to_end.y * after.y);
    suffix.x *= decay[t].x;
    suffix.y *= decay[t].y;
    float2 const step = B::kClips ? clipped[B::kClips ? t : 0] : decay[t];
    growth.x *= step.x;
    growth.y *= step.y;
  }
}

// C x C products, the inverse and the record's square fields, two blocks of 16 tokens.
template <class Config>
  requires(Config::C == 32)
__device__ __forceinline__ void make_squares(PrepareStorage<Config>& smem) {
  using T32 = Tile<32>;
  T32 const q_in{smem.record.q_in}, k_in{smem.record.k_in}, q_block{smem.q}, k_block{smem.k};
  T32 const grown{reinterpret_cast<bf16 const*>(smem.g)};
  int const warp = threadIdx.x / 32, lane = threadIdx.x & 31;

  Square16 x = {};
  if (warp == 0 || warp == 1) {
    int const row = 16 * warp;
    add_products<2>(x.c, warp == 0 ? k_in : k_block, row, grown, row);
    scale_keys<true>(x, smem.beta, smem.inverse_k, row, row, 1.f);
    x = unit_lower_inverse(x);
    if (warp == 0) {
      right_operand(*reinterpret_cast<uint32_t (*)[2][2]>(smem.exchange[0][lane]), x);
    } else {
      left_operand(smem.exchange[1][lane], x);
    }
  } else if (warp == 2) {
    Square16 scores = {};
    add_products<2>(scores.c, q_block, 16, k_block, 0);
    store_square<32>(smem.record.scores, scores, 16, 0);
    add_products<2>(x.c, k_block, 16, k_block, 0);
    scale_keys<false>(x, smem.beta, smem.inverse_k, 16, 0, 1.f / Blocks<32>::kBlockBalance);
  } else {
    add_products<2>(x.c, q_in, 0, grown, 0);
    mask_scores(x, kBalance);
    store_square<32>(smem.record.scores, x, 0, 0);
    x = {};
    add_products<2>(x.c, q_block, 16, grown, 16);
    mask_scores(x, kBalance);
    store_square<32>(smem.record.scores, x, 16, 16);
  }
  __syncthreads();  // the inverses of both diagonal blocks are there
  if (warp <= 1) {
    subtract_identity(x);
    store_square<32, Rounding::kDithered>(smem.record.inverse, x, 16 * warp, 16 * warp);
  } else if (warp == 2) {
    // The block below the diagonal: -T11 A10 T00.
    uint32_t a[4], b[2][2];
    right_operand(b, x);
    Square16 product = {};
    multiply_add(product, smem.exchange[1][lane], b);
    left_operand(a, product, -1.f);
    Square16 below = {};
    multiply_add(below, a, *reinterpret_cast<uint32_t const(*)[2][2]>(smem.exchange[0][lane]));
    store_square<32, Rounding::kDithered>(smem.record.inverse, below, 16, 0);
  } else if constexpr (Config::kClearsAboveDiagonal) {
    store_square<32>(smem.record.inverse, Square16{}, 0, 16);
    store_square<32>(smem.record.scores, Square16{}, 0, 16);
  }
}

// The same for one block of 16 tokens, its own two blocks of 8 meeting inside the MMA tiles.
template <class Config>
  requires(Config::C == 16)
__device__ __forceinline__ void make_squares(PrepareStorage<Config>& smem) {
  constexpr float kAcross = 1.f / Blocks<16>::kBlockBalance;
  int const warp = threadIdx.x / 32;
  if (warp >= 2) return;
  Tile<16> const rows{warp == 0 ? smem.k : smem.q};
  Tile<16> const grown{reinterpret_cast<bf16 const*>(smem.g)};
  Square16 x = {};
  float below[1][4] = {};
  add_products<2>(x.c, rows, 0, grown, 0);
  add_products<1>(below, rows, 0, Tile<8>{smem.block_end.keys}, 0);
  // Second-block rows meet first-block columns at the boundary; these carry E, the diagonal none.
  x.c[0][2] = kAcross * below[0][2];
  x.c[0][3] = kAcross * below[0][3];
  if (warp == 0) {
    scale_keys<true>(x, smem.beta, smem.inverse_k, 0, 0, 1.f);
    Square16 T = unit_lower_inverse(x);
    subtract_identity(T);
    store_square<16, Rounding::kDithered>(smem.record.inverse, T, 0, 0);
  } else {
    mask_scores(x, kBalance);
    store_square<16>(smem.record.scores, x, 0, 0);
  }
}

// For checkpoints in the middle of the chunk: its first half as a chunk of its own, to the bit what a
// sequence that ends there has. A thread takes a channel.
template <class Config>
__device__ __forceinline__ void keep_half_chunk(PrepareStorage<Config>& smem,
                                                ChunkFwdParams const& p,
                                                Chunk const& chunk,
                                                int head) {
  int const middle = chunk.offset + 16, channel = threadIdx.x;
  auto const* keys = reinterpret_cast<char const*>(smem.k);
  auto const key = [&](int row) -> uint32_t {
    return *reinterpret_cast<uint16_t const*>(keys + tile_offset<32>(row, channel >> 3) + (channel & 7) * 2);
  };
  for_checkpoints(p.checkpoints, chunk.seq, middle, [&](int column, int64_t) {
    HalfChunk* const to = half_chunk(p, chunk.seq, column, head);
#pragma unroll
    for (int i = 0; i < 8; ++i) to->k_out[channel][i] = key(2 * i) | key(2 * i + 1) << 16;
    to->decay[channel] = ptx::ex2(smem.block_log2[0][channel]);
  });
}

}  // namespace prepare

// Its name tells how much dynamic shared memory it takes: ci/check_wheel.py reads it there.
template <class Config, size_t kSharedBytes = sizeof(PrepareStorage<Config>)>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    prepare_kernel(__grid_constant__ ChunkFwdParams const p,
                   __grid_constant__ PrepareMaps<Config> const maps) {
  using namespace prepare;
  constexpr int C = Config::C;
  extern __shared__ __align__(1024) char raw_storage[];
  auto& smem = *reinterpret_cast<PrepareStorage<Config>*>(raw_storage);

  ptx::launch_dependents();  // scan waits for this whole grid before it reads a record
  int64_t const slot = blockIdx.x;
  int const head = blockIdx.y, qk_head = head / (p.value_heads / p.num_heads);
  Chunk const chunk = chunk_of_slot<C>(p, slot);
  if (chunk.size <= 0) return;

  int const warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    smem.chunk = chunk;
    Barrier::init(&smem.raw_full, 1);
    cutlass::arch::fence_barrier_init();
    Barrier::arrive_and_expect_tx(&smem.raw_full, sizeof(smem.q) + sizeof(smem.k) + sizeof(smem.g));
    load_tile<bf16, C, kHeadDim>(
        maps.q, token_tile<C, kHeadDim>(maps.q, p.num_tokens, p.num_heads, chunk.token, 0, qk_head), smem.q,
        &smem.raw_full);
    load_tile<bf16, C, kHeadDim>(
        maps.k, token_tile<C, kHeadDim>(maps.k, p.num_tokens, p.num_heads, chunk.token, 0, qk_head), smem.k,
        &smem.raw_full);
    load_tile<typename Config::GateT, C, kHeadDim>(
        maps.g, token_tile<C, kHeadDim>(maps.g, p.num_tokens, p.value_heads, chunk.token, 0, head), smem.g,
        &smem.raw_full);
  }
  if (threadIdx.x < C) {
    int const i = threadIdx.x;
    smem.beta[i] = i < chunk.size ? step_size(p, chunk.token + i, head) : 0.f;
  }
  // Asked while the copies are on their way.
  if (C == 32 && p.half_chunks != nullptr && warp == 1) {
    int const middle = chunk.offset + 16;
    bool const keeps = chunk.size > 16 && next_checkpoint(p.checkpoints, chunk.seq, middle - 1) == middle;
    if (threadIdx.x % 32 == 0) smem.keeps_half_chunk = keeps;
  }
  __syncthreads();  // the barrier is initialised
  Barrier::wait(&smem.raw_full, 0);
  if (chunk.size < C) clear_rows<Config>(smem, chunk.size);

  if (warp < C / 8) {  // one warp for 16 rows of q or of k
    bool const keys = (warp & 1) != 0;
    inverse_norms<C>(keys ? smem.inverse_k : smem.inverse_q, keys ? smem.k : smem.q, 16 * (warp / 2),
                     chunk.size, p.l2norm);
  }
  make_operands<Config>(smem, p, head, chunk.size);
  if (threadIdx.x < C) {
    int const i = threadIdx.x;
    constexpr float kInverseBalance = 1.f / kBalance;
    smem.record.beta[i] = smem.beta[i];
    smem.record.beta_key[i] = smem.beta[i] * smem.inverse_k[i] * kInverseBalance;
    smem.record.inverse_key[i] = smem.inverse_k[i];
    smem.record.output[i] = p.scale * smem.inverse_q[i] * kInverseBalance;
  }
  ptx::fence_proxy_async();
  __syncthreads();  // operands are there
  // The tiles are on their way while the squares are made. The last warp has the least to do.
  bool const stores = threadIdx.x == Config::kThreads - 32;
  int64_t const index = head * num_slots<C>(p.num_tokens, p.num_seqs) + slot;
  auto* const to = reinterpret_cast<char*>(static_cast<Record<C>*>(p.workspace) + index);
  constexpr uint32_t kTiles = offsetof(Record<C>, inverse);
  if (stores) {
    ptx::bulk_store(to, ptx::smem_address(&smem.record), kTiles);
    cute::tma_store_arrive();
  }
  if constexpr (C == 32) {
    if (p.half_chunks != nullptr && smem.keeps_half_chunk) keep_half_chunk<Config>(smem, p, smem.chunk, head);
  }
  make_squares<Config>(smem);
  ptx::fence_proxy_async();
  __syncthreads();  // the record is complete

  if (stores) {
    ptx::bulk_store(to + kTiles, ptx::smem_address(&smem.record.inverse), sizeof(Record<C>) - kTiles);
    cute::tma_store_arrive();
    cute::tma_store_wait<0>();  // shared memory must outlive the copies
  }
}

}  // namespace flashkda
