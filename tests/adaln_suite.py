"""What fused AdaLN must do, as tests: test_adaln.py runs them on the CPU, test_adaln_gpu.py on CUDA."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from adaln_cases import (
    BF16,
    FP16,
    FP32,
    MIXES,
    NAMES,
    PLACES,
    Case,
    call,
    check,
    gradients,
    mixed,
    relative,
    tensors,
    truth,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from al_deepspeed.ops import adaln, gated_residual, residual_adaln


class Calls(TorchDispatchMode):
    """Notes which ops of ours run, and what their backward was asked for."""

    def __init__(self):
        super().__init__()
        self.wanted = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.al_deepspeed.backward.default:
            self.wanted.append(sum(args[-1]))
        return function(*args, **(kwargs or {}))


class Cases:
    """Subclasses name the device."""

    device = "cpu"

    @pytest.mark.parametrize("op", ["adaln", "residual_adaln", "gated_residual"])
    @pytest.mark.parametrize("case", PLACES, ids=lambda c: f"{c.layout}-{c.form}-{c.groups}-{c.offset}")
    def test_every_placement_equals_fp64(self, case, op):
        check(replace(case, op=op), self.device)

    @pytest.mark.parametrize("mix", MIXES, ids=str)
    @pytest.mark.parametrize("norm", ["layer", "rms"])
    @pytest.mark.parametrize("op", ["adaln", "residual_adaln", "gated_residual"])
    def test_every_mix_of_dtypes(self, mix, norm, op):
        check(mixed(Case(op=op, groups=4, form="BF", features=96, norm=norm), mix), self.device)

    @pytest.mark.parametrize("features", [1, 33, 65, 769, 3584])
    @pytest.mark.parametrize("backward", ["one_pass", "dtile"])
    def test_ragged_feature_sizes(self, features, backward):
        check(Case(op="adaln", samples=3, tokens=5, features=features, backward=backward), self.device)

    def test_one_feature_has_no_variance(self):
        # LN of a single number is 0, so y = bias * (1 + scale) + shift and x gets no gradient at all.
        given = tensors(Case(op="adaln", features=1), self.device)
        y = adaln(**given, layout="bsd")
        expected = given["bias"] * (1 + given["scale"]) + given["shift"]
        torch.testing.assert_close(y, expected[:, None].expand_as(y), rtol=1e-6, atol=1e-6)
        (dx,) = torch.autograd.grad(y.sum(), given["x"])
        assert not dx.any()

    @pytest.mark.parametrize("dtype", [FP32, BF16])
    def test_misaligned_pointers_without_a_copy(self, dtype):
        case = Case(op="adaln", features=64, x_dtype=dtype)
        given = tensors(case, self.device)
        buffer = torch.empty(given["x"].numel() + 1, dtype=dtype, device=self.device)
        shifted = buffer[1:].view_as(given["x"])
        shifted.copy_(given["x"].detach())
        given["x"] = shifted.requires_grad_()
        check(case, self.device, given)

    def test_rows_with_gaps_between_them(self):
        # The last dim is contiguous, nothing else is: a slice of features, every second token, samples moved.
        case = Case(op="residual_adaln", features=64)
        given = tensors(case, self.device)
        for name in ("x", "branch"):
            wide = torch.zeros(case.tokens * 2, case.samples, 100, device=self.device)
            view = wide.transpose(0, 1)[:, ::2, 20:84]
            view.copy_(given[name].detach())
            given[name] = view.requires_grad_()
        check(case, self.device, given)

    def test_last_dim_not_contiguous(self):
        case = Case(op="adaln", features=48)
        given = tensors(case, self.device)
        given["x"] = given["x"].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
        check(case, self.device, given)

    def test_chunks_of_one_modulation_tensor(self):
        # As DiT code makes them: six rows a sample, chunked, each a view with gaps.
        x = torch.randn(2, 6, 32, device=self.device)
        six = torch.randn(2, 6, 32, device=self.device, requires_grad=True)
        shift, scale, *_ = six.chunk(6, dim=1)
        (grad,) = torch.autograd.grad(adaln(x, shift, scale).sum(), six)
        # d sum(y) / d shift = tokens; d / d scale = sum of LN(x) over tokens; the other four chunks: nothing.
        torch.testing.assert_close(grad[:, 0], torch.full_like(grad[:, 0], 6.0))
        torch.testing.assert_close(grad[:, 1], F.layer_norm(x, (32,), eps=1e-6).sum(1), rtol=1e-4, atol=1e-5)
        assert not grad[:, 2:].any()

    def test_video_axes(self):
        # [B, T, H, W, D] is [B, T*H*W, D]: per frame, [B, T, 1, 1, D] and [B, T, D] say the same.
        x = torch.randn(2, 3, 2, 4, 32, device=self.device)
        shift, scale = torch.randn(2, 2, 3, 32, device=self.device)
        flat = adaln(x.flatten(1, 3), shift, scale, layout="bsd")
        for view in (shift.shape, (2, 3, 1, 1, 32)):
            y = adaln(x, shift.view(view), scale.view(view))
            assert torch.equal(y.flatten(1, 3), flat)
        per_token = torch.randn(2, 3, 2, 4, 32, device=self.device)
        y = adaln(x, per_token, per_token)
        expected = F.layer_norm(x, (32,), eps=1e-6) * (1 + per_token) + per_token
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)

    def test_expanded_gradient(self):
        case = Case(op="adaln", samples=2, tokens=1024, features=256)
        given = tensors(case, self.device)
        exact = {name: t.detach().double().requires_grad_() for name, t in given.items()}
        call(case, given, self.device)[0].sum().backward()  # dy is one number, expanded with stride 0
        truth(case, exact)[0].sum().backward()
        for name, t in given.items():
            # dx sums to zero by cancellation: compare with the size of what cancels.
            torch.testing.assert_close(t.grad.double(), exact[name].grad, rtol=1e-5, atol=2e-3, msg=name)

    @pytest.mark.parametrize("samples, tokens", [(0, 7), (3, 0)])
    @pytest.mark.parametrize("op", ["adaln", "residual_adaln", "gated_residual"])
    def test_nothing_to_do(self, samples, tokens, op):
        case = Case(op=op, samples=samples, tokens=tokens, features=64)
        given = tensors(case, self.device)
        outputs = call(case, given, self.device)
        assert all(out.shape == (samples, tokens, 64) for out in outputs)
        sum(out.sum() for out in outputs).backward()
        for name, t in given.items():
            assert t.grad.shape == t.shape and not t.grad.any(), name

    @pytest.mark.parametrize("op", ["adaln", "residual_adaln"])
    def test_half_precision_does_not_overflow(self, op):
        # 8000^2 is far above fp16's 65504; the statistics are fp32.
        case = mixed(Case(op=op, features=128, affine=False), (FP16, FP16, FP32, None))
        given = tensors(case, self.device)
        signs = torch.where(torch.rand(given["x"].shape) < 0.5, -8000.0, 8000.0)
        given["x"] = signs.to(FP16).to(self.device).requires_grad_()
        assert all(out.isfinite().all() for out in call(case, given, self.device))
        check(case, self.device, given)

    def test_variance_from_centred_values(self):
        # Mean 100 and steps of 1e-3: E[x^2] - E[x]^2 in fp32 has no digit of the variance left.
        ramp = torch.arange(512.0, dtype=torch.float64) * 1e-3
        for mean, limit in ((100.0, 1e-3), (1000.0, 0.0)):
            x = (mean + ramp).float().expand(4, 3, 512).contiguous().to(self.device)
            true = F.layer_norm(x.double(), (512,), eps=1e-6)
            error = relative(adaln(x), true)
            theirs = relative(F.layer_norm(x, (512,), eps=1e-6), true)
            assert error <= max(limit, 1.01 * theirs + 1e-6), f"mean {mean}: {error}, PyTorch {theirs}"

    def test_autocast_keeps_the_dtypes_of_the_call(self):
        case = mixed(Case(op="residual_adaln", features=64), (BF16, BF16, FP32, None))
        given = tensors(case, self.device)
        with torch.autocast(self.device, dtype=BF16):
            outputs = call(case, given, self.device)
            assert [out.dtype for out in outputs] == [BF16, BF16]
        check(case, self.device, given)

    def test_small_modulation_survives(self):
        # In bf16, 1 + 2^-10 is 1. LN of (-1, 1) is (-1, 1) up to eps, so y is +-(1 + 2^-10) in fp32.
        x = torch.tensor([-1.0, 1.0]).repeat(32).to(BF16).expand(1, 2, 64).contiguous().to(self.device)
        scale = torch.full((1, 64), 2.0**-10, dtype=BF16, device=self.device)
        y = adaln(x, None, scale, out_dtype=FP32)
        torch.testing.assert_close(y, x.float() * (1 + 2.0**-10), rtol=1e-6, atol=0)

    @pytest.mark.parametrize("layout", ["bsd", "sbd"])
    def test_each_sample_has_its_own_modulation(self, layout):
        x = torch.randn(3, 4, 32, device=self.device)
        scale = torch.tensor([0.0, 9.0, 99.0], device=self.device)[:, None].expand(3, 32).contiguous()
        rows = x if layout == "bsd" else x.transpose(0, 1).contiguous()
        y = adaln(rows, None, scale, layout=layout)
        y = y if layout == "bsd" else y.transpose(0, 1)
        plain = F.layer_norm(x, (32,), eps=1e-6)
        for sample, factor in enumerate((1, 10, 100)):
            torch.testing.assert_close(y[sample], plain[sample] * factor, rtol=1e-5, atol=1e-4)

    def test_shards_of_a_sequence_add_up(self):
        # Two ranks of a sequence-parallel group, cut inside frame 1 of 3: outputs join, gradients add.
        whole = Case(op="residual_adaln", samples=2, tokens=24, groups=3, form="BF1", features=48)
        given = tensors(whole, self.device)
        outputs = call(whole, given, self.device)
        grads = gradients(outputs, given)
        generator = torch.Generator().manual_seed(1)
        seeds = [torch.randn(out.shape, generator=generator).to(BF16).to(out) for out in outputs]
        summed = {name: torch.zeros_like(t) for name, t in given.items()}
        for start, end in ((0, 11), (11, 24)):
            part = replace(whole, tokens=end - start, offset=start, group_size=8)
            local = dict(given, **{name: given[name][:, start:end] for name in ("x", "branch")})
            found = call(part, local, self.device)
            for out, full in zip(found, outputs, strict=True):
                torch.testing.assert_close(out, full[:, start:end], rtol=0, atol=0)
            parts = torch.autograd.grad(found, list(given.values()), [s[:, start:end] for s in seeds])
            for name, grad in zip(given, parts, strict=True):
                summed[name] += grad
        for name, grad in grads.items():
            torch.testing.assert_close(summed[name], grad, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("backward", ["one_pass", "dtile"])
    @pytest.mark.parametrize("groups, form", [(1, "B"), (4, "BF"), (64, "BF")])
    def test_two_runs_give_the_same_bits(self, backward, groups, form):
        case = Case(tokens=64, features=192, groups=groups, form=form, backward=backward)
        case = mixed(case, (BF16, BF16, FP32, None))
        runs = []
        for _ in range(2):
            given = tensors(case, self.device)
            outputs = call(case, given, self.device)
            runs.append([*outputs, *gradients(outputs, given).values()])
        assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))

    @pytest.mark.parametrize("op", ["adaln", "residual_adaln", "gated_residual"])
    def test_double_backward_is_refused(self, op):
        case = Case(op=op)
        given = tensors(case, self.device)
        loss = sum(out.square().sum() for out in call(case, given, self.device))
        target = given["x" if op == "adaln" else "gate"]
        (first,) = torch.autograd.grad(loss, target, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiated twice"):
            torch.autograd.grad(first.square().sum(), given["scale" if op == "adaln" else "branch"])

    def test_checkpointed_gradients_are_equal(self):
        case = Case(op="residual_adaln", groups=4, form="BF")
        given = tensors(case, self.device)

        def two(x, branch, gate, shift, scale, weight, bias):
            x, y = residual_adaln(x, branch, gate, shift, scale, weight=weight, bias=bias, layout="bsd")
            return residual_adaln(x, y, gate, shift, scale, layout="bsd")

        arguments = [given[name] for name in NAMES]
        plain = gradients(two(*arguments), given)
        again = gradients(checkpoint(two, *arguments, use_reentrant=False), given)
        assert all(torch.equal(plain[name], again[name]) for name in plain)

    def test_saved_are_inputs_and_eight_bytes_a_row(self):
        case = mixed(Case(op="residual_adaln"), (BF16, BF16, FP32, None))
        given = tensors(case, self.device)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            call(case, given, self.device)
        inputs = {t.data_ptr() for t in given.values()}
        extra = [t for t in saved if t.data_ptr() not in inputs]
        assert sum(t.numel() * t.element_size() for t in extra) == 8 * case.samples * case.tokens

    def test_only_requested_gradients_are_computed(self):
        given = tensors(Case(op="residual_adaln"), self.device)
        frozen = {name: t.detach() for name, t in given.items()}
        for trained in ("x", "branch", "shift", "weight"):
            leaves = frozen | {trained: given[trained]}
            outputs = call(Case(op="residual_adaln"), leaves, self.device)
            with Calls() as calls:
                torch.autograd.grad(outputs[1].sum(), given[trained])
            assert calls.wanted == [1], trained

    def test_gradient_of_the_stream_is_passed_on(self):
        # r = residual + branch: both gradients are dr itself; no op of ours has to run.
        case = Case(op="residual_adaln", affine=False)
        given = tensors(case, self.device)
        r, _ = residual_adaln(given["x"], given["branch"], None, given["shift"], given["scale"], layout="bsd")
        with Calls() as calls:
            dx, dbranch = torch.autograd.grad(r.sum(), [given["x"], given["branch"]])
        assert calls.wanted == [] and torch.equal(dx, torch.ones_like(dx)) and torch.equal(dbranch, dx)

    def test_one_graph_with_any_length(self):
        def step(x, branch, gate, shift, scale):
            x, y = residual_adaln(x, branch, gate, shift, scale)
            return adaln(x + y, shift, scale), gated_residual(x, y, gate)

        backend = "inductor" if self.device == "cuda" else "aot_eager"
        compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
        for tokens in (8, 24, 40):
            case = Case(tokens=tokens, groups=4, form="BF", features=64, affine=False)
            given = tensors(case, self.device)
            outputs, expected = compiled(*given.values()), step(*given.values())
            for out, other in zip(outputs, expected, strict=True):
                torch.testing.assert_close(out, other, rtol=1e-5, atol=1e-5)
            grads, others = gradients(outputs, given), gradients(expected, given)
            for name in grads:
                torch.testing.assert_close(grads[name], others[name], rtol=1e-4, atol=1e-4, msg=name)

    @pytest.mark.parametrize("case", [Case(), Case(groups=4, form="FB", layout="sbd", norm="rms")], ids=str)
    def test_opcheck(self, case):
        given = tensors(case, self.device)
        x, branch, gate, *norm = (given[name] for name in NAMES)
        axis, size = int(case.form == "FB"), 3 if case.groups == 4 else 0
        place = (None, case.layout == "sbd", axis, size, 0)
        how = (1e-6, case.norm == "rms", False, FP32)
        ops = torch.ops.al_deepspeed
        torch.library.opcheck(ops.adaln.default, (x, *norm, *place, *how))
        torch.library.opcheck(ops.residual_adaln.default, (x, branch, gate, *norm, *place, *how))
        torch.library.opcheck(ops.gated_residual.default, (x, branch, gate, *place))
        x, branch, gate, shift, scale, weight, bias = (given[name].detach() for name in NAMES)
        stats = torch.rand(1 if case.norm == "rms" else 2, case.samples, case.tokens, device=self.device)
        inputs = (branch, x, x, branch, shift, scale, gate, weight, bias, stats)
        wanted = [True, False, True, True, False, True, True]
        torch.library.opcheck(ops.backward.default, (*inputs, *place, case.norm == "rms", False, wanted))
