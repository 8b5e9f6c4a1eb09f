"""Collectives of a call that several ranks share: slices of the vocabulary, and tokens of one batch.

All use `torch.distributed`. `handshake` checks that the ranks make the same call.

Vocabulary: every rank scores the same tokens with its rows of the weight. The statistics of each token (maximum, log of
the sum, entropy, and the log-prob if the rank owns the target) go to all ranks in one collective for each chunk, 3 or 4
numbers for each token. They are merged in the order of the ranks, so all ranks have the same bits. Gradients of the
weight are local. Gradients of the hidden states are summed over the ranks, H numbers for each token, during the product
for the weight.

Tokens: every rank has other tokens. The inputs of the objective (at most 7 numbers for each token) go to all ranks
before the loss, log-probs and entropies after the scores. Every rank then evaluates the objective and the metrics of
the whole batch, which costs little next to the head. So normalisers, quantiles, sequences on several ranks and all
metrics are those of one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_fused.call.layout import values_are_checked
from grpo_fused.kernels.row_types import LOWEST_LOG_P, Statistics


@dataclass(frozen=True)
class ParallelGroups:
    """The ranks that share a call, for `process_group=`; a plain `ProcessGroup` there means `vocab`."""

    vocab: dist.ProcessGroup | None = None
    """Ranks with the same tokens, each with a slice of the head: rank r has the rows after those of rank r - 1."""
    tokens: dist.ProcessGroup | None = None
    """Ranks with other tokens of the same batch, and the same (slice of the) head."""
    split_sequences: bool = False
    """Whether sequence b of every rank of `tokens` is a part of one sequence (context parallelism), in the order of the
    ranks. Otherwise each rank has its own sequences."""

    def __post_init__(self) -> None:
        groups = [group for group in (self.vocab, self.tokens) if group is not None]
        for group in groups:
            if not isinstance(group, dist.ProcessGroup):
                raise TypeError(f"vocab and tokens must be process groups with this rank, or None; got {group!r}")
        if len(groups) == 2:
            shared = set.intersection(*(set(dist.get_process_group_ranks(group)) for group in groups))
            if len(shared) > 1:
                raise ValueError(f"vocab and tokens must have one rank in common, this one; got {sorted(shared)}")

    @classmethod
    def of(cls, given: dist.ProcessGroup | ParallelGroups | None) -> ParallelGroups:
        """Groups from the caller's argument.

        Raises:
            TypeError: It is neither a group nor `ParallelGroups`.
        """
        if given is None:
            return cls()
        if isinstance(given, ParallelGroups):
            return given
        if isinstance(given, dist.ProcessGroup):
            return cls(vocab=given)
        raise TypeError(f"process_group must be a torch.distributed.ProcessGroup or ParallelGroups; got {type(given)}")

    @staticmethod
    def encode(given: dist.ProcessGroup | ParallelGroups | None) -> str:
        """The names of the groups, the form in which an operator takes them; empty for a call of one process."""
        groups = ParallelGroups.of(given)
        names = [group.group_name if group is not None else "" for group in (groups.vocab, groups.tokens)]
        return "|".join([*names, "split" if groups.split_sequences else ""]) if any(names) else ""

    @classmethod
    def decode(cls, encoded: str) -> ParallelGroups:
        """The groups that `encode` named, None where there is one rank."""
        if not encoded:
            return cls()
        vocab, tokens, split = encoded.split("|")
        return cls(_resolve(vocab), _resolve(tokens), bool(split))


def _resolve(name: str) -> dist.ProcessGroup | None:
    if not name:
        return None
    from torch.distributed import distributed_c10d

    group: dist.ProcessGroup = distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type, attr-defined]
    return group if dist.get_world_size(group) > 1 else None


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[P, ...]: `x` of every rank."""
    out = x.new_empty((dist.get_world_size(group), *x.shape))
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.13
    gather(out.view(-1), x.contiguous().view(-1), group=group)
    return out


def gather_objects(group: dist.ProcessGroup, x: Any) -> list[Any]:
    """`x` of every rank."""
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, x, group=group)
    return every


def device_of(group: dist.ProcessGroup) -> torch.device:
    """The device of the numbers in the handshake: NCCL does not support the CPU."""
    return torch.device("cuda" if "nccl" in dist.get_backend(group) else "cpu")


class PeerError(RuntimeError):
    """Another rank of the call failed; the message names it and its reason."""

    group: dist.ProcessGroup | None = None
    """the group whose collective reported the failure after the handshake: its other ranks know it already"""

    @classmethod
    def of(cls, reasons: Mapping[int, str], group: dist.ProcessGroup | None = None) -> PeerError:
        """From the reasons that ranks of a process group gave."""
        error = cls("; ".join(f"rank {rank} of the process group failed: {why}" for rank, why in reasons.items()))
        error.group = group
        return error


def reason_of(failure: BaseException | None) -> str | None:
    """Its type and text, for other processes."""
    return None if failure is None else f"{type(failure).__name__}: {failure}"


class _Ranks:
    """Ranks that share a call."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank = group, dist.get_rank(group)
        # on a GPU the check would synchronise
        self._meets = values_are_checked(device_of(group))

    def meet(self, failure: Exception | None = None) -> None:
        """Before each collective: raise if another rank has failed since the last one, and so will not take part.

        A rank that has failed calls this with its reason, and raises afterwards.
        """
        if not self._meets:
            return
        failed = torch.tensor([int(failure is not None)], device=device_of(self.group))
        if not all_gather(failed, self.group).any():
            return
        reasons = gather_objects(self.group, reason_of(failure))
        if failure is None:
            raise PeerError.of({rank: why for rank, why in enumerate(reasons) if why is not None}, self.group)

    def all_gather(self, x: Tensor) -> Tensor:
        """[P, ...]: `x` of every rank, unless one has failed."""
        self.meet()
        return all_gather(x, self.group)


class VocabParallel(_Ranks):
    """A head whose rows are split over the ranks: rank r has `sizes[r]` of them."""

    def __init__(self, group: dist.ProcessGroup, sizes: list[int], ids: Tensor) -> None:
        super().__init__(group)
        self.first = sum(sizes[: self.rank])
        """the first id of this rank"""
        self.total = sum(sizes)
        """V of all ranks"""
        self.owned = (ids >= self.first) & (ids < self.first + sizes[self.rank])
        """[N] bool: tokens whose target is among this rank's rows."""

    def merged(self, rows: Tensor, local: Statistics) -> Statistics:
        """Statistics over the whole vocabulary of the tokens at `rows`, merged from all ranks; one collective."""
        # a slice whose logits are all -inf has no share, and its NaN must not be taken for a NaN of the model
        empty = (local.max == -math.inf) | (local.log_sum == -math.inf)
        logp = torch.where(self.owned[rows] & ~empty, local.logp, -math.inf)
        parts = [local.max.masked_fill(empty, -math.inf), local.log_sum.masked_fill(empty, 0.0), logp]
        if local.entropy is not None:  # sum of p (z - max), p and max of this rank
            parts.append((local.log_sum - local.entropy).masked_fill(empty, 0.0))
        every = self.all_gather(torch.stack(parts))
        m, owner = every[:, 0].max(0, keepdim=True)
        shift = (every[:, 0] - m).clamp(min=LOWEST_LOG_P)
        # as within a row: the term of the maximum, 1, is left out of the sum
        sums = shift.exp() * every[:, 1].exp()
        log_sum = sums.scatter(0, owner, every[:, 1].gather(0, owner).expm1()).sum(0).log1p()
        entropy = None
        if local.entropy is not None:
            share = (shift + every[:, 1] - log_sum).exp()
            entropy = (log_sum - (share * (every[:, 3] + shift)).sum(0)).clamp(min=0.0)
        target = ((every[:, 2] + every[:, 1]) + shift).amax(0)  # z - m: exactly 0 for a confident target
        return Statistics(m.squeeze(0), log_sum, (target - log_sum).clamp(max=0.0), entropy)

    def first_of(self, x: Tensor) -> Tensor:
        """`x` (bool) where no rank before this one has True."""
        return x & ~self.all_gather(x.to(torch.uint8))[: self.rank].bool().any(0)  # `any` of uint8 is uint8

    def smallest(self, count: int) -> int:
        """The minimum of `count` over the ranks: larger slices have room for fewer tokens; chunks must be equal."""
        count = min(count, 2**62)
        return int(self.all_gather(torch.tensor([count], device=self.owned.device)).min())

    def start_sum(self, x: Tensor) -> Callable[[], Tensor]:
        """Start the sum of `x` over the ranks, in fp32 at least; the returned function waits for it and returns it.

        `x` must not be used afterwards: if its dtype is wide enough, the sum is written to its memory.
        """
        dtype = x.dtype
        wide = x.to(torch.promote_types(dtype, torch.float32))
        self.meet()
        work = dist.all_reduce(wide, group=self.group, async_op=True)

        def finish() -> Tensor:
            work.wait()
            return wide.to(dtype)

        return finish


class TokenParallel(_Ranks):
    """A batch whose tokens are split over the ranks; `sizes`: tokens, sequences and `Layout.reading` of each rank."""

    def __init__(self, group: dist.ProcessGroup, sizes: list[list[int]], split: bool) -> None:
        super().__init__(group)
        self.split = split
        kinds = {row[2] for row in sizes} - {2}  # 2: could be either
        if len(kinds) > 1:
            listed = ", ".join(f"rank {r}: {('sequence', 'token', 'either')[row[2]]}" for r, row in enumerate(sizes))
            raise ValueError(f"advantages must be one for each sequence, or each token, on all ranks; got {listed}")
        self.advantage_per_token = kinds == {1}
        self.token_counts = [row[0] for row in sizes]
        counts = [row[1] for row in sizes]
        if split and any(count != counts[0] for count in counts):
            listed = ", ".join(f"rank {r}: {count}" for r, count in enumerate(counts))
            raise ValueError(f"ranks that split sequences must have the same number of them; got {listed}")
        self.first_sequence = 0 if split else sum(counts[: self.rank])
        self.num_sequences = counts[0] if split else sum(counts)
        self.order: Tensor | None = None
        """[N] int64: the tokens of all ranks in the order of their sequences; None if already in this order."""
        self.mine: Tensor | None = None
        """[n] int64: where this rank's tokens are in that order."""

    def gather(self, x: Tensor) -> Tensor:
        """[N, ...] in the order of the batch: `x` [n, ...] of every rank."""
        longest = max(self.token_counts)
        padded = x.new_zeros((longest, *x.shape[1:]))
        padded[: x.shape[0]] = x
        every = self.all_gather(padded)
        joined = torch.cat([part[:count] for part, count in zip(every, self.token_counts, strict=True)])
        return joined if self.order is None else joined[self.order]

    def arrange(self, sequence: Tensor) -> None:
        """Set the order, and this rank's positions, from each token's sequence, given in the order of the ranks."""
        places = torch.arange(len(sequence), device=sequence.device)
        if self.split:
            self.order = sequence.argsort(stable=True)
            places = self.order.argsort()
        self.mine = places.split(self.token_counts)[self.rank]

    def add(self, x: Tensor) -> Tensor:
        """`x` summed over the ranks, in their order."""
        return self.all_gather(x).sum(0)


def whole(x: Tensor, process_group: dist.ProcessGroup | ParallelGroups | None) -> Tensor:
    """A sharded parameter (`DTensor`) gathered; its gradient is averaged over the mesh, in the parameter's sharding.

    Raises:
        ValueError: There is a group of ranks with slices of the vocabulary, so it is unclear whether this is a slice.
    """
    from torch.distributed.tensor import DTensor, Partial

    if not isinstance(x, DTensor):
        return x
    if ParallelGroups.of(process_group).vocab is not None:
        raise ValueError(
            "with ranks that hold slices of the vocabulary, lm_head_weight must be this rank's slice as a plain tensor "
            f"(weight.to_local() where it is sharded by rows); got a DTensor placed {x.placements}"
        )
    return x.full_tensor(grad_placements=[Partial("avg")] * x.device_mesh.ndim)
