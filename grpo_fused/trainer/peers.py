"""The processes of a run: how they share the model, and what each must know of the others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object

from grpo_fused.ranks.parallel import PeerError, reason_of
from grpo_fused.rollouts.errors import DivergedError

Error = TypeVar("Error", bound=Exception)


class Peers:
    """This process and the others.

    `all_failed`: all of them raise, so they can still save a checkpoint together. `diverged`: one of them found that
    the policy's numbers are not finite.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.is_sharded = accelerator.distributed_type == DistributedType.FSDP
        self.forget()

    def forget(self) -> None:
        """Nothing has failed yet: for a run that goes on after a failure."""
        self.all_failed = self.diverged = self._in_collectives = False

    def most(self, number: int) -> int:
        """The largest of all processes' numbers; all processes call it."""
        return int(self.accelerator.gather(torch.tensor([number], device=self.accelerator.device)).max())

    def shared(self, error: Error) -> Error:
        """The error, which all processes raise now: they have the same numbers."""
        self.all_failed = True
        return error

    @contextmanager
    def together(self) -> Iterator[None]:
        """If one process fails, all of them raise, so that none waits for it and they can save together.

        Not where others are in collectives of the rollout: a process that fails there raises alone (`share_failures`).
        """
        failure = None
        self.forget()
        try:
            yield
        except Exception as error:
            if self._in_collectives:
                raise
            failure = error
        self.all_failed = self.most(failure is not None) > 0
        self.diverged = self.all_failed and self.most(isinstance(failure, DivergedError)) > 0
        if self.all_failed:
            reasons = enumerate(gather_object([reason_of(failure)]))
            raise failure or PeerError.of({rank: reason for rank, reason in reasons if reason is not None})

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """A rollout: of a model that is sharded, each token is a collective."""
        self._in_collectives = self.is_sharded
        yield
        self._in_collectives = False


def of_all_processes(accelerator: Accelerator, *models: dict[str, str]) -> tuple[dict[str, str], ...]:
    """The identities of the models; raises unless all processes have models of the same ones.

    The policy's weights become those of the first process (DDP), or shards of all (FSDP2), but not its reference's.
    """
    plugin, found = getattr(accelerator.state, "fsdp_plugin", None), gather_object([models])
    others = [process for process, there in enumerate(found) if there != found[0]]
    # with this option only the first process has weights yet
    if others and not getattr(plugin, "cpu_ram_efficient_loading", False):
        raise ValueError(
            "all processes must begin with the same weights and vocabulary, of model and reference_model; got others "
            f"on the processes {others} (a random model needs the same seed on each)"
        )
    return found[0]


def check_processes(accelerator: Accelerator) -> None:
    """The loss reads the head's weight outside the model's forward, where other methods have only a part of it."""
    kind = accelerator.distributed_type
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ValueError("FSDP must be version 2 (accelerate launch --use_fsdp --fsdp_version 2); got version 1")
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise ValueError(f"processes must share a model by DDP or FSDP2; got {kind.value}")
    started = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    if started > 1 and accelerator.num_processes == 1:
        raise ValueError(
            f"accelerate must share the run among the {started} processes that were started; got 1. Without a GPU it "
            "needs Accelerator(cpu=True), or ACCELERATE_USE_CPU=true in the environment"
        )
