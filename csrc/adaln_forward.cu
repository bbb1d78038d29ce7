// Forward: r = x + gate * branch, y = LN(r) * (1 + scale) + shift, in one pass over the rows.
//
// Rows are independent, so nothing is gained by a block that lives long, and much is lost: on an H200 equal shares
// of a persistent grid finish at times that differ by a factor of two (csrc/README.md), while the hardware hands
// short blocks to whichever SM is free. So a team of warps takes one row, and is done.
#include "adaln_common.cuh"
#include "adaln_launch.h"

namespace adaln {
namespace {

// A team of warps takes one row, held in registers between its single read and its single write.
//   reads   x (and branch)            rows * D * sizeof(T), all issued before the first is used; on their way to L2
//                                     some thousand rows before (Prefetch)
//           shift, scale, gate        a row a group: from L1 after the first team of an SM
//   writes  y (and residual_out)      rows * D * sizeof(T)
//           mean, rstd                8 bytes a row
// Lane l of warp w holds the fours of elements w * 32 * K + l + 32 * k, k < K: of fp32 modulation that is 16 bytes a
// lane, side by side. (With 8 elements a lane every second 16 bytes lie apart, and L1 takes twice as long.) Every warp
// centres its own share on its own mean; the shares are then joined by Chan's formula, so no sum of squares is ever
// taken around a distant point.
// P is the type of shift, scale and gate, all present, with y and branch of type T and no weight or bias; for every
// other case P is Any and each access asks which it is.
// Which kernels announce groups, see Ahead: not those of fp32 rows, which have no registers left for it.
template <class T, bool kBranch>
constexpr bool kAnnounces = kBranch && T::kBytes == 2;

template <class T, class P, int K, bool kBranch>
__global__ void __launch_bounds__(kForwardThreads, 1)
    forward_rows(const __grid_constant__ AdalnForward op, const __grid_constant__ Geometry geometry, int team_warps,
                 Ahead early) {
  constexpr bool kAny = std::is_same_v<P, Any>;
  // A mean in fp32 can be off by as much as fp32 rows differ by: what they leave over from it corrects it once.
  constexpr bool kRefine = std::is_same_v<T, F32>;
  using Row = Four<T>;
  constexpr int W = 4;
  constexpr int kStep = kWarp * W, kShare = K * kStep;  // elements of a row that a warp holds: four a lane, all
  extern __shared__ float2 shares[];  // a warp of the block each, then a word a thread for read_to_l1()

  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int teams = blockDim.x / kWarp / team_warps;
  const int team = warp / team_warps, part = warp - team * team_warps;
  // Teams go round the runs of rows, so that SMs do not all come to a new group at once.
  const int run_bits = early.run_bits;
  const int64_t run_rows = (geometry.rows + (1 << run_bits) - 1) >> run_bits;
  const auto row_of_turn = [&](int64_t turn) {  // -1: a short run has none
    const int64_t run = turn & ((1 << run_bits) - 1), row = run * run_rows + (turn >> run_bits);
    return row < min((run + 1) * run_rows, geometry.rows) ? row : int64_t{-1};
  };
  const auto prefetch = [&](const Place& place) {
    const int start = part * kShare, bytes = min(kShare, geometry.features - start) * T::kBytes;
    if (lane > 0 || bytes <= 0) return;
    prefetch_to_l2(static_cast<const char*>(row_of(op.x, place)) + start * T::kBytes, bytes);
    if (kBranch && !kAny) prefetch_to_l2(static_cast<const char*>(row_of(op.branch, place)) + start * T::kBytes, bytes);
  };
  const int64_t turn = static_cast<int64_t>(blockIdx.x) * teams + team, row = row_of_turn(turn);
  const bool has_row = row >= 0;
  if (geometry.mode == ADALN_PACKED) wait_for_previous();  // place() then reads cu_seqlens
  const Place place = geometry.place(has_row ? row : 0);
  if (has_row && static_cast<int>(blockIdx.x) < early.first_blocks) prefetch(place);
  wait_for_previous();
  let_next_start();
  const int64_t later = early.ahead > 0 ? row_of_turn(turn + early.ahead) : -1;
  if (later >= 0) {
    const Place there = geometry.place(later);
    prefetch(there);
    if (kAnnounces<T, kBranch> && early.announced > 0 && geometry.tokens_before(there) < early.announced) {
      uint32_t* own = reinterpret_cast<uint32_t*>(shares + blockDim.x / kWarp) + threadIdx.x;
      for (const AdalnModulation* m : {&op.gate, &op.scale, &op.shift}) {
        if (!m->data) continue;
        const int bytes = element_bytes(type_of<P>(m->dtype)), start = part * kShare;
        const int count = min(kShare, geometry.features - start);
        read_to_l1(static_cast<const char*>(row_of(*m, there)) + start * bytes, count * bytes, own);
      }
    }
  }
  if (!has_row) {  // still meets the other teams at the barrier
    if (team_warps > 1 && (!kBranch || op.y.data)) __syncthreads();
    return;
  }
  // Found once more where it is needed: a place takes six registers, and the row in hand has the rest.
  const auto place_again = [&] {
    int64_t same_row = row;
    asm volatile("" : "+l"(same_row));
    return geometry.place(same_row);
  };
  const int D = geometry.features;
  const int first = part * kShare + lane * W;

  typename Row::Packed held[K], branch[kBranch && !kAny ? K : 1];
  const auto load_row = [&](const void* row, auto& packed) {
    const char* from = static_cast<const char*>(row) + first * T::kBytes;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      packed[k] = {};
      if (first + k * kStep < D) load_stream(from + k * kStep * T::kBytes, packed[k]);
    }
  };
  load_row(row_of(op.x, place), held);

  if constexpr (kBranch) {
    const void* branch_row = row_of(op.branch, place);
    if constexpr (!kAny) load_row(branch_row, branch);
    const Place own = kRefine ? place_again() : place;
    const void* gate = at(row_of(op.gate, own), P{}, op.gate.dtype, first);
    char* residual_out = static_cast<char*>(row_of(op.residual_out, own)) + first * T::kBytes;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (first + k * kStep < D) {
        float r[W], b[W], g[W];
        Row::unpack(held[k], r);
        if constexpr (kAny) load_some<W>(branch_row, op.branch.dtype, first + k * kStep, b);
        else Row::unpack(branch[k], b);
#pragma unroll
        for (int i = 0; i < W; ++i) g[i] = 1.f;
        if (!kAny || op.gate.data) load_parameter<P, W>(gate, op.gate.dtype, k * kStep, g);
#pragma unroll
        for (int i = 0; i < W; ++i) r[i] = fmaf(g[i], b[i], r[i]);
        held[k] = Row::pack(r);  // the norm reads r as rounded
        store_stream(residual_out + k * kStep * T::kBytes, held[k]);
      }
    }
    if (!op.y.data) {  // gated_residual
      if (kAnnounces<T, kBranch>) wait_for_l1();
      return;
    }
  }

  const int count = max(0, min(kShare, D - part * kShare));
  float mean = 0.f, squares = 0.f;
  if (op.norm == ADALN_LAYER_NORM) {
    float sum = 0.f;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      float f[W];
      Row::unpack(held[k], f);  // lanes past the end hold zeros
#pragma unroll
      for (int i = 0; i < W; i += 4) sum += (f[i] + f[i + 1]) + (f[i + 2] + f[i + 3]);
    }
    mean = count ? warp_sum(sum) / count : 0.f;
  }
  float left_over = 0.f;
  const bool whole = !kAny && (part + 1) * kShare <= D;  // no lane of this warp ends early
  const auto add_squares = [&](auto all) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      float f[W], part_squares = 0.f, part_sum = 0.f;
      keep_packed(held[k]);
      Row::unpack(held[k], f);
#pragma unroll
      for (int i = 0; i < W; ++i) {
        const float centred = f[i] - mean;
        part_squares = fmaf(centred, centred, part_squares);
        if constexpr (kRefine) part_sum += centred;
      }
      if (decltype(all)::value || first + k * kStep < D) {
        squares += part_squares;
        left_over += part_sum;
      }
    }
  };
  if (whole) add_squares(std::true_type{});
  else add_squares(std::false_type{});
  squares = warp_sum(squares);
  if (kRefine && count && op.norm == ADALN_LAYER_NORM) {
    const float error = warp_sum(left_over) / count;
    mean += error;
    squares = fmaf(-error * error, count, squares);
  }

  if (team_warps > 1) {
    if (lane == 0) shares[warp] = make_float2(mean, squares);
    __syncthreads();  // of the block: named barriers for each team would cap an SM at 4 blocks
    const float2* mine = shares + team * team_warps;
    const float near = mine[0].x;  // sums of what the shares differ by stay small
    float sum = 0.f;
    for (int w = 1; w < team_warps; ++w) sum = fmaf(mine[w].x - near, max(0, min(kShare, D - w * kShare)), sum);
    mean = near + sum / D;
    squares = 0.f;
    for (int w = 0; w < team_warps; ++w) {
      const float apart = mine[w].x - mean;
      squares += fmaf(apart * apart, max(0, min(kShare, D - w * kShare)), mine[w].y);
    }
  }
  if (kAnnounces<T, kBranch>) wait_for_l1();
  const float rstd = rsqrtf(squares / D + op.eps);
  if (op.rstd && part == 0 && lane == 0) {
    if (op.norm == ADALN_LAYER_NORM) op.mean[row] = mean;
    op.rstd[row] = rstd;
  }

  const Place again = place_again();
  const void* scale = at(row_of(op.scale, again), P{}, op.scale.dtype, first);
  const void* shift = at(row_of(op.shift, again), P{}, op.shift.dtype, first);
  void* y = at(row_of(op.y, again), row_type<P, T>{}, op.y.dtype, first);
  const auto write = [&](auto all) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (!decltype(all)::value && first + k * kStep >= D) break;
      float f[W], scales[W], shifts[W];
      keep_packed(held[k]);
      Row::unpack(held[k], f);
#pragma unroll
      for (int i = 0; i < W; ++i) {
        f[i] = (f[i] - mean) * rstd;
        scales[i] = shifts[i] = 0.f;
      }
      if constexpr (kAny) apply_affine<W>(op, first + k * kStep, f);
      if (!kAny || op.scale.data) load_parameter<P, W>(scale, op.scale.dtype, k * kStep, scales);
      if (!kAny || op.shift.data) load_parameter<P, W>(shift, op.shift.dtype, k * kStep, shifts);
#pragma unroll
      for (int i = 0; i < W; ++i) f[i] = fmaf(f[i], 1.f + scales[i], shifts[i]);
      store_parameter<row_type<P, T>, W>(y, op.y.dtype, k * kStep, f);
    }
  };
#if __CUDA_ARCH__ == 900
  // Without conditions, loads of modulation need not wait for the stores before them. (Other architectures spill.)
  if (whole) return write(std::true_type{});
#endif
  write(std::false_type{});
}

// Any types, any alignment, any D: a block a row, an element a thread and step, three passes over the row (the later
// two from cache). With a branch the row is read back from residual_out, each thread its own elements.
__global__ void __launch_bounds__(256) forward_any(const __grid_constant__ AdalnForward op,
                                                   const __grid_constant__ Geometry geometry) {
  wait_for_previous();
  let_next_start();
  for (int64_t row = blockIdx.x; row < geometry.rows; row += gridDim.x) {
    const Place place = geometry.place(row);
    const int D = geometry.features;
    const void* x = row_of(op.x, place);
    AdalnDtype dtype = op.x.dtype;
    if (op.branch.data) {
      const void* branch = row_of(op.branch, place);
      const void* gate = op.gate.data ? row_of(op.gate, place) : nullptr;
      void* residual_out = row_of(op.residual_out, place);
      for (int i = threadIdx.x; i < D; i += blockDim.x) {
        const float g = gate ? load_one(gate, op.gate.dtype, i) : 1.f;
        const float r = fmaf(g, load_one(branch, op.branch.dtype, i), load_one(x, dtype, i));
        store_one(residual_out, op.residual_out.dtype, i, r);
      }
      if (!op.y.data) continue;
      x = residual_out;
      dtype = op.residual_out.dtype;
    }
    float mean = 0.f, sum = 0.f;
    if (op.norm == ADALN_LAYER_NORM) {
      for (int i = threadIdx.x; i < D; i += blockDim.x) sum += load_one(x, dtype, i);
      mean = block_sum(sum) / D;
    }
    float squares = 0.f, left_over = 0.f;
    for (int i = threadIdx.x; i < D; i += blockDim.x) {
      const float centred = load_one(x, dtype, i) - mean;
      squares = fmaf(centred, centred, squares);
      left_over += centred;
    }
    squares = block_sum(squares) / D;
    if (op.norm == ADALN_LAYER_NORM) {  // what the row leaves over from a mean in fp32 corrects it once
      const float error = block_sum(left_over) / D;
      mean += error;
      squares -= error * error;
    }
    const float rstd = rsqrtf(squares + op.eps);
    if (op.rstd && threadIdx.x == 0) {
      if (op.norm == ADALN_LAYER_NORM) op.mean[row] = mean;
      op.rstd[row] = rstd;
    }
    const void* scale = op.scale.data ? row_of(op.scale, place) : nullptr;
    const void* shift = op.shift.data ? row_of(op.shift, place) : nullptr;
    void* y = row_of(op.y, place);
    for (int i = threadIdx.x; i < D; i += blockDim.x) {
      float f = (load_one(x, dtype, i) - mean) * rstd;
      if (op.weight.data) f *= load_one(op.weight.data, op.weight.dtype, i);
      if (op.bias.data) f += load_one(op.bias.data, op.bias.dtype, i);
      if (scale) f *= 1.f + load_one(scale, op.scale.dtype, i);
      if (shift) f += load_one(shift, op.shift.dtype, i);
      store_one(y, op.y.dtype, i, f);
    }
  }
}

template <class T, class P, bool kBranch>
cudaError_t launch(const AdalnForward& op, const Geometry& geometry, cudaStream_t stream) {
  RowPlan plan = plan_rows(geometry, 4, forward_fours(T::kBytes, kBranch), kForwardThreads);
  int64_t modulation_bytes = 0;
  for (const AdalnModulation* m : {&op.shift, &op.scale, &op.gate})
    if (m->data) modulation_bytes += op.features * element_bytes(m->dtype);
  const Ahead early = plan_ahead(geometry, plan, kBranch, kAnnounces<T, kBranch>, modulation_bytes);
  const int teams = plan.threads / kWarp / plan.team_warps;
  const int64_t turns = ((geometry.rows + (1 << early.run_bits) - 1) >> early.run_bits) << early.run_bits;
  plan.blocks = static_cast<unsigned>((turns + teams - 1) / teams);
  int shared_bytes = 0;  // see the kernel
  if (plan.team_warps > 1 || early.announced) shared_bytes += plan.threads / kWarp * static_cast<int>(sizeof(float2));
  if (early.announced) shared_bytes += plan.threads * static_cast<int>(sizeof(uint32_t));
  const auto start = [&](auto kernel) {
    return launch_early(kernel, plan.blocks, plan.threads, shared_bytes, stream, op, geometry, plan.team_warps, early);
  };
  if constexpr (T::kBytes == 4) {
    if (plan.vectors == 2) return start(forward_rows<T, P, 2, kBranch>);
    return start(forward_rows<T, P, 4, kBranch>);
  } else {
    if (plan.vectors == 4) return start(forward_rows<T, P, 4, kBranch>);
    if constexpr (kBranch) {
      if (plan.vectors == 6) return start(forward_rows<T, P, 6, kBranch>);  // D = 1536: two whole shares
    } else {
      if (plan.vectors == 12) return start(forward_rows<T, P, 12, kBranch>);
      if (plan.vectors == 10) return start(forward_rows<T, P, 10, kBranch>);  // D = 5120: four whole shares
    }
    return start(forward_rows<T, P, 8, kBranch>);
  }
}

template <class T, class P>
cudaError_t launch(const AdalnForward& op, const Geometry& geometry, cudaStream_t stream) {
  return op.branch.data ? launch<T, P, true>(op, geometry, stream) : launch<T, P, false>(op, geometry, stream);
}

// The plain cases, modulation in fp32 or in x's own type, have kernels without a question in their inner loops.
template <class T>
cudaError_t launch(const AdalnForward& op, const Geometry& geometry, cudaStream_t stream) {
  const bool branch = op.branch.data != nullptr, norm = op.y.data != nullptr;
  const auto plain = [&](AdalnDtype dtype) {
    const auto is = [&](const AdalnModulation& m) { return m.data && m.dtype == dtype; };
    return (!norm || (is(op.shift) && is(op.scale) && op.y.dtype == T::kDtype && !op.weight.data && !op.bias.data)) &&
           (!branch || (is(op.gate) && op.branch.dtype == T::kDtype));
  };
  if (plain(ADALN_F32)) return launch<T, F32>(op, geometry, stream);
  if constexpr (T::kDtype != ADALN_F32) {
    if (plain(T::kDtype)) return launch<T, T>(op, geometry, stream);
  }
  return launch<T, Any>(op, geometry, stream);
}

}  // namespace

cudaError_t forward(const AdalnForward& op, cudaStream_t stream) {
  const Geometry geometry = Geometry::of(op);
  if (geometry.rows == 0) return cudaSuccess;
  const AdalnDtype dtype = op.x.dtype;
  const int width = 16 / element_bytes(dtype);
  const bool typed = geometry.features % width == 0 &&
                     plan_rows(geometry, 4, forward_fours(element_bytes(dtype), op.branch.data), kForwardThreads).vectors > 0 &&
                     (!op.branch.data || op.residual_out.dtype == dtype) &&
                     all_aligned(width, {op.x, op.branch, op.residual_out, op.y}, {op.shift, op.scale, op.gate},
                                 {op.weight, op.bias});
  if (!typed) {
    return launch_early(forward_any, any_blocks(geometry), any_threads(geometry), 0, stream, op, geometry);
  }
  if (dtype == ADALN_F32) return launch<F32>(op, geometry, stream);
  if (dtype == ADALN_F16) return launch<Fp16>(op, geometry, stream);
  return launch<Bf16>(op, geometry, stream);
}

}  // namespace adaln
