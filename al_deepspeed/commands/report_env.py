"""al-deepspeed report-env: DeepSpeed's environment report, with the fused AdaLN op in its table."""

import contextlib
import json
import sys

import typer


def run(as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead.")) -> None:
    """Show what DeepSpeed sees here, and whether the fused AdaLN op is prebuilt or can be compiled."""
    if not as_json:
        from al_deepspeed.ops.environment import print_report

        print_report()
        return
    with contextlib.redirect_stdout(sys.stderr):
        from al_deepspeed.ops.environment import facts

        found = facts()
    print(json.dumps(found))
