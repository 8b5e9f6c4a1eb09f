"""A rollout: prompts in, sampled completions out, padded, and split into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import (
    Cache,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
)

from grpo_fused import CandidateSets
from grpo_fused.heads.hidden import accepts
from grpo_fused.trainer.config import GRPOTrainerConfig
from grpo_fused.trainer.sampling import Draw, RecordedSets, padded_sets


class Rollout(NamedTuple):
    """B sequences, the samples of one prompt next to each other.

    It has all inputs of an update, so a recorded rollout can be replayed on another model or with another engine.
    """

    prompt_ids: Tensor  # [B, P] int64, padded on the left: all completions start in the same column
    prompt_mask: Tensor  # [B, P] bool
    completion_ids: Tensor  # [B, T] int64, padded on the right
    completion_mask: Tensor  # [B, T] bool, True up to and including the EOS
    sampling_logps: Tensor | None = None  # [B, T] fp32, nats, by a rollout engine that is not the policy itself
    candidates: CandidateSets | None = None  # of B * T positions; None if all tokens could be sampled

    def rows(self, index: slice | Tensor) -> Rollout:
        """Some of the sequences, without the columns that are padding in all of them."""
        prompts, completions = self.prompt_mask[index], self.completion_mask[index]
        first = self.prompt_ids.shape[1] - int(prompts.sum(1).max())
        width = max(int(completions.sum(1).max()), 1)
        return Rollout(
            self.prompt_ids[index][:, first:],
            prompts[:, first:],
            self.completion_ids[index][:, :width],
            completions[:, :width],
            None if self.sampling_logps is None else self.sampling_logps[index][:, :width],
            None
            if self.candidates is None
            else self.candidates.select(self._positions()[index][:, :width].reshape(-1)),
        )

    def _positions(self) -> Tensor:
        """[B, T]: the flat position of each completion token."""
        shape = self.completion_ids.shape
        return torch.arange(shape.numel(), device=self.completion_ids.device).view(shape)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are not None, by name, for a file."""
        found = self._asdict() | {"candidates": None}
        if self.candidates is not None:
            found |= {"candidate_ids": self.candidates.ids, "candidate_offsets": self.candidates.offsets}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def to(self, device: torch.device) -> Rollout:
        """The same on another device."""
        return Rollout._make(None if tensor is None else tensor.to(device) for tensor in self)

    def completions(self) -> list[list[int]]:
        """The ids of each completion, with EOS, without padding."""
        rows, lengths = self.completion_ids.tolist(), self.completion_mask.sum(1).tolist()
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def pad_prompts(prompts: Sequence[Sequence[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Ids [B, P] int64 and mask [B, P] bool, padded on the left. The mask is made of lengths: a pad may be an EOS."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad_token_id] * (width - len(row)) + list(row) for row in prompts])
    return ids, length_mask(torch.tensor([len(row) for row in prompts]), width).flip(1)


def length_mask(lengths: Tensor, width: int) -> Tensor:
    """[B, width] bool, True in the first `lengths[b]` columns of row b."""
    return torch.arange(width, device=lengths.device) < lengths.unsqueeze(1)


def first_of_prompts(ids: Tensor, mask: Tensor) -> Tensor:
    """[B] bool: where the prompt [B, P] is another one than that of the row before."""
    new = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    new[1:] = (torch.where(mask, ids, -1).diff(dim=0) != 0).any(1)
    return new


def micro_batches(rollout: Rollout, rows: Tensor, max_tokens: int, *, share_prompts: bool = False) -> list[Tensor]:
    """Splits sequences into batches of at most `max_tokens` tokens, padding included, by similar length.

    Args:
        rollout: B sequences.
        rows: [n] int64 on the CPU, ascending: the sequences to split.
        max_tokens: The budget; a longer sequence is a batch of one.
        share_prompts: The sequences of one prompt are one, in which the prompt counts once.

    Returns:
        Indices into the rollout: each of `rows` in exactly one of the tensors.
    """
    prompts = rollout.prompt_mask.sum(1).tolist()
    completions = rollout.completion_mask.sum(1).tolist()
    group = first_of_prompts(rollout.prompt_ids, rollout.prompt_mask).cumsum(0).tolist()
    units: list[list[int]] = []
    for row in rows.tolist():
        if share_prompts and units and group[units[-1][0]] == group[row]:
            together = prompts[row] + sum(completions[other] for other in (*units[-1], row))
            if together <= max_tokens:
                units[-1].append(row)
                continue
        units.append([row])
    sizes = {unit[0]: (prompts[unit[0]], sum(completions[row] for row in unit)) for unit in units}
    batches: list[list[list[int]]] = []
    longest_prompt = longest_completion = 0
    for unit in sorted(units, key=lambda unit: -sum(sizes[unit[0]])):
        prompt, completion = sizes[unit[0]]
        wide_prompt, wide = max(longest_prompt, prompt), max(longest_completion, completion)
        if batches and (len(batches[-1]) + 1) * (wide_prompt + wide) <= max_tokens:
            batches[-1].append(unit)
            longest_prompt, longest_completion = wide_prompt, wide
        else:
            batches.append([unit])
            longest_prompt, longest_completion = prompt, completion
    return [torch.tensor([row for unit in batch for row in unit]) for batch in batches]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to sample: the options of `GRPOTrainerConfig` for a rollout engine, and the tokens that end a completion.

    `greedy` takes the most likely token instead, for evaluation. `seed` is for engines with their own generator: the
    first completion's; the others have the numbers after it.
    """

    num_generations: int
    max_completion_length: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_strings: tuple[str, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int = 0
    greedy: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.truncates and self.repetition_penalty != 1:
            raise ValueError(
                "top_p, top_k and min_p must be off with a repetition_penalty: the loss has the tokens that were "
                f"kept, but not their changed logits; got repetition_penalty {self.repetition_penalty}"
            )

    @property
    def truncates(self) -> bool:
        """Whether some tokens cannot be sampled: rollouts then need candidate sets."""
        return not self.greedy and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    def recorder(self) -> RecordedSets:
        """What samples like this in `generate`, and records the sets."""
        return RecordedSets(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)

    @staticmethod
    def of(config: GRPOTrainerConfig, eos_token_ids: tuple[int, ...], pad_token_id: int) -> Sampling:
        """The sampling of a run."""
        options: dict[str, Any] = {f.name: getattr(config, f.name) for f in fields(Sampling) if hasattr(config, f.name)}
        own = {"eos_token_ids": eos_token_ids, "pad_token_id": pad_token_id, "seed": None}
        return Sampling(**(options | own))


class Generation(NamedTuple):
    """Completions of P prompts, `num_generations` consecutive rows for each: B = P * num_generations rows."""

    ids: Tensor  # [B, T] int64, padded on the right
    mask: Tensor  # [B, T] bool, True up to and including the token that ended the completion
    sampling_logps: Tensor | None = None  # [B, T] fp32, nats, as sampled; None if the policy itself sampled
    candidates: CandidateSets | None = None  # of B * T positions: the tokens that could be sampled; None: all

    @staticmethod
    def of_lists(
        ids: Sequence[Sequence[int]],
        logps: Sequence[Sequence[float]] | None,
        pad_token_id: int,
        candidates: Sequence[CandidateSets] | None = None,
    ) -> Generation:
        """From rows of different lengths; `candidates` of each row."""
        width = max(1, *map(len, ids))
        padded = torch.tensor([[*row, *[pad_token_id] * (width - len(row))] for row in ids])
        scores = None if logps is None else torch.tensor([[*row, *[0.0] * (width - len(row))] for row in logps])
        sets = None if candidates is None else padded_sets(candidates, width)
        return Generation(padded, length_mask(torch.tensor([len(row) for row in ids]), width), scores, sets)


class RolloutEngine(Protocol):
    """The interface of a rollout engine."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Generation:
        """Samples completions of the prompts' token ids."""
        ...

    def sync_weights(self, model: PreTrainedModel) -> None:
        """Called before the first rollout and whenever the policy has changed; `model` is the unwrapped policy."""
        ...


def roll_out(engine: RolloutEngine, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Rollout:
    """The engine's completions with their prompts, checked: an engine may be external code.

    Raises:
        ValueError: Shapes or dtypes are not those of `Generation`, or a completion has no token.
    """
    generation = engine.generate(prompts, sampling)
    rows = len(prompts) * sampling.num_generations
    ids, mask, logps, candidates = generation
    if candidates is not None and len(candidates) != ids.numel():
        raise ValueError(
            f"a rollout engine must return a candidate set for each of {ids.numel()} positions; got {len(candidates)}"
        )
    for name, tensor, dtype in (("ids", ids, torch.int64), ("mask", mask, torch.bool), ("sampling_logps", logps, None)):
        if tensor is None:
            continue
        if tensor.shape != (rows, ids.shape[-1]) or (dtype and tensor.dtype != dtype):
            raise ValueError(
                f"a rollout engine must return {name} of shape ({rows}, T){f', {dtype}' if dtype else ''}, "
                f"with the same T for all tensors; got {tuple(tensor.shape)}, {tensor.dtype}"
            )
    lengths = mask.sum(1)
    if not torch.equal(mask, length_mask(lengths, mask.shape[1])) or not (lengths > 0).all():
        raise ValueError(
            "a rollout engine must return a mask that is True up to each completion's end, at its first token at "
            f"least; got a mask of lengths {lengths.tolist()}"
        )
    repeated = [prompt for prompt in prompts for _ in range(sampling.num_generations)]
    return Rollout(*pad_prompts(repeated, sampling.pad_token_id), ids, mask, logps, candidates).to(ids.device)


class HuggingFaceEngine:
    """Samples with the policy itself, by `model.generate`.

    Args:
        model: The policy, in any mode: it samples in eval mode, then the mode is restored.
        tokenizer: For stop strings.
        batch_size: Completions at a time, those of the longest prompts first; None takes all at once.
        synced: All processes take the same number of forward passes (FSDP needs it).
        autocast: Makes the context of a whole generation. A model that enters autocast itself in every pass casts all
            weights for every token; in one context around all passes they are cast once, and kept until it ends.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_size: int | None = None,
        synced: bool = False,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.model, self.tokenizer, self.batch_size, self.synced = model, tokenizer, batch_size, synced
        self.autocast = autocast

    def sync_weights(self, model: PreTrainedModel) -> None:
        """Does nothing: the policy itself samples."""

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Generation:
        """Samples completions of the prompts' token ids."""
        group = range(sampling.num_generations)
        order = list(range(len(prompts)))
        if self.batch_size is not None:  # less padding, and a batch that does not fit fails first
            order.sort(key=lambda index: -len(prompts[index]))
        repeated = [prompts[index] for index in order for _ in group]
        size = self.batch_size or len(repeated)
        rows: list[list[int]] = []
        sets: list[CandidateSets] = []
        with _as_sampler(self.model), self.autocast():
            for start in range(0, len(repeated), size):
                padded = pad_prompts(repeated[start : start + size], sampling.pad_token_id)
                ids, mask = (tensor.to(self.model.device) for tensor in padded)
                ends, kept = _Ends(sampling, self.tokenizer, ids), sampling.recorder()
                processors: list[LogitsProcessor] = [] if sampling.greedy else [Draw()]
                if sampling.truncates:
                    processors.insert(0, kept)
                elif sampling.temperature != 1 and not sampling.greedy:
                    processors.insert(0, TemperatureLogitsWarper(sampling.temperature))
                sequences = self.model.generate(  # type: ignore[operator]  # transformers types it as a Tensor
                    input_ids=ids,
                    attention_mask=mask.long(),
                    generation_config=_generation_config(sampling),
                    stopping_criteria=StoppingCriteriaList([ends]),
                    logits_processor=LogitsProcessorList(processors),
                    synced_gpus=self.synced,
                    **self._prompt_cache(ids, mask),
                )
                completions = sequences[:, ids.shape[1] :].tolist()
                cut = [row[:length] for row, length in zip(completions, ends.lengths.tolist(), strict=True)]
                rows += cut
                sets += kept.of_rows([len(row) for row in cut]) if sampling.truncates else []
        places = [place * len(group) + i for place in sorted(order, key=order.__getitem__) for i in group]
        rows, sets = [rows[place] for place in places], [sets[place] for place in places if sets]
        generation = Generation.of_lists(rows, None, sampling.pad_token_id, sets if sampling.truncates else None)
        device = self.model.device
        candidates = None if generation.candidates is None else generation.candidates.to(device)
        return Generation(generation.ids.to(device), generation.mask.to(device), None, candidates)

    def _prompt_cache(self, ids: Tensor, mask: Tensor) -> dict[str, Cache]:
        """The argument of `generate` for keys and values of prompts [B, P]: those of equal neighbours, computed once.

        The last token of a prompt is left to `generate`, which needs its logits.
        """
        new = first_of_prompts(ids, mask)
        if ids.shape[1] < 2 or bool(new.all()) or not self._sees_all_of(ids.shape[1]):
            return {}
        ids, mask = ids[new, :-1], mask[new, :-1].long()
        cache = DynamicCache(config=self.model.config)
        options = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0), "logits_to_keep": 1}
        options = {name: value for name, value in options.items() if accepts(self.model, name)}
        self.model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **options)
        cache.batch_select_indices(new.cumsum(0) - 1)
        return {"past_key_values": cache}

    def _sees_all_of(self, tokens: int) -> bool:
        """Whether each layer keeps the keys and values of all tokens of a prompt."""
        kinds, window = layer_kinds(self.model), getattr(self.model.config.get_text_config(), "sliding_window", None)
        return kinds <= {"full_attention"} | ({"sliding_attention"} if window and tokens < window else set())


def layer_kinds(model: PreTrainedModel) -> set[str]:
    """What a model's layers are, by its config: "full_attention", "sliding_attention", "linear_attention", ..."""
    config = model.config.get_text_config()
    if kinds := getattr(config, "layer_types", None):
        return set(kinds)
    sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return {"sliding_attention" if sliding else "full_attention"}


class _Ends(StoppingCriteria):
    """Ends a sequence at an EOS or a stop string, and records where.

    Lengths cannot be computed from the ids afterwards: `generate` may pad with an EOS, and a stop string adds none.
    """

    def __init__(self, sampling: Sampling, tokenizer: PreTrainedTokenizerBase, prompt_ids: Tensor) -> None:
        # `generate` pads finished rows only if a criterion has this attribute
        self.eos_token_id = torch.tensor(sampling.eos_token_ids, device=prompt_ids.device)
        self.stop_strings = sampling.stop_strings
        # a character is at most four tokens, one for each byte
        self.tail = 1 + max((len(text.encode()) for text in self.stop_strings), default=0)
        self.tokenizer = tokenizer
        self.prompt_length = prompt_ids.shape[1]
        self.lengths = torch.full((len(prompt_ids),), torch.iinfo(torch.int64).max, device=prompt_ids.device)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        done = torch.isin(input_ids[:, -1], self.eos_token_id)
        length = input_ids.shape[1] - self.prompt_length
        if self.stop_strings:
            # only the completion is searched: a prompt may contain a stop string, or end with its first part.
            # transformers' own criterion matches the vocabulary in advance, and fails for tokenizers without "abcdef"
            tails = self.tokenizer.batch_decode(input_ids[:, -min(self.tail, length) :])
            found = [any(stop in tail for stop in self.stop_strings) for tail in tails]
            done |= torch.tensor(found, device=done.device)
        self.lengths = torch.where(done, self.lengths.clamp(max=length), self.lengths)
        return done


def _generation_config(sampling: Sampling) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=sampling.max_completion_length,
        eos_token_id=list(sampling.eos_token_ids),
        pad_token_id=sampling.pad_token_id,
        repetition_penalty=sampling.repetition_penalty,
        do_sample=False,  # `Draw` samples
        use_cache=True,
    )


@contextmanager
def _as_sampler(model: PreTrainedModel) -> Iterator[None]:
    """In eval mode, and without the model's own generation config.

    `generate` would use its values (Qwen: top_p 0.8, repetition penalty 1.05).
    """
    was_training, before = model.training, model.generation_config
    model.eval()
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = before
        model.train(was_training)


def ending_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The tokens that end a completion: the tokenizer's EOS and those of the model's generation config."""
    found: list[int] = []
    for ids in (tokenizer.eos_token_id, getattr(model.generation_config, "eos_token_id", None)):
        found += ids if isinstance(ids, (list, tuple)) else [] if ids is None else [int(ids)]
    if not found:
        raise ValueError(
            "the tokenizer needs an EOS token, or the model's generation_config an eos_token_id: no completion ends"
        )
    return tuple(dict.fromkeys(found))
