"""The rows of a run: loading, checking, and shuffled batches."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object

from grpo_fused.call.options import check_integer
from grpo_fused.rewards.calling import raised
from grpo_fused.rewards.text import Text
from grpo_fused.rollouts.errors import PromptError
from grpo_fused.trainer.hub import check_name
from grpo_fused.trainer.prompts import check_prompt

Row = Mapping[str, Any]
Rows = Sequence[Row] | Callable[[int], Row]
"""Rows, or a function that makes row 0, 1, 2, ... without end."""

# What reward functions get from the trainer itself, under these names.
RESERVED_COLUMNS = frozenset({"prompts", "completions", "prompt_ids", "completion_ids"})

_MESSAGES = re.compile(r"""\s*\[\s*\{\s*['"](?:role|content)['"]\s*:""")  # a list of chat messages as a text

_MOST_LEFT_OUT = 1000  # rows in a row, after which a stream has probably none that fits


def load_rows(
    source: str | Path | Sequence[Row],
    *,
    subset: str | None = None,
    split: str = "train",
    limit: int | None = None,
) -> list[Row]:
    """Rows from a list, a local file or the `datasets` library, with all columns unchanged.

    Local files are read here and not by `datasets`, which would copy them into a cache in the user's home and add keys
    of other rows to chat messages. All values of a CSV are texts.

    Args:
        source: A sequence of rows; a .json (one list of objects), .jsonl, .parquet or .csv file; or an
            argument of `datasets.load_dataset`, a name such as "openai/gsm8k" or a folder.
        subset: The configuration of a `datasets` name, such as "main".
        split: The split of a `datasets` name, in its notation ("train[:100]").
        limit: Number of first rows to keep, at least 1; default all.

    Returns:
        At least one row.

    Raises:
        FileNotFoundError: The source looks like a file that does not exist.
        ValueError: `limit` is below 1, the source has no rows, a file is not of the type of its suffix, `datasets`
            cannot read a folder, a subset or split is given for a file or list, or `datasets` has no such subset or
            split.
        OSError: `datasets` cannot find or reach the name. Its other errors propagate, too.
        ImportError: The source needs a library that is not installed.
    """
    if limit is not None:
        check_integer(limit, "limit", least=1)
    rows: list[Row]
    name = repr(str(source)) if isinstance(source, (str, Path)) else "the list of rows"
    if isinstance(source, (str, Path)) and not is_file(source):
        rows = _read_named(os.path.expanduser(source), subset, split, limit)
    elif subset is not None or split != "train":
        raise ValueError(f"{name} must have no subset and split, only a `datasets` name has; got {subset!r}, {split!r}")
    else:
        rows = _read_file(Path(source).expanduser()) if isinstance(source, (str, Path)) else list(source)
    if not rows[:limit]:
        raise ValueError(f"{name} must have at least one row; got none")
    return rows[:limit]


def check_rows(rows: Sequence[Row], at_least: int, *, name: str = "train_dataset") -> None:
    """Raises unless the rows can be trained on.

    There must be enough of them, all with the same columns, without names that the trainer passes to reward functions,
    and each with a "prompt" that `check_prompt` accepts; all prompts are texts, or all are chat messages.

    Args:
        rows: The data set.
        at_least: Rows that one step needs, 1 or more.
        name: The name of the data set in errors.

    Raises:
        TypeError, ValueError: They cannot be trained on; the message names the row and the column.
    """
    if isinstance(rows, (str, Mapping)) or not hasattr(rows, "__len__"):
        raise TypeError(f"{name} must be a list of rows, or another sequence; got {type(rows).__name__}")
    if len(rows) < at_least:
        least = "one row" if at_least == 1 else f"{at_least} rows, as many as a step takes"
        raise ValueError(f"{name} must have at least {least}; got {len(rows)}")
    for position, row in enumerate(rows):
        where = f"row {position} of {name}"
        if not isinstance(row, Mapping):
            raise TypeError(f"{where} must be a mapping of columns; got {type(row).__name__}")
        if "prompt" not in row:
            raise ValueError(f'{where} must have a column "prompt"; got the columns {sorted(map(str, row))}')
        if row.keys() != rows[0].keys():
            first, got = sorted(map(str, rows[0])), sorted(map(str, row))
            raise ValueError(f"{where} must have the columns {first}, as row 0; got {got}")
        check_prompt(row["prompt"], where)
        if isinstance(row["prompt"], str) != isinstance(rows[0]["prompt"], str):
            raise ValueError(f"{where} must have a prompt in the form of row 0's, text or chat messages; got the other")
    if taken := RESERVED_COLUMNS & set(rows[0]):
        raise ValueError(f"{name} must not have a column that reward functions get anyway; got {sorted(taken)}")


class Batches(Iterator[list[Row]]):
    """Endless batches; each epoch in a new order, without an incomplete last batch.

    The order of an epoch depends only on the seed and the epoch's number, so a resumed run needs only its position and
    gets the same batches as an uninterrupted one.

    Args:
        rows: The data set, not copied.
        size: Rows in a batch, at most all of them.
        seed: Of the orders.
    """

    def __init__(self, rows: Sequence[Row], size: int, seed: int = 0) -> None:
        self.rows, self.size, self.seed = rows, size, seed
        self._prompts = hash_of_prompts(rows)
        self._epoch = self._position = 0

    def __next__(self) -> list[Row]:
        if self._position + self.size > len(self.rows):  # the rest of the epoch is less than a batch
            self._epoch, self._position = self._epoch + 1, 0
        order = epoch_order(len(self.rows), self.seed, self._epoch)
        start, self._position = self._position, self._position + self.size
        return [self.rows[index] for index in order[start : self._position]]

    @property
    def epoch(self) -> float:
        """Epochs done; 1.0 after the last complete batch of the first."""
        return self._epoch + self._position / (len(self.rows) - len(self.rows) % self.size)

    @property
    def place(self) -> dict[str, Any]:
        """Epochs done, rows taken of this one, and the data set's length and seed."""
        return {"epoch": self._epoch, "position": self._position, "length": len(self.rows), "seed": self.seed}

    def state_dict(self) -> dict[str, Any]:
        """The place, for JSON, with a hash of the prompts."""
        return {**self.place, "prompts": self._prompts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to the position of a state; the batch size may be another one.

        Raises:
            ValueError: The state is malformed, of a data set with another length or seed, and so another order, or with
                other prompts.
        """
        counts = all(type(state.get(key)) is int and state[key] >= 0 for key in ("epoch", "position"))
        here = self.state_dict()
        same_order = all(state.get(key) == here[key] for key in ("length", "seed"))
        if not (counts and same_order and state["position"] <= len(self.rows)):
            raise ValueError(
                f"the state must be a place in a data set of {len(self.rows)} rows with seed {self.seed}; "
                f"got {dict(state)}"
            )
        if state.get("prompts") != self._prompts:
            raise ValueError(f"the data set must have the prompts that the run began with; got {len(self.rows)} others")
        self._epoch, self._position = state["epoch"], state["position"]


class Stream(Iterator[list[Row]]):
    """Endless batches of the rows that a function makes, in order: no row is taken twice.

    A resumed run needs only its position, and gets the same batches if the function makes the same rows.

    Args:
        row: Makes row 0, 1, 2, ...
        size: Rows in a batch.
        fits: Rows for which it is false are left out; it may raise PromptError.
        seed: Of the rows, which a resumed run must share.
    """

    epoch = 0.0

    def __init__(
        self, row: Callable[[int], Row], size: int, fits: Callable[[Row], bool] = lambda row: True, seed: int = 0
    ) -> None:
        self.row, self.size, self.fits, self.seed = row, size, fits, seed
        self._position = 0

    def __next__(self) -> list[Row]:
        start = self._position
        try:
            rows = [self._next_that_fits() for _ in range(self.size)]
            check_rows(rows, 1, name=f"the rows from train_dataset({start}) on")
        except (TypeError, ValueError) as error:
            raise PromptError(str(error)) from error
        return rows

    def _next_that_fits(self) -> Row:
        for _ in range(_MOST_LEFT_OUT):
            name = f"train_dataset({self._position})"
            try:
                row = self.row(self._position)
            except Exception as error:
                raise PromptError(f"{name} {raised(error)}") from error
            check_rows([row], 1, name=name)
            self._position += 1
            try:
                if self.fits(row):
                    return row
            except PromptError as error:
                raise PromptError(f"{name}: {error}") from error
        raise ValueError(f"train_dataset must make rows with prompts that fit; got none in {_MOST_LEFT_OUT}")

    @property
    def place(self) -> dict[str, Any]:
        """Rows taken or left out, and the seed."""
        return {"position": self._position, "seed": self.seed}

    def state_dict(self) -> dict[str, Any]:
        """The place, for JSON."""
        return self.place

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to the position of a state.

        Raises:
            ValueError: The state is malformed, of a list of rows, or of another seed.
        """
        position = state.get("position")
        if dict(state) != {"position": position, "seed": self.seed} or type(position) is not int or position < 0:
            raise ValueError(f"the state must be a place in a stream of rows with seed {self.seed}; got {dict(state)}")
        self._position = position


@dataclass(frozen=True)
class RowFilter:
    """Which rows can be trained on: those with prompts that can be encoded and are not too long.

    Args:
        encode: Token ids of a prompt.
        longest: Rows whose prompt has more tokens are left out; None keeps all.
        check_length: Raises PromptError if the rollout engine has no room for a prompt of as many tokens.
        say: Prints how many rows are left out.
    """

    encode: Callable[[Text], Sequence[int]]
    longest: int | None
    check_length: Callable[[int], None]
    say: Callable[[str], None]

    def fits(self, row: Row) -> bool:
        """Whether a row's prompt is not too long.

        Raises:
            PromptError: It cannot be encoded, or has no room.
        """
        length = len(self.encode(row["prompt"]))
        if self.longest is not None and length > self.longest:
            return False
        self.check_length(length)
        return True

    def usable(self, dataset: Sequence[Row], at_least: int, name: str) -> Sequence[Row]:
        """The rows, checked; without those whose prompt is too long."""
        check_rows(dataset, at_least, name=name)
        kept: list[int] = []
        for position, row in enumerate(dataset):
            try:
                if self.fits(row):
                    kept.append(position)
            except PromptError as error:
                raise PromptError(f"row {position} of {name}: {error}") from error
        if not (dropped := len(dataset) - len(kept)):
            return dataset
        self.say(f"dropped {dropped} of {len(dataset)} rows: their prompts have more than {self.longest} tokens")
        rows = [dataset[position] for position in kept]
        check_rows(rows, at_least, name=f"{name} with prompts of at most {self.longest} tokens")
        return rows

    def batches(self, dataset: Rows, size: int, seed: int) -> Batches | Stream:
        """Endless batches of the training data."""
        if callable(dataset):
            next(Stream(dataset, 1, self.fits, seed))  # checks the first row
            return Stream(dataset, size, self.fits, seed)
        return Batches(self.usable(dataset, size, "train_dataset"), size, seed)


def check_same_rows(batches: Batches | Stream, eval_rows: Sequence[Row] | None) -> None:
    """Raises unless all processes have the same prompts: each takes its part of every batch, by position."""
    train, held_out = batches.rows if isinstance(batches, Batches) else [], eval_rows or []
    counts = gather_object([(len(train), len(held_out))])
    prompts = gather_object([(batches.state_dict(), hash_of_prompts(held_out))])
    if len(set(counts)) > 1:
        each = ", ".join(f"process {i}: {n} and {m}" for i, (n, m) in enumerate(counts))
    elif any(there != prompts[0] for there in prompts):
        each = f"{len(train)} and {len(held_out)} on each, with other prompts or another seed"
    else:
        return
    raise ValueError(f"all processes must have the same rows for training and evaluation; got {each}")


def hash_of_prompts(rows: Sequence[Row]) -> str:
    """SHA-256 of all prompts in their order: texts, or all that chat messages have, as a chat template may read it."""
    texts = hashlib.sha256()
    for row in rows:
        prompt = row["prompt"]
        if not isinstance(prompt, str):  # `datasets` gives every message the keys of all, some without a value
            prompt = [{key: x for key, x in sorted(message.items()) if x is not None} for message in prompt]
        texts.update(json.dumps(prompt, default=str).encode())
    return texts.hexdigest()


@lru_cache(maxsize=1)
def epoch_order(length: int, seed: int, epoch: int) -> tuple[int, ...]:
    """The indices 0 to `length - 1`, shuffled; the same for the same arguments, in any process."""
    order = list(range(length))
    random.Random(f"{seed} {epoch}").shuffle(order)  # seeded by text, whose hash is the same on every machine
    return tuple(order)


def from_here(path: Path) -> str:
    """The folder that a relative path starts from, for errors."""
    return "" if path.is_absolute() else f" (from {Path.cwd()})"


def is_file(source: str | Path) -> bool:
    """Whether to read a file; False for a `datasets` name. Raises if it can only be a file, and does not exist."""
    path = Path(source).expanduser()
    must_be = isinstance(source, Path) or path.suffix.lower() in _READERS or source.startswith((".", "/", "~"))
    if must_be and not path.exists():
        raise FileNotFoundError(f"expected a file at {str(source)!r}{from_here(path)}; got a path that does not exist")
    return path.is_file()


def _read_named(name: str, subset: str | None, split: str, limit: int | None) -> list[Row]:
    check_name(name, "dataset")
    import datasets  # type: ignore[import-untyped]  # slow to import

    has_bars = not datasets.are_progress_bars_disabled()
    if has_bars and not sys.stderr.isatty():  # a log
        datasets.disable_progress_bars()
    try:
        # rows are decoded one by one, so only the requested ones
        return [dict(row) for row in islice(datasets.load_dataset(name, subset, split=split), limit)]
    except (datasets.exceptions.DatasetGenerationError, ValueError, IndexError) as error:
        raise ValueError(f"{name!r} cannot be read by `datasets`: {error.__cause__ or error}") from error
    finally:
        if has_bars:
            datasets.enable_progress_bars()


def _read_file(path: Path) -> list[Row]:
    if (reader := _READERS.get(path.suffix.lower())) is None:
        raise ValueError(f"expected a file that ends in {', '.join(_READERS)}; got {str(path)!r}")
    try:
        return list(reader(path))
    except (ValueError, csv.Error, RecursionError) as error:  # pyarrow's errors are ValueErrors
        raise ValueError(f"{path} cannot be read as {path.suffix}: {error}") from error


def _read_json(path: Path) -> list[Row]:
    rows = json.loads(path.read_text(encoding="utf-8-sig"))
    if not isinstance(rows, list):
        raise ValueError(f"expected a list of objects; got {type(rows).__name__}")
    return rows


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            try:
                if line.strip():
                    yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number}: {error}") from error


def _read_csv(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        csv.field_size_limit(2**31 - 1)  # of the process; a reader has no such option
        lines = csv.DictReader(file, strict=True)
        columns = list(lines.fieldnames or ())
        if "" in columns or len(set(columns)) < len(columns):
            raise ValueError(f"expected column names, all different; got {columns}")
        for row in lines:
            if None in row or None in row.values():  # more values than columns, or fewer
                raise ValueError(f"line {lines.line_num}: expected a value for each of {columns}; got {row}")
            if _MESSAGES.match(row.get("prompt", "")):
                raise ValueError(
                    f"line {lines.line_num}: expected a prompt that is a text; got {row['prompt']:.80}: chat messages "
                    "need .jsonl, .json or .parquet"
                )
            yield row


def _read_parquet(path: Path) -> list[Row]:
    from pyarrow import parquet  # type: ignore[import-untyped]  # comes with `datasets`

    return parquet.read_table(path).to_pylist()


_READERS: dict[str, Callable[[Path], Iterable[Row]]] = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
}
