"""The same lengths through DeepSpeed's batch_by_seqlens, lhotse's DynamicBucketingSampler and our plan.

    python benchmarks/plan_peers.py [--samples 8000] [--ranks 16]

Lengths are those of the tests' mix; the budget is 2.2 times the longest. For each: seconds for an epoch
of one rank's batches (for DeepSpeed, which plans for all ranks at once, of all), how many samples the
epoch of all ranks holds, and efficiency by one cost model, where a batch of unequal lengths is padded to
its longest. lhotse is optional: `pip install lhotse`.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from corpora import MIX_MEMORY, WAN, consumed, mixed_corpus

from al_deepspeed.scheduling.constraints import Limits
from al_deepspeed.scheduling.metrics import efficiency
from al_deepspeed.scheduling.plan import make_plan


def figures(seconds: float, batches_by_rank: list[list[np.ndarray]], lengths: np.ndarray) -> dict:
    """Batches as arrays of sample ids, in the order each rank runs them."""
    counts = [len(batches) for batches in batches_by_rank]
    ids = np.concatenate([batch for batches in batches_by_rank for batch in batches])
    cost = np.array(
        [
            [float(WAN.cost(len(batch), lengths[batch].max())) for batch in batches[: min(counts)]]
            for batches in batches_by_rank
        ]
    ).T
    return {
        "seconds": seconds,
        "distinct_samples": len(np.unique(ids)),
        "samples_drawn": len(ids),
        "micro_steps_of_ranks": [min(counts), max(counts)],
        "efficiency": efficiency(cost),
        "tokens_per_s": float(1000 * lengths[ids].sum() / cost.max(axis=1).sum()),
    }


def ours(corpus, lengths: np.ndarray, ranks: int, strategy: str) -> dict:
    limits = Limits(MIX_MEMORY, float(WAN.cost(1, lengths.max())))
    start = time.perf_counter()
    plan = make_plan(corpus, WAN, limits, world_size=ranks, strategy=strategy)
    for micro_step in range(plan.micro_steps):
        plan.micro_batch(micro_step, 0)
    seconds = time.perf_counter() - start
    batches = [[plan.sample_ids(step, rank) for step in range(plan.micro_steps)] for rank in range(ranks)]
    row = figures(seconds, batches, lengths)
    row["samples_drawn"] = len(consumed(plan))
    return row


def deepspeed_batches(lengths: np.ndarray, ranks: int) -> dict:
    from deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr import batch_by_seqlens

    start = time.perf_counter()
    batches, _, _ = batch_by_seqlens(
        lengths.tolist(),
        MIX_MEMORY,
        sequence_picking_order="seqlen",
        effective_batch_size=ranks,
        seed=0,
    )
    seconds = time.perf_counter() - start
    ids = [np.array(batch) for _, batch in batches]
    return figures(seconds, [ids[rank::ranks] for rank in range(ranks)], lengths)


def lhotse_batches(lengths: np.ndarray, ranks: int) -> dict:
    from lhotse import CutSet, MonoCut
    from lhotse.dataset import DynamicBucketingSampler

    cuts = [
        MonoCut(id=str(row), start=0.0, duration=float(length), channel=0)
        for row, length in enumerate(lengths.tolist())
    ]
    batches, seconds = [], []
    for rank in range(ranks):
        start = time.perf_counter()
        sampler = DynamicBucketingSampler(
            CutSet.from_cuts(cuts),
            max_duration=float(MIX_MEMORY),
            num_buckets=18,
            shuffle=True,
            seed=0,
            world_size=ranks,
            rank=rank,
        )
        batches.append([np.array([int(cut.id) for cut in batch]) for batch in sampler])
        seconds.append(time.perf_counter() - start)
    return figures(float(np.mean(seconds)), batches, lengths)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=8000)
    parser.add_argument("--ranks", type=int, default=16)
    arguments = parser.parse_args()
    corpus = mixed_corpus(arguments.samples)
    lengths = corpus.tokens[corpus.bucket]
    rows = {
        f"al_deepspeed {strategy}": ours(corpus, lengths, arguments.ranks, strategy)
        for strategy in ("equal_token", "dual_constraint", "balanced")
    }
    rows["deepspeed batch_by_seqlens"] = deepspeed_batches(lengths, arguments.ranks)
    try:
        rows["lhotse DynamicBucketingSampler"] = lhotse_batches(lengths, arguments.ranks)
    except ImportError:
        print("lhotse is not installed; left out", file=sys.stderr)
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
