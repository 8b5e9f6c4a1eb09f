"""A rollout: sampled completions with their prompts, padded, and how it is cut into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Rollout(NamedTuple):
    """B sequences, the samples of one prompt side by side.

    Everything an update reads, so a recorded rollout can be replayed on another model or with another engine.
    """

    prompt_ids: Tensor  # [B, P] int64, padded on the left: all completions start in the same column
    prompt_mask: Tensor  # [B, P] bool
    completion_ids: Tensor  # [B, T] int64, padded on the right
    completion_mask: Tensor  # [B, T] bool, True up to and including the EOS
    sampling_logps: Tensor | None = None  # [B, T] fp32, nats, by a rollout engine that is not the policy itself

    def rows(self, index: slice | Tensor) -> Rollout:
        """Some of the sequences, without the columns that are padding in all of them."""
        prompts, completions = self.prompt_mask[index], self.completion_mask[index]
        first = self.prompt_ids.shape[1] - int(prompts.sum(1).max()) if len(prompts) else 0
        width = max(int(completions.sum(1).max()), 1) if len(completions) else self.completion_ids.shape[1]
        return Rollout(
            self.prompt_ids[index][:, first:],
            prompts[:, first:],
            self.completion_ids[index][:, :width],
            completions[:, :width],
            None if self.sampling_logps is None else self.sampling_logps[index][:, :width],
        )

    def to(self, device: torch.device) -> Rollout:
        """The same on another device."""
        ids = [tensor.to(device) for tensor in self[:4]]
        logps = self.sampling_logps
        return Rollout(ids[0], ids[1], ids[2], ids[3], None if logps is None else logps.to(device))

    def completions(self) -> list[list[int]]:
        """The ids of each completion, EOS included, padding left out."""
        rows, lengths = self.completion_ids.tolist(), self.completion_mask.sum(1).tolist()
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def pad_prompts(prompts: Sequence[Sequence[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Ids [B, P] int64 and mask [B, P] bool, padded on the left. The mask is of lengths: a pad token may be an EOS."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad_token_id] * (width - len(row)) + list(row) for row in prompts])
    return ids, length_mask(torch.tensor([len(row) for row in prompts]), width).flip(1)


def length_mask(lengths: Tensor, width: int) -> Tensor:
    """[B, width] bool, True in the first `lengths[b]` columns of row b."""
    return torch.arange(width, device=lengths.device) < lengths.unsqueeze(1)


def micro_batches(rollout: Rollout, rows: Tensor, max_tokens: int) -> list[Tensor]:
    """Cuts sequences into batches of at most `max_tokens` tokens, padding included, those of like length together.

    Args:
        rollout: B sequences.
        rows: [n] int64 on the CPU: the sequences to cut.
        max_tokens: The budget; a sequence that is longer than it is a batch of its own.

    Returns:
        Indices into the rollout: each of `rows` in exactly one of the tensors.
    """
    prompts = rollout.prompt_mask.sum(1).tolist()
    completions = rollout.completion_mask.sum(1).tolist()
    batches: list[list[int]] = []
    longest_prompt = longest_completion = 0
    for row in sorted(rows.tolist(), key=lambda row: -(prompts[row] + completions[row])):
        wide_prompt, wide = max(longest_prompt, prompts[row]), max(longest_completion, completions[row])
        if batches and (len(batches[-1]) + 1) * (wide_prompt + wide) <= max_tokens:
            batches[-1].append(row)
            longest_prompt, longest_completion = wide_prompt, wide
        else:
            batches.append([row])
            longest_prompt, longest_completion = prompts[row], completions[row]
    return [torch.tensor(batch) for batch in batches]
