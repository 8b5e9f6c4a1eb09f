"""The options of a GRPO run, as one frozen value."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields
from typing import Literal

from grpo_fused import GRPOLossConfig
from grpo_fused.call.options import check_choice, check_number, check_options, option
from grpo_fused.engines import Impl
from grpo_fused.objectives.advantages import Aggregation, ScaleRewards
from grpo_fused.objectives.corrections import ImportanceSamplingMode
from grpo_fused.objectives.weights import Aggregation as TokenAverage
from grpo_fused.trainer.objective import ObjectiveOptions

RUN_NAMES = {
    "wandb": "name", "trackio": "name", "swanlab": "experiment_name", "mlflow": "run_name", "clearml": "task_name",
}  # fmt: skip
"""Tracker: its option for the name of a run."""


@dataclass(frozen=True, kw_only=True)
class GRPOTrainerConfig:
    """Options of `GRPOTrainer`; names follow TRL's `GRPOConfig` if both have the option.

    One step is one rollout of `prompts_per_step * num_generations` completions, over all processes together, and
    `num_iterations` optimizer steps on it.

    `temperature` divides the logits both in sampling and in scoring. With `top_p`, `top_k` or `min_p` the rollout
    records the tokens that could be sampled, and the loss, its entropy and its KL are of the distribution renormalised
    over them (`CandidateSets`). A `repetition_penalty` changes the sampling only; it cannot be combined with them, nor
    with log-probs of vLLM that correct the loss.

    Args:
        steps: Rollouts to train on.
        prompts_per_step: Different prompts in a rollout, over all processes; divisible by their number.
        num_generations: Completions for each prompt, the group that a reward is compared with; at least 2.
        num_iterations: Optimizer steps on each rollout (mu in the GRPO paper). 1 is on-policy; from the second step on
            the importance ratios differ from 1 and the clip has an effect.
        micro_batch_tokens: Tokens, prompts and padding included, in one forward and backward pass. It bounds
            memory and does not change the update; groups may be split. `loss.top_entropy_quantile` < 1 ranks the tokens
            of a whole rollout, and ignores this option: it takes the rollout in one pass.
        share_prompts: Compute a prompt once for all of its completions, in one sequence with an attention mask. Faster
            where prompts are long; only for models whose layers all have full attention, which is checked.
        max_prompt_length: Longer prompts are left out of the data set and counted; None keeps all.
        max_completion_length: Tokens, EOS included, after which a completion is truncated.
        temperature: Of sampling and of scoring.
        top_p: Sample from the smallest set of tokens with this probability; 1 samples from all.
        top_k: Sample from the k most likely tokens; 0 samples from all.
        min_p: Sample from tokens with at least this share of the most likely one's probability; 0 samples from all.
        repetition_penalty: Lowers the logits of tokens that occurred already; 1 is off.
        stop_strings: A completion ends with any of these.
        generation_batch_size: Completions sampled at a time by Hugging Face's `generate`; None takes all at once. Only
            without another rollout engine.
        learning_rate: Peak learning rate of AdamW.
        warmup_steps: Optimizer steps over which the learning rate rises linearly.
        lr_scheduler_type: The schedule after the warm-up: "constant", or down to 0 by "linear" or "cosine".
        adam_betas: AdamW's betas.
        weight_decay: AdamW's weight decay.
        max_grad_norm: Gradients are clipped to this norm.
        scale_rewards: What `group_advantages` divides by: "group", "batch" or "none".
        reward_aggregation: How `group_advantages` combines several rewards.
        reward_timeout: Seconds that one call of a reward function may take; None sets no limit.
        importance_sampling: How log-probs of a rollout engine (vLLM) correct the loss, the mode of
            `importance_sampling_correction`; None does not correct.
        importance_sampling_clip: Upper bound of those ratios.
        mixed_precision: Autocast of the model and the loss: "no", "bf16" or "fp16". Weights in fp32 with "bf16" is the
            safe choice: at a learning rate of 1e-6 most updates vanish in bf16 weights.
        gradient_checkpointing: Recompute activations in the backward pass instead of keeping them.
        seed: Of the order of the prompts and of the sampling; in a recipe also of a new adapter.
        logging_steps: Steps between two printed rows; the last step is always printed, and every step is written to
            `metrics.jsonl`. 0 prints nothing.
        sample_steps: Steps between two prints of a prompt and three of its completions; 0 prints none.
        report_to: Trackers of accelerate that also get the metrics, one or several: "tensorboard", "wandb", "trackio",
            ... Their packages must be installed.
        project: Project of the trackers; for tensorboard a folder in `output_dir`.
        run_name: Name of the run in wandb, trackio, swanlab, mlflow and clearml; None leaves it to them.
        eval_steps: Steps between two evaluations; 0 evaluates only before and after the run. Only if there is something
            to evaluate.
        eval_samples: Completions sampled for each held-out prompt, for pass@k (k = 1 and this); 0: greedy only. A
            completion passes if the reward function of the largest weight gives it more than 0.5.
        save_steps: Steps between two checkpoints; 0 saves at the end only. Without `output_dir` none is saved.
        save_total_limit: Number of newest checkpoints to keep; None keeps all.
        impl: The engine of the loss, as in `fused_linear_grpo_loss`.
        loss: The options of the loss.
        objective: An objective of `grpo_fused.objectives` in place of the loss type, with the sampler's log-probs if it
            reads them. Of `loss` only `loss_type` (grpo, bnpo, dr_grpo, dapo or luspo) and `max_completion_length` may
            then be set: they average its tokens. `importance_sampling` is for loss types only.

    Raises:
        ValueError: An option is out of range, or two options contradict each other.
        TypeError: An option has the wrong type.
    """

    steps: int = option(100, least=1)
    prompts_per_step: int = option(8, least=1)
    num_generations: int = option(8, least=2)
    num_iterations: int = option(1, least=1)
    micro_batch_tokens: int = option(16384, least=1)
    share_prompts: bool = False
    max_prompt_length: int | None = option(None, least=1)
    max_completion_length: int = option(256, least=1)
    temperature: float = option(1.0, positive=True)
    top_p: float = option(1.0, positive=True, most=1)
    top_k: int = option(0)
    min_p: float = option(0.0, most=1)
    repetition_penalty: float = option(1.0, positive=True)
    stop_strings: tuple[str, ...] = ()
    generation_batch_size: int | None = option(None, least=1)
    learning_rate: float = option(1e-6, positive=True)
    warmup_steps: int = option(0)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    adam_betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = option(0.0)
    max_grad_norm: float = option(1.0, positive=True)
    scale_rewards: ScaleRewards = "group"
    reward_aggregation: Aggregation = "sum_then_normalize"
    reward_timeout: float | None = option(None, positive=True)
    importance_sampling: ImportanceSamplingMode | None = "sequence_mask"
    importance_sampling_clip: float = option(3.0, positive=True)
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    gradient_checkpointing: bool = False
    seed: int = option(0, most=2**32 - 1)
    logging_steps: int = option(10)
    sample_steps: int = option(0)
    report_to: tuple[str, ...] | str = ()
    project: str = "grpo_fused"
    run_name: str | None = None
    eval_steps: int = option(0)
    eval_samples: int = option(0)
    save_steps: int = option(0)
    save_total_limit: int | None = option(2, least=1)
    impl: Impl = "auto"
    loss: GRPOLossConfig = field(default_factory=GRPOLossConfig)
    objective: ObjectiveOptions | None = None

    def __post_init__(self) -> None:
        if isinstance(self.report_to, str):
            object.__setattr__(self, "report_to", () if self.report_to == "none" else (self.report_to,))
        check_options(self)
        betas = self.adam_betas if isinstance(self.adam_betas, Iterable) else (self.adam_betas,)
        object.__setattr__(self, "adam_betas", tuple(check_number(beta, "adam_betas") for beta in betas))
        if len(self.adam_betas) != 2 or not all(0 <= beta < 1 for beta in self.adam_betas):
            raise ValueError(f"adam_betas must be two numbers in [0, 1); got {self.adam_betas}")
        if self.eval_samples == 1:
            raise ValueError("eval_samples must be 0 (greedy only) or at least 2; got 1")
        check_used(self, self.importance_sampling is not None, "importance_sampling", "importance_sampling_clip")
        check_used(self, self.logging_steps > 0, "logging_steps of at least 1 (0 prints nothing)", "sample_steps")
        check_used(self, bool(self.report_to), "a tracker in report_to", "project")
        has_names = not {*RUN_NAMES, "all"}.isdisjoint(self.report_to)
        named = f"a tracker in report_to that has names of runs ({', '.join(RUN_NAMES)})"
        check_used(self, has_names, named, "run_name")
        for name in ("kl_estimator", "use_bias_correction_kl"):
            if self.loss.beta == 0 and (value := getattr(self.loss, name)) != getattr(GRPOLossConfig, name):
                raise ValueError(f"loss.{name} is not used with loss.beta 0; got {value!r}")
        if self.loss.kl_estimator == "exact":
            if self.truncates:
                raise ValueError(
                    "kl_estimator='exact' is over the whole vocabulary: leave top_p, top_k and min_p unset"
                )
            if self.impl not in ("auto", "chunked", "reference"):
                raise ValueError(f"kl_estimator='exact' runs with impl auto, chunked or reference; got {self.impl!r}")

        if self.objective is not None:
            self._check_objective(self.objective)

    @property
    def truncates(self) -> bool:
        """Whether some tokens cannot be sampled."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def loss_name(self) -> str:
        """The loss type, or the objective and how it is averaged."""
        name = self.loss.loss_type
        return name if self.objective is None else f"{self.objective.objective.__name__} averaged as {name}"

    def _check_objective(self, objective: ObjectiveOptions) -> None:
        loss = self.loss
        check_choice(loss.loss_type, "objective averages its tokens by loss_type, which", TokenAverage)
        plain = GRPOLossConfig(loss_type=loss.loss_type, max_completion_length=loss.max_completion_length)
        if loss != plain:
            raise ValueError(
                "objective must come with no option of loss but loss_type and max_completion_length, since it reads "
                f"no other; got {loss}"
            )
        for name in ("importance_sampling", "importance_sampling_clip"):
            if (given := getattr(self, name)) not in (None, getattr(GRPOTrainerConfig, name)):
                raise ValueError(f"objective must come with no {name}, which corrects loss types; got {given}")
        if objective.records is not None and self.repetition_penalty != 1:
            raise ValueError(
                "objective must come with repetition_penalty 1 if it reads the sampler's log-probs, which the penalty "
                f"changes; got {self.repetition_penalty}"
            )
        if objective.records == "mask" and not self.truncates:
            raise ValueError(
                "objective over the sampling mask must come with top_p, top_k or min_p; without them take "
                "options: {support: top_k}"
            )
        if objective.records == "top_k" and self.truncates:
            raise ValueError(
                "objective with support top_k must come without top_p, top_k and min_p: its masses are over the whole "
                f"vocabulary; got {self.top_p}, {self.top_k} and {self.min_p} (support mask is exact with them)"
            )


def check_used(config: GRPOTrainerConfig, is_used: bool, what: str, *names: str) -> None:
    """Raises ValueError for one of some options that would change nothing without what uses them."""
    defaults = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(config)}
    for name in names:
        if not is_used and (value := getattr(config, name)) != defaults[name]:
            raise ValueError(f"{name} must come with {what}; got {value!r} without")


def check_for_vllm(config: GRPOTrainerConfig) -> None:
    """What cannot be trained on rollouts of vLLM, found before the first one.

    Raises:
        ValueError: Its log-probs would be compared with others than the policy's own, or correct a loss that takes
            no such correction.
    """
    mode, loss = config.importance_sampling if config.objective is None else None, config.loss
    corrections = {"importance_sampling": mode, "loss.off_policy_mask_threshold": loss.off_policy_mask_threshold}
    uses = [name for name, value in corrections.items() if value is not None]
    if uses and config.repetition_penalty != 1:
        raise ValueError(
            f"{' and '.join(uses)} must be null with a repetition_penalty, which changes the log-probs that vLLM "
            f"samples with, but not the policy's; got repetition_penalty {config.repetition_penalty}"
        )
    by_sequence = mode is not None and mode.startswith("sequence")
    takes = loss.kind.takes_ratio
    if (takes is None and mode is not None) or (takes == "token" and by_sequence):
        raise ValueError(
            "importance_sampling must be null with loss_type gmpo, and by token (token_mask, token_truncate) or "
            f"null with vespo; got {mode} with {loss.loss_type}"
        )
