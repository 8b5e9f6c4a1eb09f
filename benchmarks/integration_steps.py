"""A training step (forward, backward, AdamW) with a project's own loss head, and with ours in its place.

    python -m benchmarks.integration_steps liger --out results.json     # each under three minutes on two cores

    verl, deepspeed     in the environments of `make verl` and `make deepspeed`
    torchtitan, liger   in that of `make test`, with torchtitan of `make torchtitan`
    prime-rl            the same, with PRIME_RL=<a checkout of prime-rl 0.8>: of it, one file is run

Each side is a process (DeepSpeed: two), `benchmarks.integration_sides`. Both have the same weights and batch; their
losses and gradients are compared first. Then one side steps at a time, in rounds.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch

from benchmarks.exact import worst
from benchmarks.integration_sides import END, Setting
from benchmarks.integration_sides import main as main_of_side
from benchmarks.study import Section, main
from benchmarks.timing import summary
from grpo_fused.testing import frobenius_error

Project = Literal["verl", "torchtitan", "prime-rl", "liger", "deepspeed"]
SIDES = ("own", "ours")
PROCESSES = {"deepspeed": 2}
TOLERANCE = {"bfloat16": (1e-3, 0.05), "float32": (1e-5, 1e-4)}
"""Difference of the losses in nats, and relative Frobenius error of any gradient; in bf16 both sides round; 1e-4 and
0.015 were seen."""
PACKAGES = {"deepspeed": ("deepspeed", "trl"), "liger": ("liger-kernel",), "prime-rl": ()}
"""What has a version, if it is not the project itself; of prime-rl there is only a file."""


class Side:
    """The processes of one side."""

    def __init__(self, project: str, name: str, setting: Setting, folder: Path, threads: int) -> None:
        self.folder, count = folder / name, PROCESSES.get(project, 1)
        self.folder.mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        env = {
            "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": str(max(threads // count, 1)), "OMP_WAIT_POLICY": "PASSIVE",
            "TRANSFORMERS_VERBOSITY": "error", "DS_ACCELERATOR": "cpu",
        }  # fmt: skip
        context = multiprocessing.get_context("spawn")
        self.processes, self.links = [], []
        for rank in range(count):
            link, end = context.Pipe()
            process = context.Process(target=main_of_side, args=(project, name == "ours", setting, self.folder, end))
            with mock.patch.dict(os.environ, env, RANK=str(rank), LOCAL_RANK=str(rank)):
                process.start()
            end.close()
            self.processes.append(process)
            self.links.append(link)

    def ask(self, command: Path | str | None) -> list[float]:
        """A command to all processes, and their answers."""
        try:
            for link in self.links:
                link.send(command)
            return [link.recv() for link in self.links]
        except (EOFError, OSError) as error:
            raise RuntimeError(f"{self.folder.name}: a process ended; it has printed why") from error

    def check(self) -> dict[str, Any]:
        """Loss and gradients of the first batch."""
        file = self.folder / "check.pt"
        self.ask(file)
        return torch.load(file)

    def step(self) -> float:
        """Seconds, of the slowest process."""
        return max(self.ask(None))

    def finish(self) -> float:
        """The peak of the resident sets, in bytes, summed."""
        peak = sum(self.ask(END))
        for process in self.processes:
            process.join(60)
        return peak

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def compare(own: dict[str, Any], ours: dict[str, Any]) -> dict[str, float]:
    """Difference of the losses, and the largest relative error of a gradient."""
    assert own["gradients"].keys() == ours["gradients"].keys()
    assert min(gradient.norm() for gradient in own["gradients"].values()) > 0
    errors = [frobenius_error(ours["gradients"][name], want) for name, want in own["gradients"].items()]
    return {"loss_difference": abs(ours["loss"] - own["loss"]), "gradient_error": worst(*errors)}


def measure(project: str, setting: Setting, rounds: int, threads: int) -> dict[str, Any]:
    """Compare, then time."""
    with tempfile.TemporaryDirectory() as folder:
        sides: list[Side] = []
        try:
            for name in SIDES:
                sides.append(Side(project, name, setting, Path(folder), threads))
            errors = compare(*(side.check() for side in sides))
            print(f"{project}: {errors}", file=sys.stderr, flush=True)
            loss, gradient = TOLERANCE[setting.dtype]
            if not (errors["loss_difference"] <= loss and errors["gradient_error"] <= gradient):
                raise RuntimeError(f"not timed: {errors} is above {(loss, gradient)}")
            _, *times = [[side.step() for side in sides] for _ in range(rounds + 1)]  # the first makes AdamW's state
            peaks = [side.finish() for side in sides]
        finally:
            for side in sides:
                side.kill()
    rows = {
        name: {"seconds": summary([row[i] for row in times]), "peak_bytes": peaks[i]} for i, name in enumerate(SIDES)
    }
    return errors | {"sides": rows, "ratio": rows["own"]["seconds"]["median"] / rows["ours"]["seconds"]["median"]}


def versions(project: str) -> dict[str, str]:
    names = ("torch", "transformers", *PACKAGES.get(project, (project,)))
    try:
        return {name: version(name) for name in names}
    except PackageNotFoundError as error:
        sys.exit(f"{project} needs {error.name}, which is not installed here")


def run(project: Project, rounds: int = 5, threads: int = os.cpu_count() or 1) -> Iterator[Section]:
    """The section `integration_steps.PROJECT`."""
    setting, about = Setting(), {"rounds": rounds, "threads": threads, "versions": versions(project)}
    yield {**asdict(setting), **about, **measure(project, setting, rounds, threads)}


if __name__ == "__main__":
    main("integration_steps")
