"""The handshake of ranks that share a call: they say what they are about to do, and all raise unless it is the same.

Ranks that do different things would wait for each other, or add up what does not belong together. What must be alike
follows from the fields of a call: options and which tensors there are, on all ranks; on ranks with the same tokens also
what these hold. The first collective of every operator is one digest of a fixed size, so that different operators
meet in it, too. A rank whose own arguments are wrong says so in the digest, and all raise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_fused.calls import LogprobsCall, LogprobsGradientCall, LossCall, named
from grpo_fused.layout import Layout
from grpo_fused.parallel import (
    ParallelGroups,
    PeerError,
    TokenParallel,
    VocabParallel,
    all_gather,
    device_of,
    gather_objects,
)

_NUMBERS = 3
"""integers that ranks exchange in the digest beside the digest itself"""


_OWN = {"hidden_states", "lm_head_weight", "lm_head_bias", "max_scratch_bytes", "groups"}
"""what may differ between ranks"""
_COEFFICIENTS = {"dlogps", "dentropies"}
"""tensors of which only where they are 0 must be the same: that decides which rows a rank works on"""
_SCORES = {"logps", "entropies", "maxima", "log_sums"}
"""tensors that an operator made, of what has been compared"""


def form_of(call: Any) -> dict[str, int | str]:
    """What ranks with other tokens must give alike: the operator, its options, and which tensors there are."""
    found: dict[str, int | str] = {"operator": type(call).__name__.removesuffix("Call")}
    there = []
    for name, value in named(call):
        if name == "hidden_states":
            found["hidden size"] = value.shape[-1]
        elif isinstance(value, Tensor):
            there += [name] if name not in _OWN else []
        elif value is not None and name not in _OWN:
            found["loss options" if name == "config" else name] = str(value)
    return {**found, "tensors": ", ".join(there)}


def contents_of(call: Any, mask: Tensor | None) -> dict[str, int | str]:
    """What ranks with the same tokens must give alike besides: what the tensors hold on active positions."""
    tensors = {name: x for name, x in named(call) if isinstance(x, Tensor) and name not in _OWN | _SCORES}
    sums = {name: checksum(x != 0 if name in _COEFFICIENTS else x, mask) for name, x in tensors.items()}
    # another mask changes the sums of all others: it is named first
    return dict(sorted(sums.items(), key=lambda item: "mask" not in item[0]))


def join(
    groups: ParallelGroups,
    call: LossCall | LogprobsCall | LogprobsGradientCall,
    ids: Tensor,
    mask: Tensor | None,
    check: Callable[[int], None],
    layout: Layout | None = None,
) -> tuple[VocabParallel | None, TokenParallel | None]:
    """The ranks with other slices of the head and those with other tokens, once all are found to make the same call.

    `check` is called with the size of the whole vocabulary, and raises where this rank's tensors hold what they must
    not. Where it does, or the ranks differ, all ranks of both groups raise. `layout` is that of a loss.
    """
    head = call.forward.head if isinstance(call, LogprobsGradientCall) else call.head
    vocab, tokens, vocab_size = None, None, head.lm_head_weight.shape[0]
    failure: Exception | None = None
    if groups.vocab is None:
        failure = _attempt(check, vocab_size)
    else:
        what = {**form_of(call), "tokens": ids.numel(), **contents_of(call, mask)}
        rows, failure = agree(groups.vocab, what, [vocab_size], None, lambda rows: check(sum(row[0] for row in rows)))
        vocab = VocabParallel(groups.vocab, [row[0] for row in rows], ids.reshape(-1))
        vocab_size = vocab.total
    if groups.tokens is not None and layout is not None and isinstance(call, LossCall):
        what = {
            **form_of(call),
            "split_sequences": int(groups.split_sequences),
            "num_items": checksum(call.inputs.num_items_in_batch, None),
            "vocabulary": vocab_size,
        }
        sizes = [layout.num_tokens, layout.num_sequences, layout.reading(call.inputs.advantages)]
        rows, failure = agree(groups.tokens, what, sizes, failure)
        if failure is None:
            tokens = TokenParallel(groups.tokens, rows, groups.split_sequences)
    if failure is not None:
        raise failure
    return vocab, tokens


def agree(
    group: dist.ProcessGroup,
    what: Mapping[str, int | str],
    numbers: list[int],
    failure: Exception | None,
    check: Callable[[list[list[int]]], None] = lambda rows: None,
) -> tuple[list[list[int]], Exception | None]:
    """(`numbers` of every rank, why all ranks must raise or None).

    They must where one has failed already, gives another value for one of `what`, or finds by `check(numbers of all)`
    that its arguments are wrong.
    """
    text = repr(sorted(what.items())).encode()
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
    rows = _exchange(group, [digest, int(failure is not None), *numbers])
    found = [row[2:] for row in rows]
    if failure is None and not any(failed for _, failed, *_ in rows):
        failure = _attempt(check, found)  # the same on all ranks where all digests are
    if all(row[:2] == [digest, 0] for row in rows):
        return found, failure
    given = gather_objects(group, (dict(what), _reason(failure)))
    reasons = {rank: reason for rank, (_, reason) in enumerate(given) if reason is not None}
    if failure is not None:
        return found, failure
    if reasons:
        return found, PeerError.of(reasons)
    for name in {name: None for values, _ in given for name in values}:
        values = [value.get(name) for value, _ in given]
        if any(value != values[0] for value in values):
            listed = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            return found, ValueError(f"all ranks of a process group must give the same {name}; got {listed}")
    return found, RuntimeError("ranks of a process group gave different calls")


@contextmanager
def refusing_together(
    process_group: dist.ProcessGroup | ParallelGroups | None, *, with_tokens: bool = False
) -> Iterator[None]:
    """What this rank raises in the block is raised on the others of the call too, which wait in their handshake.

    Only a loss meets the ranks with other tokens (`with_tokens`); log-probs do not.
    """
    try:
        yield
    except Exception as failure:
        if isinstance(process_group, (dist.ProcessGroup, ParallelGroups)):
            groups = ParallelGroups.of(process_group)
            for group in (groups.vocab, groups.tokens if with_tokens else None):
                if group is not None and dist.get_world_size(group) > 1:
                    _exchange(group, [0, 1])
                    gather_objects(group, ({}, _reason(failure)))
        raise


@contextmanager
def failing_together(vocab: VocabParallel | None, tokens: TokenParallel | None) -> Iterator[None]:
    """What this rank raises in the block, after the handshake, is raised on the others at their next collective."""
    try:
        yield
    except Exception as failure:
        for ranks in (vocab, tokens):
            if ranks is not None and not (isinstance(failure, PeerError) and failure.group is ranks.group):
                ranks.meet(failure)
        raise


def _exchange(group: dist.ProcessGroup, numbers: list[int]) -> list[list[int]]:
    """[digest, failed, numbers ...] of every rank; always of the same size, whatever a rank is about to do."""
    padded = [*numbers, *[0] * (2 + _NUMBERS - len(numbers))]
    return all_gather("agreement", torch.tensor(padded, dtype=torch.int64, device=device_of(group)), group).tolist()


def _attempt(check: Callable[..., None], *arguments: object) -> Exception | None:
    try:
        check(*arguments)
    except Exception as failure:
        return failure
    return None


def _reason(failure: Exception | None) -> str | None:
    return None if failure is None else f"{type(failure).__name__}: {failure}"


def checksum(x: Tensor | None, mask: Tensor | None) -> int:
    """Of the values that count, in their places; 0 where there is no tensor."""
    if x is None:
        return 0
    values = x.detach().to(torch.float64)
    if mask is not None and mask.shape == x.shape:
        values = torch.where(mask != 0, values, 0.0)
    bits = values.reshape(-1).contiguous().view(torch.int64)
    return int((bits * (2 * torch.arange(len(bits), device=x.device) + 1)).sum()) >> 1
