"""`LigerFusedLinearGRPOLoss`, from hidden states and the lm-head weight."""

from __future__ import annotations

import warnings
from dataclasses import KW_ONLY, dataclass, replace

import torch
from torch import Tensor

from grpo_fused.api.fused_linear import fused_linear_grpo_loss, fused_linear_logprobs
from grpo_fused.call import validation as check
from grpo_fused.call.calls import LossInputs
from grpo_fused.call.config import GRPOLossConfig
from grpo_fused.engines import Impl
from grpo_fused.integrations.liger import options


@dataclass(eq=False, repr=False)
class FusedLinearGRPOLoss(torch.nn.Module):
    """`liger_kernel.chunked_loss.LigerFusedLinearGRPOLoss` (0.8.5), computed by `fused_linear_grpo_loss`.

    An option that the loss type does not read is ignored, as in Liger; a value other than its default gets a warning,
    once in a process (not `max_completion_length`: trainers always pass it). Options are attributes, read at
    each call.

    Args:
        beta: Weight of the KL penalty, >= 0. Without a reference model it has no effect, as in Liger.
        compiled: No effect: nothing here needs `torch.compile`.
        use_ref_model: Whether `forward` takes a reference, as log-probs or as hidden states and a head.
        chunk_size: No effect: memory does not depend on the batch (`fused_linear_grpo_loss(max_scratch_bytes=)`). >= 1.
        epsilon_low: Lower clip distance, > 0.
        epsilon_high: Upper clip distance, > 0; for cispo the bound on the ratio itself.
        loss_type: `grpo`, `bnpo`, `dr_grpo`, `dapo`, `cispo`, `sapo`, `luspo` or `vespo`: see `GRPOLossConfig`.
        max_completion_length: Tokens; required and read by dr_grpo.
        importance_sampling_level: `token` or `sequence`, with every loss type.
        sapo_temperature_pos: SAPO's gate temperature where A > 0, > 0.
        sapo_temperature_neg: SAPO's gate temperature elsewhere, > 0.
        temperature: Divides the logits, > 0.
        delta: Upper bound on the ratio before clipping, > 0 (grpo, bnpo, dr_grpo, dapo, luspo).
        use_bias_correction_kl: Multiply the KL estimate by the importance ratio.
        vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: VESPO's gamma shapes and rates.
        impl: The engine, as in `fused_linear_grpo_loss`; not in Liger.

    Raises:
        ValueError: An option is unknown, out of range or missing.
        TypeError: An option has the wrong type.

    Equivalent with Liger's names::

        fused_linear_grpo_loss(_input, lin_weight, selected_token_ids, advantages, attention_mask, lm_head_bias=bias,
                               config=GRPOLossConfig(beta=0.04, use_bias_correction_kl=False), ...).loss

    Source: liger-kernel 0.8.5, `liger_kernel/chunked_loss/grpo_loss.py`, for the interface; the objectives are those
    of `GRPOLossConfig`.
    """

    beta: float = 0.04
    compiled: bool = True
    use_ref_model: bool = True
    chunk_size: int = 1
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    loss_type: str = "dapo"
    max_completion_length: int | None = None
    importance_sampling_level: str = "token"
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    temperature: float = 1.0
    delta: float | None = None
    use_bias_correction_kl: bool = False
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    _: KW_ONLY
    impl: Impl = "auto"

    def __post_init__(self) -> None:
        super().__init__()
        if self.chunk_size < 1:
            raise ValueError(f"chunk_size must be >= 1; got {self.chunk_size}")
        # for all loss types, as in Liger
        for name in ("temperature", "sapo_temperature_pos", "sapo_temperature_neg", "delta"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be > 0; got {value}")
        self._config()

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: float | Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Loss and metrics.

        Args:
            _input: `[B, T, H]`: the state that predicts each token; fp32, bf16, fp16 or fp64.
            lin_weight: `[V, H]`.
            selected_token_ids: `[B, T]` integers in `[0, V)` where active.
            attention_mask: `[B, T]`, bool or 0/1.
            advantages: `[B]` or `[B, T]`.
            bias: `[V]`.
            ref_per_token_logps: `[B, T]`, nats; needed (or `ref_input`) if beta is not 0.
            old_per_token_logps: `[B, T]`, nats; None means on-policy.
            ref_input: `[B, T, H']`: the reference model's states, read if `ref_per_token_logps` is None.
            ref_weight: `[V, H']`, its head, needed with `ref_input`.
            ref_bias: `[V]`, its bias.
            vllm_is_ratio: `[B, T]`, `[B, 1]` or `[B]`, >= 0; see `importance_sampling_correction`.
            num_items_in_batch: The divisor of dapo, cispo and vespo, over all processes: it is divided by their number
                and counts as at least 1. The other loss types do not read it. By default the active tokens of the call,
                averaged over processes (a collective call) if `torch.distributed` is initialised.

        Returns:
            `(loss, metrics)`: a 0-d fp32 loss (fp64 for fp64 inputs), differentiable in `_input`, `lin_weight` and
            `bias`, and a tuple of 0-d metrics: the KL if beta is not 0, then the share of active tokens that are
            clipped (before `delta`).

        Raises:
            ValueError: Shapes or ranges that are wrong; no reference although one is needed.
            TypeError: A wrong type or dtype.
        """
        config = self._config()
        if not self.use_ref_model:
            for name, value in (("ref_per_token_logps", ref_per_token_logps), ("ref_input", ref_input)):
                if value is not None:
                    options.warn_ignored(name, "use_ref_model=False does not read it")
            ref_per_token_logps = ref_input = None
        check.check_tokens(selected_token_ids, "selected_token_ids", check.INTEGER, None)
        check.check_mask(attention_mask, selected_token_ids, "attention_mask")
        if ref_per_token_logps is not None and ref_input is not None:
            warnings.warn("both ref_per_token_logps and ref_input were given; ref_input is not read", stacklevel=2)
        ref = ref_per_token_logps if config.beta != 0.0 else None
        if ref is None and config.beta != 0.0:
            if ref_input is None:
                raise ValueError(
                    f"beta={config.beta} and use_ref_model=True need ref_per_token_logps [B, T], or ref_input and "
                    "ref_weight; got None"
                )
            if ref_weight is None:
                raise ValueError("ref_input needs ref_weight [V, H]; got None")
            with torch.no_grad():
                ref = fused_linear_logprobs(
                    ref_input, ref_weight, selected_token_ids, attention_mask, lm_head_bias=ref_bias,
                    temperature=self.temperature, impl=self.impl,
                ).logps  # fmt: skip
        items = options.num_items(num_items_in_batch, attention_mask, config)
        ratio = options.rollout_ratio(vllm_is_ratio, attention_mask, config)
        out = fused_linear_grpo_loss(
            _input, lin_weight, selected_token_ids, advantages, attention_mask, lm_head_bias=bias,
            old_per_token_logps=old_per_token_logps, ref_per_token_logps=ref,
            importance_sampling_ratio=ratio, num_items_in_batch=items, temperature=self.temperature, config=config,
            impl=self.impl,
            with_metrics=ratio is not None,  # with a ratio of 0, tokens that count as clipped would not be scored
        )  # fmt: skip
        inputs = LossInputs(advantages, attention_mask, old_per_token_logps, ref)
        metrics = options.liger_metrics(out.per_token_logps, inputs, config)
        if self.beta != 0.0 and not self.use_ref_model:
            metrics = [torch.zeros_like(metrics[0]), *metrics]
        return out.loss, tuple(metrics)

    def _config(self) -> GRPOLossConfig:
        """The configuration that the attributes describe."""
        config = options.as_config({name: getattr(self, name) for name in _DEFAULTS}, _DEFAULTS)
        return config if self.use_ref_model else replace(config, beta=0.0)


_DEFAULTS = options.defaults_of(FusedLinearGRPOLoss)
