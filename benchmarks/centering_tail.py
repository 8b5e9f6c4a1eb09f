"""What score centering from the sampler's K most likely tokens leaves of the form over all tokens.

    python -m benchmarks.centering_tail --out results.json    # seconds: sums over all tokens, no training

Random policies and samplers over a small vocabulary; the expected update in the logits is the sum over all tokens that
the sampler may draw. Errors are relative to the update of the form over all tokens, for rewards of 0 and 1. K = 0 is no
centering.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.results import Run, where
from benchmarks.study import Section, main
from benchmarks.tables import grid, paragraphs
from grpo_fused import objectives
from grpo_fused.objectives import Objective

CAP = 2.0
OBJECTIVES = {
    "reinforce": (objectives.score_centered_reinforce("mask"), objectives.score_centered_reinforce("top_k")),
    "tis": (objectives.score_centered_tis("mask", CAP), objectives.score_centered_tis("top_k", CAP)),
}
"""Over all tokens, and over the K most likely."""
VOCAB, DRAWS, SPREAD = 256, 50, 3.0
"""Tokens; pairs of a policy and a sampler; the standard deviation of the policy's logits."""
MISMATCHES = (0.1, 0.3, 1.0)
"""Standard deviations of what the sampler's logits have in addition."""
COUNTS = (0, 1, 4, 16, 64, 128, VOCAB)


def update(objective: Objective, z: Tensor, log_q: Tensor, ids: Tensor, advantages: Tensor) -> Tensor:
    """[V] expected update of the logits z under the sampler, with `ids` `[K]` as alternatives."""
    V, K = len(z), len(ids)
    log_p = z.log_softmax(0)
    losses = objective(
        log_p, None, advantages=advantages, sampling_per_token_logps=log_q,
        alternative_logps=log_p[ids].repeat(V), alternative_offsets=K * torch.arange(V + 1),
        sampling_alternative_logps=log_q[ids].repeat(V),
    )  # fmt: skip
    (found,) = torch.autograd.grad(-(log_q.exp() * losses).sum(), z)
    return found


def errors(mismatch: float) -> list[dict[str, float]]:
    """A row for each K: the mass of its tokens, and means over all draws."""
    g = torch.Generator().manual_seed(0)
    z, noise, rewards = (torch.randn(DRAWS, VOCAB, generator=g, dtype=torch.float64) for _ in range(3))
    rows: list[dict[str, float]] = [
        {"mismatch": mismatch, "K": K, "mass": 0.0} | dict.fromkeys(OBJECTIVES, 0.0) for K in COUNTS
    ]
    for one, more, reward in zip(SPREAD * z, noise, (rewards > 0).double(), strict=True):
        one.requires_grad_()
        log_q = (one.detach() + mismatch * more).log_softmax(0)
        order = log_q.argsort(descending=True)
        for row, K in zip(rows, COUNTS, strict=True):
            row["mass"] += float(log_q[order[:K]].exp().sum()) / DRAWS
        for name, (full, top) in OBJECTIVES.items():
            want = update(full, one, log_q, order, reward)
            for row, K in zip(rows, COUNTS, strict=True):
                error = update(top, one, log_q, order[:K], reward) - want
                row[name] += float(error.norm() / want.norm()) / DRAWS
    return rows


def run() -> Iterator[Section]:
    """The section `centering_tail`."""
    yield {
        "vocab": VOCAB, "draws": DRAWS, "spread": SPREAD, "cap": CAP,
        "rows": [row for mismatch in MISMATCHES for row in errors(mismatch)],
    }  # fmt: skip


def table(section: Section, run: Run) -> str:
    """Masses, and errors of the update."""
    rows = (
        (f"{row['mismatch']:g}", str(row["K"]), *(share(row[name]) for name in ("mass", *OBJECTIVES)))
        for row in section["rows"]
    )
    return paragraphs(
        grid("| mismatch | K | the sampler's mass of the K tokens | error, $w = 1$ | error, TIS |", rows),
        f"Means over {section['draws']} random policies of {section['vocab']} tokens, whose logits have a standard "
        f"deviation of {section['spread']:g}; the mismatch is that of what the sampler's logits have in addition; TIS "
        f"with cap {section['cap']:g}. Errors are of the expected update, an exact sum over all tokens, for rewards of "
        f"0 and 1, relative to that of the form over all tokens. K = 0 is no centering. {where(run)}.",
    )


def share(x: float) -> str:
    """In percent; rounding in fp64 is 0."""
    return f"{x:.2%}" if x > 1e-9 else "0"


if __name__ == "__main__":
    main("centering_tail")
