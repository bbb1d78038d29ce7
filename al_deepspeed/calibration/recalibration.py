"""`recalibrate: "epoch"`: at each epoch's end rank 0 refits the cost to the run's telemetry and tells all."""

from pathlib import Path

import numpy as np
import torch.distributed as dist
from deepspeed.utils import logger

from al_deepspeed.calibration.assemble import with_budget
from al_deepspeed.calibration.file import Calibration, parse_calibration, read_calibration, write_calibration
from al_deepspeed.calibration.from_run import read_run, refit, run_ratio
from al_deepspeed.errors import CalibrationError
from al_deepspeed.scheduling.shapes import Corpus

FILE_NAME = "calibration-after-epoch-{}.json"


def recalibrate(
    before: Calibration, run_dir: Path, corpus: Corpus, world: tuple[int, int], epoch: int
) -> Calibration:
    """The calibration for the epochs to come, the same on every rank. Collective.

    Rank 0 reads its telemetry, writes RUN/calibration-after-epoch-N.json and logs what changed. Too little
    telemetry for a fit is a warning, and the calibration stays as it is.

    Args:
        world: R and G, which M_comp is chosen for.
    """
    told: list[dict | None] = [None]
    if dist.get_rank() == 0:
        try:
            after = _refitted(before, run_dir, corpus, world, epoch)
            write_calibration(after, run_dir / FILE_NAME.format(epoch))
            told = [after.to_dict()]
        except CalibrationError as error:
            logger.warning(f"no recalibration after epoch {epoch}: {error}")
    dist.broadcast_object_list(told, src=0)
    return before if told[0] is None else parse_calibration(told[0], f"recalibration after epoch {epoch}")


def recall(run_dir: Path, epoch: int) -> Calibration | None:
    """The calibration that an epoch is planned by, for a resume: the latest made before it. Collective."""
    told: list[dict | None] = [None]
    if dist.get_rank() == 0:
        paths = (run_dir / FILE_NAME.format(earlier) for earlier in reversed(range(epoch)))
        path = next((path for path in paths if path.is_file()), None)
        told = [path and read_calibration(path).to_dict()]
    dist.broadcast_object_list(told, src=0)
    return None if told[0] is None else parse_calibration(told[0], f"the recalibration before epoch {epoch}")


def _refitted(
    before: Calibration, run_dir: Path, corpus: Corpus, world: tuple[int, int], epoch: int
) -> Calibration:
    points = read_run(run_dir)
    after = refit(points, before)
    if before.max_tokens is not None:
        after = with_budget(after, corpus, *world)
    off = {
        name: np.median([abs(model.cost(p.batch_size, p.tokens) / p.ms - 1) for p in points])
        for name, model in (("before", before.cost), ("after", after.cost))
    }
    logger.warning(  # DeepSpeed shows nothing below it by default, and the batches to come change
        f"recalibrated after epoch {epoch} from {len(points)} pairs (B, S): the run took "
        f"{run_ratio(points, before):.3f} times the predicted; median error {off['before']:.1%} before, "
        f"{off['after']:.1%} after; M_comp {_ms(before.max_cost)} before, {_ms(after.max_cost)} after"
    )
    return after


def _ms(max_cost: float | None) -> str:
    return "not chosen" if max_cost is None else f"{max_cost:.4g} ms"
