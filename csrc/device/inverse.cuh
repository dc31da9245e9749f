// (I + A)^-1 of a strictly lower 16x16 matrix in the registers of one warp, by masked recursive
// doubling. The Neumann product (I - A)(I + A^2)(I + A^4)... is not usable: for equal keys its
// factors reach thousands and cancel. Here every intermediate is an inverse of a diagonal block.
#pragma once

#include "ptx.cuh"

namespace flashkda {

// A 16x16 matrix as two m16n8 accumulators: c[n][0..1] row lane / 4, c[n][2..3] row lane / 4 + 8,
// columns 8 n + 2 (lane % 4) and the next.
struct Square16 {
  float c[2][4];

  __device__ __forceinline__ static int row(int lane, int r) { return lane / 4 + (r >= 2 ? 8 : 0); }
  __device__ __forceinline__ static int column(int lane, int n, int r) {
    return 8 * n + 2 * (lane % 4) + (r & 1);
  }
};

// As left operand (fp16), its sign flipped if asked.
__device__ __forceinline__ void left_operand(uint32_t (&a)[4], Square16 const& x, float sign = 1.f) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    a[2 * n] = ptx::pack_fp16(sign * x.c[n][0], sign * x.c[n][1]);
    a[2 * n + 1] = ptx::pack_fp16(sign * x.c[n][2], sign * x.c[n][3]);
  }
}

// As right operand: b[n][0] rows 0-7, b[n][1] rows 8-15 of column tile n.
__device__ __forceinline__ void right_operand(uint32_t (&b)[2][2], Square16 const& x) {
  uint32_t a[4];
  left_operand(a, x);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    b[n][0] = ptx::movmatrix_trans(a[2 * n]);
    b[n][1] = ptx::movmatrix_trans(a[2 * n + 1]);
  }
}

// x += a b
__device__ __forceinline__ void multiply_add(Square16& x, uint32_t const (&a)[4], uint32_t const (&b)[2][2]) {
#pragma unroll
  for (int n = 0; n < 2; ++n) ptx::mma_fp16(x.c[n], a, b[n][0], b[n][1]);
}

// T = (I + A)^-1. Entries of A on and above the diagonal must be 0.
__device__ __forceinline__ Square16 unit_lower_inverse(Square16 const& A) {
  int const lane = threadIdx.x & 31;
  Square16 T;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      int const i = Square16::row(lane, r), j = Square16::column(lane, n, r);
      // Blocks of two: I minus the entry that links them.
      T.c[n][r] = i == j ? 1.f : (i == j + 1 && (i & 1) ? -A.c[n][r] : 0.f);
    }
  }
#pragma unroll
  for (int m = 2; m < 16; m *= 2) {
    // E links the two halves of every aligned block of 2 m. T -= T E T.
    Square16 E;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        int const i = Square16::row(lane, r), j = Square16::column(lane, n, r);
        bool const links = i / (2 * m) == j / (2 * m) && (i & m) != 0 && (j & m) == 0;
        E.c[n][r] = links ? A.c[n][r] : 0.f;
      }
    }
    uint32_t a[4], b[2][2];
    left_operand(a, T);
    right_operand(b, E);
    Square16 TE = {};
    multiply_add(TE, a, b);
    left_operand(a, TE, -1.f);
    right_operand(b, T);
    multiply_add(T, a, b);
  }
  return T;
}

}  // namespace flashkda
