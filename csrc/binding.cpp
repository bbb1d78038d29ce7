// The fused AdaLN kernels as PyTorch ops: CUDA implementations and C++ autograd for the schemas that
// al_deepspeed/ops/library.py defines. Nothing but glue: shapes to strides, tensors to pointers, gradients to
// inputs. What autograd does here is what library.py does in Python for other devices.
//
// OPEN in the kernels (found by tests/test_adaln_gpu.py on an H200; this note goes when they are gone):
// 1. per-token modulation with dweight/dbias: join_partials() has partials.weigh and group_sums, and still stores
//    dshift/dscale (at place{} = sample 0, group 0). adaln_backward.cu has to clear inner.dshift/dscale/dgate there.
//    One row a sample (tokens == groups == 1) takes the same path.
// 2. D = 1 must give dx exactly 0: fmaf(d, c, -mean_g) keeps the product exact while mean_g is rounded; use
//    __fmul_rn(d, c) - mean_g (rows, rows_any and one_pass), so that g - mean(g) cancels when x has no variance.
// 3. x around 1000 with steps of 1e-3, fp32: mean must be the nearest fp32 to the true mean (torch's layer_norm is);
//    add the mean of (x - mean) to it once, as ops/reference.py does.
#include <Python.h>

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "adaln.h"

namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Wanted = std::array<bool, 7>;
using torch::autograd::variable_list;

// Order of `wanted` and of the gradients: INPUTS in library.py.
enum Input { X, BRANCH, SHIFT, SCALE, GATE, WEIGHT, BIAS, INPUT_COUNT };

const Tensor& undefined() {
  static const Tensor none;
  return none;
}

const Tensor& get(const MaybeTensor& t) { return t.has_value() ? *t : undefined(); }

MaybeTensor maybe(const Tensor& t) { return t.defined() ? MaybeTensor(t) : std::nullopt; }

AdalnDtype dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return ADALN_F32;
    case at::kHalf:
      return ADALN_F16;
    case at::kBFloat16:
      return ADALN_BF16;
    default:
      TORCH_CHECK_TYPE(false, "fused AdaLN on CUDA takes float32, float16 and bfloat16, not ", type);
  }
}

void check(cudaError_t error) {
  TORCH_CHECK(error == cudaSuccess, "fused AdaLN: ", cudaGetErrorString(error));
}

// One call: its device, its sizes, and the copies that must live until the launch is queued.
class Call {
 public:
  Call(const Tensor& like, bool sequence_first)
      : guard_(like.device()), like_(like), sequence_first_(sequence_first), features(like.size(-1)) {
    TORCH_CHECK(like.dim() >= 2 && (!sequence_first || like.dim() == 3), "fused AdaLN: x has shape ", like.sizes());
    TORCH_CHECK(features >= 1, "fused AdaLN needs at least one feature; x has shape ", like.sizes());
    samples = like.size(sequence_first ? 1 : 0);
    tokens = sequence_first ? like.size(0) : c10::multiply_integers(like.sizes().slice(1, like.dim() - 2));
  }

  cudaStream_t stream() const { return c10::cuda::getCurrentCUDAStream().stream(); }

  Tensor empty(at::IntArrayRef sizes, at::ScalarType type) const {
    return at::empty(sizes, like_.options().dtype(type).memory_format(at::MemoryFormat::Contiguous));
  }

  // [samples, tokens, features] over t, which has the shape of x.
  AdalnRows rows(const Tensor& given) {
    if (!given.defined()) return {};
    TORCH_CHECK(given.sizes() == like_.sizes(), "fused AdaLN: ", given.sizes(), " does not match ", like_.sizes());
    const Tensor& t = strided(given, 1);
    AdalnRows rows{t.data_ptr(), dtype_of(t.scalar_type()), t.stride(0), 0};
    if (sequence_first_) {
      rows.sample_stride = t.stride(1);
      rows.token_stride = t.stride(0);
    } else {
      rows.token_stride = inner_stride(t, 1);
    }
    return rows;
  }

  // Row (sample, group) of a modulation; see placement.py for the shapes.
  AdalnModulation modulation(const Tensor& given, int64_t sample_axis, const AdalnGrouping& grouping) {
    if (!given.defined()) return {};
    const bool packed = grouping.mode == ADALN_PACKED;
    const bool fits = given.dim() >= 2 + sample_axis && given.size(-1) == features &&
                      (packed || given.size(sample_axis) == samples) &&
                      groups_in(given, sample_axis, grouping) == grouping.groups;
    TORCH_CHECK(fits, "fused AdaLN: modulation ", given.sizes(), " does not fit x ", like_.sizes());
    const int64_t group_axis = packed ? 0 : 1 - sample_axis;
    const Tensor& t = strided(given, sample_axis == 0 || packed ? group_axis : given.dim());
    AdalnModulation m{t.data_ptr(), dtype_of(t.scalar_type()), 0, 0};
    m.sample_stride = packed ? 0 : t.stride(sample_axis);
    m.group_stride = sample_axis == 0 || packed ? inner_stride(t, group_axis) : t.stride(group_axis);
    return m;
  }

  AdalnVector vector(const Tensor& given) {
    if (!given.defined()) return {};
    TORCH_CHECK(given.dim() == 1 && given.size(0) == features, "fused AdaLN: ", given.sizes(), " is not [D] of x ",
                like_.sizes());
    const Tensor& t = given.is_contiguous() ? same_device(given) : keep(given.contiguous());
    return {t.data_ptr(), dtype_of(t.scalar_type())};
  }

  AdalnGrouping grouping(const Tensor& cu_seqlens, const Tensor& modulation, int64_t sample_axis, int64_t size,
                         int64_t offset) {
    if (!modulation.defined()) return {};
    AdalnGrouping grouping{ADALN_PER_GROUP, 1, size > 0 ? size : std::max<int64_t>(tokens, 1), size > 0 ? offset : 0, nullptr};
    if (cu_seqlens.defined()) {
      TORCH_CHECK(samples == 1, "fused AdaLN: packed rows need one sample; x has shape ", like_.sizes());
      const Tensor& starts = keep(same_device(cu_seqlens).to(at::kInt).contiguous());
      grouping = {ADALN_PACKED, starts.numel() - 1, 0, 0, starts.data_ptr<int32_t>()};
    } else {
      grouping.groups = groups_in(modulation, sample_axis, grouping);
      TORCH_CHECK(grouping.token_offset + tokens <= grouping.groups * grouping.tokens_per_group,
                  "fused AdaLN: modulation ", modulation.sizes(), " does not cover x ", like_.sizes());
    }
    return grouping;
  }

 private:
  static int64_t groups_in(const Tensor& t, int64_t sample_axis, const AdalnGrouping& grouping) {
    if (grouping.mode == ADALN_PACKED) return c10::multiply_integers(t.sizes().slice(0, t.dim() - 1));
    if (sample_axis == 1) return t.size(0);
    return c10::multiply_integers(t.sizes().slice(1, t.dim() - 2));
  }

  // Axes from `axis` up to the features, as one: the stride of that axis. Sizes of 1 do not matter.
  static int64_t inner_stride(const Tensor& t, int64_t axis) {
    for (int64_t i = t.dim() - 2; i >= axis; --i) {
      if (t.size(i) != 1) return t.stride(i);
    }
    return 0;
  }

  // t itself when its rows can be reached with one stride over the axes from `axis` on, else a copy.
  const Tensor& strided(const Tensor& t, int64_t axis) {
    bool direct = t.stride(-1) == 1 || t.size(-1) == 1;
    int64_t expected = -1;
    for (int64_t i = t.dim() - 2; i >= axis; --i) {
      if (t.size(i) == 1) continue;
      if (expected >= 0 && t.stride(i) != expected) direct = false;
      expected = t.stride(i) * t.size(i);
    }
    return direct ? same_device(t) : keep(same_device(t).contiguous());
  }

  const Tensor& same_device(const Tensor& t) const {
    TORCH_CHECK(t.device() == like_.device(), "fused AdaLN: tensors on ", like_.device(), " and ", t.device());
    return t;
  }

  const Tensor& keep(Tensor t) {
    kept_[kept_count_] = std::move(t);
    return kept_[kept_count_++];
  }

  c10::cuda::CUDAGuard guard_;
  const Tensor& like_;
  bool sequence_first_;
  std::array<Tensor, 20> kept_;  // at most one a tensor of the call
  size_t kept_count_ = 0;

 public:
  int64_t features, samples, tokens;
};

const Tensor& first_defined(std::initializer_list<const Tensor*> tensors) {
  for (const Tensor* t : tensors) {
    if (t->defined()) return *t;
  }
  return undefined();
}

struct Forward {
  Tensor residual_out, y, stats;
};

Forward forward(const Tensor& x, const Tensor& branch, const Tensor& gate, const Tensor& shift, const Tensor& scale,
                const Tensor& weight, const Tensor& bias, const Tensor& cu_seqlens, bool sequence_first, int64_t axis,
                int64_t size, int64_t offset, double eps, bool rms, std::optional<at::ScalarType> out_dtype) {
  Call call(x, sequence_first);
  Forward out;
  AdalnForward op{};
  op.samples = call.samples;
  op.tokens = call.tokens;
  op.features = call.features;
  op.grouping = call.grouping(cu_seqlens, first_defined({&gate, &shift, &scale}), axis, size, offset);
  op.norm = rms ? ADALN_RMS_NORM : ADALN_LAYER_NORM;
  op.eps = static_cast<float>(eps);
  op.x = call.rows(x);
  op.branch = call.rows(branch);
  op.gate = call.modulation(gate, axis, op.grouping);
  op.shift = call.modulation(shift, axis, op.grouping);
  op.scale = call.modulation(scale, axis, op.grouping);
  op.weight = call.vector(weight);
  op.bias = call.vector(bias);
  if (branch.defined()) {
    out.residual_out = call.empty(x.sizes(), x.scalar_type());
    op.residual_out = call.rows(out.residual_out);
  }
  if (out_dtype.has_value()) {
    out.y = call.empty(x.sizes(), *out_dtype);
    op.y = call.rows(out.y);
    out.stats = call.empty({rms ? 1 : 2, call.samples, call.tokens}, at::kFloat);
    op.rstd = out.stats.data_ptr<float>();
    if (!rms) {
      op.mean = op.rstd;
      op.rstd += call.samples * call.tokens;
    }
  }
  check(adaln_forward(&op, call.stream()));
  return out;
}

std::tuple<Tensor, Tensor> adaln_cuda(const Tensor& x, const MaybeTensor& shift, const MaybeTensor& scale,
                                      const MaybeTensor& weight, const MaybeTensor& bias,
                                      const MaybeTensor& cu_seqlens, bool sequence_first, int64_t axis, int64_t size,
                                      int64_t offset, double eps, bool rms, bool, at::ScalarType out_dtype) {
  auto out = forward(x, undefined(), undefined(), get(shift), get(scale), get(weight), get(bias), get(cu_seqlens),
                     sequence_first, axis, size, offset, eps, rms, out_dtype);
  return {std::move(out.y), std::move(out.stats)};
}

std::tuple<Tensor, Tensor, Tensor> residual_adaln_cuda(const Tensor& x, const Tensor& branch, const MaybeTensor& gate,
                                                       const MaybeTensor& shift, const MaybeTensor& scale,
                                                       const MaybeTensor& weight, const MaybeTensor& bias,
                                                       const MaybeTensor& cu_seqlens, bool sequence_first,
                                                       int64_t axis, int64_t size, int64_t offset, double eps, bool rms,
                                                       bool, at::ScalarType out_dtype) {
  auto out = forward(x, branch, get(gate), get(shift), get(scale), get(weight), get(bias), get(cu_seqlens),
                     sequence_first, axis, size, offset, eps, rms, out_dtype);
  return {std::move(out.residual_out), std::move(out.y), std::move(out.stats)};
}

Tensor gated_residual_cuda(const Tensor& x, const Tensor& branch, const Tensor& gate, const MaybeTensor& cu_seqlens,
                           bool sequence_first, int64_t axis, int64_t size, int64_t offset) {
  return forward(x, branch, gate, {}, {}, {}, {}, get(cu_seqlens), sequence_first, axis, size, offset, 0.0, false,
                 std::nullopt)
      .residual_out;
}

std::vector<Tensor> backward_cuda(const MaybeTensor& dy, const MaybeTensor& dresidual_out, const MaybeTensor& x,
                                  const MaybeTensor& branch, const MaybeTensor& shift, const MaybeTensor& scale,
                                  const MaybeTensor& gate, const MaybeTensor& weight, const MaybeTensor& bias,
                                  const MaybeTensor& stats, const MaybeTensor& cu_seqlens, bool sequence_first,
                                  int64_t axis, int64_t size, int64_t offset, bool rms, bool dtile, Wanted wanted) {
  const Tensor& like = first_defined({&get(dy), &get(dresidual_out)});
  Call call(like, sequence_first);
  AdalnBackward op{};
  op.samples = call.samples;
  op.tokens = call.tokens;
  op.features = call.features;
  op.grouping = call.grouping(get(cu_seqlens), first_defined({&get(gate), &get(shift), &get(scale)}), axis, size, offset);
  op.norm = rms ? ADALN_RMS_NORM : ADALN_LAYER_NORM;
  op.kind = dtile ? ADALN_DTILE : ADALN_ONE_PASS;
  op.x = call.rows(get(x));
  op.branch = call.rows(get(branch));
  op.residual_dtype = dtype_of(first_defined({&get(x), &like}).scalar_type());
  op.dy = call.rows(get(dy));
  op.dresidual_out = call.rows(get(dresidual_out));
  op.scale = call.modulation(get(scale), axis, op.grouping);
  op.gate = call.modulation(get(gate), axis, op.grouping);
  op.weight = call.vector(get(weight));
  op.bias = call.vector(get(bias));
  if (stats.has_value()) {
    op.rstd = stats->data_ptr<float>();
    if (!rms) {
      op.mean = op.rstd;
      op.rstd += call.samples * call.tokens;
    }
  }
  const std::array<const Tensor*, INPUT_COUNT> inputs = {&get(x),    &get(branch), &get(shift), &get(scale),
                                                         &get(gate), &get(weight), &get(bias)};
  std::array<Tensor, INPUT_COUNT> grads;
  std::vector<Tensor> found;
  for (int i = 0; i < INPUT_COUNT; ++i) {
    if (!wanted[i]) continue;
    grads[i] = call.empty(inputs[i]->sizes(), inputs[i]->scalar_type());
    found.push_back(grads[i]);
  }
  if (like.numel() == 0) {
    for (auto& grad : found) grad.zero_();
    return found;
  }
  op.dx = call.rows(grads[X]);
  op.dbranch = call.rows(grads[BRANCH]);
  op.dshift = call.modulation(grads[SHIFT], axis, op.grouping);
  op.dscale = call.modulation(grads[SCALE], axis, op.grouping);
  op.dgate = call.modulation(grads[GATE], axis, op.grouping);
  op.dweight = call.vector(grads[WEIGHT]);
  op.dbias = call.vector(grads[BIAS]);
  const auto bytes = static_cast<int64_t>(adaln_backward_workspace(&op));
  Tensor workspace;
  if (bytes > 0) {
    workspace = call.empty({bytes}, at::kByte);
    op.workspace = workspace.data_ptr();
  }
  check(adaln_backward(&op, call.stream()));
  return found;
}

// ---------------------------------------------------------------------------------------------- autograd

using AdalnSchema = std::tuple<Tensor, Tensor>(const Tensor&, const MaybeTensor&, const MaybeTensor&,
                                               const MaybeTensor&, const MaybeTensor&, const MaybeTensor&, bool,
                                               int64_t, c10::SymInt, c10::SymInt, double, bool, bool, at::ScalarType);
using ResidualSchema = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const MaybeTensor&,
                                                          const MaybeTensor&, const MaybeTensor&, const MaybeTensor&,
                                                          const MaybeTensor&, const MaybeTensor&, bool, int64_t,
                                                          c10::SymInt, c10::SymInt, double, bool, bool, at::ScalarType);
using GatedSchema = Tensor(const Tensor&, const Tensor&, const Tensor&, const MaybeTensor&, bool, int64_t, c10::SymInt,
                           c10::SymInt);
using BackwardSchema = std::vector<Tensor>(const MaybeTensor&, const MaybeTensor&, const MaybeTensor&,
                                           const MaybeTensor&, const MaybeTensor&, const MaybeTensor&,
                                           const MaybeTensor&, const MaybeTensor&, const MaybeTensor&,
                                           const MaybeTensor&, const MaybeTensor&, bool, int64_t, c10::SymInt,
                                           c10::SymInt, bool, bool, Wanted);

template <typename Schema>
c10::TypedOperatorHandle<Schema> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Schema>();
}

// Keeps what the backward needs: the inputs in the order of Input, stats, cu_seqlens and the settings.
void save(torch::autograd::AutogradContext* ctx, variable_list inputs, const Tensor& stats, const MaybeTensor& cu_seqlens,
          bool sequence_first, int64_t axis, const c10::SymInt& size, const c10::SymInt& offset, bool rms, bool dtile) {
  inputs.push_back(stats);
  inputs.push_back(get(cu_seqlens));
  ctx->save_for_backward(std::move(inputs));
  ctx->saved_data["flags"] = static_cast<int64_t>(sequence_first) | axis << 1 | static_cast<int64_t>(rms) << 2 |
                             static_cast<int64_t>(dtile) << 3;
  ctx->saved_data["size"] = size;
  ctx->saved_data["offset"] = offset;
  ctx->set_materialize_grads(false);
}

// The needed gradients in the order of Input. What equals another gradient is passed on, not computed.
std::array<Tensor, INPUT_COUNT> gradients(torch::autograd::AutogradContext* ctx, const variable_list& saved,
                                          const Tensor& dy, const Tensor& dresidual_out, Wanted needed) {
  const bool branch_like_x = saved[BRANCH].defined() && !saved[GATE].defined() &&
                             saved[BRANCH].scalar_type() == saved[X].scalar_type();
  const bool branch_is_x = branch_like_x && needed[BRANCH];
  Wanted computed = needed;
  std::array<Tensor, INPUT_COUNT> grads;
  if (branch_is_x) computed[BRANCH] = false;
  if (!dy.defined()) {
    grads[X] = dresidual_out;
    computed[X] = computed[SHIFT] = computed[SCALE] = computed[WEIGHT] = computed[BIAS] = false;
  } else if (branch_is_x) {
    computed[X] = true;
  }
  bool any = false;
  for (bool one : computed) any = any || one;
  if (any) {
    static const auto op = find<BackwardSchema>("al_deepspeed::backward");
    const int64_t flags = ctx->saved_data["flags"].toInt();
    const auto found =
        op.call(maybe(dy), maybe(dresidual_out), maybe(saved[X]), maybe(saved[BRANCH]), maybe(saved[SHIFT]),
                maybe(saved[SCALE]), maybe(saved[GATE]), maybe(saved[WEIGHT]), maybe(saved[BIAS]),
                maybe(saved[INPUT_COUNT]), maybe(saved[INPUT_COUNT + 1]), flags & 1, flags >> 1 & 1,
                ctx->saved_data["size"].toSymInt(), ctx->saved_data["offset"].toSymInt(), (flags >> 2 & 1) != 0,
                (flags >> 3 & 1) != 0, computed);
    size_t next = 0;
    for (int i = 0; i < INPUT_COUNT; ++i) {
      if (computed[i]) grads[i] = found[next++];
    }
  }
  if (branch_is_x) grads[BRANCH] = grads[X];
  return grads;
}

// Which gradients the engine asks for. Edges exist for the tensors that were passed, in argument order.
Wanted asked(torch::autograd::AutogradContext* ctx, const variable_list& saved, std::initializer_list<Input> arguments,
             bool x_saved = true) {
  Wanted needed{};
  size_t edge = 0;
  for (Input i : arguments) {
    if (saved[i].defined() || (i == X && !x_saved)) needed[i] = ctx->needs_input_grad(edge++);
  }
  return needed;
}

class Adaln : public torch::autograd::Function<Adaln> {
 public:
  static variable_list forward(torch::autograd::AutogradContext* ctx, const Tensor& x, const MaybeTensor& shift,
                               const MaybeTensor& scale, const MaybeTensor& weight, const MaybeTensor& bias,
                               const MaybeTensor& cu_seqlens, bool sequence_first, int64_t axis, c10::SymInt size,
                               c10::SymInt offset, double eps, bool rms, bool dtile, at::ScalarType out_dtype) {
    static const auto op = find<AdalnSchema>("al_deepspeed::adaln");
    at::AutoDispatchBelowADInplaceOrView below;
    auto [y, stats] = op.call(x, shift, scale, weight, bias, cu_seqlens, sequence_first, axis, size, offset, eps, rms,
                              dtile, out_dtype);
    ctx->mark_non_differentiable({stats});
    save(ctx, {x, {}, get(shift), get(scale), {}, get(weight), get(bias)}, stats, cu_seqlens, sequence_first, axis,
         size, offset, rms, dtile);
    return {y, stats};
  }

  static variable_list backward(torch::autograd::AutogradContext* ctx, const variable_list& grads) {
    variable_list out(14);
    if (!grads[0].defined()) return out;
    const auto saved = ctx->get_saved_variables();
    const auto needed = asked(ctx, saved, {X, SHIFT, SCALE, WEIGHT, BIAS});
    auto g = gradients(ctx, saved, grads[0], undefined(), needed);
    out[0] = g[X];
    out[1] = g[SHIFT];
    out[2] = g[SCALE];
    out[3] = g[WEIGHT];
    out[4] = g[BIAS];
    return out;
  }
};

class ResidualAdaln : public torch::autograd::Function<ResidualAdaln> {
 public:
  static variable_list forward(torch::autograd::AutogradContext* ctx, const Tensor& x, const Tensor& branch,
                               const MaybeTensor& gate, const MaybeTensor& shift, const MaybeTensor& scale,
                               const MaybeTensor& weight, const MaybeTensor& bias, const MaybeTensor& cu_seqlens,
                               bool sequence_first, int64_t axis, c10::SymInt size, c10::SymInt offset, double eps,
                               bool rms, bool dtile, at::ScalarType out_dtype) {
    static const auto op = find<ResidualSchema>("al_deepspeed::residual_adaln");
    at::AutoDispatchBelowADInplaceOrView below;
    auto [residual_out, y, stats] = op.call(x, branch, gate, shift, scale, weight, bias, cu_seqlens, sequence_first,
                                            axis, size, offset, eps, rms, dtile, out_dtype);
    ctx->mark_non_differentiable({stats});
    save(ctx, {x, branch, get(shift), get(scale), get(gate), get(weight), get(bias)}, stats, cu_seqlens,
         sequence_first, axis, size, offset, rms, dtile);
    return {residual_out, y, stats};
  }

  static variable_list backward(torch::autograd::AutogradContext* ctx, const variable_list& grads) {
    variable_list out(16);
    if (!grads[0].defined() && !grads[1].defined()) return out;
    const auto saved = ctx->get_saved_variables();
    const auto needed = asked(ctx, saved, {X, BRANCH, GATE, SHIFT, SCALE, WEIGHT, BIAS});
    auto g = gradients(ctx, saved, grads[1], grads[0], needed);
    out[0] = g[X];
    out[1] = g[BRANCH];
    out[2] = g[GATE];
    out[3] = g[SHIFT];
    out[4] = g[SCALE];
    out[5] = g[WEIGHT];
    out[6] = g[BIAS];
    return out;
  }
};

class GatedResidual : public torch::autograd::Function<GatedResidual> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x, const Tensor& branch,
                        const Tensor& gate, const MaybeTensor& cu_seqlens, bool sequence_first, int64_t axis,
                        c10::SymInt size, c10::SymInt offset) {
    static const auto op = find<GatedSchema>("al_deepspeed::gated_residual");
    at::AutoDispatchBelowADInplaceOrView below;
    Tensor residual_out = op.call(x, branch, gate, cu_seqlens, sequence_first, axis, size, offset);
    save(ctx, {{}, branch, {}, {}, gate, {}, {}}, {}, cu_seqlens, sequence_first, axis, size, offset, false, false);
    return residual_out;
  }

  static variable_list backward(torch::autograd::AutogradContext* ctx, const variable_list& grads) {
    variable_list out(8);
    if (!grads[0].defined()) return out;
    const auto saved = ctx->get_saved_variables();
    const auto needed = asked(ctx, saved, {X, BRANCH, GATE}, /*x_saved=*/false);
    auto g = gradients(ctx, saved, undefined(), grads[0], needed);
    out[0] = g[X];
    out[1] = g[BRANCH];
    out[2] = g[GATE];
    return out;
  }
};

bool recording(std::initializer_list<const Tensor*> tensors) {
  if (!at::GradMode::is_enabled()) return false;
  for (const Tensor* t : tensors) {
    if (t->defined() && t->requires_grad()) return true;
  }
  return false;
}

std::tuple<Tensor, Tensor> adaln_autograd(const Tensor& x, const MaybeTensor& shift, const MaybeTensor& scale,
                                          const MaybeTensor& weight, const MaybeTensor& bias,
                                          const MaybeTensor& cu_seqlens, bool sequence_first, int64_t axis,
                                          c10::SymInt size, c10::SymInt offset, double eps, bool rms, bool dtile,
                                          at::ScalarType out_dtype) {
  if (!recording({&x, &get(shift), &get(scale), &get(weight), &get(bias)})) {
    static const auto op = find<AdalnSchema>("al_deepspeed::adaln");
    at::AutoDispatchBelowADInplaceOrView below;
    return op.call(x, shift, scale, weight, bias, cu_seqlens, sequence_first, axis, std::move(size), std::move(offset),
                   eps, rms, dtile, out_dtype);
  }
  auto out = Adaln::apply(x, shift, scale, weight, bias, cu_seqlens, sequence_first, axis, std::move(size),
                          std::move(offset), eps, rms, dtile, out_dtype);
  return {out[0], out[1]};
}

std::tuple<Tensor, Tensor, Tensor> residual_adaln_autograd(
    const Tensor& x, const Tensor& branch, const MaybeTensor& gate, const MaybeTensor& shift, const MaybeTensor& scale,
    const MaybeTensor& weight, const MaybeTensor& bias, const MaybeTensor& cu_seqlens, bool sequence_first,
    int64_t axis, c10::SymInt size, c10::SymInt offset, double eps, bool rms, bool dtile, at::ScalarType out_dtype) {
  if (!recording({&x, &branch, &get(gate), &get(shift), &get(scale), &get(weight), &get(bias)})) {
    static const auto op = find<ResidualSchema>("al_deepspeed::residual_adaln");
    at::AutoDispatchBelowADInplaceOrView below;
    return op.call(x, branch, gate, shift, scale, weight, bias, cu_seqlens, sequence_first, axis, std::move(size),
                   std::move(offset), eps, rms, dtile, out_dtype);
  }
  auto out = ResidualAdaln::apply(x, branch, gate, shift, scale, weight, bias, cu_seqlens, sequence_first, axis,
                                  std::move(size), std::move(offset), eps, rms, dtile, out_dtype);
  return {out[0], out[1], out[2]};
}

Tensor gated_residual_autograd(const Tensor& x, const Tensor& branch, const Tensor& gate,
                               const MaybeTensor& cu_seqlens, bool sequence_first, int64_t axis, c10::SymInt size,
                               c10::SymInt offset) {
  if (!recording({&x, &branch, &gate})) {
    static const auto op = find<GatedSchema>("al_deepspeed::gated_residual");
    at::AutoDispatchBelowADInplaceOrView below;
    return op.call(x, branch, gate, cu_seqlens, sequence_first, axis, std::move(size), std::move(offset));
  }
  return GatedResidual::apply(x, branch, gate, cu_seqlens, sequence_first, axis, std::move(size), std::move(offset));
}

// The backward has no derivative: under create_graph its results carry a node that says so when it is reached.
class NoSecondDerivative : public torch::autograd::Function<NoSecondDerivative> {
 public:
  template <typename Run>
  static variable_list forward(torch::autograd::AutogradContext*, at::TensorList, const Run& run) {
    return run();
  }

  static variable_list backward(torch::autograd::AutogradContext*, const variable_list&) {
    TORCH_CHECK(false,
                "fused AdaLN cannot be differentiated twice: its backward has no derivative of its own. Use "
                "al_deepspeed.ops.set_backend('reference') where second derivatives are needed.");
  }
};

std::vector<Tensor> backward_autograd(const MaybeTensor& dy, const MaybeTensor& dresidual_out, const MaybeTensor& x,
                                      const MaybeTensor& branch, const MaybeTensor& shift, const MaybeTensor& scale,
                                      const MaybeTensor& gate, const MaybeTensor& weight, const MaybeTensor& bias,
                                      const MaybeTensor& stats, const MaybeTensor& cu_seqlens, bool sequence_first,
                                      int64_t axis, c10::SymInt size, c10::SymInt offset, bool rms, bool dtile,
                                      Wanted wanted) {
  const auto run = [&] {
    static const auto op = find<BackwardSchema>("al_deepspeed::backward");
    at::AutoDispatchBelowADInplaceOrView below;
    return op.call(dy, dresidual_out, x, branch, shift, scale, gate, weight, bias, stats, cu_seqlens, sequence_first,
                   axis, size, offset, rms, dtile, wanted);
  };
  variable_list given;
  if (at::GradMode::is_enabled()) {
    for (const MaybeTensor* t : {&dy, &dresidual_out, &x, &branch, &shift, &scale, &gate, &weight, &bias}) {
      if (t->has_value() && (*t)->requires_grad()) given.push_back(**t);
    }
  }
  return given.empty() ? run() : NoSecondDerivative::apply(at::TensorList(given), run);
}

TORCH_LIBRARY_IMPL(al_deepspeed, CUDA, m) {
  m.impl("adaln", adaln_cuda);
  m.impl("residual_adaln", residual_adaln_cuda);
  m.impl("gated_residual", gated_residual_cuda);
  m.impl("backward", backward_cuda);
}

TORCH_LIBRARY_IMPL(al_deepspeed, AutogradCUDA, m) {
  m.impl("adaln", adaln_autograd);
  m.impl("residual_adaln", residual_adaln_autograd);
  m.impl("gated_residual", gated_residual_autograd);
  m.impl("backward", backward_autograd);
}

}  // namespace

// Importing the module registers the ops; it has no Python functions of its own.
#define MODULE_INIT(name) PyInit_##name
#define MODULE_INIT_OF(name) MODULE_INIT(name)
#define TEXT(name) #name
#define TEXT_OF(name) TEXT(name)

PyMODINIT_FUNC MODULE_INIT_OF(TORCH_EXTENSION_NAME)() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, TEXT_OF(TORCH_EXTENSION_NAME), nullptr, -1, nullptr,
                               nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
