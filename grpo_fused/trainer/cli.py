"""`grpo-fused train`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Any

import yaml  # type: ignore[import-untyped]
from jsonargparse import ArgumentParser, get_loader, set_loader

from grpo_fused.trainer.checkpoint import CheckpointError
from grpo_fused.trainer.dry_run import dry_run
from grpo_fused.trainer.recipe import Recipe, build_trainer

SWITCHES = {
    "resume": "go on from the newest checkpoint in output_dir, if there is one",
    "overwrite": "begin again in an output_dir that holds a run",
    "dry_run": "one step on a tiny random model and a few rows: whether the recipe works, without its model and data",
}

MAX_VALUES = 20_000  # of a YAML text with its aliases written out; a recipe has about 40 values
PARSER_MODE = "bounded_yaml"


def load_yaml(text: str) -> Any:
    """YAML of bounded size: aliases of aliases can stand for more values than any memory holds.

    Raises:
        ValueError: It has more than `MAX_VALUES` values, aliases written out, or it is nested too deeply, as it is by
            an alias of what it stands in.
    """

    @cache
    def size(node: yaml.Node) -> int:
        if isinstance(node, yaml.ScalarNode):
            return 1
        children = chain.from_iterable(node.value) if isinstance(node, yaml.MappingNode) else node.value
        return 1 + sum(map(size, children))

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None and size(root) > MAX_VALUES:
            raise ValueError(f"YAML must have at most {MAX_VALUES} values, aliases written out; got more")
        return get_loader("yaml")(text)
    except RecursionError as error:
        raise ValueError("YAML must not be nested deeply or hold an alias of what it stands in; it does") from error


set_loader(PARSER_MODE, load_yaml, (yaml.YAMLError, ValueError))


def read_recipe(argv: Sequence[str]) -> tuple[Recipe, dict[str, bool]]:
    """The recipe of YAML and the command line, and the switches; a wrong one ends the program and says why."""
    parser = ArgumentParser(
        prog="grpo-fused train",
        description=(
            "Trains a causal language model by GRPO. Options come from a YAML file (--config recipe.yaml), from the "
            "command line, or both: the later one counts. Dashes and underscores are the same (--learning-rate 1e-6); "
            "options of the loss are --loss.beta and so on."
        ),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        parser_mode=PARSER_MODE,
    )
    parser.add_argument("--config", action="config", help="a recipe, YAML; see examples/recipes")
    for name, what in SWITCHES.items():
        parser.add_argument(f"--{name}", action="store_true", help=what)
    parser.add_class_arguments(Recipe)
    words = parser.parse_args([_underscored(word) for word in argv])
    try:
        options = {name: value for name, value in vars(parser.instantiate(words)).items() if name != "config"}
        switches = {name: options.pop(name) for name in SWITCHES}
        return Recipe(**options), switches
    except (ValueError, TypeError) as error:
        parser.error(str(error))


def main(argv: Sequence[str]) -> None:
    """`grpo-fused train`."""
    recipe, switches = read_recipe(argv)
    if os.getcwd() not in sys.path:  # a reward's module lies there; a console script does not look there by itself
        sys.path.append(os.getcwd())
    try:
        if switches["dry_run"]:
            dry_run(recipe)
            print("the dry run went through: one step on a tiny model, nothing was kept")
            return
        trainer = build_trainer(recipe, resume=switches["resume"], overwrite=switches["overwrite"])
    except (ValueError, TypeError, OSError, ImportError, CheckpointError) as error:
        raise SystemExit(f"grpo-fused train: error: {error}") from error
    trainer.train()
    if trainer.accelerator.is_main_process:
        print(f"wrote {recipe.output_dir}; its curves: grpo-fused plot {recipe.output_dir}")


def _underscored(word: str) -> str:
    """`--learning-rate=1e-6` as `--learning_rate=1e-6`."""
    if not word.startswith("--") or word == "--":
        return word
    name, equals, value = word[2:].partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}"
