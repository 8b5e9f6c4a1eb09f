"""What the distribution of a pretrained model in training says: errors of heads, importance ratios, candidate sets.

    python -m benchmarks.real_rollouts runs/pretrained/start --steps 4 --out results.json    # `benchmarks.pretrained`

It samples rollouts of the study's recipe, without training, keeps the hidden states in bf16, and compares log-probs of
the same states, weight and ids. `head` rounds its logits to bf16 (`eager_logps`); `ours` is the fused loss's score;
float64 is exact. The old log-probs of a ratio are those of either head: with equal states every ratio should be 1.
Then it times the loss of `TIMED` of the tokens, with the whole vocabulary and with the sets of each truncation.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.accuracy import flipped_by_exact_old, outside, quantiles
from benchmarks.pretrained import recipe
from benchmarks.providers import eager_logps
from benchmarks.study import Section, main
from benchmarks.timing import bare_gemms, times_by_round, with_ratios
from grpo_fused import CandidateSets, fused_linear_grpo_loss, fused_linear_logprobs, group_advantages
from grpo_fused.trainer import GRPOTrainer
from grpo_fused.trainer.recipe import build_trainer

TOP_P, TOP_K, ROWS, TIMED = (0.9, 0.95, 0.97), (20, 50), 32, 1024


class Recorded(NamedTuple):
    """N completion tokens of some rollouts."""

    hidden_states: Tensor
    """[N, H] bf16"""
    ids: Tensor
    """[N] int64"""
    weight: Tensor
    """[V, H] bf16"""
    zero_advantage_groups: float


@torch.no_grad()
def collect(trainer: GRPOTrainer, steps: int) -> Recorded:
    """The tokens of some rollouts of a trainer's policy, which does not change."""
    states, ids, rewards = [], [], []
    for _ in range(steps):
        rollout, rewarded = trainer.collect()
        rewards.append(rewarded)
        for _, part in trainer.policy.micro_batches(rollout, torch.arange(len(rewarded))):
            with trainer.accelerator.autocast():
                hidden = trainer.policy.hidden_states(part)
            states.append(hidden[part.completion_mask].bfloat16())
            ids.append(part.completion_ids[part.completion_mask])
    groups = group_advantages(torch.cat(rewards), trainer.config.num_generations, weights=trainer.reward_weights)
    weight = trainer.policy.head()["lm_head_weight"].detach().bfloat16()
    zero = float(groups.zero_std_groups) / (steps * trainer.config.prompts_per_step)
    return Recorded(torch.cat(states), torch.cat(ids), weight, zero)


@torch.no_grad()
def report(recorded: Recorded) -> dict[str, Any]:
    """Errors in nats, shares, and sizes in tokens."""
    columns: dict[str, list[Tensor]] = {}
    double = recorded.weight.double()
    for states, ids in zip(recorded.hidden_states.split(ROWS), recorded.ids.split(ROWS), strict=True):
        logits = states.double() @ double.T  # [R, V]
        logps = logits.log_softmax(-1)
        mass = logps.exp().sort(-1, descending=True).values.cumsum(-1)
        found = {
            "exact": logps.gather(-1, ids[:, None])[:, 0],
            "head": eager_logps(states[None], recorded.weight, ids[None])[0].double(),
            "entropy": -(logps.exp() * logps).sum(-1),
            "max_logit": logits.abs().amax(-1),
            **{f"top_p {p}": (mass < p).sum(-1).double() + 1 for p in TOP_P},
            **{f"top_k {k}": mass[:, k - 1] for k in TOP_K},
        }
        for name, values in found.items():
            columns.setdefault(name, []).append(values)
    tokens = {name: torch.cat(values) for name, values in columns.items()}
    ours = fused_linear_logprobs(recorded.hidden_states, recorded.weight, token_ids=recorded.ids).logps.double()
    heads = {"ours": ours, "head": tokens["head"]}
    return {
        "tokens": len(recorded.ids),
        "max_logit": float(tokens["max_logit"].max()),
        "entropy": quantiles(tokens["entropy"]),
        "zero_advantage_groups": recorded.zero_advantage_groups,
        "heads": {
            name: {
                "logp_error": quantiles((x - tokens["exact"]).abs()),
                "flipped": flipped_by_exact_old(x, tokens["exact"]),
                "ratio_outside": {old: outside(x, y) for old, y in (heads | {"exact": tokens["exact"]}).items()},
            }
            for name, x in heads.items()
        },
        "set_sizes": {name: quantiles(values) for name, values in tokens.items() if name.startswith("top_p")},
        "mass": {name: quantiles(values) for name, values in tokens.items() if name.startswith("top_k")},
    }  # fmt: skip


def times(recorded: Recorded) -> dict[str, dict[str, dict[str, float]]]:
    """Milliseconds of forward and backward, and the ratio to the bare products; dW is dense in all of them.

    A token outside its set could not have been sampled: its own id is added to the set.
    """
    states = recorded.hidden_states[:TIMED].detach().clone().requires_grad_()[None]
    weight, ids = recorded.weight.detach().clone().requires_grad_(), recorded.ids[:TIMED]
    advantages = torch.randn(1, generator=torch.Generator().manual_seed(0))

    def loss(sets: CandidateSets | None) -> None:
        fused_linear_grpo_loss(states, weight, ids[None], advantages, candidates=sets).loss.backward()
        weight.grad = None  # given back in its own time

    def sets(**truncation: float) -> CandidateSets:
        masks = []
        for rows, sampled in zip(states[0].detach().split(ROWS), ids.split(ROWS), strict=True):
            kept = CandidateSets.from_logits((rows @ recorded.weight.T).float(), **truncation)
            masks.append(kept.to_mask(len(recorded.weight)).scatter(1, sampled[:, None], value=True))
        return CandidateSets.cat([CandidateSets.from_mask(mask) for mask in masks])

    (V, H), N = weight.shape, len(ids)
    calls: dict[str, Any] = dict(bare_gemms(N, H, V, torch.bfloat16, "cpu"))
    calls["fill dW"] = lambda: torch.full((V, H), 1.0, dtype=torch.bfloat16)
    calls["whole vocabulary"] = partial(loss, None)
    calls |= {f"top_p {p}": partial(loss, sets(top_p=p)) for p in TOP_P}
    calls |= {f"top_k {k}": partial(loss, sets(top_k=k)) for k in TOP_K}
    return with_ratios(times_by_round(calls, "cpu", rounds=5), "bare-3")


def run(
    model: Annotated[Path, "a folder: the start, or a checkpoint of a run"],
    steps: Annotated[int, "rollouts"] = 4,
) -> Iterator[Section]:
    """The section `real_rollouts`."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(replace(recipe(str(model), Path(folder), seed=0), steps=steps))
        recorded = collect(trainer, steps)
        del trainer
    yield {"model": model.name, "steps": steps, **report(recorded), "times": times(recorded)}


if __name__ == "__main__":
    main("real_rollouts")
