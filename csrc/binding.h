// Names that both halves of the torch binding use.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>

namespace al_deepspeed {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Wanted = std::array<bool, 7>;

// Order of `wanted` and of the gradients: INPUTS in library.py.
enum Input { X, BRANCH, SHIFT, SCALE, GATE, WEIGHT, BIAS, INPUT_COUNT };

inline const Tensor& undefined() {
  static const Tensor none;
  return none;
}

inline const Tensor& get(const MaybeTensor& t) { return t.has_value() ? *t : undefined(); }

inline MaybeTensor maybe(const Tensor& t) { return t.defined() ? MaybeTensor(t) : std::nullopt; }

}  // namespace al_deepspeed
