"""What the files of a checkpoint must hold: the bytes that were written; the names, shapes and counts of this run."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

FORMAT = 2
STATE, SEAL = "state.json", "state.json.sha256"
_FIELDS: dict[str, type] = {
    "step": int, "processes": int, "optimizer_steps": int, "moments": int, "batches": dict, "files": dict,
}  # fmt: skip
_BLOCK = 1 << 20


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read."""


def checksum(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal.

    Raises:
        CheckpointError: There is no file.
    """
    if not path.is_file():
        found = "a folder" if path.is_dir() else "something else" if path.exists() else "nothing"
        raise CheckpointError(f"{path.name}: expected a file; got {found}")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Writes `state.json` with the checksums of all files there are, and last its own, as `sha256sum -c` reads it."""
    files = {path.relative_to(folder).as_posix(): checksum(path) for path in folder.rglob("*") if path.is_file()}
    text = json.dumps({"format": FORMAT, **state, "files": files}, indent=1)
    (folder / STATE).write_text(text, encoding="utf-8")
    (folder / SEAL).write_text(_seal(folder), encoding="utf-8")


def read_state(folder: Path) -> dict[str, Any]:
    """The state of a checkpoint, whose files are those that were written.

    Raises:
        CheckpointError: A file is missing or has other bytes, or a field is missing or not what it must be.
    """
    if not folder.is_dir():
        raise CheckpointError("expected a folder; got a file")
    checksum(folder / SEAL)  # that it is a file
    expected, found = _seal(folder), (folder / SEAL).read_bytes()
    if found != expected.encode():
        raise CheckpointError(f"{STATE} and {SEAL} disagree: expected {expected!r} in {SEAL}; got {found[:80]!r}")
    state = _parsed((folder / STATE).read_bytes())
    for name, digest in state["files"].items():
        now = checksum(folder / name)
        if now != digest:
            raise CheckpointError(f"{name} has changed since it was written: expected SHA-256 {digest}; got {now}")
    return state


def read_tensors(folder: Path, name: str, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a file whose checksum is in the state."""
    check_listed(name, state)
    try:
        return load_file(folder / name)
    except SafetensorError as error:
        raise CheckpointError(f"{name}: expected tensors in the safetensors format; got {error}") from error


def check_listed(name: str, state: Mapping[str, Any]) -> None:
    """Raises CheckpointError where the checkpoint was written without that file."""
    if name not in state["files"]:
        raise CheckpointError(f"{STATE}: expected {name} among its files; got {sorted(state['files'])}")


def check_names(name: str, found: set[str], expected: set[str]) -> None:
    """Raises CheckpointError where a file has not the tensors of this run."""
    if found != expected:
        missing, others = sorted(expected - found), sorted(found - expected)
        raise CheckpointError(
            f"{name}: expected the {len(expected)} tensors of this run; got {len(found)}, without {missing[:3]} and "
            f"with {others[:3]} beside them"
        )


def check_tensors(name: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError where names, shapes or dtypes are not those of this run."""
    check_names(name, set(found), set(expected))
    for key, tensor in expected.items():
        came = found[key]
        if came.shape != tensor.shape or came.dtype != tensor.dtype:
            raise CheckpointError(
                f"{name}: expected {key} of shape {tuple(tensor.shape)}, {tensor.dtype}; "
                f"got {tuple(came.shape)}, {came.dtype}"
            )


def _seal(folder: Path) -> str:
    return f"{checksum(folder / STATE)}  {STATE}\n"


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        state = json.loads(content)
    except (ValueError, RecursionError) as error:  # not text, not JSON, or nested too deeply
        raise CheckpointError(f"{STATE}: expected JSON; got {type(error).__name__}: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{STATE}: expected an object; got {type(state).__name__}")
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{STATE}: expected format {FORMAT}; got {state.get('format')!r:.80}")
    for name, kind in _FIELDS.items():
        value = state.get(name)
        if type(value) is not kind or (isinstance(value, int) and value < 0):
            what = "an int that is not negative" if kind is int else "an object"
            raise CheckpointError(f"{STATE}: expected {name} to be {what}; got {value!r:.80}")
    scaler = state.get("scaler")
    if scaler is not None and not (isinstance(scaler, dict) and all(map(_is_size, scaler.values()))):
        raise CheckpointError(f"{STATE}: expected scaler to be null or an object of numbers; got {scaler!r:.80}")
    return state


def _is_size(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 <= value < math.inf
