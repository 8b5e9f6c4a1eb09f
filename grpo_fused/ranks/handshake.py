"""The handshake of ranks that share a call: they compare their calls, and all raise an error unless these are the same.

Without it, ranks with different calls would wait for each other, or sum tensors of different calls. The fields of a
call define what must be equal: on all ranks the options and which tensors there are; on ranks with the same tokens also
the values of these tensors. The first collective of each operator is a digest of fixed size, so the handshake also
finds ranks that call different operators. A rank with wrong arguments reports this in the digest, and all ranks raise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_fused.call.calls import CustomCall, LinearCall, LogprobsGradientCall, LossCall, layout_of, named
from grpo_fused.call.validation import check_call_states, check_call_values
from grpo_fused.ranks import parallel
from grpo_fused.ranks.parallel import ParallelGroups, PeerError, TokenParallel, VocabParallel

_NUMBERS = 3
"""integers that ranks exchange with the digest"""


_OF_RANK = {"hidden_states", "lm_head_weight", "lm_head_bias", "base", "row_scale", "group_scale"}
_OWN = {*_OF_RANK, *(f"other_{name}" for name in _OF_RANK), "max_scratch_bytes", "groups"}
"""fields that may differ between ranks"""
_COEFFICIENTS = {"dlogps", "dentropies", "dalternative_logps"}
"""tensors that must be 0 at the same positions on all ranks: this decides which rows a rank computes"""
_SCORES = {"logps", "entropies", "maxima", "log_sums", "alternative_logps", "dhidden"}
"""results of an operator whose inputs were compared already"""


def form_of(call: Any) -> dict[str, int | str]:
    """Fields that must be equal on ranks with other tokens: the operator, its options, and which tensors there are."""
    form: dict[str, int | str] = {"operator": type(call).__name__.removesuffix("Call")}
    there = []
    for name, value in named(call):
        if name == "hidden_states":
            form["hidden size"] = value.shape[-1]
        elif isinstance(value, Tensor):
            there.append(name)
        elif value is not None and name not in _OWN:
            form["loss options" if name == "config" else name] = str(value)
    return {**form, "tensors": ", ".join(there)}


def contents_of(call: LinearCall | LogprobsGradientCall) -> dict[str, str]:
    """Fields that must be equal too on ranks with the same tokens: the values of tensors at active positions."""
    mask = call.forward.mask if isinstance(call, LogprobsGradientCall) else call.mask
    tensors = {name: x for name, x in named(call) if isinstance(x, Tensor) and name not in _OWN | _SCORES}
    sums = {name: f"checksum {checksum(x != 0 if name in _COEFFICIENTS else x, mask)}" for name, x in tensors.items()}
    # a different mask changes the checksums of all others, so it is named first
    return dict(sorted(sums.items(), key=lambda item: "mask" not in item[0]))


def join(call: LinearCall | LogprobsGradientCall) -> tuple[VocabParallel | None, TokenParallel | None]:
    """The ranks with other slices of the head and those with other tokens, after the check that all make the same call.

    If this rank's tensors have invalid values, or the ranks differ, all ranks of both groups raise.
    """
    scored = call.forward if isinstance(call, LogprobsGradientCall) else call
    layout = layout_of(scored)
    groups, vocab, tokens = ParallelGroups.decode(scored.run.groups), None, None
    failure = _attempt(check_call_states, scored) if scored is call else None
    vocab_size = scored.lm_head.vocab_size

    def check(size: int) -> None:
        if scored is call:  # else the forward pass has checked the values
            check_call_values(scored, size)

    if groups.vocab is None:
        failure = failure or _attempt(check, vocab_size)
    else:
        what = {**form_of(call), "tokens": layout.num_tokens, **contents_of(call)}
        rows, failure = agree(groups.vocab, what, [vocab_size], failure, lambda rows: check(sum(n for n, *_ in rows)))
        vocab = VocabParallel(groups.vocab, [row[0] for row in rows], scored.token_ids.reshape(-1))
        vocab_size = vocab.total
    if groups.tokens is not None and isinstance(call, (LossCall, CustomCall)):
        what = {**form_of(call), "split_sequences": int(groups.split_sequences), "vocabulary": vocab_size}
        sizes = [layout.num_tokens, layout.num_sequences, 2]
        if isinstance(call, LossCall):
            what["num_items"] = f"checksum {checksum(call.inputs.num_items_in_batch, None)}"
            sizes[2] = layout.reading(call.inputs.advantages)
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
    """(`numbers` of every rank, the error that all ranks must raise or None).

    They must raise if a rank has failed already, has another value for one of `what`, or has arguments that
    `check(numbers of all)` finds wrong.
    """
    text = repr(sorted(what.items())).encode()
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
    # the size is the same for all operators
    sent = [digest, int(failure is not None), *numbers, *[0] * (_NUMBERS - len(numbers))]
    rows = parallel.all_gather(torch.tensor(sent, device=parallel.device_of(group)), group).tolist()
    numbers_of_ranks = [row[2:] for row in rows]
    if failure is None and not any(failed for _, failed, *_ in rows):
        failure = _attempt(check, numbers_of_ranks)  # if the digests are equal, the result is the same on all ranks
    if all(row[:2] == [digest, 0] for row in rows):
        return numbers_of_ranks, failure
    reports = parallel.gather_objects(group, (dict(what), parallel.reason_of(failure)))
    reasons = {rank: reason for rank, (_, reason) in enumerate(reports) if reason is not None}
    if failure is not None:
        return numbers_of_ranks, failure
    if reasons:
        return numbers_of_ranks, PeerError.of(reasons)
    for name in {name: None for values, _ in reports for name in values}:
        values = [value.get(name) for value, _ in reports]
        if any(value != values[0] for value in values):
            listed = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            return numbers_of_ranks, ValueError(f"all ranks of a process group must give the same {name}; got {listed}")
    return numbers_of_ranks, RuntimeError("ranks of a process group gave different calls")


@contextmanager
def refusing_together(
    process_group: dist.ProcessGroup | ParallelGroups | None, *, with_tokens: bool = False
) -> Iterator[None]:
    """An error of this rank in the block is raised on the other ranks of the call too, which wait in their handshake.

    Only a loss has collectives with the ranks that have other tokens (`with_tokens`); log-probs do not.
    """
    try:
        yield
    except Exception as failure:
        if isinstance(process_group, (dist.ProcessGroup, ParallelGroups)):
            groups = ParallelGroups.of(process_group)
            for group in (groups.vocab, groups.tokens if with_tokens else None):
                if group is not None and dist.get_world_size(group) > 1:
                    agree(group, {}, [], failure)
        raise


@contextmanager
def failing_together(vocab: VocabParallel | None, tokens: TokenParallel | None) -> Iterator[None]:
    """An error of this rank in the block, after the handshake, is raised on the others at their next collective."""
    try:
        yield
        for ranks in (vocab, tokens):  # none has failed after its last collective
            if ranks is not None:
                ranks.meet()
    except Exception as failure:
        for ranks in (vocab, tokens):
            if ranks is not None and not (isinstance(failure, PeerError) and failure.group is ranks.group):
                ranks.meet(failure)
        raise


def _attempt(check: Callable[..., None], *arguments: object) -> Exception | None:
    try:
        check(*arguments)
    except Exception as failure:
        return failure
    return None


def checksum(x: Tensor | None, mask: Tensor | None) -> int:
    """A checksum of values and positions where the mask is active; 0 if there is no tensor."""
    if x is None:
        return 0
    values = x.detach().to(torch.float64)
    if mask is not None and mask.shape == x.shape:
        values = torch.where(mask != 0, values, 0.0)
    bits = values.reshape(-1).contiguous().view(torch.int64)
    return int((bits * (2 * torch.arange(len(bits), device=x.device) + 1)).sum())
