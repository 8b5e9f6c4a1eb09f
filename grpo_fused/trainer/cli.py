"""`grpo-fused train`."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from difflib import get_close_matches
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import yaml  # type: ignore[import-untyped]
from jsonargparse import ArgumentParser, DefaultHelpFormatter, get_loader, set_loader

from grpo_fused.ranks.parallel import PeerError
from grpo_fused.rewards.calling import RewardError
from grpo_fused.rollouts.errors import NonFiniteError, PromptError
from grpo_fused.rollouts.vllm import SyncError
from grpo_fused.trainer.checkpoint import CheckpointError
from grpo_fused.trainer.dry_run import dry_run
from grpo_fused.trainer.recipe import LoRA, Recipe, Reward, build_trainer

SWITCHES = {
    "resume": "continue from the newest checkpoint in output_dir; without one the run starts at step 1, and says so",
    "overwrite": "remove the run that is in output_dir and start again",
    "dry_run": "check the recipe: one step on a tiny random model and a few rows, without its model and data",
}
EXPECTED = (
    CheckpointError, ImportError, NonFiniteError, OSError, PeerError, PromptError, RewardError, SyncError,
)  # fmt: skip
"""Errors of a run that are not a defect of the package: one line is enough."""

MAX_VALUES = 20_000  # of a YAML text with its aliases expanded; a recipe has about 40 values
NESTED = [f.name for cls in (Reward, LoRA) for f in fields(cls)]
PARSER_MODE = "bounded_yaml"
TYPES = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "a text", "tuple": "a list"}
TYPES |= {"dict": "a mapping", "NoneType": "null"}


def load_yaml(text: str) -> Any:
    """YAML of bounded size: aliases of aliases can represent more values than fit in memory.

    Raises:
        ValueError: It is not valid, it has more than `MAX_VALUES` values with aliases expanded, or it is nested too
            deeply, for example by an alias of itself.
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
            raise ValueError(f"YAML must have at most {MAX_VALUES} values with aliases expanded; got more")
        return get_loader("yaml")(text)
    except RecursionError as error:
        raise ValueError("YAML must not be nested deeply or contain an alias of itself; it does") from error
    except yaml.MarkedYAMLError as error:
        raise ValueError(f"line {error.problem_mark.line + 1} must be valid YAML; {error.problem}") from error


set_loader(PARSER_MODE, load_yaml, (yaml.YAMLError, ValueError))


class RequiredFirst(DefaultHelpFormatter):
    """Help that starts with the required options."""

    def add_arguments(self, actions: Iterable[Any]) -> None:
        """As the base class, in another order."""
        super().add_arguments(sorted(actions, key=lambda action: not (action.required or action.dest == "config")))


class Parser(ArgumentParser):
    """A parser whose errors are one line: the place, the option, what was expected."""

    words: Sequence[str] = ()

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Ends the program with exit status 2."""
        if not self.exit_on_error:  # the parser of a nested option
            super().error(message, ex)
        self.exit(2, f"{self.prog}: error: {self.explained(' '.join(message.split()))}\n")

    def explained(self, message: str) -> str:
        """A message of jsonargparse in plain words, or that of a dataclass, after the place of its option."""
        if message.startswith(("Problems parsing config", "Unexpected config")):
            must = (
                message.partition(": ")[2] if message[0] == "P" else "a recipe must be a mapping of options to values"
            )
            return f"{', '.join(map(str, self.files()))}: {must}"
        keys = re.findall(r'Parser key "([\w.]+)"', message)
        unknown = re.search(r"(?:unrecognized arguments: --|Option '|(?:Group '(\w+)' .*)option ')([\w.-]+)", message)
        wrong = re.findall(r"Expected an? (?:<class '(\w+)'>|typing.Literal(\[.*?\]))", message)
        got = re.search(r"(?:Got|Given) value: (.+?)(?: - |$)", message)
        if unknown:
            name = ".".join(filter(None, (*keys, *unknown.groups())))
            known = NESTED if keys else [option.removeprefix("--") for option in self._option_string_actions]
            same = [option for option in known if option.rpartition(".")[2] == unknown[2]]
            near = same or get_close_matches(unknown[2] if keys else name, known, 1)
            return f"{self.place(name)}unknown option {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
        if not keys:
            return self.place(message.partition(" ")[0]) + message
        name = ".".join(dict.fromkeys((keys[0], keys[-1].removeprefix(f"{keys[0]}."))))
        if name == "config":
            return message.partition(": ")[2]
        must = "must have another type; see grpo-fused train --help and examples/recipes"
        if got and wrong and "Not a valid subclass" not in message:
            expected = [TYPES.get(kind) or f"one of {choices[1:-1]}".replace("'", "") for kind, choices in wrong]
            must = f"must be {' or '.join(dict.fromkeys(expected))}; got {got[1]!r}"
        return f"{self.place(name)}{name} {must}"

    def files(self) -> list[Path]:
        """The recipes on the command line."""
        pairs = zip(self.words, [*self.words, ""][1:], strict=True)
        names = [after if word == "--config" else word.partition("--config=")[2] for word, after in pairs]
        return [Path(name) for name in names if name]

    def place(self, name: str) -> str:
        """`recipe.yaml:4: ` or `command line: ` for an option that was given there."""
        own, names = name.rpartition(".")[2], [word.partition("=")[0].removeprefix("--") for word in self.words]
        if any(name == given or given.endswith(f".{own}") for given in names):
            return "command line: "
        keys = ((path, key) for path in self.files() for key in keys_of(yaml.compose(path.read_text(encoding="utf-8"))))
        return next((f"{path}:{key.start_mark.line + 1}: " for path, key in keys if key.value == own), "")


def keys_of(node: yaml.Node) -> Iterator[yaml.Node]:
    """The keys of a mapping and of nested ones."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    yield from (key for key, _ in pairs)
    inner = [value for _, value in pairs] if pairs else node.value if isinstance(node, yaml.SequenceNode) else []
    yield from chain.from_iterable(map(keys_of, inner))


def read_recipe(argv: Sequence[str]) -> tuple[Recipe, dict[str, bool]]:
    """The recipe from YAML and the command line, and the switches; a wrong one ends the program with the reason."""
    parser = Parser(
        prog="grpo-fused train",
        usage="grpo-fused train --config recipe.yaml [--option VALUE ...]",
        description=(
            "Trains a causal language model by GRPO. Options come from a YAML file (--config recipe.yaml), from the "
            "command line, or both: the later one counts. Dashes and underscores are the same (--learning-rate 1e-6); "
            "options of the loss are --loss.beta and so on."
        ),
        formatter_class=RequiredFirst,
        parser_mode=PARSER_MODE,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config", help="a recipe, YAML; see examples/recipes")
    for name, what in SWITCHES.items():
        parser.add_argument(f"--{name}", action="store_true", help=what)
    parser.add_class_arguments(Recipe)
    parser.words = [_underscored(word) for word in argv]
    try:
        words = parser.parse_args(parser.words)
        options = {name: value for name, value in vars(parser.instantiate(words)).items() if name != "config"}
        switches = {name: options.pop(name) for name in SWITCHES}
        return Recipe(**options), switches
    except UnicodeDecodeError as error:
        parser.error(f"Problems parsing config: {error}")
    except (ValueError, TypeError) as error:
        parser.error(str(error))


def main(argv: Sequence[str]) -> None:
    """`grpo-fused train`."""
    recipe, switches = read_recipe(argv)
    if os.getcwd() not in sys.path:  # reward modules may be in this folder; a console script does not search it
        sys.path.append(os.getcwd())
    is_running = False
    try:
        if switches["dry_run"]:
            dry_run(recipe)
            print("dry run: ok (one step on a tiny model; nothing was kept)")
            return
        trainer = build_trainer(recipe, resume=switches["resume"], overwrite=switches["overwrite"])
        is_running = True
        trainer.train()
    except Exception as error:
        # a wrong result of a reward function is a ValueError or TypeError of this text
        expected = isinstance(error, EXPECTED) or str(error).startswith("reward function")
        if not expected and (is_running or not isinstance(error, (ValueError, TypeError, RuntimeError))):
            raise
        raise SystemExit(f"grpo-fused train: error: {one_line(error)}") from error
    if trainer.stopped_by:
        raise SystemExit(128 + trainer.stopped_by)
    if trainer.accelerator.is_main_process:
        print(f"wrote {recipe.output_dir}; draw its curves: grpo-fused plot {recipe.output_dir}")


def one_line(error: Exception) -> str:
    """The text of an error; for a reward function, the line where it raised; for a package, how to install it."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        return f"this recipe needs the package {package}: pip install {package}"
    text, cause = " ".join(str(error).split()) or type(error).__name__, error.__cause__
    if isinstance(error, RewardError) and cause is not None and (frames := traceback.extract_tb(cause.__traceback__)):
        return f"{text} ({frames[-1].filename}:{frames[-1].lineno})"
    return text


def _underscored(word: str) -> str:
    """`--learning-rate=1e-6` as `--learning_rate=1e-6`."""
    if not word.startswith("--") or word == "--":
        return word
    name, equals, value = word[2:].partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}"
