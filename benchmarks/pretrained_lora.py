"""`benchmarks.pretrained_cut` with LoRA on a quantised head: all linear layers have an adapter, the head is in int8.

    python -m benchmarks.gemma ~/gemma-3-270m                 # the model, once
    python -m benchmarks.pretrained_lora ~/gemma-3-270m --work runs/pretrained --out results.json    # needs torchao

Start, cut, problems and recipe are those of `benchmarks.pretrained_cut`, but for the learning rate. Gemma's head is
also its embedding: it is untied, and the head alone quantised, by torchao, with one scale a row. Our trainer trains
adapters, and in another arm all weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import pretrained
from benchmarks.pretrained import Model, Since, Work
from benchmarks.pretrained_cut import cut_model
from benchmarks.seeds import Seeds
from benchmarks.small_policy import quantize_head, with_adapters
from benchmarks.study import Section, main
from grpo_fused.trainer.recipe import load_parts

RANK, RATE = 16, 1e-4
"""The rate was chosen on seed 19 and the whole vocabulary, which no arm runs: with 5e-4 all answers became wrong."""
ARMS = {"ours": "benchmarks.pretrained:train", "lora_int8": "benchmarks.pretrained_lora:train"}


def adapted(model: Any, seed: int) -> Any:
    """The model with a head in int8 and adapters on all linear layers, the head's included."""
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    model.config.tie_word_embeddings = False
    quantize_head(model)
    return with_adapters(model, RANK, seed)


def train(arm: str, model: str, seed: int) -> dict[str, Any]:
    """A run, in this process, as `benchmarks.pretrained.train`."""
    with tempfile.TemporaryDirectory() as name:
        options = replace(pretrained.recipe(model, Path(name), seed), learning_rate=RATE)
        parts = load_parts(options)._asdict()
        parts["model"] = adapted(parts["model"], seed)
        trained = pretrained.train_ours(options, parts)
        found = pretrained.figures_of(Path(name))
    return {"after": pretrained.accuracy_of(trained, parts["tokenizer"]), **found}


def run(model: Model, work: Work = Path("runs/pretrained"), seeds: Seeds = 5, since: Since = None) -> Iterator[Section]:
    """The section `pretrained_lora`."""
    begin, folder = cut_model(model, work), work / "lora"
    folder.mkdir(exist_ok=True)
    about = {"task": "pretrained_lora", "rank": RANK, "lora_rate": RATE}
    yield from pretrained.measure(begin, folder, seeds, since, about, {}, ARMS, "ours")


if __name__ == "__main__":
    main("pretrained_lora")
