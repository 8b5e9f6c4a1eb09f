"""torchtitan on our kernels: its loss wrapper, which has the head and the loss, in one pass over the head.

    from grpo_fused.integrations.torchtitan import FusedLossWrapper as ChunkedLossWrapper

    loss = ChunkedLossWrapper.Config(loss_fn=GRPOLoss.Config())  # in the config of a trainer

Releases of torchtitan that are known: see `SUPPORTED`. Importing this with another one raises `ImportError`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from grpo_fused import CandidateSets, fused_linear_logprobs, fused_linear_objective
from grpo_fused.call.outputs import ObjectiveOutput
from grpo_fused.heads.patches import Patches
from grpo_fused.integrations.releases import check_release
from grpo_fused.objective.custom import Objective
from grpo_fused.objectives import score_centered_reinforce, score_centered_tis
from grpo_fused.objectives.alternatives import SMALLEST_TAIL

SUPPORTED = {
    "0.2": "the same in development versions after 0.3.0, which call themselves 0.2.2; release 0.2.2 does not have it",
    "0.3": "torchtitan.components.loss.ChunkedLossWrapper",
}
"""Release (all patch releases of it) to what of it is replaced. A checkout need not be installed."""

check_release("torchtitan", SUPPORTED, optional=True)

try:
    import spmd_types as spmd
    from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper
    from torchtitan.distributed.spmd_types import spmd_mesh_size
except ImportError as error:  # the release 0.2.2
    raise ImportError(f"grpo_fused needs torchtitan 0.3, or a development version after it: {error}") from error

RL = ("torchtitan.experiments.rl", "torchtitan.rl")
"""Where the code for RL is: in 0.3.0, and in later development versions."""
LOSSES = (
    "torchtitan.components.loss.CrossEntropyLoss",
    *(f"{rl}.losses.{loss}" for rl in RL for loss in ("dapo.DAPOLoss", "grpo.GRPOLoss")),
    "torchtitan.rl.losses.score_centering.ScoreCenteringLoss",
)
"""The inner losses that can be computed from log-probs."""
CAST_HEADS = tuple(f"{rl}.models.cast_linear.CastLinear.forward" for rl in RL)
"""Heads with logits in fp32, as ours are."""
MAX_LOG_RATIO = 10.0
"""torchtitan's bound on the log-ratio, beyond which a token has no gradient."""


class FusedLossWrapper(ChunkedLossWrapper):  # type: ignore[misc]
    """`torchtitan.components.loss.ChunkedLossWrapper` with three head products and no chunk of logits.

    It has the configuration, calls, losses and metrics of torchtitan's. Log-probs and entropies are fp32, where
    torchtitan rounds the logits of a bf16 head. The gradient of the head's weight is computed by `loss.backward()`,
    which torchtitan's wrapper does in the call. So the loss can be scaled. FSDP2 heads run with their hooks. A graph
    that `make_fx` traces, also with symbolic shapes, has four head products: the operator in it is that of log-probs.

    Args:
        config: `Config(loss_fn=..., num_chunks=...)`: `loss_fn` is the config of one of `LOSSES`; `num_chunks` has no
            effect, and need not divide the length of a sequence.
        compile_config: No effect; a warning if the loss should be compiled.

    Raises:
        TypeError: An inner loss that is not among `LOSSES`, a subclass included: it may need logits. A head that is
            more than a matrix product (a soft cap, an adapter, quantisation).
        ValueError: The head or the hidden states are sharded by tensor parallelism; no head is set.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):  # type: ignore[misc]
        """The fields of torchtitan's."""

    def __init__(self, config: Any, *, compile_config: Any = None) -> None:
        super().__init__(config)
        name = f"{type(self.loss_fn).__module__}.{type(self.loss_fn).__qualname__}"
        if name not in LOSSES:
            raise TypeError(f"loss_fn must be the config of one of {', '.join(LOSSES)}; got that of {name}")
        if compile_config is not None and compile_config.enable and "loss" in compile_config.components:
            warnings.warn("FusedLossWrapper does not compile its loss; compile.components has 'loss'", stacklevel=2)

    def set_lm_head(self, lm_head: nn.Module) -> None:
        """Set the output head, a linear layer `[V, H]` with or without a bias."""
        forward = type(lm_head).forward
        if forward is not nn.Linear.forward and f"{forward.__module__}.{forward.__qualname__}" not in CAST_HEADS:
            raise TypeError(
                f"lm_head must be a linear layer, and nothing more; the forward of {type(lm_head).__name__} is "
                f"{forward.__module__}.{forward.__qualname__}"
            )
        super().set_lm_head(lm_head)

    @spmd.no_typecheck()  # type: ignore[untyped-decorator]  # `debug.spmd_typechecking` does not know our operators
    def __call__(
        self, pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | float | None = None, **loss_inputs: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and torchtitan's metrics.

        Args:
            pred: `[B, L, H]` hidden states, of a model that skips its head. Development versions after 0.3.0 fold the
                batch dimension into `[T, H]`; then all that is `[B, L]` here is `[T]`.
            labels: `[B, L]` int64, the token that each state predicts; -100 where cross-entropy ignores it.
            global_valid_tokens: What the loss is divided by, default 1; the policy losses take at least 1.
            loss_inputs: For the policy losses `generator_logprobs` and `advantages` `[B, L]`, `loss_mask` `[B, L]`
                bool, and `temperature` `[B, L]` where torchtitan passes it. For score centering also
                `generator_topk_token_ids` and `generator_topk_logprobs` `[B, L, K]`.

        Returns:
            The 0-d loss in fp32, differentiable in hidden states and head, and 0-d metrics.
        """
        if self.lm_head is None:
            raise ValueError("set_lm_head must be called before the loss; no head is set")
        if type(self.loss_fn).__qualname__ == "CrossEntropyLoss":
            divisor = 1 if global_valid_tokens is None else global_valid_tokens
            out = self._through_head(pred, labels, lambda logps, entropies: -logps / divisor, labels != IGNORE_INDEX)
            return out.loss, {}
        if type(self.loss_fn).__qualname__ == "ScoreCenteringLoss":
            return self._score_centering(pred, labels, global_valid_tokens, **loss_inputs)
        return self._policy_loss(pred, labels, global_valid_tokens, **loss_inputs)

    def _policy_loss(
        self,
        hidden: Tensor,
        labels: Tensor,
        valid_tokens: Tensor | float | None,
        *,
        generator_logprobs: Tensor,
        advantages: Tensor,
        loss_mask: Tensor,
        temperature: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        divisor = 1 if valid_tokens is None else max(valid_tokens, 1)
        low, high = 1 - self.loss_fn.ratio_clip_low, 1 + self.loss_fn.ratio_clip_high
        mask = loss_mask & generator_logprobs.isfinite()

        def objective(logps: Tensor, entropies: Tensor, generator_logprobs: Tensor, advantages: Tensor) -> Tensor:
            ratio = _ratio(logps, generator_logprobs)
            return -torch.min(ratio * advantages, ratio.clamp(low, high) * advantages) / divisor

        old = generator_logprobs.masked_fill(~mask, 0.0).float()
        inputs = {"generator_logprobs": old, "advantages": advantages.float()}
        out = self._through_head(
            hidden, labels, objective, mask, inputs=inputs, with_entropy=True, **_sampled_at(temperature)
        )
        ratio = _ratio(out.per_token_logps, old)
        clipped = ((ratio - ratio.clamp(low, high)).abs() > 1e-6).float()
        return out.loss, _metrics(out, old, mask, divisor) | {
            "loss/ratio_clipped_frac": (clipped * mask).sum() / divisor
        }

    def _score_centering(
        self,
        hidden: Tensor,
        labels: Tensor,
        valid_tokens: Tensor | float | None,
        *,
        generator_logprobs: Tensor,
        advantages: Tensor,
        loss_mask: Tensor,
        generator_topk_token_ids: Tensor,
        generator_topk_logprobs: Tensor,
        temperature: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        divisor, cap = 1 if valid_tokens is None else max(valid_tokens, 1), self.loss_fn.max_ratio
        centered = score_centered_reinforce("top_k") if cap is None else score_centered_tis("top_k", cap)
        mask, K = loss_mask & generator_logprobs.isfinite(), generator_topk_token_ids.shape[-1]
        old = generator_logprobs.masked_fill(~mask, 0.0).float()
        sums: dict[str, Tensor | float] = dict.fromkeys(
            ("generator_head_mass", "trainer_head_mass", "coefficient_l1"), 0.0
        )

        def objective(logps: Tensor, entropies: Tensor, *, alternative_logps: Tensor, **inputs: Any) -> Tensor:
            p, q = (x.detach().view(-1, K).exp() for x in (alternative_logps, inputs["sampling_alternative_logps"]))
            p_head, q_head = p.sum(-1), q.sum(-1)
            rho = (1 - q_head).clamp(min=SMALLEST_TAIL) / (1 - p_head).clamp(min=SMALLEST_TAIL)
            weighted, alpha = (q, rho) if cap is None else (torch.minimum(p, cap * q), (cap * rho).clamp(max=1.0))
            parts = {"generator_head_mass": q_head, "trainer_head_mass": p_head}
            for name, x in {**parts, "coefficient_l1": (weighted - alpha.unsqueeze(-1) * p).abs()}.items():
                sums[name] = sums[name] + x.sum()
            return centered(logps, entropies, alternative_logps=alternative_logps, **inputs)

        places = torch.arange(0, labels.numel() * K + 1, K, device=labels.device)
        out = self._through_head(
            hidden, labels, objective, mask, with_entropy=True, **_sampled_at(temperature),
            inputs={
                "advantages": advantages.float(), "sampling_per_token_logps": old,
                "weights": torch.ones_like(old) / divisor,
            },
            alternatives=CandidateSets(generator_topk_token_ids.reshape(-1), places),
            alternative_inputs={
                "sampling_alternative_logps": generator_topk_logprobs.float().reshape(-1)
            },
        )  # fmt: skip
        metrics = _metrics(out, old, mask, divisor)
        metrics |= {f"score_centering/{name}/mean": torch.as_tensor(x) / divisor for name, x in sums.items()}
        if cap is not None:
            truncated = (_ratio(out.per_token_logps, old) > cap) & mask
            metrics["loss/ratio_truncated_frac"] = truncated.float().sum() / divisor
        return out.loss, metrics

    def _through_head(
        self,
        hidden: Tensor,
        labels: Tensor,
        objective: Objective,
        mask: Tensor,
        **options: Any,
    ) -> ObjectiveOutput:
        """`fused_linear_objective` in place of the head's forward: FSDP2's hooks gather its weight as always."""
        head: Any = self.lm_head
        function = _traceable_objective if get_proxy_mode() is not None else fused_linear_objective

        def forward(hidden: Tensor) -> ObjectiveOutput:
            if isinstance(hidden, DTensor) or isinstance(head.weight, DTensor) or spmd_mesh_size("tp") > 1:
                raise ValueError(
                    "FusedLossWrapper needs whole hidden states and a whole head; got ones that are sharded: set "
                    "parallelism.tensor_parallel_degree = 1, and leave parallelism.spmd_backend as it is"
                )
            return function(hidden, head.weight, labels, objective, mask, lm_head_bias=head.bias, **options)

        sharded = isinstance(head, FSDPModule)
        if sharded:
            # If the head's hooks gather it, FSDP keeps the result for a module after it, and there is none: that is a
            # second copy of the weight, and an event for which the capture of a CUDA graph cannot wait.
            head.unshard()
        with Patches((head, "forward", forward)):
            out: ObjectiveOutput = head(hidden)
        if sharded and not out.loss.requires_grad:  # no backward does it: later steps would have these weights
            head.set_reshard_after_forward(True)  # as torchtitan's wrapper: reshard() keeps the weights if it is False
            head.reshard()
        return out


def _ratio(logps: Tensor, generator_logprobs: Tensor) -> Tensor:
    return (logps - generator_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _sampled_at(temperature: Tensor | None) -> dict[str, Tensor]:
    """The option of a temperature for each token."""
    return {} if temperature is None else {"temperature": temperature.float()}


def _metrics(out: ObjectiveOutput, old: Tensor, mask: Tensor, divisor: Tensor | float) -> dict[str, Tensor]:
    """Those that all policy losses have."""
    assert out.entropies is not None
    difference = (out.per_token_logps - old) * mask
    per_token = {
        "loss/ratio_mean": _ratio(out.per_token_logps, old),
        "bit_wise/logprob_diff/mean": difference,
        "bit_wise/ratio_tokens_different/mean": (difference.abs() > 1e-6).float(),
        "trainer/entropy/mean": out.entropies,
    }
    means = {name: (values * mask).sum() / divisor for name, values in per_token.items()}
    return {"loss/mean": out.loss.detach(), **means, "bit_wise/logprob_diff/max": difference.abs().max()}


def _traceable_objective(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    objective: Objective,
    mask: Tensor,
    *,
    inputs: Mapping[str, Tensor] | None = None,
    with_entropy: bool = False,
    alternatives: CandidateSets | None = None,
    **options: Any,
) -> ObjectiveOutput:
    """`fused_linear_objective` of all positions, whose shapes do not depend on the mask."""
    if alternatives is not None:
        raise ValueError("ScoreCenteringLoss cannot be traced by make_fx in FusedLossWrapper: its sets are ragged")
    logps, entropies, _ = fused_linear_logprobs(hidden, weight, labels, mask, with_entropy=with_entropy, **options)
    active_inputs = {name: x.masked_fill(~mask, 0.0) for name, x in (inputs or {}).items()}
    loss = torch.where(mask, objective(logps, entropies, **active_inputs), 0.0).sum()
    return ObjectiveOutput(loss, logps.detach(), None if entropies is None else entropies.detach())
