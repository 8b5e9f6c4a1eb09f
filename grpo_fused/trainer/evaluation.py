"""Held-out evaluation: greedy rewards, and pass@k of sampled completions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from accelerate import Accelerator
from torch import Tensor

from grpo_fused.trainer.data import Row
from grpo_fused.trainer.metrics import Metrics
from grpo_fused.trainer.rollout import Sampling

Judge = Callable[[Sequence[Row], Sampling], Tensor]
"""Samples completions of rows and scores them: rewards [len(rows) * num_generations, F]."""


def evaluate(
    judge: Judge,
    rows: Sequence[Row],
    names: Sequence[str],
    success: int,
    sampling: Sampling,
    samples: int,
    accelerator: Accelerator,
    *,
    batch_size: int,
) -> Metrics:
    """Mean greedy rewards of held-out rows, and the chance that one of k sampled completions succeeds.

        pass@k = mean over rows of 1 - C(n - c, k) / C(n, k),   c of n samples succeed

    Args:
        judge: The trainer's sampling and scoring.
        rows: Held-out rows, the same on all processes, which share them.
        names: Of the F reward functions.
        success: Which of them decides whether a completion succeeds (a reward of more than a half).
        sampling: How the run samples.
        samples: n, completions a row for pass@1 and pass@n; 0 for greedy ones only.
        accelerator: Whose processes share the rows.
        batch_size: Rows at a time.

    Returns:
        "eval/<name>", and with samples "eval/pass@1" and "eval/pass@<n>".

    Source: Chen et al., Evaluating Large Language Models Trained on Code (arXiv 2107.03374), for pass@k.
    """
    mine = list(rows)[accelerator.process_index :: accelerator.num_processes]
    # sums and counts of: each reward, pass@1, pass@n
    sums = torch.zeros(2, len(names) + 2, dtype=torch.float64)
    # processes ask for the same numbers of completions (sampling may run in step): they repeat a row, uncounted
    most = math.ceil(len(rows) / accelerator.num_processes)
    for start in range(0, most, batch_size):
        batch = mine[start : start + batch_size]
        asked = batch + list(rows[:1]) * (min(batch_size, most - start) - len(batch))
        greedy = judge(asked, replace(sampling, greedy=True, num_generations=1))[: len(batch)].double().cpu()
        sums[0, : len(names)] += greedy.nansum(0)
        sums[1, : len(names)] += (~greedy.isnan()).sum(0)
        if samples:
            sampled = judge(asked, replace(sampling, num_generations=samples))[:, success].reshape(-1, samples).cpu()
            sampled = sampled[: len(batch)]
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
    """The chance that k of `samples` completions, drawn without replacement, hold one of the `right` ones."""
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)
