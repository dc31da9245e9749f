// cuTensorMapEncodeTiled for CuTe: the driver's entry point, looked up once. The library does not
// link libcuda, so that it loads on machines without a driver; the name is hidden, so that it
// stands in nobody's way.

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "launch.h"

namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

thread_local int last_error = CUDA_SUCCESS;

Encode entry_point() {
  static Encode const found = [] {
    void* symbol = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaError_t const error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &symbol, 12000,
                                                               cudaEnableDefault, &result);
    bool const ok = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return ok ? reinterpret_cast<Encode>(symbol) : nullptr;
  }();
  return found;
}

}  // namespace

extern "C" __attribute__((visibility("hidden"))) CUresult CUDAAPI
cuTensorMapEncodeTiled(CUtensorMap* map,
                       CUtensorMapDataType type,
                       cuuint32_t rank,
                       void* address,
                       cuuint64_t const* dims,
                       cuuint64_t const* strides,
                       cuuint32_t const* box,
                       cuuint32_t const* element_strides,
                       CUtensorMapInterleave interleave,
                       CUtensorMapSwizzle swizzle,
                       CUtensorMapL2promotion promotion,
                       CUtensorMapFloatOOBfill fill) {
  Encode const encode = entry_point();
  CUresult const result = encode == nullptr ? CUDA_ERROR_NOT_FOUND
                                            : encode(map, type, rank, address, dims, strides, box,
                                                     element_strides, interleave, swizzle, promotion, fill);
  if (result != CUDA_SUCCESS) last_error = result;
  // CuTe prints and goes on after a failure; the launcher checks before it launches.
  return CUDA_SUCCESS;
}

namespace flashkda {

int take_encode_error() {
  int const error = last_error;
  last_error = CUDA_SUCCESS;
  return error;
}

}  // namespace flashkda
