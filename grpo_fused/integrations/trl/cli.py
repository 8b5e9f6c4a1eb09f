"""`python -m grpo_fused trl ARGUMENTS`: TRL's command line, whose training scripts run on our kernels.

TRL hands a script to `accelerate launch`, which starts other processes. So this module is launched in place of the
script: it patches TRL, then runs the script.

    python -m grpo_fused trl grpo --model_name_or_path M --top_p 0.9 --exact_truncation true --num_processes 2
"""

from __future__ import annotations

import argparse
import functools
import json
import runpy
import sys
from pathlib import Path
from typing import Any


def main(argv: list[str] | None = None) -> None:
    """TRL's command line with `patch_trl()` in every process.

    `grpo` takes `FusedGRPOTrainer`, and the arguments of its own as options: `--impl`, `--max_scratch_bytes` and
    `--exact_truncation`.
    """
    try:
        import grpo_fused.integrations.trl  # noqa: F401  # knows which releases are supported
    except ImportError as error:
        raise SystemExit(f"grpo-fused trl: {error}") from error
    from trl.cli import accelerate_launcher
    from trl.cli.main import main as trl_main

    given, argv = _own_options(sys.argv[1:] if argv is None else argv)
    if given and argv[:1] != ["grpo"]:
        raise SystemExit(f"grpo-fused trl: {', '.join('--' + name for name in given)}: for the command grpo only")
    config = argv[argv.index("--config") + 1 :][:1] if "--config" in argv else []
    if config and not Path(config[0]).is_file():
        raise SystemExit(f"grpo-fused trl: error: --config must be a YAML file; got {config[0]!r}, which is none")
    own = accelerate_launcher.launch_training_script

    def launch_patched(script_name: str, launch_args: list[str], training_script_args: list[str]) -> None:
        def launch(args: Any) -> None:
            args.module = True
            args.training_script_args = [json.dumps(given), args.training_script, *args.training_script_args]
            args.training_script = __name__
            accelerate_launcher.launch_command(args)

        own(script_name, launch_args, training_script_args, launch_command_fn=launch)

    accelerate_launcher.launch_training_script = launch_patched
    try:
        raise SystemExit(trl_main(argv))
    finally:
        accelerate_launcher.launch_training_script = own


def _own_options(argv: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The arguments of `FusedGRPOTrainer` that TRL's trainer lacks, as far as they are given, and the rest."""
    from transformers.hf_argparser import string_to_bool

    parser = argparse.ArgumentParser(
        prog="grpo-fused trl grpo", add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    parser.add_argument("--impl")
    parser.add_argument("--max_scratch_bytes", "--max-scratch-bytes", type=int)
    parser.add_argument("--exact_truncation", "--exact-truncation", type=string_to_bool, nargs="?", const=True)
    given, rest = parser.parse_known_args(argv)
    return vars(given), rest


def run_script(options: dict[str, Any], path: str, arguments: list[str]) -> None:
    """Run one of TRL's training scripts, patched, with these arguments for `FusedGRPOTrainer`."""
    import trl

    from grpo_fused.integrations.trl import FusedGRPOTrainer, patch_trl

    class Trainer(FusedGRPOTrainer):
        __init__ = functools.partialmethod(FusedGRPOTrainer.__init__, **options)

    Trainer.__name__ = FusedGRPOTrainer.__name__
    patch_trl()
    trl.GRPOTrainer = Trainer
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    run_script(json.loads(sys.argv[1]), sys.argv[2], sys.argv[3:])
