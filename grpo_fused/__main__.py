"""`grpo-fused`, or `python -m grpo_fused`: train, plot, trl, doctor, check."""

from __future__ import annotations

import argparse
import os
import sys
from difflib import get_close_matches
from importlib import import_module

from grpo_fused import __version__

COMMANDS = {
    "train": ("trainer.cli", "train a language model by GRPO from a recipe (a YAML file)"),
    "plot": ("trainer.plot", "draw the curves of a run into a PNG"),
    "trl": ("integrations.trl.cli", "TRL's command line on our kernels: trl grpo --config FILE"),
    "doctor": ("tools.doctor", "show what runs on this machine and what is missing; predict time and memory of a call"),
    "check": ("tools.check", "compare every engine, dtype and objective with float64 on this machine (about a minute)"),
}
"""Command: the module of the package that has its `main(argv)`, imported when it is called; its help."""


def main(argv: list[str] | None = None) -> None:
    """The command line. Ctrl-C ends it with exit status 130."""
    commands = "\n".join(f"  {name:8} {about}" for name, (_, about) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="grpo-fused",
        usage="grpo-fused [--version] COMMAND ...",
        description=f"commands:\n{commands}\n\n`grpo-fused COMMAND --help` explains its options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"grpo-fused {__version__}")
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.command is None:
        parser.print_help()
        return
    if given.command not in COMMANDS:
        near = get_close_matches(given.command, COMMANDS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        parser.exit(
            2, f"grpo-fused: error: command must be one of {', '.join(COMMANDS)}; got {given.command!r}{hint}\n"
        )
    try:
        try:
            import_module(f"grpo_fused.{COMMANDS[given.command][0]}").main(given.arguments)
        finally:
            print(end="", flush=True)  # nothing, if stdout is closed
    except ModuleNotFoundError as error:
        # the loss needs only torch
        extra = "peers" if given.command == "trl" else "train"
        raise SystemExit(
            f"grpo-fused {given.command} needs {error.name}: in a clone, pip install -e '.[{extra}]'"
        ) from error
    except BrokenPipeError as error:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python writes at exit
        raise SystemExit(f"grpo-fused {given.command}: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
