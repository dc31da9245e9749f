// What launches of all kernels share.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>

#include "launch.h"

namespace flashkda {

inline Failure failure_of(char const* what, cudaError_t error) {
  if (error == cudaSuccess) return {};
  return std::string(what) + ": " + cudaGetErrorString(error);
}

inline int num_sms(int device) {
  static std::array<std::atomic<int>, 64> known = {};
  bool const cacheable = device < static_cast<int>(known.size());
  int count = cacheable ? known[device].load(std::memory_order_relaxed) : 0;
  if (count == 0) {
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    if (cacheable) known[device].store(count, std::memory_order_relaxed);
  }
  return count;
}

// Raises the kernel's shared-memory limit, once per device.
template <class Kernel>
Failure allow_shared_memory(Kernel* kernel, size_t bytes, int device, std::atomic<uint64_t>& done) {
  uint64_t const bit = device < 64 ? uint64_t{1} << device : 0;
  if ((done.load(std::memory_order_relaxed) & bit) != 0) return {};
  cudaError_t const error =
      cudaFuncSetAttribute(reinterpret_cast<void const*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(bytes));
  if (error == cudaSuccess) done.fetch_or(bit, std::memory_order_relaxed);
  return failure_of("shared memory of a kernel", error);
}

}  // namespace flashkda
