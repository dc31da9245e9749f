// wgmma with the left operand in registers: D [64, N] += A [64, 16] B [16, N], by the 128 threads of a
// warpgroup. Accumulators and left operands are laid out as those of mma.sync, 16 rows per warp.
#pragma once

#include <cute/arch/mma_sm90_desc.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <utility>

#include "ptx.cuh"

namespace flashkda::wgmma {

enum class Swizzle : uint8_t { k128 = 1, k64 = 2, k32 = 3 };

// Where a right operand lies in shared memory. `leading` and `stride` are in bytes: from one swizzled column
// of 64 to the next (K outside, "MN-major"), and from eight rows to the next eight.
__device__ __forceinline__ uint64_t descriptor(void const* tile, Swizzle swizzle, int leading, int stride) {
  cute::GmmaDescriptor d;
  d.bitfield.start_address_ = static_cast<uint16_t>(ptx::smem_address(tile) >> 4);
  d.bitfield.leading_byte_offset_ = static_cast<uint16_t>(leading >> 4);
  d.bitfield.stride_byte_offset_ = static_cast<uint16_t>(stride >> 4);
  d.bitfield.base_offset_ = 0;
  d.bitfield.layout_type_ = static_cast<uint8_t>(swizzle);
  return d.desc_;
}
// The same, that many bytes further on.
__device__ __forceinline__ uint64_t advance(uint64_t descriptor, int bytes) {
  return descriptor + (bytes >> 4);
}

template <int N>
struct Instruction;
template <>
struct Instruction<16> {
  using Op = cute::SM90::GMMA::MMA_64x16x16_F32BF16BF16_RS<cute::GMMA::Major::K, cute::GMMA::Major::K>;
};
template <>
struct Instruction<32> {
  using Op = cute::SM90::GMMA::MMA_64x32x16_F32BF16BF16_RS<cute::GMMA::Major::K, cute::GMMA::Major::K>;
};
template <>
struct Instruction<128> {
  using Op = cute::SM90::GMMA::MMA_64x128x16_F32BF16BF16_RS<cute::GMMA::Major::K, cute::GMMA::Major::MN>;
};

// d += a b, or d = a b. Rows of B's tile are columns of D where D has 16 or 32, rows of B where it has 128.
template <int kTiles>
__device__ __forceinline__ void multiply(float (&d)[kTiles][4],
                                         uint32_t const (&a)[4],
                                         uint64_t b,
                                         bool accumulate = true) {
  using namespace cute::SM90::GMMA;
  [&]<size_t... I>(std::index_sequence<I...>) {
    Instruction<8 * kTiles>::Op::fma(a[0], a[1], a[2], a[3], b, d[I / 4][I % 4]...,
                                     accumulate ? ScaleOut::One : ScaleOut::Zero);
  }(std::make_index_sequence<4 * kTiles>{});
}

// Registers that products in flight write: the compiler must not move their uses across this.
template <int kTiles>
__device__ __forceinline__ void hold(float (&d)[kTiles][4]) {
#pragma unroll
  for (auto& tile : d) {
#pragma unroll
    for (float& x : tile) asm volatile("" : "+f"(x)::"memory");
  }
}

// Before the first product that uses registers written since the last.
__device__ __forceinline__ void fence() { cute::warpgroup_arrive(); }
__device__ __forceinline__ void commit() { cute::warpgroup_commit_batch(); }
// All but the last kPending batches are done.
template <int kPending>
__device__ __forceinline__ void wait() {
  cute::warpgroup_wait<kPending>();
}

}  // namespace flashkda::wgmma
