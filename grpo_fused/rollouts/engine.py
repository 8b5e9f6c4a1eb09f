"""The interface of a rollout engine: how to sample, what comes back, and its padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo_fused.call.candidates import CandidateSets
from grpo_fused.rollouts.errors import PromptError
from grpo_fused.rollouts.records import RecordedSets, Records, ScoredSets


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to sample: the options of `GRPOTrainerConfig` for a rollout engine, and the tokens that end a completion.

    `greedy` takes the most likely token instead, for evaluation. `seed` is for engines with their own generator: the
    first completion's; the others have the numbers after it. `records` are the log-probs that the objective reads, and
    `num_alternatives` the K of "top_k".
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
    records: Records | None = None
    num_alternatives: int = 0

    def __post_init__(self) -> None:
        if self.greedy and self.records is not None:
            raise ValueError(f"records must be None with greedy, which draws nothing; got {self.records!r}")
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


class Generation(NamedTuple):
    """Completions of P prompts, `num_generations` consecutive rows for each: B = P * num_generations rows.

    Args:
        ids: `[B, T]` int64, padded on the right.
        mask: `[B, T]` bool, True up to and including the token that ended the completion.
        sampling_logps: `[B, T]` fp32, nats, as sampled; None if the policy itself sampled.
        candidates: `CandidateSets` of B * T positions, the tokens that could be sampled; needed with top_p, top_k or
            min_p. None: all could.
        alternatives: `ScoredSets` of B * T positions, by `Sampling.records`.
    """

    ids: Tensor
    mask: Tensor
    sampling_logps: Tensor | None = None
    candidates: CandidateSets | None = None
    alternatives: ScoredSets | None = None

    @staticmethod
    def of_lists(
        ids: Sequence[Sequence[int]],
        logps: Sequence[Sequence[float]] | None,
        pad_token_id: int,
        candidates: Sequence[CandidateSets] | None = None,
        alternatives: Sequence[ScoredSets] | None = None,
    ) -> Generation:
        """From rows of different lengths; `candidates` and `alternatives` of each row.

        Raises:
            ValueError: A row has not one log-prob, candidate set or set of alternatives for each of its tokens.
        """
        lengths = [len(row) for row in ids]
        other_sets = None if alternatives is None else [row.sets for row in alternatives]
        for name, rows in (("logps", logps), ("candidates", candidates), ("alternatives", other_sets)):
            if rows is not None and (got := [len(row) for row in rows]) != lengths:
                raise ValueError(f"{name} must have one entry for each token of each row, {lengths}; got {got}")
        width = max([1, *lengths])
        padded = torch.tensor([[*row, *[pad_token_id] * (width - len(row))] for row in ids])
        scores = None
        if logps is not None:
            scores = torch.tensor([[*row, *[0.0] * (width - len(row))] for row in logps], dtype=torch.float32)
        sets = None if candidates is None else padded_sets(candidates, width)
        others = None
        if alternatives is not None and other_sets is not None:
            others = ScoredSets(padded_sets(other_sets, width), torch.cat([row.logps for row in alternatives]))
        return Generation(padded, length_mask(torch.tensor(lengths), width), scores, sets, others)


@runtime_checkable
class RolloutEngine(Protocol):
    """The interface of a rollout engine.

    Example, of a sampler that returns lists of token ids and, unless the policy itself sampled, of log-probs::

        class MyEngine:
            def generate(self, prompts, sampling):
                ids, logps = my_sampler(prompts, n=sampling.num_generations, greedy=sampling.greedy)
                return Generation.of_lists(ids, logps, sampling.pad_token_id)

            def sync_weights(self, model):
                my_sampler.load(model.state_dict())
    """

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Generation:
        """Samples completions of the prompts' token ids."""
        ...

    def sync_weights(self, model: PreTrainedModel) -> None:
        """Called before the first rollout and whenever the policy has changed; `model` is the unwrapped policy."""
        ...


def check_room(prompt: int, completion: int, most: int, why: str) -> None:
    """Raises PromptError if a prompt and its completion have more than `most` tokens; `why` says whose limit it is."""
    if prompt + completion > most:
        raise PromptError(
            f"a prompt and its completion must have at most {most} tokens{why}; got a prompt of {prompt} and "
            f"max_completion_length {completion} (max_prompt_length leaves out rows)"
        )


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


def padded_sets(rows: Sequence[CandidateSets], width: int) -> CandidateSets:
    """The sets of B rows as those of B * width positions; those of padding are empty, and must not be read."""
    sizes = [torch.nn.functional.pad(row.sizes, (0, width - len(row))) for row in rows]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), *sizes]).cumsum(0)
    return CandidateSets(torch.cat([row.ids for row in rows]), offsets)
