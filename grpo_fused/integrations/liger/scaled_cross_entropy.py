"""`LigerFusedLinearScaledCrossEntropyFunction`: the negative log-prob of each token, and its entropy."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fused.api.fused_linear import fused_linear_logprobs
from grpo_fused.call import validation as check
from grpo_fused.call.candidates import CandidateSets
from grpo_fused.call.options import check_flag, check_integer


class FusedLinearScaledCrossEntropyFunction:
    """`liger_kernel.ops.LigerFusedLinearScaledCrossEntropyFunction` (0.8.5), computed by `fused_linear_logprobs`."""

    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        temperature: float = 1.0,
        ignore_index: int = -100,
        m_tiles_per_cluster: int = 1,
        return_entropy: bool = False,
        selected_token_ids: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Negative log-probs, and entropies and log-probs of further tokens if asked for.

        Args:
            _input: `[M, H]`: the state that predicts each token.
            weight: `[V, H]`.
            target: `[M]` integers in `[0, V)`, or `ignore_index`.
            temperature: Divides the logits, > 0.
            ignore_index: Tokens with this target give 0 everywhere, without a gradient.
            m_tiles_per_cluster: At least 1; no effect: the engines have tiles of their own.
            return_entropy: Also return entropies.
            selected_token_ids: `[K]` int64 in `[0, V)`, any order, repeated or not: also return the log-probs of these
                tokens at each position.

        Returns:
            Negative log-probs `[M]`; or a tuple of them, the entropies `[M]` if asked for, and the log-probs `[M, K]`
            of `selected_token_ids` if given. In nats, fp32 (fp64 for fp64 inputs), all differentiable. Liger rounds the
            logits and the entropies to the dtype of the input.

        Raises:
            ValueError: Shapes or ranges that are wrong.
            TypeError: A wrong type or dtype.

        Source: liger-kernel 0.8.5, `liger_kernel/ops/fused_linear_scaled_cross_entropy.py`, for the interface.
        """
        check_integer(m_tiles_per_cluster, "m_tiles_per_cluster", least=1)
        check_flag(return_entropy, "return_entropy")
        check.check_token_ids(target, "target")
        active = target != ignore_index
        sets, places, count = None, None, 0
        if selected_token_ids is not None:
            sets, places, count = _same_for_all(selected_token_ids, len(target), weight.shape[0])
        out = fused_linear_logprobs(
            _input, weight, target, active, alternatives=sets, temperature=temperature, with_entropy=return_entropy
        )
        results = [-out.logps]
        if out.entropies is not None:
            results.append(out.entropies)
        if out.alternative_logps is not None:
            results.append(out.alternative_logps.view(len(target), count)[:, places])
        return results[0] if len(results) == 1 else tuple(results)


def _same_for_all(ids: Tensor, num_tokens: int, vocab_size: int) -> tuple[CandidateSets, Tensor, int]:
    """A set of the ids for each token, the places of the ids in it, and its size."""
    if not isinstance(ids, Tensor) or ids.dim() != 1 or ids.dtype != torch.int64:
        got = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"selected_token_ids must be int64 [K]; got {got}")
    if ((ids < 0) | (ids >= vocab_size)).any():
        raise ValueError(f"selected_token_ids must be in [0, {vocab_size}); got {ids.min()} to {ids.max()}")
    unique, places = ids.unique(return_inverse=True)
    offsets = torch.arange(num_tokens + 1, device=ids.device) * len(unique)
    return CandidateSets(unique.repeat(num_tokens), offsets), places, len(unique)
