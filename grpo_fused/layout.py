"""Padded `[B, T]` and packed `[N]` inputs as one flat list of tokens that know their sequence."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """How tokens make up sequences."""

    shape: torch.Size
    """`(B, T)` padded or `(N,)` packed: the shape of every per-token tensor."""
    num_sequences: int
    """B, or S where packed."""
    cu_seqlens: Tensor | None
    """`[S + 1]` int where packed: sequence s owns the tokens `cu_seqlens[s] : cu_seqlens[s + 1]`."""

    @classmethod
    def of(cls, token_ids: Tensor, cu_seqlens: Tensor | None) -> Layout:
        """The layout of validated `token_ids`."""
        num_sequences = token_ids.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        return cls(token_ids.shape, num_sequences, cu_seqlens)

    @classmethod
    def of_tokens(cls, token_ids: Tensor) -> Layout:
        """The layout of ids whose sequences do not matter: [B, T], or [N] each token on its own."""
        return cls(token_ids.shape, token_ids.shape[0], None)

    @property
    def num_tokens(self) -> int:
        """All positions, masked ones included."""
        return self.shape.numel()

    def sequence_ids(self, device: torch.device) -> Tensor:
        """`[N]` int64, ascending: the sequence of each token."""
        tokens = torch.arange(self.num_tokens, device=device)
        if self.cu_seqlens is None:
            return tokens // max(self.shape[1], 1)
        owner = torch.searchsorted(self.cu_seqlens.to(device, torch.int64), tokens, right=True) - 1
        return owner.clamp(0, max(self.num_sequences - 1, 0))  # wrong offsets shall reach the check that names them

    def is_per_token(self, x: Tensor) -> bool:
        """Whether `x` has one value for each token rather than one for each sequence.

        `[B, 1]` is one for each sequence, which at T = 1 is the same. A packed 1-d tensor could be either where N = S;
        one for each sequence is meant (and values are checked: it raises unless that is the same, too).
        """
        if self.cu_seqlens is None and len(self.shape) == 2:
            return x.dim() == 2 and x.shape[1] != 1
        return x.dim() == 1 and x.shape[0] != self.num_sequences

    def spread(self, x: Tensor, sequence_ids: Tensor) -> Tensor:
        """`[N]`: `x` flattened if it is per token, else its value for each sequence (`[B]`, `[B, 1]`) repeated."""
        if self.is_per_token(x):
            return x.reshape(-1)
        return x.reshape(-1).index_select(0, sequence_ids)

    def temperatures(self, temperature: float | Tensor) -> tuple[float, Tensor | None]:
        """(number, None), or (1, one for each token) in the shape of the ids."""
        if not isinstance(temperature, Tensor):
            return float(temperature), None
        temperature = temperature.detach()
        if temperature.dim() == 0:
            return 1.0, temperature.expand(self.shape)
        if len(self.shape) == 2:
            return 1.0, (temperature if temperature.dim() == 2 else temperature.unsqueeze(1)).expand(self.shape)
        if self.cu_seqlens is None:
            return 1.0, temperature
        return 1.0, self.spread(temperature, self.sequence_ids(temperature.device))
