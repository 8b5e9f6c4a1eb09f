"""Gradients from exponentials that are kept in bf16: our kernels and QuACK's arithmetic against float64.

    TRITON_INTERPRET=0 python -m benchmarks.kept_exponentials    # a minute on one core

Both keep E = exp2(z log2(e) - k) with a power of two and leave a factor of each row to the products. Ours are the
kernels as PTX of sm_90, run by the interpreter of tests/ptx. QuACK's need a Hopper GPU, so `quack` restates the
arithmetic of `scaled_exp_linear_cross_entropy` (quack-kernels 0.6.5) in torch: what is rounded, to what, in which
order. That is an emulation: a product is exact here before it is rounded, and so are exp2 and log.

The loss is the sum of -log p, since QuACK's has no other coefficients. Errors of dH and dW (relative, Frobenius) are
those before the result is rounded to bf16, over those of exact dlogits that are rounded once; that of the target's
entry of dlogits, p - 1, is the largest of all tokens, relative.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.command import call
from benchmarks.ptx_profile import launched_as
from benchmarks.tables import grid
from grpo_fused.testing import frobenius_error

TOKENS, HIDDEN, VOCAB = 128, 128, 2048
LOG2E, LN2 = 1.4426950408889634, math.log(2.0)
SHAPES = ((1.0, 0.0), (4.0, 0.0), (10.0, 0.0), (1.0, 12.0), (1.0, 18.0), (1.0, 24.0))
"""Standard deviation of the logits, and nats that are added to the target's."""


class Case(NamedTuple):
    """A head and its tokens."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor

    @classmethod
    def of(cls, deviation: float, margin: float) -> Case:
        """Targets that the policy samples, or is confident of."""
        g = torch.Generator().manual_seed(0)
        hidden = torch.randn(TOKENS, HIDDEN, generator=g)
        weight = (torch.randn(VOCAB, HIDDEN, generator=g) * deviation / HIDDEN**0.5).bfloat16()
        if margin:
            targets = torch.randint(0, VOCAB, (TOKENS,), generator=g)
            row = weight[targets].float()
            hidden += margin * row / row.square().sum(1, keepdim=True)
        else:
            p = (hidden.bfloat16().double() @ weight.double().T).softmax(1)
            targets = torch.multinomial(p, 1, generator=g).squeeze(1)
        return cls(hidden.bfloat16(), weight, targets)


class Found(NamedTuple):
    """Gradients in float64, not yet rounded to the dtype of their tensors."""

    dhidden: Tensor
    dweight: Tensor
    at_target: Tensor


def exact(case: Case, *, rounded: bool = False) -> Found:
    """In float64; `rounded`: from dlogits that are rounded to bf16."""
    hidden, weight = case.hidden.double(), case.weight.double()
    z, at = hidden @ weight.T, case.targets.unsqueeze(1)
    others = z.scatter(1, at, -math.inf).logsumexp(1, keepdim=True)
    dlogits = z.log_softmax(1).exp().scatter(1, at, -(others - z.gather(1, at)).sigmoid())
    if rounded:
        dlogits = dlogits.bfloat16().double()
    return Found(dlogits @ weight, dlogits.T @ hidden, dlogits.gather(1, at).squeeze(1))


def ours(case: Case) -> Found:
    """`triton`: its kernels, and what `GradientSums.add` does with their results."""
    from grpo_fused.kernels import head_configs, head_launch
    from grpo_fused.kernels.row_types import Coefficients, Transform

    from tests.ptx.driver import driver_of

    transform, (hidden, weight, targets) = Transform(), case
    with launched_as("sm_90"), driver_of("sm_90").active():
        config = head_configs.head_config(weight, transform)
        room = head_launch.Exponentials.empty(TOKENS, weight, torch.bfloat16, config)
        stats = head_launch.head_scores(hidden, weight, targets, transform, with_entropy=False, exponentials=room)
        loss = Coefficients(stats, -torch.ones(TOKENS), None)
        factor = head_launch.exponentials_factor(room, targets, loss, transform).unsqueeze(1)
    scaled = torch.mul(hidden, factor, out=torch.empty_like(hidden))
    values = room.values.double()
    at_target = (values * factor).gather(1, targets.unsqueeze(1)).squeeze(1)
    return Found((values @ weight.double()) * factor, values.T @ scaled.double(), at_target)


class Kept(NamedTuple):
    """What QuACK's first product leaves."""

    values: Tensor
    """[N, V] bf16 exponentials"""
    k: Tensor
    """[N, tiles] fp32 powers of two that they are relative to"""
    sums: Tensor
    """[N, tiles] fp32, of exponentials before they are rounded"""
    z_y: Tensor
    """[N] fp32 logits of the targets"""


def quack_epilogue(case: Case) -> Kept:
    """`scaled_exp_target_epi`."""
    tile = next(size for size in (192, 256, 128, 64) if VOCAB % size == 0)
    z = (case.hidden.double() @ case.weight.double().T).float()
    tiles = z.unflatten(1, (-1, tile))
    k = (tiles.amax(2) * LOG2E).round()
    e = torch.exp2((tiles.double() * LOG2E - k.unsqueeze(2)).float())
    return Kept(e.flatten(1).bfloat16(), k, e.sum(2), z.gather(1, case.targets.unsqueeze(1)).squeeze(1))


def quack_glue(case: Case, kept: Kept) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`lce_glue`: (values with the targets' entries, power of two of each tile, factor of each row, scaled hidden)."""
    values, k, sums, z_y = kept
    tile, at = VOCAB // k.shape[1], case.targets.unsqueeze(1)
    row_k = k.amax(1)
    log_z = row_k * LN2 + (sums * torch.exp2(k - row_k.unsqueeze(1))).sum(1).log()
    fixed = ((z_y - log_z).exp() - 1.0) * (log_z - k.gather(1, at // tile).squeeze(1) * LN2).exp()
    strip = torch.exp2(k - row_k.unsqueeze(1)).bfloat16()
    factor = (row_k * LN2 - log_z).exp()
    scaled = case.hidden.float() * factor.bfloat16().float().unsqueeze(1)
    return values.scatter(1, at, fixed.bfloat16().unsqueeze(1)), strip, factor, scaled.bfloat16()


def quack(case: Case) -> Found:
    """The two products of `scaled_exp_linear_cross_entropy_fwd`."""
    values, strip, factor, scaled = quack_glue(case, quack_epilogue(case))
    operand = (values * strip.repeat_interleave(VOCAB // strip.shape[1], 1)).double()
    v = factor.unsqueeze(1)
    at_target = (operand * v).gather(1, case.targets.unsqueeze(1)).squeeze(1)
    return Found((operand @ case.weight.double()) * v, operand.T @ scaled.double(), at_target)


def rows() -> Iterator[list[str]]:
    """For each shape of the logits: errors of both."""
    for deviation, margin in SHAPES:
        case, logits = Case.of(deviation, margin), f"sd {deviation:g}"
        want, once = exact(case), exact(case, rounded=True)
        for name, found in (("ours", ours(case)), ("QuACK's arithmetic", quack(case))):
            dhidden = frobenius_error(found.dhidden, want.dhidden) / frobenius_error(once.dhidden, want.dhidden)
            dweight = frobenius_error(found.dweight, want.dweight) / frobenius_error(once.dweight, want.dweight)
            at_target = float((found.at_target / want.at_target - 1).abs().max())
            above = f", target {margin:g} nats above" if margin else ""
            yield [logits + above, name, f"{dhidden:.2f}", f"{dweight:.2f}", f"{at_target:.1e}"]


def main() -> None:
    """Print the table."""
    print(grid("| logits | kept by | dH | dW | p - 1 |", rows()))


if __name__ == "__main__":
    call(main)
