"""The folder of a checkpoint: complete or not there, and read without executing anything.

checkpoint-000050/
    model.safetensors, config.json, ...   what `save_pretrained` writes: a model (or adapter) to load anywhere
    optimizer.safetensors                 AdamW's moments
    rng-0.safetensors, ...                random states of each process
    state.json                            step, position in the data, SHA-256 of every file above
    state.json.sha256                     its own
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.optim import Optimizer
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

PREFIX, UNFINISHED = "checkpoint-", ".unfinished"
FORMAT = 2
OPTIMIZER, WEIGHTS, ADAPTER = "optimizer.safetensors", "model.safetensors", "adapter_model.safetensors"
STATE, SEAL = "state.json", "state.json.sha256"
_BLOCK = 1 << 20


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read."""


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_size(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 <= value < math.inf


_COUNT = ("an int that is not negative", _is_count)
_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "format": (str(FORMAT), lambda value: type(value) is int and value == FORMAT),
    "step": _COUNT,
    "processes": _COUNT,
    "optimizer_steps": _COUNT,
    "moments": _COUNT,
    "batches": ("an object", lambda value: isinstance(value, dict)),
    "files": ("an object", lambda value: isinstance(value, dict)),
    "scaler": (
        "null or an object of numbers",
        lambda value: value is None or (isinstance(value, dict) and all(map(_is_size, value.values()))),
    ),
}
"""What `state.json` holds: each field's description and test. A field that is missing is null."""

_VALUES: dict[str, tuple[str, Callable[[Tensor], bool]]] = {
    "step/": ("a count of steps", lambda value: bool(value >= 1 and value == value.floor() and value < math.inf)),
    "numpy_position": ("a place in NumPy's state", lambda value: 0 <= int(value[0]) <= 624 and int(value[1]) in (0, 1)),
}
"""The same for tensors whose name begins so. NumPy and AdamW do not look."""


@contextmanager
def naming(what: object) -> Iterator[None]:
    """Any error becomes a CheckpointError that begins with `what`: libraries raise many kinds."""
    try:
        yield
    except Exception as error:
        own = isinstance(error, CheckpointError) or type(error) is Exception  # the tokenizers library raises these
        text = str(error) if own else f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{what}: {text}") from error


def publish(final: Path, write: Callable[[Path], object], keep: int | None) -> None:
    """Puts what `write` makes of a folder at `final`, and removes all older checkpoints but the newest `keep`.

    It is written beside its place and renamed into it, after everything is on the disk: a process that dies on the way
    leaves the older ones as they were.

    Raises:
        CheckpointError: It could not be written (a full disk, say); the older ones are still there.
    """
    unfinished = final.with_name(f"{UNFINISHED}-{final.name}")
    try:
        with naming(f"could not write {final}"):
            _delete(unfinished)
            unfinished.mkdir(parents=True)
            write(unfinished)
            for path in (*unfinished.rglob("*"), unfinished):
                _to_disk(path)
            if final.exists():
                remove(final)
            unfinished.rename(final)
            _to_disk(final.parent)
    except CheckpointError as error:
        _delete(unfinished)
        kept = latest_checkpoint(final.parent)
        newest = kept.name if kept else "none"
        raise CheckpointError(f"{error}; the newest complete checkpoint is {newest}") from error
    for path in final.parent.glob(f"{UNFINISHED}-*"):  # of a process that died while it wrote
        _delete(path)
    for path in checkpoints(final.parent)[: -keep if keep else 0]:
        remove(path)


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the oldest first. None is half written: they are renamed into their place."""
    found = [path for path in folder.glob(f"{PREFIX}*") if path.name[len(PREFIX) :].isdecimal()]
    return sorted(found, key=lambda path: int(path.name[len(PREFIX) :]))


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint in a folder."""
    found = checkpoints(folder)
    return found[-1] if found else None


def remove(path: Path) -> None:
    """Removes a checkpoint; half of one must not look like one, so it is renamed first."""
    hidden = path.with_name(f"{UNFINISHED}-old-{path.name}")
    _delete(hidden)
    path.rename(hidden)
    _delete(hidden)


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Writes `state.json` with the checksums of all files there are, and last its own, as `sha256sum -c` reads it."""
    files = {path.relative_to(folder).as_posix(): checksum(path) for path in folder.rglob("*") if path.is_file()}
    text = json.dumps({"format": FORMAT, **state, "files": files}, indent=1)
    (folder / STATE).write_text(text, encoding="utf-8")
    (folder / SEAL).write_text(seal_of(folder), encoding="utf-8")


def read_state(folder: Path) -> dict[str, Any]:
    """The state of a checkpoint, whose files are those that were written.

    Raises:
        CheckpointError: A file is missing or has other bytes, or a field is missing or not what it must be.
    """
    if not folder.is_dir():
        raise CheckpointError("expected a folder; got a file")
    checksum(folder / SEAL)  # that it is a file
    expected, found = seal_of(folder), (folder / SEAL).read_bytes()
    if found != expected.encode():
        raise CheckpointError(f"{STATE} and {SEAL} disagree: expected {expected!r} in {SEAL}; got {found[:80]!r}")
    with naming(STATE):  # not text, not JSON, or nested too deeply
        state = json.loads((folder / STATE).read_bytes())
        if not isinstance(state, dict):
            raise CheckpointError(f"expected an object; got {type(state).__name__}")
        for name, (what, is_right) in _FIELDS.items():
            value = state.setdefault(name, None)
            if not is_right(value):
                raise CheckpointError(f"expected {name} to be {what}; got {value!r:.80}")
        if folder.name != f"{PREFIX}{state['step']:06d}":
            raise CheckpointError(f"expected the step of the folder's name; got {state['step']}")
        if state["optimizer_steps"] < state["step"]:
            raise CheckpointError(f"expected an optimizer step for each step; got {state['optimizer_steps']}")
    for name, digest in state["files"].items():
        now = checksum(folder / name)
        if now != digest:
            raise CheckpointError(f"{name} has changed since it was written: expected SHA-256 {digest}; got {now}")
    return state


def read_tensors(folder: Path, name: str, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a file whose checksum is in the state."""
    _check_listed(name, state)
    with naming(name):
        return load_file(folder / name)


def check_tensors(name: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError where names, shapes, dtypes or counts are not those of this run."""
    if found.keys() != expected.keys():
        missing, others = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
        raise CheckpointError(
            f"{name}: expected the {len(expected)} tensors of this run; got {len(found)}, without {missing[:3]} and "
            f"with {others[:3]} beside them"
        )
    for key, tensor in expected.items():
        wanted, came = ((tuple(one.shape), one.dtype) for one in (tensor, found[key]))
        if wanted != came:
            raise CheckpointError(f"{name}: expected {key} of shape {wanted[0]}, {wanted[1]}; got {came[0]}, {came[1]}")
        for prefix, (what, is_right) in _VALUES.items():
            if key.startswith(prefix) and not is_right(found[key]):
                raise CheckpointError(f"{name}: expected {key} to be {what}; got {found[key].tolist()}")


def load_weights(checkpoint: Path, state: Mapping[str, Any], unwrapped: PreTrainedModel, model: nn.Module) -> None:
    """The weights of a whole model into one that exists."""
    index = f"{WEIGHTS}.index.json"  # of a model in several files
    _check_listed(index if index in state["files"] else WEIGHTS, state)
    wanted = unwrapped.state_dict()
    for file in sorted(name for name in state["files"] if name.startswith("model") and name.endswith(".safetensors")):
        _check_dtypes(checkpoint / file, wanted)
    # by the library, which knows how it renames weights on the way to a file; fp32 holds those of any lower precision
    with quiet(), naming(WEIGHTS):
        loaded, report = cast(Any, type(unwrapped)).from_pretrained(
            checkpoint,
            config=unwrapped.config,
            dtype=torch.float32,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are in the report
            output_loading_info=True,
        )
    missing, others, shapes = (sorted(report[f"{kind}_keys"]) for kind in ("missing", "unexpected", "mismatched"))
    if missing or others or shapes:
        raise CheckpointError(
            f"{WEIGHTS}: its weights are not those of this model: it lacks {missing[:3]}, has {others[:3]} beside them "
            f"and, of another shape (name, got, expected), {shapes[:3]}"
        )
    dcp.set_model_state_dict(model, loaded.state_dict(), options=dcp.StateDictOptions(full_state_dict=True))


def load_adapter(checkpoint: Path, state: Mapping[str, Any], unwrapped: PreTrainedModel) -> None:
    """The weights of an adapter into a model that has one."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    adapter = read_tensors(checkpoint, ADAPTER, state)
    wanted = get_peft_model_state_dict(unwrapped, save_embedding_layers=False)
    # peft may have written the embeddings, too
    wanted |= {name: tensor for name, tensor in unwrapped.state_dict().items() if name in adapter}
    check_tensors(ADAPTER, adapter, wanted)
    set_peft_model_state_dict(unwrapped, adapter)


def load_moments(checkpoint: Path, state: Mapping[str, Any], model: nn.Module, optimizer: Optimizer) -> None:
    """AdamW's moments; its options stay those of this run."""
    moments = read_tensors(checkpoint, OPTIMIZER, state)
    if len(moments) != state["moments"]:
        raise CheckpointError(f"{OPTIMIZER}: expected {state['moments']} tensors; got {len(moments)}")
    if not moments:
        return  # it had not stepped
    fresh = dcp.get_optimizer_state_dict(model, optimizer)  # by a step with zero gradients
    check_tensors(OPTIMIZER, moments, flat(fresh))
    nested: dict[str, dict[str, Tensor]] = {}
    for name, tensor in moments.items():
        moment, parameter = name.split("/", 1)
        nested.setdefault(parameter, {})[moment] = tensor
    restored: Any = {"state": nested, "param_groups": fresh["param_groups"]}
    dcp.set_optimizer_state_dict(model, optimizer, restored, options=dcp.StateDictOptions(full_state_dict=True))


def load_random_states(checkpoint: Path, state: Mapping[str, Any], rank: int) -> None:
    """The random states of a process; that of a GPU only where both have one."""
    file = rng_file(rank)
    states, expected = read_tensors(checkpoint, file, state), random_states()
    if not ("cuda" in states and "cuda" in expected):
        states.pop("cuda", None)
        expected.pop("cuda", None)
    check_tensors(file, states, expected)
    with naming(file):
        set_random_states(states)


def random_states() -> dict[str, Tensor]:
    """The states of torch's, Python's and NumPy's global generators."""
    version, numbers, gauss = random.getstate()
    _name, keys, position, has_gauss, cached = cast("tuple[str, Any, int, int, float]", np.random.get_state())
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *numbers]),
        "python_gauss": torch.tensor([math.nan if gauss is None else gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(keys.astype(np.int64)),
        "numpy_position": torch.tensor([position, has_gauss]),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
    }
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def set_random_states(states: Mapping[str, Tensor]) -> None:
    """Puts back what `random_states` gave."""
    torch.set_rng_state(states["torch"])
    version, *numbers = states["python"].tolist()
    gauss = states["python_gauss"].item()
    random.setstate((version, tuple(numbers), None if math.isnan(gauss) else gauss))
    keys = states["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, *states["numpy_position"].tolist(), states["numpy_gauss"].item()))
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def flat(optimizer_state: Mapping[str, Any]) -> dict[str, Tensor]:
    """{"exp_avg/model.embed.weight": tensor}: names of parameters hold dots, those of moments no slash."""
    return {
        f"{moment}/{parameter}": torch.as_tensor(tensor).contiguous()
        for parameter, moments in optimizer_state["state"].items()
        for moment, tensor in moments.items()
    }


def rng_file(rank: int) -> str:
    """The file of a process's random states."""
    return f"rng-{rank}.safetensors"


def checksum(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal.

    Raises:
        CheckpointError: There is no file.
    """
    if not path.is_file():
        raise CheckpointError(f"{path.name}: expected a file; got {'something else' if path.exists() else 'nothing'}")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def seal_of(folder: Path) -> str:
    """What `state.json.sha256` must hold."""
    return f"{checksum(folder / STATE)}  {STATE}\n"


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars, which would break the run's, and tables of weights that do not fit."""
    shown, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if shown:
            transformers_logging.enable_progress_bar()


def _check_listed(name: str, state: Mapping[str, Any]) -> None:
    if name not in state["files"]:
        raise CheckpointError(f"{STATE}: expected {name} among its files; got {sorted(state['files'])}")


def _check_dtypes(path: Path, wanted: Mapping[str, Tensor]) -> None:
    """Loading converts: a weight of another dtype would be another weight. Renamed ones cannot be compared."""
    with safe_open(path, framework="pt") as file:
        for name in sorted(wanted.keys() & set(file.keys())):
            stored = file.get_slice(name)
            dtype = (stored[:0] if stored.get_shape() else file.get_tensor(name)).dtype
            if dtype != wanted[name].dtype:
                raise CheckpointError(f"{path.name}: expected {name} in {wanted[name].dtype}; got {dtype}")


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _to_disk(path: Path) -> None:
    """Waits until a file or a folder's entries have reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
