// The border between the architecture-neutral host code and the kernels of one architecture.
#pragma once

#include <string>

#include "params.h"

namespace flashkda {

// Empty: all went well. Else a sentence for the user.
using Failure = std::string;

// Instantiated in launch.cu and decode/launch.cu, compiled once for each architecture. `device` is current;
// `stream` is a stream of it.
template <class Arch>
Failure launch_chunk_fwd(ChunkFwdParams const& params, int device, void* stream);
template <class Arch>
Failure launch_recurrent(RecurrentParams const& params, int device, void* stream);

// Whether scan leaves wgmma alone where there is some (flashkda_force_mma_sync).
bool mma_sync_is_forced();

// Result of the last failed cuTensorMapEncodeTiled of this thread, 0 when none failed; resets it.
int take_encode_error();

}  // namespace flashkda
