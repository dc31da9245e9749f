// What launches of the chunked kernels share.
#pragma once

#include <algorithm>
#include <limits>

#include "launch_common.h"

namespace flashkda {

template <class Arch>
constexpr size_t kMoreThanHalfOfAnSm = std::min(116 * 1024, Arch::kSharedMemory);

template <class Arch, class Maps, class Kernel>
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
  size_t const limit = std::max(shared_bytes, kMoreThanHalfOfAnSm<Arch>);
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

inline Failure check_encoded() {
  int const error = take_encode_error();
  if (error == 0) return {};
  return "a TMA descriptor could not be encoded (driver error " + std::to_string(error) + ")";
}

inline Failure check_grid(Inputs const& p, int64_t ctas, char const* what) {
  if (ctas <= std::numeric_limits<int32_t>::max()) return {};
  return std::string(what) + ": " + std::to_string(p.num_seqs) + " sequences of " +
         std::to_string(p.value_heads) + " value heads are more than a CUDA grid holds";
}

}  // namespace flashkda
