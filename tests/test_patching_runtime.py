"""What rewritten code calls, against the expressions it stands for: norms, shapes, dtypes, hooks, graphs."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from al_deepspeed.patching import runtime
from al_deepspeed.patching.broadcasting import fit
from al_deepspeed.patching.prepared import is_prepared
from al_deepspeed.patching.recognised import LayerNormCall, recognise

FEATURES = 8


class StreamNorm(nn.LayerNorm):
    """As diffusers' FP32LayerNorm."""

    def forward(self, x):
        weight = None if self.weight is None else self.weight.float()
        bias = None if self.bias is None else self.bias.float()
        return F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps).to(x.dtype)


class ZeroCentredNorm(nn.Module):
    """As Transformer Engine's LayerNorm with zero_centered_gamma, and Megatron's apply_layernorm_1p."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.epsilon = 1e-5
        self.weight = nn.Parameter(torch.zeros(features))
        self.bias = nn.Parameter(torch.zeros(features))

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.weight + 1, self.bias, self.epsilon)


class RootMeanSquare(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.variance_epsilon = 1e-6
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon) * self.weight


class DroppingNorm(nn.LayerNorm):
    """Does more than a LayerNorm."""

    def forward(self, x):
        return super().forward(x).clamp(-1, 1)


class OtherEpsilon(nn.LayerNorm):
    """Its eps attribute is not what it uses."""

    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, 1e-2)


class Detached(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.detach())


class DetachedWeight(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight.detach(), self.bias, self.eps)


class PositiveWeight(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight.abs(), self.bias, self.eps)


class ClampedInput(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.clamp(-6, 6))


class InTraining(nn.LayerNorm):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.5, self.training)


class Called(nn.LayerNorm):
    def __call__(self, x):
        return 2 * super().__call__(x)


class Switched(nn.LayerNorm):
    factor = 1.0

    def forward(self, x):
        return super().forward(x) * self.factor


KNOWN = {
    "plain": lambda: nn.LayerNorm(FEATURES, elementwise_affine=False),
    "affine": lambda: nn.LayerNorm(FEATURES),
    "without bias": lambda: nn.LayerNorm(FEATURES, bias=False),
    "stream": lambda: StreamNorm(FEATURES),
    "zero-centred": lambda: ZeroCentredNorm(FEATURES),
    "rms": lambda: RootMeanSquare(FEATURES),
}
UNKNOWN = {
    "group": lambda: nn.GroupNorm(1, 5),
    "batch": lambda: nn.BatchNorm1d(5),
    "two dims": lambda: nn.LayerNorm((5, FEATURES)),
    "clamped": lambda: DroppingNorm(FEATURES),
    "other eps": lambda: OtherEpsilon(FEATURES),
    "identity": nn.Identity,
    "detached": lambda: Detached(FEATURES),
    "detached weight": lambda: DetachedWeight(FEATURES),
    "weight made positive": lambda: PositiveWeight(FEATURES),
    "clamped input": lambda: ClampedInput(FEATURES),
    "with dropout": lambda: InTraining(FEATURES).eval(),
    "sequence": lambda: nn.Sequential(nn.LayerNorm(FEATURES)),
}


def randomised(make) -> nn.Module:
    torch.manual_seed(0)
    norm = make()
    for parameter in norm.parameters():
        nn.init.normal_(parameter, mean=0.5)
    return norm


def tensors(*shapes, dtypes=(torch.float32,) * 5):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(shape, generator=generator).to(dtype).requires_grad_()
        for shape, dtype in zip(shapes, dtypes, strict=False)
    ]


def compare(function, expression, norm, inputs, tolerance: float = 1e-5):
    """Values, dtypes, and gradients of all inputs and parameters."""
    norm.zero_grad()
    results = []
    for run, module in ((function, norm), (expression, copy.deepcopy(norm))):
        given = [x.detach().clone().requires_grad_() for x in inputs]
        outputs = run(module, *given)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.backward(outputs, [torch.ones_like(y) * 0.5 + y.detach() for y in outputs])
        parameters = [p.grad for p in module.parameters()] if isinstance(module, nn.Module) else []
        results.append([*outputs, *(x.grad for x in given), *parameters])
    for found, expected in zip(*results, strict=True):
        if expected is None:
            assert found is None or not found.any()
            continue
        assert found.dtype == expected.dtype
        error = (found.double() - expected.double()).norm()
        assert error <= tolerance * max(expected.double().norm(), 1), (error, expected.norm())


@pytest.mark.parametrize("kind", [*KNOWN, *UNKNOWN])
def test_every_norm_computes_its_expression(kind):
    norm = randomised({**KNOWN, **UNKNOWN}[kind])
    compare(
        runtime.adaln,
        lambda norm, x, shift, scale: norm(x) * (1 + scale) + shift,
        norm,
        tensors((2, 5, FEATURES), (2, 1, FEATURES), (2, 1, FEATURES)),
    )
    compare(
        runtime.residual_adaln,
        lambda norm, residual, branch, gate: (r := residual + branch * gate, norm(r)),
        norm,
        tensors((2, 5, FEATURES), (2, 5, FEATURES), (2, 1, FEATURES)),
    )


@pytest.mark.parametrize("kind", KNOWN)
def test_known_norms_are_recognised(kind):
    known = recognise(randomised(KNOWN[kind]), torch.zeros(2, 5, FEATURES), torch.float32)
    assert known is not None
    assert known.affine == (kind != "plain")
    assert known.rms == (kind == "rms")
    assert known.centred_at_zero == (kind == "zero-centred")


@pytest.mark.parametrize("kind", UNKNOWN)
def test_other_modules_are_not(kind):
    assert recognise(randomised(UNKNOWN[kind]), torch.zeros(2, 5, FEATURES), torch.float32) is None


def test_a_call_of_its_own_runs():
    for norm in (Called(FEATURES), Called(FEATURES, elementwise_affine=False)):
        x, shift, scale = operands()
        assert torch.equal(runtime.adaln(norm, x, shift, scale), norm(x) * (1 + scale) + shift)
        assert not runtime.prepare(norm)


def test_an_attribute_that_changes_is_seen():
    norm = Switched(FEATURES, elementwise_affine=False)
    x, shift, scale = operands()
    for norm.factor in (1.0, 2.0):
        expected = norm(x) * (1 + scale) + shift
        torch.testing.assert_close(runtime.adaln(norm, x, shift, scale), expected)
    assert recognise(norm, x, x.dtype) is None


def test_asking_changes_neither_the_module_nor_the_random_state():
    norm = randomised(KNOWN["affine"])
    before, state = copy.deepcopy(norm.state_dict()), torch.get_rng_state()
    recognise(norm, torch.zeros(2, 5, FEATURES), torch.float32)
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert type(copy.deepcopy(norm)(torch.zeros(1, FEATURES))) is torch.Tensor


@pytest.mark.parametrize(
    ("x", "gate", "shift", "scale", "fits"),
    [
        ((2, 5, 8), (2, 1, 8), (2, 1, 8), (2, 1, 8), True),  # a row a sample
        ((5, 2, 8), (1, 2, 8), (1, 2, 8), (1, 2, 8), True),  # [S, B, D]
        ((5, 2, 8), (2, 8), (1, 2, 8), (8,), True),
        ((1, 5, 8), (1, 1, 8), (1, 1, 8), (1, 1, 8), True),
        ((2, 5, 8), (8,), (8,), (1, 8), True),  # one row for all
        ((2, 5, 8), (2, 5, 8), (2, 5, 8), (2, 1, 8), True),  # a row a token, and a sample
        ((5, 5, 8), (5, 1, 8), (5, 1, 8), (5, 1, 8), True),  # as many samples as tokens
        ((5, 5, 8), (1, 5, 8), (1, 5, 8), (1, 5, 8), True),
        ((2, 3, 4, 8), (2, 3, 1, 8), (2, 3, 1, 8), (2, 1, 1, 8), True),  # a row a frame
        ((2, 3, 4, 8), (1, 3, 1, 8), (2, 1, 1, 8), (8,), True),
        ((2, 3, 4, 8), (2, 1, 4, 8), (8,), (8,), False),  # a row a place, the same in all frames
        ((6, 8), (6, 8), (8,), (1, 8), True),
        ((2, 5, 8), (1,), (2, 1, 8), (2, 1, 8), False),  # a number a tensor
        ((2, 5, 8), (2, 5, 1), (2, 1, 8), (2, 1, 8), False),  # a number a token
        ((2, 0, 8), (2, 1, 8), (2, 1, 8), (2, 1, 8), True),
    ],
)
def test_operands_broadcast_as_written(x, gate, shift, scale, fits):
    inputs = tensors(x, x, gate, shift, scale)
    assert (fit(inputs[0], *inputs[1:]) is not None) == fits
    compare(
        runtime.residual_adaln,
        lambda norm, residual, branch, gate, shift, scale: (
            r := residual + branch * gate,
            norm(r) * (1 + scale) + shift,
        ),
        randomised(KNOWN["plain"]),
        inputs,
    )


def test_expanded_modulation_is_read_as_the_row_that_it_repeats():
    x, scale = torch.randn(5, 2, 8), torch.randn(1, 2, 8).requires_grad_()
    fitted = fit(x, None, None, None, scale.expand_as(x))
    assert (fitted.layout, tuple(fitted.scale.shape)) == ("sbd", (1, 2, 8))


def test_branch_and_gate_may_come_either_way_round():
    x, branch, gate = tensors((2, 5, 8), (2, 5, 8), (2, 1, 8))
    assert torch.equal(runtime.gated_residual(x, gate, branch), runtime.gated_residual(x, branch, gate))


def test_a_product_that_broadcasts_the_residual_is_computed_as_written():
    x, branch, gate = tensors((1, 5, 8), (2, 5, 8), (2, 1, 8))
    assert torch.equal(runtime.gated_residual(x, branch, gate), x + branch * gate)
    assert torch.equal(runtime.gated_residual(x, branch, 0.5), x + branch * 0.5)
    assert runtime.gated_residual(2, 3, 4) == 14
    assert torch.equal(runtime.gated_residual(0.5, branch, gate), 0.5 + branch * gate)


HALF, FULL = torch.bfloat16, torch.float32


@pytest.mark.parametrize("x", [HALF, FULL])
@pytest.mark.parametrize("modulation", [HALF, FULL])
@pytest.mark.parametrize("branch", [HALF, FULL])
@pytest.mark.parametrize("kind", ["plain", "stream"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("casts", [{}, {"out_dtype": HALF}, {"norm_dtype": FULL}, {"in_dtype": "float32"}])
def test_dtypes_are_those_of_the_expression(x, modulation, branch, kind, autocast, casts):
    def dtype(name):
        return runtime.dtype_of(casts.get(name))

    def expression(norm, residual, branch, gate, shift, scale):
        r = residual + branch * gate
        y = norm(r if dtype("in_dtype") is None else r.to(dtype("in_dtype")))
        y = y if dtype("norm_dtype") is None else y.to(dtype("norm_dtype"))
        y = y * (1 + scale) + shift
        return r, y if dtype("out_dtype") is None else y.to(dtype("out_dtype"))

    def call(*operands):
        return runtime.residual_adaln(*operands, **casts)

    shapes = [(2, 5, 8), (2, 5, 8), (2, 1, 8), (2, 1, 8), (2, 1, 8)]
    inputs = tensors(*shapes, dtypes=(x, branch, modulation, modulation, modulation))
    norm = KNOWN["plain"]() if kind == "plain" else StreamNorm(FEATURES, elementwise_affine=False)
    with torch.autocast("cpu", dtype=HALF, enabled=autocast):
        compare(call, expression, norm, inputs, tolerance=0.03)


@pytest.mark.parametrize("dtype", [HALF, FULL])
def test_a_sum_cast_to_a_dtype_of_its_own(dtype):
    residual, branch, gate = tensors((2, 5, 8), (2, 5, 8), (2, 1, 8), dtypes=(HALF, HALF, FULL))
    assert runtime.gated_residual(residual, branch, gate).dtype == FULL
    assert runtime.gated_residual(residual, branch, gate, residual_dtype=dtype).dtype == dtype
    norm = KNOWN["plain"]()
    summed, y = runtime.residual_adaln(
        norm, residual, branch, gate, residual_dtype=dtype, out_dtype="residual"
    )
    assert summed.dtype == y.dtype == dtype


def test_the_function_form_of_layer_norm():
    weight, bias = torch.randn(8), torch.randn(8)
    x, scale = torch.randn(2, 5, 8), torch.randn(2, 1, 8)
    found = runtime.adaln(LayerNormCall((8,), weight, bias, eps=1e-6), x, None, scale)
    torch.testing.assert_close(found, F.layer_norm(x, (8,), weight, bias, 1e-6) * (1 + scale))
    found = runtime.adaln(LayerNormCall((5, 8)), x, None, scale)
    torch.testing.assert_close(found, F.layer_norm(x, (5, 8)) * (1 + scale))


# Norms that others work on ---------------------------------------------------------------------------------


def operands():
    return tensors((2, 5, 8), (2, 1, 8), (2, 1, 8))


@pytest.mark.parametrize("kind", ["plain", "affine"])
def test_a_hook_on_the_norm_runs(kind):
    norm = randomised(KNOWN[kind])
    norm.register_forward_hook(lambda module, inputs, output: output * 0)
    x, shift, scale = operands()
    assert torch.equal(runtime.adaln(norm, x, shift, scale), shift.expand_as(x))
    assert not runtime.prepare(norm) and not is_prepared(norm)


def test_a_forward_that_somebody_set_runs():
    norm = randomised(KNOWN["plain"])
    norm.forward = torch.zeros_like
    x, shift, scale = operands()
    assert torch.equal(runtime.adaln(norm, x, shift, scale), shift.expand_as(x))
    assert not runtime.prepare(norm) and norm.forward is torch.zeros_like


def test_a_norm_left_alone_runs_as_it_is():
    norm = randomised(KNOWN["affine"])
    runtime.leave(norm)
    assert norm in runtime.left_alone and not runtime.prepare(norm)
    x, shift, scale = operands()
    assert torch.equal(runtime.adaln(norm, x, shift, scale), norm(x) * (1 + scale) + shift)


def test_prepared_norms_still_take_x_and_are_prepared_once():
    norm = randomised(KNOWN["affine"])
    x = operands()[0]
    expected = norm(x)
    assert runtime.prepare(norm)
    forward = norm.forward
    assert runtime.prepare(norm) and norm.forward == forward
    assert torch.equal(norm(x), expected)
    for copied in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert is_prepared(copied) and copied.forward.args[0] is copied
    assert not runtime.prepare(UNKNOWN["sequence"]())


def test_a_shallow_copy_of_a_prepared_norm_is_a_norm_of_its_own():
    norm = randomised(KNOWN["affine"])
    x, shift, scale = operands()
    runtime.prepare(norm)
    twin = copy.copy(norm)
    twin.eps = 0.5
    expected = F.layer_norm(x, (FEATURES,), norm.weight, norm.bias, 0.5)
    torch.testing.assert_close(twin(x), expected)
    modulated = runtime.adaln(twin, x, shift, scale)
    torch.testing.assert_close(modulated, expected * (1 + scale) + shift)
    assert is_prepared(twin) and is_prepared(norm)
    torch.testing.assert_close(norm(x), F.layer_norm(x, (FEATURES,), norm.weight, norm.bias, norm.eps))


def test_weights_that_a_wrapper_sets_at_every_step_are_read_by_the_norm():
    # FullyShardedDataParallel keeps parameters in one flat tensor, and sets views of it as plain attributes.
    norm = nn.LayerNorm(FEATURES)
    x, shift, scale = operands()
    del norm.weight, norm.bias
    for step in (1.0, 3.0):
        norm.__dict__ |= {"weight": torch.full((FEATURES,), step), "bias": torch.full((FEATURES,), step - 1)}
        expected = norm(x) * (1 + scale) + shift
        torch.testing.assert_close(runtime.adaln(norm, x, shift, scale), expected)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("function", ["jvp", "grad", "vmap"])
def test_transforms_without_a_rule_for_the_op_get_the_expression(function, compiled):
    norm = randomised(KNOWN["plain" if compiled else "affine"])  # jvp of an affine one cannot be compiled
    runtime.prepare(norm)
    x, shift, scale = (one.detach() for one in operands())
    tangent = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))

    def transformed(adaln, gated):
        def total(x):
            return gated(adaln(norm, x, shift[:1], scale[:1]), x, scale[:1])

        if function == "jvp":
            return torch.func.jvp(total, (x,), (tangent,))
        if function == "grad":
            return torch.func.grad(lambda x: total(x).square().sum())(x)
        return torch.func.vmap(lambda x: total(x[None]))(x)

    run = torch.compile(transformed, backend="eager", fullgraph=True) if compiled else transformed
    found = run(runtime.adaln, runtime.gated_residual)
    expected = transformed(lambda n, x, t, s: n(x) * (1 + s) + t, lambda r, b, g: r + b * g)
    torch.testing.assert_close(found, expected)


def test_devices_without_the_op_get_the_expression():
    norm = nn.LayerNorm(FEATURES, device="meta")
    x, shift, scale = (one.to("meta") for one in operands())
    assert runtime.adaln(norm, x, shift, scale).shape == x.shape


@pytest.mark.parametrize("kind", ["plain", "affine"])
def test_compiled_in_one_graph_and_checkpointed(kind):
    norm = randomised(KNOWN[kind])
    assert runtime.prepare(norm)

    def step(norm, x, branch, gate, shift, scale):
        x, y = runtime.residual_adaln(norm, x, branch, gate, shift, scale)
        y = runtime.adaln(norm, y, shift, scale, out_dtype=x.dtype)
        return runtime.gated_residual(x, y, gate)

    inputs = tensors((2, 5, 8), (2, 5, 8), (2, 1, 8), (2, 1, 8), (2, 1, 8))

    def checkpointed(norm, *given):
        return checkpoint(step, norm, *given, use_reentrant=False)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    compare(compiled, step, norm, inputs)
    compare(checkpointed, step, norm, inputs)


def test_compiled_without_preparation_runs_the_expression():
    norm = randomised(KNOWN["affine"])
    compiled = torch.compile(
        lambda norm, x, shift, scale: runtime.adaln(norm, x, shift, scale),
        backend="aot_eager",
        fullgraph=True,
    )
    compare(compiled, lambda norm, x, shift, scale: norm(x) * (1 + scale) + shift, norm, operands())
