// fused: prepare and scan in one CTA per sequence and value head, records in shared memory only. Two
// warpgroups prepare alternate chunks, two scan: 64 rows of V each.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "../prepare/kernel.cuh"
#include "../scan/kernel.cuh"
#include "../scan/wgmma.cuh"

namespace flashkda {

template <class Arch, int C_, class GateT_>
struct FusedConfig {
  static constexpr int C = C_;
  using GateT = GateT_;
  static constexpr int kThreads = 512, kGroup = 128;
  // Registers of a thread: 512 x 128 at the launch, shared out anew.
  static constexpr int kPrepareRegisters = 88, kScanRegisters = 168;
  static_assert(2 * kPrepareRegisters + 2 * kScanRegisters <= 4 * 128);
  static constexpr int kStages = 3;  // of raw tiles and of records
  static constexpr int kValueStages = sizeof(GateT) == 4 ? 2 : 4;

  // Uniform for the compiler too: it would serialise wgmma in what it takes for a divergent branch.
  __device__ static int group() { return __shfl_sync(0xffffffffu, threadIdx.x / kGroup, 0); }

  // A warpgroup as the functions of prepare and scan see it.
  // Barriers by constant names: else ptxas gives all roles the same registers.
  template <int kFirst>
  struct Group {
    static constexpr int C = C_;
    static constexpr int kThreads = kGroup;
    __device__ static int thread() { return ptx::thread_anew() % kGroup; }
    __device__ static void sync() {
      if ((ptx::thread_anew() & kGroup) == 0) {
        ptx::sync_threads<1 + kFirst>(kGroup);
      } else {
        ptx::sync_threads<2 + kFirst>(kGroup);
      }
    }
  };
  struct Prepare : Group<0> {
    using GateT = GateT_;
    static constexpr int kBlock = Blocks<C_>::kSize;
    static constexpr bool kKeepsHalf = false;
  };
  struct Scan : Group<2> {
    static constexpr int kRowTiles = 1;
    static constexpr bool kKeeps = false;
    static constexpr int kValues = 64;
  };
};

template <class Config>
struct FusedMaps {
  PrepareMaps<typename Config::Prepare> raw;
  ScanMaps<typename Config::Scan> values;
};

template <class Config>
struct FusedStorage {
  static constexpr int C = Config::C;
  RawTiles<C, typename Config::GateT> raw[Config::kStages];
  struct alignas(1024) Factors {
    Record<C> record;
  } factors[Config::kStages];
  struct {
    alignas(1024) bf16 v[Config::kValueStages][C * Config::Scan::kValues];
    alignas(1024) bf16 out[2][C * Config::Scan::kValues];
  } half[2];  // of V
  PrepareScratch<C> scratch[2];
  alignas(8) uint64_t raw_full[Config::kStages];
  uint64_t record_full[Config::kStages], record_empty[Config::kStages];
  uint64_t values_full[2][Config::kValueStages];
};

namespace fused {

// Position in a ring, and how often it has been gone round.
template <int kStages>
struct Ring {
  int stage, parity = 0;
  __device__ explicit Ring(int start) : stage(start) {}
  __device__ __forceinline__ void advance(int by) {
    stage += by;
    if (stage >= kStages) {
      stage -= kStages;
      parity ^= 1;
    }
  }
};

template <class Config>
__device__ __forceinline__ void prepare_chunks(FusedStorage<Config>& smem,
                                               ChunkFwdParams const& p,
                                               FusedMaps<Config> const& maps,
                                               ScanItem const& item) {
  using Role = typename Config::Prepare;
  constexpr int C = Config::C;
  int const group = Config::group(), chunks = (item.tokens + C - 1) / C;
  bool const loads = Role::thread() == 0;
  auto const load = [&](int chunk, int stage) {
    if (chunk >= chunks) return;
    load_raw<Role>(smem.raw[stage], p, maps.raw, item.start + chunk * C, item.head, &smem.raw_full[stage]);
  };
  if (loads && group == 0) {
    for (int i = 0; i < Config::kStages; ++i) load(i, i);
  }
  Ring<Config::kStages> ring(group);
#pragma unroll 1
  for (int chunk = group; chunk < chunks; chunk += 2, ring.advance(2)) {
    int const stage = ring.stage;
    ChunkMemory<Role> const m{smem.raw[stage], smem.factors[stage].record, smem.scratch[group]};
    if (Role::thread() < C) {
      int const token = chunk * C + Role::thread();
      m.scratch.beta[Role::thread()] =
          token < item.tokens ? step_size(p, item.start + token, item.head) : 0.f;
    }
    Barrier::wait(&smem.raw_full[stage], ring.parity);
    prepare::make_tiles<Role>(m, p, item.head, min(item.tokens - chunk * C, C),
                              [&] { Barrier::wait(&smem.record_empty[stage], ring.parity ^ 1); });
    Role::sync();  // operands are there
    prepare::make_squares<Role>(m);
    ptx::fence_proxy_async();  // of all that this thread wrote: scan's products, and the next copies, see it
    __syncwarp();
    if ((threadIdx.x & 31) == 0) Barrier::arrive(&smem.record_full[stage]);
    Role::sync();  // nobody needs the raw tiles any more
    if (loads) load(chunk + Config::kStages, stage);
  }
}

template <class Config>
__device__ __forceinline__ void scan_chunks(FusedStorage<Config>& smem,
                                            ChunkFwdParams const& p,
                                            FusedMaps<Config> const& maps,
                                            ScanItem const& item,
                                            Route const& route) {
  using Role = typename Config::Scan;
  constexpr int C = Config::C;
  int const index = Config::group() - 2, chunks = (item.tokens + C - 1) / C;
  auto& half = smem.half[index];
  uint64_t* const values_full = smem.values_full[index];
  bool const elected = Role::thread() == 0;
  auto const tile = [&](auto const& map, int chunk) {
    return token_tile<C, Role::kValues>(map, p.num_tokens, p.value_heads, item.start + chunk * C, index,
                                        item.head);
  };
  auto const load_values = [&](int chunk) {
    if (chunk >= chunks) return;
    int const stage = chunk % Config::kValueStages;
    Barrier::arrive_and_expect_tx(&values_full[stage], sizeof(half.v[stage]));
    load_tile<bf16, C, Role::kValues>(maps.values.v, tile(maps.values.v, chunk), half.v[stage],
                                      &values_full[stage]);
  };
  if (elected) {
    for (int i = 0; i < Config::kValueStages; ++i) load_values(i);
  }
  scan::StateRows state = {};
  if (route.source >= 0) {
    scan::HeadState(p.initial_state, route.source, item.head, p.state_v_first)
        .load(state, item.values + 16 * scan::row_tile<Role>(0));
  }
  Ring<Config::kStages> ring(0);
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk, ring.advance(1)) {
    int const size = min(item.tokens - chunk * C, C), value_stage = chunk % Config::kValueStages;
    bf16* const out = half.out[chunk % 2];
    Barrier::wait(&values_full[value_stage], chunk / Config::kValueStages % 2);
    Barrier::wait(&smem.record_full[ring.stage], ring.parity);
    scan::warpgroup_step<Role>(state, smem.factors[ring.stage].record, half.v[value_stage], out, size);
    __syncwarp();
    if ((threadIdx.x & 31) == 0) Barrier::arrive(&smem.record_empty[ring.stage]);
    ptx::fence_proxy_async();
    if (elected) cute::tma_store_wait<0>();  // the store before this one has been read
    Role::sync();                            // the outputs are there, and nobody needs the values any more
    if (size < C) scan::store_tail<Role>(out, p, item, item.start + chunk * C, size);
    if (elected) {
      load_values(chunk + Config::kValueStages);
      if (size == C) {
        store_tile<bf16, C, Role::kValues>(maps.values.out, tile(maps.values.out, chunk), out);
        cute::tma_store_arrive();
      }
    }
  }
  bool const stores =
      p.final_place == FinalPlace::kDense || (p.final_place != FinalPlace::kNone && item.tokens > 0);
  if (stores) {
    scan::HeadState(p.final_state, route.target, item.head, p.state_v_first)
        .store(state, item.values + 16 * scan::row_tile<Role>(0));
  }
  scan::clear_padding<Role>(p, item);
  if (elected) cute::tma_store_wait<0>();  // shared memory must outlive them
}

}  // namespace fused

// Its name tells how much dynamic shared memory it takes: ci/check_wheel.py reads it there.
template <class Config, size_t kSharedBytes = sizeof(FusedStorage<Config>)>
__global__ void __launch_bounds__(Config::kThreads, 1)
    fused_kernel(__grid_constant__ ChunkFwdParams const p, __grid_constant__ FusedMaps<Config> const maps) {
  constexpr int C = Config::C;
  extern __shared__ __align__(1024) char raw_storage[];
  auto& smem = *reinterpret_cast<FusedStorage<Config>*>(raw_storage);
  int const group = Config::group();
  if (threadIdx.x == 0) {
    for (int i = 0; i < Config::kStages; ++i) {
      Barrier::init(&smem.raw_full[i], 1);
      Barrier::init(&smem.record_full[i], 4);
      Barrier::init(&smem.record_empty[i], 8);
    }
    for (int i = 0; i < 2 * Config::kValueStages; ++i) Barrier::init(&smem.values_full[0][i], 1);
    cutlass::arch::fence_barrier_init();
  }
  // Above the diagonal of the squares nothing is ever written, but wgmma multiplies it.
  if (group < Config::kStages) {
    Record<C>& record = smem.factors[group].record;
    for (int i = threadIdx.x % 128; i < C * C / 2; i += 128) {
      reinterpret_cast<uint32_t*>(record.inverse)[i] = 0;
      reinterpret_cast<uint32_t*>(record.scores)[i] = 0;
    }
    ptx::fence_proxy_async();
  }
  __syncthreads();  // the barriers are initialised

  ScanItem item;
  item.seq = nth_longest(p, blockIdx.x / p.value_heads);
  item.head = blockIdx.x % p.value_heads;
  item.values = group % 2 * Config::Scan::kValues;
  item.start = sequence_bound(p, item.seq);
  item.tokens = static_cast<int>(sequence_bound(p, item.seq + 1) - item.start);
  Route const route = route_of(p, item.seq);
  if (group < 2) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kPrepareRegisters>();
    if (route.fate == Fate::kRuns) fused::prepare_chunks<Config>(smem, p, maps, item);
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::kScanRegisters>();
    if (route.fate == Fate::kRuns) {
      fused::scan_chunks<Config>(smem, p, maps, item, route);
    } else {
      scan::skip_sequence<typename Config::Scan>(p, item, route.fate);
      scan::clear_padding<typename Config::Scan>(p, item);
    }
  }
}

}  // namespace flashkda
