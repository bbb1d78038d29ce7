// Sums over rows: the paper's D-tile reduction, straight over x and dy (`dtile`, and whatever the one-pass kernel does
// not take), and the second stage that joins partial sums into gradients. No atomics: every sum has one owner and one
// order.
#include "adaln_backward.h"

namespace adaln {
namespace {

constexpr int kColumnThreads = 128;

// W columns of a row of type T, or of `dtype` where T is Any.
template <class T, int W>
__device__ __forceinline__ void load_columns(const void* row, AdalnDtype dtype, int column, float (&f)[W]) {
  if constexpr (W == 1) f[0] = load_one(row, type_of<T>(dtype), column);
  else load_some<W>(row, type_of<T>(dtype), column, f);
}

// Grid (d_tile, n_tile): a thread is fixed to W features and walks down the rows of its chunk.
//   reads   dy, x (branch)                    rows * D      mean, rstd of each row
//           dresidual_out, row_means          to form dr again, unrounded, for the gate: dr * branch
//   writes  partials                          sums * D * 4 a chunk and group
//           dbranch                           for gated_residual, which has no row sums: one pass does it all
// T is the type of all row tensors, or Any. kNorm: there is a dy; kBranch: there is a branch.
template <class T, int W, bool kNorm, bool kBranch>
__global__ void __launch_bounds__(kColumnThreads)
    column_sums(const __grid_constant__ AdalnBackward op, const __grid_constant__ Geometry geometry,
                const __grid_constant__ Chunks chunks, const __grid_constant__ Partials partials,
                const float2* row_means) {
  wait_for_previous();
  let_next_start();
  const int column = (blockIdx.x * kColumnThreads + threadIdx.x) * W;
  if (column >= geometry.features) return;
  float sum_dy[W] = {}, sum_dyh[W] = {}, sum_gate[W] = {};
  const auto flush = [&](int64_t chunk, int64_t group) {
    float* slot = partials.slot(chunk, group) + column;
#pragma unroll
    for (int i = 0; i < W; ++i) {
      if (partials.norm_sums) {
        slot[i] = sum_dy[i];
        slot[partials.width + i] = sum_dyh[i];
      }
      if (partials.gate_sum) slot[2 * partials.norm_sums * partials.width + i] = sum_gate[i];
      sum_dy[i] = sum_dyh[i] = sum_gate[i] = 0.f;
    }
  };
  const bool gate_sum = kBranch && partials.gate_sum, residual_gradient = kBranch && op.dresidual_out.data;
  char* dbranch = nullptr;

  for (int64_t chunk = blockIdx.y; chunk < chunks.count; chunk += gridDim.y) {
    const int64_t last = chunks.last(chunk, geometry.rows);
    int64_t row = chunks.first(chunk), group = -1;
    while (row < last) {
      Place place = geometry.place(row);
      const int64_t end = min(last, geometry.run_end(row, place));
      const int64_t next_group = partials.group_index(geometry, place);
      if (group >= 0 && group != next_group) flush(chunk, group);
      group = next_group;
      float gates[W], factor[W];  // factor: of dy, in g or in the sums that weigh it
#pragma unroll
      for (int i = 0; i < W; ++i) gates[i] = factor[i] = 1.f;
      if (kBranch && op.gate.data) load_columns<Any, W>(row_of(op.gate, place), op.gate.dtype, column, gates);
      if (kNorm && op.scale.data) {
        load_columns<Any, W>(row_of(op.scale, place), op.scale.dtype, column, factor);
#pragma unroll
        for (int i = 0; i < W; ++i) factor[i] += 1.f;
      }
      if (kNorm && op.weight.data && !partials.weigh) {
        float w[W];
        load_columns<Any, W>(op.weight.data, op.weight.dtype, column, w);
#pragma unroll
        for (int i = 0; i < W; ++i) factor[i] *= w[i];
      }
      if (kBranch && !kNorm && op.dbranch.data) dbranch = static_cast<char*>(row_of(op.dbranch, place));
#pragma unroll 4
      for (; row < end; ++row, ++place.token) {
        float branch[W], dr[W];
#pragma unroll
        for (int i = 0; i < W; ++i) dr[i] = 0.f;
        if constexpr (kBranch) {
          load_columns<T, W>(row_of(op.branch, place), op.branch.dtype, column, branch);
          if (residual_gradient)
            load_columns<T, W>(row_of(op.dresidual_out, place), op.dresidual_out.dtype, column, dr);
        }
        if constexpr (kNorm) {
          float d[W], r[W];
          load_columns<T, W>(row_of(op.dy, place), op.dy.dtype, column, d);
          load_columns<T, W>(row_of(op.x, place), op.x.dtype, column, r);
          const float mean = op.norm == ADALN_LAYER_NORM ? __ldg(op.mean + row) : 0.f, rstd = __ldg(op.rstd + row);
          const float2 means = gate_sum ? __ldg(row_means + row) : make_float2(0.f, 0.f);
#pragma unroll
          for (int i = 0; i < W; ++i) {
            if constexpr (kBranch)
              r[i] = round_to(type_of<T>(op.residual_dtype), fmaf(gates[i], branch[i], r[i]));
            const float h = (r[i] - mean) * rstd;
            // g rounded as in its mean: their difference is exactly 0 where D == 1
            if constexpr (kBranch) dr[i] += rstd * fmaf(-h, means.y, __fsub_rn(__fmul_rn(d[i], factor[i]), means.x));
            if (partials.weigh) d[i] *= factor[i];
            sum_dy[i] += d[i];
            sum_dyh[i] = fmaf(d[i], h, sum_dyh[i]);
          }
        }
        if constexpr (kBranch) {
#pragma unroll
          for (int i = 0; i < W; ++i) {
            sum_gate[i] = fmaf(dr[i], branch[i], sum_gate[i]);
            dr[i] *= gates[i];
          }
          if (!kNorm && dbranch) {
            if constexpr (W == 1) store_one(dbranch, op.dbranch.dtype, column, dr[0]);
            else store_some<W>(dbranch, type_of<T>(op.dbranch.dtype), column, dr);
            dbranch += op.dbranch.token_stride * element_bytes(op.dbranch.dtype);
          }
        }
      }
    }
    if (group >= 0) flush(chunk, group);
  }
}

// Second stage. A block takes 4 * lanes columns of one group: lanes of 4 columns side by side, the rest of the block
// apart in slots; then the shares are joined in a fixed order, by shuffles and through shared memory. All that a thread
// reads, up to kBatch slots at a time, is on its way before the first is added: what counts here is latency.
//   reads   partials of the group      slots * sums * D * 4, mostly from L2
//   writes  dshift = sum dy,  dscale = weight * sum(dy h) + bias * sum(dy),  dgate    zeros for an empty group
//           group_sums                 both norm sums in fp32, when dweight or dbias is asked for
constexpr int kJoinThreads = 256;  // at most: small enough to be set up beside the last chunks of the first stage
constexpr int kBatch = 4, kLeastLanes = kTile / 4, kMostLanes = kWarp;

// Not an ordinary load, which the compiler moves to where the value is added.
__device__ __forceinline__ void load_now(const float* from, float4& v) {
  asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from));
}

// kSums: sums in a slot. 1: the gate's, 2: the norm's, 3: both.
template <int kSums>
__global__ void __launch_bounds__(kJoinThreads)
    join_partials(const __grid_constant__ AdalnBackward op, const __grid_constant__ Geometry geometry,
                  const __grid_constant__ Chunks chunks, const __grid_constant__ Partials partials, float* group_sums,
                  int lanes) {
  extern __shared__ float4 shares[];  // [kSums][warps][lanes]
  __shared__ int known_slots;
  const int columns = 4 * lanes, tiles = static_cast<int>((partials.width + columns - 1) / columns);
  const int64_t group = blockIdx.x / tiles;
  const int column = static_cast<int>(blockIdx.x - group * tiles) * columns;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  // Everything but the partials is read before waiting for them.
  int64_t first = 0, last = geometry.rows;
  if (!partials.weigh) geometry.group_rows(group, first, last);
  const int64_t from = first < last ? chunks.of(first) : 0;
  const int slots = first < last ? static_cast<int>(chunks.of(last - 1) - from) + 1 : 0;
  const int read = min(column + 4 * static_cast<int>(threadIdx.x % lanes), static_cast<int>(partials.width) - 4);
  const float* slot = partials.slot(from, group) + read;
  const int64_t pitch = kSums * partials.width;
  const int own = column + 4 * static_cast<int>(threadIdx.x);  // of the first threads, who write
  float weight[4], bias[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool there = threadIdx.x < lanes && own + i < geometry.features;
    weight[i] = there && op.weight.data ? load_one(op.weight.data, op.weight.dtype, own + i) : 1.f;
    bias[i] = there && op.bias.data ? load_one(op.bias.data, op.bias.dtype, own + i) : 0.f;
  }
  Place place{};
  if (geometry.mode != ADALN_GROUP_NONE && !partials.weigh) {
    place.sample = group / geometry.groups_per_sample;
    place.group = group - place.sample * geometry.groups_per_sample;
  }
  if (threadIdx.x == 0) known_slots = slots;
  wait_for_previous();
  let_next_start();
  float4 sum[kSums];
#pragma unroll
  for (int s = 0; s < kSums; ++s) sum[s] = make_float4(0.f, 0.f, 0.f, 0.f);
  const int step = blockDim.x / lanes;
  for (int start = 0; start < slots; start += kBatch * step) {
    const int k = start + threadIdx.x / lanes;
    float4 v[kBatch][kSums];
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
#pragma unroll
      for (int s = 0; s < kSums; ++s)  // past the end the last slot again, which is not added
        load_now(slot + min(k + j * step, slots - 1) * pitch + s * partials.width, v[j][s]);
    __syncthreads();
    const int known = known_slots;  // read here, or the compiler adds each slot before it loads the next
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (k + j * step < known) {
#pragma unroll
        for (int s = 0; s < kSums; ++s) {
          sum[s].x += v[j][s].x;
          sum[s].y += v[j][s].y;
          sum[s].z += v[j][s].z;
          sum[s].w += v[j][s].w;
        }
      }
    }
  }
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
#pragma unroll
    for (int reach = kWarp / 2; reach >= kLeastLanes; reach /= 2) {
      if (reach < lanes) break;
      sum[s].x += __shfl_xor_sync(~0u, sum[s].x, reach);
      sum[s].y += __shfl_xor_sync(~0u, sum[s].y, reach);
      sum[s].z += __shfl_xor_sync(~0u, sum[s].z, reach);
      sum[s].w += __shfl_xor_sync(~0u, sum[s].w, reach);
    }
    if (lane < lanes) shares[(s * warps + warp) * lanes + lane] = sum[s];
  }
  __syncthreads();
  if (threadIdx.x >= lanes) return;
  float total[kSums][4] = {};
  for (int w = 0; w < warps; ++w) {
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
      const float4 share = shares[(s * warps + w) * lanes + threadIdx.x];
      total[s][0] += share.x;
      total[s][1] += share.y;
      total[s][2] += share.z;
      total[s][3] += share.w;
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int at = own + i;
    if (at >= geometry.features) return;
    if constexpr (kSums > 1) {
      const float dy = total[0][i], dyh = total[1][i];
      if (op.dshift.data) store_one(row_of(op.dshift, place), op.dshift.dtype, at, dy);
      if (op.dscale.data)
        store_one(row_of(op.dscale, place), op.dscale.dtype, at, fmaf(weight[i], dyh, bias[i] * dy));
      if (group_sums) {
        group_sums[2 * group * partials.width + at] = dy;
        group_sums[(2 * group + 1) * partials.width + at] = dyh;
      }
    }
    if (kSums != 2 && op.dgate.data) store_one(row_of(op.dgate, place), op.dgate.dtype, at, total[kSums - 1][i]);
  }
}

// dweight = sum over groups of (1 + scale) * sum(dy h), dbias likewise of sum(dy): a thread a column and share of the
// groups.
__global__ void __launch_bounds__(1024)
    join_groups(const __grid_constant__ AdalnBackward op, const __grid_constant__ Geometry geometry,
                const __grid_constant__ Partials partials, int64_t groups, const float* group_sums) {
  __shared__ float shares[2][kWarp][kWarp];
  wait_for_previous();
  let_next_start();
  const int column = blockIdx.x * kWarp + threadIdx.x;
  float bias = 0.f, weight = 0.f;
  if (column < geometry.features) {
    for (int64_t group = threadIdx.y; group < groups; group += kWarp) {
      Place place{};
      place.sample = group / geometry.groups_per_sample;
      place.group = group - place.sample * geometry.groups_per_sample;
      const bool scaled = op.scale.data && !partials.weigh;
      const float factor = scaled ? 1.f + load_one(row_of(op.scale, place), op.scale.dtype, column) : 1.f;
      bias = fmaf(factor, group_sums[2 * group * partials.width + column], bias);
      weight = fmaf(factor, group_sums[(2 * group + 1) * partials.width + column], weight);
    }
  }
  shares[0][threadIdx.y][threadIdx.x] = bias;
  shares[1][threadIdx.y][threadIdx.x] = weight;
  __syncthreads();
  if (threadIdx.y > 1 || column >= geometry.features) return;
  float total = 0.f;
#pragma unroll
  for (int k = 0; k < kWarp; ++k) total += shares[threadIdx.y][k][threadIdx.x];
  const AdalnVector& out = threadIdx.y == 0 ? op.dbias : op.dweight;
  if (out.data) store_one(out.data, out.dtype, column, total);
}

}  // namespace

// About four blocks an SM and d_tile, and no fewer than 16 rows each: a partial row costs as much as two of bf16.
Chunks plan_columns(const Geometry& geometry) {
  const int64_t tiles = (geometry.features + kColumnThreads * 8 - 1) / (kColumnThreads * 8);
  const int64_t blocks = std::max<int64_t>(1, 8 * current_device().multiprocessors / tiles);
  return Chunks::equal(geometry.rows, std::max<int64_t>(16, (geometry.rows + blocks - 1) / blocks));
}

cudaError_t backward_columns(const AdalnBackward& op, const Geometry& geometry, const Chunks& chunks,
                             const Partials& partials, const float2* row_means, cudaStream_t stream) {
  if (geometry.rows == 0) return cudaSuccess;
  const bool wide = all_backward_aligned(op, 8);
  const int columns = kColumnThreads * (wide ? 8 : 1);
  const dim3 grid((geometry.features + columns - 1) / columns,
                  static_cast<unsigned>(std::min<int64_t>(chunks.count, 65535)));
  const auto start = [&](auto kernel) {
    return launch_early(kernel, grid, kColumnThreads, 0, stream, op, geometry, chunks, partials, row_means);
  };
  const auto choose = [&](auto type, auto width) {
    using T = decltype(type);
    constexpr int W = decltype(width)::value;
    if (!op.branch.data) return start(column_sums<T, W, true, false>);
    return op.dy.data ? start(column_sums<T, W, true, true>) : start(column_sums<T, W, false, true>);
  };
  if (!wide) return choose(Any{}, std::integral_constant<int, 1>{});
  const AdalnDtype dtype = op.branch.data ? op.branch.dtype : op.x.dtype;
  bool same = !op.branch.data || op.residual_dtype == dtype;
  for (const AdalnRows* t : {&op.x, &op.branch, &op.dy, &op.dresidual_out, &op.dbranch})
    same = same && (!t->data || t->dtype == dtype);
  constexpr std::integral_constant<int, 8> eight{};
  if (same && dtype == ADALN_BF16) return choose(Bf16{}, eight);
  if (same && dtype == ADALN_F16) return choose(Fp16{}, eight);
  if (same && dtype == ADALN_F32) return choose(F32{}, eight);
  return choose(Any{}, eight);
}

cudaError_t reduce_partials(const AdalnBackward& op, const Geometry& geometry, const Chunks& chunks,
                            const Partials& partials, float* group_sums, cudaStream_t stream) {
  const int64_t groups = partials.weigh ? 1 : geometry.group_count();
  // The widest blocks that still reach every SM, and threads enough for one batch of the slots that a group has on
  // average: few blocks, all running at once.
  int lanes = kMostLanes;
  const auto blocks_of = [&](int lanes) { return groups * ((partials.width + 4 * lanes - 1) / (4 * lanes)); };
  while (lanes > kLeastLanes && blocks_of(lanes) < current_device().multiprocessors) lanes /= 2;
  const int64_t blocks = blocks_of(lanes);
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  if (blocks > 0) {
    const int64_t slots = chunks.count / groups + 1;
    int threads = kWarp;
    while (threads < kJoinThreads && threads / lanes * kBatch < slots) threads *= 2;
    const int sums = partials.count();
    const auto kernel = sums == 1 ? join_partials<1> : sums == 2 ? join_partials<2> : join_partials<3>;
    const int shared_bytes = sums * threads / kWarp * lanes * static_cast<int>(sizeof(float4));
    const cudaError_t error = launch_early(kernel, static_cast<unsigned>(blocks), threads, shared_bytes, stream, op,
                                           geometry, chunks, partials, group_sums, lanes);
    if (error != cudaSuccess) return error;
  }
  if (!group_sums) return cudaSuccess;
  return launch_early(join_groups, (geometry.features + kWarp - 1) / kWarp, dim3(kWarp, kWarp), 0, stream, op, geometry,
                      partials, groups, group_sums);
}

}  // namespace adaln
