// The fused AdaLN kernels as PyTorch ops: CUDA implementations of the schemas that al_deepspeed/ops/library.py
// defines. Nothing but glue: shapes to strides, tensors to pointers. autograd.cpp is the other half.
#include <Python.h>

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <tuple>
#include <vector>

#include "adaln.h"
#include "binding.h"

using namespace al_deepspeed;

namespace {

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

TORCH_LIBRARY_IMPL(al_deepspeed, CUDA, m) {
  m.impl("adaln", adaln_cuda);
  m.impl("residual_adaln", residual_adaln_cuda);
  m.impl("gated_residual", gated_residual_cuda);
  m.impl("backward", backward_cuda);
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
