"""An update of the trainer where the completions of a prompt share it in one sequence, and where they do not.

    python -m benchmarks.shared_prompts --out results.json    # about three minutes on two cores

A small Qwen2, random rollouts, `GRPOTrainer.update`: forward, loss, backward and AdamW, in fp32. Rounds alternate.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.results import machine, record
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
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocab_size, hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, num_hidden_layers=LAYERS,
            num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=4096, pad_token_id=None,
            eos_token_id=None,
        )
    )  # fmt: skip


def trainer(*, share_prompts: bool) -> GRPOTrainer:
    """Of the small model."""
    model = small_model(VOCAB)
    config = GRPOTrainerConfig(
        prompts_per_step=PROMPTS, num_generations=8, share_prompts=share_prompts, micro_batch_tokens=4096
    )
    rows = [{"prompt": str(number)} for number in range(PROMPTS)]
    return GRPOTrainer(model, tiny_tokenizer(), [lambda completions, **_: [0.0] * len(completions)], rows, config)


def main() -> None:
    """Measure, print, and put the section `shared_prompts` into a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    machine("cpu")
    trainers = {"separate": trainer(share_prompts=False), "shared": trainer(share_prompts=True)}
    cases: list[dict[str, Any]] = []
    for prompt, completion, generations in CASES:
        rollout = rollout_of(prompt, completion, generations)
        advantages = torch.linspace(-1, 1, len(rollout.completion_ids))
        calls = {name: partial(one.update, rollout, advantages) for name, one in trainers.items()}
        found = with_ratios(times_by_round(calls, "cpu", rounds=given.rounds), "separate")
        cases.append({"prompt": prompt, "completion": completion, "generations": generations, "updates": found})
        tokens = rollout.completion_ids.numel()
        separate, shared = (found[name]["ms"]["median"] for name in calls)
        rates = f"{1e3 * tokens / separate:6.0f} completion tokens/s apart, {1e3 * tokens / shared:6.0f} shared"
        print(f"{prompt:4d}:{completion} tokens, {generations} completions: {rates} ({separate / shared:.2f} x)")
    if given.out is not None:
        section = {"hidden": HIDDEN, "layers": LAYERS, "vocab": VOCAB, "prompts": PROMPTS, "cases": cases}
        record("shared_prompts", section, out=given.out)


if __name__ == "__main__":
    main()
