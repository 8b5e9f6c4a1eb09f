"""An update of the trainer where the completions of a prompt share it in one sequence, and where they do not.

    python -m benchmarks.shared_prompts --out results.json    # about three minutes on two cores

A small Qwen2, random rollouts, `GRPOTrainer.update`: forward, loss, backward and AdamW, in fp32. Rounds alternate.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from transformers import Qwen2ForCausalLM

from benchmarks.qwen2 import small_qwen2
from benchmarks.study import Section, main
from benchmarks.timing import times_by_round, with_ratios
from grpo_fused.trainer import GRPOTrainer, GRPOTrainerConfig, Rollout
from grpo_fused.trainer.tiny import tiny_tokenizer

VOCAB, HIDDEN, LAYERS, PROMPTS = 8000, 384, 6, 2
CASES = [(128, 128, 4), (128, 128, 8), (512, 128, 4), (512, 128, 8)]
"""(tokens of a prompt, of a completion, completions of a prompt)"""


def rollout_of(prompt: int, completion: int, generations: int) -> Rollout:
    """Random ids, without padding."""
    g = torch.Generator().manual_seed(0)
    rows = PROMPTS * generations
    prompts = torch.randint(0, VOCAB, (PROMPTS, prompt), generator=g).repeat_interleave(generations, 0)
    completions = torch.randint(0, VOCAB, (rows, completion), generator=g)
    whole = partial(torch.ones, dtype=torch.bool)
    return Rollout(prompts, whole(rows, prompt), completions, whole(rows, completion))


def small_model(vocab_size: int) -> Qwen2ForCausalLM:
    """The same every time; it never ends a completion."""
    return small_qwen2(vocab_size, HIDDEN, LAYERS, num_key_value_heads=2, max_position_embeddings=4096)


def trainer(*, share_prompts: bool) -> GRPOTrainer:
    """Of the small model."""
    model = small_model(VOCAB)
    config = GRPOTrainerConfig(
        prompts_per_step=PROMPTS, num_generations=8, share_prompts=share_prompts, micro_batch_tokens=4096
    )
    rows = [{"prompt": str(number)} for number in range(PROMPTS)]
    return GRPOTrainer(model, tiny_tokenizer(), [lambda completions, **_: [0.0] * len(completions)], rows, config)


def run(rounds: int = 3) -> Iterator[Section]:
    """The section `shared_prompts`."""
    trainers = {"separate": trainer(share_prompts=False), "shared": trainer(share_prompts=True)}
    cases = []
    for prompt, completion, generations in CASES:
        rollout = rollout_of(prompt, completion, generations)
        advantages = torch.linspace(-1, 1, len(rollout.completion_ids))
        calls = {name: partial(one.update, rollout, advantages) for name, one in trainers.items()}
        updates = with_ratios(times_by_round(calls, "cpu", rounds=rounds), "separate")
        cases.append({"prompt": prompt, "completion": completion, "generations": generations, "updates": updates})
    yield {"hidden": HIDDEN, "layers": LAYERS, "vocab": VOCAB, "prompts": PROMPTS, "cases": cases}


if __name__ == "__main__":
    main("shared_prompts")
