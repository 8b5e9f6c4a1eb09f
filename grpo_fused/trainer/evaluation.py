"""Held-out evaluation: greedy rewards, and pass@k of sampled completions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from grpo_fused.trainer.config import GRPOTrainerConfig
from grpo_fused.trainer.data import Row
from grpo_fused.trainer.metrics import Metrics
from grpo_fused.trainer.sampler import Sampler


def evaluate(sampler: Sampler, rows: Sequence[Row], config: GRPOTrainerConfig, *, success: int) -> Metrics:
    """Mean greedy rewards of the held-out rows, and the probability that one of k sampled completions succeeds.

        pass@k = mean over rows of 1 - C(n - c, k) / C(n, k),   c of n samples succeed

    A completion succeeds if reward function number `success` gives it more than a half. The processes share the rows.

    Returns:
        "eval/<name>", and with n = `config.eval_samples` > 0 "eval/pass@1" and "eval/pass@<n>".

    Source: Chen et al., Evaluating Large Language Models Trained on Code (arXiv 2107.03374), for pass@k.
    """
    sampling = replace(sampler.sampling, records=None)
    names, samples, accelerator = list(sampler.reward_functions), config.eval_samples, sampler.peers.accelerator
    batch_size = config.prompts_per_step // accelerator.num_processes
    mine = list(rows)[accelerator.process_index :: accelerator.num_processes]
    # sums and counts of: each reward, pass@1, pass@n
    sums = torch.zeros(2, len(names) + 2, dtype=torch.float64)
    # processes sample equal numbers of completions (they may run in step): they repeat a row, which does not count
    most = math.ceil(len(rows) / accelerator.num_processes)
    for start in range(0, most, batch_size):
        batch = mine[start : start + batch_size]
        requested = batch + [rows[0]] * (min(batch_size, most - start) - len(batch))
        _, rewards = sampler.sample(requested, replace(sampling, greedy=True, num_generations=1))
        greedy = rewards[: len(batch)].double()
        sums[0, : len(names)] += greedy.nansum(0)
        sums[1, : len(names)] += (~greedy.isnan()).sum(0)
        if samples:
            _, rewards = sampler.sample(requested, replace(sampling, num_generations=samples))
            sampled = rewards[:, success].reshape(-1, samples)[: len(batch)]
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
