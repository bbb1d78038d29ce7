// Backward in one pass over x and dy: dx is written and the sums over rows are kept in registers on the way.
#include "adaln_backward.h"
#include "adaln_ring.cuh"

namespace adaln {
namespace {

// What a launch needs beside the ring.
struct OnePass {
  AdalnBackward op;
  Geometry geometry;
  Chunks chunks;
  Partials partials;
  Ring ring;
  int first_blocks;  // that start together
  float inverse;     // 1 / features
};

// Threads of a block at most: what the registers of a thread leave room for.
__host__ __device__ constexpr int max_threads(int tile_rows, bool branch, int element_bytes) {
  if (branch) return tile_rows == 2 ? 384 : element_bytes == 4 ? 512 : 640;
  return tile_rows == 4 ? 512 : 640;
}

// n (4 or 8) columns of this thread.
template <class T, int n>
__device__ __forceinline__ void read_columns(const char* p, float (&f)[n]) {
  if constexpr (T::kWidth == n) {
    T::unpack(*reinterpret_cast<const uint4*>(p), f);
  } else if constexpr (n == 8) {
    float half[4];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      read_columns<T, 4>(p + 16 * k, half);
#pragma unroll
      for (int i = 0; i < 4; ++i) f[4 * k + i] = half[i];
    }
  } else {
    const uint2 v = *reinterpret_cast<const uint2*>(p);
    float eight[8];
    T::unpack(make_uint4(v.x, v.y, 0, 0), eight);
#pragma unroll
    for (int i = 0; i < 4; ++i) f[i] = eight[i];
  }
}

template <class T, int n>
__device__ __forceinline__ void round_all(float (&f)[n]) {
  if constexpr (T::kBytes == 2) {
#pragma unroll
    for (int i = 0; i < n; i += 2) {
      const uint32_t two = T::pair(f[i], f[i + 1]);
      float eight[8];
      T::unpack(make_uint4(two, 0, 0, 0), eight);
      f[i] = eight[0];
      f[i + 1] = eight[1];
    }
  }
}

// ---- the kernel --------------------------------------------------------------------------------------------------
// A block takes one chunk of rows and the whole width; each thread owns 8 columns and walks down the rows.
//   reads   x, dy (branch, dresidual_out)   rows * D * sizeof(T)   once, through the ring, a tile of kRows rows a stage
//           mean, rstd                      8 bytes a row          a lane a row, two tiles ahead
//   writes  dx (dbranch)                    rows * D * sizeof(T)   16 bytes a thread, full lines a warp
//           partial sums                    sums * D * 4           a chunk and group
// Per tile, first half: each thread adds g and g * (r - mean) over its columns, the warps sum them by shuffles and
// leave them in shared memory. Second half, a barrier later: the block's sums, then dx, and the sums over rows in
// registers. Between two barriers a warp runs the first half of one tile and the second half of the one before, so
// that shuffles, shared memory and arithmetic of independent tiles overlap, at one barrier a tile.
template <class T, int kRows, bool kBranch>
__global__ void __launch_bounds__(max_threads(kRows, kBranch, T::kBytes), 1)
    one_pass(const __grid_constant__ OnePass p) {
  constexpr int N = 2 * kRows;  // sums a tile
  constexpr int kBytes = T::kBytes;
  extern __shared__ __align__(128) char stages[];
  __shared__ float warp_shares[2][kWarp * N];
  __shared__ uint64_t full[kMaxStages];
  __shared__ int4 ahead[2];
  __shared__ float4 row_values[max_threads(kRows, kBranch, T::kBytes) / kWarp][kRows];
  const AdalnBackward& op = p.op;
  const Ring& ring = p.ring;
  const Geometry& geometry = p.geometry;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  const int column = threadIdx.x * kColumns;
  const bool active = column < geometry.features;
  const bool layer_norm = op.norm == ADALN_LAYER_NORM;
  const bool has_residual_gradient = kBranch && op.dresidual_out.data;

  const int64_t chunk = p.chunks.nth(blockIdx.x);
  const int last = static_cast<int>(p.chunks.last(chunk, geometry.rows));
  int row = static_cast<int>(p.chunks.first(chunk));

  if (threadIdx.x == 0) ahead[0] = make_int4(row, row, 0, 0);
  if (threadIdx.x == 0)
    for (int s = 0; s < ring.stages; ++s) barrier_init(&full[s], ADALN_BULK_COPY ? 1 : blockDim.x);
  if (!active) {  // the padding of every row reads as zero, for good
    for (int i = 0; i < ring.stages * ring.stream_count * kRows; ++i)
      for (int j = 0; j < kColumns * kBytes; j += 16)
        *reinterpret_cast<uint4*>(stages + i * ring.row_pitch + column * kBytes + j) = make_uint4(0, 0, 0, 0);
  }
  copy_fence();
  __syncthreads();
  const bool starts_early = static_cast<int>(blockIdx.x) < p.first_blocks && geometry.mode != ADALN_PACKED;
  if (warp == 0 && starts_early) {  // a first tile, while others still write
    const Place place = geometry.place(row);
    const int rows = static_cast<int>(min(int64_t{min(kRows, last - row)}, geometry.run_end(row, place) - row));
    prefetch_tile<kRows>(ring, static_cast<int>(place.sample), static_cast<int>(place.token), rows);
    // What else the first tile needs, or a second group, does not have to queue behind the rings of all blocks then.
    const auto prefetch_modulation = [&](const AdalnModulation& m, const Place& of) {
      if (m.data) prefetch_to_l2(row_of(m, of), geometry.features * element_bytes(m.dtype));
    };
    const auto prefetch_statistic = [&](const float* values) {
      prefetch_to_l2(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(values + row) & ~uintptr_t{15}), 16);
    };
    const Place end = geometry.place(last - 1);
    if (lane == 16) prefetch_modulation(op.scale, place);
    if (lane == 17 && kBranch) prefetch_modulation(op.gate, place);
    if (lane == 18) prefetch_statistic(op.rstd);
    if (lane == 19 && layer_norm) prefetch_statistic(op.mean);
    if (geometry.group_index(end) != geometry.group_index(place)) {
      if (lane == 20) prefetch_modulation(op.scale, end);
      if (lane == 21 && kBranch) prefetch_modulation(op.gate, end);
    }
  }
  wait_for_previous();
  let_next_start();  // whose blocks may then read whatever this kernel was given

  // What comes next into the ring: (row, end of its run, its sample, that sample's first row). A tile never crosses
  // into another group or sample. Kept twice: while one is read, thread 0 writes the other.
  int turn = 0;
  const auto fill = [&](int s) {
    if (ADALN_BULK_COPY && threadIdx.x >= kWarp) return;
    int4 next = ahead[turn];
    if (next.x < last) {
      if (next.x == next.y) {
        const Place place = geometry.place(next.x);
        next.y = static_cast<int>(min(int64_t{last}, geometry.run_end(next.x, place)));
        next.z = static_cast<int>(place.sample);
        next.w = next.x - static_cast<int>(place.token);
      }
      const int rows = min(kRows, next.y - next.x);
      fill_stage<kBytes, kRows>(ring, stages + s * ring.stage_bytes, &full[s], next.z, next.x - next.w, rows);
      next.x += rows;
    }
    turn ^= 1;
    if (threadIdx.x == 0) ahead[turn] = next;
  };
  for (int s = 0; s < ring.stages; ++s) {
    fill(s);
    if (ADALN_BULK_COPY) __syncwarp();
    else __syncthreads();
  }

  float factor[kColumns], gate[kColumns];
  float sum_dy[kColumns] = {}, sum_dyh[kColumns] = {}, sum_gate[kColumns] = {};
  const auto flush = [&](int64_t group) {
    if (!active) return;
    float* slot = p.partials.slot(chunk, group) + column;
    const int64_t width = p.partials.width;
    const auto put = [&](float* to, float(&sum)[kColumns]) {
      store_some<kColumns>(to, ADALN_F32, 0, sum);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) sum[i] = 0.f;
    };
    if (p.partials.norm_sums) {
      put(slot, sum_dy);
      put(slot + width, sum_dyh);
    }
    if (kBranch && p.partials.gate_sum) put(slot + 2 * p.partials.norm_sums * width, sum_gate);
  };
  // Lane l < kRows holds the mean of row l of a tile, lane kRows + l its rstd.
  const auto load_statistics = [&](int tile, int end) {
    const int own = tile + lane % kRows;
    if (lane >= N || own >= end) return 0.f;
    return lane >= kRows ? __ldg(op.rstd + own) : layer_norm ? __ldg(op.mean + own) : 0.f;
  };
  int stage = 0;
  uint32_t parity = 0;

  // Waits for the tile in stage s. Rows that a short tile lacks are set to zero and then cost nothing but time.
  const auto await = [&](int s, uint32_t lap, int rows) {
    barrier_wait(&full[s], lap);
    if (rows < kRows) {
      char* own = stages + s * ring.stage_bytes + column * kBytes;
      for (int stream = 0; stream < ring.stream_count; ++stream)
        for (int r = rows; r < kRows; ++r)
          for (int j = 0; j < kColumns * kBytes; j += 16)
            *reinterpret_cast<uint4*>(own + (stream * kRows + r) * ring.row_pitch + j) = make_uint4(0, 0, 0, 0);
      copy_fence();
    }
  };
  // Columns [at, at + kPart) of row r of a tile: r itself (rounded as in the forward) and the branch.
  constexpr int kPart = kBranch ? 4 : 8;  // at a time: with a branch there are more streams than registers
  const auto read_r = [&](const char* tile, int r, int at, float (&out)[kPart], float (&branch)[kPart]) {
    read_columns<T>(tile + r * ring.row_pitch + at * kBytes, out);
    if constexpr (kBranch) {
      read_columns<T>(tile + (2 * kRows + r) * ring.row_pitch + at * kBytes, branch);
#pragma unroll
      for (int i = 0; i < kPart; ++i) out[i] = fmaf(gate[at + i], branch[i], out[i]);
      round_all<T>(out);
    }
  };
  const auto first_half = [&](int s, float statistics, float* shares) {
    const char* tile = stages + s * ring.stage_bytes + column * kBytes;
    float v[N];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float mean = __shfl_sync(~0u, statistics, r);
      float sum = 0.f, product = 0.f;
#pragma unroll
      for (int at = 0; at < kColumns; at += kPart) {
        float x[kPart], d[kPart], branch[kPart];
        read_r(tile, r, at, x, branch);
        read_columns<T>(tile + (kRows + r) * ring.row_pitch + at * kBytes, d);
#pragma unroll
        for (int i = 0; i < kPart; ++i) {
          const float g = d[i] * factor[at + i];
          sum += g;
          product = fmaf(g, x[i] - mean, product);
        }
      }
      v[r] = sum;
      v[kRows + r] = product;
    }
    const float sum = warp_sums<N>(v);
    if (lane % (kWarp / N) == 0) shares[warp * N + lane / (kWarp / N)] = sum;
  };

  int group = -1;
  while (row < last) {  // a run of rows of one sample and group: their addresses grow by one stride
    const Place place = geometry.place(row);
    const int end = static_cast<int>(min(int64_t{last}, geometry.run_end(row, place)));
    const int next_group = static_cast<int>(geometry.group_index(place));
    if (group != next_group || geometry.mode == ADALN_GROUP_NONE) {
      if (group >= 0 && group != next_group) flush(group);
      group = next_group;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        factor[i] = 1.f;
        gate[i] = 1.f;
      }
      if (active) {
        if (op.scale.data) {
          load_some<kColumns>(row_of(op.scale, place), op.scale.dtype, column, factor);
#pragma unroll
          for (int i = 0; i < kColumns; ++i) factor[i] += 1.f;
        }
        if (op.weight.data) {
          float w[kColumns];
          load_some<kColumns>(op.weight.data, op.weight.dtype, column, w);
#pragma unroll
          for (int i = 0; i < kColumns; ++i) factor[i] *= w[i];
        }
        if (kBranch && op.gate.data) load_some<kColumns>(row_of(op.gate, place), op.gate.dtype, column, gate);
      }
    }
    const auto out_row = [&](const AdalnRows& t) { return static_cast<char*>(row_of(t, place)) + column * kBytes; };
    char *dx = out_row(op.dx), *dbranch = kBranch ? out_row(op.dbranch) : nullptr;

    float statistics = load_statistics(row, end), next_statistics = load_statistics(row + kRows, end);
    int half = 0;
    await(stage, parity, end - row);
    first_half(stage, statistics, warp_shares[0]);
    __syncthreads();
    for (; row < end; row += kRows) {
      const bool wraps = stage + 1 == ring.stages;
      const int next_stage = wraps ? 0 : stage + 1;
      const uint32_t next_parity = parity ^ wraps;
      const float later_statistics = load_statistics(row + 2 * kRows, end);
      if (row + kRows < end) {
        await(next_stage, next_parity, end - row - kRows);
        first_half(next_stage, next_statistics, warp_shares[half ^ 1]);
      }
      // The block's sums: lane l gathers value l % N of every (32 / N)-th warp. Then lane r < kRows has all that row r
      // needs, and passes it to the warp through shared memory: a load a row, where shuffles would take four.
      float sum = 0.f;
      for (int w = lane / N; w < warps; w += kWarp / N) sum += warp_shares[half][w * N + lane % N];
#pragma unroll
      for (int reach = kWarp / 2; reach >= N; reach /= 2) sum += __shfl_xor_sync(~0u, sum, reach);
      sum *= p.inverse;
      const float product = __shfl_down_sync(~0u, sum, kRows), row_rstd = __shfl_down_sync(~0u, statistics, kRows);
      if (lane < kRows)
        row_values[warp][lane] = make_float4(statistics, row_rstd, layer_norm ? sum : 0.f, product * row_rstd);
      __syncwarp();

      const char* tile = stages + stage * ring.stage_bytes + column * kBytes;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float4 values = row_values[warp][r];
        const float mean = values.x, rstd = values.y, mean_g = values.z, mean_gh = values.w;
        float out[kColumns];
#pragma unroll
        for (int at = 0; at < kColumns; at += kPart) {
          float x[kPart], d[kPart], branch[kPart];
          read_r(tile, r, at, x, branch);
          read_columns<T>(tile + (kRows + r) * ring.row_pitch + at * kBytes, d);
#pragma unroll
          for (int i = 0; i < kPart; ++i) {
            const float h = (x[i] - mean) * rstd;
            sum_dy[at + i] += d[i];
            sum_dyh[at + i] = fmaf(d[i], h, sum_dyh[at + i]);
            out[at + i] = rstd * fmaf(-h, mean_gh, fmaf(d[i], factor[at + i], -mean_g));
          }
          if constexpr (kBranch) {
            if (has_residual_gradient) {
              read_columns<T>(tile + (3 * kRows + r) * ring.row_pitch + at * kBytes, x);
#pragma unroll
              for (int i = 0; i < kPart; ++i) out[at + i] += x[i];
            }
#pragma unroll
            for (int i = 0; i < kPart; ++i) sum_gate[at + i] = fmaf(out[at + i], branch[i], sum_gate[at + i]);
          }
        }
        if (active && row + r < end) {
          if (op.dx.data) {
            store_some<kColumns>(dx, T::kDtype, 0, out);
            dx += op.dx.token_stride * kBytes;
          }
          if constexpr (kBranch) {
            if (op.dbranch.data) {
#pragma unroll
              for (int i = 0; i < kColumns; ++i) out[i] *= gate[i];
              store_some<kColumns>(dbranch, T::kDtype, 0, out);
              dbranch += op.dbranch.token_stride * kBytes;
            }
          }
        }
      }
      __syncthreads();
      fill(stage);
      stage = next_stage;
      parity = next_parity;
      half ^= 1;
      statistics = next_statistics;
      next_statistics = later_statistics;
    }
    row = end;
  }
  if (group >= 0) flush(group);
}

template <class Kernel>
cudaError_t launch(Kernel kernel, const OnePass& p, const OnePassPlan& plan, cudaStream_t stream) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.shared_bytes);
  if (error != cudaSuccess) return error;
  return launch_early(kernel, static_cast<unsigned>(plan.chunks.count), plan.threads, plan.shared_bytes, stream, p);
}

template <class T>
cudaError_t launch_typed(const OnePass& p, const OnePassPlan& plan, cudaStream_t stream) {
  if (p.op.branch.data) {
    if (plan.tile_rows == 1) return launch(one_pass<T, 1, true>, p, plan, stream);
    return launch(one_pass<T, 2, true>, p, plan, stream);
  }
  if (plan.tile_rows == 2) return launch(one_pass<T, 2, false>, p, plan, stream);
  return launch(one_pass<T, 4, false>, p, plan, stream);
}

}  // namespace

// Takes operators whose row tensors share one type and are aligned to 16 bytes, up to D = 5120.
OnePassPlan plan_one_pass(const AdalnBackward& op, const Geometry& geometry) {
  OnePassPlan plan{};
  const AdalnDtype dtype = op.x.dtype;
  const int bytes = element_bytes(dtype);
  const bool branch = op.branch.data != nullptr;
  for (const AdalnRows* t : {&op.dy, &op.branch, &op.dresidual_out, &op.dx, &op.dbranch})
    if (t->data && t->dtype != dtype) return plan;
  if (branch ? op.residual_dtype != dtype : op.dresidual_out.data != nullptr) return plan;
  if (!all_backward_aligned(op, kColumns) || geometry.rows > INT32_MAX) return plan;
  const int threads = (geometry.features + kColumns * kWarp - 1) / (kColumns * kWarp) * kWarp;

  // The largest tile of which three stages fit: a barrier a tile is dear, and with two stages nothing is in flight
  // while one is summed and the other written.
  const Device& device = current_device();
  const int streams = branch ? 3 + (op.dresidual_out.data != nullptr) : 2;
  const int row_bytes = streams * threads * kColumns * bytes;
  constexpr int kReserved = 6144;  // of a block: the driver's share and the static arrays
  const int room = device.shared_bytes - kReserved;
  const int smallest = branch ? 1 : 2;
  int tile = branch ? 2 : 4;
  while (tile > smallest && (threads > max_threads(tile, branch, bytes) || 3 * tile * row_bytes > room)) tile /= 2;
  if (threads > max_threads(tile, branch, bytes)) return plan;
  constexpr int kRegisters = 104;  // a thread, about
  const int blocks =
      std::max(1, std::min(64 * 1024 / (threads * kRegisters), room / (3 * tile * row_bytes + kReserved)));
  // More stages than these put more bytes on their way than memory can take at a time, and all of them wait longer.
  constexpr int kStages = 3, kBranchStages = 3;
  const int stages = std::min(branch ? kBranchStages : kStages,
                              (room / blocks - (blocks > 1 ? kReserved : 0)) / (tile * row_bytes));
  if (stages < 2) return plan;
  plan.tile_rows = tile;
  plan.stages = stages;
  plan.threads = threads;
  plan.shared_bytes = stages * tile * row_bytes;

  // Blocks that start together finish apart: SMs do not get equal shares of the bandwidth. So some of the rows
  // are left for those that are done early. Not with few rows, where filling one more ring costs more than it gains.
  constexpr double kLargeShare = 0.985;
  constexpr int64_t kFewRows = 64;  // a block
  const int64_t slots = static_cast<int64_t>(blocks) * device.multiprocessors;
  plan.first_blocks = static_cast<int>(slots);
  const int64_t equal = (geometry.rows + slots - 1) / slots;
  if (equal < kFewRows) {
    plan.chunks = Chunks::equal(geometry.rows, std::max<int64_t>(equal, tile));
    return plan;
  }
  const auto whole_tiles = [&](int64_t rows) { return (rows + tile - 1) / tile * tile; };
  int64_t large_rows = static_cast<int64_t>(kLargeShare * geometry.rows / slots) / tile * tile;
  // A tile more where twice as much would be left.
  const bool coarse = geometry.rows - slots * large_rows > 2 * (1 - kLargeShare) * geometry.rows;
  if (coarse && slots * (large_rows + tile) <= geometry.rows) large_rows += tile;
  const int64_t rest = geometry.rows - slots * large_rows;
  const int64_t small_rows = std::max<int64_t>(tile, whole_tiles((rest + slots - 1) / slots));
  constexpr int64_t kFewGroups = 4;
  const bool spread = tile > 1 || geometry.group_count() > kFewGroups;
  plan.chunks = Chunks::mixed(geometry.rows, slots, large_rows, small_rows, spread);
  return plan;
}

cudaError_t backward_one_pass(const AdalnBackward& op, const Geometry& geometry, const OnePassPlan& plan,
                              const Partials& partials, cudaStream_t stream) {
  OnePass p{op, geometry, plan.chunks, partials};
  Ring& ring = p.ring;
  for (const AdalnRows* rows : {&op.x, &op.dy, &op.branch, &op.dresidual_out}) {
    if (!rows->data) continue;
    const int bytes = element_bytes(rows->dtype);
    ring.streams[ring.stream_count++] = {static_cast<const char*>(rows->data), rows->sample_stride * bytes,
                                         rows->token_stride * bytes};
  }
  ring.stages = plan.stages;
  ring.row_bytes = geometry.features * element_bytes(op.x.dtype);
  ring.row_pitch = plan.threads * kColumns * element_bytes(op.x.dtype);
  ring.stage_bytes = ring.stream_count * plan.tile_rows * ring.row_pitch;
  p.first_blocks = plan.first_blocks;
  p.inverse = 1.f / geometry.features;
  if (op.x.dtype == ADALN_F32) return launch_typed<F32>(p, plan, stream);
  if (op.x.dtype == ADALN_F16) return launch_typed<Fp16>(p, plan, stream);
  return launch_typed<Bf16>(p, plan, stream);
}

}  // namespace adaln
