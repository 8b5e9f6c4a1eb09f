"""The task `reasoning_gym`: problems that the package reasoning-gym generates, each with its verifier."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from difflib import get_close_matches
from functools import lru_cache, partial
from typing import Any

import numpy as np

from grpo_fused.trainer.evaluated_answers import EVALUATE_ANSWERS, is_harmless
from grpo_fused.trainer.tasks import THINK_THEN_ANSWER, Task

CHUNK = 500
"""Problems of one data set of the package, its own default; some data sets generate all of them when they are made."""

HELD_OUT = 2**31
"""The first seed of held-out problems. Those of training begin at 2^20 times the seed of the run."""


def problems(
    name: str, options: Mapping[str, Any], *, seed: int = 0, held_out: bool = False
) -> Callable[[int], Mapping[str, Any]]:
    """A function that returns problem 0, 1, 2, ... without end: question, answer, metadata and `score_answer`.

    Problem i depends only on the data set, its options, the seed and i. The package itself seeds problem i of a data
    set with `seed + i`, so that its data sets of the seeds 0 and 1 share almost all problems. Here seeds have a million
    problems each before they meet, and held-out problems are the same for all seeds.

    Args:
        name: A data set of reasoning-gym, such as "chain_sum", or "composite".
        options: Its options, except `seed` and `size`.
        seed: Of the run; one and the same plus 2048 give the same problems.
        held_out: Problems for evaluation: other seeds than those of training.

    Raises:
        ModuleNotFoundError: reasoning-gym is not installed.
        ValueError: It has no such data set, or the data set refuses the options.
    """
    first = HELD_OUT if held_out else seed % 2048 * 2**20  # below 2^32, the limit of NumPy's seeds

    @lru_cache(maxsize=1)
    def chunk(number: int) -> Any:
        with _seeded(first + number * CHUNK) as seed:
            return _make(name, options, seed)

    def problem(index: int) -> Mapping[str, Any]:
        data = chunk(index // CHUNK)
        with _seeded(first + index):
            entry = data[index % CHUNK]
        return {**entry, "score_answer": partial(_score, data.score_answer, entry)}

    chunk(0)  # a wrong option should fail here
    return problem


@contextmanager
def _seeded(seed: int) -> Iterator[int]:
    """A block whose global generators depend on the seed alone; they are restored, since some data sets use them."""
    states = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield seed
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _make(name: str, options: Mapping[str, Any], seed: int) -> Any:
    import reasoning_gym  # type: ignore[import-not-found,import-untyped,unused-ignore]  # slow to import
    from reasoning_gym.composite import DatasetSpec  # type: ignore[import-not-found,import-untyped,unused-ignore]
    from reasoning_gym.factory import DATASETS  # type: ignore[import-not-found,import-untyped,unused-ignore]

    if name not in DATASETS:
        near = get_close_matches(name, DATASETS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else f": {', '.join(sorted(DATASETS))}"
        raise ValueError(f"dataset must be one of the {len(DATASETS)} of reasoning-gym; got {name!r}{hint}")
    known = [f.name for f in fields(DATASETS[name][1]) if f.name not in ("seed", "size")]
    if unknown := sorted(set(options) - set(known)):
        raise ValueError(f"the options of {name} are {', '.join(known)}; got {', '.join(unknown)}")
    options = dict(options)
    try:
        if name == "composite":
            options["datasets"] = [DatasetSpec(**one) for one in options.get("datasets", ())]
        return reasoning_gym.create_dataset(name, seed=seed, size=CHUNK, **options)
    except (AssertionError, TypeError, ValueError) as error:  # the package checks options by assertions
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"dataset_options must be options of {name}; got {options} ({reason})") from error


def _score(score_answer: Callable[[str, Any], float], entry: Any, answer: str) -> float:
    if entry["metadata"].get("source_dataset") in EVALUATE_ANSWERS and not is_harmless(answer):
        return 0.0
    try:
        return float(score_answer(answer, entry))
    except Exception:  # of 0.1.25, three verifiers raise for an answer that they cannot read
        return 0.0


def _read(raw: Any) -> tuple[str, dict[str, object]]:
    return raw["question"], {name: raw[name] for name in ("answer", "metadata", "score_answer")}


REASONING_GYM = Task(
    name="reasoning_gym", source="reasoning_gym", default_system_prompt=THINK_THEN_ANSWER, read=_read, examples=()
)
