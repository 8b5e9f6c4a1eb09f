"""`exact_truncation`: TRL's trainers score the distribution that top-k, top-p or min-p left, which was sampled.

TRL 1.16 scores tokens by the softmax over the whole vocabulary, however they were sampled. Here `generate` records the
tokens that it could sample. These sets travel with the batch through TRL's shuffling and splitting, as a list with an
entry for each sequence, and the head renormalises over them: in the loss, in old and in reference log-probs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList

from grpo_fused.call.calls import HeadCall
from grpo_fused.call.candidates import CandidateSets, check_values
from grpo_fused.rollouts.engine import Sampling, padded_sets

_KNOWN = {
    "max_new_tokens", "max_length", "stop_strings", "use_cache", "cache_implementation", "disable_compile",
    "pad_token_id", "bos_token_id", "eos_token_id", "do_sample", "temperature", "top_k", "top_p", "min_p",
    "output_attentions", "output_hidden_states", "transformers_version", "_from_model_config",
}  # fmt: skip
"""Options of `generate` that a recorder allows for, or that do not change what can be sampled."""

_OFF = {"repetition_penalty": 1.0}
"""Further ones that TRL always passes, with the value that does nothing."""


def sampling_of(config: GenerationConfig, own: GenerationConfig, temperature: float) -> Sampling:
    """The sampling of `generate` with a config, whose missing values it takes from the model's `own`.

    Raises:
        ValueError: An option changes the distribution, and is none of temperature, top_k, top_p and min_p; or the
            temperature is not `temperature`, that of the scores.
    """
    given = {name: x for name, x in own.to_dict().items() if x is not None}
    given |= {name: x for name, x in config.to_dict().items() if x is not None}
    changed = GenerationConfig(**given).to_diff_dict().items()
    unknown = sorted(f"{name}={x}" for name, x in changed if name not in _KNOWN and x != _OFF.get(name))
    if unknown or not given.get("do_sample"):
        raise ValueError(
            "exact_truncation knows how temperature, top_k, top_p and min_p change the distribution; generate also "
            f"has {', '.join(unknown) or 'do_sample=False'}"
        )
    if given["temperature"] != temperature:
        raise ValueError(
            f"exact_truncation scores at the temperature of GRPOConfig, {temperature}; generate samples at "
            f"{given['temperature']}, from generation_kwargs"
        )
    names = ("temperature", "top_k", "top_p", "min_p")
    options = {name: given[name] for name in names if name in given}
    return Sampling(num_generations=1, max_completion_length=given["max_new_tokens"], **options)


@dataclass
class _Scored:
    """The sets of the completions [B, T] that are being scored, `batch_size` rows at a time."""

    rows: list[CandidateSets]
    mask: Tensor
    batch_size: int

    def take(self, targets: Tensor) -> tuple[CandidateSets, Tensor | None]:
        """(sets, mask) of the next rows, at the positions that have these targets."""
        mask, rows = self.mask[: self.batch_size] != 0, self.rows[: self.batch_size]
        self.mask, self.rows = self.mask[self.batch_size :], self.rows[self.batch_size :]
        sets = padded_sets(rows, mask.shape[1]).to(targets.device)
        if len(targets) == int(mask.sum()):  # TRL's compact form: scored positions only
            return sets.select(mask.reshape(-1).nonzero().squeeze(1)), None
        before = len(targets) // len(mask) - mask.shape[1]  # every position, completions last
        sizes = torch.nn.functional.pad(sets.sizes.view(mask.shape), (before, 0)).view(-1)
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        return CandidateSets(sets.ids, offsets), torch.nn.functional.pad(mask, (before, 0)).view(-1)


_scored: ContextVar[_Scored | None] = ContextVar("grpo_fused_candidates", default=None)


def with_candidates(call: HeadCall, targets: Tensor) -> tuple[HeadCall, Tensor | None]:
    """The call with the sets of its tokens, and the mask of those that count, where a trainer has announced them."""
    scored = _scored.get()
    if scored is None:
        return call, None
    sets, mask = scored.take(targets)
    check_values(sets, targets, mask, call.lm_head_weight.shape[0], {})
    return call._replace(candidate_ids=sets.ids, candidate_offsets=sets.offsets), mask


class ExactTruncation:
    """What `exact_truncation=True` adds to a trainer of TRL's."""

    exact_truncation = False
    _sets: list[CandidateSets] | None = None
    """of the sequences that are scored next; None where all tokens could be sampled"""

    def check_truncation(self) -> None:
        """Raise `ValueError` where the sets cannot be recorded."""
        off = {
            "use_vllm": self.use_vllm,  # type: ignore[attr-defined]
            "use_transformers_continuous_batching": self.use_transformers_continuous_batching,  # type: ignore[attr-defined]
            "tools or environments": self.tools or self.environment_factories,  # type: ignore[attr-defined]
            "rollout_func": self.rollout_func,  # type: ignore[attr-defined]
            "a vision-language model": self._is_vlm,  # type: ignore[attr-defined]
        }
        if found := [name for name, value in off.items() if value]:
            raise ValueError(
                "exact_truncation records what transformers' generate could sample, in one turn and in this process; "
                f"it cannot be used with {', '.join(found)}"
            )
        sampling_of(self.generation_config, self._sampler().generation_config, self.temperature)  # type: ignore[attr-defined]

    def _sampler(self) -> Any:
        return self.accelerator.unwrap_model(self.model_wrapped)  # type: ignore[attr-defined]

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        if not self.exact_truncation:
            return super()._generate_single_turn(*args, **kwargs)  # type: ignore[misc]
        with _recording(self._sampler(), self.temperature) as recorders:  # type: ignore[attr-defined]
            found = super()._generate_single_turn(*args, **kwargs)  # type: ignore[misc]
        self._sets = recorders[0].of_rows([len(ids) for ids in found[0]]) if recorders else None
        return found

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        if self._sets is not None:
            batch["candidates"] = self._sets
        return batch

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        self._sets = inputs.get("candidates")
        loss: Tensor = super()._compute_loss(model, inputs)  # type: ignore[misc]
        return loss

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> Any:
        scored = None
        if self._sets is not None:
            size = args[0] if args else kwargs.get("batch_size")
            scored = _Scored(self._sets, attention_mask[:, -logits_to_keep:], size or len(input_ids))
        token = _scored.set(scored)
        try:
            return super()._get_per_token_logps_and_entropies(  # type: ignore[misc]
                model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
            )
        finally:
            _scored.reset(token)


@contextmanager
def _recording(model: Any, temperature: float) -> Iterator[list[Any]]:
    """`model.generate` with a recorder, which is in the list afterwards if something is truncated."""
    own, recorders = model.generate, []

    def generate(*args: Any, generation_config: GenerationConfig, **kwargs: Any) -> Any:
        sampling = sampling_of(generation_config, model.generation_config, temperature)
        if not sampling.truncates:
            return own(*args, generation_config=generation_config, **kwargs)
        recorders.append(sampling.recorder())
        off = copy.deepcopy(generation_config)
        off.temperature, off.top_k, off.top_p, off.min_p = 1.0, 0, 1.0, 0.0  # None would be the model's own
        return own(*args, generation_config=off, logits_processor=LogitsProcessorList(recorders), **kwargs)

    model.generate = generate
    try:
        yield recorders
    finally:
        del model.generate
