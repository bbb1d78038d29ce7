// Backward, row by row: dx, dbranch, and the gradients of modulation that every token has for itself. Whatever needs
// a sum over rows is left to adaln_backward_columns.cu. Used when no such sum is wanted (frozen or per-token
// modulation), as the first kernel of `dtile`, and for types and alignments that the one-pass kernel does not take.
//
//   g  = dy * weight * (1 + scale)
//   dr = rstd * (g - mean(g) - h * mean(g * h)) + dresidual_out,   h = (r - mean) * rstd    (RMS: no mean(g))
//   dx = dr,  dbranch = dr * gate
//   per token: dshift = dy,  dscale = dy * LN(r),  dgate = dr * branch
// With row_means, mean(g) and mean(g * h) of each row are kept for the sum over dr * branch.
#include "adaln_backward.h"

namespace adaln {
namespace {

// A team of warps takes one row, r and dy held in registers; the team's two sums meet in shared memory.
//   reads   x, dy (branch, dresidual_out)    rows * D * sizeof(T), 16 bytes a lane
//           scale, gate                      a row a group, or a token
//   writes  dx (dbranch)                     rows * D * sizeof(T)
//           dshift, dscale, dgate            a row a token, where each token has its own
// P as in the forward: the type of the modulation and of its gradients, with every row tensor of type T and no weight
// or bias; Any for the rest.
template <class T, class P, int K, bool kBranch>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    backward_rows(const __grid_constant__ AdalnBackward op, const __grid_constant__ Geometry geometry, int team_warps,
                  float2* row_means) {
  constexpr bool kAny = std::is_same_v<P, Any>;
  using Row = row_type<P, T>;
  constexpr int W = T::kWidth;
  constexpr int kStep = kWarp * W;
  __shared__ float2 shares[kWarp];

  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int teams = blockDim.x / kWarp / team_warps;
  const int team = warp / team_warps, part = warp - team * team_warps;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * teams + team;
  wait_for_previous();
  let_next_start();
  if (row >= geometry.rows) {  // a team without a row still meets the others at the barrier
    if (team_warps > 1) __syncthreads();
    return;
  }
  const Place place = geometry.place(row);
  const int D = geometry.features;
  const int first = part * K * kStep + lane * W;
  // From here on an element is counted from this lane's first.
  const auto rows_at = [&](const AdalnRows& t) { return at(row_of(t, place), Row{}, t.dtype, first); };
  const auto modulation_at = [&](const AdalnModulation& m) { return at(row_of(m, place), P{}, m.dtype, first); };

  uint4 r_held[K], dy_held[K];
  const char* x = static_cast<const char*>(row_of(op.x, place)) + first * T::kBytes;
  const char* dy = static_cast<const char*>(row_of(op.dy, place)) + first * T::kBytes;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const bool inside = first + k * kStep < D;
    r_held[k] = dy_held[k] = make_uint4(0, 0, 0, 0);
    if (inside) load_stream(x + k * kStep * T::kBytes, r_held[k]);
    if (inside) load_stream(dy + k * kStep * T::kBytes, dy_held[k]);
  }
  const void *scale = modulation_at(op.scale), *gate = modulation_at(op.gate), *branch = rows_at(op.branch);
  const auto load_factor = [&](int k, float(&c)[W]) {  // of dy in g
#pragma unroll
    for (int i = 0; i < W; ++i) c[i] = 0.f;
    if (!kAny || op.scale.data) load_parameter<P, W>(scale, op.scale.dtype, k * kStep, c);
#pragma unroll
    for (int i = 0; i < W; ++i) c[i] += 1.f;
    if constexpr (kAny) {
      if (op.weight.data) {
        float w[W];
        load_some<W>(op.weight.data, op.weight.dtype, first + k * kStep, w);
#pragma unroll
        for (int i = 0; i < W; ++i) c[i] *= w[i];
      }
    }
  };
  const auto load_gate = [&](int k, float(&g)[W]) {
#pragma unroll
    for (int i = 0; i < W; ++i) g[i] = 1.f;
    if (op.gate.data) load_parameter<P, W>(gate, op.gate.dtype, k * kStep, g);
  };
  const float mean = op.norm == ADALN_LAYER_NORM ? op.mean[row] : 0.f, rstd = op.rstd[row];

  float sum = 0.f, product = 0.f;  // of g and of g * (r - mean)
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if (first + k * kStep < D) {
      float r[W], g[W], c[W];
      T::unpack(r_held[k], r);
      if constexpr (kBranch) {
        float b[W], gates[W];
        load_parameter<Row, W>(branch, op.branch.dtype, k * kStep, b);
        load_gate(k, gates);
#pragma unroll
        for (int i = 0; i < W; ++i) r[i] = fmaf(gates[i], b[i], r[i]);
        r_held[k] = T::pack(r);  // rounded as in the forward
        T::unpack(r_held[k], r);
      }
      T::unpack(dy_held[k], g);
      load_factor(k, c);
#pragma unroll
      for (int i = 0; i < W; ++i) {
        g[i] *= c[i];
        sum += g[i];
        product = fmaf(g[i], r[i] - mean, product);
      }
    }
  }
  sum = warp_sum(sum);
  product = warp_sum(product);
  if (team_warps > 1) {
    if (lane == 0) shares[warp] = make_float2(sum, product);
    __syncthreads();
    sum = product = 0.f;
    for (int w = 0; w < team_warps; ++w) {
      sum += shares[team * team_warps + w].x;
      product += shares[team * team_warps + w].y;
    }
  }
  const float mean_g = op.norm == ADALN_LAYER_NORM ? sum / D : 0.f;
  const float mean_gh = product / D * rstd;
  if (row_means && part == 0 && lane == 0) row_means[row] = make_float2(mean_g, mean_gh);

#pragma unroll
  for (int k = 0; k < K; ++k) {
    if (first + k * kStep < D) {
      float h[W], d[W], c[W];
      keep_packed(r_held[k]);
      keep_packed(dy_held[k]);
      T::unpack(r_held[k], h);
      T::unpack(dy_held[k], d);
#pragma unroll
      for (int i = 0; i < W; ++i) h[i] = (h[i] - mean) * rstd;
      if (op.dshift.data) store_parameter<P, W>(modulation_at(op.dshift), op.dshift.dtype, k * kStep, d);
      if (op.dscale.data) {
        float out[W];
#pragma unroll
        for (int i = 0; i < W; ++i) out[i] = h[i];
        if constexpr (kAny) apply_affine<W>(op, first + k * kStep, out);
#pragma unroll
        for (int i = 0; i < W; ++i) out[i] *= d[i];
        store_parameter<P, W>(modulation_at(op.dscale), op.dscale.dtype, k * kStep, out);
      }
      load_factor(k, c);
#pragma unroll
      for (int i = 0; i < W; ++i) d[i] = rstd * fmaf(-h[i], mean_gh, fmaf(d[i], c[i], -mean_g));
      if constexpr (kBranch) {
        if (op.dresidual_out.data) {
          load_parameter<Row, W>(rows_at(op.dresidual_out), op.dresidual_out.dtype, k * kStep, c);
#pragma unroll
          for (int i = 0; i < W; ++i) d[i] += c[i];
        }
      }
      if (op.dx.data) store_parameter<Row, W>(rows_at(op.dx), op.dx.dtype, k * kStep, d);
      if constexpr (kBranch) {
        if (op.dgate.data) {
          load_parameter<Row, W>(branch, op.branch.dtype, k * kStep, c);
#pragma unroll
          for (int i = 0; i < W; ++i) c[i] *= d[i];
          store_parameter<P, W>(modulation_at(op.dgate), op.dgate.dtype, k * kStep, c);
        }
        if (op.dbranch.data) {
          load_gate(k, c);
#pragma unroll
          for (int i = 0; i < W; ++i) d[i] *= c[i];
          store_parameter<Row, W>(rows_at(op.dbranch), op.dbranch.dtype, k * kStep, d);
        }
      }
    }
  }
}

// Any types, any alignment, any D, with or without a norm: a block a row, an element a thread and step.
__global__ void __launch_bounds__(256) backward_rows_any(const __grid_constant__ AdalnBackward op,
                                                         const __grid_constant__ Geometry geometry,
                                                         float2* row_means) {
  wait_for_previous();
  let_next_start();
  for (int64_t row = blockIdx.x; row < geometry.rows; row += gridDim.x) {
    const Place place = geometry.place(row);
    const int D = geometry.features;
    const RowReader in(op, place, row);
    float sum = 0.f, product = 0.f;
    if (op.dy.data) {
      for (int i = threadIdx.x; i < D; i += blockDim.x) {
        const float g = __fmul_rn(in.dy(i), in.factor(i));
        sum += g;
        product = fmaf(g, in.r(i) - in.mean, product);
      }
      sum = block_sum(sum);
      product = block_sum(product);
    }
    const float mean_g = op.norm == ADALN_LAYER_NORM ? sum / D : 0.f;
    const float mean_gh = product / D * in.rstd;
    if (row_means && threadIdx.x == 0) row_means[row] = make_float2(mean_g, mean_gh);
    for (int i = threadIdx.x; i < D; i += blockDim.x) {
      float dr = 0.f;
      if (op.dy.data) {
        const float d = in.dy(i), h = (in.r(i) - in.mean) * in.rstd;
        if (op.dshift.data) store_one(row_of(op.dshift, place), op.dshift.dtype, i, d);
        if (op.dscale.data) store_one(row_of(op.dscale, place), op.dscale.dtype, i, d * in.affine(h, i));
        // g rounded as in its mean: their difference is exactly 0 where D == 1
        dr = in.rstd * fmaf(-h, mean_gh, __fsub_rn(__fmul_rn(d, in.factor(i)), mean_g));
      }
      if (op.dresidual_out.data) dr += load_one(row_of(op.dresidual_out, place), op.dresidual_out.dtype, i);
      if (op.dx.data) store_one(row_of(op.dx, place), op.dx.dtype, i, dr);
      if (op.dgate.data) store_one(row_of(op.dgate, place), op.dgate.dtype, i, dr * in.branch(i));
      if (op.dbranch.data) store_one(row_of(op.dbranch, place), op.dbranch.dtype, i, dr * in.gate(i));
    }
  }
}

RowPlan plan_backward(const Geometry& geometry, int width, bool branch) {
  return plan_rows(geometry, width, branch ? kBackwardBranchVectors : kBackwardVectors, kBackwardThreads);
}

template <class T, class P, bool kBranch>
cudaError_t launch(const AdalnBackward& op, const Geometry& geometry, float2* row_means, cudaStream_t stream) {
  const RowPlan plan = plan_backward(geometry, T::kWidth, kBranch);
  const auto start = [&](auto kernel) {
    return launch_early(kernel, plan.blocks, plan.threads, 0, stream, op, geometry, plan.team_warps, row_means);
  };
  if constexpr (!kBranch) {
    if (plan.vectors == 4) return start(backward_rows<T, P, 4, false>);
  }
  return start(backward_rows<T, P, 2, kBranch>);
}

template <class T, class P>
cudaError_t launch(const AdalnBackward& op, const Geometry& geometry, float2* row_means, cudaStream_t stream) {
  return op.branch.data ? launch<T, P, true>(op, geometry, row_means, stream)
                        : launch<T, P, false>(op, geometry, row_means, stream);
}

template <class T>
cudaError_t launch(const AdalnBackward& op, const Geometry& geometry, float2* row_means, cudaStream_t stream) {
  const auto plain = [&](AdalnDtype dtype) {
    bool all = op.scale.data && !op.weight.data && !op.bias.data;
    for (const AdalnModulation* m : {&op.scale, &op.gate, &op.dshift, &op.dscale, &op.dgate})
      all = all && (!m->data || m->dtype == dtype);
    for (const AdalnRows* t : {&op.branch, &op.dresidual_out, &op.dx, &op.dbranch})
      all = all && (!t->data || t->dtype == T::kDtype);
    return all;
  };
  if (plain(ADALN_F32)) return launch<T, F32>(op, geometry, row_means, stream);
  if constexpr (T::kDtype != ADALN_F32) {
    if (plain(T::kDtype)) return launch<T, T>(op, geometry, row_means, stream);
  }
  return launch<T, Any>(op, geometry, row_means, stream);
}

}  // namespace

cudaError_t backward_rows(const AdalnBackward& op, const Geometry& geometry, float2* row_means, cudaStream_t stream) {
  if (geometry.rows == 0) return cudaSuccess;
  const AdalnDtype dtype = op.x.dtype;
  const int width = 16 / element_bytes(dtype);
  const bool typed = op.dy.data && op.dy.dtype == dtype && (!op.branch.data || op.residual_dtype == dtype) &&
                     plan_backward(geometry, width, op.branch.data != nullptr).vectors > 0 &&
                     all_backward_aligned(op, width);
  if (!typed) {
    return launch_early(backward_rows_any, any_blocks(geometry), any_threads(geometry), 0, stream, op, geometry,
                        row_means);
  }
  if (dtype == ADALN_F32) return launch<F32>(op, geometry, row_means, stream);
  if (dtype == ADALN_F16) return launch<Fp16>(op, geometry, row_means, stream);
  return launch<Bf16>(op, geometry, row_means, stream);
}

}  // namespace adaln
