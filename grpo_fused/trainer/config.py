"""The options of a GRPO run, as one frozen value."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import get_args

from grpo_fused import GRPOLossConfig
from grpo_fused.advantages import ScaleRewards
from grpo_fused.engines import Impl


@dataclass(frozen=True, kw_only=True)
class GRPOTrainerConfig:
    """Options of `GRPOTrainer`; names follow TRL's `GRPOConfig` where both have the option.

    One step is one rollout of `prompts_per_step * num_generations` completions and `num_iterations` optimizer steps
    on it. There is no top-k or top-p: they would sample from a truncated distribution, while the loss scores the whole
    one, so that no importance ratio would be right.

    Args:
        steps: Rollouts to train on.
        prompts_per_step: Different prompts in a rollout.
        num_generations: Completions for each prompt, the group that a reward is compared with; at least 2.
        num_iterations: Optimizer steps on each rollout (mu in the GRPO paper). 1 is on-policy and needs no old
            log-probs; from the second step on the importance ratios move and the clip acts.
        micro_batch_size: Completions in one forward and backward pass; a memory knob that does not change the update.
        max_completion_length: Tokens, EOS included, after which a completion is cut.
        temperature: Of sampling and of scoring, one value for both, so that the ratio is that of the sampled policy.
        learning_rate: Peak learning rate of AdamW.
        warmup_steps: Optimizer steps over which the learning rate rises linearly from 0.
        decay: Let the learning rate fall linearly to 0 at the end of the run instead of staying at its peak.
        adam_betas: AdamW's betas.
        weight_decay: AdamW's weight decay.
        max_grad_norm: Gradients are clipped to this norm.
        scale_rewards: How `group_advantages` divides: "group", "batch" or "none".
        seed: Of the order of the prompts and of the sampling.
        logging_steps: Steps between two printed rows; every step is written to `metrics.jsonl`.
        eval_steps: Steps between two calls of the `evaluate` function, if the trainer has one.
        impl: The engine of the loss, as in `fused_linear_grpo_loss`.
        loss: The options of the loss.

    Raises:
        ValueError: An option is out of range, or two options contradict each other.
        TypeError: An option has the wrong type.
    """

    steps: int = 100
    prompts_per_step: int = 8
    num_generations: int = 8
    num_iterations: int = 1
    micro_batch_size: int = 64
    max_completion_length: int = 256
    temperature: float = 1.0
    learning_rate: float = 1e-6
    warmup_steps: int = 0
    decay: bool = False
    adam_betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    scale_rewards: ScaleRewards = "group"
    seed: int = 0
    logging_steps: int = 10
    eval_steps: int = 10
    impl: Impl = "auto"
    loss: GRPOLossConfig = field(default_factory=GRPOLossConfig)

    def __post_init__(self) -> None:
        for name, least in _LEAST_INT.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be an int; got {value!r}")
            if value < least:
                raise ValueError(f"{name} must be at least {least}; got {value}{_WHY.get(name, '')}")
        for name in ("temperature", "learning_rate", "max_grad_norm"):
            self._check_float(name)
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive; got {getattr(self, name)}")
        self._check_float("weight_decay")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay must not be negative; got {self.weight_decay}")
        if len(self.adam_betas) != 2 or not all(0 <= beta < 1 for beta in self.adam_betas):
            raise ValueError(f"adam_betas must be two numbers in [0, 1); got {self.adam_betas}")
        for name, choices in (("scale_rewards", get_args(ScaleRewards)), ("impl", get_args(Impl))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}; got {getattr(self, name)!r}")
        if not isinstance(self.loss, GRPOLossConfig):
            raise TypeError(f"loss must be a GRPOLossConfig; got {type(self.loss).__name__}")
        self._check_micro_batches()

    @property
    def rollout_size(self) -> int:
        """Completions in a rollout."""
        return self.prompts_per_step * self.num_generations

    def _check_float(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise TypeError(f"{name} must be a float; got {value!r}")
        if not math.isfinite(value):
            raise ValueError(f"{name} must be finite; got {value}")

    def _check_micro_batches(self) -> None:
        """Both options average or rank over the tokens of one call, which must then be the whole rollout."""
        whole_batch = self.loss.entropy_coef != 0 or self.loss.top_entropy_quantile < 1
        if whole_batch and self.micro_batch_size < self.rollout_size:
            raise ValueError(
                "entropy_coef and top_entropy_quantile need the whole rollout in one micro-batch: expected "
                f"micro_batch_size >= {self.rollout_size} (prompts_per_step * num_generations); "
                f"got {self.micro_batch_size}"
            )


_LEAST_INT = {
    "steps": 1,
    "prompts_per_step": 1,
    "num_generations": 2,
    "num_iterations": 1,
    "micro_batch_size": 1,
    "max_completion_length": 1,
    "warmup_steps": 0,
    "seed": 0,
    "logging_steps": 1,
    "eval_steps": 1,
}
_WHY = {"num_generations": ": a group of one has no baseline to compare with"}
