// scan: the state through the chunks of one sequence, value head and half or all of V. Four warps hold
// the state in fp32 registers, transposed (rows of V, columns of K), as left operand of every product; one
// thread each of three warps issues the copies, kStages chunks ahead.
#pragma once

#include "../device/tma.cuh"
#include "item.cuh"

namespace flashkda {

template <class Arch, int C_, int kRowTiles_, bool kKeeps_>
struct ScanConfig {
  static constexpr int C = C_;
  static constexpr int kRowTiles = kRowTiles_;  // of 16 rows of V, for each warp
  static constexpr bool kKeeps = kKeeps_;       // states inside of sequences: checkpoints
  // Rows of V per CTA: they do not meet. All 128 in one CTA read the operands of the products half
  // as often from shared memory, which bounds the throughput; 64 have the shorter step.
  static constexpr int kValues = 64 * kRowTiles;
  static constexpr int kThreads = 128;
  static constexpr bool kLarge = kRowTiles == 2 || Arch::kSharedMemory < 227 * 1024;
  static constexpr int kStages = C == 32 && kLarge ? 2 : 4;  // a power of two
  static constexpr int kCtasPerSm = kRowTiles == 2 ? 2 : 1;
  static_assert((kStages & (kStages - 1)) == 0);
};

template <class Config>
struct ScanMaps {
  decltype(make_token_map<bf16, Config::C, Config::kValues>(cute::SM90_TMA_LOAD{}, {}, 0, 0)) v;
  decltype(make_token_map<bf16, Config::C, Config::kValues>(cute::SM90_TMA_STORE{}, {}, 0, 0)) out;
};

template <class Config>
struct ScanStorage {
  static constexpr int C = Config::C;
  struct Stage {  // written by TMA
    alignas(1024) Record<C> record;
    alignas(1024) bf16 v[C * Config::kValues];
  } stage[Config::kStages];
  alignas(1024) bf16 out[2][C * Config::kValues];   // read by TMA
  alignas(8) uint64_t stage_full[Config::kStages];  // the copies of a chunk have arrived
};

namespace scan {

// One chunk: advances the state, leaves the outputs in `out` [C, kValues].
// `before_advance` gets the update that the state is about to take.
template <class Config, class Function>
__device__ __forceinline__ void step(StateRows (&state)[Config::kRowTiles],
                                     typename ScanStorage<Config>::Stage const& stage,
                                     bf16* out,
                                     int size,
                                     Function const& before_advance) {
  auto const& record = stage.record;
  TokenColumns<Config> x, o;
  times_rows<Config>(x, o, state, record.k_in, record.q_in);
  residual<Config>(x, stage.v, record, size);
  // U = R + (T - I) R: the identity part is never rounded.
  times_lower<Config>(x, as_operand<Config>(x), record.inverse);
  scale_columns<Config>(x, record.inverse_key);
  TokenOperand<Config> const update = as_operand<Config>(x);
  auto const finish_outputs = [&] {
    times_lower<Config>(o, update, record.scores);
    scale_columns<Config>(o, record.output);
    store_outputs<Config>(as_operand<Config>(o), out);
  };
  // With two row tiles the state's products keep the tensor cores busy and the outputs' way to
  // shared memory hides behind them; with one, the state comes first. Measured: 3 % and 12 %.
  if constexpr (Config::kRowTiles == 2) finish_outputs();
  before_advance(update);
  advance<Config>(state, update, record.decay, record.k_out);
  if constexpr (Config::kRowTiles == 1) finish_outputs();
}

// Copies are issued by one thread each of different warps: all warps wait for the slowest.
enum CopyWarp { kStoresOut = 0, kLoadsValues = 1, kLoadsRecord = 2 };

// Loads a chunk of the sequence, if there is one, to its stage.
template <class Config>
__device__ __forceinline__ void load_stage(ScanStorage<Config>& smem,
                                           ChunkFwdParams const& p,
                                           ScanMaps<Config> const& maps,
                                           ScanItem const& item,
                                           int chunk) {
  constexpr int C = Config::C;
  int const done = chunk * C, index = chunk % Config::kStages, warp = threadIdx.x / 32;
  if (done >= item.tokens) return;
  auto& stage = smem.stage[index];
  uint64_t* const full = &smem.stage_full[index];
  if (warp == kLoadsValues) {
    load_tile<bf16, C, Config::kValues>(
        maps.v,
        token_tile<C, Config::kValues>(maps.v, p.num_tokens, p.value_heads, item.start + done,
                                       item.values / Config::kValues, item.head),
        stage.v, full);
  } else if (warp == kLoadsRecord) {
    auto const* record = static_cast<Record<C> const*>(p.workspace) +
                         item.head * num_slots<C>(p.num_tokens, p.num_seqs) + item.first_slot + chunk;
    Barrier::arrive_and_expect_tx(full, sizeof(Record<C>) + sizeof(stage.v));
    ptx::bulk_load(ptx::smem_address(&stage.record), record, sizeof(Record<C>), ptx::smem_address(full));
  }
}

// The last, shorter chunk: its tile would reach into the next sequence.
template <class Config>
__device__ __forceinline__ void store_tail(
    bf16 const* out, ChunkFwdParams const& p, ScanItem const& item, int64_t token, int size) {
  constexpr int kPieces = Config::kValues / 8;
#pragma unroll 1
  for (int i = ptx::thread_anew(); i < size * kPieces; i += Config::kThreads) {
    int const row = i / kPieces, piece = i % kPieces;
    auto const* from = reinterpret_cast<char const*>(out) + tile_offset<Config::C>(row, piece);
    auto* to = static_cast<bf16*>(p.out.data) + (token + row) * p.out.row_stride + item.head * kHeadDim +
               item.values + piece * 8;
    *reinterpret_cast<int4*>(to) = *reinterpret_cast<int4 const*>(from);
  }
}

template <class Config>
__device__ __forceinline__ void scan_sequence(ScanStorage<Config>& smem,
                                              ChunkFwdParams const& p,
                                              ScanMaps<Config> const& maps,
                                              ScanItem const& item) {
  constexpr int C = Config::C;
  int const warp = threadIdx.x / 32;
  bool const elected = (threadIdx.x & 31) == 0;
  Route const from = route_of(p, item.seq);
  if (from.fate != Fate::kRuns) {
    skip_sequence<Config>(p, item, from.fate);
    clear_padding<Config>(p, item);
    return;
  }
  if (elected) {
    ptx::wait_for_dependency();  // prepare's records
    for (int i = 0; i < Config::kStages; ++i) load_stage<Config>(smem, p, maps, item, i);
  }
  StateRows state[Config::kRowTiles];
  first_states<Config>(state, p, item, from);
  auto const one_chunk = [&](int chunk, auto const& before_advance) {
    int const size = min(item.tokens - chunk * C, C), index = chunk % Config::kStages;
    bf16* const out = smem.out[chunk % 2];
    Barrier::wait(&smem.stage_full[index], chunk / Config::kStages % 2);
    step<Config>(state, smem.stage[index], out, size, before_advance);
    ptx::fence_proxy_async();
    // The store before this one has been read: its buffer is free for the next chunk.
    if (elected && warp == kStoresOut) cute::tma_store_wait<0>();
    __syncthreads();  // the outputs are there, and nobody needs the stage any more
    if (size < C) store_tail<Config>(out, p, item, item.start + chunk * C, size);
    if (elected) {
      load_stage<Config>(smem, p, maps, item, chunk + Config::kStages);
      if (warp == kStoresOut && size == C) {
        store_tile<bf16, C, Config::kValues>(
            maps.out,
            token_tile<C, Config::kValues>(maps.out, p.num_tokens, p.value_heads, item.start + chunk * C,
                                           item.values / Config::kValues, item.head),
            out);
        cute::tma_store_arrive();
      }
    }
  };
  int const chunks = (item.tokens + C - 1) / C;
  for (int chunk = 0; chunk < chunks;) {
    // Up to the chunk that a checkpoint lies in; that one is a second instance of the code, since a branch
    // inside of the step would keep its products apart.
    int const plain =
        Config::kKeeps ? min(chunks, (next_checkpoint(p.checkpoints, item.seq, chunk * C) - 1) / C) : chunks;
    for (; chunk < plain; ++chunk) one_chunk(chunk, [](TokenOperand<Config> const&) {});
    if (!Config::kKeeps || chunk == chunks) break;
    int const middle = chunk * C + 16, end = min(chunk * C + C, item.tokens);
    bool const keeps_half = C == 32 && middle < end && is_kept<Config>(p, item, middle);
    one_chunk(chunk, [&](TokenOperand<Config> const& update) {
      if constexpr (C == 32) {
        if (keeps_half) keep_half_states<Config>(state, update, p, item, middle);
      }
    });
    if (is_kept<Config>(p, item, end)) keep_states<Config>(state, p, item, end);
    ++chunk;
  }
  last_states<Config>(state, p);
  if (elected && warp == kStoresOut) cute::tma_store_wait<0>();  // shared memory must outlive them
}

}  // namespace scan

// Its name tells how much dynamic shared memory it takes: ci/check_wheel.py reads it there.
template <class Config, size_t kSharedBytes = sizeof(ScanStorage<Config>)>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    scan_kernel(__grid_constant__ ChunkFwdParams const p, __grid_constant__ ScanMaps<Config> const maps) {
  extern __shared__ __align__(1024) char raw_storage[];
  auto& smem = *reinterpret_cast<ScanStorage<Config>*>(raw_storage);
  ScanItem const item = scan::item_of_block<Config>(p, blockIdx.x);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Config::kStages; ++i) Barrier::init(&smem.stage_full[i], 1);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();  // the barriers are initialised
  scan::scan_sequence<Config>(smem, p, maps, item);
}

}  // namespace flashkda
