"""The rows of a run: sources, errors, dropped rows, and their order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from grpo_fused.trainer.data import Batches, check_rows, epoch_order, hash_of_prompts, load_rows

FILES = Path(__file__).parent / "files"
CHAT = [{"role": "user", "content": "1+1?"}]
ROWS = [{"prompt": f"{number}+1=", "answer": number + 1} for number in range(10)]


@pytest.fixture
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Relative paths and the caches of `datasets` are below it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


def write_parquet(path: Path, rows: list[Any]) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_a_list_is_not_changed() -> None:
    assert load_rows(ROWS) == ROWS
    assert load_rows(tuple(ROWS), limit=3) == ROWS[:3]
    assert load_rows(datasets.Dataset.from_list(ROWS)) == ROWS


def test_json_lines_keep_chat_messages() -> None:
    rows = load_rows(FILES / "chat.jsonl")
    check_rows(rows, 2)
    assert [row["answer"] for row in rows] == ["2", "Wien"]
    assert rows[1]["prompt"] == [{"role": "user", "content": "Wie heißt die Hauptstadt von Österreich?"}]


def test_json_is_a_list_of_objects() -> None:
    assert load_rows(str(FILES / "countdown.json"))[1] == {"target": 64, "nums": [63, 95, 96]}


@pytest.mark.parametrize(("name", "text"), [("a.csv", "prompt\nq\n"), ("a.json", '[{"prompt": "q"}]')])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert load_rows(tmp_path / name) == [{"prompt": "q"}]


def test_csv_values_are_texts() -> None:
    rows = load_rows(FILES / "sums.csv")
    assert rows == [{"prompt": "1+1=", "answer": "2"}, {"prompt": "Add one, two\nand three: ", "answer": "6"}]


def test_a_csv_cell_may_be_long(tmp_path: Path) -> None:
    """The default limit of Python's csv is 131,072 characters."""
    (tmp_path / "a.csv").write_text("prompt\n" + "x" * 200_000)
    assert len(load_rows(tmp_path / "a.csv")[0]["prompt"]) == 200_000


@pytest.mark.parametrize("prompt", ["1+1=", CHAT], ids=["text", "chat"])
def test_parquet_keeps_types(tmp_path: Path, prompt: Any) -> None:
    rows = [{"prompt": prompt, "answer": 2, "nums": [1, 2]}, {"prompt": prompt, "answer": 3, "nums": []}]
    assert load_rows(write_parquet(tmp_path / "rows.parquet", rows)) == rows


def test_limit_takes_the_first_rows() -> None:
    assert len(load_rows(FILES / "gsm8k.jsonl")) == 3
    assert load_rows(FILES / "gsm8k.jsonl", limit=2) == load_rows(FILES / "gsm8k.jsonl")[:2]
    assert len(load_rows(FILES / "gsm8k.jsonl", limit=9)) == 3
    for limit in (0, -1):
        with pytest.raises(ValueError, match=f"limit must be at least 1; got {limit}"):
            load_rows(ROWS, limit=limit)
    with pytest.raises(ValueError, match="the list of rows must have at least one row; got none"):
        load_rows([])


def test_a_byte_order_mark_and_a_line_separator_inside_a_text(tmp_path: Path) -> None:
    """U+2028 ends a line for `str.splitlines`, not for JSON."""
    path = tmp_path / "ROWS.JSONL"
    path.write_text(json.dumps({"prompt": "a\u2028b"}, ensure_ascii=False), encoding="utf-8-sig")
    assert load_rows(path) == [{"prompt": "a\u2028b"}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        pytest.param("a.txt", b"1+1=", r"ends in .json, .jsonl, .parquet, .csv; got '.*a.txt'", id="suffix"),
        pytest.param("a.json", b"[]", "a.json' must have at least one row; got none", id="json-empty"),
        pytest.param("a.json", b'{"prompt": "1"}', "a.json .*expected a list of objects; got dict", id="json-object"),
        pytest.param("a.json", b'{"prompt": "1"}\n{}', "a.json cannot be read .* line 2 column 1", id="json-lines"),
        pytest.param("a.json", b'["\xff"]', "a.json cannot be read .*'utf-8' codec", id="json-encoding"),
        pytest.param("a.jsonl", b"\n\n", "a.jsonl' must have at least one row; got none", id="jsonl-empty"),
        pytest.param("a.jsonl", b'{}\n\n{"a"', "a.jsonl cannot be read .*: line 3: Expecting", id="jsonl-cut-off"),
        pytest.param("a.jsonl", b'{}\n"\xff"', "a.jsonl cannot be read .*'utf-8' codec", id="jsonl-encoding"),
        pytest.param("a.csv", b"", "a.csv' must have at least one row; got none", id="csv-empty"),
        pytest.param("a.csv", b"prompt,answer\n", "a.csv' must have at least one row; got none", id="csv-header"),
        pytest.param("a.csv", b"a,b\n1,2\n3\n", r"a.csv .*line 3: expected .*\['a', 'b'\]; got", id="csv-short-row"),
        pytest.param("a.csv", b"a,b\n1,2,3\n", r"a.csv .*line 2: expected .*\['a', 'b'\]; got", id="csv-long-row"),
        pytest.param(
            "a.csv",
            b"prompt\n\"[{'role': 'user', 'content': 'q'}]\"\n",
            r"a.csv .*line 2: expected a prompt that is a text; got \[\{'role'.* need .jsonl",
            id="csv-chat",
        ),
        pytest.param("a.csv", b"a,a\n1,2\n", r"a.csv .* all different; got \['a', 'a'\]", id="csv-twice"),
        pytest.param("a.json", b"[" * 100_000, r"a.json cannot be read as .json: .*recursion", id="json-nested"),
        pytest.param("a.csv", b"a,\n1,2\n", r"a.csv .* all different; got \['a', ''\]", id="csv-no-name"),
        pytest.param("a.csv", b'a\n"1\n', "a.csv cannot be read .*unexpected end", id="csv-open-quote"),
        pytest.param("a.parquet", b"PAR2", "a.parquet cannot be read as .parquet: ", id="parquet"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_rows(tmp_path / name)


@pytest.mark.parametrize(
    "source",
    ["rows.jsonl", "folder/rows.CSV", "./rows", "~/no-such-rows", Path("openai/gsm8k")],
    ids=["suffix", "upper-case-suffix", "relative", "home", "path"],
)
def test_a_missing_file_is_not_a_data_set_name(in_tmp_path: Path, source: Any) -> None:
    where = "" if str(source).startswith("~") else rf" \(from {in_tmp_path}\)"
    with pytest.raises(
        FileNotFoundError, match=rf"expected a file at '{source}'{where}; got a path that does not exist"
    ):
        load_rows(source)


def test_a_file_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1="}')
    assert load_rows("~/rows.jsonl") == load_rows(Path("~/rows.jsonl")) == [{"prompt": "1+1="}]
    (tmp_path / "folder").mkdir()
    (tmp_path / "rows.jsonl").rename(tmp_path / "folder" / "train.jsonl")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    assert load_rows("~/folder") == [{"prompt": "1+1="}]


@pytest.mark.parametrize("options", [{"subset": "main"}, {"split": "test"}], ids=["subset", "split"])
def test_files_and_lists_have_no_subsets_and_splits(options: Any) -> None:
    for source in (FILES / "gsm8k.jsonl", ROWS):
        with pytest.raises(ValueError, match="must have no subset and split, only a `datasets` name has; got"):
            load_rows(source, **options)


def test_a_name_goes_to_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def load_dataset(*arguments: Any, **options: Any) -> datasets.Dataset:
        calls.append((arguments, options))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr("grpo_fused.trainer.data.check_name", lambda *names: calls.append(names))
    assert load_rows("openai/gsm8k", subset="main", split="test", limit=4) == ROWS[:4]
    assert load_rows("someone/data-v1.5", limit=99) == ROWS
    assert calls == [
        ("openai/gsm8k", "dataset"),
        (("openai/gsm8k", "main"), {"split": "test"}),
        ("someone/data-v1.5", "dataset"),
        (("someone/data-v1.5", None), {"split": "train"}),
    ]


def test_a_folder_goes_to_datasets(in_tmp_path: Path) -> None:
    (in_tmp_path / "folder").mkdir()
    write_parquet(in_tmp_path / "folder" / "train.parquet", ROWS)
    write_parquet(in_tmp_path / "folder" / "test.parquet", ROWS[:2])
    assert load_rows("folder") == ROWS
    assert load_rows("folder", split="test") == ROWS[:2]
    with pytest.raises(ValueError, match="dev"):
        load_rows("folder", split="dev")
    with pytest.raises(ValueError, match="main"):
        load_rows("folder", subset="main")
    (in_tmp_path / "cut").mkdir()
    for name, text in (("a.parquet", "PAR2"), ("a.jsonl", '{"prompt"')):
        (in_tmp_path / "cut" / name).write_text(text)
        with pytest.raises(ValueError, match="'cut' cannot be read by `datasets`: (Parquet|JSON parse)"):
            load_rows("cut")
        (in_tmp_path / "cut" / name).unlink()
    with pytest.raises(ValueError, match="'/' cannot be read by `datasets`"):
        load_rows("/")


def test_a_name_that_cannot_be_loaded_is_named_by_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match="no/such"):
        load_rows("no/such")


def test_good_rows_pass() -> None:
    check_rows(ROWS, 10)
    check_rows([{"prompt": CHAT}, {"prompt": tuple(CHAT)}], 1)


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        pytest.param([], ValueError, "train_dataset must have at least 2 rows, .*; got 0", id="empty"),
        pytest.param(ROWS[:1], ValueError, "train_dataset must have at least 2 rows, .*; got 1", id="too-few"),
        pytest.param(
            iter(ROWS), TypeError, "train_dataset must be a list of rows, .*; got list_iterator", id="iterator"
        ),
        pytest.param(["1+1=", "1+2="], TypeError, "row 0 .* must be a mapping of columns; got str", id="texts"),
        pytest.param(
            [*ROWS, {"question": "1"}], ValueError, r'row 10 .* column "prompt"; got .*\[\'question\'\]', id="no-prompt"
        ),
        pytest.param(
            [*ROWS, {"prompt": "1"}],
            ValueError,
            r"row 10 .* must have the columns \['answer', 'prompt'\], as row 0; got \['prompt'\]",
            id="fewer-columns",
        ),
        pytest.param(
            [*ROWS, ROWS[0] | {"hint": ""}], ValueError, r"row 10 .*; got \['answer', 'hint', 'prompt'\]", id="more"
        ),
        pytest.param(
            [ROWS[0] | {3: ""}, *ROWS], ValueError, r"row 1 .* \['3', 'answer', 'prompt'\], as row 0", id="number"
        ),
        pytest.param([*ROWS, ROWS[0] | {"prompt": " "}], ValueError, "row 10 .* not blank", id="blank-prompt"),
        pytest.param([*ROWS, ROWS[0] | {"prompt": []}], TypeError, r"row 10 .* got \[\]", id="no-messages"),
        pytest.param([*ROWS, ROWS[0] | {"prompt": None}], TypeError, "row 10 .* got None", id="null-prompt"),
        pytest.param(
            [*ROWS, ROWS[0] | {"prompt": CHAT}], ValueError, "row 10 .* in the form of row 0's", id="text-and-chat"
        ),
        pytest.param(
            [row | {"completions": "", "completion_ids": 0} for row in ROWS],
            ValueError,
            r"column that reward functions get anyway; got \['completion_ids', 'completions'\]",
            id="taken-names",
        ),
    ],
)
def test_bad_rows_are_named(rows: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        check_rows(rows, 2)


def test_errors_call_the_data_set_by_its_name() -> None:
    with pytest.raises(ValueError, match=r"^eval_dataset must have at least one row; got 0$"):
        check_rows([], 1, name="eval_dataset")
    with pytest.raises(ValueError, match="row 0 of eval.jsonl: expected a last message that is not blank"):
        check_rows([{"prompt": ""}], 1, name="eval.jsonl")


def indices(batches: Iterator[list[Any]], count: int) -> list[list[int]]:
    return [[row["answer"] - 1 for row in batch] for batch in islice(batches, count)]


def flat(batches: list[list[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


def test_an_epoch_has_every_row_once_and_the_next_another_order() -> None:
    batches = Batches(ROWS, 2, seed=1)
    first, second = flat(indices(batches, 5)), flat(indices(batches, 5))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert tuple(first) == epoch_order(10, 1, 0)
    assert tuple(second) == epoch_order(10, 1, 1)
    assert first != flat(indices(Batches(ROWS, 2, seed=2), 5))


def test_orders_are_the_same_in_every_process() -> None:
    """Otherwise a resumed run would get other batches; the numbers are the first recorded output of this code."""
    assert epoch_order(6, 0, 0) == (0, 4, 3, 1, 5, 2)


def test_an_incomplete_batch_is_left_out() -> None:
    batches = Batches(ROWS, 4)
    epochs = [round(batches.epoch, 3)]
    for _ in range(4):
        assert len(next(batches)) == 4
        epochs.append(round(batches.epoch, 3))
    assert epochs == [0.0, 0.5, 1.0, 1.5, 2.0]


@pytest.mark.parametrize("taken", [0, 1, 2, 3, 7], ids="after-{}".format)
def test_a_resumed_order_is_the_same_order(taken: int) -> None:
    batches = Batches(ROWS, 3, seed=4)
    indices(batches, taken)
    state = json.loads(json.dumps(batches.state_dict()))
    epoch, expected = batches.epoch, indices(batches, 8)
    resumed = Batches(ROWS, 3, seed=4)
    indices(resumed, 5)  # its earlier position does not matter
    resumed.load_state_dict(state)
    assert resumed.epoch == epoch
    assert indices(resumed, 8) == expected


def test_a_state_works_with_another_batch_size() -> None:
    batches = Batches(ROWS, 2)
    before = flat(indices(batches, 2))
    resumed = Batches(ROWS, 3)
    resumed.load_state_dict(batches.state_dict())
    assert sorted(before + flat(indices(resumed, 2))) == list(range(10))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"length": 11}, id="length"),
        pytest.param({"seed": 1}, id="seed"),
        pytest.param({"position": 11}, id="position"),
        pytest.param({"epoch": -1}, id="epoch"),
        pytest.param({"epoch": 0.5}, id="float"),
        pytest.param({"position": None}, id="none"),
    ],
)
def test_another_state_is_refused(change: Any) -> None:
    batches = Batches(ROWS, 2)
    with pytest.raises(ValueError, match=r"must be a place in a data set of 10 rows with seed 0; got {"):
        batches.load_state_dict(batches.state_dict() | change)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("Count.", "Count!"),
        ([{"role": "user", "content": "Count."}], [{"role": "system", "content": "Count."}]),
        ([{"role": "user", "content": "Count."}], "Count."),
        (
            [{"role": "user", "content": "Count.", "name": "Ada"}, {"role": "user", "content": "On."}],
            [{"role": "user", "content": "Count.", "name": "Bob"}, {"role": "user", "content": "On."}],
        ),
    ],
)
def test_a_state_of_other_prompts_is_refused(first: Any, second: Any) -> None:
    rows = [{"prompt": "Say 1.", "answer": 1}, {"prompt": first, "answer": 2}]
    state = Batches(rows, 1).state_dict()
    Batches([dict(row, answer=7) for row in rows], 1).load_state_dict(state)
    if isinstance(first, list):  # as `datasets` fills what a message does not have
        Batches([rows[0], {"prompt": [{"tool": None, **part} for part in first]}], 1).load_state_dict(state)
    others = Batches([rows[0], {"prompt": second, "answer": 2}], 1)
    for changed in (state, {key: x for key, x in state.items() if key != "prompts"}):
        with pytest.raises(ValueError, match="must have the prompts that the run began with; got 2 others"):
            others.load_state_dict(changed)


def test_the_hash_of_prompts_stays() -> None:
    """Runs are resumed with later releases."""
    rows = [{"prompt": "Say 1."}, {"prompt": [{"role": "user", "content": "Count.", "name": None}]}]
    want = hashlib.sha256(b'"Say 1."[{"content": "Count.", "role": "user"}]').hexdigest()
    assert hash_of_prompts(rows) == want


def test_arguments_of_a_tool_call_may_have_keys_of_any_type() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"arguments": {1: 2, "by": 3}}]}
    hashes = {hash_of_prompts([{"prompt": [call | more]}]) for more in ({}, {"name": None}, {"name": "Ada"})}
    assert len(hashes) == 2
