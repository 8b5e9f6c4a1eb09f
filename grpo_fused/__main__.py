"""`python -m grpo_fused doctor`: what runs on this machine; `python -m grpo_fused check`: is it right."""

from __future__ import annotations

import argparse
from importlib import import_module

COMMANDS = {
    "doctor": ("doctor", "what runs here, what is missing and would bring what; expected time and memory of a shape"),
    "check": ("selfcheck", "hold this installation against float64: every engine, dtype and objective (two minutes)"),
}
"""Command to the module of the package whose `main(argv)` it is, imported when it is called; and its help."""


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    commands = "\n".join(f"  {name:8} {about}" for name, (_, about) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="python -m grpo_fused",
        description=f"commands:\n{commands}\n\n`python -m grpo_fused <command> --help` says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the command")
    given = parser.parse_args(argv)
    import_module(f"grpo_fused.{COMMANDS[given.command][0]}").main(given.arguments)


if __name__ == "__main__":
    main()
