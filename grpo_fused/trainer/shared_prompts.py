"""A prompt once: the completions of a prompt follow it in one sequence, and each of them sees the prompt and itself.

    prompt  completion 1  completion 2  ...      one row; positions of every completion continue those of the prompt

The states are those of separate sequences, and so are the gradients. The prompt is computed and differentiated once
instead of once for each completion. Only models whose layers all have full attention can run so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo_fused import head_hidden_states
from grpo_fused.heads.modules import base_model
from grpo_fused.rollouts.engine import first_of_prompts, length_mask
from grpo_fused.rollouts.huggingface import layer_kinds
from grpo_fused.trainer.rollout import Rollout


def shared_prompt_states(model: nn.Module, rollout: Rollout) -> Tensor:
    """[B, T, H]: position t holds the state that predicts `completion_ids[:, t]`; masked positions may hold anything.

    Args:
        model: Causal LM that `check_shared_prompts` accepts, wrapped or not.
        rollout: B sequences, those of one prompt side by side.
    """
    ids, completion_mask, device = rollout.completion_ids, rollout.completion_mask, rollout.completion_ids.device
    is_first = first_of_prompts(rollout.prompt_ids, rollout.prompt_mask)
    first, group = is_first.nonzero().flatten(), is_first.cumsum(0) - 1  # [U], one for each row; [B], the row of each
    prompt_mask = rollout.prompt_mask[first]
    prompts, lengths = prompt_mask.sum(1), completion_mask.sum(1)  # [U], [B]
    places = prompt_mask.cumsum(1) - 1
    of_prompts = torch.stack([rollout.prompt_ids[first], torch.zeros_like(places), places])  # [3, U, P]
    number = torch.arange(1, len(ids) + 1, device=device).unsqueeze(1)
    places = prompts[group].unsqueeze(1) + torch.arange(ids.shape[1], device=device)
    of_completions = torch.stack([ids, number.expand_as(ids), places])  # [3, B, T]
    row_lengths = prompts.index_add(0, group, lengths)
    width = int(row_lengths.max())
    is_prompt, there = length_mask(prompts, width), length_mask(row_lengths, width)
    # ids, segments (0 is the prompt) and positions; the completions of a row follow each other
    rows = torch.zeros(3, len(first), width, dtype=torch.int64, device=device)
    rows[:, is_prompt] = of_prompts[:, prompt_mask]
    rows[:, there & ~is_prompt] = of_completions[:, completion_mask]
    input_ids, segment, position_ids = rows  # [U, L] each
    seen = (segment.unsqueeze(1) == 0) | (segment.unsqueeze(1) == segment.unsqueeze(2))  # [U, query, key]
    # padding sees the prompt: no softmax is over nothing
    seen &= there.unsqueeze(1) & torch.ones(width, width, dtype=torch.bool, device=device).tril()
    mask = seen.unsqueeze(1)
    # SDPA takes bools; others add the mask to the scores
    inner: Any = base_model(model)
    if getattr(inner.config.get_text_config(), "_attn_implementation", None) != "sdpa":
        mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    states = head_hidden_states(model, input_ids, mask, position_ids=position_ids)
    earlier = lengths.cumsum(0) - lengths  # tokens of the completions before
    before = places + (earlier - earlier[first][group]).unsqueeze(1) - 1  # [B, T], the column of the token before
    before[:, 0] = prompts[group] - 1
    return states.flatten(0, 1)[before.masked_fill(~completion_mask, 0) + width * group.unsqueeze(1)]


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
