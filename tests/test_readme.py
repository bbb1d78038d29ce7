"""What the README tells people to type and to write exists and is accepted."""

import ast
import json
import re
import shlex
from pathlib import Path

from al_deepspeed.cli import COMMANDS
from al_deepspeed.config import read_config
from al_deepspeed.config_sections import DualConstraintBatching

REPOSITORY = Path(__file__).parent.parent
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_scripts_pictures_and_files_exist():
    named = re.findall(r"(?:bash|python) ((?:launch|tests|benchmarks)/\S+?\.\w+)", README)
    named += re.findall(r"`((?:launch|al_deepspeed|benchmarks|tests)/[\w./]+)`", README)
    named += re.findall(r"!\[[^]]*\]\(([^)]+)\)", README)
    assert len(named) > 5
    assert [name for name in named if not (REPOSITORY / name.rstrip(".")).exists()] == []


def test_the_table_of_commands_lists_the_commands_that_there_are():
    rows = re.findall(
        r"^\| `(\S+)[^|]*` \| ", README.partition("## Commands")[2].partition("\n## ")[0], re.MULTILINE
    )
    listed = {name for name in rows if name != "al-deepspeed"}
    assert listed == set(COMMANDS)


def test_the_ds_config_is_accepted_and_its_table_names_real_keys():
    (config,) = blocks("json")
    assert read_config(json.loads(config)).batching.strategy == "balanced"
    section = README.partition("## ds_config")[2].partition("\n## ")[0]
    keys = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert len(keys) > 5 and set(keys) <= set(DualConstraintBatching.model_fields)


def test_the_trainers_command_is_accepted():
    from al_deepspeed.training import options

    (command,) = re.findall(r"deepspeed (launch/train_wan\.py .*?)\n\n", README, flags=re.DOTALL)
    words = shlex.split(command.replace("\\\n", " "))
    arguments = options.parser("").parse_args(words[1:])
    assert (REPOSITORY / words[0]).is_file() and (REPOSITORY / arguments.config).is_file()
    read_config(options.changed_config(REPOSITORY / arguments.config, [], "config"))
    for option in re.findall(r"`(--[\w-]+)", README.partition("## Training Wan")[2].partition("\n## ")[0]):
        assert option in options.parser("").format_help()


def test_the_five_lines_compile():
    (code,) = blocks("python")
    names = {node.attr for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Attribute)}
    assert {"initialize", "backward", "step"} <= names
