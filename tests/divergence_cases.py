"""Calls of `fused_linear_divergence` on random tensors, and its kinds."""

from __future__ import annotations

import pytest
import torch

from grpo_fused import fused_linear_divergence

KINDS = [("reverse_kl", 0.5), ("forward_kl", 0.5), ("jsd", 0.5), ("jsd", 0.9)]
kinds = pytest.mark.parametrize(("kind", "beta"), KINDS, ids=lambda x: str(x))


class Pair:
    """The tensors of a call, in float64."""

    def __init__(self, seed=0, shape=(3, 7), H=12, other_H=9, V=29, std=1.5, near=None, **options):
        g = torch.Generator().manual_seed(seed)

        def randn(*size):
            return torch.randn(*size, generator=g, dtype=torch.float64)

        self.hidden, self.weight = randn(*shape, H), randn(V, H) * (std / H**0.5)
        self.other, self.other_weight = randn(*shape, other_H), randn(V, other_H) * (std / other_H**0.5)
        if near is not None:  # a policy that differs by about `near`
            self.other, self.other_weight = self.hidden + near * randn(*shape, H), self.weight.clone()
        self.mask = torch.rand(shape, generator=g) > 0.3
        self.mask.view(-1)[0] = True
        self.weights = torch.rand(shape, generator=g, dtype=torch.float64)
        self.bias, self.other_bias = randn(V), randn(V)
        self.options = options

    def to(self, dtype):
        """With the heads rounded to a dtype, in that dtype."""
        new = Pair()
        new.__dict__.update(self.__dict__)
        for name in ("hidden", "weight", "other", "other_weight", "bias", "other_bias"):
            setattr(new, name, getattr(self, name).to(dtype))
        return new

    def run(self, *, upstream=1.0, need=(True, True), mask=True, **options):
        """(result, dhidden, dweight, dbias)"""
        given = {**self.options, **options}
        hidden, weight = self.hidden.clone().requires_grad_(need[0]), self.weight.clone().requires_grad_(need[1])
        bias = None
        if given.pop("bias", False):
            bias = self.bias.clone().requires_grad_()
            given |= {"lm_head_bias": bias, "other_lm_head_bias": self.other_bias}
        if given.pop("weighted", False):
            given["weights"] = self.weights
        others = () if "other_ids" in given else (self.other, self.other_weight)
        out = fused_linear_divergence(hidden, weight, *others, mask=self.mask if mask else None, **given)
        (out.loss * upstream).backward()
        return out, hidden.grad, weight.grad, None if bias is None else bias.grad
