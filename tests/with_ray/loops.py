"""The run of examples/ray_train.py, in Ray's workers with a fault, and under torchrun without one."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from examples.ray_train import RayGRPOTrainer, build, train_loop
from grpo_fused import engines
from grpo_fused.trainer import GRPOTrainer


def take(impl: str) -> None:
    """The engine of impl="auto" in this process."""
    engines.fastest = lambda device, dtype, width: impl


def example(options: dict[str, Any]) -> None:
    """The example's own loop, on the engine of the options."""
    take(options["impl"])
    train_loop(options)


def loop(options: dict[str, Any]) -> None:
    """In the third step (an error in the update: the first) something happens in the second worker."""
    trainer = build(options, RayGRPOTrainer)
    whole, marker = trainer.reward_functions["digits"], Path(options["output_dir"]) / "happened"

    def digits(**columns: Any) -> Any:
        if trainer.steps_done == 2 and trainer.accelerator.is_last_process and not marker.exists():
            marker.touch()
            if options["what"] == "kill":
                os.kill(os.getpid(), 9)
            if options["what"] == "raise":
                raise ConnectionError("the judge is offline")
            if options["what"] == "stop":
                trainer.stop()
        return whole(**columns)

    def no_memory(_: Any) -> Any:
        marker.touch()
        raise MemoryError("no room for the activations")

    trainer.reward_functions["digits"] = digits
    if options["what"] == "update" and trainer.accelerator.is_last_process:
        trainer.policy.hidden_states = no_memory  # type: ignore[method-assign]
    trainer.train()


if __name__ == "__main__":
    take(sys.argv[2])
    build({"steps": 4, "output_dir": sys.argv[1]}, GRPOTrainer).train()
