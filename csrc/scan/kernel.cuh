// scan: the state through the chunks of one sequence, value head and half or all of V. Four warps hold
// the state in fp32 registers, transposed (rows of V, columns of K), as left operand of every product; one
// thread each of three warps issues the copies, kStages chunks ahead.
#pragma once

#include <type_traits>

#include "../device/sequence.cuh"
#include "../device/tma.cuh"

namespace flashkda {

template <class Arch, int C_, int kRowTiles_>
struct ScanConfig {
  static constexpr int C = C_;
  static constexpr int kRowTiles = kRowTiles_;  // of 16 rows of V, for each warp
  // Rows of V per CTA: they do not meet. All 128 in one CTA read the operands of the products half
  // as often from shared memory, which bounds the throughput; 64 have the shorter step.
  static constexpr int kValues = 64 * kRowTiles;
  static constexpr int kThreads = 128;
  static constexpr bool kLarge = kRowTiles == 2 || Arch::kSharedMemory < 227 * 1024;
  static constexpr int kStages = C == 32 && kLarge ? 2 : 4;  // a power of two
  static constexpr int kCtasPerSm = kRowTiles == 2 ? 2 : 1;
  static_assert((kStages & (kStages - 1)) == 0);
};

template <class Config>
struct ScanMaps {
  decltype(make_token_map<bf16, Config::C, Config::kValues>(cute::SM90_TMA_LOAD{}, {}, 0, 0)) v;
  decltype(make_token_map<bf16, Config::C, Config::kValues>(cute::SM90_TMA_STORE{}, {}, 0, 0)) out;
};

template <class Config>
struct ScanStorage {
  static constexpr int C = Config::C;
  struct Stage {  // written by TMA
    alignas(1024) Record<C> record;
    alignas(1024) bf16 v[C * Config::kValues];
  } stage[Config::kStages];
  alignas(1024) bf16 out[2][C * Config::kValues];   // read by TMA
  alignas(8) uint64_t stage_full[Config::kStages];  // the copies of a chunk have arrived
};

// What a CTA works on.
struct ScanItem {
  int seq, head, values;  // values: first row of V
  int tokens;             // of the sequence
  int64_t start, first_slot;
};

namespace scan {

// Halves of one head are neighbours, so that the second reads the records from the L2 cache.
template <class Config>
__device__ __forceinline__ ScanItem item_of_block(ChunkFwdParams const& p, int block) {
  constexpr int kHalves = kHeadDim / Config::kValues;
  int const row = block / kHalves;
  ScanItem item;
  item.values = block % kHalves * Config::kValues;
  item.seq = nth_longest(p, row / p.value_heads);
  item.head = row % p.value_heads;
  item.start = sequence_bound(p, item.seq);
  item.tokens = static_cast<int>(sequence_bound(p, item.seq + 1) - item.start);
  item.first_slot = first_slot<Config::C>(item.start, item.seq);
  return item;
}

// Sixteen rows of the transposed state, as m16n8 accumulators: columns 8 n + 2 (lane % 4) and the
// next of K; rows lane / 4 and lane / 4 + 8 of the warp's rows of V.
struct StateRows {
  float c[kHeadDim / 8][4];
};

// Two adjacent columns of K, of one row of V, in a [V, K] or [K, V] state.
template <class T>
__device__ __forceinline__ float2 load_pair(T const* data, bool v_first, int row, int column) {
  if (!v_first) {
    T const* const at = data + column * kHeadDim + row;
    return {static_cast<float>(at[0]), static_cast<float>(at[kHeadDim])};
  }
  T const* const at = data + row * kHeadDim + column;
  if constexpr (std::is_same_v<T, float>) return *reinterpret_cast<float2 const*>(at);
  return ptx::unpack_bf16(*reinterpret_cast<uint32_t const*>(at));
}

template <class T>
__device__ __forceinline__ void store_pair(
    T* data, bool v_first, int row, int column, float first, float second) {
  if (!v_first) {
    T* const at = data + column * kHeadDim + row;
    at[0] = static_cast<T>(first);
    at[kHeadDim] = static_cast<T>(second);
  } else if constexpr (std::is_same_v<T, float>) {
    *reinterpret_cast<float2*>(data + row * kHeadDim + column) = {first, second};
  } else {
    *reinterpret_cast<uint32_t*>(data + row * kHeadDim + column) = ptx::pack_bf16(first, second);
  }
}

template <class T>
__device__ __forceinline__ void load_state(StateRows& state, T const* data, bool v_first, int row) {
  int const lane = threadIdx.x & 31;
#pragma unroll
  for (int n = 0; n < kHeadDim / 8; ++n) {
    int const column = 8 * n + 2 * (lane % 4);
    float2 const low = load_pair(data, v_first, row + lane / 4, column);
    float2 const high = load_pair(data, v_first, row + lane / 4 + 8, column);
    state.c[n][0] = low.x;
    state.c[n][1] = low.y;
    state.c[n][2] = high.x;
    state.c[n][3] = high.y;
  }
}

template <class T>
__device__ __forceinline__ void store_state(StateRows const& state, T* data, bool v_first, int row) {
  int const lane = threadIdx.x & 31;
#pragma unroll
  for (int n = 0; n < kHeadDim / 8; ++n) {
    int const column = 8 * n + 2 * (lane % 4);
    store_pair(data, v_first, row + lane / 4, column, state.c[n][0], state.c[n][1]);
    store_pair(data, v_first, row + lane / 4 + 8, column, state.c[n][2], state.c[n][3]);
  }
}

__device__ __forceinline__ void begin_state(StateRows& state,
                                            ChunkFwdParams const& p,
                                            ScanItem const& item,
                                            int row) {
  int64_t const base = (static_cast<int64_t>(item.seq) * p.value_heads + item.head) * kHeadDim * kHeadDim;
  if (p.initial_state.data == nullptr) {
    state = {};
  } else if (p.initial_state.dtype == Dtype::kFloat32) {
    load_state(state, static_cast<float const*>(p.initial_state.data) + base, p.state_v_first, row);
  } else {
    load_state(state, static_cast<bf16 const*>(p.initial_state.data) + base, p.state_v_first, row);
  }
}

__device__ __forceinline__ void end_state(StateRows const& state,
                                          ChunkFwdParams const& p,
                                          ScanItem const& item,
                                          int row) {
  int64_t const base = (static_cast<int64_t>(item.seq) * p.value_heads + item.head) * kHeadDim * kHeadDim;
  if (p.final_state.data == nullptr) return;
  if (p.final_state.dtype == Dtype::kFloat32) {
    store_state(state, static_cast<float*>(p.final_state.data) + base, p.state_v_first, row);
  } else {
    store_state(state, static_cast<bf16*>(p.final_state.data) + base, p.state_v_first, row);
  }
}

// Accumulator tiles 2 j and 2 j + 1 as the left operand of columns [16 j, 16 j + 16).
__device__ __forceinline__ void left_operand(uint32_t (&a)[4],
                                             float const (&low)[4],
                                             float const (&high)[4]) {
  a[0] = ptx::pack_bf16(low[0], low[1]);
  a[1] = ptx::pack_bf16(low[2], low[3]);
  a[2] = ptx::pack_bf16(high[0], high[1]);
  a[3] = ptx::pack_bf16(high[2], high[3]);
}

// Token row and 16-byte piece that a lane addresses to load, from rows that are columns of the
// result, the right operands of two adjacent column tiles.
struct OperandLane {
  int row, piece;
  __device__ OperandLane() {
    int const lane = threadIdx.x & 31;
    row = (lane & 7) + ((lane >> 4) << 3);
    piece = (lane >> 3) & 1;
  }
};

// Accumulators of [16 kRowTiles rows of V, C tokens].
template <class Config>
struct TokenColumns {
  float c[Config::kRowTiles][Config::C / 8][4];
};
// The same as left operands.
template <class Config>
struct TokenOperand {
  uint32_t a[Config::kRowTiles][Config::C / 16][4];
};

template <class Config>
__device__ __forceinline__ TokenOperand<Config> as_operand(TokenColumns<Config> const& x) {
  TokenOperand<Config> result;
#pragma unroll
  for (int m = 0; m < Config::kRowTiles; ++m) {
#pragma unroll
    for (int j = 0; j < Config::C / 16; ++j) {
      left_operand(result.a[m][j], x.c[m][2 * j], x.c[m][2 * j + 1]);
    }
  }
  return result;
}

// recalled, read = state times the rows of k_in, q_in [C, 128]. Both at once: twice as many
// independent accumulators cover the latency of the products.
template <class Config>
__device__ __forceinline__ void times_rows(TokenColumns<Config>& recalled,
                                           TokenColumns<Config>& read,
                                           StateRows const (&state)[Config::kRowTiles],
                                           bf16 const* k_in,
                                           bf16 const* q_in) {
  constexpr int C = Config::C;
  OperandLane const lane;
  uint32_t const k_base = ptx::smem_address(k_in), q_base = ptx::smem_address(q_in);
  recalled = {};
  read = {};
#pragma unroll
  for (int j = 0; j < kHeadDim / 16; ++j) {
    uint32_t a[Config::kRowTiles][4];
#pragma unroll
    for (int m = 0; m < Config::kRowTiles; ++m) {
      left_operand(a[m], state[m].c[2 * j], state[m].c[2 * j + 1]);
    }
#pragma unroll
    for (int n = 0; n < C / 16; ++n) {
      uint32_t const offset = tile_offset<C>(16 * n + lane.row, 2 * j + lane.piece);
      uint32_t k[4], q[4];
      ptx::ldmatrix_x4(k, k_base + offset);
      ptx::ldmatrix_x4(q, q_base + offset);
#pragma unroll
      for (int m = 0; m < Config::kRowTiles; ++m) {
        ptx::mma_bf16(recalled.c[m][2 * n], a[m], k[0], k[1]);
        ptx::mma_bf16(recalled.c[m][2 * n + 1], a[m], k[2], k[3]);
        ptx::mma_bf16(read.c[m][2 * n], a[m], q[0], q[1]);
        ptx::mma_bf16(read.c[m][2 * n + 1], a[m], q[2], q[3]);
      }
    }
  }
}

// c += x L^T for a lower triangular L [C, C].
template <class Config>
__device__ __forceinline__ void times_lower(TokenColumns<Config>& c,
                                            TokenOperand<Config> const& x,
                                            bf16 const* square) {
  constexpr int C = Config::C;
  OperandLane const lane;
  uint32_t const base = ptx::smem_address(square);
#pragma unroll
  for (int j = 0; j < C / 16; ++j) {
#pragma unroll
    for (int n = j; n < C / 16; ++n) {
      uint32_t b[4];
      ptx::ldmatrix_x4(b, base + square_offset<C>(16 * n + lane.row, 2 * j + lane.piece));
#pragma unroll
      for (int m = 0; m < Config::kRowTiles; ++m) {
        ptx::mma_bf16(c.c[m][2 * n], x.a[m][j], b[0], b[1]);
        ptx::mma_bf16(c.c[m][2 * n + 1], x.a[m][j], b[2], b[3]);
      }
    }
  }
}

// state = state diag(decay) + x K_out, x [V rows, tokens].
template <class Config>
__device__ __forceinline__ void advance(StateRows (&state)[Config::kRowTiles],
                                        TokenOperand<Config> const& x,
                                        float const* decay,
                                        bf16 const* k_out) {
  constexpr int C = Config::C;
  int const lane = threadIdx.x & 31;
  uint32_t const base = ptx::smem_address(k_out);
#pragma unroll
  for (int n = 0; n < kHeadDim / 16; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float2 const f = *reinterpret_cast<float2 const*>(&decay[16 * n + 8 * half + 2 * (lane % 4)]);
#pragma unroll
      for (int m = 0; m < Config::kRowTiles; ++m) {
        float (&c)[4] = state[m].c[2 * n + half];
        c[0] *= f.x;
        c[1] *= f.y;
        c[2] *= f.x;
        c[3] *= f.y;
      }
    }
#pragma unroll
    for (int j = 0; j < C / 16; ++j) {
      uint32_t b[4];
      int const row = 16 * j + ((lane >> 3) & 1) * 8 + (lane & 7), piece = 2 * n + (lane >> 4);
      ptx::ldmatrix_x4_trans(b, base + tile_offset<C>(row, piece));
#pragma unroll
      for (int m = 0; m < Config::kRowTiles; ++m) {
        ptx::mma_bf16(state[m].c[2 * n], x.a[m][j], b[0], b[1]);
        ptx::mma_bf16(state[m].c[2 * n + 1], x.a[m][j], b[2], b[3]);
      }
    }
  }
}

// The warp's row tile m, in units of 16 rows of the CTA's values.
template <class Config>
__device__ __forceinline__ int row_tile(int m) {
  return threadIdx.x / 32 * Config::kRowTiles + m;
}

// Shared address of the lane's row of the four 8x8 pieces that hold 16 tokens of 16 rows of V.
template <class Config>
__device__ __forceinline__ uint32_t values_address(bf16 const* tile, int token, int m) {
  int const lane = threadIdx.x & 31;
  int const row = token + (lane >> 4) * 8 + (lane & 7);
  int const piece = 2 * row_tile<Config>(m) + ((lane >> 3) & 1);
  return ptx::smem_address(tile) + tile_offset<Config::C>(row, piece);
}

// x = beta v - beta_key x: from what the state recalls to what it gets wrong.
template <class Config>
__device__ __forceinline__ void residual(TokenColumns<Config>& x,
                                         bf16 const* values,
                                         Record<Config::C> const& record,
                                         int size) {
  int const lane = threadIdx.x & 31;
#pragma unroll
  for (int n = 0; n < Config::C / 16; ++n) {
#pragma unroll
    for (int m = 0; m < Config::kRowTiles; ++m) {
      uint32_t v[4];
      ptx::ldmatrix_x4_trans(v, values_address<Config>(values, 16 * n, m));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float (&r)[4] = x.c[m][2 * n + half];
        int const token = 16 * n + 8 * half + 2 * (lane % 4);
        float2 const beta = *reinterpret_cast<float2 const*>(&record.beta[token]);
        float2 const key = *reinterpret_cast<float2 const*>(&record.beta_key[token]);
        float2 low = ptx::unpack_bf16(v[2 * half]), high = ptx::unpack_bf16(v[2 * half + 1]);
        // Rows past the end belong to another sequence and may be NaN: replaced, not scaled by 0.
        if (token >= size) low.x = high.x = 0.f;
        if (token + 1 >= size) low.y = high.y = 0.f;
        r[0] = beta.x * low.x - key.x * r[0];
        r[1] = beta.y * low.y - key.y * r[1];
        r[2] = beta.x * high.x - key.x * r[2];
        r[3] = beta.y * high.y - key.y * r[3];
      }
    }
  }
}

// Scales the columns by a factor per token.
template <class Config>
__device__ __forceinline__ void scale_columns(TokenColumns<Config>& x, float const* factor) {
  int const lane = threadIdx.x & 31;
#pragma unroll
  for (int n = 0; n < Config::C / 8; ++n) {
    float2 const f = *reinterpret_cast<float2 const*>(&factor[8 * n + 2 * (lane % 4)]);
#pragma unroll
    for (int m = 0; m < Config::kRowTiles; ++m) {
      x.c[m][n][0] *= f.x;
      x.c[m][n][1] *= f.y;
      x.c[m][n][2] *= f.x;
      x.c[m][n][3] *= f.y;
    }
  }
}

template <class Config>
__device__ __forceinline__ void store_outputs(TokenOperand<Config> const& o, bf16* out) {
#pragma unroll
  for (int n = 0; n < Config::C / 16; ++n) {
#pragma unroll
    for (int m = 0; m < Config::kRowTiles; ++m) {
      ptx::stmatrix_x4_trans(values_address<Config>(out, 16 * n, m), o.a[m][n]);
    }
  }
}

// One chunk: advances the state, leaves the outputs in `out` [C, kValues].
template <class Config>
__device__ __forceinline__ void step(StateRows (&state)[Config::kRowTiles],
                                     typename ScanStorage<Config>::Stage const& stage,
                                     bf16* out,
                                     int size) {
  auto const& record = stage.record;
  TokenColumns<Config> x, o;
  times_rows<Config>(x, o, state, record.k_in, record.q_in);
  residual<Config>(x, stage.v, record, size);
  // U = R + (T - I) R: the identity part is never rounded.
  times_lower<Config>(x, as_operand<Config>(x), record.inverse);
  scale_columns<Config>(x, record.inverse_key);
  TokenOperand<Config> const update = as_operand<Config>(x);
  auto const finish_outputs = [&] {
    times_lower<Config>(o, update, record.scores);
    scale_columns<Config>(o, record.output);
    store_outputs<Config>(as_operand<Config>(o), out);
  };
  // With two row tiles the state's products keep the tensor cores busy and the outputs' way to
  // shared memory hides behind them; with one, the state comes first. Measured: 3 % and 12 %.
  if constexpr (Config::kRowTiles == 2) finish_outputs();
  advance<Config>(state, update, record.decay, record.k_out);
  if constexpr (Config::kRowTiles == 1) finish_outputs();
}

// Copies are issued by one thread each of different warps: all warps wait for the slowest.
enum CopyWarp { kStoresOut = 0, kLoadsValues = 1, kLoadsRecord = 2 };

// Loads a chunk of the sequence, if there is one, to its stage.
template <class Config>
__device__ __forceinline__ void load_stage(ScanStorage<Config>& smem,
                                           ChunkFwdParams const& p,
                                           ScanMaps<Config> const& maps,
                                           ScanItem const& item,
                                           int chunk) {
  constexpr int C = Config::C;
  int const done = chunk * C, index = chunk % Config::kStages, warp = threadIdx.x / 32;
  if (done >= item.tokens) return;
  auto& stage = smem.stage[index];
  uint64_t* const full = &smem.stage_full[index];
  if (warp == kLoadsValues) {
    load_tile<bf16, C, Config::kValues>(
        maps.v,
        token_tile<C, Config::kValues>(maps.v, p.num_tokens, p.value_heads, item.start + done,
                                       item.values / Config::kValues, item.head),
        stage.v, full);
  } else if (warp == kLoadsRecord) {
    auto const* record = static_cast<Record<C> const*>(p.workspace) +
                         item.head * num_slots<C>(p.num_tokens, p.num_seqs) + item.first_slot + chunk;
    Barrier::arrive_and_expect_tx(full, sizeof(Record<C>) + sizeof(stage.v));
    ptx::bulk_load(ptx::smem_address(&stage.record), record, sizeof(Record<C>), ptx::smem_address(full));
  }
}

// The last, shorter chunk: its tile would reach into the next sequence.
template <class Config>
__device__ __forceinline__ void store_tail(
    bf16 const* out, ChunkFwdParams const& p, ScanItem const& item, int64_t token, int size) {
  constexpr int kPieces = Config::kValues / 8;
#pragma unroll 1
  for (int i = ptx::thread_anew(); i < size * kPieces; i += Config::kThreads) {
    int const row = i / kPieces, piece = i % kPieces;
    auto const* from = reinterpret_cast<char const*>(out) + tile_offset<Config::C>(row, piece);
    auto* to = static_cast<bf16*>(p.out.data) + (token + row) * p.out.row_stride + item.head * kHeadDim +
               item.values + piece * 8;
    *reinterpret_cast<int4*>(to) = *reinterpret_cast<int4 const*>(from);
  }
}

// Zeros in the rows past the last sequence, if they are wanted: its CTAs write them.
template <class Config>
__device__ __forceinline__ void clear_padding(ChunkFwdParams const& p, ScanItem const& item) {
  if (!p.clear_padding || item.seq != p.num_seqs - 1) return;
  constexpr int kPieces = Config::kValues / 8;
  for (int64_t token = item.start + item.tokens + threadIdx.x / kPieces; token < p.num_tokens;
       token += Config::kThreads / kPieces) {
    auto* const to = static_cast<bf16*>(p.out.data) + token * p.out.row_stride + item.head * kHeadDim +
                     item.values + threadIdx.x % kPieces * 8;
    *reinterpret_cast<int4*>(to) = {};
  }
}

template <class Config>
__device__ __forceinline__ void scan_sequence(ScanStorage<Config>& smem,
                                              ChunkFwdParams const& p,
                                              ScanMaps<Config> const& maps,
                                              ScanItem const& item) {
  constexpr int C = Config::C;
  int const warp = threadIdx.x / 32;
  bool const elected = (threadIdx.x & 31) == 0;
  if (elected) {
    ptx::wait_for_dependency();  // prepare's records
    for (int i = 0; i < Config::kStages; ++i) load_stage<Config>(smem, p, maps, item, i);
  }
  StateRows state[Config::kRowTiles];
#pragma unroll
  for (int m = 0; m < Config::kRowTiles; ++m) {
    begin_state(state[m], p, item, item.values + 16 * row_tile<Config>(m));
  }
  for (int chunk = 0; chunk * C < item.tokens; ++chunk) {
    int const size = min(item.tokens - chunk * C, C), index = chunk % Config::kStages;
    bf16* const out = smem.out[chunk % 2];
    Barrier::wait(&smem.stage_full[index], chunk / Config::kStages % 2);
    step<Config>(state, smem.stage[index], out, size);
    ptx::fence_proxy_async();
    // The store before this one has been read: its buffer is free for the next chunk.
    if (elected && warp == kStoresOut) cute::tma_store_wait<0>();
    __syncthreads();  // the outputs are there, and nobody needs the stage any more
    if (size < C) store_tail<Config>(out, p, item, item.start + chunk * C, size);
    if (elected) {
      load_stage<Config>(smem, p, maps, item, chunk + Config::kStages);
      if (warp == kStoresOut && size == C) {
        store_tile<bf16, C, Config::kValues>(
            maps.out,
            token_tile<C, Config::kValues>(maps.out, p.num_tokens, p.value_heads, item.start + chunk * C,
                                           item.values / Config::kValues, item.head),
            out);
        cute::tma_store_arrive();
      }
    }
  }
  ScanItem const same = item_of_block<Config>(p, ptx::block_anew());
#pragma unroll
  for (int m = 0; m < Config::kRowTiles; ++m) {
    end_state(state[m], p, same, same.values + 16 * row_tile<Config>(m));
  }
  clear_padding<Config>(p, same);
  if (elected && warp == kStoresOut) cute::tma_store_wait<0>();  // shared memory must outlive them
}

}  // namespace scan

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    scan_kernel(__grid_constant__ ChunkFwdParams const p, __grid_constant__ ScanMaps<Config> const maps) {
  extern __shared__ __align__(1024) char raw_storage[];
  auto& smem = *reinterpret_cast<ScanStorage<Config>*>(raw_storage);
  ScanItem const item = scan::item_of_block<Config>(p, blockIdx.x);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Config::kStages; ++i) Barrier::init(&smem.stage_full[i], 1);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();  // the barriers are initialised
  scan::scan_sequence<Config>(smem, p, maps, item);
}

}  // namespace flashkda
