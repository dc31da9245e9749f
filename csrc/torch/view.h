// What the operators need of torch: tensors seen as plain memory, new tensors, the current stream. Built on
// LibTorch's stable ABI, without a header of CUDA.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <optional>
#include <stdexcept>
#include <string>

#include "../params.h"

// Defined in libtorch_cuda, which a CPU build of torch lacks: weak, so that this library loads there.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                                   void** ret_stream);

namespace flashkda {

using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

inline void* current_stream(int device) {
  void* stream = nullptr;
  if (aoti_torch_get_current_cuda_stream == nullptr ||
      aoti_torch_get_current_cuda_stream(device, &stream) != AOTI_TORCH_SUCCESS) {
    throw std::runtime_error("flashkda: torch gives no CUDA stream (is it a build without CUDA?)");
  }
  return stream;
}

// What a call needs to know of a tensor, asked for once.
struct View {
  bool given = false;
  int64_t dim = 0;
  int64_t const *sizes = nullptr, *strides = nullptr;
  void* data = nullptr;
  int32_t dtype = 0, device = 0;

  View() = default;
  View(Tensor const& x) : given(true) {
    AtenTensorHandle const handle = x.get();
    int64_t *my_sizes = nullptr, *my_strides = nullptr;
    bool const failed = aoti_torch_get_dim(handle, &dim) != AOTI_TORCH_SUCCESS ||
                        aoti_torch_get_sizes(handle, &my_sizes) != AOTI_TORCH_SUCCESS ||
                        aoti_torch_get_strides(handle, &my_strides) != AOTI_TORCH_SUCCESS ||
                        aoti_torch_get_data_ptr(handle, &data) != AOTI_TORCH_SUCCESS ||
                        aoti_torch_get_dtype(handle, &dtype) != AOTI_TORCH_SUCCESS ||
                        aoti_torch_get_device_index(handle, &device) != AOTI_TORCH_SUCCESS;
    if (failed) throw std::runtime_error("flashkda: torch could not describe a tensor of the call");
    sizes = my_sizes;
    strides = my_strides;
  }
  View(MaybeTensor const& x) : View(x.has_value() ? View(*x) : View()) {}

  bool is(int32_t type) const { return dtype == type; }
  bool aligned() const { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }
  bool dense(int64_t from = 0) const {
    int64_t expected = 1;
    for (int64_t i = dim - 1; i >= from; expected *= sizes[i--]) {
      if (sizes[i] > 1 && strides[i] != expected) return false;
    }
    return true;
  }
  // Of states: elements from a slot to the next.
  int64_t slot_stride() const { return sizes[0] > 1 ? strides[0] : sizes[1] * sizes[2] * sizes[3]; }
  // [B, T, heads, ...] whose batch rows are adjacent: elements from a token to the next. The stride of a
  // dimension of size 1 means nothing.
  int64_t row_stride() const {
    if (sizes[1] > 1) return strides[1];
    return sizes[0] > 1 ? strides[0] : sizes[2] * (dim == 4 ? sizes[3] : 1);
  }
  bool rows_follow() const { return sizes[0] == 1 || sizes[1] == 1 || strides[0] == sizes[1] * strides[1]; }
  TokenTensor tokens() const { return {data, row_stride()}; }
};

struct Types {
  int32_t bf16 = aoti_torch_dtype_bfloat16(), fp32 = aoti_torch_dtype_float32(),
          int32 = aoti_torch_dtype_int32(), int64 = aoti_torch_dtype_int64();

  bool is_gate(View const& x) const { return x.is(bf16) || x.is(fp32); }
  Dtype of(View const& x) const { return x.is(fp32) ? Dtype::kFloat32 : Dtype::kBfloat16; }
  bool is_index(View const& x) const { return x.is(int32) || x.is(int64); }
  States states(View const& x) const {
    if (!x.given) return {};
    return {x.data, of(x), x.slot_stride(), x.sizes[0]};
  }
  Indices indices(View const& x) const {
    if (!x.given) return {};
    bool const by_token = x.dim == 2;
    return {x.data, x.is(int64), x.strides[0], by_token ? x.strides[1] : 0,
            by_token ? static_cast<int32_t>(x.sizes[1]) : 1};
  }
};

// Uninitialised memory of torch's allocator, for work on the current stream. Not new_empty(), which looks its
// operator up by name at every call.
inline Tensor empty(int64_t dim, int64_t const* sizes, int32_t dtype, int32_t device) {
  std::array<int64_t, 4> strides = {};
  int64_t stride = 1;
  for (int64_t i = dim - 1; i >= 0; stride *= sizes[i--]) strides[i] = stride;
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(dim, sizes, strides.data(), dtype, aoti_torch_device_type_cuda(), device,
                               &handle) != AOTI_TORCH_SUCCESS) {
    throw std::runtime_error("flashkda: torch could not allocate " + std::to_string(stride) + " elements");
  }
  return Tensor(handle);
}

}  // namespace flashkda
