"""Several objectives in one call, each with its own weights."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fused.objectives.base import LossFunction, Objective, Sequences, Tokens, call_part, made_of, name_of


def mixture(**parts: LossFunction) -> Objective:
    """The sum of several objectives, each with its weight for each token.

        l = sum_k w_k l_k,   for example mixture(rl=ipo(), ce=cross_entropy(), ref_kl=ref_kl())

    A part gets only the tokens with a weight other than 0: its inputs may have any values at the others (NaN too), and
    these do not count in its sequences. Finding them synchronises the device. The call's mask must
    include the tokens of every part. Scope: the widest of the parts. Inputs: those of the parts, and `<name>_weights`
    for each part.

    Args:
        **parts: Objectives by name. A weight should include the part's normaliser, as `weights` do (prime-rl: 1 over
            the part's tokens in the global batch).

    Returns:
        An `Objective`, for `fused_linear_objective`.

    Raises:
        TypeError: no parts, or one that is not an objective.
        ValueError: a part that is a mixture itself has a part of the same name.

    Source: prime-rl's sum of `rl`, `ce` and `ref_kl` components. Tested against the formula, compared once with
    prime-rl's code of August 2026.
    """
    if not parts:
        raise TypeError("mixture needs at least one objective by name, as in mixture(rl=ipo()); got none")
    factors = {f"{name}_weights": part for name, part in parts.items()}
    read = {name for part in parts.values() for name in getattr(part, "reads", None) or ()}
    if twice := sorted(factors.keys() & read):
        raise ValueError(f"the names of mixtures in one another must differ; got {', '.join(twice)} twice")

    def loss(tokens: Tokens) -> Tensor:
        total = torch.zeros_like(tokens.logps)
        for name, part in factors.items():
            weight = tokens.inputs[name]
            rows = weight.nonzero().squeeze(1)
            shares = weight[rows] * call_part(part, _at(tokens, rows, factors))
            total = total.index_add(0, rows, shares)  # each row once: the order does not matter
        return total

    name = ", ".join(f"{name}={name_of(part)}" for name, part in parts.items())
    return made_of(f"mixture({name})", loss, parts.values(), needs=tuple(factors))


def _at(tokens: Tokens, rows: Tensor, factors: dict[str, LossFunction]) -> Tokens:
    """The tokens at `rows` ([k] int64, ascending), with the inputs except the parts' weights."""
    sequences = tokens.sequences
    if sequences is not None:
        offsets = torch.searchsorted(rows, sequences.cu_seqlens)
        sequences = Sequences(offsets, len(rows))
    entropies = None if tokens.entropies is None else tokens.entropies[rows]
    inputs = {name: x[rows] for name, x in tokens.inputs.items() if name not in factors}
    others = None if tokens.others is None else tokens.others.select(rows)
    return Tokens(tokens.logps[rows], entropies, inputs, sequences, others)
