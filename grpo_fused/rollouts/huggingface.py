"""The policy itself as the rollout engine, by `model.generate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
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

from grpo_fused.heads.hidden import accepts, forward_parameters
from grpo_fused.heads.modules import base_model
from grpo_fused.heads.patches import Patches
from grpo_fused.rollouts.engine import Generation, Sampling, first_of_prompts, pad_prompts
from grpo_fused.rollouts.records import Draw, of_rows


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
        order = list(range(len(prompts)))
        if self.batch_size is not None:  # less padding, and a batch that does not fit fails first
            order.sort(key=lambda index: -len(prompts[index]))
        repeated = [index for index in order for _ in range(sampling.num_generations)]
        size = self.batch_size or len(repeated)
        found: list[tuple[Any, ...]] = []  # of each completion
        with _as_sampler(self.model), self.autocast():
            for start in range(0, len(repeated), size):
                batch = [prompts[index] for index in repeated[start : start + size]]
                found += self._generate(batch, sampling)
        as_given = sorted(range(len(repeated)), key=repeated.__getitem__)
        ids, *records = zip(*[found[row] for row in as_given], strict=True)
        logps, sets, others = (None if each[0] is None else each for each in records)
        generation = Generation.of_lists(ids, logps, sampling.pad_token_id, sets, others)
        return Generation._make(None if x is None else x.to(self.model.device) for x in generation)

    def _generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[tuple[Any, ...]]:
        """A completion of each prompt: its ids, log-probs, candidates and alternatives, None if not recorded."""
        ids, mask = (tensor.to(self.model.device) for tensor in pad_prompts(prompts, sampling.pad_token_id))
        ends, recorder = _Ends(sampling, self.tokenizer, ids), sampling.recorder()
        draw = Draw(sampling.records, sampling.num_alternatives)
        processors: list[LogitsProcessor] = [] if sampling.greedy else [draw]
        if sampling.truncates:
            processors.insert(0, recorder)
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
        completions = sequences[:, ids.shape[1] :]
        lengths = ends.lengths.clamp(max=completions.shape[1]).tolist()
        kept = [row[:length] for row, length in zip(completions.tolist(), lengths, strict=True)]
        none = [None] * len(lengths)
        logps = none if sampling.records is None else draw.logps_of_rows(lengths)
        sets = of_rows(recorder.steps, lengths) if sampling.truncates else none
        others = of_rows(draw.steps, lengths) if sampling.records in ("mask", "top_k") else none
        return list(zip(kept, logps, sets, others, strict=True))

    def _prompt_cache(self, ids: Tensor, mask: Tensor) -> dict[str, Cache]:
        """The argument of `generate` for keys and values of prompts [B, P]: those of equal neighbours, computed once.

        The last token of a prompt is left to `generate`, which needs its logits.
        """
        new, width = first_of_prompts(ids, mask), ids.shape[1]
        if not self._all_do(width >= 2 and not bool(new.all()) and self._sees_all_of(width)):
            return {}
        ids, mask = ids[new, :-1], mask[new, :-1].long()
        cache = DynamicCache(config=self.model.config)
        options = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0), "logits_to_keep": 1}
        options = {name: value for name, value in options.items() if accepts(self.model, name)}
        name = "cache" if "cache" in forward_parameters(self.model) else "past_key_values"  # up to transformers 5.23
        if name not in forward_parameters(self.model):  # GPT-1, XLNet: no cache
            return {}
        given: dict[str, Cache] = {name: cache}
        self.model(input_ids=ids, attention_mask=mask, use_cache=True, **given, **options)
        cache.batch_select_indices(new.cumsum(0) - 1)
        return given

    def _all_do(self, flag: bool) -> bool:
        """Whether it is set, on all processes if they are in step: it takes a pass more."""
        if not self.synced:
            return flag
        flags = torch.tensor([int(flag)], device=self.model.device)
        dist.all_reduce(flags, dist.ReduceOp.MIN)
        return bool(flags)

    def _sees_all_of(self, tokens: int) -> bool:
        """Whether each layer keeps the keys and values of all tokens of a prompt."""
        kinds, window = layer_kinds(self.model), getattr(self.model.config.get_text_config(), "sliding_window", None)
        return kinds <= {"full_attention"} | ({"sliding_attention"} if window and tokens < window else set())


def layer_kinds(model: PreTrainedModel) -> set[str]:
    """What a model's layers are: "full_attention", "sliding_attention", "recurrent", ... as its config names them."""
    config = model.config.get_text_config()
    if kinds := getattr(config, "layer_types", None):
        return set(kinds)
    if model._is_stateful:  # xLSTM, Mamba: their config has no `layer_types`
        return {"recurrent"}
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
            running = (self.lengths > length).nonzero().flatten()
            tails = self.tokenizer.batch_decode(input_ids[running, -min(self.tail, length) :])
            found = [any(stop in tail for stop in self.stop_strings) for tail in tails]
            done[running] |= torch.tensor(found, dtype=torch.bool, device=done.device)
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
    # peft's `generate` gives its own to the model inside, too
    configs = [(owner, "generation_config", GenerationConfig()) for owner in (model, base_model(model))]
    with Patches(*configs, *((module, "training", False) for module in model.modules())):
        yield
