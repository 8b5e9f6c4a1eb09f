"""`python -m grpo_fused trl ARGUMENTS`: TRL's command line, whose training scripts run on our kernels.

TRL hands a script to `accelerate launch`, which starts other processes. So this module is launched in place of the
script: it patches TRL, then runs the script.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any


def main(argv: list[str] | None = None) -> None:
    """TRL's command line with `patch_trl()` in every process; `grpo` takes `FusedGRPOTrainer`."""
    try:
        import grpo_fused.integrations.trl  # noqa: F401  # knows which releases are supported
    except ImportError as error:
        raise SystemExit(f"grpo-fused trl: {error}") from error
    from trl.cli import accelerate_launcher
    from trl.cli.main import main as trl_main

    own = accelerate_launcher.launch_training_script

    def launch_patched(script_name: str, launch_args: list[str], training_script_args: list[str]) -> None:
        def launch(args: Any) -> None:
            args.module = True
            args.training_script_args = [args.training_script, *args.training_script_args]
            args.training_script = __name__
            accelerate_launcher.launch_command(args)

        own(script_name, launch_args, training_script_args, launch_command_fn=launch)

    accelerate_launcher.launch_training_script = launch_patched
    try:
        raise SystemExit(trl_main(argv))
    finally:
        accelerate_launcher.launch_training_script = own


def run_script(path: str, arguments: list[str]) -> None:
    """Run one of TRL's training scripts, patched."""
    import trl

    from grpo_fused.integrations.trl import FusedGRPOTrainer, patch_trl

    patch_trl()
    trl.GRPOTrainer = FusedGRPOTrainer
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    run_script(sys.argv[1], sys.argv[2:])
