// What every form of scan does for one sequence beside its products: where it lies, states that are kept on
// the way, sequences that do not run, padding. Called by the threads that hold the state.
#pragma once

#include "../device/sequence.cuh"
#include "products.cuh"

namespace flashkda {

// What a CTA works on.
struct ScanItem {
  int seq, head, values;  // values: first row of V
  int tokens;             // of the sequence
  int64_t start, first_slot;
};

namespace scan {

// Halves of one head are neighbours, so that the second reads the records from the L2 cache.
template <class Config>
__device__ __forceinline__ ScanItem item_of_block(ChunkFwdParams const& p, int block) {
  constexpr int kHalves = kHeadDim / Config::kValues;
  int const row = block / kHalves;
  ScanItem item;
  item.values = block % kHalves * Config::kValues;
  item.seq = nth_longest(p, row / p.value_heads);
  item.head = row % p.value_heads;
  item.start = sequence_bound(p, item.seq);
  item.tokens = static_cast<int>(sequence_bound(p, item.seq + 1) - item.start);
  item.first_slot = first_slot<Config::C>(item.start, item.seq);
  return item;
}

// Whether there is a checkpoint at this offset; others than multiples of 16 are ignored.
template <class Config>
__device__ __forceinline__ bool is_kept(ChunkFwdParams const& p, ScanItem const& item, int offset) {
  return Config::kKeeps && offset % 16 == 0 && next_checkpoint(p.checkpoints, item.seq, offset - 1) == offset;
}

// Checkpoints after the chunk that ends at token `done` of its sequence.
template <class Config>
__device__ __forceinline__ void keep_states(StateRows const (&state)[Config::kRowTiles],
                                            ChunkFwdParams const& p,
                                            ScanItem const& item,
                                            int done) {
  for_checkpoints(p.checkpoints, item.seq, done, [&](int, int64_t slot) {
    HeadState const to(p.checkpoints.states, slot, item.head, p.state_v_first);
#pragma unroll
    for (int m = 0; m < Config::kRowTiles; ++m) to.store(state[m], item.values + 16 * row_tile<Config>(m));
  });
}

// Checkpoints in the middle of a chunk: what advance() would make of the state with the first half alone.
template <class Config>
__device__ __forceinline__ void keep_half_states(StateRows const (&state)[Config::kRowTiles],
                                                 TokenOperand<Config> const& update,
                                                 ChunkFwdParams const& p,
                                                 ScanItem const& item,
                                                 int done) {
  int const lane = threadIdx.x & 31;
  ptx::wait_for_dependency();  // prepare wrote the half by plain stores
  for_checkpoints(p.checkpoints, item.seq, done, [&](int column, int64_t slot) {
    HalfChunk const& half = *half_chunk(p, item.seq, column, item.head);
    HeadState const to(p.checkpoints.states, slot, item.head, p.state_v_first);
#pragma unroll
    for (int m = 0; m < Config::kRowTiles; ++m) {
      int const row = item.values + 16 * row_tile<Config>(m) + lane / 4;
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
        int const key = 8 * n + 2 * (lane % 4), channel = 8 * n + lane / 4;
        float2 const f = *reinterpret_cast<float2 const*>(&half.decay[key]);
        float const(&s)[4] = state[m].c[n];
        float c[4] = {s[0] * f.x, s[1] * f.y, s[2] * f.x, s[3] * f.y};
        ptx::mma_bf16(c, update.a[m][0], half.k_out[channel][lane % 4], half.k_out[channel][lane % 4 + 4]);
        to.store_pair_at(row, key, c[0], c[1]);
        to.store_pair_at(row + 8, key, c[2], c[3]);
      }
    }
  });
}

// The same 16 bytes, all through the CTA's part of the outputs of some tokens.
template <class Config>
__device__ __forceinline__ void fill_outputs(
    ChunkFwdParams const& p, ScanItem const& item, int64_t token, int64_t end, int value) {
  constexpr int kPieces = Config::kValues / 8;
#pragma unroll 1
  for (token += threadIdx.x / kPieces; token < end; token += Config::kThreads / kPieces) {
    auto* const to = static_cast<bf16*>(p.out.data) + token * p.out.row_stride + item.head * kHeadDim +
                     item.values + threadIdx.x % kPieces * 8;
    *reinterpret_cast<int4*>(to) = {value, value, value, value};
  }
}

// Zeros in the rows past the last sequence, if they are wanted: its CTAs write them.
template <class Config>
__device__ __forceinline__ void clear_padding(ChunkFwdParams const& p, ScanItem const& item) {
  if (!p.clear_padding || item.seq != p.num_seqs - 1) return;
  fill_outputs<Config>(p, item, item.start + item.tokens, p.num_tokens, 0);
}

// A sequence that is padding, or whose slots are outside their pool.
template <class Config>
__device__ __forceinline__ void skip_sequence(ChunkFwdParams const& p, ScanItem const& item, Fate fate) {
  if (threadIdx.x == 0) ptx::wait_for_dependency();  // whoever waits for this kernel waits for prepare too
  int const value = fate == Fate::kBroken ? 0x7fff7fff : 0;  // NaN
  fill_outputs<Config>(p, item, item.start, item.start + item.tokens, value);
  if (p.final_place != FinalPlace::kDense) return;
  StateRows state;
#pragma unroll
  for (auto& row : state.c) row[0] = row[1] = row[2] = row[3] = __int_as_float(value == 0 ? 0 : 0x7fffffff);
  HeadState const to(p.final_state, item.seq, item.head, p.state_v_first);
#pragma unroll
  for (int m = 0; m < Config::kRowTiles; ++m) to.store(state, item.values + 16 * row_tile<Config>(m));
}

template <class Config>
__device__ __forceinline__ void first_states(StateRows (&state)[Config::kRowTiles],
                                             ChunkFwdParams const& p,
                                             ScanItem const& item,
                                             Route const& from) {
#pragma unroll
  for (int m = 0; m < Config::kRowTiles; ++m) {
    if (from.source < 0) {
      state[m] = {};
    } else {
      HeadState(p.initial_state, from.source, item.head, p.state_v_first)
          .load(state[m], item.values + 16 * row_tile<Config>(m));
    }
  }
}

// After the last chunk. What it needs of the sequence is looked up again: no register keeps it over the loop.
template <class Config>
__device__ __forceinline__ void last_states(StateRows const (&state)[Config::kRowTiles],
                                            ChunkFwdParams const& p) {
  ScanItem const item = item_of_block<Config>(p, ptx::block_anew());
  Route const to = route_of(p, item.seq);
  bool const stores =
      p.final_place == FinalPlace::kDense || (p.final_place != FinalPlace::kNone && item.tokens > 0);
#pragma unroll
  for (int m = 0; m < Config::kRowTiles; ++m) {
    if (!stores) break;
    HeadState(p.final_state, to.target, item.head, p.state_v_first)
        .store(state[m], item.values + 16 * row_tile<Config>(m));
  }
  clear_padding<Config>(p, item);
}

}  // namespace scan
}  // namespace flashkda
