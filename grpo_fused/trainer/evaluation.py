"""Held-out evaluation: greedy rewards, and pass@k of sampled completions."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from grpo_fused.trainer.metrics import Metrics

if TYPE_CHECKING:
    from grpo_fused.trainer.loop import GRPOTrainer


def evaluate(trainer: GRPOTrainer) -> Metrics:
    """Mean greedy rewards of the held-out rows, and the probability that one of k sampled completions succeeds.

        pass@k = mean over rows of 1 - C(n - c, k) / C(n, k),   c of n samples succeed

    A completion succeeds if the reward function with the largest weight gives it more than a half. The processes share
    the rows.

    Returns:
        "eval/<name>", and with n = `config.eval_samples` > 0 "eval/pass@1" and "eval/pass@<n>"; nothing without rows.

    Source: Chen et al., Evaluating Large Language Models Trained on Code (arXiv 2107.03374), for pass@k.
    """
    if trainer.eval_rows is None:
        return {}
    rows, names, accelerator = list(trainer.eval_rows), list(trainer.reward_functions), trainer.accelerator
    samples, batch_size = trainer.config.eval_samples, trainer.prompts_per_process
    success = int(trainer.reward_weights.argmax())
    mine = rows[accelerator.process_index :: accelerator.num_processes]
    # sums and counts of: each reward, pass@1, pass@n
    sums = torch.zeros(2, len(names) + 2, dtype=torch.float64)
    # processes sample equal numbers of completions (they may run in step): they repeat a row, which does not count
    most = math.ceil(len(rows) / accelerator.num_processes)
    for start in range(0, most, batch_size):
        batch = mine[start : start + batch_size]
        requested = batch + rows[:1] * (min(batch_size, most - start) - len(batch))
        _, rewards = trainer.sample(requested, replace(trainer.sampling, greedy=True, num_generations=1))
        greedy = rewards[: len(batch)].double().cpu()
        sums[0, : len(names)] += greedy.nansum(0)
        sums[1, : len(names)] += (~greedy.isnan()).sum(0)
        if samples:
            _, rewards = trainer.sample(requested, replace(trainer.sampling, num_generations=samples))
            sampled = rewards[:, success].reshape(-1, samples)[: len(batch)].cpu()
            for row in sampled[~sampled.isnan().all(1)]:
                right = int((row > 0.5).sum())
                sums[0, -2:] += torch.tensor([pass_at_k(samples, right, 1), pass_at_k(samples, right, samples)])
                sums[1, -2:] += 1
    total, count = accelerator.reduce(sums.to(accelerator.device), "sum").cpu()
    means = (total / count).tolist()
    metrics = {f"eval/{name}": mean for name, mean in zip(names, means, strict=False)}
    if samples:
        metrics |= {"eval/pass@1": means[-2], f"eval/pass@{samples}": means[-1]}
    return metrics


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The probability that k of `samples` completions, drawn without replacement, contain one of the `right` ones."""
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)
