"""`al-deepspeed index`: a manifest from latent shards, or from a user's own table of sizes."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from al_deepspeed.errors import CorpusError


def run(
    sources: Annotated[
        list[Path] | None, typer.Argument(help="Folders of .tar shards, or tars.", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option(help="The manifest to write.")] = Path("manifest.parquet"),
    from_csv: Annotated[
        Path | None, typer.Option(help="Take sizes from a table of your own (.csv) instead of shards.")
    ] = None,
    map_: Annotated[
        str,
        typer.Option(
            "--map",
            help="With --from-csv: which column, or constant, gives what: latent_frames=COL,... or "
            "pixel_frames=COL,pixel_height=480,... ; key, kind and tokens may be mapped too.",
        ),
    ] = "",
    stride: Annotated[
        str, typer.Option(help="With --from-csv: pixels a latent cell (frames, height, width) of the VAE.")
    ] = "4,8,8",
    patch: Annotated[
        str, typer.Option(help="The model's patch (frames, height, width) of latent cells.")
    ] = "1,2,2",
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave unusable rows out and list them in OUT's .bad.jsonl.")
    ] = False,
    workers: Annotated[int, typer.Option(min=1, help="Processes that read tars side by side.")] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on standard output.")
    ] = False,
) -> None:
    """Write the manifest that planning and training read: one row a sample, and a fingerprint of the rows."""
    from al_deepspeed.data.index import find_tars, index_shards, side_file
    from al_deepspeed.data.progress import byte_progress
    from al_deepspeed.data.table import index_csv

    if bool(sources) == bool(from_csv):
        raise CorpusError("index needs either folders and tars, or --from-csv FILE; not both, not neither.")
    sizes = {"stride": three_numbers("--stride", stride), "patch": three_numbers("--patch", patch)}
    if from_csv:
        manifest, bad = index_csv(from_csv, out, column_map=map_, skip_bad=skip_bad, **sizes)
    else:
        total = sum(tar.stat().st_size for tar in find_tars(sources))
        with byte_progress("index", total) as progress:
            manifest, bad = index_shards(
                sources, out, patch=sizes["patch"], skip_bad=skip_bad, workers=workers, progress=progress
            )
    corpus = manifest.corpus()
    result = {
        "manifest": str(out),
        "samples": corpus.samples,
        "shapes": corpus.buckets,
        "bad": len(bad),
        "fingerprint": manifest.fingerprint,
    }
    if as_json:
        print(json.dumps(result))
    else:
        short = manifest.fingerprint[:12]
        print(f"{out}: {corpus.samples} samples of {corpus.buckets} shapes, fingerprint {short}")
    if bad:
        print(f"{len(bad)} row(s) left out, listed in {side_file(out)}", file=sys.stderr)


def three_numbers(option: str, given: str) -> tuple[int, int, int]:
    """`4,8,8` as a tuple of three whole numbers of at least 1."""
    parts = given.split(",")
    if len(parts) != 3 or not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise CorpusError(
            f"{option} is {given!r}; three whole numbers of at least 1 are needed, such as 4,8,8."
        )
    return tuple(int(part) for part in parts)
