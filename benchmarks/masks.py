"""Sampling masks of vLLM with a large vocabulary: whether they are the sets, and what they cost the host.

    make vllm                                                                         # its environment, once
    TRITON_INTERPRET=1 .venv-vllm/bin/python -m benchmarks.masks --out results.json   # 15 minutes on two cores

Two models of V tokens sample in fp32: an untrained one, and one trained on a chain of 512 words. Each word has 32 that
may follow, the r-th with a probability in proportion to 1 / r^s; s is between 0.5 and 6, by word, so that some are
nearly certain of the next and others are not. vLLM's own logits are kept: at each token the set is computed from them
once more, by transformers' filters, and compared with the mask. Then the host's time and memory for a token are
measured: what vLLM's host code does for masks (`tolists`, `to_nested_list`) or for dictionaries of log-probs
(`_update_sample_logprobs`), and our conversion to `CandidateSets`. The time is that of the processor in this thread. On
a CPU vLLM's model runner V2 runs in Triton's interpreter, which takes seconds for a token: few are sampled, and the
time of a rollout says nothing.
"""

from __future__ import annotations

import os

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # nothing to compile for models of this size
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB of an engine
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import gc
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from statistics import median
from typing import Annotated, Any

import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM

from benchmarks.accuracy import quantiles
from benchmarks.qwen2 import small_qwen2
from benchmarks.study import Section, main
from grpo_fused import CandidateSets
from grpo_fused.heads.patches import Patches
from grpo_fused.rollouts import vllm_outputs as integration
from grpo_fused.trainer import Sampling, VLLMEngine
from tests.with_vllm.runner_v2 import interpret

TRUNCATIONS: tuple[dict[str, float], ...] = ({"top_p": 0.9}, {"top_p": 0.97}, {"top_k": 20}, {"min_p": 0.05})
HIDDEN, LAYERS = 128, 2
WORDS, SUCCESSORS, EXPONENTS = 512, 32, (0.5, 6.0)
PROMPT, BATCH = 8, 3
VOCAB, STEPS = 151936, 150


def untrained_model(vocab: int) -> Qwen2ForCausalLM:
    """As it is made: nearly the same probability for all tokens."""
    return small_qwen2(vocab, HIDDEN, LAYERS, max_position_embeddings=512).eval()


class Chain:
    """Sentences of `WORDS` tokens, which are spread over the vocabulary."""

    def __init__(self, vocab: int) -> None:
        g = torch.Generator().manual_seed(0)
        self.spacing = vocab // WORDS
        self.followers = torch.rand(WORDS, WORDS, generator=g).argsort(1)[:, :SUCCESSORS]
        rank = torch.arange(1, SUCCESSORS + 1)
        weights = rank ** -torch.linspace(*EXPONENTS, WORDS).unsqueeze(1)
        self.probabilities = weights / weights.sum(1, keepdim=True)

    def words(self, rows: int, length: int, seed: int) -> Tensor:
        """[rows, length] words."""
        g = torch.Generator().manual_seed(seed)
        words = torch.randint(WORDS, (rows, 1), generator=g)
        for _ in range(length - 1):
            drawn = torch.multinomial(self.probabilities[words[:, -1]], 1, generator=g)
            words = torch.cat([words, self.followers[words[:, -1]].gather(1, drawn)], 1)
        return words

    def loss(self, model: Qwen2ForCausalLM, words: Tensor) -> Tensor:
        """Mean cross-entropy with the probabilities of all words that may follow: it needs few steps."""
        logits = model(words * self.spacing).logits.flatten(0, 1)
        followers = self.followers[words.flatten()] * self.spacing
        expected = (self.probabilities[words.flatten()] * logits.gather(1, followers)).sum(1)
        return (logits.logsumexp(1) - expected).mean()


def trained_model() -> Qwen2ForCausalLM:
    """On the chain, by AdamW, whose learning rate rises in 10 steps and falls in the second half."""
    model, chain = untrained_model(VOCAB).train(), Chain(VOCAB)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 1e-2 * min((step + 1) / 10, 1.0, 2 * (1 - step / STEPS))
        loss = chain.loss(model, chain.words(8, 32, seed=1 + step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == STEPS - 1:
            print(f"step {step}: {loss.item():.2f} nats", flush=True)
    return model.eval()


def start(folder: str, *, masks: bool) -> VLLMEngine:
    """vLLM on a runner that has masks, or on one that has none."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if masks else "0"
    engine = VLLMEngine(
        folder, dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=BATCH, max_num_batched_tokens=256,
        skip_tokenizer_init=True,
    )  # fmt: skip
    if engine.masks != masks:
        raise RuntimeError(f"vLLM must{'' if masks else ' not'} have sampling masks here")
    return engine


class Meter:
    """Of each call of some methods: the processor's seconds in this thread, or bytes of Python that it leaves."""

    def __init__(self, *, memory: bool = False) -> None:
        self.memory = memory
        self.calls: dict[str, list[float]] = {}

    def on(self, owner: Any, name: str) -> Patches:
        """While it lasts, calls are measured."""
        method: Callable[..., Any] = getattr(owner, name)

        def measured(*args: Any, **kwargs: Any) -> Any:
            if self.memory:
                tracemalloc.start()
            before = time.thread_time()
            found = method(*args, **kwargs)
            seconds = time.thread_time() - before
            if self.memory:
                kept, _ = tracemalloc.get_traced_memory()
                tracemalloc.stop()
            self.calls.setdefault(name, []).append(kept if self.memory else seconds)
            return found

        return Patches((owner, name, measured))

    def of_token(self, tokens: int) -> float:
        """The sum over all calls, by each method's median, for one of these tokens."""
        return sum(len(calls) * median(calls) for calls in self.calls.values()) / tokens


def completions(engine: VLLMEngine, prompt: list[int], sampling: Sampling, meter: Meter) -> list[Any]:
    """vLLM's completions of the prompt; its host code for masks and log-probs is measured."""
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.outputs import SamplingMaskLists
    from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors

    engine._record_masks(sampling.truncates)
    prompts, parameters = [{"prompt_token_ids": prompt}], engine._parameters(sampling, 0)
    with (
        meter.on(LogprobsProcessor, "_update_sample_logprobs"),
        meter.on(SamplingMaskLists, "to_nested_list"),
        nullcontext() if meter.memory else meter.on(SamplingMaskTensors, "tolists"),  # of arrays that do not stay
    ):
        (output,) = engine.llm.generate(prompts, sampling_params=parameters, use_tqdm=False)
    return list(output.outputs)


@contextmanager
def logits_of(engine: VLLMEngine) -> Iterator[list[Tensor]]:
    """A list that gets the logits of each step meanwhile."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    logits: list[Tensor] = []

    def keep(model: Any) -> list[Any]:
        processors = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
        return [x.register_forward_hook(lambda *call: logits.append(call[-1].float().clone())) for x in processors]

    ((hook,),) = engine.llm.apply_model(keep)
    yield logits
    hook.remove()


def compare(sets: CandidateSets, logits: Tensor, sampling: Sampling) -> dict[str, int]:
    """Positions whose mask is not the set of the logits by transformers' filters, and tokens that differ."""
    vocab = logits.shape[1]
    warpers = {"top_p": sampling.top_p, "top_k": sampling.top_k or None, "min_p": sampling.min_p}
    apart = (sets.to_mask(vocab) != CandidateSets.from_logits(logits, **warpers).to_mask(vocab)).sum(1)
    return {"positions": int(apart.count_nonzero()), "tokens": int(apart.sum())}


def case(engine: VLLMEngine, prompt: list[int], sampling: Sampling) -> dict[str, Any]:
    """A token's microseconds and bytes, and its logits and sets; an error where the sets are not complete."""
    host, space, ours = Meter(), Meter(memory=True), Meter()
    batch = completions(engine, prompt, sampling, host)
    with logits_of(engine) as logits:
        (one,) = completions(engine, prompt, replace(sampling, num_generations=1), space)
    tokens = sum(len(completion.token_ids) for completion in batch)
    found: dict[str, Any] = {
        "vllm_us": 1e6 * host.of_token(tokens), "vllm_bytes": space.of_token(len(one.token_ids)),
    }  # fmt: skip
    try:
        with ours.on(integration, "candidates_of"):
            for completion in batch:
                integration.candidates_of(completion)
        sets = integration.candidates_of(one)
    except RuntimeError as error:
        return found | {"refused": str(error)}
    if engine.masks:
        found["size"] = quantiles(sets.sizes.double())
        found["differs"] = compare(sets, torch.cat(logits)[-len(sets) :], sampling)
    return found | {"ours_us": 1e6 * ours.of_token(tokens), "set_bytes": sets.ids.nbytes / len(sets)}


def measure(models: dict[str, Qwen2ForCausalLM], tokens: int, cases: dict[str, Any]) -> Iterator[None]:
    """Adds the cases, each of a model and a truncation, with masks and with log-probs."""
    for masks in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            next(iter(models.values())).save_pretrained(folder)
            engine = start(folder, masks=masks)
        for name, model in models.items():
            engine.sync_weights(model)
            prompt = (Chain(engine.vocab_size).words(1, PROMPT, seed=99)[0] * (engine.vocab_size // WORDS)).tolist()
            for truncation in TRUNCATIONS:
                ((option, value),) = truncation.items()
                row = cases.setdefault(f"{name}, {option} {value:g}", {"tokens": tokens})
                source = "masks" if masks else "log-probs"
                sampling = Sampling(num_generations=BATCH, max_completion_length=tokens, seed=5, **truncation)
                row[source] = case(engine, prompt, sampling)
                print(name, option, value, row, flush=True)
                yield
        del engine
        gc.collect()


def run(tokens: Annotated[int, "of a completion"] = 8) -> Iterator[Section]:
    """The section `masks`, after each case."""
    if not torch.cuda.is_available():
        interpret()
    cases: dict[str, Any] = {}
    models = {"untrained": untrained_model(VOCAB), "trained": trained_model()}
    for _ in measure(models, tokens, cases):
        yield {"V": VOCAB, "batch": BATCH, "steps": STEPS, "cases": cases}


if __name__ == "__main__":
    main("masks")
