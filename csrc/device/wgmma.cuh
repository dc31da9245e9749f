// Products of a warpgroup on Hopper's tensor cores: 64 rows in registers, 16 of them in each of its four
// warps, by an operand in shared memory. They run while the warps go on: between begin() and wait() the
// registers that take part belong to them.
#pragma once

// In this order: the others need what the first declares.
// clang-format off
#include <cute/arch/util.hpp>
#include <cute/arch/mma_sm90_desc.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
// clang-format on

#include <type_traits>

namespace flashkda::wgmma {

// Of shared rows of as many bytes: tile_offset() and square_offset() (record.cuh).
enum class Swizzle : uint8_t { k128 = 1, k64 = 2, k32 = 3 };

// Which dimension of the right operand is dense in shared memory: the one that is summed over, or the columns
// of the result.
enum class Dense { kSummed, kColumns };

// A right operand, [16, columns] at a time. `group_stride`: bytes from eight rows of shared memory to the
// next eight; `tile_stride`: from 64 columns to the next 64 (Dense::kColumns).
__device__ __forceinline__ uint64_t operand(uint32_t address,
                                            Swizzle swizzle,
                                            uint32_t group_stride,
                                            uint32_t tile_stride = 16) {
  cute::GmmaDescriptor result;
  result.bitfield.start_address_ = address >> 4;
  result.bitfield.leading_byte_offset_ = tile_stride >> 4;
  result.bitfield.stride_byte_offset_ = group_stride >> 4;
  result.bitfield.layout_type_ = static_cast<uint8_t>(swizzle);
  return result;
}

// The operand some bytes further on: addresses are its lowest bits, and shared memory has too few to carry.
__device__ __forceinline__ uint64_t after(uint64_t operand, uint32_t bytes) { return operand + (bytes >> 4); }

// One instruction shape for each number of columns: accumulators that meet instructions of different shapes
// are copied between them.
template <int kColumns, Dense kDense>
struct Instruction {
  static constexpr auto kMajor =
      kDense == Dense::kSummed ? cute::SM90::GMMA::Major::K : cute::SM90::GMMA::Major::MN;
  static constexpr auto kRows = cute::SM90::GMMA::Major::K;
  using Type =
      std::conditional_t<kColumns == 16,
                         cute::SM90::GMMA::MMA_64x16x16_F32BF16BF16_RS<kRows, kMajor>,
                         std::conditional_t<kColumns == 32,
                                            cute::SM90::GMMA::MMA_64x32x16_F32BF16BF16_RS<kRows, kMajor>,
                                            cute::SM90::GMMA::MMA_64x128x16_F32BF16BF16_RS<kRows, kMajor>>>;
  static_assert(kColumns == 16 || kColumns == 32 || kColumns == 128);
};

// c += a b, or c = a b, on 64x16 by 16xkColumns; c[4 n ...] are the m16n8 accumulators of columns [8 n, 8 n +
// 8).
template <int kColumns, Dense kDense>
__device__ __forceinline__ void multiply(float (&c)[kColumns / 2],
                                         uint32_t const (&a)[4],
                                         uint64_t b,
                                         bool accumulates = true) {
  using Scale = cute::SM90::GMMA::ScaleOut;
  uint64_t const descriptor[1] = {b};
  Scale const scale[1] = {accumulates ? Scale::One : Scale::Zero};
  cute::detail::explode(Instruction<kColumns, kDense>::Type::fma, a, cute::make_int_sequence<4>{}, descriptor,
                        cute::make_int_sequence<1>{}, c, cute::make_int_sequence<kColumns / 2>{}, scale,
                        cute::make_int_sequence<1>{});
}

// The compiler neither reads these registers before this nor writes them after.
template <size_t kCount>
__device__ __forceinline__ void pin(float (&c)[kCount]) {
#pragma unroll
  for (float& x : c) cute::warpgroup_fence_operand(x);
}

// Before products that take registers written since the last.
__device__ __forceinline__ void begin() { cute::warpgroup_arrive(); }
// Ends a group of products.
__device__ __forceinline__ void commit() { cute::warpgroup_commit_batch(); }
// All but the last kGroups groups are done.
template <int kGroups>
__device__ __forceinline__ void wait() {
  cute::warpgroup_wait<kGroups>();
}

}  // namespace flashkda::wgmma
