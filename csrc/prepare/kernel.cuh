// prepare: everything of one chunk that does not depend on the state. One CTA per slot and value
// head turns q, k, g, beta into a record.
#pragma once

#include "../device/tma.cuh"
#include "chunk.cuh"

namespace flashkda {

// Arch only tells the kernels of different architectures apart: one source serves all.
template <class Arch, int C_, class GateT_>
struct PrepareConfig {
  static constexpr int C = C_;
  using GateT = GateT_;
  static constexpr int kThreads = 128;
  static constexpr int kBlock = Blocks<C>::kSize;
  // Four CTAs fill the shared memory of an SM (C = 32, bf16 gates; three with fp32 gates); their loads and
  // stores cover each other. Of the smaller one of sm_120, one takes more than half.
  static constexpr int kCtasPerSm = Arch::kSharedMemory < 227 * 1024 ? 1 : 4;
  static constexpr bool kKeepsHalf = C == 32;  // there may be checkpoints in the middle of a chunk
  __device__ static int thread() { return threadIdx.x; }
  __device__ static void sync() { __syncthreads(); }
};

template <class Config>
struct PrepareMaps {
  using GateT = typename Config::GateT;
  decltype(make_token_map<bf16, Config::C, kHeadDim>(cute::SM90_TMA_LOAD{}, {}, 0, 0)) q, k;
  decltype(make_token_map<GateT, Config::C, kHeadDim>(cute::SM90_TMA_LOAD{}, {}, 0, 0)) g;
};

// Asks for q, k, g of a chunk; `full` is completed once they are there.
template <class Config>
__device__ __forceinline__ void load_raw(RawTiles<Config::C, typename Config::GateT>& raw,
                                         ChunkFwdParams const& p,
                                         PrepareMaps<Config> const& maps,
                                         int64_t token,
                                         int head,
                                         uint64_t* full) {
  constexpr int C = Config::C;
  int const qk_head = head / (p.value_heads / p.num_heads);
  Barrier::arrive_and_expect_tx(full, sizeof(raw.q) + sizeof(raw.k) + sizeof(raw.g));
  load_tile<bf16, C, kHeadDim>(
      maps.q, token_tile<C, kHeadDim>(maps.q, p.num_tokens, p.num_heads, token, 0, qk_head), raw.q, full);
  load_tile<bf16, C, kHeadDim>(
      maps.k, token_tile<C, kHeadDim>(maps.k, p.num_tokens, p.num_heads, token, 0, qk_head), raw.k, full);
  load_tile<typename Config::GateT, C, kHeadDim>(
      maps.g, token_tile<C, kHeadDim>(maps.g, p.num_tokens, p.value_heads, token, 0, head), raw.g, full);
}

template <class Config>
struct PrepareStorage {
  RawTiles<Config::C, typename Config::GateT> raw;
  alignas(1024) Record<Config::C> record;
  PrepareScratch<Config::C> scratch;
  alignas(8) uint64_t raw_full;
  Chunk chunk;            // until the end, for which registers are too few
  bool keeps_half_chunk;  // there is a checkpoint in its middle
};

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
  int const head = blockIdx.y;
  Chunk const chunk = chunk_of_slot<C>(p, slot);
  if (chunk.size <= 0) return;

  int const warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    smem.chunk = chunk;
    Barrier::init(&smem.raw_full, 1);
    cutlass::arch::fence_barrier_init();
    load_raw<Config>(smem.raw, p, maps, chunk.token, head, &smem.raw_full);
  }
  if (threadIdx.x < C) {
    int const i = threadIdx.x;
    smem.scratch.beta[i] = i < chunk.size ? step_size(p, chunk.token + i, head) : 0.f;
  }
  // Asked while the copies are on their way.
  if (C == 32 && p.half_chunks != nullptr && warp == 1) {
    int const middle = chunk.offset + 16;
    bool const keeps = chunk.size > 16 && next_checkpoint(p.checkpoints, chunk.seq, middle - 1) == middle;
    if (threadIdx.x % 32 == 0) smem.keeps_half_chunk = keeps;
  }
  __syncthreads();  // the barrier is initialised
  Barrier::wait(&smem.raw_full, 0);
  ChunkMemory<Config> const m{smem.raw, smem.record, smem.scratch};
  make_tiles<Config>(m, p, head, chunk.size, [] {});
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
    if (p.half_chunks != nullptr && smem.keeps_half_chunk) keep_half_chunk<Config>(m, p, smem.chunk, head);
  }
  make_squares<Config>(m);
  ptx::fence_proxy_async();
  __syncthreads();  // the record is complete

  if (stores) {
    ptx::bulk_store(to + kTiles, ptx::smem_address(&smem.record.inverse), sizeof(Record<C>) - kTiles);
    cute::tma_store_arrive();
    cute::tma_store_wait<0>();  // shared memory must outlive the copies
  }
}

}  // namespace flashkda
