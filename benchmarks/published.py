"""What others published of truncated sampling and of heads in bf16, once more with a small pretrained model.

    make vllm                                                                          # its environment, once
    .venv-vllm/bin/python -m benchmarks.published ~/gemma-3-270m --out results.json    # a few minutes on two cores

vLLM samples in bf16 at temperature 1; the tokens that it kept are its sampling masks, on a CPU read from its log-probs.
The trainer's side is transformers' backbone in bf16, scored by `fused_linear_logprobs` over the whole vocabulary and
over these sets. The kept mass of a position is the sum of the policy's probabilities over its set: the mean ratio
without the sets must be its mean, and 1 with them. docs/published.md has the sources.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.accuracy import outside, quantiles
from benchmarks.mismatch import TEXTS, engine_of, policy_of, score  # which makes the settings of vLLM
from benchmarks.study import Section, main
from grpo_fused.heads.patches import Patches
from grpo_fused.rollouts import vllm_outputs
from grpo_fused.trainer import Rollout, Sampling, roll_out

GENERATIONS = 4
MOST = 4096
"""Log-probs for a position: bf16 has tokens as likely as the 1024th."""
TRUNCATIONS: dict[str, dict[str, Any]] = {
    "top_p 0.8, top_k 1024": {"top_p": 0.8, "top_k": 1024},
    "top_k 20": {"top_k": 20},
    "top_k 1024": {"top_k": 1024},
}
SIZES = {"top_p": 0.97, "top_k": 512}


def ratios(new: Tensor, old: Tensor) -> dict[str, float]:
    """Of the importance ratio."""
    ratio = (new - old).exp()
    return {"mean": float(ratio.mean()), "median": float(ratio.median()), "outside": outside(new, old)}


class Measured:
    """vLLM and the policy of a folder, in bf16."""

    def __init__(self, folder: Path, *, fp32_head: bool = False) -> None:
        self.engine = engine_of(
            folder, fp32_head=fp32_head, max_num_seqs=GENERATIONS * len(TEXTS), max_num_batched_tokens=2048
        )  # fmt: skip
        self.model = policy_of(folder, torch.bfloat16)
        self.engine.sync_weights(self.model)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.prompts: list[list[int]] = [tokenizer(text)["input_ids"] for text in TEXTS]

    def rollout(self, tokens: int, **truncation: Any) -> tuple[Rollout, Tensor]:
        """`tokens` tokens, and vLLM's log-probs of them."""
        length = tokens // (GENERATIONS * len(self.prompts))
        sampling = Sampling(num_generations=GENERATIONS, max_completion_length=length, seed=3, **truncation)
        rollout = roll_out(self.engine, self.prompts, sampling)
        return rollout, rollout.sampling_logps[rollout.completion_mask].double()

    def truncated(self, tokens: int, truncation: dict[str, Any]) -> dict[str, Any]:
        """The kept mass and both ratios."""
        rollout, vllm = self.rollout(tokens, **truncation)
        scores = score(self.model, rollout)
        closed = (scores["policy_exact"] - scores["sets"]) - scores["mass"].log()
        return {
            "tokens": len(vllm), "mass": float(scores["mass"].mean()), "whole": ratios(scores["policy_exact"], vllm),
            "masks": ratios(scores["sets"], vllm), "from_closed_form": float(closed.abs().max()),
        }  # fmt: skip

    def sizes(self, tokens: int) -> dict[str, float]:
        """Of the sets of one truncation."""
        rollout, _ = self.rollout(tokens, **SIZES)
        sizes = rollout.candidates.sizes[rollout.completion_mask.reshape(-1)].double()
        return quantiles(sizes) | {"tokens": len(sizes), "alone": float((sizes == 1).double().mean())}

    def correlation(self, tokens: int) -> dict[str, float]:
        """Pearson's, between the probabilities of vLLM and of the trainer, with logits in bf16 or fp32."""
        rollout, vllm = self.rollout(tokens)
        scores = score(self.model, rollout)
        return {
            name: float(torch.corrcoef(torch.stack([vllm.exp(), scores[column].exp()]))[0, 1])
            for name, column in (("bf16 logits", "policy_logits"), ("whole", "policy_exact"))
        }


def run(
    model: Annotated[Path, "a folder with a pretrained model"],
    tokens: Annotated[int, "of each row, at most"] = 2048,
) -> Iterator[Section]:
    """The section `published`."""
    with Patches((vllm_outputs, "MOST_CANDIDATES", MOST)):
        narrow = Measured(model)
        section: Section = {"model": model.resolve().name, "ratios": {}}
        for name, truncation in TRUNCATIONS.items():
            section["ratios"][name] = narrow.truncated(tokens, truncation)
            print(name, section["ratios"][name], flush=True)
        section["sizes"] = narrow.sizes(tokens)
        print(section["sizes"], flush=True)
        section["correlation"] = {"bf16": narrow.correlation(tokens)}
        del narrow
        gc.collect()
        section["correlation"]["fp32"] = Measured(model, fp32_head=True).correlation(tokens)
        print(section["correlation"], flush=True)
        yield section


if __name__ == "__main__":
    main("published")
