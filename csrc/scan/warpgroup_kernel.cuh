// scan on Hopper: the same products by wgmma. A warpgroup holds 64 rows of V; one thread of a warp of its own
// issues the copies, kStages chunks ahead. Warps wait for nothing but the copies and their own products.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "../device/tma.cuh"
#include "item.cuh"
#include "warpgroup_products.cuh"

namespace flashkda {

template <class Arch, int C_, int kGroups_, bool kKeeps_>
struct WarpgroupScanConfig {
  static constexpr int C = C_;
  static constexpr int kGroups = kGroups_;  // warpgroups that hold the state
  static constexpr int kRowTiles = 1;       // of 16 rows of V, for each warp
  static constexpr bool kKeeps = kKeeps_;   // states inside of sequences: checkpoints
  static constexpr int kValues = 64 * kGroups, kThreads = 128 * kGroups;
  // Two groups need more registers than threads of their CTA have. Only whole warpgroups can give theirs up.
  static constexpr bool kMovesRegisters = kGroups == 2;
  static constexpr int kCtaThreads = kThreads + (kMovesRegisters ? 128 : 32);
  static constexpr int kStateRegisters = 240, kLoaderRegisters = 24;
  static constexpr int kStages = C == 32 ? 5 : 8;
  // A checkpoint in the middle of a chunk starts from the state before its decay, which otherwise happens
  // behind a product.
  static constexpr bool kDecaysLate = kKeeps && C == 32;
};

template <class Config>
struct WarpgroupScanMaps {
  decltype(make_token_map<bf16, Config::C, Config::kValues>(cute::SM90_TMA_LOAD{}, {}, 0, 0)) v;
};

template <class Config>
struct WarpgroupScanStorage {
  static constexpr int C = Config::C, kWarps = Config::kThreads / 32;
  struct Stage {  // written by TMA
    alignas(1024) Record<C> record;
    alignas(1024) bf16 v[C * Config::kValues];
  } stage[Config::kStages];
  alignas(128) bf16 out[kWarps][C * 16];  // of one warp alone: [tokens, 16 rows of V], square_offset<16>
  alignas(8) uint64_t full[Config::kStages];
  uint64_t empty[Config::kStages];
};

namespace scan {

// The copies of all chunks, by one thread.
template <class Config>
__device__ __forceinline__ void load_chunks(WarpgroupScanStorage<Config>& smem,
                                            ChunkFwdParams const& p,
                                            WarpgroupScanMaps<Config> const& maps,
                                            ScanItem const& item) {
  constexpr int C = Config::C, kStages = Config::kStages;
  auto const* record = static_cast<Record<C> const*>(p.workspace) +
                       item.head * num_slots<C>(p.num_tokens, p.num_seqs) + item.first_slot;
  int const chunks = (item.tokens + C - 1) / C;
  for (int chunk = 0; chunk < chunks; ++chunk, ++record) {
    int const index = chunk % kStages;
    auto& stage = smem.stage[index];
    uint64_t* const full = &smem.full[index];
    if (chunk >= kStages) Barrier::wait(&smem.empty[index], (chunk / kStages - 1) % 2);
    Barrier::arrive_and_expect_tx(full, sizeof(Record<C>) + sizeof(stage.v));
    ptx::bulk_load(ptx::smem_address(&stage.record), record, sizeof(Record<C>), ptx::smem_address(full));
    load_tile<bf16, C, Config::kValues>(
        maps.v,
        token_tile<C, Config::kValues>(maps.v, p.num_tokens, p.value_heads, item.start + chunk * C,
                                       item.values / Config::kValues, item.head),
        stage.v, full);
  }
}

// The warp's outputs of one chunk, [16 rows of V, C tokens], by way of its shared memory: 32 bytes of a token
// are adjacent.
template <class Config>
__device__ __forceinline__ void store_outputs(TokenOperand<Config> const& o,
                                              bf16* buffer,
                                              ChunkFwdParams const& p,
                                              ScanItem const& item,
                                              int64_t token,
                                              int size) {
  int const lane = threadIdx.x & 31;
  uint32_t const base = ptx::smem_address(buffer);
  int const row = (lane >> 4) * 8 + (lane & 7), piece = (lane >> 3) & 1;
#pragma unroll
  for (int n = 0; n < Config::C / 16; ++n) {
    ptx::stmatrix_x4_trans(base + square_offset<16>(16 * n + row, piece), o.a[0][n]);
  }
  __syncwarp();
#pragma unroll
  for (int n = 0; n < Config::C / 16; ++n) {
    int const from = 16 * n + lane / 2;
    if (from >= size) continue;
    auto const* bytes = reinterpret_cast<char const*>(buffer) + square_offset<16>(from, lane % 2);
    auto* const to = static_cast<bf16*>(p.out.data) + (token + from) * p.out.row_stride +
                     item.head * kHeadDim + item.values + 16 * row_tile<Config>(0) + lane % 2 * 8;
    *reinterpret_cast<int4*>(to) = *reinterpret_cast<int4 const*>(bytes);
  }
}

// One chunk: advances the state, gives the outputs to `finish`. `before_advance` gets the update that the
// state is about to take.
template <class Config, class Before, class Finish>
__device__ __forceinline__ void warpgroup_step(StateRows& state,
                                               typename WarpgroupScanStorage<Config>::Stage const& stage,
                                               int size,
                                               Before const& before_advance,
                                               Finish const& finish) {
  auto const& record = stage.record;
  StateOperand const operand = as_operand(state);
  TokenColumns<Config> x, o;
  wgmma::begin();
  start_times_rows<Config>(x, operand, record.k_in);
  start_times_rows<Config>(o, operand, record.q_in);
  TokenColumns<Config> const wanted = weighted_values<Config>(stage.v, record.beta, size);
  TokenFactors<Config> const beta_key(record.beta_key);
  wgmma::wait<1>();  // x
  wgmma::pin(flat(x.c[0]));
  residual<Config>(x, wanted, beta_key);
  // U = R + (T - I) R: the identity part is never rounded.
  TokenOperand<Config> const wrong_values = as_operand<Config>(x);
  if constexpr (Config::kDecaysLate) {
    // By mma.sync, which leaves out what is above the diagonal: a zero there times the NaN of a later token
    // would reach a state that is kept before it.
    times_lower<Config>(x, wrong_values, record.inverse);
  } else {
    wgmma::pin(flat(x.c[0]));
    wgmma::begin();
    start_times_lower<Config>(x, wrong_values, record.inverse);
  }
  TokenFactors<Config> const inverse_key(record.inverse_key);
  // o: nothing reads the state's operand any more.
  wgmma::wait<Config::kDecaysLate ? 0 : 1>();
  if constexpr (!Config::kDecaysLate) decay_state(state, record.decay);
  TokenFactors<Config> const output(record.output);
  wgmma::wait<0>();  // x
  wgmma::pin(flat(x.c[0]));
  scale_columns<Config>(x, inverse_key);
  TokenOperand<Config> const update = as_operand<Config>(x);
  before_advance(update);
  if constexpr (Config::kDecaysLate) decay_state(state, record.decay);
  wgmma::pin(flat(o.c[0]));
  wgmma::pin(flat(state.c));
  wgmma::begin();
  start_times_lower<Config>(o, update, record.scores);
  start_advance<Config>(state, update, record.k_out);
  wgmma::wait<1>();  // o
  wgmma::pin(flat(o.c[0]));
  scale_columns<Config>(o, output);
  finish(as_operand<Config>(o));
  wgmma::wait<0>();  // the state
  wgmma::pin(flat(state.c));
}

template <class Config>
__device__ __forceinline__ void scan_chunks(WarpgroupScanStorage<Config>& smem,
                                            ChunkFwdParams const& p,
                                            ScanItem const& item,
                                            Route const& from) {
  constexpr int C = Config::C;
  StateRows state[1];
  first_states<Config>(state, p, item, from);
  bf16* const out = smem.out[threadIdx.x / 32];
  int next_kept = Config::kKeeps ? next_checkpoint(p.checkpoints, item.seq, 0) : kNoCheckpoint;
  int const chunks = (item.tokens + C - 1) / C;
  int index = 0, phase = 0;
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    int const done = chunk * C, size = min(item.tokens - done, C), middle = done + 16, end = done + size;
    bool const keeps = Config::kKeeps && next_kept <= end;
    Barrier::wait(&smem.full[index], phase);
    warpgroup_step<Config>(
        state[0], smem.stage[index], size,
        [&](TokenOperand<Config> const& update) {
          if constexpr (Config::kDecaysLate) {
            if (keeps && middle < end && is_kept<Config>(p, item, middle)) {
              keep_half_states<Config>(state, update, p, item, middle);
            }
          }
        },
        [&](TokenOperand<Config> const& o) {
          store_outputs<Config>(o, out, p, item, item.start + done, size);
        });
    __syncwarp();  // all lanes are done with the stage and with `out`
    if ((threadIdx.x & 31) == 0) Barrier::arrive(&smem.empty[index]);
    if (keeps) {
      if (is_kept<Config>(p, item, end)) keep_states<Config>(state, p, item, end);
      next_kept = next_checkpoint(p.checkpoints, item.seq, end);
    }
    if (++index == Config::kStages) index = 0, phase ^= 1;
  }
  last_states<Config>(state, p);
}

}  // namespace scan

// Its name tells how much dynamic shared memory it takes: ci/check_wheel.py reads it there.
template <class Config, size_t kSharedBytes = sizeof(WarpgroupScanStorage<Config>)>
__global__ void __launch_bounds__(Config::kCtaThreads, 1)
    warpgroup_scan_kernel(__grid_constant__ ChunkFwdParams const p,
                          __grid_constant__ WarpgroupScanMaps<Config> const maps) {
  extern __shared__ __align__(1024) char raw_storage[];
  auto& smem = *reinterpret_cast<WarpgroupScanStorage<Config>*>(raw_storage);
  ScanItem const item = scan::item_of_block<Config>(p, blockIdx.x);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Config::kStages; ++i) {
      Barrier::init(&smem.full[i], 1);
      Barrier::init(&smem.empty[i], Config::kThreads / 32);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();  // the barriers are initialised
  Route const from = route_of(p, item.seq);
  if (threadIdx.x >= Config::kThreads) {
    if constexpr (Config::kMovesRegisters) cutlass::arch::warpgroup_reg_dealloc<Config::kLoaderRegisters>();
    if (threadIdx.x != Config::kThreads) return;
    ptx::wait_for_dependency();  // prepare's records
    if (from.fate == Fate::kRuns) scan::load_chunks<Config>(smem, p, maps, item);
    return;
  }
  if constexpr (Config::kMovesRegisters) cutlass::arch::warpgroup_reg_alloc<Config::kStateRegisters>();
  if (from.fate == Fate::kRuns) {
    scan::scan_chunks<Config>(smem, p, item, from);
  } else {
    scan::skip_sequence<Config>(p, item, from.fate);
    scan::clear_padding<Config>(p, item);
  }
}

}  // namespace flashkda
