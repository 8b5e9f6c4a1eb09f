"""A rollout by the trainer's `HuggingFaceEngine`, and by transformers' `generate` as it is.

    python -m benchmarks.generation --out results.json    # about two minutes on two cores

A small Qwen2 with a large vocabulary, in fp32. `transformers`: each completion has its own copy of the prompt, and
tokens are drawn by `torch.multinomial`. `own prompts`: our draw of a token, a copy of the prompt for each completion.
`shared prompts`: what the trainer does, a prompt passes through the model once. Rounds alternate.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from transformers import GenerationConfig

from benchmarks.shared_prompts import HIDDEN, LAYERS, small_model
from benchmarks.study import Section, main
from benchmarks.timing import times_by_round, with_ratios
from grpo_fused.trainer import HuggingFaceEngine, Sampling
from grpo_fused.trainer.rollout import pad_prompts
from grpo_fused.trainer.tiny import tiny_tokenizer

VOCAB, PROMPTS, GENERATIONS, LENGTH = 151936, 4, 8, 32
CASES = (32, 256)
"""tokens of the longest prompt; the shortest has half of them"""


def run(rounds: int = 5) -> Iterator[Section]:
    """The section `generation`."""
    model = small_model(VOCAB).eval()
    sampling = Sampling(num_generations=GENERATIONS, max_completion_length=LENGTH, pad_token_id=0, eos_token_ids=())
    shared, separate = (HuggingFaceEngine(model, tiny_tokenizer()) for _ in range(2))
    separate._prompt_cache = lambda ids, mask: {}
    plain = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=LENGTH, pad_token_id=0)
    cases = []
    for longest in CASES:
        lengths = torch.linspace(longest // 2, longest, PROMPTS).int().tolist()
        prompts = [torch.randint(1, VOCAB, (length,)).tolist() for length in lengths]
        ids, mask = pad_prompts([prompt for prompt in prompts for _ in range(GENERATIONS)], 0)
        calls = {
            "transformers": partial(model.generate, input_ids=ids, attention_mask=mask.long(), generation_config=plain),
            "own prompts": partial(separate.generate, prompts, sampling),
            "shared prompts": partial(shared.generate, prompts, sampling),
        }
        rollouts = with_ratios(times_by_round(calls, "cpu", rounds=rounds), "transformers")
        cases.append({"prompt": longest, "rollouts": rollouts})
    yield {
        "hidden": HIDDEN, "layers": LAYERS, "vocab": VOCAB, "prompts": PROMPTS, "generations": GENERATIONS,
        "completion": LENGTH, "cases": cases,
    }  # fmt: skip


if __name__ == "__main__":
    main("generation")
