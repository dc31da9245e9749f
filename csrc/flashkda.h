// The C ABI of libflashkda_cuda: no torch, no C++ types, nothing thrown across it.
#pragma once

#include "params.h"

#pragma GCC visibility push(default)
extern "C" {

// Raised when the layout of a struct in params.h or the meaning of a function changes.
int flashkda_abi();

// "version;architectures;cudart;nvcc", for `flashkda doctor`.
char const* flashkda_build_info();

// Whether a device can be served: its variant ("hopper", "blackwell"), or null and the reason in
// `message`.
char const* flashkda_probe(int device, char* message, size_t message_bytes);

// 1: from now on scan takes the form that all architectures share, which Blackwell has, on Hopper too. For
// tests, which compare it there; 0 is how it starts.
void flashkda_force_mma_sync(int forced);

size_t flashkda_chunk_fwd_workspace_bytes(flashkda::ChunkFwdParams const* params);
size_t flashkda_chunk_fwd_half_chunk_bytes(flashkda::ChunkFwdParams const* params);

// Enqueue a call on a stream of `device`. 0: done; else `message` says why not.
int flashkda_chunk_fwd(
    flashkda::ChunkFwdParams const* params, int device, void* stream, char* message, size_t message_bytes);
int flashkda_recurrent(
    flashkda::RecurrentParams const* params, int device, void* stream, char* message, size_t message_bytes);

}  // extern "C"
#pragma GCC visibility pop
