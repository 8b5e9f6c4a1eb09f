"""`grpo-fused train`."""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from grpo_fused.call.options import check_options
from grpo_fused.ranks.parallel import PeerError
from grpo_fused.rewards.calling import RewardError
from grpo_fused.rollouts.errors import NonFiniteError, PromptError
from grpo_fused.rollouts.vllm import SyncError
from grpo_fused.trainer import reading
from grpo_fused.trainer.checkpoint import CheckpointError
from grpo_fused.trainer.data import from_here
from grpo_fused.trainer.dry_run import dry_run, report
from grpo_fused.trainer.reading import OptionError, Settings, group_of, hints_of
from grpo_fused.trainer.recipe import Recipe, build_trainer

ABOUT = """\
usage: grpo-fused train --config recipe.yaml [--option VALUE ...]

Trains a causal language model by GRPO. Options come from a YAML file (--config recipe.yaml), from the command line, or
both: the later one counts. Dashes and underscores are the same (--learning-rate 1e-6); options of the loss are
--loss.beta and so on.

  --config FILE
      A recipe, YAML; see examples/recipes.
"""
EXPECTED = (
    CheckpointError, ImportError, NonFiniteError, OSError, PeerError, PromptError, RewardError, SyncError,
)  # fmt: skip
"""Errors of a run that are not a defect of the package: one line is enough."""


@dataclass(frozen=True, kw_only=True)
class Switches:
    """What to do with a recipe.

    Args:
        resume: Continue from the newest checkpoint in output_dir; without one the run starts at step 1, and says so.
        overwrite: Remove the run that is in output_dir and start again.
        dry_run: Check the recipe: one step on a tiny random model and two rows, without downloads, and print what it
            has checked.
    """

    resume: bool = False
    overwrite: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        check_options(self)


SWITCHES = hints_of(Switches)
HINTS = SWITCHES | hints_of(Recipe)


def read_recipe(argv: Sequence[str]) -> tuple[Recipe, dict[str, bool]]:
    """The recipe from YAML and the command line, and the switches; a wrong one ends the program with the reason."""
    try:
        settings = read_words(argv)
        switches = reading.build(Switches, {name: settings.pop(name) for name in SWITCHES if name in settings})
        recipe: Recipe = reading.build(Recipe, settings)
    except OptionError as error:
        print(f"grpo-fused train: error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from error
    return recipe, vars(switches)


def read_words(argv: Sequence[str]) -> Settings:
    """The options of a command line and of its files, in their order."""
    settings: Settings = {}
    words = iter(argv)
    for word in words:
        if word in ("-h", "--help"):
            print("\n".join([ABOUT, *help_of(Switches), *help_of(Recipe)]))
            raise SystemExit(0)
        if not word.startswith("--"):
            hint = f"; did you mean --config {word}?" if word.endswith((".yaml", ".yml")) else ""
            raise OptionError(f"unrecognized arguments: {word}{hint}")
        name, equals, text = word[2:].partition("=")
        name = name.replace("-", "_")
        if name in SWITCHES and not equals:
            text = "true"
        elif name.partition(".")[0] not in (*HINTS, "config"):
            raise reading.unknown(name, reading.COMMAND_LINE, HINTS)
        elif not equals:
            text = next(words, "--")
            if text.startswith("--"):
                raise OptionError(f"argument --{name}: expected one argument")
        if name == "config":
            read_file(Path(text), settings)
        else:
            reading.read_word(name, text, settings, HINTS)
    return settings


def read_file(path: Path, settings: Settings) -> None:
    """Adds the options of a recipe to the settings."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise OptionError(f"--config must be a file that exists; got {str(path)!r}{from_here(path)}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{path}: {error}") from error
    reading.read_text(text, str(path), settings, HINTS)


def help_of(kind: Any, prefix: str = "") -> Iterator[str]:
    """A paragraph for each option: its name, type, default, and text in the docstring; required ones first."""
    hints, texts = hints_of(kind), docs_of(kind)
    for f in sorted(fields(kind), key=lambda f: default_of(f) != "required"):
        about = " (a switch)" if kind is Switches else f" ({type_text(hints[f.name])}, {default_of(f)})"
        yield f"  --{prefix}{f.name}{about}"
        yield textwrap.fill(texts.get(f.name, ""), 100, initial_indent=" " * 6, subsequent_indent=" " * 6)
        if (group := group_of(hints[f.name])) is not None:
            yield from help_of(group, f"{f.name}.")


def docs_of(kind: type) -> Mapping[str, str]:
    """The text of each option in the docstrings of a dataclass and its bases."""
    texts: dict[str, str] = {}
    for cls in reversed(kind.__mro__[:-1]):
        section = inspect.cleandoc(cls.__doc__ or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
        for name, text in re.findall(r"^    (\w+): (.*(?:\n     .*)*)", section, re.MULTILINE):
            texts[name] = " ".join(text.split())
    return texts


def default_of(option: Field[Any]) -> str:
    """The default of an option in words; of one with options of its own, theirs."""
    if option.default is MISSING and option.default_factory is MISSING:
        return "required"
    default = option.default_factory() if option.default_factory is not MISSING else option.default
    return "default: those of its options" if is_dataclass(default) else f"default {json.dumps(default)}"


def type_text(hint: Any) -> str:
    """A type in the words of the errors."""
    words = {int: "an integer", float: "a number", bool: "true or false"} | reading.WORDS
    return " or ".join(
        ", ".join(get_args(kind)) if origin is Literal else words.get(origin, "a mapping of options")
        for origin, kind in reading.kinds_of(hint).items()
    )


def main(argv: Sequence[str]) -> None:
    """`grpo-fused train`."""
    recipe, switches = read_recipe(argv)
    if os.getcwd() not in sys.path:  # reward modules may be in this folder; a console script does not search it
        sys.path.append(os.getcwd())
    is_running = False
    try:
        if switches["dry_run"]:
            print(report(recipe, dry_run(recipe)))
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


def one_line(error: Exception) -> str:
    """The text of an error; for a package, how to install it."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        return f"this recipe needs the package {package}: pip install {package}"
    return " ".join(str(error).split()) or type(error).__name__
