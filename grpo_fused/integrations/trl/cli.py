"""`python -m grpo_fused trl ARGUMENTS`: TRL's command line, whose training scripts run on our kernels.

TRL hands a script to `accelerate launch`, which starts other processes. So this module is launched in place of the
script: it patches TRL, then runs the script.

    python -m grpo_fused trl grpo --model_name_or_path M --top_p 0.9 --exact_truncation true --num_processes 2
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

from grpo_fused.heads.patches import Patches


def main(argv: list[str]) -> None:
    """TRL's command line with `patch_trl()` in every process.

    `grpo` takes `FusedGRPOTrainer`, and the arguments of its own as options (see `arguments`).
    """
    try:
        import grpo_fused.integrations.trl  # noqa: F401  # knows which releases are supported
        from grpo_fused.integrations.trl.release import FUSED_HEAD, RELEASE, SCRIPTS
    except ImportError as error:
        raise SystemExit(f"grpo-fused trl: {error}") from error
    if RELEASE < SCRIPTS:
        raise SystemExit("grpo-fused trl: needs trl 1.0 or later; before, call patch_trl() in a program")
    import trl
    from trl.cli import accelerate_launcher
    from trl.cli.main import main as trl_main

    from grpo_fused.integrations.trl.arguments import FusedGRPOConfig

    if RELEASE < FUSED_HEAD and argv[:1] not in (["grpo"], ["rloo"], ["dpo"], ["kto"]):
        print("grpo-fused trl: before trl 1.15 only grpo, rloo, dpo and kto run on our head", file=sys.stderr)
    config = argv[argv.index("--config") + 1 :][:1] if "--config" in argv else []
    if config and not Path(config[0]).is_file():
        raise SystemExit(f"grpo-fused trl: error: --config must be a YAML file; got {config[0]!r}, which is none")
    launch_training_script = accelerate_launcher.launch_training_script

    def launch_patched(script_name: str, launch_args: list[str], training_script_args: list[str]) -> None:
        def launch(args: Any) -> None:
            args.module = True
            args.training_script_args = [args.training_script, *args.training_script_args]
            args.training_script = __name__
            accelerate_launcher.launch_command(args)

        launch_training_script(script_name, launch_args, training_script_args, launch_command_fn=launch)

    with Patches((accelerate_launcher, "launch_training_script", launch_patched), (trl, "GRPOConfig", FusedGRPOConfig)):
        raise SystemExit(trl_main(argv))


def run_script(path: str, arguments: list[str]) -> None:
    """Run one of TRL's training scripts, patched."""
    import trl

    import grpo_fused.integrations.trl as ours
    from grpo_fused.integrations.trl.arguments import FusedGRPOConfig

    class FusedGRPOTrainer(ours.FusedGRPOTrainer):
        def __init__(self, *, args: FusedGRPOConfig, **kwargs: Any) -> None:
            super().__init__(args=args, **args.fused_options(), **kwargs)

    ours.patch_trl()
    sys.argv = [path, *arguments]
    with Patches((trl, "GRPOConfig", FusedGRPOConfig), (trl, "GRPOTrainer", FusedGRPOTrainer)):
        runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    run_script(sys.argv[1], sys.argv[2:])
