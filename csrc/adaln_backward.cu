// The C interface: checks an operator, chooses its kernels, lays out the workspace.
#include "adaln_backward.h"

namespace adaln {
namespace {

// Everything that follows from an operator's shape: chosen once for the workspace query and once for the launch.
struct BackwardPlan {
  bool token_modulation;  // every token has its own modulation row: its gradients need no sum
  bool one_pass;
  Partials partials;  // data not yet set
  Chunks chunks;
  OnePassPlan one_pass_plan;
  bool needs_sums, needs_rows, weights;
  int64_t partial_bytes, group_bytes, row_means_bytes;
};

BackwardPlan make_plan(const AdalnBackward& op, const Geometry& geometry) {
  BackwardPlan plan{};
  plan.token_modulation = geometry.mode == ADALN_PER_GROUP && geometry.tokens_per_group == 1 &&
                          geometry.token_offset == 0 && geometry.groups_per_sample == geometry.tokens;
  const bool norm = op.dy.data || geometry.rows == 0;  // an empty dy may come without an address
  plan.weights = norm && (op.dweight.data || op.dbias.data);
  Partials& partials = plan.partials;
  partials.width = padded(geometry.features);
  partials.weigh = plan.token_modulation;
  const bool modulation_sums = (norm && (op.dshift.data || op.dscale.data)) || op.dgate.data;
  plan.needs_sums = plan.weights || (modulation_sums && !plan.token_modulation);
  if (plan.needs_sums) {
    partials.norm_sums = plan.weights || (norm && !plan.token_modulation && (op.dshift.data || op.dscale.data));
    partials.gate_sum = op.dgate.data && !plan.token_modulation;
  }
  if (plan.needs_sums && !plan.token_modulation && op.dy.data && op.kind == ADALN_ONE_PASS && geometry.rows > 0) {
    plan.one_pass_plan = plan_one_pass(op, geometry);
    plan.one_pass = plan.one_pass_plan.threads > 0;
  }
  plan.chunks = plan.one_pass ? plan.one_pass_plan.chunks : plan_columns(geometry);
  const bool row_means = !plan.one_pass && partials.gate_sum && op.dy.data;
  // Without dy, column_sums() writes dbranch itself, and dx is dresidual_out.
  plan.needs_rows = !plan.one_pass && (op.dx.data || (op.dbranch.data && op.dy.data) || row_means ||
                                       (plan.token_modulation && modulation_sums));
  if (row_means) plan.row_means_bytes = geometry.rows * static_cast<int64_t>(sizeof(float2));
  const int64_t groups = partials.weigh ? 1 : geometry.group_count();
  if (plan.needs_sums) {
    plan.partial_bytes = (plan.chunks.count + groups) * partials.count() * partials.width * 4;
    if (plan.weights) plan.group_bytes = groups * 2 * partials.width * 4;
  }
  return plan;
}

bool valid(int64_t samples, int64_t tokens, int64_t features, const AdalnGrouping& grouping) {
  if (samples < 0 || tokens < 0 || features < 1 || features > INT32_MAX / 8) return false;
  if (grouping.mode == ADALN_GROUP_NONE) return true;
  if (grouping.groups < 1) return samples * tokens == 0;
  if (grouping.mode == ADALN_PACKED) return samples <= 1 && grouping.cu_seqlens;
  return grouping.tokens_per_group >= (tokens > 0) && grouping.token_offset >= 0 &&
         grouping.token_offset + tokens <= grouping.groups * grouping.tokens_per_group;
}

// A dimension of one element may come with any stride: 0 keeps it from counting as misaligned.
template <class Op>
void plain_strides(const Op& op, std::initializer_list<AdalnRows*> rows,
                   std::initializer_list<AdalnModulation*> modulation) {
  for (AdalnRows* t : rows) {
    if (op.samples == 1) t->sample_stride = 0;
    if (op.tokens == 1) t->token_stride = 0;
  }
  for (AdalnModulation* m : modulation) {
    if (op.samples == 1) m->sample_stride = 0;
    if (op.grouping.groups == 1) m->group_stride = 0;
  }
}
AdalnForward plain_strides(AdalnForward op) {
  plain_strides(op, {&op.x, &op.branch, &op.residual_out, &op.y}, {&op.shift, &op.scale, &op.gate});
  return op;
}
AdalnBackward plain_strides(AdalnBackward op) {
  plain_strides(op, {&op.x, &op.branch, &op.dy, &op.dresidual_out, &op.dx, &op.dbranch},
                {&op.scale, &op.gate, &op.dshift, &op.dscale, &op.dgate});
  return op;
}

cudaError_t backward(const AdalnBackward& op, cudaStream_t stream) {
  const Geometry geometry = Geometry::of(op);
  BackwardPlan plan = make_plan(op, geometry);
  if (!op.workspace && plan.partial_bytes + plan.group_bytes + plan.row_means_bytes > 0) return cudaErrorInvalidValue;
  char* workspace = static_cast<char*>(op.workspace);
  plan.partials.data = reinterpret_cast<float*>(workspace);
  float* group_sums = plan.weights ? reinterpret_cast<float*>(workspace + plan.partial_bytes) : nullptr;
  float2* row_means = plan.row_means_bytes
                          ? reinterpret_cast<float2*>(workspace + plan.partial_bytes + plan.group_bytes)
                          : nullptr;

  // Gradients of modulation come either from the rows or from sums over them, never from both.
  AdalnBackward rows = op, sums = op;
  AdalnBackward& without = plan.token_modulation ? sums : rows;
  without.dshift.data = without.dscale.data = without.dgate.data = nullptr;

  cudaError_t error = cudaSuccess;
  if (plan.one_pass) {
    error = backward_one_pass(op, geometry, plan.one_pass_plan, plan.partials, stream);
  } else {
    if (plan.needs_rows) error = backward_rows(rows, geometry, row_means, stream);
    const bool branch_by_columns = !op.dy.data && op.dbranch.data && !plan.needs_rows;
    if (error == cudaSuccess && (plan.needs_sums || branch_by_columns))
      error = backward_columns(sums, geometry, plan.chunks, plan.partials, row_means, stream);
  }
  if (error == cudaSuccess && plan.needs_sums)
    error = reduce_partials(sums, geometry, plan.chunks, plan.partials, group_sums, stream);
  return error;
}

}  // namespace
}  // namespace adaln

extern "C" {

cudaError_t adaln_forward(const AdalnForward* op, cudaStream_t stream) {
  if (!op || !adaln::valid(op->samples, op->tokens, op->features, op->grouping)) return cudaErrorInvalidValue;
  return adaln::forward(adaln::plain_strides(*op), stream);
}

cudaError_t adaln_backward(const AdalnBackward* op, cudaStream_t stream) {
  if (!op || !adaln::valid(op->samples, op->tokens, op->features, op->grouping)) return cudaErrorInvalidValue;
  return adaln::backward(adaln::plain_strides(*op), stream);
}

size_t adaln_backward_workspace(const AdalnBackward* op) {
  if (!op || !adaln::valid(op->samples, op->tokens, op->features, op->grouping)) return 0;
  const adaln::BackwardPlan plan = adaln::make_plan(adaln::plain_strides(*op), adaln::Geometry::of(*op));
  return static_cast<size_t>(plan.partial_bytes + plan.group_bytes + plan.row_means_bytes);
}

}  // extern "C"
