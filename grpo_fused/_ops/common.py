"""What the operators share: the context they run in, what the engines call tokens, and empty results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from grpo_fused.engines.base import Tokens
from grpo_fused.engines.head import ieee_products
from grpo_fused.engines.rows import Statistics
from grpo_fused.layout import Layout
from grpo_fused.parallel import VocabParallel


@contextmanager
def plain(device: torch.device) -> Iterator[None]:
    """No autograd, no autocast (inputs are cast by hand), IEEE products."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False), ieee_products():
        yield


def tokens_of(
    hidden: Tensor,
    ids: Tensor,
    mask: Tensor | None,
    temperatures: Tensor | None,
    temperature: float,
    layout: Layout,
    vocab: VocabParallel | None = None,
) -> Tokens:
    """The positions of a call; `hidden` are its logits where there is no head, `temperatures` as the caller gave."""
    flat = ids.reshape(-1).to(torch.int64)
    return Tokens(
        hidden_states=_flat(hidden),
        ids=flat if vocab is None else flat - vocab.first,
        mask=torch.ones_like(ids, dtype=torch.bool).view(-1) if mask is None else mask.reshape(-1) != 0,
        temperature=temperature if temperatures is None else layout.per_token(temperatures),
        vocab=vocab,
    )


def _flat(hidden: Tensor) -> Tensor:
    """[N, H] if that is a view; a copy of rows that are masked would be waste, so it stays [B, T, H] otherwise."""
    try:
        return hidden.view(-1, hidden.shape[-1])
    except RuntimeError:
        return hidden


def unneeded(like: Tensor) -> Tensor:
    """The empty tensor that stands for a result that nobody needs."""
    return like.new_empty(0)


def scores_like(token_ids: Tensor, scores: Statistics) -> tuple[Tensor, Tensor]:
    """(logps, entropies or empty) in the shape of the ids."""
    shape = token_ids.shape
    return scores.logp.view(shape), unneeded(scores.logp) if scores.entropy is None else scores.entropy.view(shape)


def fake_scores(like: Tensor, token_ids: Tensor, dtype: torch.dtype, with_entropy: bool) -> tuple[Tensor, Tensor]:
    """Shapes of `scores_like`."""
    logps = like.new_empty(token_ids.shape, dtype=dtype)
    return logps, torch.empty_like(logps) if with_entropy else unneeded(logps)
