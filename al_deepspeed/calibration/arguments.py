"""The command line of a scan, as every rank reads it. A value that no scan could use is refused at once."""

import argparse
from pathlib import Path

from al_deepspeed.calibration.assemble import MEMORY_FRACTION
from al_deepspeed.calibration.workload import Shape, read_shape


def parser() -> argparse.ArgumentParser:
    """The scan's options; all after `--` are the factory's."""
    arguments = argparse.ArgumentParser(
        prog="al_deepspeed.calibration", description="Scans in the live engine, and fits what it measured."
    )
    arguments.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # from the launcher
    arguments.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)  # DeepSpeed's habit
    arguments.add_argument("--deepspeed_config", required=True, metavar="FILE", help="the real run's")
    arguments.add_argument("--factory", required=True, metavar="PKG.MOD:FUNCTION", help="model and batches")
    arguments.add_argument("--manifest", type=Path, help="its shapes are scanned (default: ds_config's)")
    arguments.add_argument("--shapes", type=shapes, default=(), help="FxHxW,... in place of a manifest's")
    arguments.add_argument(
        "--patch", type=shape, default=(1, 2, 2), metavar="FxHxW", help="with listed shapes"
    )
    arguments.add_argument("--calibration", type=Path, metavar="FILE", help="no scan: --check this one")
    arguments.add_argument("--check", type=Path, metavar="CSV", help="measure these too: columns B, shape")
    arguments.add_argument("--check-out", type=Path, metavar="FILE", help="default: the CSV as .json")
    arguments.add_argument("--out", type=Path, default=Path("calibration.json"))
    arguments.add_argument("--plot", type=Path, help="default: OUT as .png")
    arguments.add_argument("--budget", type=seconds, default=300.0, metavar="5m", help="time for the scan")
    arguments.add_argument("--largest-batch", type=count, default=1024, metavar="B")
    arguments.add_argument("--most-repeats", type=count, default=10, metavar="N", help="a point")
    arguments.add_argument("--form", default="auto", choices=("auto", "power", "two_term", "roofline"))
    arguments.add_argument("--memory-fraction", type=fraction, default=MEMORY_FRACTION)
    arguments.add_argument("--capacity-gb", type=gigabytes, help="a rank's memory (default: the device's)")
    arguments.add_argument("--max-tokens", type=count, help="M_mem, in place of the measured one")
    arguments.add_argument("--world-size", type=count, help="R that M_comp is for (default: this launch's)")
    arguments.add_argument("--resume", action="store_true", help="go on with a scan that was interrupted")
    arguments.add_argument("factory_arguments", nargs="*", metavar="-- ARGUMENTS", help="the factory's own")
    return arguments


def shape(text: str) -> Shape:
    """`5x60x104` as a tuple."""
    sides = read_shape(text)
    if sides is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no shape; allowed: frames x height x width, as 5x60x104"
        )
    return sides


def shapes(text: str) -> tuple[Shape, ...]:
    return tuple(shape(part) for part in text.split(","))


def seconds(text: str) -> float:
    """`90`, `90s`, `5m` or `1h`."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    number, unit = (text[:-1], units[text[-1]]) if text[-1:] in units else (text, 1.0)
    try:
        value = float(number) * unit
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no time; allowed: a number above 0, as 90s, 5m, 1h")
    return value


def count(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no count; allowed: a whole number above 0")
    return int(text)


def gigabytes(text: str) -> float:
    """A number above 0."""
    return _positive(text, float("inf"), "a number above 0")


def fraction(text: str) -> float:
    """A number above 0, at most 1."""
    return _positive(text, 1.0, "a number above 0, at most 1")


def _positive(text: str, most: float, allowed: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= most or value == float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not in range; allowed: {allowed}")
    return value
