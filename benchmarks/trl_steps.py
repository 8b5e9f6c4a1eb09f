"""Ten steps of TRL's GRPO trainer, generation included: stock, with `patch_trl()`, and `FusedGRPOTrainer`.

    python -m benchmarks.trl_steps --out results.json    # about ten minutes on two cores

Each run has a process of its own: time is that of `train()`, memory the peak of the process. All of them generate the
same completions and must report the same losses. A small model with a large vocabulary is mostly head; the section
`end_to_end` has the head's share in larger ones.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.results import machine, record
from benchmarks.timing import summary

VOCAB, HIDDEN, LAYERS = 50_000, 256, 2
WORDS = [f"w{i}" for i in range(VOCAB - 2)]
TRAINERS = ("stock", "patched", "fused")
OPTIONS = {
    "per_device_train_batch_size": 16, "num_generations": 8, "max_completion_length": 64, "learning_rate": 1e-4,
    "logging_steps": 1, "report_to": "none", "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "seed": 0,
}  # fmt: skip
"""Everything else is TRL's default, bf16 autocast included."""


def save_model(folder: Path) -> None:
    """A random Qwen2 and a tokenizer of words."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False,
        eos_token_id=1, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(WordLevel({w: i for i, w in enumerate(["<pad>", "<eos>", *WORDS])}, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    tokenizer.save_pretrained(folder)


def train(kind: str, folder: Path, steps: int) -> dict[str, Any]:
    """Seconds, processor seconds, peak memory and losses of one run, in this process."""
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    from grpo_fused.integrations.trl import FusedGRPOTrainer, patch_trl

    g = random.Random(0)
    rows = Dataset.from_list([{"prompt": " ".join(g.choices(WORDS, k=32))} for _ in range(64)])
    if kind == "patched":
        patch_trl()
    trainer = (FusedGRPOTrainer if kind == "fused" else GRPOTrainer)(
        str(folder / "model"), reward, GRPOConfig(str(folder / "out"), max_steps=steps, **OPTIONS), train_dataset=rows,
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder / "model"),
    )  # fmt: skip
    wall, processor = time.perf_counter(), time.process_time()
    trainer.train()
    return {
        "seconds": time.perf_counter() - wall,
        "processor_seconds": time.process_time() - processor,
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
    }


def reward(completions: list[str], **_: Any) -> list[float]:
    """The share of words with a low number."""
    return [sum(int(word[1:]) < VOCAB // 2 for word in text.split()) / 64 for text in completions]


def main() -> None:
    """Measure, print, and put the section `trl_steps` into a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)  # trainer, folder: in a process of its own
    given = parser.parse_args()
    if given.one is not None:
        print(json.dumps(train(given.one[0], Path(given.one[1]), given.steps)))
        return
    machine("cpu")
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in TRAINERS}
    with tempfile.TemporaryDirectory() as name:
        save_model(Path(name) / "model")
        for _ in range(given.rounds):
            for kind, found in runs.items():
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.trl_steps",
                    "--steps",
                    str(given.steps),
                    "--one",
                    kind,
                    name,
                ]
                env = {**os.environ, "OMP_NUM_THREADS": str(given.threads), "TRANSFORMERS_VERBOSITY": "error"}
                done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
                if done.returncode:
                    sys.exit(f"{kind}: {done.stderr[-2000:]}")
                found.append(json.loads(done.stdout.splitlines()[-1]))
    want = runs["stock"][0]["losses"]
    trainers = {}
    for kind, found in runs.items():
        away = max(abs(a - b) for run in found for a, b in zip(run["losses"], want, strict=True))
        if away > 1e-3:
            sys.exit(f"{kind}: losses are off by {away}: {found[0]['losses']}, stock {want}")
        trainers[kind] = {
            name: summary([run[name] for run in found]) for name in ("seconds", "processor_seconds", "peak_bytes")
        } | {"loss_difference": away}
        times = trainers[kind]["seconds"]["median"], trainers[kind]["processor_seconds"]["median"]
        peak = trainers[kind]["peak_bytes"]["median"] / 2**20
        print(f"{kind:8s} {times[0]:6.1f} s, {times[1]:6.1f} s of processor time, peak {peak:.0f} MiB")
    data = {"vocab": VOCAB, "hidden": HIDDEN, "layers": LAYERS, "steps": given.steps, "threads": given.threads}
    if given.out is not None:
        record("trl_steps", {**data, "trainers": trainers}, out=given.out)


if __name__ == "__main__":
    main()
