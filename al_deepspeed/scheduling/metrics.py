"""The figures of a plan or of a run: how well ranks are loaded, and whether steps keep the corpus's mix.

    efficiency   sum over micro-steps of mean_r(cost) / sum of max_r(cost)
    imbalance    std_r(cost) / mean_r(cost), population std, averaged over micro-steps
    step CV      std / mean over steps of the samples or tokens a step holds
    kind weight  a kind's share of the gradient weight summed over the steps
The functions take arrays, predicted or measured alike.
"""

import numpy as np

from al_deepspeed.scheduling.constraints import Limits, batch_sizes, binding_limits, memory_batch_sizes
from al_deepspeed.scheduling.cost import CostModel
from al_deepspeed.scheduling.layout import Plan
from al_deepspeed.scheduling.shapes import Corpus, FloatArray


def efficiency(cost: FloatArray) -> float:
    """Of costs [micro_steps, ranks]: the share of the cluster's time in which ranks work."""
    return float(cost.mean(axis=1).sum() / cost.max(axis=1).sum())


def imbalance(cost: FloatArray) -> float:
    """Of costs [micro_steps, ranks]: their relative spread within a micro-step."""
    return float((cost.std(axis=1) / cost.mean(axis=1)).mean())


def variation(values: FloatArray) -> float:
    """Coefficient of variation."""
    return float(np.std(values) / np.mean(values))


def kind_weights(kinds: tuple[str, ...], bucket, loss_weight: FloatArray) -> dict[str, float]:
    """Share of the summed weight by kind, from micro-batches of any arrangement."""
    total = np.bincount(np.ravel(bucket), weights=np.ravel(loss_weight), minlength=len(kinds))
    names = sorted(set(kinds))
    return {
        name: float(sum(total[index] for index, kind in enumerate(kinds) if kind == name) / total.sum())
        for name in names
    }


def steps_without(plan: Plan, kind: str = "image") -> float:
    """Share of the steps in which no sample of the kind counts."""
    of_kind = np.array([name == kind for name in plan.corpus.kinds])
    return float((plan.by_step(np.where(of_kind[plan.bucket], plan.samples, 0)) == 0).mean())


def plan_metrics(plan: Plan) -> dict:
    """All figures of a plan, by the names that `al-deepspeed plan --json` prints.

    Shares are of one; `micro_batches`, `splits`, `fillers` and `dropped` (samples) are counts.
    `tokens_per_s` is of all ranks together, and in tokens per 1000 units of cost where no calibration gives
    milliseconds. `memory_share` is the mean of B*S / max_tokens over micro-batches, `peak_memory_share` the
    largest.
    """
    memory = plan.size * plan.corpus.tokens[plan.bucket] / plan.limits.max_tokens
    return {
        "strategy": plan.options.strategy,
        "mixing": plan.options.mixing,
        "world_size": plan.world_size,
        "accumulation": plan.accumulation,
        "efficiency": efficiency(plan.cost),
        "imbalance": imbalance(plan.cost),
        "tokens_per_s": float(1000 * plan.tokens.sum() / plan.cost.max(axis=1).sum()),
        "memory_share": float(memory.mean()),
        "peak_memory_share": float(memory.max()),
        "micro_batches": int(plan.size.size),
        "splits": plan.splits,
        "fillers": int(plan.filler.sum()),
        "dropped": plan.dropped,
        "step_token_cv": variation(plan.by_step(plan.tokens)),
        "step_sample_cv": variation(plan.by_step(plan.samples)),
        "steps_without_image": steps_without(plan),
        "kind_weight": kind_weights(plan.corpus.kinds, plan.bucket, plan.loss_weight),
    }


def bucket_table(corpus: Corpus, cost: CostModel, limits: Limits, *, memory_only: bool = False) -> list[dict]:
    """A row a bucket: kind, shape, S, samples, B by the rule, and which limit binds."""
    counts = corpus.counts()
    if memory_only:
        sizes = memory_batch_sizes(corpus.tokens, limits)
        binding = ["oversize" if tokens > limits.max_tokens else "memory" for tokens in corpus.tokens]
    else:
        sizes = batch_sizes(corpus.tokens, cost, limits)
        binding = binding_limits(corpus.tokens, cost, limits)
    return [
        {
            "kind": corpus.kinds[bucket],
            "shape": "x".join(map(str, corpus.shapes[bucket].tolist())),
            "tokens": int(corpus.tokens[bucket]),
            "samples": int(counts[bucket]),
            "batch_size": int(sizes[bucket]),
            "cost": float(cost.cost(sizes[bucket], corpus.tokens[bucket])),
            "binding": binding[bucket],
        }
        for bucket in range(corpus.buckets)
    ]
