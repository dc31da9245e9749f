// The work of prepare on one chunk, by 128 threads; an element's thread is fixed, so operands may overwrite
// the raw tiles they came from.
#pragma once

#include "../device/checkpoint.cuh"
#include "../device/inverse.cuh"
#include "../device/sequence.cuh"

namespace flashkda {

// Written by TMA; then each thread replaces its elements by operands of the block products.
template <int C, class GateT>
struct RawTiles {
  alignas(1024) bf16 q[C * kHeadDim];   // then q~: rows decayed from their block's start
  alignas(1024) bf16 k[C * kHeadDim];   // then k~
  alignas(1024) GateT g[C * kHeadDim];  // then k^: keys grown against the decay
};

// Keys of block 0 decayed to its end, for the products of block 1 with block 0. At C = 32 rows of q_in, k_in
// meet those of k^ instead: what leaves the range of bf16 then is below 2^-60 of the rest.
template <int C>
struct BlockEnd {};
template <>
struct BlockEnd<16> {
  alignas(1024) bf16 keys[8 * kHeadDim];
};

template <int C>
struct PrepareScratch {
  [[no_unique_address]] BlockEnd<C> block_end;
  float block_log2[2][kHeadDim];  // log2 of the decay over each block
  float beta[C], inverse_q[C], inverse_k[C];
  uint32_t exchange[2][32][4];  // diagonal blocks of the inverse as MMA operands
};

// Where the 128 threads of a Config work.
template <class Config>
struct ChunkMemory {
  RawTiles<Config::C, typename Config::GateT>& raw;
  Record<Config::C>& record;
  PrepareScratch<Config::C>& scratch;
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
                                            ChunkMemory<Config> const& m,
                                            ChunkFwdParams const& p,
                                            int head,
                                            int channel,
                                            int first_row) {
  Gate<kKind> const even(p, {p, head, channel}), odd(p, {p, head, channel + 1});
#pragma unroll
  for (int t = 0; t < Config::kBlock; ++t) {
    float2 const raw = raw_gate<Config::C>(m.raw.g, first_row + t, channel);
    decay[t].x = even.log2_decay(raw.x);
    decay[t].y = odd.log2_decay(raw.y);
  }
}

// 1 / |row| of 16 rows of a raw tile: the diagonal of X X^T on the tensor cores, exact products.
template <int C>
__device__ __forceinline__ void inverse_norms(
    float* result, bf16 const* tile, int first_row, int size, bool normalise) {
  int const lane = ptx::thread_anew() & 31;
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
  int const lane = ptx::thread_anew() & 31;
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
  int const lane = ptx::thread_anew() & 31;  // else what depends on it stays in registers
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
    Square16& x, float const* beta, float const* inverse_k, int i0, int j0) {
  int const lane = ptx::thread_anew() & 31;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      int const i = i0 + Square16::row(lane, r), j = j0 + Square16::column(lane, n, r);
      float const scale = beta[i] * inverse_k[i] * inverse_k[j];
      x.c[n][r] = !kDiagonal || i > j ? scale * x.c[n][r] : 0.f;
    }
  }
}

__device__ __forceinline__ void mask_scores(Square16& x, float factor) {
  int const lane = ptx::thread_anew() & 31;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      bool const kept = Square16::row(lane, r) >= Square16::column(lane, n, r);
      x.c[n][r] = kept ? factor * x.c[n][r] : 0.f;
    }
  }
}

__device__ __forceinline__ void scale(Square16& x, float factor) {
#pragma unroll
  for (auto& tile : x.c) {
#pragma unroll
    for (float& entry : tile) entry *= factor;
  }
}

__device__ __forceinline__ void subtract_identity(Square16& x) {
  int const lane = ptx::thread_anew() & 31;
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
__device__ __forceinline__ void clear_rows(ChunkMemory<Config> const& m, int size) {
  constexpr int kPieces = kHeadDim / 8;
  for (int i = size * kPieces + Config::thread(); i < Config::C * kPieces; i += Config::kThreads) {
    uint32_t const offset = tile_offset<Config::C>(i / kPieces, i % kPieces);
    *reinterpret_cast<int4*>(reinterpret_cast<char*>(m.raw.q) + offset) = {};
    *reinterpret_cast<int4*>(reinterpret_cast<char*>(m.raw.k) + offset) = {};
  }
  Config::sync();  // before whole rows are read
}

// Raw rows of one block to operands, in place, two channels of them.
template <class Config, bool kSecond>
__device__ __forceinline__ void make_rows(
    ChunkMemory<Config> const& m,
    float2 const (&decay)[Config::kBlock],
    float2 const (&clipped)[Blocks<Config::C>::kClips ? Config::kBlock : 1],
    float2 across,
    int channel) {
  constexpr int C = Config::C, kBlock = Config::kBlock, kFirst = kSecond ? kBlock : 0;
  using B = Blocks<C>;
  // Rows of block 0 at C = 32 have q~ = q_in, k~ = k_in. Otherwise k~ replace raw keys, and k_out keeps those
  // until it takes its own.
  constexpr bool kMoves = B::kClips || kSecond;
  float2 prefix = {kBalance, kBalance}, clipped_prefix = {B::kBlockBalance, B::kBlockBalance};
#pragma unroll
  for (int t = 0; t < kBlock; ++t) {
    int const row = kFirst + t;
    uint32_t const key = pair_at<C>(m.raw.k, row, channel);
    float2 const q = ptx::unpack_bf16(pair_at<C>(m.raw.q, row, channel)), k = ptx::unpack_bf16(key);
    prefix.x *= decay[t].x;
    prefix.y *= decay[t].y;
    float2 from_start = prefix;
    if constexpr (kSecond) from_start = {prefix.x * across.x, prefix.y * across.y};
    pair_at<C>(m.record.q_in, row, channel) = ptx::pack_bf16(q.x * from_start.x, q.y * from_start.y);
    pair_at<C>(m.record.k_in, row, channel) = ptx::pack_bf16(k.x * from_start.x, k.y * from_start.y);
    if constexpr (B::kClips) {
      clipped_prefix.x *= clipped[t].x;
      clipped_prefix.y *= clipped[t].y;
    } else {
      clipped_prefix = prefix;
    }
    if constexpr (kMoves) {
      pair_at<C>(m.record.k_out, row, channel) = key;
      pair_at<C>(m.raw.q, row, channel) = ptx::pack_bf16(q.x * clipped_prefix.x, q.y * clipped_prefix.y);
      pair_at<C>(m.raw.k, row, channel) = ptx::pack_bf16(k.x * clipped_prefix.x, k.y * clipped_prefix.y);
    }
  }

  float2 suffix = {1.f, 1.f};
  float2 growth = {ptx::rcp(clipped_prefix.x), ptx::rcp(clipped_prefix.y)};  // 1 / (E e^l)
  bf16* const grown = reinterpret_cast<bf16*>(m.raw.g);
#pragma unroll
  for (int t = kBlock - 1; t >= 0; --t) {
    int const row = kFirst + t;
    float2 const k = ptx::unpack_bf16(pair_at<C>(kMoves ? m.record.k_out : m.raw.k, row, channel));
    pair_at<C>(grown, row, channel) = ptx::pack_bf16(k.x * growth.x, k.y * growth.y);
    float2 to_end = {k.x * suffix.x, k.y * suffix.y};
    if constexpr (!kSecond) {
      uint32_t const packed = ptx::pack_bf16(to_end.x, to_end.y);
      if constexpr (B::kClips) {
        pair_at<kBlock>(m.scratch.block_end.keys, row, channel) = packed;
      } else if constexpr (Config::kKeepsHalf) {
        pair_at<C>(m.raw.k, row, channel) = packed;
      }
      to_end = {to_end.x * across.x, to_end.y * across.y};
    }
    pair_at<C>(m.record.k_out, row, channel) = ptx::pack_bf16(to_end.x, to_end.y);
    suffix.x *= decay[t].x;
    suffix.y *= decay[t].y;
    float2 const step = B::kClips ? clipped[B::kClips ? t : 0] : decay[t];
    growth.x *= step.x;
    growth.y *= step.y;
  }
}

// Raw rows to operands. A thread owns two channels of one block's rows. `await_record` returns once the
// record may be written.
template <class Config, class Function>
__device__ __forceinline__ void make_operands(
    ChunkMemory<Config> const& m, ChunkFwdParams const& p, int head, int size, Function const& await_record) {
  constexpr int C = Config::C, kBlock = Config::kBlock;
  using B = Blocks<C>;
  int const thread = Config::thread(), warp = thread / 32, lane = thread % 32;
  int const block = warp / 2, channel = (warp & 1) * 64 + 2 * lane, first_row = block * kBlock;

  float2 decay[kBlock];  // log2, then the factor itself
  if (p.gate == GateKind::kLogDecay) {
    log2_decays<Config, GateKind::kLogDecay>(decay, m, p, head, channel, first_row);
  } else if (C == 32 || p.gate == GateKind::kBounded) {  // softplus has no bound
    log2_decays<Config, GateKind::kBounded>(decay, m, p, head, channel, first_row);
  } else {
    log2_decays<Config, GateKind::kSoftplus>(decay, m, p, head, channel, first_row);
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
  *reinterpret_cast<float2*>(&m.scratch.block_log2[block][channel]) = sum;
  Config::sync();  // the sums are there; g and whole rows of q, k have been read
  await_record();

  float2 const other = *reinterpret_cast<float2*>(&m.scratch.block_log2[1 - block][channel]);
  float2 const across = {ptx::ex2(other.x), ptx::ex2(other.y)};  // decay over the other block
  if (block == 0) {
    *reinterpret_cast<float2*>(&m.record.decay[channel]) = {ptx::ex2(sum.x + other.x),
                                                            ptx::ex2(sum.y + other.y)};
    make_rows<Config, false>(m, decay, clipped, across, channel);
  } else {
    make_rows<Config, true>(m, decay, clipped, across, channel);
  }
}

// All of the record but its squares, from raw tiles and beta. Others see it after a sync.
template <class Config, class Function>
__device__ __forceinline__ void make_tiles(
    ChunkMemory<Config> const& m, ChunkFwdParams const& p, int head, int size, Function const& await_record) {
  constexpr int C = Config::C;
  if (size < C) clear_rows<Config>(m, size);
  int const warp = Config::thread() / 32;
  if (warp < C / 8) {  // one warp for 16 rows of q or of k
    bool const keys = (warp & 1) != 0;
    inverse_norms<C>(keys ? m.scratch.inverse_k : m.scratch.inverse_q, keys ? m.raw.k : m.raw.q,
                     16 * (warp / 2), size, p.l2norm);
  }
  make_operands<Config>(m, p, head, size, await_record);
  if (Config::thread() < C) {
    int const i = Config::thread();
    constexpr float kInverseBalance = 1.f / kBalance;
    m.record.beta[i] = m.scratch.beta[i];
    m.record.beta_key[i] = m.scratch.beta[i] * m.scratch.inverse_k[i] * kInverseBalance;
    m.record.inverse_key[i] = m.scratch.inverse_k[i];
    m.record.output[i] = p.scale * m.scratch.inverse_q[i] * kInverseBalance;
  }
}

// C x C products, the inverse and the record's square fields, two blocks of 16 tokens.
template <class Config>
  requires(Config::C == 32)
__device__ __forceinline__ void make_squares(ChunkMemory<Config> const& m) {
  using T32 = Tile<32>;
  T32 const q_in{m.record.q_in}, k_in{m.record.k_in}, q_block{m.raw.q}, k_block{m.raw.k};
  T32 const grown{reinterpret_cast<bf16 const*>(m.raw.g)};
  int const thread = Config::thread(), warp = thread / 32, lane = thread % 32;

  Square16 x = {};
  if (warp == 0 || warp == 1) {
    int const row = 16 * warp;
    add_products<2>(x.c, warp == 0 ? k_in : k_block, row, grown, row);
    scale_keys<true>(x, m.scratch.beta, m.scratch.inverse_k, row, row);
    x = unit_lower_inverse(x);
    if (warp == 0) {
      right_operand(*reinterpret_cast<uint32_t (*)[2][2]>(m.scratch.exchange[0][lane]), x);
    } else {
      left_operand(m.scratch.exchange[1][lane], x);
    }
  } else if (warp == 2) {
    Square16 scores = {};
    add_products<2>(scores.c, q_in, 16, grown, 0);
    scale(scores, kBalance);
    store_square<32>(m.record.scores, scores, 16, 0);
    add_products<2>(x.c, k_in, 16, grown, 0);
    scale_keys<false>(x, m.scratch.beta, m.scratch.inverse_k, 16, 0);
  } else {
    add_products<2>(x.c, q_in, 0, grown, 0);
    mask_scores(x, kBalance);
    store_square<32>(m.record.scores, x, 0, 0);
    x = {};
    add_products<2>(x.c, q_block, 16, grown, 16);
    mask_scores(x, kBalance);
    store_square<32>(m.record.scores, x, 16, 16);
  }
  Config::sync();  // the inverses of both diagonal blocks are there
  if (warp <= 1) {
    subtract_identity(x);
    store_square<32, Rounding::kDithered>(m.record.inverse, x, 16 * warp, 16 * warp);
  } else if (warp == 2) {
    // The block below the diagonal: -T11 A10 T00.
    uint32_t a[4], b[2][2];
    right_operand(b, x);
    Square16 product = {};
    multiply_add(product, m.scratch.exchange[1][lane], b);
    left_operand(a, product, -1.f);
    Square16 below = {};
    multiply_add(below, a, *reinterpret_cast<uint32_t const(*)[2][2]>(m.scratch.exchange[0][lane]));
    store_square<32, Rounding::kDithered>(m.record.inverse, below, 16, 0);
  }
}

// The same for one block of 16 tokens, its own two blocks of 8 meeting inside the MMA tiles.
template <class Config>
  requires(Config::C == 16)
__device__ __forceinline__ void make_squares(ChunkMemory<Config> const& m) {
  constexpr float kAcross = 1.f / Blocks<16>::kBlockBalance;
  int const warp = Config::thread() / 32;
  if (warp >= 2) return;
  Tile<16> const rows{warp == 0 ? m.raw.k : m.raw.q};
  Tile<16> const grown{reinterpret_cast<bf16 const*>(m.raw.g)};
  Square16 x = {};
  float below[1][4] = {};
  add_products<2>(x.c, rows, 0, grown, 0);
  add_products<1>(below, rows, 0, Tile<8>{m.scratch.block_end.keys}, 0);
  // Second-block rows meet first-block columns at the boundary; these carry E, the diagonal none.
  x.c[0][2] = kAcross * below[0][2];
  x.c[0][3] = kAcross * below[0][3];
  if (warp == 0) {
    scale_keys<true>(x, m.scratch.beta, m.scratch.inverse_k, 0, 0);
    Square16 T = unit_lower_inverse(x);
    subtract_identity(T);
    store_square<16, Rounding::kDithered>(m.record.inverse, T, 0, 0);
  } else {
    mask_scores(x, kBalance);
    store_square<16>(m.record.scores, x, 0, 0);
  }
}

// For checkpoints in the middle of the chunk: its first half as a chunk of its own, to the bit what a
// sequence that ends there has. A thread takes a channel. Raw keys of the half have become keys decayed to
// its end.
template <class Config>
  requires(Config::kKeepsHalf)
__device__ __forceinline__ void keep_half_chunk(ChunkMemory<Config> const& m,
                                                ChunkFwdParams const& p,
                                                Chunk const& chunk,
                                                int head) {
  int const middle = chunk.offset + 16, channel = Config::thread();
  auto const* keys = reinterpret_cast<char const*>(m.raw.k);
  auto const key = [&](int row) -> uint32_t {
    return *reinterpret_cast<uint16_t const*>(keys + tile_offset<32>(row, channel >> 3) + (channel & 7) * 2);
  };
  for_checkpoints(p.checkpoints, chunk.seq, middle, [&](int column, int64_t) {
    HalfChunk* const to = half_chunk(p, chunk.seq, column, head);
#pragma unroll
    for (int i = 0; i < 8; ++i) to->k_out[channel][i] = key(2 * i) | key(2 * i + 1) << 16;
    to->decay[channel] = ptx::ex2(m.scratch.block_log2[0][channel]);
  });
}

}  // namespace prepare

}  // namespace flashkda
