"""The command `al-deepspeed`: one module of `al_deepspeed.commands` for each subcommand.

Exit codes are stable: 0 done, 1 failed, 2 bad usage or input. Every command takes `--json`: one JSON object
on standard output, and nothing else there; progress, tables and warnings then go to standard error.
"""

import importlib
import sys

import typer

from al_deepspeed.errors import AdaptiveLoadError

# Subcommand -> what it does. A module `al_deepspeed.commands.<name>` defines `run`, a typer command.
COMMANDS = {
    "encode": "pictures and videos to latent shards",
    "index": "a manifest from latent shards, or from a table of sizes",
    "plan": "batch sizes, and how well an epoch would load the ranks",
    "calibrate": "step time and memory against (B, S), and the limits that follow",
    "patch": "the fused op put into existing model code, and taken out again",
    "report": "what a run did, or several side by side: speed, balance, memory, losses",
    "bench": "the fused op against the copy limit of this device and against its peers",
    "report-env": "DeepSpeed's own report, with the fused op in its table",
}

app = typer.Typer(
    name="al-deepspeed",
    help="AdaptiveLoad for DeepSpeed: corpus, plan and report.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _group() -> None:
    """Keeps `al-deepspeed COMMAND` a group however many commands there are."""


for _name in COMMANDS:
    _module = importlib.import_module(f"al_deepspeed.commands.{_name.replace('-', '_')}")
    app.command(_name)(_module.run)


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except AdaptiveLoadError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)
    except (
        FileExistsError,
        FileNotFoundError,
        NotADirectoryError,
        IsADirectoryError,
        PermissionError,
    ) as error:
        if error.filename is None:
            raise
        print(f"{error.filename}: {error.strerror}. Give a path that can be used.", file=sys.stderr)
        sys.exit(2)
