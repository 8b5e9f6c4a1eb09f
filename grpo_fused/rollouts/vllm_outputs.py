"""What vLLM returned of a completion: log-probs, and the tokens that could be sampled."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import numpy as np
import torch

from grpo_fused.call.candidates import CandidateSets
from grpo_fused.call.layout import offsets_of
from grpo_fused.rollouts.records import ScoredSets
from grpo_fused.rollouts.vllm_logprobs import KEPT_TOLERANCE

MOST_CANDIDATES = 1024
"""Log-probs of a position that vLLM is asked for where top-p or min-p may keep any number of tokens, without masks."""


def sampled_logprobs(completion: Any) -> list[float]:
    """The log-prob of each sampled token; vLLM gives a dictionary by token for each position."""
    return [position[token].logprob for token, position in zip(completion.token_ids, completion.logprobs, strict=True)]


def candidates_of(completion: Any, *, checked: bool = False) -> CandidateSets:
    """The tokens that could be sampled at each position: those of its sampling mask, or whose log-prob is not -inf.

    Raises:
        RuntimeError: There is no mask, and their probabilities do not sum to 1 within 1e-3: vLLM returned only a part
            of them. Where `ExactLogprobs` checked that, a log-prob is NaN instead. Or a mask of another length.
    """
    mask = getattr(completion, "sampling_mask", None)
    kept = _of_logprobs(completion, checked) if mask is None else mask.token_ids
    if len(kept) != len(completion.token_ids):
        raise RuntimeError(f"vLLM must return a mask for each of {len(completion.token_ids)} tokens; got {len(kept)}")
    sizes = torch.tensor([len(position) for position in kept], dtype=torch.int64)
    ids = np.fromiter(chain.from_iterable(kept), dtype=np.int64, count=int(sizes.sum()))
    return CandidateSets(torch.from_numpy(ids), offsets_of(sizes))


def scores_of(completion: Any, sets: CandidateSets) -> ScoredSets:
    """The log-probs of the tokens that could be sampled, of a completion: over each set they are a distribution.

    Raises:
        RuntimeError: vLLM did not return that of each.
    """
    positions = (completion.logprobs[index] for index in sets.positions.tolist())
    found = [position.get(token) for token, position in zip(sets.ids.tolist(), positions, strict=True)]
    if lost := found.count(None):
        raise RuntimeError(
            "vLLM must return the log-prob of each token that could be sampled; those of "
            f"{lost} of {len(found)} in a completion were not returned. Set top_k (at most {MOST_CANDIDATES}), or a "
            "lower top_p"
        )
    return ScoredSets(sets, torch.tensor([entry.logprob for entry in found], dtype=torch.float32))


def most_likely(completion: Any, most: int) -> ScoredSets:
    """The `most` most likely tokens of each position; vLLM's dictionaries also have the sampled one."""
    rows = []
    for position, token in zip(completion.logprobs, completion.token_ids, strict=True):
        others = {other: entry for other, entry in position.items() if other != token}
        rows.append(others if len(others) == most else position)
    ids = torch.tensor([token for row in rows for token in row])
    logps = torch.tensor([entry.logprob for row in rows for entry in row.values()], dtype=torch.float32)
    return ScoredSets(CandidateSets(ids, offsets_of(torch.tensor([len(row) for row in rows]))), logps)


def _of_logprobs(completion: Any, checked: bool) -> list[list[int]]:
    """The tokens of each position whose log-prob is not -inf."""
    allowed = math.inf if checked else KEPT_TOLERANCE
    kept = [
        {token: x.logprob for token, x in position.items() if x.logprob != -math.inf}
        for position in completion.logprobs
    ]
    for index, position in enumerate(kept):
        total = math.fsum(math.exp(logprob) for logprob in position.values())
        if not abs(total - 1.0) <= allowed:  # also if it is NaN
            sums = "do not sum to 1" if math.isnan(total) else f"sum to {total:.4f}"
            raise RuntimeError(
                f"vLLM must return all tokens that could be sampled; the probabilities of {len(position)} at token "
                f"{index} of a completion {sums}. Set top_k (at most {MOST_CANDIDATES}), or a lower top_p"
            )
    return [list(position) for position in kept]
