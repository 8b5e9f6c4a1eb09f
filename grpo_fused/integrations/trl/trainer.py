"""TRL's GRPO trainer with the whole loss fused: one pass over the head in place of two.

The trainers stay TRL's: its `_compute_loss` makes the loss, the metrics and the adaptive entropy bonus, so that every
option of `GRPOConfig`, and every one that a later release adds, is honoured. Ours announce what that loss is going to
be, and the head makes its gradients while it scores (see `prediction`).
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from grpo_fused.call.calls import LossInputs
from grpo_fused.call.config import GRPOLossConfig
from grpo_fused.call.loss_types import LOSS_TYPES
from grpo_fused.call.options import check_flag, check_integer
from grpo_fused.integrations.context import holding
from grpo_fused.integrations.trl.head import FusedLogProbFunction, HeadImpl, trains_here, use_fused_head
from grpo_fused.integrations.trl.prediction import Counts, Prediction, announced
from grpo_fused.integrations.trl.release import FUSED_HEAD, RELEASE, WINDOWS
from grpo_fused.integrations.trl.truncation import ExactTruncation

_ANOTHER_LOSS = (
    "the loss is not the one expected from the options. A subclass that changes the loss does this in every step. In a "
    "plain run only rounding can, in few steps; please report it if `recomputed` keeps growing"
)
_OTHER_SCORES = (
    "the loss was not computed from the log-probs that this trainer scored. A subclass that replaces _compute_loss or "
    "_get_per_token_logps_and_entropies must call super()'s for the fast path"
)


class FusedLoss(ExactTruncation):
    """What our GRPO and GMPO trainers add to TRL's."""

    loss_counts: Counts
    """`fused`: losses whose gradients came with the scores; `recomputed`: those that took another pass."""

    def __init__(
        self,
        *args: Any,
        impl: HeadImpl = "auto",
        max_scratch_bytes: int | None = None,
        exact_truncation: bool = False,
        **kwargs: Any,
    ) -> None:
        if max_scratch_bytes is not None:
            check_integer(max_scratch_bytes, "max_scratch_bytes", least=1)
        check_flag(exact_truncation, "exact_truncation")
        self.loss_counts = Counts()
        self._head: type[FusedLogProbFunction] = type(
            "FusedLogProbFunction", (FusedLogProbFunction,), {"impl": impl, "max_scratch_bytes": max_scratch_bytes}
        )
        config = kwargs.get("args", args[2] if len(args) > 2 else None)
        if config is not None and config.use_liger_kernel and RELEASE < FUSED_HEAD:
            raise ValueError(
                f"use_liger_kernel must be False; got True. TRL {version('trl')} then makes the loss in another way, "
                f"and {type(self).__name__} makes the loss by its own kernels"
            )
        if config is not None and config.use_liger_kernel and config.device.type == "cpu":
            raise ValueError(
                "use_liger_kernel must be False on the CPU; got True. TRL then puts Liger's Triton kernels into the "
                "layers of the model, and they run on a GPU only. The loss does not need them: "
                f"{type(self).__name__} makes it by its own kernels"
            )
        # the block checks the heads before DeepSpeed wraps a model
        with holding(trains_here, True), use_fused_head(self._head):
            super().__init__(*args, exact_truncation=exact_truncation, **kwargs)
        self._announced = False  # whether the loss of this training step was, and its tokens were scored here
        self._unknown = ""  # why it was not
        self._warned = False

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        with use_fused_head(self._head):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        self._unknown = self.why_unknown() if torch.is_grad_enabled() else ""
        prediction = self.predict_loss(inputs) if torch.is_grad_enabled() and not self._unknown else None
        with holding(announced, prediction):
            loss: Tensor = super()._compute_loss(model, inputs)
        self._announced = prediction is not None and prediction.used
        return loss

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """TRL's; says, once, where the gradients of a step took another pass over the head, and why."""
        self._announced, self._unknown, before = False, "", self.loss_counts.recomputed
        loss: Tensor = super().training_step(*args, **kwargs)
        if not self._announced:
            self.loss_counts.recomputed += 1
        if self.loss_counts.recomputed > before and not self._warned:
            self._warned = True
            why = self._unknown or (_ANOTHER_LOSS if self._announced else _OTHER_SCORES)
            warnings.warn(
                f"{type(self).__name__} computed the gradients of a step in a second pass over the lm-head: slower, "
                f"and just as exact, so the training is right. The reason: {why}. `trainer.loss_counts` counts both "
                f"cases (now fused={self.loss_counts.fused}, recomputed={self.loss_counts.recomputed}). This warning "
                "comes once",
                stacklevel=2,
            )
        return loss

    def why_unknown(self) -> str:
        """Why it is not known which loss TRL will make of a batch; empty where it is."""
        if RELEASE < WINDOWS and self.loss_type == "luspo":
            return "loss_type='luspo' counts padding before TRL 1.10, and the fused loss does not"
        if self.top_entropy_quantile < 1.0 and self.accelerator.num_processes > 1:
            return "top_entropy_quantile is of the tokens of all processes, which are not known while tokens are scored"
        if self.loss_type in LOSS_TYPES:
            try:
                self.loss_config()
            except ValueError as error:  # TRL takes any number, such as an infinite clip
                return f"the fused loss refuses an option: {error}"
        return ""

    def predict_loss(self, inputs: dict[str, Any]) -> Prediction:
        """The loss that TRL will make of a batch, up to a common factor."""
        mask = inputs["completion_mask"]
        loss_mask = mask if "tool_mask" not in inputs else mask * inputs["tool_mask"]
        config = self.loss_config()
        items = self._num_items(inputs, config)
        if RELEASE < WINDOWS and items is not None and config.entropy_coef:  # a sum over tokens, divided as the loss
            share = float(loss_mask.sum() / items) * self._accumulation()
            config = replace(config, entropy_coef=config.entropy_coef * share)
        kl, off_policy = config.beta != 0.0, config.off_policy_mask_threshold is not None
        ratio = inputs.get("importance_sampling_ratio")
        rule, corrected = LOSS_TYPES[config.loss_type].rule, self.use_vllm and self.vllm_importance_sampling_correction
        if rule == "gmpo" or not (corrected or rule == "vespo"):
            ratio = None
        return Prediction(
            config,
            inputs["completion_ids"],
            mask,
            LossInputs(
                advantages=inputs["advantages"],
                completion_mask=loss_mask != 0,
                old_per_token_logps=inputs.get("old_per_token_logps"),
                ref_per_token_logps=inputs["ref_per_token_logps"] if kl else None,
                sampling_per_token_logps=inputs.get("sampling_per_token_logps") if off_policy else None,
                importance_sampling_ratio=ratio,
                num_items_in_batch=items,
            ),
            self.loss_counts,
        )

    def loss_config(self) -> GRPOLossConfig:
        """The options of the loss as they stand at this step."""
        kind = LOSS_TYPES.get(self.loss_type)
        if kind is None:
            return GRPOLossConfig(loss_type=self.loss_type)  # an error, which names the known ones
        own = ("epsilon_high", "importance_sampling_level", "max_completion_length", "off_policy_mask_threshold")
        values = {**vars(self.args), "epsilon": self.epsilon_low, **{name: getattr(self, name) for name in own}}
        return GRPOLossConfig(
            loss_type=self.loss_type,
            beta=self.beta,
            use_bias_correction_kl=self.args.use_bias_correction_kl,
            top_entropy_quantile=self.top_entropy_quantile,
            entropy_coef=self._entropy_coef(),
            **{name: values[name] for name in kind.options if name in values},  # TRL has no dual_clip
        )

    def _entropy_coef(self) -> float:
        """The bonus that this step applies, relative to a policy term before it is divided by accumulation steps."""
        if not getattr(self, "_entropy_bonus_enabled", False):
            return 0.0
        coef = self.entropy_coef
        if self.use_adaptive_entropy and self._last_world_entropy > self.args.entropy_target:
            coef = 0.0
        return float(coef / self._accumulation()) if LOSS_TYPES[self.loss_type].average == "items" else float(coef)

    def _accumulation(self) -> float:
        return self.current_gradient_accumulation_steps if self.model.training else 1.0

    def _num_items(self, inputs: dict[str, Any], config: GRPOLossConfig) -> Tensor | None:
        if LOSS_TYPES[config.loss_type].average != "items":
            return None
        items = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        if self.model.training and RELEASE >= WINDOWS:
            items = items * self.current_gradient_accumulation_steps / self.args.steps_per_generation
        return items


class FusedGRPOTrainer(FusedLoss, GRPOTrainer):
    """`trl.GRPOTrainer` with the loss fused: same arguments, losses, metrics and weights, and three more arguments.

    Args:
        impl: engine of the head, see `fused_linear_grpo_loss`.
        max_scratch_bytes: temporary memory of the head.
        exact_truncation: with `top_k`, `top_p` or `min_p`, score tokens by the distribution that they leave, which was
            sampled; TRL scores the one over the whole vocabulary. Log-probs (also old and reference ones), entropies
            and KL are of the truncated distribution. transformers' `generate` must sample, in a single turn, or vLLM
            with `vllm_mode="colocate"`, whose model runner V2 returns sampling masks.

    Raises:
        ValueError: At construction, if `exact_truncation` is not possible: with a vLLM server or one without sampling
            masks, `vllm_tensor_parallel_size` above 1, continuous batching, tools, environments, a `rollout_func`, a
            vision-language model, or another option of `generate` that changes the distribution
            (`repetition_penalty`, a temperature of its own in `generation_kwargs`).
        RuntimeError: At construction, if TRL reads the head's scale or softcap wrongly for this model.
    """
