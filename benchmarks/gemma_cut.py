"""A model with a vocabulary cut to one task: it trains many times faster, and many seeds become possible.

Of the tokens of the model these stay:

1. special tokens in use, and the 256 bytes to which the tokenizer falls back;
2. all tokens of the task: the prompts of all 4,000 sums and their worked answers;
3. what the model gives probability to: in each position of worked and of sampled answers, the most likely tokens that
   together have `MASS`, and the sampled tokens;
4. the closure of the tokenizer's merges: of each kept token, all pairs of tokens that merge into it. So every kept
   token can still be made, in the same order of merges.

The model keeps the rows of its embedding, which is also the head, and its logits of these tokens. What the others had
is lost: the softmax is over fewer tokens. `cut.json` says how much, in positions that had no part in the choice.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo_fused import head_hidden_states
from grpo_fused.rollouts.engine import Sampling
from grpo_fused.trainer import HuggingFaceEngine

MASS, MOST = 0.999, 4096
"""Probability that the tokens kept for a position have together, and the most tokens kept for one."""
SAMPLED, GENERATIONS = 32, 8
"""Prompts that choose tokens, and as many that measure what is lost; completions of each."""
BATCH = 64
LOGIT_BOUND = 1e-4

Text = tuple[list[int], list[int]]
"""Ids of a prompt and of its completion."""


def closure(merges: Iterable[Sequence[str]], kept: Iterable[str]) -> set[str]:
    """The tokens, and all tokens that merges need to make them."""
    pairs: dict[str, list[Sequence[str]]] = {}
    for pair in merges:
        pairs.setdefault("".join(pair), []).append(pair)
    found, waiting = set(kept), list(kept)
    while waiting:
        for pair in pairs.get(waiting.pop(), ()):
            waiting += set(pair) - found
            found |= set(pair)
    return found


def cut_tokenizer(data: dict[str, Any], kept: set[int]) -> tuple[dict[str, Any], list[int]]:
    """A tokenizer of fewer tokens, and the old id of each new one.

    Args:
        data: The content of `tokenizer.json`; its model is a BPE.
        kept: Ids of tokens; bytes and the parts of these tokens are added.
    """
    bpe, added = data["model"], {token["content"]: token["id"] for token in data["added_tokens"]}
    ids = bpe["vocab"] | added
    falls_back = {f"<0x{byte:02X}>" for byte in range(256)} & ids.keys()
    names = closure(bpe["merges"], falls_back | {name for name, token in ids.items() if token in kept})
    old = sorted(ids[name] for name in names)
    new = {token: index for index, token in enumerate(old)}
    merges = [pair for pair in bpe["merges"] if {*pair, "".join(pair)} <= names]
    vocabulary = {name: new[token] for name, token in bpe["vocab"].items() if name in names}
    tokens = [token | {"id": new[token["id"]]} for token in data["added_tokens"] if token["content"] in names]
    result = data | {"model": bpe | {"vocab": vocabulary, "merges": merges}, "added_tokens": tokens}
    if templates := (data.get("post_processor") or {}).get("special_tokens"):
        special = {name: token | {"ids": [new[i] for i in token["ids"]]} for name, token in templates.items()}
        result["post_processor"] = data["post_processor"] | {"special_tokens": special}
    return result, old


def cut_model(model: Any, old: list[int]) -> None:
    """Keeps the rows of the tied embedding, and renames the special ids.

    Raises:
        ValueError: The head is not tied to the embedding, or a special token is not kept.
    """
    if not model.config.tie_word_embeddings:
        raise ValueError("expected a model whose head is its embedding; got tie_word_embeddings false")
    new = {token: index for index, token in enumerate(old)}
    embedding = model.get_input_embeddings()
    embedding.weight = torch.nn.Parameter(embedding.weight.detach()[old])
    model.tie_weights()
    model.config.vocab_size = embedding.num_embeddings = model.get_output_embeddings().out_features = len(old)
    for config, name in product((model.config, model.generation_config), ("pad", "bos", "eos", "unk")):
        value = getattr(config, f"{name}_token_id", None)
        tokens = value if isinstance(value, list) else [] if value is None else [value]
        if missing := set(tokens) - new.keys():
            raise ValueError(f"{name}_token_id must be among the kept tokens; got {sorted(missing)}")
        if tokens:
            renamed = [new[token] for token in tokens]
            setattr(config, f"{name}_token_id", renamed if isinstance(value, list) else renamed[0])


def ids_of(tokenizer: Any, prompt: str, answer: str) -> Text:
    """With an EOS."""
    answered = tokenizer(answer, add_special_tokens=False).input_ids
    return tokenizer(prompt).input_ids, [*answered, tokenizer.eos_token_id]


def padded(texts: Sequence[Text]) -> tuple[Tensor, Tensor]:
    """Ids [B, L], padded on the right, and whether the token after each is one of a completion."""
    ids = [torch.tensor(prompt + completion) for prompt, completion in texts]
    predicts = [torch.tensor([*[False] * (len(a) - 1), *[True] * len(b), False]) for a, b in texts]
    return pad_sequence(ids, batch_first=True), pad_sequence(predicts, batch_first=True)


@torch.no_grad()
def distributions(model: Any, texts: Sequence[Text]) -> Iterator[Tensor]:
    """[R, V] probabilities in fp32 of the next token, over all tokens of the completions, in parts."""
    for first in range(0, len(texts), BATCH):
        ids, predicts = padded(texts[first : first + BATCH])
        hidden = head_hidden_states(model, ids)[predicts]  # causal: no token sees the padding on its right
        for part in hidden.split(512):
            yield model.get_output_embeddings()(part).float().softmax(-1)


def probable(model: Any, texts: Sequence[Text]) -> set[int]:
    """The most likely tokens of each position, which together have `MASS`, and the tokens of the completions."""
    found = {token for _, completion in texts for token in completion}
    for probabilities in distributions(model, texts):
        top = probabilities.topk(min(MOST, probabilities.shape[-1]))
        before = top.values.cumsum(-1) - top.values  # what the more likely ones have
        found |= set(top.indices[before < MASS].tolist())
    return found


def lost(model: Any, texts: Sequence[Text], old: list[int]) -> dict[str, float]:
    """Of the positions of the completions: their number, and the mean and largest probability of cut tokens."""
    masses = torch.cat(
        [1 - rows[:, old].double().sum(-1) / rows.double().sum(-1) for rows in distributions(model, texts)]
    )
    return {"positions": len(masses), "mean": float(masses.mean()), "max": float(masses.max())}


def sampled(model: Any, tokenizer: Any, prompts: list[list[int]], length: int) -> list[Text]:
    """Completions of the model at temperature 1."""
    sampling = Sampling(
        num_generations=GENERATIONS, max_completion_length=length, eos_token_ids=(tokenizer.eos_token_id,),
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    with torch.autocast("cpu", torch.bfloat16):
        ids, mask, *_ = HuggingFaceEngine(model, tokenizer).generate(prompts, sampling)
    asked = [prompt for prompt in prompts for _ in range(GENERATIONS)]
    return [(prompt, row[kept].tolist()) for prompt, row, kept in zip(asked, ids, mask, strict=True)]


def cut(source: Path, folder: Path, texts: list[tuple[str, str]], length: int) -> dict[str, Any]:
    """Writes the model of `source` with the vocabulary of a task into `folder`, after a check; returns `cut.json`.

    Args:
        source: A folder with a model and its tokenizer.
        folder: To be written.
        texts: Prompts and completions that have all tokens of the task.
        length: Of sampled completions, at most, in tokens.

    Raises:
        RuntimeError: The written tokenizer splits a text in another way, or the written model has other logits.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    tokenizer, model = AutoTokenizer.from_pretrained(source), AutoModelForCausalLM.from_pretrained(source).eval()
    task = [ids_of(tokenizer, prompt, answer) for prompt, answer in texts]
    order = torch.randperm(len(task)).tolist()
    chosen, other = ([task[i] for i in order[first : first + SAMPLED]] for first in (0, SAMPLED))
    drawn = sampled(model, tokenizer, [prompt for prompt, _ in chosen], length)
    measured = sampled(model, tokenizer, [prompt for prompt, _ in other], length)
    of_task = {token for text in task for ids in text for token in ids} | set(tokenizer.all_special_ids)
    likely = probable(model, [*chosen, *drawn])
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer.json"
    data, old = cut_tokenizer(json.loads(file.read_text(encoding="utf-8")), of_task | likely)
    about = {
        "tokens": len(old), "of": model.config.vocab_size, "of_the_task": len(of_task), "likely": len(likely - of_task),
        "mass": MASS, "lost": lost(model, measured, old),
    }  # fmt: skip
    before = logits(model, chosen)[:, old]
    cut_model(model, old)
    model.save_pretrained(folder)
    file.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")

    tokenizer = AutoTokenizer.from_pretrained(folder)
    new = {token: index for index, token in enumerate(old)}
    for (prompt, answer), (a, b) in zip(texts, task, strict=True):
        got = tokenizer(prompt).input_ids, tokenizer(answer, add_special_tokens=False).input_ids
        if got != (expected := ([new[i] for i in a], [new[i] for i in b[:-1]])):
            raise RuntimeError(f"expected {prompt + answer!r} to be the tokens {expected}; got {got}")
    written = AutoModelForCausalLM.from_pretrained(folder).eval()
    renamed = [([new[i] for i in a], [new[i] for i in b]) for a, b in chosen]
    about["logit_difference"] = float((logits(written, renamed) - before).abs().max())
    if not about["logit_difference"] <= LOGIT_BOUND:
        raise RuntimeError(f"expected logits that differ by at most {LOGIT_BOUND}; got {about['logit_difference']}")
    (folder / "cut.json").write_text(json.dumps(about))
    return about


@torch.no_grad()
def logits(model: Any, texts: Sequence[Text]) -> Tensor:
    """[R, V] of the last token of each text, before its EOS."""
    hidden = [head_hidden_states(model, torch.tensor([a + b[:-1]]))[0, -1] for a, b in texts]
    return model.get_output_embeddings()(torch.stack(hidden))
