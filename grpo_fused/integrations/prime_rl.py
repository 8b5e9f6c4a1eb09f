"""prime-rl on our kernels: its fused output layers, with the same constructor, arguments and results.

At the end of `prime_rl.trainer.models.layers.lm_head` (and, for Gemma, of `lm_head_gemma` there):

    from grpo_fused.integrations.prime_rl import FusedOutputLinear
    from grpo_fused.integrations.prime_rl import GemmaFusedOutputLinear

Releases of prime-rl that are known: see `SUPPORTED`. Importing this beside another one raises `ImportError`. prime-rl
need not be installed.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from grpo_fused import CandidateSets, fused_linear_logprobs
from grpo_fused.integrations.releases import check_release

SUPPORTED = dict.fromkeys(("0.8", "0.9"), "FusedOutputLinear, GemmaFusedOutputLinear")
"""Release (all patch releases of it) to what of it is replaced."""

check_release("prime-rl", SUPPORTED, optional=True)


class InputError(ValueError, AssertionError):
    """Labels or temperatures are missing or have another shape; prime-rl's own layers assert that they are there."""


class FusedOutputLinear(torch.nn.Linear):
    """prime-rl's `FusedOutputLinear` (0.8): an output layer that returns log-probs and entropies, not logits.

    Both are fp32 and differentiable; entropies of prime-rl's releases have no gradient, and its products round the
    logits of a bf16 head.

    Args:
        in_features: H.
        out_features: V.
        chunk_size: No effect: the engines choose their chunks.
    """

    softcap: float | None = None

    def __init__(self, in_features: int, out_features: int, chunk_size: int) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.chunk_size = chunk_size
        self.return_mask_logprobs = False
        """whether a call with a mask returns the log-probs of all its tokens; prime-rl sets it for score centering"""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        labels: Tensor | None = None,
        temperature: Tensor | None = None,
        sampling_mask: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Log-probs of the labels, and entropies.

        As in prime-rl, a mask changes the log-probs only: entropies are those of the whole vocabulary.

        Args:
            hidden_states: `[B, S, H]`, the state that predicts each label.
            labels: `[B, S]` integers in `[0, V)`.
            temperature: `[B, S]`, > 0: what the logits of each token are divided by, after the cap.
            sampling_mask: `[B, S, K]` integers, of prime-rl after 0.9.0: the tokens that the sampler kept, over which
                the log-prob is renormalised; -1 is padding. A set that lacks its label, or is empty, has no effect.

        Returns:
            `{"logprobs": ..., "entropy": ...}`, `[B, S]` fp32 in nats. With `return_mask_logprobs` and a mask also
            `"mask_logprobs"`, `[B, S, K]` over the mask, differentiable; 0 at padding and where the mask has no effect.

        Raises:
            InputError: Labels or temperatures are missing, or have another shape.
            ValueError: They have another range.
            TypeError: A wrong dtype.
        """
        shape = tuple(hidden_states.shape[:2])
        for name, value in (("labels", labels), ("temperature", temperature)):
            if not isinstance(value, Tensor) or value.shape != shape:
                got = tuple(value.shape) if isinstance(value, Tensor) else value
                raise InputError(f"{type(self).__name__} requires {name} of shape [B, S] = {shape}; got {got}")
        assert labels is not None
        assert temperature is not None
        scored = partial(
            fused_linear_logprobs, hidden_states, self.weight, labels, temperature=temperature, softcap=self.softcap
        )
        out = scored(with_entropy=True)
        assert out.entropies is not None
        if sampling_mask is None:
            return {"logprobs": out.logps, "entropy": out.entropies}
        if sampling_mask.shape[:-1] != shape:
            raise InputError(
                f"{type(self).__name__} requires sampling_mask of shape [B, S, K], with [B, S] = {shape}; got "
                f"{tuple(sampling_mask.shape)}"
            )
        usable = (sampling_mask == labels.unsqueeze(-1)).any(-1, keepdim=True)
        kept = sampling_mask.masked_fill(~usable, -1)
        candidates = CandidateSets.from_padded(kept)
        replayed = scored(candidates=candidates, alternatives=candidates if self.return_mask_logprobs else None)
        result = {"logprobs": replayed.logps, "entropy": out.entropies}
        if replayed.alternative_logps is not None:
            of_mask = torch.zeros(kept.shape, device=kept.device)
            result["mask_logprobs"] = of_mask.masked_scatter(kept != -1, replayed.alternative_logps.float())
        return result


class GemmaFusedOutputLinear(FusedOutputLinear):
    """prime-rl's `GemmaFusedOutputLinear` (0.8): the same with logits `softcap * tanh(logits / softcap)`."""

    def __init__(self, in_features: int, out_features: int, chunk_size: int, softcap: float) -> None:
        super().__init__(in_features, out_features, chunk_size)
        self.softcap = softcap
