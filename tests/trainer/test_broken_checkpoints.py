"""Broken checkpoints: for any defect, resuming is a CheckpointError that names the file."""

from __future__ import annotations

import json
import math
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, save_file
from trainer.runs import make

from grpo_fused.trainer import CheckpointError
from grpo_fused.trainer.checkpoint import FORMAT, seal_of, write_state

NEWEST = "checkpoint-000002"
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
SEAL = "state.json.sha256"
NORM = "model.norm.weight"
DEEP = b"[" * 100_000

Break = Callable[[Path], object]


def flip(path: Path, place: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 1
    path.write_bytes(content)


def into_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, Break] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\n"),
    "first-byte": lambda path: flip(path, 0.0),
    "middle-byte": lambda path: flip(path, 0.5),
    "last-byte": lambda path: flip(path, 1.0),
    "text": lambda path: path.write_text("other content"),
    "deep": lambda path: path.write_bytes(DEEP),
    "pickle": lambda path: path.write_bytes(pickle.dumps({"step": 2})),
    "folder": into_a_folder,
}


def seal(checkpoint: Path) -> None:
    """With right checksums for the changed files, so that the check of their content must find the defect."""
    state = json.loads((checkpoint / STATE).read_bytes())
    (checkpoint / STATE).unlink()
    (checkpoint / SEAL).unlink()
    del state["files"]
    write_state(checkpoint, {"format": FORMAT} | state)


def tensors(file: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Break:
    """Changes the tensors of a file."""

    def apply(checkpoint: Path) -> None:
        found = {name: tensor.clone() for name, tensor in load_file(checkpoint / file).items()}
        change(found)
        save_file(found, checkpoint / file, metadata={"format": "pt"})
        seal(checkpoint)

    return apply


def rename(found: dict[str, torch.Tensor], name: str) -> None:
    found[f"{name}.other"] = found.pop(name)


def content(data: bytes) -> Break:
    """Other bytes in `state.json`, and the right checksum of them."""

    def apply(checkpoint: Path) -> None:
        (checkpoint / STATE).write_bytes(data)
        (checkpoint / SEAL).write_text(seal_of(checkpoint))

    return apply


def field(name: str, value: object) -> Break:
    """Another value in `state.json`; `...` removes it."""

    def apply(checkpoint: Path) -> None:
        state = json.loads((checkpoint / STATE).read_bytes())
        state[name] = value
        if value is ...:
            del state[name]
        content(json.dumps(state).encode())(checkpoint)

    return apply


def without_weights(checkpoint: Path) -> None:
    """A pickle in their place."""
    torch.save(load_file(checkpoint / MODEL), checkpoint / "pytorch_model.bin")
    (checkpoint / MODEL).unlink()
    seal(checkpoint)


WRONG_FIELDS: list[tuple[str, object]] = [
    *((name, value) for name in ("step", "optimizer_steps") for value in (-1, 1, 2.0, "2", True, None, [], {}, ...)),
    *((name, value) for name in ("processes", "moments") for value in (-1, 0, 7, 1.5, "1", math.nan, None, [], ...)),
    *(("format", value) for value in (0, 1, 99, "2", None, ...)),
    *(("batches", value) for value in ([], None, 3, "x", {}, {"epoch": 0}, ...)),
    ("batches", {"epoch": -1, "position": 0, "length": 6, "seed": 0}),
    ("batches", {"epoch": 0, "position": 7, "length": 6, "seed": 0}),
    ("batches", {"epoch": 0, "position": 0, "length": 5, "seed": 0}),
    ("batches", {"epoch": 0, "position": 0, "length": 6, "seed": 9}),
    *(("files", value) for value in ([], None, {}, {MODEL: 3}, {"nowhere": "0" * 64}, ...)),
    *((name, value) for name in ("model", "vocabulary") for value in ("0" * 64, 3, None, ...)),
    *(("options", value) for value in ([], None, "x", ...)),
    *(
        ("scaler", value)
        for value in ([], 3, {"scale": math.nan}, {"scale": math.inf}, {"scale": "1"}, {"scale": -1.0})
    ),
]

CASES: dict[str, tuple[Break, str]] = {
    **{
        f"{file}-{damage}": ((lambda checkpoint, file=file, do=do: do(checkpoint / file)), file)
        for file in (MODEL, OPTIMIZER, STATE, SEAL, "config.json", "tokenizer.json")
        for damage, do in DAMAGE.items()
    },
    **{
        f"state-{name}-{number}": (
            field(name, value),
            f"{STATE}|the state|processes wrote it|{OPTIMIZER}|{MODEL}|nowhere|got another",
        )
        for number, (name, value) in enumerate(WRONG_FIELDS)
    },
    "state-list": (content(b"[]"), STATE),
    "state-number": (content(b"3"), STATE),
    "state-deep": (content(b'{"format": ' + DEEP), STATE),
    "state-bytes": (content(b"\xff\xfe"), STATE),
    "weights-missing": (tensors(MODEL, lambda found: found.pop(NORM)), f"{MODEL}.*{NORM}"),
    "weights-extra": (tensors(MODEL, lambda found: found.update(other=torch.ones(2))), f"{MODEL}.*other"),
    "weights-renamed": (tensors(MODEL, lambda found: rename(found, NORM)), f"{MODEL}.*{NORM}"),
    "weights-shape": (tensors(MODEL, lambda found: found.update({NORM: torch.ones(31)})), f"{MODEL}.*{NORM}.*31"),
    "weights-dtype": (tensors(MODEL, lambda found: found.update({NORM: torch.ones(32).half()})), f"{MODEL}.*{NORM}"),
    "weights-none": (tensors(MODEL, lambda found: found.clear()), MODEL),
    "weights-pickled": (without_weights, MODEL),
    "moments-none": (tensors(OPTIMIZER, lambda found: found.clear()), f"{OPTIMIZER}: expected .* got 0"),
    "moments-one": (tensors(OPTIMIZER, lambda found: found.pop(f"exp_avg/{NORM}")), OPTIMIZER),
    "moments-renamed": (tensors(OPTIMIZER, lambda found: rename(found, f"exp_avg/{NORM}")), f"{OPTIMIZER}.*{NORM}"),
    "moments-no-slash": (
        tensors(OPTIMIZER, lambda found: found.update(exp=found.pop(f"exp_avg/{NORM}"))),
        f"{OPTIMIZER}: exp: expected no such tensor",
    ),
    "moments-shape": (
        tensors(OPTIMIZER, lambda found: found.update({f"exp_avg/{NORM}": torch.ones(1, 32)})),
        f"{OPTIMIZER}.*{NORM}.*1, 32",
    ),
    "moments-dtype": (
        tensors(OPTIMIZER, lambda found: found.update({f"exp_avg/{NORM}": torch.ones(32).int()})),
        f"{OPTIMIZER}.*{NORM}.*int32",
    ),
    **{
        f"moments-step-{count}": (
            tensors(OPTIMIZER, lambda found, count=count: found.update({f"step/{NORM}": torch.tensor(count)})),
            f"{OPTIMIZER}.*step/{NORM}.*{count}",
        )
        for count in (math.nan, math.inf, -1.0, 0.0, 1.5)
    },
    "all-removed": (lambda checkpoint: [path.unlink() for path in checkpoint.iterdir()], STATE),
}


IN_GATE = {
    case
    for case in CASES
    if case.startswith((f"{MODEL}-", f"{SEAL}-"))
    or case.endswith(("-missing", "-truncated", "-middle-byte"))
    or case.split("-")[0] in ("weights", "moments", "all")
} | {f"state-{name}-{number}" for number, (name, _) in enumerate(WRONG_FIELDS) if number % 3 == 0 or name == "batches"}
"""Every damage to two of the files, three to each of the others; every wrong tensor; every third value of a field."""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with a checkpoint of each."""
    AcceleratorState._reset_state(reset_partial_state=True)
    folder = tmp_path_factory.mktemp("good")
    make(folder, steps=2, save_steps=1).train()
    return folder


@pytest.fixture
def run(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "run"))


def test_a_good_one_is_read(run: Path) -> None:
    seal(run / NEWEST)
    assert make(run, resume=True).steps_done == 2


@pytest.mark.gate(keep=lambda case: case in IN_GATE)
@pytest.mark.parametrize("case", CASES)
def test_a_broken_one_is_named(run: Path, case: str) -> None:
    damage, named = CASES[case]
    damage(run / NEWEST)
    with pytest.raises(
        CheckpointError,
        match=rf"(?s)cannot resume .*{NEWEST} \(an older one exists: checkpoint-000001\): .*({named})",
    ):
        make(run, steps=3, resume=True)


@pytest.mark.parametrize("files", [[MODEL], [OPTIMIZER], [STATE], [STATE, SEAL], [STATE, SEAL, MODEL]])
def test_files_of_another_checkpoint_are_refused(run: Path, files: list[str]) -> None:
    for file in files:
        shutil.copy(run / "checkpoint-000001" / file, run / NEWEST / file)
    with pytest.raises(CheckpointError, match=NEWEST):
        make(run, resume=True)


def test_a_checkpoint_under_another_name_is_refused(run: Path) -> None:
    (run / NEWEST).rename(run / "checkpoint-000009")
    with pytest.raises(CheckpointError, match="expected .* the step of checkpoint-000009; got 3 and 2"):
        make(run, resume=True)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_an_invalid_checkpoint_is_not_skipped(run: Path, kind: str) -> None:
    """Resuming from an older one, or from the start, would lose steps without a message."""
    other = run / "checkpoint-000009"
    other.touch() if kind == "file" else other.mkdir()
    with pytest.raises(CheckpointError, match="checkpoint-000009.*: state.json: (NotADirectory|FileNotFound)Error"):
        make(run, resume=True)
    make(run, overwrite=True)
    assert not list(run.glob("*checkpoint*"))


@pytest.mark.parametrize(
    "line",
    [b"{", b"[]", b"3", b'{"reward": 1}', b'{"step": null}', b'{"step": "1"}', DEEP, b"\xff"],
    ids=["cut", "list", "number", "no-step", "null", "text", "deep", "bytes"],
)
def test_broken_metrics_are_named(run: Path, line: bytes) -> None:
    metrics = run / "metrics.jsonl"
    metrics.write_bytes(line + b"\n" + metrics.read_bytes())
    with pytest.raises(CheckpointError, match=r"metrics.jsonl|decode byte"):
        make(run, resume=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda found: found.pop(next(iter(found))), "lora_A.*: expected .*; got no such tensor", id="missing"),
        pytest.param(lambda found: rename(found, next(iter(found))), r"\.other: expected no such tensor|got no such tensor", id="renamed"),
        pytest.param(lambda found: found.update(other=torch.ones(1)), "other: expected no such tensor; got .*1", id="extra"),
        pytest.param(lambda found: found.update({next(iter(found)): torch.ones(1)}), r"lora_A\.weight: expected .*; got .1,.", id="shape"),
        pytest.param(lambda found: found.update({k: v.half() for k, v in found.items()}), "float16", id="dtype"),
    ],
)  # fmt: skip
def test_a_broken_adapter_is_named(tmp_path: Path, change: Any, message: str) -> None:
    make(tmp_path, steps=1, adapter=True).train()
    tensors("adapter_model.safetensors", change)(tmp_path / "checkpoint-000001")
    with pytest.raises(CheckpointError, match=f"adapter_model.safetensors: .*{message}"):
        make(tmp_path, resume=True, adapter=True)
