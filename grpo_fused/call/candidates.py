"""Candidate sets: the tokens that a truncated distribution (top-k, top-p, min-p) kept at each position.

The log-prob of a token that was sampled from a truncated distribution is the one renormalised over its set. It needs
the logits of the set alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_fused.call.layout import active_tokens, offsets_of, values_are_checked
from grpo_fused.call.options import check_integer, check_number


@dataclass(frozen=True, eq=False)
class CandidateSets:
    """The candidate sets of N positions, one after the other; an empty set means the whole vocabulary.

    Args:
        ids: `[K]` int32 or int64, token ids; different ones within a set, in any order.
        offsets: `[N + 1]` int64: position n owns `ids[offsets[n] : offsets[n + 1]]`.

    `len()` is N. Positions are those of the flat `completion_ids` (`[B, T]` row by row, or packed `[N]`), masked ones
    included; the sets of masked positions are never read.

    Raises:
        TypeError: Not tensors, or of another dtype.
        ValueError: Not one-dimensional, no offset, or on two devices.
    """

    ids: Tensor
    offsets: Tensor

    def __post_init__(self) -> None:
        for name, dtypes in (("ids", (torch.int32, torch.int64)), ("offsets", (torch.int64,))):
            x = getattr(self, name)
            if not isinstance(x, Tensor) or x.dtype not in dtypes:
                came = x.dtype if isinstance(x, Tensor) else type(x).__name__
                raise TypeError(
                    f"{name} of CandidateSets must be a tensor of {' or '.join(map(str, dtypes))}; got {came}"
                )
            if x.dim() != 1:
                raise ValueError(f"{name} of CandidateSets must be one-dimensional; got shape {tuple(x.shape)}")
        if len(self.offsets) == 0:
            raise ValueError("offsets of CandidateSets must be [N + 1]; got an empty tensor")
        if self.ids.device != self.offsets.device:
            raise ValueError(f"ids and offsets must be on one device; got {self.ids.device} and {self.offsets.device}")

    @classmethod
    def from_padded(cls, ids: Tensor, pad: int = -1) -> CandidateSets:
        """From ids `[..., W]` of which those that equal `pad` do not count."""
        _check_rows(ids, "ids")
        keep = ids != pad
        return cls(ids[keep], offsets_of(keep.sum(-1).reshape(-1)))

    @classmethod
    def from_mask(cls, mask: Tensor) -> CandidateSets:
        """From a mask `[..., V]`, True where a token was kept. A row that keeps all becomes an empty set.

        Raises:
            ValueError: A row keeps no token.
        """
        _check_rows(mask, "mask")
        mask = mask.reshape(-1, mask.shape[-1]) != 0
        sizes = mask.sum(-1)
        if len(sizes) and not bool(sizes.all()):
            raise ValueError(f"each row of a mask must keep a token; got none in row {int((sizes == 0).nonzero()[0])}")
        is_whole = sizes == mask.shape[-1]
        kept = mask & ~is_whole.unsqueeze(1)
        return cls(kept.nonzero()[:, 1], offsets_of(sizes.masked_fill(is_whole, 0)))

    @classmethod
    def from_logits(
        cls,
        logits: Tensor,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
    ) -> CandidateSets:
        """The tokens that temperature, then top-k, then top-p, then min-p keep of logits `[..., V]`.

        Args:
            logits: `[..., V]`, before temperature. -inf is never kept.
            temperature: > 0; it changes what top-p keeps.
            top_k: >= 1: keep the k largest logits, and those equal to the k-th.
            top_p: In (0, 1]: keep the most probable tokens until their probabilities sum to `top_p`, at least one.
            min_p: In [0, 1]: keep tokens of at least `min_p` times the largest probability.

        Raises:
            ValueError: An option out of its range, NaN or +inf in the logits, or a row of -inf only.
            TypeError: An option of another type.

        Source: the logits warpers of Hugging Face transformers, in the order of `generate`.
        """
        _check_rows(logits, "logits")
        check_number(temperature, "temperature", above=0.0)
        if top_k is not None:
            check_integer(top_k, "top_k", least=1)
        if top_p is not None:
            check_number(top_p, "top_p", above=0.0, most=1.0)
        if min_p is not None:
            check_number(min_p, "min_p", least=0.0, most=1.0)
        z = logits.reshape(-1, logits.shape[-1]).float() / temperature
        largest = z.amax(-1)
        if not largest.isfinite().all():  # the maximum of a row with a NaN is NaN
            got = largest[~largest.isfinite()][0]
            raise ValueError(f"logits must hold finite numbers or -inf, not -inf only; got a row of maximum {got:g}")
        if top_k is not None:
            least = z.topk(min(top_k, z.shape[-1]), dim=-1).values[:, -1:]
            z = z.masked_fill(z < least, -torch.inf)
        if top_p is not None and top_p < 1.0:
            ascending, order = z.sort(dim=-1)
            drop = ascending.softmax(-1).cumsum(-1) <= 1.0 - top_p
            drop[:, -1] = False
            z = z.masked_fill(drop.scatter(1, order, drop), -torch.inf)
        if min_p is not None:
            p = z.softmax(-1)
            z = z.masked_fill(p < min_p * p.amax(-1, keepdim=True), -torch.inf)
        return cls.from_mask(z > -torch.inf)

    @classmethod
    def cat(cls, parts: Sequence[CandidateSets]) -> CandidateSets:
        """The positions of all parts, one part after the other."""
        if not parts:
            raise ValueError("expected at least one CandidateSets; got none")
        return cls(torch.cat([part.ids for part in parts]), offsets_of(torch.cat([part.sizes for part in parts])))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> Tensor:
        """`[N]` int64: tokens of each set."""
        return self.offsets.diff()

    @property
    def positions(self) -> Tensor:
        """`[K]` int64, ascending: the position that each candidate belongs to."""
        return torch.repeat_interleave(self.sizes, output_size=len(self.ids))

    def keys(self, vocab_size: int) -> Tensor:
        """`[K]` int64, ascending: position * V + id of each candidate."""
        keys = self.positions * vocab_size + self.ids
        return keys if (keys[1:] > keys[:-1]).all() else keys.sort().values

    def to(self, device: torch.device | str) -> CandidateSets:
        """The same on another device."""
        return CandidateSets(self.ids.to(device), self.offsets.to(device))

    def select(self, positions: Tensor) -> CandidateSets:
        """The sets of some positions (`[M]` int64), in this order."""
        return CandidateSets(self.ids[self.places(positions)], offsets_of(self.sizes[positions]))

    def places(self, positions: Tensor) -> Tensor:
        """`[K']` int64: where the candidates of some positions lie in `ids`."""
        ends = offsets_of(self.sizes[positions])
        starts, count = self.offsets[positions] - ends[:-1], int(ends[-1])  # without it a GPU is waited for twice
        return torch.repeat_interleave(starts, ends.diff(), output_size=count) + torch.arange(count, device=ends.device)

    def find(self, others: CandidateSets, vocab_size: int) -> Tensor:
        """`[M]` int64: where the tokens of other sets of the same positions are in `ids`; anything if they are not."""
        ids = self.ids.clamp(0, vocab_size - 1)  # of a masked position they may be anything, also keys of another one
        keys, order = (self.positions * vocab_size + ids).sort()
        place = torch.searchsorted(keys, others.positions * vocab_size + others.ids)
        return order[place.clamp(max=len(keys) - 1)] if len(keys) else place

    def within(self, first: int, size: int) -> tuple[CandidateSets, Tensor]:
        """The sets on a slice of the vocabulary, with ids from 0 in it, and `[K]` bool: which of `ids` they keep."""
        ids = self.ids.to(torch.int64) - first
        keep = (ids >= 0) & (ids < size)
        ends = torch.arange(len(self) + 1, device=ids.device)
        return CandidateSets(ids[keep], torch.searchsorted(self.positions[keep], ends)), keep

    def to_mask(self, vocab_size: int) -> Tensor:
        """`[N, V]` bool: True where a token is in the set; all of a row where the set is empty."""
        mask = (self.sizes == 0).unsqueeze(1).repeat(1, vocab_size)
        mask[self.positions, self.ids.to(torch.int64)] = True
        return mask


def _check_rows(x: object, name: str) -> None:
    """A tensor [..., V]."""
    if not isinstance(x, Tensor) or x.dim() == 0:
        raise TypeError(f"{name} must be a tensor of one dimension or more; got {type(x).__name__}")


def may_need_whole_head(candidates: CandidateSets, token_ids: Tensor, mask: Tensor | None, most: int) -> bool:
    """Whether a set of an active token is empty, or of more than `most` tokens; raises unless there are N sets."""
    check_sets(candidates, token_ids, "candidates")
    sizes = candidates.sizes if mask is None else candidates.sizes[mask.reshape(-1) != 0]
    return bool(((sizes == 0) | (sizes > most)).any())


def check_sets(sets: CandidateSets, token_ids: Tensor, name: str) -> None:
    """One for each position."""
    if not isinstance(sets, CandidateSets):
        raise TypeError(f"{name} must be CandidateSets; got {type(sets).__name__}")
    if len(sets) != token_ids.numel():
        raise ValueError(f"{name} must have a set for each of {token_ids.numel()} positions; got {len(sets)}")
    if sets.ids.device != token_ids.device:
        raise ValueError(f"{name} must be on {token_ids.device}, as the ids; got {sets.ids.device}")


def check_alternative_values(
    alternatives: CandidateSets, token_ids: Tensor, mask: Tensor | None, vocab_size: int, within: CandidateSets | None
) -> None:
    """Ids within the vocabulary, and within the candidate set of an active token that has one."""
    if not values_are_checked(token_ids.device):
        return
    positions = _check_ids(alternatives, token_ids, mask, vocab_size, "alternative")
    if within is None:
        return
    limited = positions[within.sizes[positions] > 0]
    asked, allowed = alternatives.select(limited), within.select(limited)
    strange = int((~torch.isin(asked.keys(vocab_size), allowed.keys(vocab_size))).sum())
    if strange:
        raise ValueError(f"an alternative must be in the candidate set of its token; got {strange} that are not")


def _check_ids(sets: CandidateSets, token_ids: Tensor, mask: Tensor | None, vocab_size: int, name: str) -> Tensor:
    """Offsets that fit, and ids of active tokens in the vocabulary; returns the positions of these tokens."""
    offsets = sets.offsets
    if offsets[0] != 0 or offsets[-1] != len(sets.ids) or (sets.sizes < 0).any():
        raise ValueError(
            f"offsets of {name}s must rise from 0 to {len(sets.ids)}, the number of ids; "
            f"got {int(offsets[0])} to {int(offsets[-1])}, with steps from {int(sets.sizes.min())}"
        )
    positions = active_tokens(mask, token_ids).reshape(-1).nonzero().squeeze(1)
    ids = sets.ids if len(positions) == len(sets) else sets.ids[sets.places(positions)]
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
        raise ValueError(f"{name} ids must lie in [0, {vocab_size}); got {int(ids.min())} to {int(ids.max())}")
    return positions


def check_values(
    candidates: CandidateSets, token_ids: Tensor, mask: Tensor | None, vocab_size: int, logps: Mapping[str, Tensor]
) -> None:
    """Sets within the vocabulary, of different ids, that hold the target of each active token.

    `logps` are log-probs that must be 0 where a token is alone in its set.
    """
    if not values_are_checked(token_ids.device):
        return
    positions = _check_ids(candidates, token_ids, mask, vocab_size, "candidate")
    sets = candidates if len(positions) == len(candidates) else candidates.select(positions)
    targets = token_ids.reshape(-1)[positions].to(torch.int64)
    ids, owner = sets.ids.to(torch.int64), sets.positions
    keys = sets.keys(vocab_size)
    twice = int((keys[1:] == keys[:-1]).sum())
    if twice:
        raise ValueError(f"a candidate set must hold different ids; got {twice} that are there again")
    target_counts = torch.zeros_like(targets).index_add_(0, owner, (ids == targets[owner]).to(torch.int64))
    missing = int(((target_counts == 0) & (sets.sizes > 0)).sum())
    if missing:
        raise ValueError(f"the target of an active token must be in its candidate set; got {missing} that are not")
    for name, x in logps.items():
        away = int(((x.reshape(-1)[positions].abs() > 1e-3) & (sets.sizes == 1)).sum())
        if away:
            raise ValueError(
                f"{name} must be 0 where a token is alone in its candidate set; got {away} further away than 1e-3: "
                "are they of the distribution before truncation?"
            )
