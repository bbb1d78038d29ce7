"""The worked examples of patches/README.md, executed against stand-ins for the trainers' own classes."""

import re
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

README = Path(__file__).parents[1] / "patches" / "README.md"
ROWS, RANKS, ACCUMULATION = 40, 2, 2


@pytest.fixture(scope="module")
def examples():
    space = {"torch": torch, "DataLoader": torch.utils.data.DataLoader, "Dataset": torch.utils.data.Dataset}
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        exec(compile(block, str(README), "exec"), space)
    return SimpleNamespace(**space)


@pytest.fixture
def config(tmp_path):
    """Half pictures (one frame), half clips of three frames."""
    lines = [f"{1 if row % 2 else 3},4,4" for row in range(ROWS)]
    manifest = tmp_path / "manifest.csv"
    manifest.write_text("\n".join(["latent_frames,latent_height,latent_width", *lines]) + "\n")
    batching = {
        "enabled": True,
        "manifest": str(manifest),
        "max_tokens": 48,
        "max_cost": 600,
        "exponent": 1.5,
    }
    sampling = {"enabled": True, "dual_constraint_batching": batching}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": ACCUMULATION,
        "data_efficiency": {"enabled": True, "seed": 7, "data_sampling": sampling},
    }


class Samples(torch.utils.data.Dataset):
    """Sample r is r * r, and its loss that value: the mean over an epoch's step is known."""

    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        return {"row": row, "latents": torch.full((1,), float(row * row))}


def samplers(examples, config):
    place = {"world_size": RANKS, "accumulation": ACCUMULATION}
    return [examples.plan_sampler(config, Samples(), rank=rank, **place) for rank in range(RANKS)]


def collate(samples):
    return {"rows": [s["row"] for s in samples], "latents": torch.stack([s["latents"] for s in samples])}


def assert_each_row_once_and_means_exact(steps):
    """steps: of each step, (rows, weighted mean loss) over ranks and micro-steps."""
    assert sorted(row for step in steps for rows, _ in step for row in rows) == list(range(ROWS))
    for step in steps:
        rows = [row for rows, _ in step for row in rows]
        averaged = sum(loss for _, loss in step) / (RANKS * ACCUMULATION)  # what the engines do
        assert averaged == pytest.approx(sum(row * row for row in rows) / len(rows), rel=1e-5)


def by_step(of_ranks):
    """Per rank a list of (rows, loss, weight) a micro-step; a filler, at weight 0, has no rows of its own."""
    micro_steps = [
        [(rows if weight else [], loss) for rows, loss, weight in ranks]
        for ranks in zip(*of_ranks, strict=True)
    ]
    starts = range(0, len(micro_steps), ACCUMULATION)
    return [list(chain.from_iterable(micro_steps[start : start + ACCUMULATION])) for start in starts]


def test_videox_fun(examples, config):
    def epoch(rank):
        accelerator = SimpleNamespace(process_index=rank, num_processes=RANKS)
        loader, sampler = examples.videox_fun_batches(config, Samples(), collate, accelerator, ACCUMULATION)
        weights = [planned.loss_weight for _, planned in sampler.upcoming()]
        batches, losses = [], []
        accelerator.backward = lambda loss: losses.append(loss.item())
        examples.videox_fun_epoch(
            loader, sampler, accelerator, lambda batch: (batches.append(batch), batch["latents"].mean())[1]
        )
        assert (sampler.epoch, sampler.position) == (1, 0)
        return [(b["rows"], loss, w) for b, loss, w in zip(batches, losses, weights, strict=True)]

    assert_each_row_once_and_means_exact(by_step([epoch(rank) for rank in range(RANKS)]))


def test_open_sora(examples, config):
    pixels = [(1 if row % 2 else 9, 32, 48) for row in range(ROWS)]
    first, second = (examples.OpenSoraSampler(sampler, pixels) for sampler in samplers(examples, config))
    names = [name for sampler in (first, second) for batch in sampler for name in batch]
    rows = [int(name.split("-")[0]) for name in names]
    assert set(rows) == set(range(ROWS))
    assert all(
        name.split("-")[1:] == [str(side) for side in pixels[int(name.split("-")[0])]] for name in names
    )
    first.sampler.advance(ACCUMULATION)
    second.load_state_dict(first.state_dict(step=1))
    second.set_epoch(0)
    second.set_step(1)
    assert len(second) == len(first) == first.sampler.plan.micro_steps - ACCUMULATION
    second.reset()
    second.set_epoch(1)
    assert second.sampler.epoch == 1


def test_diffusion_pipe(examples, config):
    class Bucket(list):
        """A size bucket of the trainer: indexable, with a length."""

    everything = [Samples()[row] for row in range(ROWS)]
    rows = examples.DiffusionPipeRows([Bucket(everything[:15]), Bucket(everything[15:])])
    assert [rows[row]["row"] for row in range(len(rows))] == list(range(ROWS))
    seen = []

    def prepare_inputs(batch):
        seen.append(batch["rows"])
        return (batch["latents"], None), (batch["latents"], None)

    of_ranks = []
    for sampler in samplers(examples, config):
        weights = [planned.loss_weight for _, planned in sampler.upcoming()]
        loader = examples.DiffusionPipeLoader(rows, sampler, collate, prepare_inputs)
        assert (len(loader), loader.epoch) == (len(weights), 1)
        micro_batches = []
        for weight in weights:
            (_, nothing), (target, mask) = next(loader)
            assert nothing.numel() == 0
            micro_batches.append((seen[-1], (target * mask).mean().item(), weight))
        next(loader)
        assert loader.epoch == 2
        of_ranks.append(micro_batches)
    assert_each_row_once_and_means_exact(by_step(of_ranks))


def test_megatron_bridge(examples, config):
    class Encoder:
        def encode_sample(self, sample):
            return sample

        def pack_selected_samples(self, samples):
            return collate(samples)

        def batch(self, samples):
            (pack,) = samples
            return pack

    def step(_state, data_iterator, _model):
        batch = next(data_iterator)
        return batch, lambda batch: (batch["latents"].mean(), len(batch["rows"]), {})

    of_ranks = []
    for sampler in samplers(examples, config):
        weights = [planned.loss_weight for _, planned in sampler.upcoming()]
        batches = examples.megatron_batches(Samples(), sampler, Encoder())
        weighted_step = examples.WeightedStep(step)
        micro_batches = []
        for weight in weights:
            batch, loss_function = weighted_step(None, batches, None)
            loss, tokens, report = loss_function(batch)
            assert (tokens, report) == (len(batch["rows"]), {})
            micro_batches.append((batch["rows"], loss.item(), weight))
        of_ranks.append(micro_batches)
    assert_each_row_once_and_means_exact(by_step(of_ranks))
