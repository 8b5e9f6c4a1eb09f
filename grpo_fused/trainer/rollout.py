"""The rollout: prompts in, groups of sampled completions with their masks out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase


class Rollout(NamedTuple):
    """B = prompts * num_generations sampled sequences, the samples of one prompt side by side.

    Everything an update reads, so a recorded rollout can be replayed on another model or with another engine.
    """

    prompt_ids: Tensor  # [B, P] int64, padded on the left: all completions start in the same column
    prompt_mask: Tensor  # [B, P] bool
    completion_ids: Tensor  # [B, T] int64, padded on the right
    completion_mask: Tensor  # [B, T] bool, True up to and including the EOS

    def rows(self, start: int, stop: int) -> Rollout:
        """The sequences `start` to `stop`."""
        return Rollout(*(tensor[start:stop] for tensor in self))


def generate_rollout(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    num_generations: int = 1,
    max_completion_length: int,
    temperature: float = 1.0,
    greedy: bool = False,
) -> Rollout:
    """Samples `num_generations` completions for each prompt from the whole softmax at `temperature`.

    Args:
        model: Causal LM; its dropout must be off (`model.eval()`).
        tokenizer: Needs an EOS and a pad token, which may be the same.
        prompts: Texts, none of them empty.
        num_generations: Completions for each prompt.
        max_completion_length: Tokens, EOS included.
        temperature: Divides the logits, > 0.
        greedy: Take the most likely token instead of sampling, for evaluation.
    """
    eos_token_id, pad_token_id = special_token_ids(tokenizer)
    prompt_ids, prompt_mask = encode_prompts(tokenizer, prompts, pad_token_id)
    prompt_ids = prompt_ids.repeat_interleave(num_generations, dim=0).to(model.device)  # [B, P]
    prompt_mask = prompt_mask.repeat_interleave(num_generations, dim=0).to(model.device)
    # Only what `generate` must know; top_k=0 because its default of 50 would truncate the distribution.
    sampling = {"do_sample": False} if greedy else {"do_sample": True, "temperature": temperature, "top_k": 0}
    generation_config = GenerationConfig(
        max_new_tokens=max_completion_length, eos_token_id=eos_token_id, pad_token_id=pad_token_id, **sampling
    )
    sequences = model.generate(  # type: ignore[operator]  # transformers types it as a Tensor
        input_ids=prompt_ids, attention_mask=prompt_mask.long(), generation_config=generation_config
    )
    completion_ids = sequences[:, prompt_ids.shape[1] :]  # [B, T]
    return Rollout(prompt_ids, prompt_mask, completion_ids, mask_after_eos(completion_ids, eos_token_id))


def mask_after_eos(completion_ids: Tensor, eos_token_id: int) -> Tensor:
    """True for every token up to and including the first EOS; a row without one was cut and is True throughout.

    Ids are compared with the EOS only, never with the pad token: many tokenizers pad with their EOS, and a mask of
    "not pad" would then drop the EOS, and the policy would never learn to stop.

    Args:
        completion_ids: [B, T] int.
        eos_token_id: The token that ends a completion.

    Returns:
        [B, T] bool.
    """
    is_eos = completion_ids == eos_token_id
    eos_seen_before = is_eos.cumsum(dim=1) - is_eos.long()
    return eos_seen_before == 0


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], pad_token_id: int
) -> tuple[Tensor, Tensor]:
    """Token ids [B, P] int64 and mask [B, P] bool of the prompts, padded on the left whatever the tokenizer's side."""
    encoded: list[list[int]] = [tokenizer(prompt).input_ids for prompt in prompts]
    for prompt, row in zip(prompts, encoded, strict=True):
        if not row:
            raise ValueError(f"a prompt must have at least one token; got none from {prompt!r}")
    width = max(map(len, encoded))
    ids = torch.tensor([[pad_token_id] * (width - len(row)) + row for row in encoded])
    mask = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in encoded])
    return ids, mask


def decode_completions(tokenizer: PreTrainedTokenizerBase, rollout: Rollout) -> list[str]:
    """The text of each completion, without the EOS and the padding."""
    return [
        str(tokenizer.decode(ids[mask], skip_special_tokens=True))
        for ids, mask in zip(rollout.completion_ids, rollout.completion_mask, strict=True)
    ]


def special_token_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """(EOS, pad); a tokenizer without a pad token pads with its EOS."""
    eos_token_id, pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    if not isinstance(eos_token_id, int):
        raise ValueError(f"the tokenizer needs an EOS token, or no completion ever ends; got {eos_token_id!r}")
    return eos_token_id, eos_token_id if pad_token_id is None else pad_token_id
