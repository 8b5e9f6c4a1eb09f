"""Where log-probs of vLLM differ from those of the policy: in the head, or in the layers before it.

    make vllm                                                             # its environment, once
    .venv-vllm/bin/python -m benchmarks.mismatch --out results.json                             # small random models
    .venv-vllm/bin/python -m benchmarks.mismatch --model ~/gemma-3-270m --out results.json      # and a pretrained one
    .venv-vllm/bin/python -m benchmarks.mismatch --rounds 5 --out results.json                  # and the times

vLLM samples in bf16 from weights that it got from the policy. Each sampled token then has four log-probs:

    vllm            vLLM's own
    vllm_exact      `fused_linear_logprobs` of vLLM's hidden states (`exact_logprobs`)
    policy_exact    `fused_linear_logprobs` of the policy's hidden states, as our trainer scores
    policy_logits   log-softmax in fp32 of the policy's own bf16 logits, as a trainer without a fused head scores

`head` is the difference of the first two, `backbone` that of the second and third. The ratio is exp(policy - vLLM). The
policy runs with bf16 weights, and with fp32 weights under bf16 autocast. `fp32 head` is vLLM with its own option for
an fp32 head (`hf_overrides={"head_dtype": "float32"}`). `--rounds` also times rollouts with and without
`exact_logprobs`, in turn; that needs an idle machine.
"""

from __future__ import annotations

import os

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # nothing to compile for models of this size
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB of an engine
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import argparse
import gc
import tempfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from benchmarks.results import load, machine, record
from benchmarks.timing import times_by_round, with_ratios
from grpo_fused import fused_linear_logprobs, head_hidden_states, lm_head_inputs
from grpo_fused.trainer import Rollout, Sampling, VLLMEngine, roll_out

VOCABULARIES, HIDDEN, LAYERS, LOGIT_STD = (32768, 151936), 256, 4, 2.5
PROMPTS, GENERATIONS, ROWS = 8, 4, 4
TEXTS = (
    "The capital of France is", "def add(a, b):", "Once upon a time there was a", "Q: What is 17 + 25?\nA:",
    "Water boils at a temperature of", "Dear Sir or Madam,", "The three laws of", "1, 1, 2, 3, 5, 8,",
)  # fmt: skip
POLICIES = {"bf16 weights": torch.bfloat16, "bf16 autocast": torch.float32}
DIFFERENCES = {
    "vLLM against the policy": ("vllm", "policy_exact"),
    "head": ("vllm", "vllm_exact"),
    "backbone": ("vllm_exact", "policy_exact"),
    "both with bf16 logits": ("vllm", "policy_logits"),
}
"""Name to the log-probs that are compared: that of the rollout, and that of the trainer."""


def random_model(vocab: int) -> Qwen2ForCausalLM:
    """An untied model whose logits have a standard deviation of about `LOGIT_STD`."""
    config = Qwen2Config(
        vocab_size=vocab, hidden_size=HIDDEN, intermediate_size=3 * HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=HIDDEN // 64, num_key_value_heads=HIDDEN // 128, max_position_embeddings=512,
        initializer_range=HIDDEN**-0.5, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).eval()
    model.lm_head.weight.data.mul_(LOGIT_STD)  # the final norm gives states of size 1 an element
    return model


def random_prompts(vocab: int) -> list[list[int]]:
    """Ids of prompts of 5 to 40 tokens."""
    g = torch.Generator().manual_seed(1)
    return [torch.randint(vocab, (5 + 5 * number,), generator=g).tolist() for number in range(PROMPTS)]


def sample(engine: VLLMEngine, prompts: list[list[int]], tokens: int) -> tuple[Rollout, dict[str, Tensor]]:
    """A rollout and both log-probs [N] of its tokens: it is sampled twice, with the same seeds."""
    sampling = Sampling(num_generations=GENERATIONS, max_completion_length=tokens, seed=3)
    found: dict[str, Tensor] = {}
    rollouts = []
    for name, exact in (("vllm", False), ("vllm_exact", True)):
        engine.exact_logprobs = exact
        rollout = roll_out(engine, prompts, sampling)
        assert rollout.sampling_logps is not None
        found[name] = rollout.sampling_logps[rollout.completion_mask]
        rollouts.append(rollout)
    if not torch.equal(rollouts[0].completion_ids, rollouts[1].completion_ids):
        raise RuntimeError("vLLM must sample the same tokens for the same seeds; two rollouts differ")
    return rollouts[0], found


@torch.no_grad()
def score(model: PreTrainedModel, rollout: Rollout, *, autocast: bool) -> dict[str, Tensor]:
    """The policy's log-probs and entropies [N] of the tokens."""
    found: dict[str, list[Tensor]] = {"policy_exact": [], "policy_logits": [], "entropy": []}
    for start in range(0, len(rollout.completion_ids), ROWS):
        part = rollout.rows(slice(start, start + ROWS))
        mask = torch.cat([part.prompt_mask, part.completion_mask], 1).long()
        ids, own = torch.cat([part.prompt_ids, part.completion_ids], 1), part.completion_mask
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            states = head_hidden_states(model, ids, mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
            states = states[:, part.prompt_ids.shape[1] - 1 : -1][own]
            tokens = part.completion_ids[own]
            scores = fused_linear_logprobs(states, token_ids=tokens, **lm_head_inputs(model), with_entropy=True)
            logits = model.get_output_embeddings()(states)
        assert logits.dtype == torch.bfloat16
        assert scores.entropies is not None
        found["policy_exact"].append(scores.logps)
        found["entropy"].append(scores.entropies)
        found["policy_logits"].append(logits.float().log_softmax(-1).gather(1, tokens[:, None])[:, 0])
    return {name: torch.cat(values) for name, values in found.items()}


def compare(logps: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """Statistics of each difference, in nats, and the share of ratios outside [0.9, 1.1]."""
    found = {}
    for name, (rollout, trainer) in DIFFERENCES.items():
        difference = logps[trainer].double() - logps[rollout].double()
        size, ratio = difference.abs(), difference.exp()
        found[name] = {
            "mean": float(size.mean()), "p99": float(size.quantile(0.99)), "max": float(size.max()),
            "outside": float(((ratio < 0.9) | (ratio > 1.1)).double().mean()),
        }  # fmt: skip
    return found


def measure(
    folder: Path, prompts: list[list[int]], given: argparse.Namespace, *, fp32_head: bool = False
) -> dict[str, Any]:
    """The figures of a model."""
    further: dict[str, Any] = {"hf_overrides": {"head_dtype": "float32"}} if fp32_head else {}
    engine = VLLMEngine(
        str(folder), dtype="bfloat16", exact_logprobs=True, enforce_eager=True, max_model_len=256,
        skip_tokenizer_init=True, **further,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    engine.sync_weights(model)
    rollout, sampled = sample(engine, prompts, given.tokens)
    found: dict[str, Any] = {
        "vocab": engine.vocab_size, "hidden": model.config.hidden_size, "layers": model.config.num_hidden_layers,
        "tokens": int(rollout.completion_mask.sum()), "fp32_head": fp32_head, "policies": {},
    }  # fmt: skip
    for name, dtype in POLICIES.items():
        scored = score(model.to(dtype), rollout, autocast=dtype == torch.float32)
        found["entropy"] = float(scored.pop("entropy").mean())
        found["policies"][name] = compare(sampled | scored)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if given.rounds:
        found["calls"] = with_ratios(
            times_by_round(
                {name: partial(again, engine, exact, prompts, given.tokens) for name, exact in CALLS.items()},
                "cpu",
                rounds=given.rounds,
            ),
            "vllm",
        )
    return found


CALLS = {"vllm": False, "exact_logprobs": True}


def again(engine: VLLMEngine, exact: bool, prompts: list[list[int]], tokens: int) -> None:
    """A rollout, for its time."""
    engine.exact_logprobs = exact
    engine.generate(prompts, Sampling(num_generations=GENERATIONS, max_completion_length=tokens, seed=3))


def show(name: str, found: dict[str, Any]) -> None:
    print(f"{name}: {found['tokens']} tokens, entropy {found['entropy']:.2f} nats")
    for policy, rows in found["policies"].items():
        for difference, row in rows.items():
            print(
                f"  {policy:14s} {difference:24s} mean {row['mean']:.1e}  p99 {row['p99']:.1e}  max {row['max']:.1e}  "
                f"outside [0.9, 1.1] {row['outside']:.2%}",
                flush=True,
            )
    for call, row in found.get("calls", {}).items():
        print(f"  {call}: {row['ms']['median']:.0f} ms a rollout, {row['times_bare']['median']:.3f} x vllm")


def main() -> None:
    """Measure, print, and put the section `mismatch` into a file; models that it has already stay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder with a pretrained model; default random ones")
    parser.add_argument("--vocabularies", type=int, nargs="+", default=VOCABULARIES, help="of the random models")
    parser.add_argument("--tokens", type=int, default=64, help="of a completion, at most")
    parser.add_argument("--fp32-head", action="store_true", help="also vLLM with its own option for an fp32 head")
    parser.add_argument("--rounds", type=int, default=0, help="of timed rollouts")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    machine("cpu")
    heads = (False, True) if given.fp32_head else (False,)

    def run(name: str, folder: Path, prompts: list[list[int]]) -> None:
        for fp32_head in heads:
            key = name + ", fp32 head" * fp32_head
            found = measure(folder, prompts, given, fp32_head=fp32_head)
            show(key, found)
            if given.out is not None:
                known = load(given.out).sections.get("mismatch", {}) if given.out.exists() else {}
                record("mismatch", {"cases": known.get("cases", {}) | {key: found}}, out=given.out)
            gc.collect()

    if given.model is not None:
        tokenizer = AutoTokenizer.from_pretrained(given.model)
        run(given.model.resolve().name, given.model, [tokenizer(text)["input_ids"] for text in TEXTS])
        return
    for vocab in given.vocabularies:
        with tempfile.TemporaryDirectory() as folder:
            random_model(vocab).save_pretrained(folder)
            run(f"random, V = {vocab}", Path(folder), random_prompts(vocab))


if __name__ == "__main__":
    main()
