"""Fused AdaLN's CUDA kernels: every test of adaln_suite.py, and what only a GPU shows."""

import time
from dataclasses import replace

import pytest
import torch
from adaln_cases import BF16, FP32, MIXES, Case, call, check, mixed, relative, tensors
from adaln_suite import Calls, Cases

from al_deepspeed.ops import adaln, backend, gated_residual, residual_adaln

pytestmark = pytest.mark.gpu
FEATURES = [1, 33, 65, 128, 769, 1152, 1536, 2048, 3072, 3584, 4096, 5120, 8192, 16384]


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """Without them, every test below would compare the reference with itself."""
    backend.load_kernels()


class TestOnCuda(Cases):
    device = "cuda"


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("op", ["adaln", "residual_adaln", "gated_residual"])
def test_every_feature_size(features, op):
    for backward in ("one_pass", "dtile"):
        for mix in (MIXES[0], MIXES[1]):
            check(mixed(Case(op=op, tokens=17, features=features, backward=backward), mix), "cuda")


@pytest.mark.parametrize("features", [1, 65, 769, 1536, 5120])
@pytest.mark.parametrize("groups, form", [(4, "BF"), (52, "BF")])
def test_groups_at_several_feature_sizes(features, groups, form):
    for backward in ("one_pass", "dtile"):
        for mix in MIXES[:3]:
            case = Case(tokens=52, features=features, groups=groups, form=form, backward=backward)
            check(mixed(case, mix), "cuda")


@pytest.mark.parametrize("rows", [1, 2, 131, 1000, 4099])
@pytest.mark.parametrize("features", [128, 1536])
def test_every_number_of_rows(rows, features):
    for backward in ("one_pass", "dtile"):
        check(Case(op="residual_adaln", samples=1, tokens=rows, features=features, backward=backward), "cuda")


@pytest.mark.parametrize("features", [1536, 3072, 5120])
def test_long_sums_stay_exact(features):
    # 32,768 rows a group: the sums over rows are the hard part.
    given = {
        name: torch.randn(shape, device="cuda").to(dtype).requires_grad_()
        for name, shape, dtype in (
            ("x", (2, 32768, features), BF16),
            ("shift", (2, features), FP32),
            ("scale", (2, features), FP32),
        )
    }
    y = adaln(**given, layout="bsd", out_dtype=FP32)
    dy = torch.randn_like(y)
    grads = torch.autograd.grad(y, list(given.values()), dy)
    normed = torch.nn.functional.layer_norm(given["x"].detach().double(), (features,), eps=1e-6)
    true_y = (
        normed * (1 + given["scale"].detach().double()[:, None]) + given["shift"].detach().double()[:, None]
    )
    assert relative(y, true_y) <= 2e-6
    assert relative(grads[1], dy.double().sum(1)) <= 2e-6
    assert relative(grads[2], (dy.double() * normed).sum(1)) <= 2e-6


def test_more_than_two_to_the_31_elements():
    # 2^31 / 16384 = 131,072 rows; the last rows lie beyond what 32 bits can index.
    rows, features = 131_072 + 64, 16_384
    x = torch.empty(1, rows, features, device="cuda", dtype=BF16)
    for part in x.split(8192, dim=1):
        part.normal_()
    x.requires_grad_()
    shift, scale = (torch.randn(1, features, device="cuda").mul_(0.1).requires_grad_() for _ in range(2))
    y = adaln(x, shift, scale)
    tail = x.detach()[:, -48:].clone().requires_grad_()
    small = adaln(tail, shift, scale)
    assert torch.equal(y[:, -48:], small)
    dy = torch.zeros_like(y)
    dy[:, -48:].normal_()
    dx, dshift, dscale = torch.autograd.grad(y, [x, shift, scale], dy)
    for found, other in zip(
        (dx[:, -48:], dshift, dscale),
        torch.autograd.grad(small, [tail, shift, scale], dy[:, -48:]),
        strict=True,
    ):
        torch.testing.assert_close(
            found.float(), other.float(), rtol=2e-2 if found.dtype == BF16 else 1e-5, atol=1e-4
        )
    assert not dx[:, :1024].any()


def test_only_what_the_engine_asks_for_is_computed():
    given = tensors(Case(), "cuda")
    outputs = call(Case(), given, "cuda")
    with Calls() as calls:  # every input could have a gradient, one is wanted
        torch.autograd.grad(outputs[1].sum(), given["scale"])
    assert calls.wanted == [1]


def test_non_default_stream_and_graph_capture():
    x = torch.randn(2, 64, 256, device="cuda")
    shift, scale = torch.randn(2, 2, 256, device="cuda")
    expected = adaln(x, shift, scale)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        adaln(x, shift, scale)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = adaln(x, shift, scale)
    graph.replay()
    assert torch.equal(y, expected)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda x, m: adaln(x.double(), m), "float32, float16 and bfloat16"),
        (lambda x, m: adaln(x, m.cpu()), "tensors on"),
        (lambda x, m: adaln(x, m, cu_seqlens=None, weight=torch.ones(256)), "tensors on"),
    ],
)
def test_wrong_tensors_are_named(wrong, message):
    with pytest.raises((TypeError, RuntimeError), match=message):
        wrong(torch.randn(2, 8, 256, device="cuda"), torch.randn(2, 256, device="cuda"))


def test_peak_memory_is_outputs_and_eight_bytes_a_row():
    x = torch.randn(2, 4096, 1536, device="cuda", dtype=BF16, requires_grad=True)
    shift, scale = torch.randn(2, 2, 1536, device="cuda").requires_grad_().unbind(0)
    before = torch.cuda.memory_allocated()
    y = adaln(x, shift, scale)
    kept = torch.cuda.memory_allocated() - before - y.nbytes
    assert kept <= 8 * 2 * 4096 + 512


def test_training_steps_agree_with_the_reference():
    # Fifty steps of a small chain by kernels and by plain PyTorch: no drift between them.
    def losses(chosen):
        torch.manual_seed(0)
        layer = torch.nn.Linear(256, 256).cuda()
        six = torch.nn.Parameter(torch.randn(6, 2, 256, device="cuda") * 0.1)
        x, target = torch.randn(2, 2, 64, 256, device="cuda")
        optimizer = torch.optim.SGD([*layer.parameters(), six], lr=2.0)
        found = []
        backend.set_backend(chosen)
        try:
            for _ in range(50):
                y = adaln(x, six[0], six[1])
                r, y = residual_adaln(x, layer(y), six[2], six[3], six[4])
                loss = (gated_residual(r, layer(y), six[5]) - target).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                found.append(loss.item())
        finally:
            backend.set_backend("auto")
        return torch.tensor(found)

    fused, plain = losses("cuda"), losses("reference")
    assert plain[-1] < 0.9 * plain[0]
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-5)


def test_host_work_does_not_wait_for_the_device():
    # A call behind a device that is busy for a second must return long before that.
    x = torch.randn(2, 64, 256, device="cuda", requires_grad=True)
    adaln(x).sum().backward()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    started = time.perf_counter()
    adaln(x).sum().backward()
    waited = time.perf_counter() - started
    busy = not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    assert busy, f"the call took {waited:.2f} s"


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_wan_blocks_equal_the_original(dtype):
    diffusers = pytest.importorskip("diffusers")
    from al_deepspeed.patching.in_memory import patch_model, unpatch

    def run(fused):
        torch.manual_seed(0)
        model = diffusers.WanTransformer3DModel(
            num_attention_heads=2, attention_head_dim=64, text_dim=16, freq_dim=32, ffn_dim=256, num_layers=2
        )
        model = model.cuda().to(dtype).train()
        if fused:
            assert patch_model(model).count == 5
        x = torch.randn(2, 16, 3, 16, 16, device="cuda", dtype=dtype)
        text = torch.randn(2, 7, 16, device="cuda", dtype=dtype)
        y = model(x, torch.tensor([3, 700], device="cuda"), text, return_dict=False)[0]
        y.float().square().mean().backward()
        return {"y": y} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    expected = run(False)
    try:
        found = run(True)
    finally:
        unpatch()
    limit = {FP32: 1e-4, BF16: 3e-2}[dtype]  # bf16 rounds at other places
    for name in (
        "y",
        "blocks.0.scale_shift_table",
        "blocks.0.attn1.to_q.weight",
        "blocks.1.ffn.net.2.weight",
    ):
        assert relative(found[name], expected[name]) <= limit, name


def test_layouts_and_offsets_at_video_size():
    # Megatron's layout with a shard that starts inside a frame, at the tokens of 480p.
    case = Case(
        samples=2, tokens=3000, groups=3, form="FB", layout="sbd", offset=700, group_size=1560, features=1536
    )
    check(mixed(replace(case, op="adaln"), MIXES[1]), "cuda")
