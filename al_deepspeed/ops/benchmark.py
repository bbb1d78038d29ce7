"""Measures fused AdaLN and its peers on a CUDA device: time against the copy limit, memory, host time.

Times are device times: the host queues a run of calls behind a sleeping kernel, so that no launch is waited
for. Small shapes rotate over enough tensors to miss the L2 cache. The copy limit is PyTorch's own copy_ of
2 GiB, timed the same way; a fraction is the rate at which the fewest possible bytes moved over that limit.
Forwards are those of training: they keep what the backward needs.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from al_deepspeed.errors import AdaptiveLoadError
from al_deepspeed.ops.backend import set_backend
from al_deepspeed.ops.benchmark_peers import ours, peers, plain

CLOCK_HZ = 2.0e9  # of the sleeping kernel, roughly
CACHE_BYTES = 256e6  # rotate over at least this much
CALLS, RUNS = 12, 5


@dataclass(frozen=True)
class Scenario:
    """rows of `features` bf16 values in two samples; fp32 modulation, `groups` rows of it a sample."""

    op: str
    rows: int
    features: int
    groups: int = 1
    modulation: str = "sample"

    def passes(self, backward: bool) -> int:
        """Fewest times that a tensor of x's size crosses the memory bus."""
        return {"adaln": (2, 3), "residual_adaln": (4, 6)}[self.op][backward]

    def fewest_bytes(self, backward: bool) -> int:
        rows_of_modulation = 2 * self.groups * (len(self.leaf_names()) - self.streams())
        read_and_written = (
            2 if self.op == "residual_adaln" else 1.5
        )  # backward reads scale and gate, writes all
        factor = read_and_written if backward else 1
        moved = int(rows_of_modulation * self.features * 4 * factor) if self.modulation != "sample" else 0
        return self.passes(backward) * self.rows * self.features * 2 + moved

    def streams(self) -> int:
        return 1 if self.op == "adaln" else 2

    def leaf_names(self) -> tuple[str, ...]:
        if self.op == "adaln":
            return ("x", "shift", "scale")
        return ("residual", "branch", "gate", "shift", "scale")

    def leaves(self, grouped: bool) -> list[torch.Tensor]:
        """Random leaves; `grouped` as the peers take them."""
        tokens = self.rows // 2
        x_shape = (
            [2, self.groups, tokens // self.groups, self.features] if grouped else [2, tokens, self.features]
        )
        m_shape = [2, self.groups, *([1] if grouped else []), self.features]
        count = len(self.leaf_names())
        return [
            torch.randn(x_shape, device="cuda", dtype=torch.bfloat16).requires_grad_()
            if i < self.streams()
            else torch.randn(m_shape, device="cuda").mul_(0.1).requires_grad_()
            for i in range(count)
        ]


FEATURES = (1536, 3072, 5120)
SCENARIOS = (
    *(Scenario("adaln", rows, features) for rows in (65536, 32768, 8192) for features in FEATURES),
    *(Scenario("residual_adaln", 65536, features) for features in FEATURES),
    *(Scenario("adaln", 2 * 21 * 1560, features, 21, "frame") for features in FEATURES),
    Scenario("residual_adaln", 2 * 21 * 1560, 3072, 21, "frame"),
    *(Scenario("adaln", 65536, features, 32768, "token") for features in FEATURES),
)


def run(progress: Callable[[str], None]) -> dict:
    """All scenarios; see the module's first lines for what the numbers mean."""
    if not torch.cuda.is_available():
        raise AdaptiveLoadError(
            f"bench adaln measures CUDA kernels and PyTorch {torch.__version__} sees no CUDA device; "
            "run it on a machine with one"
        )
    torch._functorch.config.donated_buffer = False  # compiled backwards are run more than once here
    started = time.perf_counter()
    set_backend("cuda")
    build_s = time.perf_counter() - started
    copy = _copy_bytes_per_us()
    results, memory, skipped = [], [], []
    for scenario in SCENARIOS:
        progress(f"{scenario.op} {scenario.rows} x {scenario.features}, modulation a {scenario.modulation}")
        implementations = [(n, f, False) for n, f in ours(scenario.op).items()]
        implementations += [(n, f, True) for n, f in peers(scenario.op).items()]
        for name, function, grouped in implementations:
            try:
                results += _times(scenario, name, function, grouped, copy)
                if scenario.rows == 65536 and scenario.modulation == "sample":
                    memory.append(_memory(scenario, name, function, grouped))
            except torch.OutOfMemoryError:
                skipped.append({**asdict(scenario), "implementation": name, "reason": "out of memory"})
        torch.compiler.reset()
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "build_or_load_s": build_s,
        "copy_tb_per_s": copy / 1e6,
        "empty_launch_us": _device_us([lambda: torch.cuda._sleep(1)]),
        "results": results,
        "memory": memory,
        "host": _host_us(),
        "skipped": skipped,
    }


def _copy_bytes_per_us() -> float:
    source = torch.empty(1 << 30, device="cuda", dtype=torch.bfloat16).normal_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / _device_us([lambda: target.copy_(source)])


def _times(scenario: Scenario, name: str, function: Callable, grouped: bool, copy: float) -> list[dict]:
    """Forward and backward of one implementation."""
    sets = max(1, min(CALLS, round(CACHE_BYTES / (scenario.rows * scenario.features * 2))))
    leaves = [scenario.leaves(grouped) for _ in range(sets)]
    forwards = [lambda given=given: function(*given) for given in leaves]
    directions = {} if name == "fused dtile" else {"forward": _device_us(forwards)}  # one forward for both
    graphs = []
    for given in leaves:
        outputs = function(*given)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        graphs.append((outputs, given, [torch.randn_like(out) for out in outputs]))
    directions["backward"] = _device_us(
        [lambda graph=graph: torch.autograd.grad(*graph, retain_graph=True) for graph in graphs]
    )
    found = []
    for direction, us in directions.items():
        fewest = scenario.fewest_bytes(direction == "backward")
        found.append(
            {
                **asdict(scenario),
                "implementation": name,
                "direction": direction,
                "us": us,
                "fewest_bytes": fewest,
                "fraction_of_copy": fewest / us / copy,
            }
        )
    return found


def _device_us(calls: list[Callable]) -> float:
    """Median over runs of the mean device time of a call."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    order = [calls[i % len(calls)] for i in range(CALLS)]
    started = time.perf_counter()
    for call in order:
        call()
    host_s = time.perf_counter() - started
    times = []
    for _ in range(RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(int(CLOCK_HZ * (1.5 * host_s + 5e-4)))
        start.record()
        for call in order:
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end) / CALLS)
    return statistics.median(times)


def _memory(scenario: Scenario, name: str, function: Callable, grouped: bool) -> dict:
    """Bytes that the forward keeps beyond inputs and outputs, and the peak over forward and backward."""
    leaves = scenario.leaves(grouped)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    saved = torch.cuda.memory_allocated() - before - sum(out.nbytes for out in outputs)
    seeds = [torch.ones_like(out) for out in outputs]
    torch.autograd.grad(outputs, leaves, seeds)
    peak = torch.cuda.max_memory_allocated() - before
    return {
        **asdict(scenario),
        "implementation": name,
        "saved_bytes": saved,
        "saved_bytes_per_row": saved / scenario.rows,
        "peak_bytes": peak,
    }


def _host_us(calls: int = 200) -> dict[str, dict[str, float]]:
    """Host time of a call where the device has next to nothing to do: 32 rows."""
    scenario = Scenario("adaln", 32, 1536)
    found = {}
    for name, function, grouped in (
        ("fused", ours("adaln")["fused one_pass"], False),
        ("eager plain", plain, True),
    ):
        leaves = scenario.leaves(grouped)
        outputs = function(*leaves)
        seed = torch.ones_like(outputs)
        found[name] = {
            "forward": _host_median(lambda f=function, given=leaves: f(*given), calls),
            "backward": _host_median(
                lambda o=outputs, given=leaves, s=seed: torch.autograd.grad(o, given, s, retain_graph=True),
                calls,
            ),
        }
    return found


def _host_median(call: Callable, calls: int) -> float:
    times = []
    for _ in range(calls):
        started = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - started))
    torch.cuda.synchronize()
    return statistics.median(times)
