"""The supervised warm-up: a few epochs on questions with answers, some of them worked.

Enough for the model to know the format and some of the arithmetic, too little to know all of it. GRPO starts here.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

IGNORED = -100  # label of a position that is not learnt, as in torch.nn.functional.cross_entropy


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    demonstrations: list[dict[str, str]],
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
) -> float:
    """Trains on "prompt" + "completion" rows with next-token cross-entropy; returns the last loss."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    rng = random.Random(seed)
    loss = torch.tensor(float("nan"))
    progress = tqdm(range(steps), desc="warm-up", unit="step", mininterval=1.0, disable=None)  # none into a file
    for step in progress:
        input_ids, attention_mask, labels = collate(tokenizer, rng.sample(demonstrations, batch_size))
        loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0:
            progress.set_postfix(loss=f"{loss.item():.3f}")
    model.eval()
    return loss.item()


def collate(tokenizer: PreTrainedTokenizerBase, rows: list[dict[str, str]]) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, mask and labels [B, L], padded on the right; only the completion and its EOS are learnt."""
    prompts = [tokenizer(row["prompt"]).input_ids for row in rows]
    completions = [[*tokenizer(row["completion"]).input_ids, tokenizer.eos_token_id] for row in rows]
    both = list(zip(prompts, completions, strict=True))
    texts = [torch.tensor(prompt + completion) for prompt, completion in both]
    learnt = [torch.tensor([IGNORED] * len(prompt) + completion) for prompt, completion in both]
    input_ids = pad_sequence(texts, batch_first=True, padding_value=tokenizer.pad_token_id)
    attention_mask = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
    return input_ids, attention_mask, pad_sequence(learnt, batch_first=True, padding_value=IGNORED)
