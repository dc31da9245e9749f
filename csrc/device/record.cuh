// What prepare hands to scan: one record per chunk and value head, stored and loaded as one block
// of bytes, in the image that scan reads from shared memory.
#pragma once

#include <cutlass/bfloat16.h>

#include <cstdint>

#include "../params.h"

namespace flashkda {

using bf16 = cutlass::bfloat16_t;

// E: factor of the prefix operands of a record, which rows of raw queries and keys would underflow without.
constexpr float kBalance = 0x1p58f;

// Byte offset of a 16-byte piece in a [rows, 128] bf16 tile: two halves of 64 channels, a row of a
// half is 128 bytes, its eight pieces permuted by the row (SWIZZLE_128B). Base 1024-byte aligned.
template <int kRows>
CUTLASS_HOST_DEVICE constexpr uint32_t tile_offset(uint32_t row, uint32_t piece) {
  return (piece >> 3) * (kRows * 128) + row * 128 + (((piece & 7) ^ (row & 7)) << 4);
}

// The same in a square [kRows, kRows] bf16 tile whose rows have 64 or 32 bytes, so that the eight
// rows of an ldmatrix fall into different banks.
template <int kRows>
CUTLASS_HOST_DEVICE constexpr uint32_t square_offset(uint32_t row, uint32_t piece) {
  static_assert(kRows == 16 || kRows == 32);
  return kRows == 32 ? row * 64 + ((piece ^ ((row >> 1) & 3)) << 4)
                     : row * 32 + ((piece ^ ((row >> 2) & 1)) << 4);
}

template <int C>
struct alignas(128) Record {
  static constexpr int kChunk = C;
  bf16 k_in[C * kHeadDim];   // E k exp(G), rows of tile_offset
  bf16 q_in[C * kHeadDim];   // E q exp(G)
  bf16 k_out[C * kHeadDim];  // k exp(G_C - G)
  bf16 inverse[C * C];       // T - I, rows of square_offset
  bf16 scores[C * C];        // E q k exp(G_i - G_j), lower triangle with diagonal
  float decay[kHeadDim];     // exp(G_C)
  // Per token, E is kBalance; beta is 0 past the end of a sequence.
  float beta[C];
  float beta_key[C];     // beta / (|k| E): turns E K_in S into beta times the recalled value
  float inverse_key[C];  // 1 / |k|
  float output[C];       // scale / (|q| E)
};
static_assert(sizeof(Record<32>) % 128 == 0 && sizeof(Record<16>) % 128 == 0);
// get_workspace_size() in flashkda/_fwd.py knows them too.
static_assert(sizeof(Record<32>) == 29696 && sizeof(Record<16>) == 14080);

// Chunks of sequence n live in slots first_slot(cu_seqlens[n], n), ...: without a prefix sum over the
// sequences, at the price of at most one unused slot per sequence.
template <int C>
CUTLASS_HOST_DEVICE constexpr int64_t first_slot(int64_t start, int64_t seq) {
  return start / C + seq;
}
template <int C>
constexpr int64_t num_slots(int64_t num_tokens, int64_t num_seqs) {
  return num_tokens / C + num_seqs;
}

// A chunk of C tokens is two blocks; inside a block decays are taken from its start.
template <int C>
struct Blocks {
  static constexpr int kSize = C / 2;
  // Operands that grow against the decay must stay finite. C = 32 serves gates of at least -5 (it holds to
  // -5.4, where exp(16 * 5.4) = 2^124.6). At C = 16, which serves any gate, the operands of the block
  // products take no stronger decay per token than exp(-kClip): 5e-7 instead of 0, far below the rounding of
  // bf16 even where a state of size 1000 is erased by one token.
  static constexpr bool kClips = C == 16;
  static constexpr float kClip = 14.5f;
  // Prefix decays span 2^-115 (C = 32) or 2^-168 (C = 16) to 1, and rows of raw queries and keys are not
  // normalised yet. Centring the pair (prefix, its inverse) by this power of two keeps both inside the range
  // of bf16, for rows of size 1e-12 to 1e12.
  static constexpr float kBlockBalance = C == 32 ? kBalance : 0x1p84f;
};

// Bytes of workspace that a call needs.
inline size_t chunk_fwd_workspace_bytes(ChunkFwdParams const& p) {
  size_t const heads = static_cast<size_t>(p.value_heads);
  return p.gate_is_bounded ? heads * num_slots<32>(p.num_tokens, p.num_seqs) * sizeof(Record<32>)
                           : heads * num_slots<16>(p.num_tokens, p.num_seqs) * sizeof(Record<16>);
}

// A chunk of 32 tokens up to its middle, for a checkpoint there: what prepare hands to scan beside the
// record.
struct HalfChunk {
  uint32_t k_out[kHeadDim][8];  // bf16, per channel: keys of the first 16 tokens decayed to the end of these
  float decay[kHeadDim];        // over the first 16 tokens
};

// Bytes that a call needs for the middles of chunks: none, as far as the host knows, if no checkpoint is
// there.
inline size_t chunk_fwd_half_chunk_bytes(ChunkFwdParams const& p) {
  Checkpoints const& c = p.checkpoints;
  bool const are_none = !p.gate_is_bounded || c.states.data == nullptr;
  if (are_none || (c.offsets.data == nullptr && c.every % 32 == 0)) return 0;
  size_t const columns = c.offsets.data == nullptr ? c.slots.columns : c.offsets.columns;
  return sizeof(HalfChunk) * static_cast<size_t>(p.num_seqs) * columns * p.value_heads;
}

}  // namespace flashkda
