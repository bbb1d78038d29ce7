"""Ten million samples on 1,024 ranks: time and memory of a plan, of iterating it, and of resuming at 90%.

    python benchmarks/plan_scale.py [--samples 10000000] [--world-size 1024] [--accumulation 1]

The corpus is the mix of the tests (18 shapes, 256 to 75,600 tokens). Each part runs in a process of its own,
so that its peak memory is its own; `resume` and `elastic` load a state saved at 90% of the epoch, the latter
into half the ranks. Prints one JSON object.
"""

import argparse
import json
import multiprocessing
import resource
import sys
import time
from itertools import islice
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from corpora import MIX, MIX_MEMORY, WAN

from al_deepspeed.scheduling.constraints import Limits
from al_deepspeed.scheduling.metrics import plan_metrics
from al_deepspeed.scheduling.sampler import PlanSampler
from al_deepspeed.scheduling.shapes import Corpus, latent_tokens

LIMITS = Limits(MIX_MEMORY, float(WAN.cost(1, 75600)))


def corpus_of(samples: int) -> Corpus:
    """Built without a copy a sample, as a manifest builds it."""
    shapes = np.array([row[:3] for row in MIX])
    tokens = latent_tokens(*shapes.T)
    bounds = np.cumsum([row[3] for row in MIX]) / 100 * 2**32
    bucket = np.empty(samples, dtype=np.int32)
    rng = np.random.default_rng(0)
    for start in range(0, samples, 1 << 20):
        part = bucket[start : start + (1 << 20)]
        part[:] = np.minimum(np.searchsorted(bounds, rng.integers(0, 2**32, len(part))), len(MIX) - 1)
    kinds = tuple("image" if row[0] == 1 else "video" for row in MIX)
    return Corpus(shapes, tokens, kinds, bucket, "benchmark")


def sampler_of(corpus: Corpus, world_size: int, accumulation: int) -> PlanSampler:
    return PlanSampler(
        corpus, WAN, LIMITS, rank=world_size // 2, world_size=world_size, accumulation=accumulation
    )


def measure(part: str, samples: int, world_size: int, accumulation: int, results) -> None:
    corpus = corpus_of(samples)
    corpus_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    sampler = sampler_of(corpus, world_size, accumulation)
    row = {"corpus_gb": corpus_gb}
    if part == "plan":
        start = time.perf_counter()
        plan = sampler.plan
        row["seconds"] = time.perf_counter() - start
        row["peak_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        start = time.perf_counter()
        batches = sum(1 for _ in islice(sampler, 100_000))
        row["us_a_micro_batch"] = (time.perf_counter() - start) / batches * 1e6
        row["micro_steps"] = plan.micro_steps
        row["figures"] = plan_metrics(plan)
    else:
        micro_steps = int(results["plan"]["micro_steps"] * 0.9) // accumulation * accumulation
        state = sampler.state_dict() | {"parts": [[world_size, accumulation, micro_steps]]}
        row["state_bytes"] = len(json.dumps(state))
        if part == "elastic":
            sampler = sampler_of(corpus, world_size // 2, accumulation)
        start = time.perf_counter()
        sampler.load_state_dict(state)
        next(iter(sampler))
        row["seconds"] = time.perf_counter() - start
        row["peak_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        row["micro_steps_left"] = len(sampler)
    results[part] = row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=10_000_000)
    parser.add_argument("--world-size", type=int, default=1024)
    parser.add_argument("--accumulation", type=int, default=1)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results = context.Manager().dict()
    for part in ("plan", "resume", "elastic"):
        run = (part, arguments.samples, arguments.world_size, arguments.accumulation, results)
        process = context.Process(target=measure, args=run)
        process.start()
        process.join()
    print(json.dumps(dict(results), indent=1))


if __name__ == "__main__":
    main()
