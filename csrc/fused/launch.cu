// Launches of the fused kernel, where wgmma is: FLASHKDA_ARCH names the traits struct (arch.h).

#include "../arch.h"
#include "../launch_chunk.h"
#include "kernel.cuh"

namespace flashkda {
namespace {

template <class Config>
Failure run(ChunkFwdParams const& p, int device, cudaStream_t stream) {
  using Prepare = typename Config::Prepare;
  using Scan = typename Config::Scan;
  constexpr int C = Config::C;
  cute::SM90_TMA_LOAD const load;
  FusedMaps<Config> const maps{
      {make_token_map<bf16, C, kHeadDim>(load, p.q, p.num_tokens, p.num_heads),
       make_token_map<bf16, C, kHeadDim>(load, p.k, p.num_tokens, p.num_heads),
       make_token_map<typename Prepare::GateT, C, kHeadDim>(load, p.g, p.num_tokens, p.value_heads)},
      {make_token_map<bf16, C, Scan::kValues>(load, p.v, p.num_tokens, p.value_heads),
       make_token_map<bf16, C, Scan::kValues>(cute::SM90_TMA_STORE{}, p.out, p.num_tokens, p.value_heads)}};
  if (Failure f = check_encoded(); !f.empty()) return f;
  int64_t const ctas = int64_t{p.num_seqs} * p.value_heads;
  if (Failure f = check_grid(p, ctas, "fused"); !f.empty()) return f;
  return launch<FLASHKDA_ARCH>(fused_kernel<Config>, dim3(static_cast<unsigned>(ctas)), Config::kThreads,
                               sizeof(FusedStorage<Config>), /*overlaps_previous=*/false, p, maps, device,
                               stream, "fused");
}

}  // namespace

template <class Arch>
Failure launch_fused(ChunkFwdParams const& p, int device, void* stream) {
  auto const s = static_cast<cudaStream_t>(stream);
  return p.g_dtype == Dtype::kFloat32 ? run<FusedConfig<Arch, 32, float>>(p, device, s)
                                      : run<FusedConfig<Arch, 32, bf16>>(p, device, s);
}

template Failure launch_fused<FLASHKDA_ARCH>(ChunkFwdParams const&, int, void*);

}  // namespace flashkda
