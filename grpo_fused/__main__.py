"""`grpo-fused`, or `python -m grpo_fused`: train, plot, doctor, check."""

from __future__ import annotations

import argparse
from importlib import import_module

COMMANDS = {
    "train": ("trainer.cli", "train a language model by GRPO from a recipe"),
    "plot": ("trainer.plot", "draw the curves of a run"),
    "doctor": (
        "tools.doctor",
        "what runs here, what is missing and would bring what; expected time and memory of a shape",
    ),
    "check": (
        "tools.check",
        "hold this installation against float64: every engine, dtype and objective (about a minute)",
    ),
}
"""Command to the module of the package whose `main(argv)` it is, imported when it is called; and its help."""


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    commands = "\n".join(f"  {name:8} {about}" for name, (_, about) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="grpo-fused",
        description=f"commands:\n{commands}\n\n`grpo-fused <command> --help` says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the command")
    given = parser.parse_args(argv)
    try:
        command = import_module(f"grpo_fused.{COMMANDS[given.command][0]}")
    except ModuleNotFoundError as error:
        # the loss alone needs no more than torch
        raise SystemExit(f"grpo-fused {given.command} needs {error.name}: pip install 'grpo-fused[train]'") from error
    command.main(given.arguments)


if __name__ == "__main__":
    main()
