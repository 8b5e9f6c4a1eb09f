"""The sampler: completions of rows by the rollout engine, and their rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from grpo_fused.rewards import RewardFunction, Text
from grpo_fused.rollouts.engine import RolloutEngine, Sampling
from grpo_fused.trainer.data import Row
from grpo_fused.trainer.peers import Peers
from grpo_fused.trainer.prompts import completion_for
from grpo_fused.trainer.rollout import Rollout, roll_out
from grpo_fused.trainer.scoring import score_completions
from grpo_fused.trainer.update import Updater


@dataclass
class Sampler:
    """Samples completions with the policy's newest weights, and has them scored.

    Args:
        engine: The rollout engine.
        sampling: How a run samples.
        updater: Its policy is the one that samples; its `weight_changes` tell when the engine needs the weights.
        tokenizer: Decodes the completions.
        encode: Token ids of a prompt.
        reward_functions: By name.
        peers: The processes of the run.
    """

    engine: RolloutEngine
    sampling: Sampling
    updater: Updater
    tokenizer: PreTrainedTokenizerBase
    encode: Callable[[Text], list[int]]
    reward_functions: Mapping[str, RewardFunction]
    peers: Peers
    _synced_at: int | None = None
    """The `weight_changes` that the engine has."""

    def sample(self, rows: Sequence[Row], sampling: Sampling) -> tuple[Rollout, Tensor]:
        """B completions of some rows; their rewards [B, F] on the CPU, NaN where a function does not judge."""
        with self.peers.sampling():
            if self._synced_at != self.updater.weight_changes:
                self.engine.sync_weights(self.updater.policy.unwrapped)
                self._synced_at = self.updater.weight_changes
            rollout = roll_out(self.engine, [self.encode(row["prompt"]) for row in rows], sampling)
            rollout = rollout.to(self.peers.accelerator.device)
        ids = rollout.completions()
        repeated = [row for row in rows for _ in range(sampling.num_generations)]
        completions = [completion_for(row["prompt"], text) for row, text in zip(repeated, self.texts(ids), strict=True)]
        timeout = self.updater.config.reward_timeout
        return rollout, score_completions(self.reward_functions, repeated, completions, ids, timeout=timeout)

    def texts(self, completion_ids: list[list[int]]) -> list[str]:
        """Completions as texts."""
        return [str(self.tokenizer.decode(ids, skip_special_tokens=True)) for ids in completion_ids]
