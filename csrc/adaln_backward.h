// What the backward kernels share: chunks of rows and their partial sums, and one row's inputs for the kernels that
// take any type.
#pragma once

#include "adaln_launch.h"

namespace adaln {

// ---- chunks ----------------------------------------------------------------------------------------------------
// The rows are cut into chunks, each summed by one block in a fixed order, so that the bits never depend on which SM
// ran it. The hardware starts blocks in order: first one large chunk for every block that fits on the device, then
// small ones that fill in wherever an SM is done early. In the order of rows there come, `units` times, `large_each`
// large chunks and `small_each` small ones, then large ones.
struct Chunks {
  int64_t large_count, large_rows, small_rows, count, units, large_each, small_each;

  static Chunks equal(int64_t rows, int64_t rows_each) {
    const int64_t count = (rows + rows_each - 1) / rows_each;
    return {0, rows_each, rows_each, count, 1, 0, count};
  }
  // `spread`: a small chunk after every few large ones, not all at the end, where one group has all of them to sum up.
  // Mostly 0.5% faster with two groups too, but 1.4% slower where a tile is one row (D = 5120 with a branch).
  static Chunks mixed(int64_t rows, int64_t large_count, int64_t large_rows, int64_t small_rows, bool spread) {
    const int64_t rest = rows - large_count * large_rows, small_count = (rest + small_rows - 1) / small_rows;
    const int64_t count = large_count + small_count;
    if (!spread || small_count == 0 || small_count > large_count)
      return {large_count, large_rows, small_rows, count, 1, large_count, small_count};
    return {large_count, large_rows, small_rows, count, small_count, large_count / small_count, 1};
  }
  // The chunk that block `n` takes.
  __device__ __forceinline__ int64_t nth(int64_t n) const {
    if (n < large_count) return n + min(divide(n, large_each), units) * small_each;
    const int64_t small = n - large_count;
    return (divide(small, small_each) + 1) * large_each + small;
  }
  __device__ __forceinline__ int64_t first(int64_t chunk) const {
    const int64_t unit = min(divide(chunk, large_each + small_each), units);
    const int64_t inside = chunk - unit * (large_each + small_each);
    const int64_t large = unit < units ? min(inside, large_each) : inside;
    return unit * unit_rows() + large * large_rows + (inside - large) * small_rows;
  }
  __device__ __forceinline__ int64_t last(int64_t chunk, int64_t rows) const { return min(first(chunk + 1), rows); }
  __device__ __forceinline__ int64_t of(int64_t row) const {
    const int64_t unit = min(divide(row, unit_rows()), units), inside = row - unit * unit_rows();
    const int64_t small = inside - large_each * large_rows;
    const int64_t before = unit * (large_each + small_each);
    if (unit < units && small >= 0) return before + large_each + divide(small, small_rows);
    return before + divide(inside, large_rows);
  }

 private:
  __device__ __forceinline__ int64_t unit_rows() const { return large_each * large_rows + small_each * small_rows; }
  static __device__ __forceinline__ int64_t divide(int64_t n, int64_t by) {  // in 32 bits where possible: much cheaper
    return (n | by) <= INT32_MAX ? static_cast<uint32_t>(n) / static_cast<uint32_t>(by) : n / by;
  }
};

// fp32 sums over the rows that a chunk and a group have in common, at slot chunk + group: both only ever grow from
// one such piece to the next, so slots are distinct and those of a group lie side by side.
//   sum 0: dy    sum 1: dy * h    (with `norm_sums`)
//   last : dr * branch            (with `gate_sum`)
struct Partials {
  float* data;
  int64_t width;  // features, rounded up to whole tiles
  bool norm_sums, gate_sum;
  bool weigh;  // sums over dy * (1 + scale) instead, all rows as one group: for dweight, dbias of per-token scale

  __host__ __device__ int count() const { return 2 * norm_sums + gate_sum; }
  __device__ __forceinline__ float* slot(int64_t chunk, int64_t group) const {
    return data + (chunk + group) * count() * width;
  }
  __device__ __forceinline__ int64_t group_index(const Geometry& geometry, const Place& place) const {
    return weigh ? 0 : geometry.group_index(place);
  }
};
constexpr int kTile = 16;  // columns a block of reduce_partials() takes at least
inline int64_t padded(int64_t features) { return (features + kTile - 1) / kTile * kTile; }

// ---- one row, any types ----------------------------------------------------------------------------------------

struct RowReader {
  const AdalnBackward& op;
  const void *x_row, *branch_row, *gate_row, *scale_row, *dy_row;
  float mean, rstd;

  __device__ RowReader(const AdalnBackward& op, const Place& place, int64_t row)
      : op(op),
        x_row(op.x.data ? row_of(op.x, place) : nullptr),
        branch_row(op.branch.data ? row_of(op.branch, place) : nullptr),
        gate_row(op.gate.data ? row_of(op.gate, place) : nullptr),
        scale_row(op.scale.data ? row_of(op.scale, place) : nullptr),
        dy_row(op.dy.data ? row_of(op.dy, place) : nullptr),
        mean(op.dy.data && op.norm == ADALN_LAYER_NORM ? op.mean[row] : 0.f),
        rstd(op.dy.data ? op.rstd[row] : 0.f) {}
  __device__ float dy(int i) const { return load_one(dy_row, op.dy.dtype, i); }
  __device__ float branch(int i) const { return load_one(branch_row, op.branch.dtype, i); }
  __device__ float gate(int i) const { return gate_row ? load_one(gate_row, op.gate.dtype, i) : 1.f; }
  __device__ float r(int i) const {
    const float x = load_one(x_row, op.x.dtype, i);
    return branch_row ? round_to(op.residual_dtype, fmaf(gate(i), branch(i), x)) : x;
  }
  __device__ float factor(int i) const {  // of dy in g
    const float c = scale_row ? 1.f + load_one(scale_row, op.scale.dtype, i) : 1.f;
    return op.weight.data ? c * load_one(op.weight.data, op.weight.dtype, i) : c;
  }
  __device__ float affine(float h, int i) const {
    const float w = op.weight.data ? load_one(op.weight.data, op.weight.dtype, i) : 1.f;
    return op.bias.data ? fmaf(h, w, load_one(op.bias.data, op.bias.dtype, i)) : h * w;
  }
};

inline bool all_backward_aligned(const AdalnBackward& op, int width) {
  return op.features % width == 0 &&
         all_aligned(width, {op.x, op.branch, op.dy, op.dresidual_out, op.dx, op.dbranch},
                     {op.scale, op.gate, op.dshift, op.dscale, op.dgate}, {op.weight, op.bias});
}

// ---- kernels, each in the file of its name ---------------------------------------------------------------------

cudaError_t backward_rows(const AdalnBackward& op, const Geometry& geometry, float2* row_means, cudaStream_t stream);

// How the one-pass kernel would run; threads == 0: it does not take this operator.
struct OnePassPlan {
  int tile_rows, stages, threads, shared_bytes, first_blocks;  // that start together
  Chunks chunks;
};
OnePassPlan plan_one_pass(const AdalnBackward& op, const Geometry& geometry);
cudaError_t backward_one_pass(const AdalnBackward& op, const Geometry& geometry, const OnePassPlan& plan,
                              const Partials& partials, cudaStream_t stream);

Chunks plan_columns(const Geometry& geometry);
cudaError_t backward_columns(const AdalnBackward& op, const Geometry& geometry, const Chunks& chunks,
                             const Partials& partials, const float2* row_means, cudaStream_t stream);
cudaError_t reduce_partials(const AdalnBackward& op, const Geometry& geometry, const Chunks& chunks,
                            const Partials& partials, float* group_sums, cudaStream_t stream);

}  // namespace adaln
