"""The per-token inputs of the objective, besides log-probs, as flat tensors."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from grpo_fused.call.calls import LossInputs
from grpo_fused.call.config import GRPOLossConfig
from grpo_fused.call.layout import Layout, active_tokens, segments
from grpo_fused.ranks.parallel import TokenParallel

LOWEST_LOGP = -1e4
"""The objective's lower bound of log-probs, nats. An impossible token (-inf: its logit is masked) counts as this, so
that the loss stays finite. Its gradient is 0, since no gradient could raise its logit."""


@dataclass(frozen=True)
class TokenBatch:
    """R tokens in ascending order of their sequence; masked ones have neutral values."""

    mask: Tensor
    """[R] bool: active tokens."""
    sequence: Tensor
    """[R] int64, ascending: the sequence of each token."""
    advantages: Tensor
    """[R]"""
    weight: Tensor
    """[R] weight of each token's loss in the sum; 0 where masked."""
    lengths: Tensor
    """[B] active tokens of each sequence of the whole call."""
    total: Tensor
    """0-d: active tokens of the whole call."""
    advantage_per_token: bool
    """Whether the caller gave one advantage for each token."""
    old: Tensor | None
    ref: Tensor | None
    sampling: Tensor | None
    is_ratio: Tensor | None
    offsets_of_call: Tensor | None = None
    """[B + 1] `offsets`, if the batch is all tokens of the call"""
    kl: Tensor | None = None
    """[R] the exact KL, once it is known"""

    @classmethod
    def build(
        cls,
        inputs: LossInputs,
        layout: Layout,
        config: GRPOLossConfig,
        dtype: torch.dtype,
        ranks: TokenParallel | None = None,
    ) -> TokenBatch:
        """Flatten the inputs of a call, of all ranks if there are several; masked positions get neutral values."""
        device = inputs.advantages.device
        sequence = layout.sequence_ids(device)
        mask = active_tokens(inputs.completion_mask, sequence).reshape(-1)

        def active(x: Tensor | None, neutral: float = 0.0) -> Tensor | None:
            return None if x is None else torch.where(mask, x.detach().to(device, dtype).reshape(-1), neutral)

        def logps(x: Tensor | None) -> Tensor | None:
            x = active(x)
            return None if x is None else x.clamp(min=LOWEST_LOGP)

        is_ratio = inputs.importance_sampling_ratio
        is_ratio = None if is_ratio is None else layout.per_token(is_ratio, sequence)

        flat: dict[str, Any] = {
            "mask": mask,
            "sequence": sequence,
            "advantages": active(layout.per_token(inputs.advantages, sequence)),
            "old": logps(inputs.old_per_token_logps),
            "ref": logps(inputs.ref_per_token_logps),
            "sampling": logps(inputs.sampling_per_token_logps),
            "is_ratio": active(is_ratio, 1.0),
        }
        num_sequences = layout.num_sequences
        if ranks is not None:
            flat = _of_all_ranks(flat, ranks)
            num_sequences, mask, sequence = ranks.num_sequences, flat["mask"], flat["sequence"]
        width = 0 if layout.cu_seqlens is not None or ranks is not None else layout.num_tokens // max(num_sequences, 1)
        if width > 0:
            offsets = torch.arange(0, layout.num_tokens + 1, width, device=device)
            lengths = mask.view(num_sequences, width).sum(1, dtype=torch.float64)
        else:
            offsets = _offsets(sequence, num_sequences)
            lengths = segments(mask.to(torch.float64), "sum", offsets)
        total = lengths.sum()
        weight = _aggregation_weight(mask, sequence, lengths, total, inputs.num_items_in_batch, config)
        return cls(
            **flat,
            weight=weight.to(dtype),
            lengths=lengths.to(dtype),
            total=total.to(dtype),
            offsets_of_call=offsets,
            advantage_per_token=layout.is_per_token(inputs.advantages) if ranks is None else ranks.advantage_per_token,
        )

    def select(self, rows: Tensor | slice) -> TokenBatch:
        """The tokens at `rows` ([K] int64, ascending); lengths and weights stay those of the whole call."""
        values = {f.name: getattr(self, f.name) for f in fields(self)} | {"offsets_of_call": None}
        for name in ("mask", "sequence", "advantages", "weight", "old", "ref", "sampling", "is_ratio", "kl"):
            if values[name] is not None:
                values[name] = values[name][rows]
        return TokenBatch(**values)

    @property
    def num_sequences(self) -> int:
        """B"""
        return self.lengths.shape[0]

    @cached_property
    def offsets(self) -> Tensor:
        """[B + 1] int64: sequence s owns the tokens `offsets[s] : offsets[s + 1]` of this batch."""
        known = self.offsets_of_call
        return _offsets(self.sequence, self.num_sequences) if known is None else known

    def sequence_sum(self, x: Tensor) -> Tensor:
        """[B]: sum of per-token `x` ([R], 0 where it does not count) over each sequence.

        Summed in fp64 in a fixed order: the same in each run (`index_add` is not, on CUDA), with the accuracy of fp32.
        """
        return segments(x.to(torch.float64), "sum", self.offsets).to(x.dtype)

    def of_sequence(self, x: Tensor) -> Tensor:
        """[R]: the value of per-sequence `x` ([B]) at each token."""
        return x.index_select(0, self.sequence)

    def may_have_gradient(self, config: GRPOLossConfig) -> Tensor:
        """[R] bool: False where the inputs alone show that a token's coefficients are exactly 0."""
        if config.beta != 0.0 or config.entropy_coef != 0.0:
            return self.mask
        matters = self.mask & (self.advantages != 0)
        if self.is_ratio is not None and config.kind.takes_ratio == "spread":
            matters = matters & (self.is_ratio != 0)
        if config.needs_sequence:  # all tokens of a sequence change its ratio: keep it whole
            matters = self.mask & (self.of_sequence(self.sequence_sum(matters.to(torch.float32))) > 0)
        return matters


def _of_all_ranks(flat: dict[str, Any], ranks: TokenParallel) -> dict[str, Any]:
    """The tensors of all ranks in the order of their sequences, in one collective."""
    tensors = {name: x for name, x in flat.items() if x is not None}
    tensors["sequence"] = flat["sequence"] + ranks.first_sequence
    # fp64 represents sequence numbers and fp32 values exactly
    table = ranks.gather(torch.stack([x.to(torch.float64) for x in tensors.values()], dim=1))
    ranks.arrange(table[:, list(tensors).index("sequence")].to(torch.int64))
    if ranks.order is not None:
        table = table[ranks.order]
    every = {name: table[:, k].to(x.dtype) for k, (name, x) in enumerate(tensors.items())}
    return {name: every.get(name) for name in flat}


def _offsets(sequence: Tensor, num_sequences: int) -> Tensor:
    return torch.searchsorted(sequence, torch.arange(num_sequences + 1, device=sequence.device))


def _aggregation_weight(
    mask: Tensor,
    sequence: Tensor,
    lengths: Tensor,
    total: Tensor,
    num_items_in_batch: Tensor | None,
    config: GRPOLossConfig,
) -> Tensor:
    """[R] fp64: weights w of each loss type, such that the policy loss is the sum of w * l over tokens.

    A sequence without tokens has an infinite weight, which no token gets.
    """
    num_sequences, average = max(lengths.shape[0], 1), config.kind.average
    if average == "sequences":
        weight = (lengths * num_sequences).reciprocal().index_select(0, sequence)
    elif average == "items" and num_items_in_batch is not None:
        weight = num_items_in_batch.to(total).reciprocal()
    elif average in ("items", "tokens"):
        weight = total.reciprocal()
    else:
        assert average in ("length", "sum")
        weight = torch.full_like(total, 1.0 / (num_sequences * (config.max_completion_length or 1)))
    return torch.where(mask, weight, 0.0)
