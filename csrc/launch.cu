// Launches of one architecture: FLASHKDA_ARCH names its traits struct (arch.h).

#include <algorithm>
#include <limits>

#include "arch.h"
#include "launch_common.h"
#include "prepare/kernel.cuh"
#include "scan/kernel.cuh"
#include "scan/warpgroup_kernel.cuh"

namespace flashkda {
namespace {

constexpr size_t kMoreThanHalfOfAnSm = std::min(116 * 1024, FLASHKDA_ARCH::kSharedMemory);

template <class Maps, class Kernel>
Failure launch(Kernel* kernel,
               dim3 grid,
               int threads,
               size_t shared_bytes,
               bool overlaps_previous,
               ChunkFwdParams const& params,
               Maps const& maps,
               int device,
               cudaStream_t stream,
               char const* what) {
  static std::atomic<uint64_t> allowed{0};
  size_t const limit = std::max(shared_bytes, kMoreThanHalfOfAnSm);
  if (Failure f = allow_shared_memory(kernel, limit, device, allowed); !f.empty()) return f;
  cudaLaunchAttribute overlap;
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = overlaps_previous ? 1 : 0;
  return failure_of(what, cudaLaunchKernelEx(&config, kernel, params, maps));
}

Failure check_encoded() {
  int const error = take_encode_error();
  if (error == 0) return {};
  return "a TMA descriptor could not be encoded (driver error " + std::to_string(error) + ")";
}

template <class Arch, int C, class GateT>
Failure prepare_chunks(ChunkFwdParams const& p, int device, cudaStream_t stream) {
  using Config = PrepareConfig<Arch, C, GateT>;
  static_assert(sizeof(PrepareStorage<Config>) <= Arch::kSharedMemory);
  cute::SM90_TMA_LOAD const load;
  PrepareMaps<Config> const maps{make_token_map<bf16, C, kHeadDim>(load, p.q, p.num_tokens, p.num_heads),
                                 make_token_map<bf16, C, kHeadDim>(load, p.k, p.num_tokens, p.num_heads),
                                 make_token_map<GateT, C, kHeadDim>(load, p.g, p.num_tokens, p.value_heads)};
  if (Failure f = check_encoded(); !f.empty()) return f;
  dim3 const grid(static_cast<unsigned>(num_slots<C>(p.num_tokens, p.num_seqs)),
                  static_cast<unsigned>(p.value_heads));
  return launch(prepare_kernel<Config>, grid, Config::kThreads, sizeof(PrepareStorage<Config>),
                /*overlaps_previous=*/false, p, maps, device, stream, "prepare");
}

// The two forms of scan, as launches see them.
template <class Arch, int C, int kRowTiles, bool kKeeps>
struct MmaScan {
  using Config = ScanConfig<Arch, C, kRowTiles, kKeeps>;
  using Storage = ScanStorage<Config>;
  using Maps = ScanMaps<Config>;
  static constexpr auto kKernel = scan_kernel<Config>;
  static constexpr int kThreads = Config::kThreads;
  static Maps maps(ChunkFwdParams const& p) {
    return {
        make_token_map<bf16, C, Config::kValues>(cute::SM90_TMA_LOAD{}, p.v, p.num_tokens, p.value_heads),
        make_token_map<bf16, C, Config::kValues>(cute::SM90_TMA_STORE{}, p.out, p.num_tokens, p.value_heads)};
  }
};

template <class Arch, int C, int kGroups, bool kKeeps>
struct WarpgroupScan {
  using Config = WarpgroupScanConfig<Arch, C, kGroups, kKeeps>;
  using Storage = WarpgroupScanStorage<Config>;
  using Maps = WarpgroupScanMaps<Config>;
  static constexpr auto kKernel = warpgroup_scan_kernel<Config>;
  static constexpr int kThreads = Config::kCtaThreads;
  static Maps maps(ChunkFwdParams const& p) {
    return {
        make_token_map<bf16, C, Config::kValues>(cute::SM90_TMA_LOAD{}, p.v, p.num_tokens, p.value_heads)};
  }
};

template <class Scan>
Failure launch_scan(ChunkFwdParams const& p, int device, cudaStream_t stream) {
  static_assert(sizeof(typename Scan::Storage) <= FLASHKDA_ARCH::kSharedMemory);
  auto const maps = Scan::maps(p);
  if (Failure f = check_encoded(); !f.empty()) return f;
  int64_t const ctas = int64_t{p.num_seqs} * p.value_heads * (kHeadDim / Scan::Config::kValues);
  if (ctas > std::numeric_limits<int32_t>::max()) {
    return "scan: " + std::to_string(p.num_seqs) + " sequences of " + std::to_string(p.value_heads) +
           " value heads are more than a CUDA grid holds";
  }
  dim3 const grid(static_cast<unsigned>(ctas));
  // With no more CTAs than SMs each should have an SM of its own, but a grid that starts while the
  // previous one drains fills the first free SM twice: take more than half of its shared memory.
  size_t const shared = sizeof(typename Scan::Storage);
  bool const spread = static_cast<int>(grid.x) <= num_sms(device);
  return launch(Scan::kKernel, grid, Scan::kThreads, spread ? std::max(shared, kMoreThanHalfOfAnSm) : shared,
                /*overlaps_previous=*/true, p, maps, device, stream, "scan");
}

template <class Arch, int C, bool kKeeps>
Failure scan_chunks(ChunkFwdParams const& p, int device, cudaStream_t stream) {
  // Both halves of V in one CTA have a longer step than one half alone, so halves apart win while every one
  // of them has an SM to itself (csrc/README.md has the measurements).
  bool const apart = 2 * int64_t{p.num_seqs} * p.value_heads <= num_sms(device);
  if constexpr (Arch::kHasWgmma) {
    if (!mma_sync_is_forced()) {
      return apart ? launch_scan<WarpgroupScan<Arch, C, 1, kKeeps>>(p, device, stream)
                   : launch_scan<WarpgroupScan<Arch, C, 2, kKeeps>>(p, device, stream);
    }
  }
  return apart ? launch_scan<MmaScan<Arch, C, 1, kKeeps>>(p, device, stream)
               : launch_scan<MmaScan<Arch, C, 2, kKeeps>>(p, device, stream);
}

template <class Arch, int C>
Failure run(ChunkFwdParams const& p, int device, cudaStream_t stream) {
  Failure f = p.g_dtype == Dtype::kFloat32 ? prepare_chunks<Arch, C, float>(p, device, stream)
                                           : prepare_chunks<Arch, C, bf16>(p, device, stream);
  if (!f.empty()) return f;
  // Checkpoints are an instance of their own: the others have no registers to spare.
  return p.checkpoints.states.data != nullptr ? scan_chunks<Arch, C, true>(p, device, stream)
                                              : scan_chunks<Arch, C, false>(p, device, stream);
}

}  // namespace

template <class Arch>
Failure launch_chunk_fwd(ChunkFwdParams const& p, int device, void* stream) {
  auto const s = static_cast<cudaStream_t>(stream);
  return p.gate_is_bounded ? run<Arch, 32>(p, device, s) : run<Arch, 16>(p, device, s);
}

template Failure launch_chunk_fwd<FLASHKDA_ARCH>(ChunkFwdParams const&, int, void*);

}  // namespace flashkda
