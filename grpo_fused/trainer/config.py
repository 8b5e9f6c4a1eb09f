"""The options of a GRPO run, as one frozen value."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from grpo_fused import GRPOLossConfig
from grpo_fused.advantages import Aggregation, ScaleRewards
from grpo_fused.engines import Impl
from grpo_fused.rollout_corrections import ImportanceSamplingMode

LRSchedule = Literal["constant", "linear", "cosine"]
Precision = Literal["no", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class GRPOTrainerConfig:
    """Options of `GRPOTrainer`; names follow TRL's `GRPOConfig` where both have the option.

    One step is one rollout of `prompts_per_step * num_generations` completions, over all processes together, and
    `num_iterations` optimizer steps on it.

    `temperature` divides the logits in sampling and in scoring alike. `top_p`, `top_k`, `min_p` and
    `repetition_penalty` change the sampling only: the loss scores the whole distribution, so that with them the samples
    are not quite the policy's own (as in TRL). Leave them off unless the policy rambles. With rollouts by vLLM they are
    refused where its log-probs correct the loss: those are of the distribution that is left.

    Args:
        steps: Rollouts to train on.
        prompts_per_step: Different prompts in a rollout, over all processes; divisible by their number.
        num_generations: Completions for each prompt, the group that a reward is compared with; at least 2.
        num_iterations: Optimizer steps on each rollout (mu in the GRPO paper). 1 is on-policy; from the second step on
            the importance ratios move and the clip acts.
        micro_batch_tokens: Tokens, prompts and padding included, in one forward and backward pass. A memory knob: it
            does not change the update, and groups may be split. `loss.top_entropy_quantile` < 1 ranks the tokens of a
            whole rollout, and takes it in one pass whatever this says.
        max_prompt_length: Longer prompts are left out of the data set and counted; None keeps all.
        max_completion_length: Tokens, EOS included, after which a completion is cut.
        temperature: Of sampling and of scoring.
        top_p: Sample from the smallest set of tokens with this probability; 1 samples from all.
        top_k: Sample from the k most likely tokens; 0 samples from all.
        min_p: Sample from tokens with at least this share of the most likely one's probability; 0 samples from all.
        repetition_penalty: Divides the logits of tokens that are there already; 1 does nothing.
        stop_strings: A completion ends with any of these.
        generation_batch_size: Completions sampled at a time by Hugging Face's `generate`; None takes all at once.
        learning_rate: Peak learning rate of AdamW.
        warmup_steps: Optimizer steps over which the learning rate rises linearly.
        lr_scheduler_type: What follows the warm-up: "constant", or down to 0 by "linear" or "cosine".
        adam_betas: AdamW's betas.
        weight_decay: AdamW's weight decay.
        max_grad_norm: Gradients are clipped to this norm.
        scale_rewards: How `group_advantages` divides: "group", "batch" or "none".
        reward_aggregation: How `group_advantages` joins several rewards.
        reward_timeout: Seconds that one call of a reward function may take; None sets no limit.
        importance_sampling: How log-probs of a rollout engine (vLLM) correct the loss, the mode of
            `importance_sampling_correction`; None does not correct.
        importance_sampling_clip: Upper bound of those ratios.
        mixed_precision: Autocast of the model and the loss: "no", "bf16" or "fp16". Weights in fp32 with "bf16" is the
            safe choice: at a learning rate of 1e-6 most updates vanish in bf16 weights.
        gradient_checkpointing: Recompute activations in the backward pass instead of keeping them.
        seed: Of the order of the prompts and of the sampling; in a recipe also of a new adapter.
        logging_steps: Steps between two printed rows; every step is written to `metrics.jsonl`.
        sample_steps: Steps between two printed tables of completions; 0 prints none.
        report_to: Trackers of accelerate that also get the metrics: "tensorboard", "wandb", "trackio", ...
            Their packages must be installed.
        eval_steps: Steps between two evaluations; 0 evaluates at the ends only.
        eval_samples: Completions sampled for each held-out prompt, for pass@k (k = 1 and this); 0: greedy only.
        save_steps: Steps between two checkpoints; 0 saves at the end only. Without `output_dir` none is saved.
        save_total_limit: The newest checkpoints that are kept; None keeps all.
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
    micro_batch_tokens: int = 16384
    max_prompt_length: int | None = None
    max_completion_length: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_strings: tuple[str, ...] = ()
    generation_batch_size: int | None = None
    learning_rate: float = 1e-6
    warmup_steps: int = 0
    lr_scheduler_type: LRSchedule = "constant"
    adam_betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    scale_rewards: ScaleRewards = "group"
    reward_aggregation: Aggregation = "sum_then_normalize"
    reward_timeout: float | None = None
    importance_sampling: ImportanceSamplingMode | None = "sequence_mask"
    importance_sampling_clip: float = 3.0
    mixed_precision: Precision = "no"
    gradient_checkpointing: bool = False
    seed: int = 0
    logging_steps: int = 10
    sample_steps: int = 0
    report_to: tuple[str, ...] = ()
    eval_steps: int = 0
    eval_samples: int = 0
    save_steps: int = 0
    save_total_limit: int | None = 2
    impl: Impl = "auto"
    loss: GRPOLossConfig = field(default_factory=GRPOLossConfig)

    def __post_init__(self) -> None:
        for name, least in _LEAST_INT.items():
            self._check_int(name, least)
        for name, (low, high) in _RANGES.items():
            self._check_float(name, low, high)
        if len(self.adam_betas) != 2 or not all(0 <= beta < 1 for beta in self.adam_betas):
            raise ValueError(f"adam_betas must be two numbers in [0, 1); got {self.adam_betas}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}; got {getattr(self, name)!r}")
        for name in ("stop_strings", "report_to"):
            value = getattr(self, name)
            if isinstance(value, str) or not all(isinstance(text, str) and text for text in value):
                raise TypeError(f"{name} must be a tuple of non-empty strings; got {value!r}")
        if not isinstance(self.gradient_checkpointing, bool):
            raise TypeError(f"gradient_checkpointing must be a bool; got {self.gradient_checkpointing!r}")
        if not isinstance(self.loss, GRPOLossConfig):
            raise TypeError(f"loss must be a GRPOLossConfig; got {type(self.loss).__name__}")
        if self.eval_samples == 1:
            raise ValueError("eval_samples must be 0 (greedy only) or at least 2; got 1")

    @property
    def rollout_size(self) -> int:
        """Completions in a rollout, over all processes."""
        return self.prompts_per_step * self.num_generations

    def _check_int(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if value is None and name in _OPTIONAL:
            return
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} must be an int; got {value!r}")
        if value < least:
            raise ValueError(f"{name} must be at least {least}; got {value}{_WHY.get(name, '')}")

    def _check_float(self, name: str, low: float, high: float) -> None:
        """`low` itself is allowed only where it means "off"."""
        value = getattr(self, name)
        if value is None and name in _OPTIONAL:
            return
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise TypeError(f"{name} must be a float; got {value!r}")
        if not math.isfinite(value):
            raise ValueError(f"{name} must be finite; got {value}")
        if name in ("weight_decay", "min_p"):
            if not low <= value <= high:
                raise ValueError(f"{name} must not be negative{f' nor above {high}' * (high < math.inf)}; got {value}")
        elif value <= low:
            raise ValueError(f"{name} must be positive; got {value}")
        elif value > high:
            raise ValueError(f"{name} must not be above {high}; got {value}")


_LEAST_INT = {
    "steps": 1,
    "prompts_per_step": 1,
    "num_generations": 2,
    "num_iterations": 1,
    "micro_batch_tokens": 1,
    "max_prompt_length": 1,
    "max_completion_length": 1,
    "top_k": 0,
    "generation_batch_size": 1,
    "warmup_steps": 0,
    "seed": 0,
    "logging_steps": 1,
    "sample_steps": 0,
    "eval_steps": 0,
    "eval_samples": 0,
    "save_steps": 0,
    "save_total_limit": 1,
}
_RANGES = {
    "temperature": (0, math.inf),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0, math.inf),
    "learning_rate": (0, math.inf),
    "weight_decay": (0, math.inf),
    "max_grad_norm": (0, math.inf),
    "reward_timeout": (0, math.inf),
    "importance_sampling_clip": (0, math.inf),
}
_OPTIONAL = {"max_prompt_length", "generation_batch_size", "save_total_limit", "reward_timeout"}
_CHOICES: dict[str, tuple[object, ...]] = {
    "scale_rewards": get_args(ScaleRewards),
    "reward_aggregation": get_args(Aggregation),
    "importance_sampling": (None, *get_args(ImportanceSamplingMode)),
    "lr_scheduler_type": get_args(LRSchedule),
    "mixed_precision": get_args(Precision),
    "impl": get_args(Impl),
}
_WHY = {"num_generations": ": a group of one has no baseline to compare with"}
