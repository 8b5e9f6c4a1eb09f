"""`exact_truncation`: TRL's trainers score the distribution that top-k, top-p or min-p left, which was sampled.

TRL 1.16 scores tokens by the softmax over the whole vocabulary, however they were sampled. Here `generate` records the
tokens that it could sample, and vLLM in the same process returns them as its sampling masks. These sets travel with the
batch through TRL's shuffling and splitting, as a list with an entry for each sequence, and the head renormalises over
them: in the loss, in old and in reference log-probs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, ProcessorMixin
from trl import GRPOTrainer
from trl.generation import vllm_generation

from grpo_fused.call.calls import TokenSets
from grpo_fused.call.candidates import CandidateSets, check_values
from grpo_fused.call.layout import offsets_of
from grpo_fused.heads.patches import Patches
from grpo_fused.integrations.context import holding
from grpo_fused.integrations.trl.release import CONTINUOUS_BATCHING
from grpo_fused.rollouts.engine import Sampling, padded_sets
from grpo_fused.rollouts.records import of_rows
from grpo_fused.rollouts.vllm import NO_MASKS, record_masks
from grpo_fused.rollouts.vllm_outputs import candidates_of

_KNOWN = {
    "max_new_tokens", "max_length", "stop_strings", "use_cache", "cache_implementation", "disable_compile",
    "pad_token_id", "bos_token_id", "eos_token_id", "do_sample", "temperature", "top_k", "top_p", "min_p",
    "output_attentions", "output_hidden_states", "transformers_version", "_from_model_config",
}  # fmt: skip
"""Options of `generate` that a recorder allows for, or that do not change what can be sampled."""

_OFF = {"repetition_penalty": 1.0}
"""Further ones that TRL always passes, with the value that does nothing."""


_KNOWN_VLLM = {
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens",
    "logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output",
    "output_kind", "output_text_buffer_length",
}  # fmt: skip
"""The same of `vllm.SamplingParams`."""


def sampling_of_vllm(parameters: Any, temperature: float) -> Sampling:
    """The sampling of `vllm.SamplingParams`.

    Raises:
        ValueError: As `sampling_of`.
    """
    plain = type(parameters)()
    options = {name: getattr(parameters, name) for name in parameters.__struct_fields__ if not name.startswith("_")}
    changed = [name for name, x in options.items() if x != getattr(plain, name)]
    unknown = [f"{name}={options[name]}" for name in changed if name not in _KNOWN_VLLM]
    options["top_k"] = max(options["top_k"], 0)
    return _sampling("vLLM", options, unknown, temperature)


def sampling_of(config: GenerationConfig, model_config: GenerationConfig, temperature: float) -> Sampling:
    """The sampling of `generate` with a config, whose missing values it takes from the model's, `model_config`.

    What the model's lacks, too, are transformers' own values: a `top_k` of 50.

    Raises:
        ValueError: An option changes the distribution, and is none of temperature, top_k, top_p and min_p; or the
            temperature is not `temperature`, that of the scores.
    """
    options = {name: x for name, x in model_config.to_dict().items() if x is not None}
    options |= {name: x for name, x in config.to_dict().items() if x is not None}
    changed = GenerationConfig(**options).to_diff_dict().items()
    defaults = GenerationConfig._get_default_generation_params()
    options = {name: defaults[name] for name in ("temperature", "top_k", "top_p")} | options
    unknown = sorted(f"{name}={x}" for name, x in changed if name not in _KNOWN and x != _OFF.get(name))
    if not unknown and not options.get("do_sample"):
        unknown = ["do_sample=False"]
    return _sampling("generate", options, unknown, temperature)


def _sampling(sampler: str, options: dict[str, Any], unknown: list[str], temperature: float) -> Sampling:
    """From the options of a sampler; TRL's `generate` keeps its own batch and lengths."""
    if unknown:
        raise ValueError(
            "exact_truncation knows how temperature, top_k, top_p and min_p change the distribution; "
            f"{sampler} also has {', '.join(unknown)}"
        )
    if options["temperature"] != temperature:
        raise ValueError(
            f"exact_truncation scores at the temperature of GRPOConfig, {temperature}; generate samples at "
            f"{options['temperature']}, from generation_kwargs"
        )
    names = ("temperature", "top_k", "top_p", "min_p")
    truncation = {name: options[name] for name in names if name in options}
    return Sampling(num_generations=1, max_completion_length=1, **truncation)


_scored: ContextVar[Iterator[tuple[list[CandidateSets], Tensor]] | None]
_scored = ContextVar("grpo_fused_candidates", default=None)
"""Of the completions that a trainer has scored in a block, for each of its passes: their sets, and mask [B, T]."""


def announced_candidates(targets: Tensor, vocab_size: int) -> tuple[TokenSets, Tensor | None]:
    """The sets of the tokens of the next pass, and the mask of those that count, where a trainer has announced them."""
    passes = _scored.get()
    if passes is None:
        return TokenSets(), None
    rows, completions = next(passes)
    active, mask = completions != 0, None
    sets = padded_sets(rows, active.shape[1]).to(targets.device)
    if len(targets) == int(active.sum()):  # TRL's compact form: scored positions only
        sets = sets.select(active.reshape(-1).nonzero().squeeze(1))
    else:  # every position, completions last
        before = len(targets) // len(active) - active.shape[1]
        sizes = torch.nn.functional.pad(sets.sizes.view(active.shape), (before, 0)).view(-1)
        sets = CandidateSets(sets.ids, offsets_of(sizes))
        mask = torch.nn.functional.pad(active, (before, 0)).view(-1)
    check_values(sets, targets, mask, vocab_size, {})
    return TokenSets.of(sets), mask


class ExactTruncation(GRPOTrainer):
    """`trl.GRPOTrainer` with one more argument, see `FusedGRPOTrainer`."""

    def __init__(self, *args: Any, exact_truncation: bool = False, **kwargs: Any) -> None:
        self.exact_truncation = exact_truncation
        self._sets: list[CandidateSets] | None = None
        """of the sequences that are scored next; None where all tokens could be sampled"""
        with _masks_of_vllm() if exact_truncation else nullcontext():
            super().__init__(*args, **kwargs)
        if exact_truncation:
            self._check_truncation()

    def _check_truncation(self) -> None:
        """Raise `ValueError` where the sets cannot be recorded."""
        colocated = self.use_vllm and self.vllm_mode == "colocate"
        off = {
            "a vLLM server": self.use_vllm and not colocated,
            "vllm_tensor_parallel_size above 1": colocated and self.vllm_tensor_parallel_size > 1,
            "tools or environments": self.tools or self.environments or getattr(self, "environment_factories", None),
            "rollout_func": self.rollout_func,
            "a vision-language model": isinstance(self.processing_class, ProcessorMixin),
        } | {name: getattr(self, name, False) for name in CONTINUOUS_BATCHING}
        if in_use := [name for name, value in off.items() if value]:
            raise ValueError(
                "exact_truncation records what transformers' generate, or vLLM in this process, could sample in one "
                f"turn; it cannot be used with {', '.join(in_use)}"
            )
        if not self.use_vllm:
            sampling_of(self.generation_config, self._sampler().generation_config, self.temperature)
            return
        options = {"temperature": self.temperature, "repetition_penalty": self.repetition_penalty}
        options |= self.args.generation_kwargs or {}
        sampling_of_vllm(vllm_generation.SamplingParams(**options), self.temperature)

    def _sampler(self) -> Any:
        return self.accelerator.unwrap_model(self.model_wrapped)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        if not self.exact_truncation:
            return super()._generate_single_turn(*args, **kwargs)
        if self.use_vllm:
            with _recording_vllm(self.vllm_generation.llm, self.temperature) as rows:
                turn = super()._generate_single_turn(*args, **kwargs)
            self._sets = rows or None
            return turn
        with _recording(self._sampler(), self.temperature) as recorders:
            turn = super()._generate_single_turn(*args, **kwargs)
        self._sets = of_rows(recorders[0].steps, [len(ids) for ids in turn[0]]) if recorders else None
        return turn

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        if self._sets is not None:
            batch["candidates"] = self._sets
        return batch

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        self._sets = inputs.get("candidates")
        return super()._compute_loss(model, inputs)

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> Any:
        passes = None
        if self._sets is not None:
            size = (args[0] if args else kwargs.get("batch_size")) or len(input_ids)
            parts = [self._sets[start : start + size] for start in range(0, len(self._sets), size)]
            passes = zip(parts, attention_mask[:, -logits_to_keep:].split(size), strict=True)
        with holding(_scored, passes):
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
            )


@contextmanager
def _recording(model: Any, temperature: float) -> Iterator[list[Any]]:
    """`model.generate` with a recorder, which is in the list afterwards if something is truncated."""
    generate, recorders = model.generate, []

    def recorded_generate(*args: Any, generation_config: GenerationConfig, **kwargs: Any) -> Any:
        sampling = sampling_of(generation_config, model.generation_config, temperature)
        if not sampling.truncates:
            return generate(*args, generation_config=generation_config, **kwargs)
        recorders.append(sampling.recorder())
        off = copy.deepcopy(generation_config)
        off.temperature, off.top_k, off.top_p, off.min_p = 1.0, 0, 1.0, 0.0  # None would be the model's own
        return generate(*args, generation_config=off, logits_processor=LogitsProcessorList(recorders), **kwargs)

    with Patches((model, "generate", recorded_generate)):
        yield recorders


@contextmanager
def _masks_of_vllm() -> Iterator[None]:
    """TRL's vLLM with sampling masks, if it starts one."""
    start = getattr(vllm_generation, "LLM", None)  # absent without vLLM

    def start_with_masks(**options: Any) -> Any:
        assert start is not None
        try:
            return start(**options, return_sampling_mask=True)
        except (TypeError, ValueError) as error:
            if NO_MASKS not in str(error) and "return_sampling_mask" not in str(error):
                raise
            raise ValueError(f"exact_truncation needs the sampling masks of vLLM: {error}") from error

    with Patches((vllm_generation, "LLM", start_with_masks)):
        yield


@contextmanager
def _recording_vllm(llm: Any, temperature: float) -> Iterator[list[CandidateSets]]:
    """`llm.generate` with sampling masks; the sets of the completions are in the list if something is truncated."""
    generate: Any = llm.generate
    rows: list[CandidateSets] = []

    def recorded_generate(prompts: Any, *, sampling_params: Any, **kwargs: Any) -> Any:
        sampling = sampling_of_vllm(sampling_params, temperature)
        record_masks(llm, sampling.truncates)
        if sampling.truncates:  # vLLM wants a top_k
            sampling_params.top_k = sampling.top_k or llm.model_config.get_vocab_size()
        outputs = generate(prompts, sampling_params=sampling_params, **kwargs)
        if sampling.truncates:
            rows.extend(candidates_of(completion) for output in outputs for completion in output.outputs)
        return outputs

    with Patches((llm, "generate", recorded_generate)):
        yield rows
