"""Sampling masks of vLLM with a large vocabulary: whether they are the sets, and what they cost the host.

    make vllm                                                                         # its environment, once
    TRITON_INTERPRET=1 .venv-vllm/bin/python -m benchmarks.masks --out results.json   # a few minutes on two cores

Two models of V tokens, untrained and trained on a chain of words, sample in fp32. vLLM's own logits are kept: at each
token the set is computed from them once more, by transformers' filters, and compared with the mask. Then the host's
time and memory for a token are measured: what vLLM's host code does for masks (`tolists`, `to_nested_list`) or for
dictionaries of log-probs (`_update_sample_logprobs`), and our conversion to `CandidateSets`. On a CPU vLLM's model
runner V2 runs in Triton's interpreter, which takes seconds for a token: few are sampled, and the time of a rollout says
nothing.
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
from dataclasses import replace
from typing import Annotated, Any

import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM

from benchmarks.qwen2 import small_qwen2
from benchmarks.study import Section, main
from grpo_fused import CandidateSets
from grpo_fused.heads.patches import Patches
from grpo_fused.rollouts import vllm as integration
from grpo_fused.rollouts.vllm import candidates_of
from grpo_fused.trainer import Sampling, VLLMEngine
from tests.with_vllm.runner_v2 import interpret

TRUNCATIONS: tuple[dict[str, float], ...] = ({"top_p": 0.9}, {"top_p": 0.97}, {"top_k": 20}, {"min_p": 0.05})
HIDDEN, LAYERS = 128, 2
WORDS, SUCCESSORS = 512, 32
PROMPT, BATCH = 8, 3


def untrained_model(vocab: int) -> Qwen2ForCausalLM:
    """As it is made: nearly the same probability for all tokens."""
    return small_qwen2(vocab, HIDDEN, LAYERS, max_position_embeddings=512).eval()


def chain(vocab: int, rows: int, length: int, seed: int) -> Tensor:
    """[rows, length] ids: of `WORDS` tokens each has `SUCCESSORS` that may follow it, the r-th as often as 1 / r."""
    g = torch.Generator().manual_seed(0)
    followers = torch.randint(WORDS, (WORDS, SUCCESSORS), generator=g)
    g.manual_seed(seed)
    words = torch.randint(WORDS, (rows, 1), generator=g)
    weights = 1.0 / torch.arange(1, SUCCESSORS + 1)
    for _ in range(length - 1):
        drawn = torch.multinomial(weights, rows, replacement=True, generator=g)
        words = torch.cat([words, followers[words[:, -1], drawn].unsqueeze(1)], dim=1)
    return words * (vocab // WORDS)


def trained_model(vocab: int, steps: int) -> Qwen2ForCausalLM:
    """On the chain, by cross-entropy."""
    model = untrained_model(vocab).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(steps):
        ids = chain(vocab, 8, 33, seed=1 + step)
        logits = model(ids[:, :-1]).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == steps - 1:
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


class Timer:
    """The seconds of all calls of a method."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def on(self, owner: Any, name: str) -> Patches:
        """While it lasts, calls are timed."""
        method: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            before = time.perf_counter()
            found = method(*args, **kwargs)
            self.seconds += time.perf_counter() - before
            return found

        return Patches((owner, name, timed))


def completions(engine: VLLMEngine, prompt: list[int], sampling: Sampling) -> list[Any]:
    """vLLM's completions of the prompt."""
    engine._record_masks(sampling.truncates)
    prompts, parameters = [{"prompt_token_ids": prompt}], engine._parameters(sampling, 0)
    (output,) = engine.llm.generate(prompts, sampling_params=parameters, use_tqdm=False)
    return list(output.outputs)


def with_logits(engine: VLLMEngine, prompt: list[int], sampling: Sampling) -> tuple[CandidateSets, Tensor]:
    """The sets of one completion by vLLM's masks, and its logits [T, V]."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    logits: list[Tensor] = []

    def keep(model: Any) -> list[Any]:
        processors = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
        return [x.register_forward_hook(lambda *call: logits.append(call[-1].float().clone())) for x in processors]

    ((hook,),) = engine.llm.apply_model(keep)
    (completion,) = completions(engine, prompt, replace(sampling, num_generations=1))
    hook.remove()
    return candidates_of(completion), torch.cat(logits)[-len(completion.token_ids) :]


def compare(sets: CandidateSets, logits: Tensor, truncation: dict[str, float]) -> dict[str, int]:
    """Positions whose mask is not the set of the logits by transformers' filters, and tokens that differ."""
    vocab = logits.shape[1]
    positions = tokens = 0
    for index, row in enumerate(logits):
        expected = CandidateSets.from_logits(row[None], **truncation).to_mask(vocab)  # type: ignore[arg-type]
        apart = int((sets.select(torch.tensor([index])).to_mask(vocab) != expected).sum())
        positions, tokens = positions + bool(apart), tokens + apart
    return {"positions": positions, "tokens": tokens}


def sizes_of(sets: CandidateSets) -> dict[str, float]:
    """Tokens of a set."""
    sizes = sets.sizes.double()
    return {"mean": float(sizes.mean()), "median": float(sizes.median()), "max": float(sizes.max()),
            "alone": float((sizes == 1).double().mean())}  # fmt: skip


def costs(engine: VLLMEngine, prompt: list[int], sampling: Sampling) -> dict[str, Any]:
    """Microseconds and bytes of a token in a batch; an error where the sets are not complete."""
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.outputs import SamplingMaskLists
    from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors

    timer, ours = Timer(), Timer()
    with (
        timer.on(LogprobsProcessor, "_update_sample_logprobs"),
        timer.on(SamplingMaskTensors, "tolists"),
        timer.on(SamplingMaskLists, "to_nested_list"),
    ):
        batch = completions(engine, prompt, sampling)
    tokens = sum(len(completion.token_ids) for completion in batch)
    found: dict[str, Any] = {"vllm_us": 1e6 * timer.seconds / tokens}
    try:
        with ours.on(integration, "candidates_of"):
            sets = [integration.candidates_of(completion) for completion in batch]
        tracemalloc.start()
        again = [candidates_of(completion) for completion in batch]
        found["peak_bytes"] = tracemalloc.get_traced_memory()[1] / tokens  # beside vLLM's lists
        del again
    except RuntimeError as error:
        return found | {"refused": str(error)}
    finally:
        tracemalloc.stop()
    set_bytes = sum(x.ids.element_size() * len(x.ids) for x in sets) / tokens
    return found | {"ours_us": 1e6 * ours.seconds / tokens, "set_bytes": set_bytes}


def measure(models: dict[str, Qwen2ForCausalLM], tokens: int) -> dict[str, Any]:
    """The figures of each model, by truncation."""
    figures: dict[str, dict[str, Any]] = {name: {} for name in models}
    for masks in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            next(iter(models.values())).save_pretrained(folder)
            engine = start(folder, masks=masks)
        for name, model in models.items():
            engine.sync_weights(model)
            prompt = chain(model.config.vocab_size, 1, PROMPT, seed=99)[0].tolist()
            for truncation in TRUNCATIONS:
                ((option, value),) = truncation.items()
                sampling = Sampling(num_generations=BATCH, max_completion_length=tokens, seed=5, **truncation)  # type: ignore[arg-type]
                row = figures[name].setdefault(f"{option} {value:g}", {"tokens": tokens})
                row["masks" if masks else "log-probs"] = costs(engine, prompt, sampling)
                if masks:
                    sets, logits = with_logits(engine, prompt, sampling)
                    row |= {"size": sizes_of(sets), "differs": compare(sets, logits, truncation)}
                print(name, option, value, row, flush=True)
        del engine
        gc.collect()
    return figures


def run(
    vocab: Annotated[int, "tokens of the vocabulary"] = 151936,
    tokens: Annotated[int, "of a completion"] = 8,
    steps: Annotated[int, "of training"] = 150,
) -> Iterator[Section]:
    """The section `masks`."""
    if not torch.cuda.is_available():
        interpret()
    models = {"untrained": untrained_model(vocab), "trained": trained_model(vocab, steps)}
    yield {"V": vocab, "batch": BATCH, "models": measure(models, tokens)}


if __name__ == "__main__":
    main("masks")
