// Tensor maps over [tokens, heads, 128] tensors with any row stride, through CuTe.
#pragma once

// CuTe then calls cuTensorMapEncodeTiled by name; encode.cpp defines that name (hidden) on top of
// the driver's entry point, looked up once, and keeps the result code for the host to check.
#define CUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL 1

// In this order: the others need what the first declares.
// clang-format off
#include <cute/tensor.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/atom/copy_traits_sm90_tma.hpp>
// clang-format on

#include "barrier.cuh"
#include "record.cuh"

namespace flashkda {

// Shared tile [C, kColumns] in rows of 128 bytes, SWIZZLE_128B (tile_offset for bf16).
template <class T, int C, int kColumns>
using SwizzledTile = decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<T>{},
                                                  cute::Shape<cute::Int<C>, cute::Int<kColumns>>{}));

template <class T, int C, int kColumns, class Op>
auto make_token_map(Op op, TokenTensor const& x, int64_t num_tokens, int num_heads) {
  using namespace cute;
  auto tensor = make_tensor(make_gmem_ptr(static_cast<T*>(x.data)),
                            make_shape(static_cast<int32_t>(num_tokens), Int<kHeadDim>{}, num_heads),
                            make_stride(x.row_stride, Int<1>{}, Int<kHeadDim>{}));
  return make_tma_copy(op, tensor, SwizzledTile<T, C, kColumns>{}, make_shape(Int<C>{}, Int<kColumns>{}),
                       Int<1>{});
}

// Coordinates of the [C, kColumns] tile at a token, a column tile and a head.
template <int C, int kColumns, class Map>
__device__ __forceinline__ auto token_tile(
    Map const& map, int64_t num_tokens, int num_heads, int64_t token, int column_tile, int head) {
  using namespace cute;
  auto whole = map.get_tma_tensor(make_shape(static_cast<int32_t>(num_tokens), Int<kHeadDim>{}, num_heads));
  auto from = domain_offset(make_coord(static_cast<int32_t>(token), 0, 0), whole);
  return local_tile(from(_, _, head), make_shape(Int<C>{}, Int<kColumns>{}), make_coord(0, column_tile));
}

template <class T, int C, int kColumns, class Map, class Tile>
__device__ __forceinline__ void load_tile(Map const& map, Tile const& gX, void* shared, uint64_t* barrier) {
  using namespace cute;
  auto sX = make_tensor(make_smem_ptr(static_cast<T*>(shared)), SwizzledTile<T, C, kColumns>{});
  auto thread = map.get_slice(0);
  copy(map.with(*barrier), thread.partition_S(gX), thread.partition_D(sX));
}

template <class T, int C, int kColumns, class Map, class Tile>
__device__ __forceinline__ void store_tile(Map const& map, Tile const& gX, void* shared) {
  using namespace cute;
  auto sX = make_tensor(make_smem_ptr(static_cast<T*>(shared)), SwizzledTile<T, C, kColumns>{});
  auto thread = map.get_slice(0);
  copy(map, thread.partition_S(sX), thread.partition_D(gX));
}

}  // namespace flashkda
