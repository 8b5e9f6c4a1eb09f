"""The command line: `grpo-fused train`, `plot` and `doctor` (also as `python -m grpo_fused`)."""

from __future__ import annotations

import argparse
import sys

from grpo_fused import doctor


def main(argv: list[str] | None = None) -> None:
    """Runs one of the commands."""
    words = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="grpo-fused", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    # these two bring their own options, and packages that the loss alone does not need
    commands.add_parser("train", help="train a language model by GRPO from a recipe", add_help=False)
    commands.add_parser("plot", help="draw the curves of a run", add_help=False)
    commands.add_parser("doctor", help="which engines and extensions run here; what is missing and what it would bring")
    command = parser.parse_args(words[:1]).command
    if command == "doctor":
        parser.parse_args(words)
        print(doctor.report())
        return
    try:
        from grpo_fused.trainer import cli
    except ModuleNotFoundError as error:
        raise SystemExit(f"grpo-fused {command} needs {error.name}: pip install 'grpo-fused[train]'") from error
    {"train": cli.train, "plot": cli.plot}[command](words[1:])


if __name__ == "__main__":
    main()
