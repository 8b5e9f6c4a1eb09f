"""A rollout: prompts in, sampled completions out, padded, and split into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_fused import CandidateSets
from grpo_fused.rollouts.engine import Generation, RolloutEngine, Sampling, first_of_prompts, length_mask, pad_prompts
from grpo_fused.rollouts.records import ScoredSets


class Rollout(NamedTuple):
    """B sequences, the samples of one prompt next to each other.

    It has all inputs of an update, so a recorded rollout can be replayed on another model or with another engine.
    """

    prompt_ids: Tensor
    """[B, P] int64, padded on the left: all completions start in the same column"""
    prompt_mask: Tensor
    """[B, P] bool"""
    completion_ids: Tensor
    """[B, T] int64, padded on the right"""
    completion_mask: Tensor
    """[B, T] bool, True up to and including the EOS"""
    sampling_logps: Tensor | None = None
    """[B, T] fp32, nats, by a rollout engine that is not the policy itself"""
    candidates: CandidateSets | None = None
    """of B * T positions; None if all tokens could be sampled"""
    alternatives: ScoredSets | None = None
    """of B * T positions, by the sampler, for an objective that reads them"""

    def rows(self, index: slice | Tensor) -> Rollout:
        """Some of the sequences, without the columns that are padding in all of them."""
        prompts, completions = self.prompt_mask[index], self.completion_mask[index]
        first = self.prompt_ids.shape[1] - int(prompts.sum(1).max())
        width = max(int(completions.sum(1).max()), 1)
        count, longest = self.completion_ids.shape
        rows = torch.arange(count, device=self.completion_ids.device)[index]
        positions = (rows.unsqueeze(1) * longest + torch.arange(width, device=rows.device)).reshape(-1)  # of the sets
        return Rollout(
            self.prompt_ids[index][:, first:],
            prompts[:, first:],
            self.completion_ids[index][:, :width],
            completions[:, :width],
            None if self.sampling_logps is None else self.sampling_logps[index][:, :width],
            None if self.candidates is None else self.candidates.select(positions),
            None if self.alternatives is None else self.alternatives.select(positions),
        )

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are not None, by name, for a file."""
        found = self._asdict() | {"candidates": None, "alternatives": None}
        if self.candidates is not None:
            found |= {"candidate_ids": self.candidates.ids, "candidate_offsets": self.candidates.offsets}
        if self.alternatives is not None:
            sets, logps = self.alternatives.sets, self.alternatives.logps
            found |= {"alternative_ids": sets.ids, "alternative_offsets": sets.offsets, "alternative_logps": logps}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def to(self, device: torch.device) -> Rollout:
        """The same on another device."""
        return Rollout._make(None if tensor is None else tensor.to(device) for tensor in self)

    def completions(self) -> list[list[int]]:
        """The ids of each completion, with EOS, without padding."""
        rows, lengths = self.completion_ids.tolist(), self.completion_mask.sum(1).tolist()
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def micro_batches(rollout: Rollout, rows: Tensor, max_tokens: int, *, share_prompts: bool = False) -> list[Tensor]:
    """Splits sequences into batches of at most `max_tokens` tokens, padding included, by similar length.

    Args:
        rollout: B sequences.
        rows: [n] int64 on the CPU, ascending: the sequences to split.
        max_tokens: The budget; a longer sequence is a batch of one.
        share_prompts: The sequences of one prompt are one, in which the prompt counts once.

    Returns:
        Indices into the rollout: each of `rows` in exactly one of the tensors.
    """
    prompts = rollout.prompt_mask.sum(1).tolist()
    completions = rollout.completion_mask.sum(1).tolist()
    group = first_of_prompts(rollout.prompt_ids, rollout.prompt_mask).cumsum(0).tolist()
    units: list[list[int]] = []
    for row in rows.tolist():
        is_next = share_prompts and bool(units) and group[units[-1][0]] == group[row]
        if is_next and prompts[row] + sum(completions[other] for other in (*units[-1], row)) <= max_tokens:
            units[-1].append(row)
        else:
            units.append([row])
    sized = [(prompts[unit[0]] + sum(completions[row] for row in unit), unit) for unit in units]
    batches: list[list[list[int]]] = []
    longest = 0
    for size, unit in sorted(sized, key=lambda each: -each[0]):
        if not batches or (len(batches[-1]) + 1) * longest > max_tokens:
            batches.append([])
            longest = size
        batches[-1].append(unit)
    device = rollout.completion_ids.device
    return [torch.tensor([row for unit in batch for row in unit], device=device) for batch in batches]


def roll_out(engine: RolloutEngine, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Rollout:
    """The engine's completions with their prompts, checked: an engine may be external code.

    Raises:
        ValueError: Shapes or dtypes are not those of `Generation`, or a completion has no token.
    """
    found = engine.generate(prompts, sampling)
    generation = Generation._make(None if tensor is None else tensor.to(found[0].device) for tensor in found)
    rows = len(prompts) * sampling.num_generations
    ids, mask, logps, candidates, _ = generation
    if candidates is None and sampling.truncates:
        raise ValueError(
            "a rollout engine must return the candidate sets of top_p, top_k or min_p, over which the loss "
            "renormalises; got none"
        )
    if candidates is not None and len(candidates) != ids.numel():
        raise ValueError(
            f"a rollout engine must return a candidate set for each of {ids.numel()} positions; got {len(candidates)}"
        )
    for name, tensor, dtype in (("ids", ids, torch.int64), ("mask", mask, torch.bool), ("sampling_logps", logps, None)):
        if tensor is None:
            continue
        if tensor.shape != (rows, ids.shape[-1]) or (dtype and tensor.dtype != dtype):
            raise ValueError(
                f"a rollout engine must return {name} of shape ({rows}, T){f', {dtype}' if dtype else ''}, "
                f"with the same T for all tensors; got {tuple(tensor.shape)}, {tensor.dtype}"
            )
    lengths = mask.sum(1)
    if not torch.equal(mask, length_mask(lengths, mask.shape[1])) or not (lengths > 0).all():
        raise ValueError(
            "a rollout engine must return a mask that is True up to each completion's end, at its first token at "
            f"least; got a mask of lengths {lengths.tolist()}"
        )
    _check_records(generation, sampling)
    prompt_ids, prompt_mask = (
        x.repeat_interleave(sampling.num_generations, 0) for x in pad_prompts(prompts, sampling.pad_token_id)
    )
    return Rollout(prompt_ids, prompt_mask, *generation).to(ids.device)


def _check_records(generation: Generation, sampling: Sampling) -> None:
    """What the objective reads is there: log-probs of each sampled token, and some other tokens of its position."""
    if sampling.records is None:
        return
    alternatives, mask = generation.alternatives, generation.mask
    what = "a rollout engine must return what the objective reads:"
    if generation.sampling_logps is None:
        raise ValueError(f"{what} sampling_logps; got none")
    if sampling.records == "sampled":
        return
    if alternatives is None or len(alternatives.sets) != mask.numel():
        got = "none" if alternatives is None else len(alternatives.sets)
        raise ValueError(f"{what} alternatives for each of {mask.numel()} positions; got {got}")
    if lost := int((alternatives.sets.sizes[mask.reshape(-1)] == 0).sum()):
        raise ValueError(f"{what} alternatives of every token; {lost} have none")


def ending_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The tokens that end a completion: the tokenizer's EOS and those of the model's generation config."""
    found: list[int] = []
    for ids in (tokenizer.eos_token_id, getattr(model.generation_config, "eos_token_id", None)):
        found += ids if isinstance(ids, (list, tuple)) else [] if ids is None else [int(ids)]
    if not found:
        raise ValueError(
            "the tokenizer needs an EOS token, or the model's generation_config an eos_token_id: no completion ends"
        )
    return tuple(dict.fromkeys(found))
