// decode: the recurrence token by token, for a few tokens per sequence. The state is read once, kept in fp32
// registers and written once, whatever the number of tokens: at one token the time is that of moving it.
//
// One CTA serves a tile, kValues values of the state of one sequence and value head, or up to kPasses such
// tiles one after the other. Each warp holds the state of its own kWarpValues values.
#pragma once

#include "../device/barrier.cuh"
#include "../device/route.cuh"
#include "state.cuh"
#include "token.cuh"

namespace flashkda {

template <class Config>
struct DecodeStorage {
  union {
    // A [V, K] tile is one block of memory: it arrives here by a bulk copy, and takes no registers meanwhile.
    alignas(128)
        typename Config::StateT tile[Config::kPasses][Config::kVFirst ? Config::kValues * kHeadDim : 1];
    // Between kTokens tokens and the next: registers are needed to stage these.
    float4 parked[Config::kThreadValues * Config::kThreadKeys / 4][Config::kThreads];
  };
  DecodeToken token[Config::kTokens];
  int64_t target;  // slot of the final state, over several passes: registers are few
  alignas(8) uint64_t state_full[Config::kPasses][Config::kCopies];
};

namespace decode {

// Sums every x[j] over the key lanes. Halves change places while there are values left to share out, so
// that afterwards a lane holds the sum of value owned_value(key_lane) alone, in x[0].
template <class Config>
__device__ __forceinline__ void sum_over_keys(float (&x)[Config::kThreadValues]) {
  constexpr int kStride = Config::kVFirst ? 1 : Config::kValueLanes;  // lanes from one key lane to the next
  Lane<Config> const lane;
  int bit = 1;
#pragma unroll
  for (int half = Config::kThreadValues / 2; half > 0; half /= 2, bit *= 2) {
    bool const upper = (lane.key_lane & bit) != 0;
#pragma unroll
    for (int j = 0; j < half; ++j) {
      float const kept = upper ? x[j + half] : x[j], given = upper ? x[j] : x[j + half];
      x[j] = kept + __shfl_xor_sync(0xffffffffu, given, bit * kStride);
    }
  }
#pragma unroll
  for (; bit < Config::kKeyLanes; bit *= 2) x[0] += __shfl_xor_sync(0xffffffffu, x[0], bit * kStride);
}

// The value that a key lane holds after sum_over_keys(): its low bits, in reverse.
template <class Config>
__device__ __forceinline__ constexpr int owned_value(int key_lane) {
  int value = 0;
  for (int half = Config::kThreadValues / 2, bit = 1; half > 0; half /= 2, bit *= 2) {
    if ((key_lane & bit) != 0) value += half;
  }
  return value;
}

// That value, counted in the CTA; several lanes hold the same, one of them writes outputs.
template <class Config>
__device__ __forceinline__ int own_value() {
  Lane<Config> const lane;
  return lane.value(owned_value<Config>(lane.key_lane));
}
template <class Config>
__device__ __forceinline__ bool writes_outputs() {
  return Lane<Config>().key_lane < Config::kThreadValues;
}

// One token: the state moves on, outputs are written. With S the decayed state, both S k and S q are taken
// in one pass, and the output after the update follows from them: o = S q + u (k q).
template <class Config>
__device__ __forceinline__ void advance(State<Config>& state,
                                        DecodeToken const& token,
                                        int first,
                                        uint16_t* out) {
  Lane<Config> const lane;
  float recalled[Config::kThreadValues] = {}, read[Config::kThreadValues] = {};
#pragma unroll
  for (int i = 0; i < Config::kThreadKeys; i += 4) {
    float4 const decay = *reinterpret_cast<float4 const*>(&token.decay[lane.key(i)]);
    float const d[4] = {decay.x, decay.y, decay.z, decay.w};
    float k[4], q[4];
    unpack_channels(k, token.key[lane.key(i) / 4]);
    unpack_channels(q, token.query[lane.key(i) / 4]);
#pragma unroll
    for (int j = 0; j < Config::kThreadValues; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& s = state.s[j][i + e];
        s *= d[e];
        recalled[j] = fmaf(s, k[e], recalled[j]);
        read[j] = fmaf(s, q[e], read[j]);
      }
    }
  }
  sum_over_keys<Config>(recalled);
  sum_over_keys<Config>(read);
  int const value = own_value<Config>();
  float const wanted = load_float(token.value, Dtype::kBfloat16, first + value);
  float const update = token.beta * (wanted - token.key_factor * recalled[0]);
  if (writes_outputs<Config>()) {
    out[value] = ptx::pack_bf16(update * token.key_query + token.query_factor * read[0], 0.f) & 0xffffu;
  }
  float updates[Config::kThreadValues];
#pragma unroll
  for (int owner = 0; owner < Config::kThreadValues; ++owner) {
    updates[owned_value<Config>(owner)] =
        __shfl_sync(0xffffffffu, update * token.key_factor, lane.of(owner, lane.value_lane));
  }
#pragma unroll
  for (int i = 0; i < Config::kThreadKeys; i += 4) {
    float k[4];
    unpack_channels(k, token.key[lane.key(i) / 4]);
#pragma unroll
    for (int j = 0; j < Config::kThreadValues; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) state.s[j][i + e] = fmaf(updates[j], k[e], state.s[j][i + e]);
    }
  }
}

// The same bf16 to a warp's part of the outputs of some tokens.
template <class Config>
__device__ __forceinline__ void fill(
    RecurrentParams const& p, int64_t token, int64_t end, int64_t step, int column, uint16_t value) {
  int const in_warp = threadIdx.x / 32 * Config::kWarpValues;
#pragma unroll 1
  for (; token < end; token += step) {
#pragma unroll 1
    for (int i = threadIdx.x & 31; i < Config::kWarpValues; i += 32) {
      static_cast<uint16_t*>(p.out.data)[token * p.out.row_stride + column + in_warp + i] = value;
    }
  }
}

constexpr uint16_t kZero = 0, kNaN = 0x7fff;

// What a CTA works on.
struct Tile {
  int n, head, first;  // first: value
  int passes;          // over tiles that follow each other
  int length;          // tokens of the sequence
  int64_t start;       // its first token
};

template <class Config>
__device__ __forceinline__ Tile tile_of_block(RecurrentParams const& p) {
  constexpr unsigned kTiles = kHeadDim / Config::kValues;
  unsigned const parts = Config::kPasses == 1 ? kTiles : gridDim.x / p.value_heads;
  Tile tile;
  tile.n = static_cast<int>(blockIdx.z * gridDim.y + blockIdx.y);
  tile.head = blockIdx.x / parts;
  tile.passes = Config::kPasses == 1 ? 1 : kTiles / parts;
  tile.first = blockIdx.x % parts * tile.passes * Config::kValues;
  if (tile.n >= p.num_seqs) return tile;
  tile.start = sequence_bound(p, tile.n);
  tile.length = static_cast<int>(sequence_bound(p, tile.n + 1) - tile.start);
  return tile;
}

// After a token: its state to the slot of the token, if it has one.
template <class Config>
__device__ __forceinline__ void keep_state(
    State<Config> const& state, RecurrentParams const& p, Tile const& tile, int first, int t, uint16_t* out) {
  using T = typename Config::StateT;
  bool const has_slot = t < p.slots.columns;
  int64_t const slot = has_slot ? slot_at(p.slots, tile.n, t) : -1;
  if (has_slot && is_pad(p, slot)) return;
  if (is_inside(p.final_state, slot)) {
    store_state<Config>(state, head_state<T>(p.final_state, slot, tile.head), first);
  } else if (writes_outputs<Config>()) {
    out[own_value<Config>()] = kNaN;
  }
}

// The tokens that are staged together, one warp each.
template <class Config>
struct Batch {
  int begin, count;  // in the sequence
  __device__ Batch(Tile const& tile, int done)
      : begin(done), count(min(tile.length - done, Config::kTokens)) {}
};

// What a lane holds of the tokens that its warp asked for.
struct Requested {
  float beta;  // of one token of the batch
  LaneGate gate;
};

template <class Config>
__device__ __forceinline__ Requested request_tokens(DecodeStorage<Config>& smem,
                                                    RecurrentParams const& p,
                                                    Tile const& tile,
                                                    Batch<Config> const& batch) {
  int const lane = ptx::thread_anew() & 31, warp = ptx::thread_anew() / 32;
  int64_t const first = tile.start + batch.begin;
  Requested requested = {};
  if (warp >= batch.count) return requested;
#pragma unroll 1
  for (int t = warp; t < batch.count; t += Config::kWarps) {
    request_token(smem.token[t], p, first + t, tile.head);
  }
  requested.gate = lane_gate(p, tile.head);
  requested.beta = step_size(p, first + min(lane, batch.count - 1), tile.head);
  return requested;
}

template <class Config>
__device__ __forceinline__ void stage_tokens(DecodeStorage<Config>& smem,
                                             RecurrentParams const& p,
                                             Batch<Config> const& batch,
                                             Requested const& requested) {
  ptx::async_copy_wait();
#pragma unroll 1
  for (int t = ptx::thread_anew() / 32; t < batch.count; t += Config::kWarps) {
    stage_token(smem.token[t], p, requested.gate, __shfl_sync(0xffffffffu, requested.beta, t));
  }
}

template <class Config>
__device__ __forceinline__ void park(DecodeStorage<Config>& smem, State<Config> const& state) {
#pragma unroll
  for (int j = 0; j < Config::kThreadValues; ++j) {
#pragma unroll
    for (int i = 0; i < Config::kThreadKeys; i += 4) {
      float const(&s)[Config::kThreadKeys] = state.s[j];
      smem.parked[(j * Config::kThreadKeys + i) / 4][threadIdx.x] = {s[i], s[i + 1], s[i + 2], s[i + 3]};
    }
  }
}

template <class Config>
__device__ __forceinline__ void unpark(State<Config>& state, DecodeStorage<Config> const& smem) {
#pragma unroll
  for (int j = 0; j < Config::kThreadValues; ++j) {
#pragma unroll
    for (int i = 0; i < Config::kThreadKeys; i += 4) {
      float4 const x = smem.parked[(j * Config::kThreadKeys + i) / 4][threadIdx.x];
      float (&s)[Config::kThreadKeys] = state.s[j];
      s[i] = x.x, s[i + 1] = x.y, s[i + 2] = x.z, s[i + 3] = x.w;
    }
  }
}

// Asks for the tile of a pass, with a copy by each of the first kCopies warps.
template <class Config>
__device__ __forceinline__ void request_state(
    DecodeStorage<Config>& smem, RecurrentParams const& p, Route const& route, Tile const& tile, int pass) {
  using T = typename Config::StateT;
  if (threadIdx.x % 32 != 0 || threadIdx.x / 32 >= Config::kCopies) return;
  constexpr int kSize = Config::kValues * kHeadDim / Config::kCopies;
  int const copy = threadIdx.x / 32, offset = copy * kSize;
  uint64_t* const full = &smem.state_full[pass][copy];
  Barrier::init(full, 1);
  cutlass::arch::fence_barrier_init();
  Barrier::arrive_and_expect_tx(full, kSize * sizeof(T));
  T const* const from = head_state<T const>(p.initial_state, route.source, tile.head);
  ptx::bulk_load(ptx::smem_address(smem.tile[pass] + offset),
                 from + (tile.first + pass * Config::kValues) * kHeadDim + offset, kSize * sizeof(T),
                 ptx::smem_address(full));
}

template <class Config>
__device__ __forceinline__ void begin_state(State<Config>& state,
                                            DecodeStorage<Config>& smem,
                                            RecurrentParams const& p,
                                            Route const& route,
                                            Tile const& tile,
                                            int pass,
                                            bool has_state) {
  using T = typename Config::StateT;
  if (!has_state) {
    state = {};
  } else if constexpr (Config::kVFirst) {
    Barrier::wait(&smem.state_full[pass][threadIdx.x / (Config::kThreads / Config::kCopies)], 0);
    load_state<Config>(state, smem.tile[pass], 0);
  } else {
    load_state<Config>(state, head_state<T const>(p.initial_state, route.source, tile.head),
                       tile.first + pass * Config::kValues);
  }
}

}  // namespace decode

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    decode_kernel(__grid_constant__ RecurrentParams const p) {
  using namespace decode;
  using T = typename Config::StateT;
  __shared__ DecodeStorage<Config> smem;

  // The next kernel may start once all before this one have ended: of those that may still run when it reads
  // early, this is the only one.
  auto const begin = [] {
    ptx::wait_for_dependency();
    ptx::launch_dependents();
  };
  // Nothing is read before the kernel in front has ended, unless the caller promises that it may be.
  if (!p.state_is_ready) begin();
  Tile const tile = tile_of_block<Config>(p);
  if (tile.n >= p.num_seqs) return;
  // Tokens are asked for first: nothing can be while the index of a slot is awaited.
  Requested requested = {};
  if (!p.state_is_ready) requested = request_tokens(smem, p, tile, Batch<Config>(tile, 0));
  Route const route = route_of(p, tile.n);
  if (Config::kPasses > 1 && threadIdx.x == 0) smem.target = route.target;
  bool const is_running = tile.length > 0 && route.fate == Fate::kRuns;
  bool const is_dense = p.final_place == FinalPlace::kDense;
  bool const has_state = route.source >= 0 && route.fate == Fate::kRuns && (is_running || is_dense);
  // More tokens than are staged at a time take the room of the later tiles: these are then asked for when
  // their turn comes, and the tokens again.
  bool const is_long = tile.length > Config::kTokens;
  if (Config::kVFirst && has_state) {
#pragma unroll
    for (int pass = 0; pass < Config::kPasses; ++pass) {
      if (pass == 0 || (pass < tile.passes && !is_long)) {
        request_state(smem, p, route, tile, pass);
      }
    }
  }
  if (p.state_is_ready) {
    begin();
    requested = request_tokens(smem, p, tile, Batch<Config>(tile, 0));
  }
  if (is_running) stage_tokens(smem, p, Batch<Config>(tile, 0), requested);

  auto const work = [&](int pass) {
    bool const starts_over = Config::kPasses > 1 && pass > 0 && is_long;
    if (starts_over) {
      cutlass::arch::fence_view_async_shared();  // what was parked is written before the copy arrives
      __syncthreads();
      if (Config::kVFirst && has_state) request_state(smem, p, route, tile, pass);
    }
    int const first = tile.first + pass * Config::kValues, column = tile.head * kHeadDim + first;
    State<Config> state;
#pragma unroll 1
    for (int done = 0; is_running && done < tile.length; done += Config::kTokens) {
      Batch<Config> const batch(tile, done);
      if (done > 0 || starts_over) stage_tokens(smem, p, batch, request_tokens(smem, p, tile, batch));
      __syncthreads();  // these tokens are there, and the barriers
      if (done > 0) {
        unpark(state, smem);
      } else {
        begin_state<Config>(state, smem, p, route, tile, pass, has_state);
      }
#pragma unroll 1
      for (int t = 0; t < batch.count; ++t) {
        auto* const out =
            static_cast<uint16_t*>(p.out.data) + (tile.start + done + t) * p.out.row_stride + column;
        advance<Config>(state, smem.token[t], first, out);
        if (p.final_place == FinalPlace::kPerToken) keep_state<Config>(state, p, tile, first, done + t, out);
      }
      if (done + batch.count < tile.length) {
        __syncthreads();  // tokens and tile are used up
        park(smem, state);
      }
    }
    if (!is_running) {
      fill<Config>(p, tile.start, tile.start + tile.length, 1, column,
                   route.fate == Fate::kBroken ? kNaN : kZero);
      __syncthreads();  // the barriers are there
      begin_state<Config>(state, smem, p, route, tile, pass, has_state);
      if (route.fate == Fate::kBroken) make_nan(state);
    }
    bool const to_slot = p.final_place == FinalPlace::kSource || p.final_place == FinalPlace::kGiven;
    if (is_dense || (to_slot && is_running)) {
      int64_t const target = Config::kPasses > 1 ? smem.target : route.target;
      store_state<Config>(state, head_state<T>(p.final_state, target, tile.head), first);
    }
    if (p.clear_padding) {
      fill<Config>(p, sequence_bound(p, p.num_seqs) + tile.n, p.num_tokens, p.num_seqs, column, kZero);
    }
  };
  if constexpr (Config::kPasses == 1) {
    work(0);
  } else {
#pragma unroll 1
    for (int pass = 0; pass < tile.passes; ++pass) work(pass);
  }
}

}  // namespace flashkda
