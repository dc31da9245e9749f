// Transaction barriers in shared memory.
#pragma once

#include <cutlass/arch/barrier.h>

namespace flashkda {

using Barrier = cutlass::arch::ClusterTransactionBarrier;

}  // namespace flashkda
