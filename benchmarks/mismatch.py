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

import gc
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen2ForCausalLM

from benchmarks.accuracy import outside, quantiles
from benchmarks.qwen2 import small_qwen2
from benchmarks.study import Section, main
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
    model = small_qwen2(
        vocab, HIDDEN, LAYERS, intermediate_size=3 * HIDDEN, max_position_embeddings=512,
        initializer_range=HIDDEN**-0.5,
    ).eval()  # fmt: skip
    model.lm_head.weight.data.mul_(LOGIT_STD)  # the final norm gives states of size 1 an element
    return model


def random_prompts(vocab: int) -> list[list[int]]:
    """Ids of prompts of 5 to 40 tokens."""
    g = torch.Generator().manual_seed(1)
    return [torch.randint(vocab, (5 + 5 * number,), generator=g).tolist() for number in range(PROMPTS)]


def sample(engine: VLLMEngine, prompts: list[list[int]], tokens: int) -> tuple[Rollout, dict[str, Tensor]]:
    """A rollout and both log-probs [N] of its tokens: it is sampled twice, with the same seeds."""
    sampling = Sampling(num_generations=GENERATIONS, max_completion_length=tokens, seed=3)
    logps: dict[str, Tensor] = {}
    rollouts = []
    for name, exact in (("vllm", False), ("vllm_exact", True)):
        engine.exact_logprobs = exact
        rollout = roll_out(engine, prompts, sampling)
        logps[name] = rollout.sampling_logps[rollout.completion_mask]
        rollouts.append(rollout)
    if not torch.equal(rollouts[0].completion_ids, rollouts[1].completion_ids):
        raise RuntimeError("vLLM must sample the same tokens for the same seeds; two rollouts differ")
    return rollouts[0], logps


@torch.no_grad()
def score(model: PreTrainedModel, rollout: Rollout, *, autocast: bool = False) -> dict[str, Tensor]:
    """The policy's log-probs and entropies [N] of the tokens; with candidate sets, log-probs over these and their mass.

    All are in float64. `policy_logits` are of bf16 logits.
    """
    columns: dict[str, list[Tensor]] = {}
    for start in range(0, len(rollout.completion_ids), ROWS):
        part = rollout.rows(slice(start, start + ROWS))
        mask = torch.cat([part.prompt_mask, part.completion_mask], 1).long()
        ids, active = torch.cat([part.prompt_ids, part.completion_ids], 1), part.completion_mask
        tokens, head = part.completion_ids[active], lm_head_inputs(model)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            states = head_hidden_states(model, ids, mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
            states = states[:, part.prompt_ids.shape[1] - 1 : -1][active]
            scores = fused_linear_logprobs(states, token_ids=tokens, **head, with_entropy=True)
            logits = model.get_output_embeddings()(states)
        assert logits.dtype == torch.bfloat16
        logps = logits.float().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        found = {"policy_exact": scores.logps, "policy_logits": logps, "entropy": scores.entropies}
        if part.candidates is not None:
            sets = part.candidates.select(active.reshape(-1).nonzero().squeeze(1))
            found["sets"] = fused_linear_logprobs(states, token_ids=tokens, candidates=sets, **head).logps
            exact = (states.float() @ head["lm_head_weight"].float().T).softmax(-1)
            found["mass"] = (exact * sets.to_mask(exact.shape[1])).sum(-1)
        for name, values in found.items():
            columns.setdefault(name, []).append(values.double())
    return {name: torch.cat(values) for name, values in columns.items()}


def compare(logps: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """Statistics of each difference, in nats, and the share of ratios outside [0.9, 1.1]."""
    rows = {}
    for name, (rollout, trainer) in DIFFERENCES.items():
        new, old = logps[trainer].double(), logps[rollout].double()
        rows[name] = quantiles((new - old).abs()) | {"outside": outside(new, old)}
    return rows


def engine_of(folder: Path, *, fp32_head: bool, **options: Any) -> VLLMEngine:
    """vLLM in bf16; with `fp32_head` by its own option for an fp32 head."""
    further = {"hf_overrides": {"head_dtype": "float32"}} if fp32_head else {}
    return VLLMEngine(
        str(folder), dtype="bfloat16", enforce_eager=True, max_model_len=256, skip_tokenizer_init=True, **further,
        **options,
    )  # fmt: skip


def policy_of(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The trainer's model."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def measure(folder: Path, prompts: list[list[int]], tokens: int, rounds: int, *, fp32_head: bool) -> dict[str, Any]:
    """The figures of a model."""
    engine, model = engine_of(folder, fp32_head=fp32_head, exact_logprobs=True), policy_of(folder, torch.float32)
    engine.sync_weights(model)
    rollout, sampled = sample(engine, prompts, tokens)
    figures: dict[str, Any] = {
        "vocab": engine.vocab_size, "hidden": model.config.hidden_size, "layers": model.config.num_hidden_layers,
        "tokens": int(rollout.completion_mask.sum()), "fp32_head": fp32_head, "policies": {},
    }  # fmt: skip
    for name, dtype in POLICIES.items():
        scored = score(policy_of(folder, torch.float32).to(dtype), rollout, autocast=dtype == torch.float32)
        figures["entropy"] = float(scored.pop("entropy").mean())
        figures["policies"][name] = compare(sampled | scored)
    if rounds:
        calls = {name: partial(again, engine, exact, prompts, tokens) for name, exact in CALLS.items()}
        figures["calls"] = with_ratios(times_by_round(calls, "cpu", rounds=rounds), "vllm")
    return figures


CALLS = {"vllm": False, "exact_logprobs": True}


def again(engine: VLLMEngine, exact: bool, prompts: list[list[int]], tokens: int) -> None:
    """A rollout, for its time."""
    engine.exact_logprobs = exact
    engine.generate(prompts, Sampling(num_generations=GENERATIONS, max_completion_length=tokens, seed=3))


def run(
    model: Annotated[Path | None, "a folder with a pretrained model; default random ones"] = None,
    tokens: Annotated[int, "of a completion, at most"] = 64,
    fp32_head: Annotated[bool, "also vLLM with its own option for an fp32 head"] = False,
    rounds: Annotated[int, "of timed rollouts"] = 0,
) -> Iterator[Section]:
    """The section `mismatch`, after each model; those that a file has already stay."""
    cases: dict[str, Any] = {}

    def measured(name: str, folder: Path, prompts: list[list[int]]) -> Iterator[Section]:
        for wide in (False, True) if fp32_head else (False,):
            cases[name + ", fp32 head" * wide] = measure(folder, prompts, tokens, rounds, fp32_head=wide)
            yield {"cases": cases}
            gc.collect()

    if model is not None:
        tokenizer = AutoTokenizer.from_pretrained(model)
        yield from measured(model.resolve().name, model, [tokenizer(text)["input_ids"] for text in TEXTS])
        return
    for vocab in VOCABULARIES:
        with tempfile.TemporaryDirectory() as folder:
            random_model(vocab).save_pretrained(folder)
            yield from measured(f"random, V = {vocab}", Path(folder), random_prompts(vocab))


if __name__ == "__main__":
    main("mismatch")
