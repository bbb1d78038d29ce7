"""`al-deepspeed encode`: pictures and videos, with their captions, to latent shards."""

import json
import re
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from al_deepspeed.errors import CorpusError


class CodecName(str, Enum):
    """Codecs by name."""

    dct = "dct"
    wan_vae = "wan-vae"


def run(
    src: Annotated[
        Path, typer.Argument(help="A folder of pictures, videos and raw WebDataset tars, or one tar.")
    ],
    out: Annotated[Path, typer.Option(help="The folder for the shards.")],
    codec: Annotated[
        CodecName, typer.Option(help="dct needs no weights; wan-vae is diffusers' AutoencoderKLWan.")
    ] = CodecName.dct,
    vae: Annotated[
        str | None,
        typer.Option(help="With wan-vae: a folder or the name of a hub repository.", show_default=False),
    ] = None,
    text: Annotated[
        str,
        typer.Option(help="hash, or a transformers text encoder: a folder or the name of a hub repository."),
    ] = "hash",
    text_length: Annotated[
        int | None,
        typer.Option(min=1, help="Rows of every text embedding [512; hash: 64].", show_default=False),
    ] = None,
    text_width: Annotated[int, typer.Option(min=1, help="With hash: the embedding's width.")] = 256,
    areas: Annotated[
        str, typer.Option(help="Areas to encode at, as height x width; a source takes the largest it fills.")
    ] = "256x256,480x832",
    aspects: Annotated[
        str,
        typer.Option(help="Aspect ratios, width:height; a source takes the nearest and is cropped to it."),
    ] = "1:1,4:3,3:4,3:2,2:3,16:9,9:16",
    max_frames: Annotated[
        int, typer.Option(min=1, help="Longest clip; clips have 4k+1 frames (for a stride of 4).")
    ] = 81,
    frames: Annotated[
        str | None,
        typer.Option(help="Allow videos these lengths alone, such as 17,33,81.", show_default=False),
    ] = None,
    all_sizes: Annotated[
        bool,
        typer.Option(
            "--all-sizes", help="A sample at every area and length a source fills, not the largest."
        ),
    ] = False,
    clips: Annotated[
        int, typer.Option(min=1, help="Clips from so many places of a video, evenly spread.")
    ] = 1,
    fps: Annotated[
        float | None,
        typer.Option(
            help="Take videos at this frame rate; without it every frame counts.", show_default=False
        ),
    ] = None,
    patch: Annotated[
        str, typer.Option(help="The model's patch (frames, height, width); sides are multiples.")
    ] = "1,2,2",
    shard: Annotated[
        str, typer.Option(help="I/N: do share I of N, counted from 0. Run all N, anywhere.")
    ] = "0/1",
    sources_per_shard: Annotated[int, typer.Option(min=1, help="Pictures and videos in one shard.")] = 64,
    device: Annotated[
        str, typer.Option(help="For wan-vae and text encoders: auto, cpu, cuda, cuda:1, ...")
    ] = "auto",
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out unusable sources; list them in SHARD.bad.jsonl.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on standard output.")
    ] = False,
) -> None:
    """Turn SRC into latent shards; then `al-deepspeed index OUT`. A killed run goes on where it was.

    Captions come from a .txt or .json ("caption") beside a file or in the tar, else from the file's name.
    """
    from al_deepspeed.commands.index import three_numbers
    from al_deepspeed.data.buckets import Buckets, parse_areas, parse_aspects, parse_lengths
    from al_deepspeed.data.codec import DctCodec, WanVaeCodec
    from al_deepspeed.data.encode import Cut, count_sources, encode
    from al_deepspeed.data.progress import count_progress
    from al_deepspeed.data.text import HashText, TransformersText

    if (codec is CodecName.wan_vae) != (vae is not None):
        raise CorpusError("--codec wan-vae and --vae NAME_OR_DIR go together; dct takes no --vae.")
    share = _share(shard)
    made_codec = DctCodec() if codec is CodecName.dct else WanVaeCodec(vae, device)
    if text == "hash":
        encoder = HashText(text_length or 64, text_width)
    else:
        encoder = TransformersText(text, text_length or 512, device)
    sides = three_numbers("--patch", patch)[1:]
    buckets = Buckets(
        areas=parse_areas(areas),
        aspects=parse_aspects(aspects),
        max_frames=max_frames,
        lengths=parse_lengths(frames) if frames else None,
        multiple=tuple(stride * side for stride, side in zip(made_codec.stride[1:], sides, strict=True)),
        temporal_stride=made_codec.stride[0],
    )
    cut = Cut(buckets, all_sizes=all_sizes, clips=clips, fps=fps)
    with count_progress("encode", count_sources(src, share, sources_per_shard)) as progress:
        done = encode(
            src,
            out,
            codec=made_codec,
            text=encoder,
            cut=cut,
            shard=share,
            sources_per_shard=sources_per_shard,
            skip_bad=skip_bad,
            progress=progress,
        )
    if as_json:
        print(json.dumps({"out": str(out), "shard": shard, **vars(done)}))
    else:
        print(f"{out}: {done.samples} samples in {done.written} new shards, {done.reused} shards were there")
    if done.bad:
        print(f"{done.bad} source(s) left out, listed in {out}/shard-*.bad.jsonl", file=sys.stderr)


def _share(given: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/([1-9]\d*)", given)
    if not match or int(match[1]) >= int(match[2]):
        raise CorpusError(f"--shard is {given!r}; I/N with 0 <= I < N is needed, such as 0/8 to 7/8.")
    return int(match[1]), int(match[2])
