// Launches of the decode kernel of one architecture: FLASHKDA_ARCH names its traits struct (arch.h).

#include <algorithm>
#include <limits>

#include "../arch.h"
#include "../launch_common.h"
#include "kernel.cuh"

namespace flashkda {
namespace {

constexpr unsigned kMaxGridY = 65535;

// Heads of a batch from which on each has a CTA of its own: two on every SM of the largest device.
constexpr int64_t kManyHeads = 2 * 160;

template <class Config>
Failure launch(RecurrentParams const& p, cudaStream_t stream) {
  // The last row of the grid may pass the end, but not what an int holds.
  if (p.num_seqs < 1 || p.num_seqs > std::numeric_limits<int32_t>::max() - int32_t{kMaxGridY}) {
    return "decode: " + std::to_string(p.num_seqs) + " sequences are none, or more than a CUDA grid holds";
  }
  unsigned const sequences = static_cast<unsigned>(p.num_seqs), rows = std::min(sequences, kMaxGridY);
  // A CTA takes several tiles where there are enough of them to fill the device that way too.
  unsigned const passes = int64_t{p.num_seqs} * p.value_heads >= kManyHeads ? Config::kPasses : 1;
  unsigned const tiles = static_cast<unsigned>(p.value_heads) * (kHeadDim / Config::kValues / passes);
  cudaLaunchAttribute overlap;
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(tiles, rows, (sequences + rows - 1) / rows);
  config.blockDim = dim3(Config::kThreads);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  return failure_of("decode", cudaLaunchKernelEx(&config, decode_kernel<Config>, p));
}

template <class Arch, class StateT>
Failure launch(RecurrentParams const& p, cudaStream_t stream) {
  return p.state_v_first ? launch<DecodeConfig<Arch, StateT, true>>(p, stream)
                         : launch<DecodeConfig<Arch, StateT, false>>(p, stream);
}

}  // namespace

template <class Arch>
Failure launch_recurrent(RecurrentParams const& p, int, void* stream) {
  auto const s = static_cast<cudaStream_t>(stream);
  bool const fp32 =
      (p.initial_state.data != nullptr ? p.initial_state : p.final_state).dtype == Dtype::kFloat32;
  return fp32 ? launch<Arch, float>(p, s) : launch<Arch, __nv_bfloat16>(p, s);
}

template Failure launch_recurrent<FLASHKDA_ARCH>(RecurrentParams const&, int, void*);

}  // namespace flashkda
