"""The rows of a run: loading them, checking them, dropping the long ones, dealing them in shuffled batches."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from grpo_fused.trainer.prompts import check_prompt

Row = Mapping[str, object]

# What reward functions get from the trainer itself, under these names.
RESERVED_COLUMNS = frozenset({"prompts", "completions", "prompt_ids", "completion_ids"})


def load_rows(
    source: str | Path | Sequence[Row],
    *,
    subset: str | None = None,
    split: str = "train",
    limit: int | None = None,
) -> list[Row]:
    """Rows from a list, a local file or the `datasets` library, all columns as they are.

    Local files are read here and not by `datasets`, which would copy them into a cache in the user's home and give
    chat messages keys that only other rows have. The values of a CSV are all texts.

    Args:
        source: A sequence of rows; a .json (one list of objects), .jsonl, .parquet or .csv file; or what
            `datasets.load_dataset` takes, a name such as "openai/gsm8k" or a folder.
        subset: The configuration of a `datasets` name, such as "main".
        split: The split of a `datasets` name, in its notation ("train[:100]").
        limit: Keep only the first so many rows; default all.

    Returns:
        At least one row.

    Raises:
        FileNotFoundError: The source is written like a file that does not exist.
        ValueError: The source has no rows, a file is not what its suffix says, a file or list is asked for a subset
            or split, or `datasets` knows no such subset or split.
        OSError: `datasets` cannot find or reach the name.
        ImportError: The source needs a library that is not installed.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, or None for all rows; got {limit}")
    name = _name_of(source)
    if isinstance(source, (str, Path)) and not is_file(source):
        rows = _load_dataset(str(source), subset, split, limit)
    else:
        if subset is not None or split != "train":
            raise ValueError(
                f"{name} has no subsets and splits, only a `datasets` name has; got subset {subset!r}, split {split!r}"
            )
        rows = _read_file(Path(source).expanduser()) if isinstance(source, (str, Path)) else list(source)
    if not rows:
        raise ValueError(f"{name} must have at least one row; got none")
    return rows[:limit]


def check_rows(rows: Sequence[Row], at_least: int, *, name: str = "train_dataset") -> None:
    """Raises unless the rows can be trained on.

    There must be enough of them, with the same columns everywhere, none of which reward functions get anyway, and
    each with a "prompt" that `check_prompt` accepts; all prompts are texts, or all are chat messages.

    Args:
        rows: The data set.
        at_least: Rows that one step needs.
        name: What the errors call the data set.

    Raises:
        TypeError, ValueError: They cannot; the message names the row and the column.
    """
    if len(rows) < max(at_least, 1):
        raise ValueError(f"{name} must have at least {max(at_least, 1)} rows, as many as a step takes; got {len(rows)}")
    for position, row in enumerate(rows):
        where = f"row {position} of {name}"
        if not isinstance(row, Mapping):
            raise TypeError(f"{where} must be a mapping of columns; got {type(row).__name__}")
        if "prompt" not in row:
            raise ValueError(f'{where} must have a column "prompt"; got the columns {sorted(map(str, row))}')
        if row.keys() != rows[0].keys():
            raise ValueError(f"{where} must have the columns {sorted(rows[0])}, as row 0; got {sorted(map(str, row))}")
        check_prompt(row["prompt"], where)
        if isinstance(row["prompt"], str) != isinstance(rows[0]["prompt"], str):
            raise ValueError(f"{where} must have a prompt in the form of row 0's, text or chat messages; got the other")
    taken = RESERVED_COLUMNS & set(rows[0])
    if taken:
        raise ValueError(f"{name} must not have a column that reward functions get anyway; got {sorted(taken)}")


class Filtered(NamedTuple):
    """The rows that stay, and how many do not."""

    rows: list[Row]
    dropped: int


def filter_by_prompt_length(
    rows: Sequence[Row], encode: Callable[[Any], list[int]], max_prompt_length: int
) -> Filtered:
    """Keeps the rows whose prompt has at most `max_prompt_length` tokens; the others are dropped, never cut.

    Args:
        rows: Rows with a "prompt".
        encode: Token ids of a prompt: `functools.partial(encode_prompt, tokenizer)`.
        max_prompt_length: Tokens, those of the chat template included.

    Raises:
        ValueError: No row is left.
    """
    if max_prompt_length < 1:
        raise ValueError(f"the maximal prompt length in tokens must be at least 1; got {max_prompt_length}")
    lengths = [len(encode(row["prompt"])) for row in rows]
    kept = [row for row, length in zip(rows, lengths, strict=True) if length <= max_prompt_length]
    if not kept:
        shortest = f"the shortest of {len(rows)} rows has {min(lengths)}" if lengths else "there are no rows"
        raise ValueError(
            f"expected rows with a prompt length in tokens of at most {max_prompt_length}; got none: {shortest}"
        )
    return Filtered(kept, len(rows) - len(kept))


def dropped_message(filtered: Filtered, max_prompt_length: int) -> str:
    """`dropped 12 of 7473 rows: their prompts have more than 300 tokens`, for the run's log."""
    total = len(filtered.rows) + filtered.dropped
    return f"dropped {filtered.dropped} of {total} rows: their prompts have more than {max_prompt_length} tokens"


class Batches(Iterator[list[Row]]):
    """Batches without end; each epoch in a new order, an incomplete last batch left out.

    The order of an epoch follows from the seed and the epoch's number alone, so a run that is resumed has only to know
    where it was, and goes on with the batches that it would have had.

    Args:
        rows: The data set, not copied.
        size: Rows in a batch.
        seed: Of the orders.

    Raises:
        ValueError: There are fewer rows than a batch has.
    """

    def __init__(self, rows: Sequence[Row], size: int, seed: int = 0) -> None:
        if not 1 <= size <= len(rows):
            raise ValueError(f"a batch must have at least 1 and at most {len(rows)} rows, the data set; got {size}")
        self.rows, self.size, self.seed = rows, size, seed
        self._epoch = -1  # not in an epoch yet
        self._go_to(0, 0)

    def __next__(self) -> list[Row]:
        stop = self._position + self.size
        batch = [self.rows[index] for index in self._order[self._position : stop]]
        self._go_to(self._epoch, stop)
        return batch

    @property
    def epoch(self) -> float:
        """Epochs done; 1.0 after the last complete batch of the first."""
        return self._epoch + self._position / (len(self.rows) - len(self.rows) % self.size)

    def state_dict(self) -> dict[str, int]:
        """Where the iterator is, for JSON: epochs done, rows taken of this one, and the data set's length and seed."""
        return {"epoch": self._epoch, "position": self._position, "length": len(self.rows), "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes to where the state was taken; the batch size may be another one.

        Raises:
            ValueError: The state is malformed, or of a data set of another length or with another seed, whose orders
                are others.
        """
        for key in ("epoch", "position", "length", "seed"):
            if type(state.get(key)) is not int:
                raise ValueError(f"the state of the data set must have an int {key!r}; got {dict(state)}")
        if state["length"] != len(self.rows):
            raise ValueError(f"the state is of a data set of {state['length']} rows; got one of {len(self.rows)}")
        if state["seed"] != self.seed:
            raise ValueError(f"the state is of an order with seed {state['seed']}; got seed {self.seed}")
        if state["epoch"] < 0 or not 0 <= state["position"] <= len(self.rows):
            raise ValueError(f"the state must be a place in the data set of {len(self.rows)} rows; got {dict(state)}")
        self._go_to(state["epoch"], state["position"])

    def _go_to(self, epoch: int, position: int) -> None:
        if position + self.size > len(self.rows):  # what is left of the epoch is no batch
            epoch, position = epoch + 1, 0
        if epoch != self._epoch:
            self._order = epoch_order(len(self.rows), self.seed, epoch)
        self._epoch, self._position = epoch, position


def epoch_order(length: int, seed: int, epoch: int) -> list[int]:
    """The indices 0 to `length - 1`, shuffled; the same for the same arguments, in any process."""
    order = list(range(length))
    random.Random(f"{seed} {epoch}").shuffle(order)  # seeded by text, which Python hashes alike everywhere
    return order


def _name_of(source: str | Path | Sequence[Row]) -> str:
    return repr(str(source)) if isinstance(source, (str, Path)) else f"the {type(source).__name__} of rows"


def is_file(source: str | Path) -> bool:
    """Whether to read a file; False for a `datasets` name. Raises if it can only be a file, and is not there."""
    path = Path(source).expanduser()
    if path.is_file():
        return True
    if path.is_dir():
        return False
    if isinstance(source, Path) or path.suffix.lower() in _READERS or source.startswith((".", "/", "~")):
        raise FileNotFoundError(f"expected a file at {str(source)!r}; got a path where nothing is")
    return False


def _load_dataset(name: str, subset: str | None, split: str, limit: int | None) -> list[Row]:
    try:
        from datasets import load_dataset  # type: ignore[import-untyped]  # slow to import, and optional
    except ImportError as error:
        raise ImportError(f"{name!r} is no local file, and to load it by name needs `pip install datasets`") from error
    try:
        dataset = load_dataset(name, subset, split=split)
    except Exception as error:  # its own kinds, those of the hub's client and those of that one's HTTP library
        kind = ValueError if isinstance(error, ValueError) else OSError
        raise kind(
            f"{name!r} is no local file, and `datasets` could not load it with subset {subset!r}, split {split!r}; "
            f"got {type(error).__name__}: {error}"
        ) from error
    return [dict(row) for row in islice(dataset, limit)]  # rows are decoded one by one, so not more than asked for


def _read_file(path: Path) -> list[Row]:
    if path.suffix.lower() not in _READERS:
        raise ValueError(f"expected a file that ends in {', '.join(_READERS)}; got {str(path)!r}")
    try:
        return _READERS[path.suffix.lower()](path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected text in UTF-8; got {error}") from error


def _read_json(path: Path) -> list[Row]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: expected JSON, a list of objects (an object a line is .jsonl); {error}") from error
    if not isinstance(rows, list):
        raise ValueError(f"{path}: expected a list of objects; got {type(rows).__name__}")
    return [_object(row, f"{path}, row {position}") for position, row in enumerate(rows)]


def _read_jsonl(path: Path) -> list[Row]:
    rows = []
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: expected a JSON object; {error}") from error
            rows.append(_object(row, f"{path}, line {number}"))
    return rows


def _object(row: object, where: str) -> Row:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected an object of columns; got {type(row).__name__}")
    return row


def _read_csv(path: Path) -> list[Row]:
    rows: list[Row] = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file, strict=True)
        try:
            header = next(lines, [])
            if "" in header or len(set(header)) < len(header):
                raise ValueError(f"{path}, line 1: expected column names, all different; got {header}")
            for values in lines:
                if values and len(values) != len(header):
                    raise ValueError(
                        f"{path}, line {lines.line_num}: expected {len(header)} values, one for each of {header}; "
                        f"got {len(values)}"
                    )
                if values:
                    rows.append(dict(zip(header, values, strict=True)))
        except csv.Error as error:
            raise ValueError(f"{path}, line {lines.line_num}: expected CSV; got {error}") from error
    return rows


def _read_parquet(path: Path) -> list[Row]:
    try:
        from pyarrow import ArrowException, parquet  # type: ignore[import-untyped]  # comes with `datasets`
    except ImportError as error:
        raise ImportError(f"{path}: to read Parquet needs `pip install pyarrow`") from error
    try:
        rows: list[Row] = parquet.read_table(path).to_pylist()
    except ArrowException as error:
        raise ValueError(f"{path}: expected a Parquet file; got {error}") from error
    return rows


_READERS: dict[str, Callable[[Path], list[Row]]] = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
}
