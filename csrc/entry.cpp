// The C ABI: finds the architecture of a device and calls its kernels.

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <exception>
#include <mutex>

#include "arch.h"
#include "device/record.cuh"
#include "flashkda.h"
#include "launch.h"

namespace flashkda {
namespace {

std::atomic<bool> is_mma_sync_forced = false;

template <class Params>
using Launch = Failure (*)(Params const&, int, void*);

struct Architecture {
  int major, minor;
  char const* variant;
  Launch<ChunkFwdParams> chunk_fwd;
  Launch<RecurrentParams> recurrent;
};

template <class Arch>
constexpr Architecture architecture() {
  return {Arch::kMajor, Arch::kMinor, Arch::kVariant, &launch_chunk_fwd<Arch>, &launch_recurrent<Arch>};
}

// The architectures of this build; CMake passes the list.
constexpr std::array kBuilt = {FLASHKDA_ARCHITECTURES};

struct Probe {
  Architecture const* arch;  // null: not served
  std::string reason;
};

Probe probe_now(int device) {
  int major = 0, minor = 0, driver = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  }
  if (error == cudaErrorInsufficientDriver) {
    cudaDriverGetVersion(&driver);
    if (driver == 0) return {nullptr, "there is no CUDA driver: install one"};
    return {nullptr, "the driver is too old for the kernels' CUDA runtime (it offers CUDA " +
                         std::to_string(driver / 1000) + "." + std::to_string(driver % 1000 / 10) +
                         ", they need " + std::to_string(CUDART_VERSION / 1000) + "." +
                         std::to_string(CUDART_VERSION % 1000 / 10) + "): update the driver"};
  }
  if (error != cudaSuccess) return {nullptr, cudaGetErrorString(error)};
  for (Architecture const& built : kBuilt) {
    if (built.major == major && built.minor == minor) return {&built, {}};
  }
  std::string reason = "compute capability " + std::to_string(major) + "." + std::to_string(minor) +
                       " is not among those of this build (";
  for (Architecture const& built : kBuilt) {
    reason += (&built == kBuilt.data() ? "" : ", ") + std::to_string(built.major) + "." +
              std::to_string(built.minor);
  }
  bool const is_option = major == Sm120::kMajor && minor == Sm120::kMinor;
  reason += is_option ? "): build from source with FLASHKDA_ARCHS=120a" : "): there are no kernels for it";
  return {nullptr, reason};
}

// A device's answer does not change; failures are asked again, since a driver may yet come up.
Probe probe(int device) {
  static std::mutex mutex;
  static std::array<Architecture const*, 64> known = {};
  bool const cacheable = device >= 0 && device < static_cast<int>(known.size());
  std::lock_guard<std::mutex> const lock(mutex);
  if (cacheable && known[device] != nullptr) return {known[device], {}};
  Probe const result = probe_now(device);
  if (cacheable) known[device] = result.arch;
  return result;
}

// Makes a device current for a scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) : device_(device) {
    cudaGetDevice(&previous_);
    if (previous_ != device_) error_ = cudaSetDevice(device_);
  }
  ~DeviceGuard() {
    if (previous_ != device_) cudaSetDevice(previous_);
  }
  DeviceGuard(DeviceGuard const&) = delete;
  DeviceGuard& operator=(DeviceGuard const&) = delete;
  cudaError_t error() const { return error_; }

 private:
  int device_, previous_ = 0;
  cudaError_t error_ = cudaSuccess;
};

template <class Params>
Failure enqueue(Launch<Params> Architecture::* launch, Params const& params, int device, void* stream) {
  Probe const found = probe(device);
  if (found.arch == nullptr) return found.reason;
  DeviceGuard const guard(device);
  if (guard.error() != cudaSuccess) return cudaGetErrorString(guard.error());
  return (found.arch->*launch)(params, device, stream);
}

// The same across the C ABI: nothing is thrown.
template <class Params>
int enqueue(Launch<Params> Architecture::* launch,
            Params const& params,
            int device,
            void* stream,
            char* message,
            size_t message_bytes) {
  Failure failure;
  try {
    failure = enqueue(launch, params, device, stream);
  } catch (std::exception const& error) {
    failure = error.what();
  }
  if (failure.empty()) return 0;
  std::snprintf(message, message_bytes, "%s", failure.c_str());
  return 1;
}

}  // namespace

bool mma_sync_is_forced() { return is_mma_sync_forced.load(std::memory_order_relaxed); }

}  // namespace flashkda

extern "C" {

int flashkda_abi() { return 3; }

char const* flashkda_build_info() { return FLASHKDA_BUILD_INFO; }

char const* flashkda_probe(int device, char* message, size_t message_bytes) {
  auto const found = flashkda::probe(device);
  if (found.arch != nullptr) return found.arch->variant;
  std::snprintf(message, message_bytes, "%s", found.reason.c_str());
  return nullptr;
}

void flashkda_force_mma_sync(int forced) { flashkda::is_mma_sync_forced.store(forced != 0); }

size_t flashkda_chunk_fwd_workspace_bytes(flashkda::ChunkFwdParams const* params) {
  return flashkda::chunk_fwd_workspace_bytes(*params);
}

size_t flashkda_chunk_fwd_half_chunk_bytes(flashkda::ChunkFwdParams const* params) {
  return flashkda::chunk_fwd_half_chunk_bytes(*params);
}

int flashkda_chunk_fwd(
    flashkda::ChunkFwdParams const* params, int device, void* stream, char* message, size_t message_bytes) {
  return flashkda::enqueue(&flashkda::Architecture::chunk_fwd, *params, device, stream, message,
                           message_bytes);
}

int flashkda_recurrent(
    flashkda::RecurrentParams const* params, int device, void* stream, char* message, size_t message_bytes) {
  return flashkda::enqueue(&flashkda::Architecture::recurrent, *params, device, stream, message,
                           message_bytes);
}

}  // extern "C"
