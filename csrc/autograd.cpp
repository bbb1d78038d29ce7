// C++ autograd of the fused AdaLN ops on CUDA: which tensors are kept, which gradients are asked for. It does what
// library.py does in Python for other devices, with less host time.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <tuple>
#include <vector>

#include "binding.h"

using namespace al_deepspeed;
using torch::autograd::variable_list;

namespace {

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

TORCH_LIBRARY_IMPL(al_deepspeed, AutogradCUDA, m) {
  m.impl("adaln", adaln_autograd);
  m.impl("residual_adaln", residual_adaln_autograd);
  m.impl("gated_residual", gated_residual_autograd);
  m.impl("backward", backward_autograd);
}

}  // namespace
