"""A prompt once: the completions of a prompt follow it in one sequence, and each of them sees the prompt and itself.

    prompt  completion 1  completion 2  ...      one row; positions of every completion continue those of the prompt

The states are those of separate sequences, and so are the gradients. The prompt is computed and differentiated once
instead of once for each completion. Only models whose layers all have full attention can run so.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo_fused import head_hidden_states
from grpo_fused.heads.modules import base_model
from grpo_fused.rollouts.engine import first_of_prompts, length_mask
from grpo_fused.rollouts.huggingface import layer_kinds
from grpo_fused.trainer.rollout import Rollout


def prompt_groups(rollout: Rollout) -> list[range]:
    """Rows of the rollout that stand side by side and have the same prompt."""
    starts = first_of_prompts(rollout.prompt_ids, rollout.prompt_mask).nonzero().flatten().tolist()
    return [range(*pair) for pair in pairwise([*starts, len(rollout.prompt_ids)])]


def shared_prompt_states(model: nn.Module, rollout: Rollout) -> Tensor:
    """[B, T, H]: position t holds the state that predicts `completion_ids[:, t]`; masked positions may hold anything.

    Args:
        model: Causal LM that `check_shared_prompts` accepts, wrapped or not.
        rollout: B sequences, those of one prompt side by side.
    """
    device, groups = rollout.prompt_ids.device, prompt_groups(rollout)
    lengths = rollout.completion_mask.sum(1).tolist()
    rows, index = [], torch.zeros(rollout.completion_ids.shape, dtype=torch.int64)  # places in the row of the group
    for group in groups:
        prompt = rollout.prompt_ids[group.start][rollout.prompt_mask[group.start]]
        parts = [prompt, *(rollout.completion_ids[row, : lengths[row]] for row in group)]
        segments = [torch.full_like(part, number) for number, part in enumerate(parts)]
        starts = [0] + [len(prompt)] * len(group)
        positions = [start + torch.arange(len(part), device=device) for start, part in zip(starts, parts, strict=True)]
        rows.append(torch.stack([torch.cat(x) for x in (parts, segments, positions)]))
        end = len(prompt)
        for row in group:
            index[row, 0] = len(prompt) - 1
            index[row, 1 : lengths[row]] = torch.arange(end, end + max(lengths[row] - 1, 0))
            end += lengths[row]
    width = max(row.shape[1] for row in rows)
    padded = torch.stack([nn.functional.pad(row, (0, width - row.shape[1])) for row in rows])
    input_ids, segment, position_ids = padded.unbind(1)  # [U, L] each
    there = length_mask(torch.tensor([row.shape[1] for row in rows], device=device), width)
    seen = (segment.unsqueeze(1) == 0) | (segment.unsqueeze(1) == segment.unsqueeze(2))  # [U, query, key]
    # padding sees the prompt: no softmax is over nothing
    seen &= there.unsqueeze(1) & torch.ones(width, width, dtype=torch.bool, device=device).tril()
    mask = seen.unsqueeze(1)
    # SDPA takes bools; others add the mask to the scores
    inner: Any = base_model(model)
    if getattr(inner.config.get_text_config(), "_attn_implementation", None) != "sdpa":
        mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    states = head_hidden_states(model, input_ids, mask, position_ids=position_ids)
    group_of = torch.repeat_interleave(torch.tensor([len(group) for group in groups]))
    return states.flatten(0, 1)[(index + width * group_of.unsqueeze(1)).to(device)]


def check_shared_prompts(model: PreTrainedModel, separate: Any) -> None:
    """Compare states and a gradient with those of separate sequences, on a few random tokens.

    Args:
        model: Not yet wrapped or sharded.
        separate: `separate(rollout) -> [B, T, H]`, the states of sequences of their own.

    Raises:
        ValueError: The model has layers that are not full attention, or its states or gradients differ.
    """
    if others := layer_kinds(model) - {"full_attention"}:
        raise ValueError(
            f"share_prompts needs full attention in every layer; got {', '.join(sorted(others))} in "
            f"{type(model).__name__}"
        )
    rollout = _example(model.config.get_text_config().vocab_size, model.device)
    # the first of text: their gradient comes through all layers; two, since that of a new adapter's first matrix is 0
    inner: Any = base_model(model)
    trained = [p for p in inner.get_decoder().parameters() if p.requires_grad][:2]
    results: list[list[Tensor]] = []
    wanted = separate(rollout)
    try:
        shared = shared_prompt_states(model, rollout)
    except Exception as error:
        raise ValueError(
            f"share_prompts needs a model that takes a mask of four dimensions; {type(model).__name__} raises {error!r}"
        ) from error
    for states in (wanted, shared):
        states = states[rollout.completion_mask].float()
        results.append([states.detach()])
        if trained and states.requires_grad:
            loss = (states * torch.linspace(-1, 1, states.numel(), device=states.device).view(states.shape)).sum()
            gradients = torch.autograd.grad(loss, trained, materialize_grads=True)  # a head's is 0
            results[-1].append(torch.cat([gradient.flatten() for gradient in gradients]))
    most = 1e-3 if model.dtype == torch.float32 else 5e-2
    for name, want, got in zip(("states", "gradients"), *results, strict=False):
        away = float((got.float() - want.float()).norm() / want.float().norm())
        if not away <= most:
            raise ValueError(
                f"share_prompts must not change the {name} of {type(model).__name__}; they differ by {away:.1e} "
                f"(relative), more than {most:.0e}: its layers are not pure attention, or ignore a mask of four "
                "dimensions"
            )


def _example(vocab_size: int, device: torch.device) -> Rollout:
    """Two prompts, five completions of unequal lengths."""
    g = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, vocab_size, (2, 5), generator=g)[[0, 0, 0, 1, 1]]
    completions = torch.randint(0, vocab_size, (5, 4), generator=g)
    prompt_mask = length_mask(torch.tensor([5, 5, 5, 3, 3]), 5).flip(1)
    mask = length_mask(torch.tensor([4, 2, 3, 1, 4]), 4)
    return Rollout(prompts, prompt_mask, completions, mask).to(device)
