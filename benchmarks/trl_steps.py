"""Ten steps of TRL's GRPO trainer, generation included: stock, with `patch_trl()`, and `FusedGRPOTrainer`.

    python -m benchmarks.trl_steps --out results.json    # about ten minutes on two cores

Each run has a process of its own: time is that of `train()`, memory the peak of the process. All of them generate the
same completions and must report the same losses. A small model with a large vocabulary is mostly head; the section
`end_to_end` has the head's share in larger ones.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.child import in_child
from benchmarks.exact import worst
from benchmarks.memory import peak_of_process
from benchmarks.study import Section, main
from benchmarks.timing import summary

VOCAB, HIDDEN, LAYERS = 50_000, 256, 2
STEPS = 10
WORDS = [f"w{i}" for i in range(VOCAB - 2)]
TRAINERS = ("stock", "patched", "fused")
OPTIONS = {
    "per_device_train_batch_size": 16, "num_generations": 8, "max_completion_length": 64, "learning_rate": 1e-4,
    "logging_steps": 1, "report_to": "none", "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "seed": 0,
}  # fmt: skip
"""Everything else is TRL's default, bf16 autocast included."""


def save_model(folder: Path) -> None:
    """A random Qwen2 and a tokenizer of words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    from benchmarks.qwen2 import small_qwen2

    model = small_qwen2(
        VOCAB, HIDDEN, LAYERS, num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=256,
        eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({w: i for i, w in enumerate(["<pad>", "<eos>", *WORDS])}, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    tokenizer.save_pretrained(folder)


def train(kind: str, place: str) -> dict[str, Any]:
    """Seconds, processor seconds, peak memory and losses of one run, in this process."""
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    from grpo_fused.integrations.trl import FusedGRPOTrainer, patch_trl

    g, folder = random.Random(0), Path(place)
    rows = Dataset.from_list([{"prompt": " ".join(g.choices(WORDS, k=32))} for _ in range(64)])
    if kind == "patched":
        patch_trl()
    trainer = (FusedGRPOTrainer if kind == "fused" else GRPOTrainer)(
        str(folder / "model"), reward, GRPOConfig(str(folder / "out"), max_steps=STEPS, **OPTIONS), train_dataset=rows,
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder / "model"),
    )  # fmt: skip
    wall, processor = time.perf_counter(), time.process_time()
    trainer.train()
    return {
        "seconds": time.perf_counter() - wall,
        "processor_seconds": time.process_time() - processor,
        "peak_bytes": peak_of_process(),
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
    }


def reward(completions: list[str], **_: Any) -> list[float]:
    """The share of words with a low number."""
    return [sum(int(word[1:]) < VOCAB // 2 for word in text.split()) / 64 for text in completions]


def run(rounds: int = 3) -> Iterator[Section]:
    """The section `trl_steps`."""
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in TRAINERS}
    quiet = {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with tempfile.TemporaryDirectory() as name:
        save_model(Path(name) / "model")
        for _ in range(rounds):
            for kind, rows in runs.items():
                rows.append(in_child("benchmarks.trl_steps:train", kind, name, **quiet))
    want = runs["stock"][0]["losses"]
    trainers = {}
    for kind, rows in runs.items():
        away = worst(*(abs(a - b) for row in rows for a, b in zip(row["losses"], want, strict=True)))
        if not away <= 1e-3:
            sys.exit(f"{kind}: losses are off by {away}: {rows[0]['losses']}, stock {want}")
        names = ("seconds", "processor_seconds", "peak_bytes")
        trainers[kind] = {name: summary([row[name] for row in rows]) for name in names} | {"loss_difference": away}
    yield {
        "vocab": VOCAB, "hidden": HIDDEN, "layers": LAYERS, "steps": STEPS, "threads": 1, "trainers": trainers,
    }  # fmt: skip


if __name__ == "__main__":
    main("trl_steps")
