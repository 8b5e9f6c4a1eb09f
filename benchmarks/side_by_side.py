"""What programs share that time several calls of one problem: its shape, the engines, gradients and memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.memory import blocks_given_back, peak_bytes
from benchmarks.timing import Calls
from grpo_fused import engines

SHAPES = {"cpu": (1024, 896, 151936), "cuda": (8192, 4096, 151936)}
"""N, H, V"""
CHUNK = 1024
"""Tokens whose logits a peer holds at a time: all of the CPU's problem."""


def engines_of(device: str) -> list[str]:
    """Our engines that run here in bf16, the first choice of `auto` first."""
    names = ("native", "chunked") if device == "cpu" else ("triton", "chunked")
    return [name for name in names if engines.unavailable(name, torch.device(device), torch.bfloat16) is None]


def step(loss: Tensor, *leaves: Tensor) -> Tensor:
    """Backward, if there is something to do, without the time in which the gradients of the leaves are given back."""
    if loss.requires_grad:
        loss.backward()
    for leaf in leaves:
        leaf.grad = None
    return loss.detach()


def gradients_of(call: Callable[[], object], *leaves: Tensor) -> list[Tensor]:
    """Those of the leaves, of a forward and backward that gives them back."""
    seen: dict[Tensor, Tensor] = {}

    def keep(leaf: Tensor) -> None:
        seen[leaf] = leaf.grad.clone()

    hooks = [leaf.register_post_accumulate_grad_hook(keep) for leaf in leaves]
    call()
    for hook in hooks:
        hook.remove()
    return [seen[leaf] for leaf in leaves]


def scratch_bytes(calls: Calls, device: str, gradients: Callable[[str], int]) -> dict[str, float]:
    """Peak memory of each call beyond its inputs and the bytes of the gradients that it returns."""
    with blocks_given_back():
        return {name: peak_bytes(call, device) - gradients(name) for name, call in calls.items()}
