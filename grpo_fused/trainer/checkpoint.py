"""The folder of a checkpoint: complete or absent, and read without executing anything.

checkpoint-000050/
    model.safetensors, config.json, ...   the files of `save_pretrained`: a model (or adapter) to load anywhere
    optimizer.safetensors                 AdamW's moments
    state.json                            step, position in the data, options, SHA-256 of every file above
    state.json.sha256                     its own
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.optim import Optimizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

PREFIX, UNFINISHED = "checkpoint-", ".unfinished"
FORMAT = 3
OPTIMIZER, WEIGHTS, ADAPTER = "optimizer.safetensors", "model.safetensors", "adapter_model.safetensors"
STATE, SEAL = "state.json", "state.json.sha256"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read."""


_KINDS: dict[str, tuple[type, ...]] = {
    "format": (int,), "step": (int,), "processes": (int,), "optimizer_steps": (int,), "moments": (int,),
    "batches": (dict,), "files": (dict,), "scaler": (dict, NoneType),
    "options": (dict,), "model": (str,), "vocabulary": (str,),
}  # fmt: skip
"""The types of the fields of `state.json`; a field that is missing is None."""


@contextmanager
def naming(what: object) -> Iterator[None]:
    """Any error becomes a CheckpointError that begins with `what`: libraries raise many kinds."""
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
        raise CheckpointError(f"{what}: {kind}{error}") from error


def publish(final: Path, write: Callable[[Path], object], keep: int | None) -> None:
    """Lets `write` fill a new folder, moves it to `final`, and removes all older checkpoints except the newest `keep`.

    It is written next to `final` and renamed, after everything is on the disk: if the process dies before that, the
    older ones are unchanged.

    Raises:
        CheckpointError: It could not be written (for example on a full disk); the older ones still exist.
    """
    unfinished = final.with_name(f"{UNFINISHED}-{final.name}")
    with naming(f"could not write {final} (older checkpoints are unchanged)"):
        try:
            _delete(unfinished)
            unfinished.mkdir(parents=True)
            write(unfinished)
            for path in (*unfinished.rglob("*"), unfinished):
                _to_disk(path)
            if final.exists():
                remove(final)
            unfinished.rename(final)
            _to_disk(final.parent)
        finally:
            for path in final.parent.glob(f"{UNFINISHED}-*"):  # also of a process that died while it wrote
                _delete(path)
    for path in checkpoints(final.parent)[: -keep if keep else 0]:
        remove(path)


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the oldest first. All are complete: they are renamed after they are written."""
    found = [path for path in folder.glob(f"{PREFIX}*") if path.name[len(PREFIX) :].isdecimal()]
    return sorted(found, key=lambda path: int(path.name[len(PREFIX) :]))


def remove(path: Path) -> None:
    """Removes a checkpoint; it is renamed first, so that a partly removed one is not taken for a checkpoint."""
    hidden = path.with_name(f"{UNFINISHED}-old-{path.name}")
    _delete(hidden)
    path.rename(hidden)
    _delete(hidden)


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Writes `state.json` with the checksums of all files, and last its own checksum, as `sha256sum -c` reads it."""
    files = {path.relative_to(folder).as_posix(): checksum(path) for path in folder.rglob("*") if path.is_file()}
    text = json.dumps({"format": FORMAT, **state, "files": files}, indent=1)
    (folder / STATE).write_text(text, encoding="utf-8")
    (folder / SEAL).write_text(seal_of(folder), encoding="utf-8")


@naming(STATE)
def read_state(folder: Path) -> dict[str, Any]:
    """The state of a checkpoint, after a check that its files are unchanged.

    Raises:
        CheckpointError: A file is missing or has other bytes, or a field is missing or wrong.
    """
    expected, found = seal_of(folder), (folder / SEAL).read_bytes()
    if found != expected.encode():
        raise CheckpointError(f"expected {expected!r} in {SEAL}; got {found[:80]!r}")
    state: dict[str, Any] = json.loads((folder / STATE).read_bytes())
    for name, kinds in _KINDS.items():
        if type(state.get(name)) not in kinds:
            names = " or ".join(kind.__name__ for kind in kinds)
            raise CheckpointError(f"expected {name} to be of type {names}; got {state.get(name)!r:.80}")
    if (state["format"], folder.name) != (FORMAT, f"{PREFIX}{state['step']:06d}"):
        raise CheckpointError(
            f"expected format {FORMAT} and the step of {folder.name}; got {state['format']} and {state['step']}"
        )
    if state["optimizer_steps"] < state["step"]:
        raise CheckpointError(f"expected an optimizer step for each step; got {state['optimizer_steps']}")
    if not all(0 <= value < math.inf for value in (state["scaler"] or {}).values()):
        raise CheckpointError(f"expected a scaler of finite numbers from 0; got {state['scaler']}")
    for name, expected in state["files"].items():
        if (digest := checksum(folder / name)) != expected:
            raise CheckpointError(f"{name} has changed: expected SHA-256 {expected}; got {digest}")
    return state


def read_tensors(folder: Path, name: str, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a file whose checksum is in the state."""
    if name not in state["files"]:
        raise CheckpointError(f"expected {name} among the files of {STATE}; got {sorted(state['files'])}")
    return load_file(folder / name)


def check_tensors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError if names, shapes or dtypes are not those of this run."""
    for name in sorted(found.keys() | expected.keys()):
        came, wanted = (
            f"{tuple(tensors[name].shape)}, {tensors[name].dtype}" if name in tensors else "no such tensor"
            for tensors in (found, expected)
        )
        if came != wanted:
            raise CheckpointError(f"{name}: expected {wanted}; got {came}")


@naming(WEIGHTS)
def load_weights(checkpoint: Path, state: Mapping[str, Any], unwrapped: PreTrainedModel, model: nn.Module) -> None:
    """Loads the weights of a whole model, from one file or several, into a model."""
    wanted = unwrapped.state_dict()
    files = [name for name in state["files"] if name.startswith("model") and name.endswith(".safetensors")]
    for file in files or [WEIGHTS]:
        # loading converts: a weight of another dtype would change. Renamed ones cannot be compared
        for name, tensor in read_tensors(checkpoint, file, state).items():
            if name in wanted and tensor.dtype != wanted[name].dtype:
                raise CheckpointError(f"{name}: expected {wanted[name].dtype}; got {tensor.dtype}")
    # by the library, which renames weights in files; fp32 represents those of any lower precision
    with quiet():
        loaded, report = cast(Any, type(unwrapped)).from_pretrained(
            checkpoint,
            config=unwrapped.config,
            dtype=torch.float32,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are in the report
            output_loading_info=True,
        )
    if wrong := {kind: sorted(names)[:3] for kind, names in report.items() if names}:
        raise CheckpointError(f"expected the weights of this model; got others (name, shape, expected shape): {wrong}")
    dcp.set_model_state_dict(model, loaded.state_dict(), options=dcp.StateDictOptions(full_state_dict=True))


@naming(ADAPTER)
def load_adapters(checkpoint: Path, state: Mapping[str, Any], unwrapped: PreTrainedModel) -> None:
    """Loads the weights of every adapter of a model: several may be active."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    for name in unwrapped.peft_config:  # type: ignore[attr-defined]
        adapter = read_tensors(checkpoint, ADAPTER if name == "default" else f"{name}/{ADAPTER}", state)
        wanted = get_peft_model_state_dict(unwrapped, adapter_name=name, save_embedding_layers=False)
        # peft may have written the embeddings, too
        wanted |= {name: tensor for name, tensor in unwrapped.state_dict().items() if name in adapter}
        check_tensors(adapter, wanted)
        set_peft_model_state_dict(unwrapped, adapter, adapter_name=name)


@naming(OPTIMIZER)
def load_moments(checkpoint: Path, state: Mapping[str, Any], model: nn.Module, optimizer: Optimizer) -> None:
    """Loads AdamW's moments; its options stay those of this run."""
    moments = read_tensors(checkpoint, OPTIMIZER, state)
    if len(moments) != state["moments"]:
        raise CheckpointError(f"expected {state['moments']} tensors; got {len(moments)}")
    if not moments:
        return  # no step was taken
    fresh = dcp.get_optimizer_state_dict(model, optimizer)  # by a step with zero gradients
    expected = flat(fresh)
    reached = {name.partition("/")[2] for name in moments}
    check_tensors(moments, {name: x for name, x in expected.items() if name.partition("/")[2] in reached})
    for name, tensor in moments.items():
        if name.startswith("step/") and not (tensor >= 1 and float(tensor).is_integer()):
            raise CheckpointError(f"{name}: expected a count of steps; got {tensor.item()}")
    # torch wants moments of every parameter; one that no pass has reached (of an image tower) was saved without
    missing = {name: torch.zeros(x.shape, dtype=x.dtype) for name, x in expected.items() if name not in moments}
    nested: dict[str, dict[str, Tensor]] = {}
    for name, tensor in (moments | missing).items():
        moment, parameter = name.split("/", 1)
        nested.setdefault(parameter, {})[moment] = tensor
    restored: Any = {"state": nested, "param_groups": fresh["param_groups"]}
    dcp.set_optimizer_state_dict(model, optimizer, restored, options=dcp.StateDictOptions(full_state_dict=True))
    for weight, loaded in list(optimizer.state.items()):
        if loaded["step"] == 0:  # its first step will make them
            del optimizer.state[weight]
            continue
        for name, tensor in loaded.items():
            if tensor.dim() and tensor.stride() != weight.stride():  # fused AdamW reads them in the order of memory
                loaded[name] = torch.empty_like(weight).copy_(tensor)


def flat(optimizer_state: Mapping[str, Any]) -> dict[str, Tensor]:
    """{"exp_avg/model.embed.weight": tensor}: names of parameters contain dots, those of moments no slash."""
    return {
        f"{moment}/{parameter}": torch.as_tensor(tensor).contiguous()
        for parameter, moments in optimizer_state["state"].items()
        for moment, tensor in moments.items()
    }


def options_of(config: DataclassInstance) -> dict[str, Any]:
    """The options of a run, as JSON has them."""
    return json.loads(json.dumps(asdict(config), default=str))


def changes(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """`name: old -> new` of each option that differs; one that is missing is None."""
    found = []
    for name in dict.fromkeys([*old, *new]):
        was, now = old.get(name), new.get(name)
        if isinstance(was, dict) and isinstance(now, dict):
            found += changes(was, now, f"{prefix}{name}.")
        elif was != now:
            found.append(f"{prefix}{name}: {was} -> {now}")
    return found


def identity(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """SHA-256 of what a run begins with: weights of the model (before training), tokens and their ids.

    Of each weight 256 numbers, rounded to bf16: in another dtype the model is the same. Adapters that are trained are
    left out, except LoRA that changes the model already: a new one may begin with other random numbers.
    """
    weights, tokens = hashlib.sha256(), json.dumps(tokenizer.get_vocab(), sort_keys=True)
    every, adapters = dict(model.named_parameters()), set(getattr(model, "peft_config", ()))
    for name, weight in every.items():
        is_adapter = weight.requires_grad and not adapters.isdisjoint(name.split("."))
        other = name.replace("_B.", "_A.") if "_B." in name else name.replace("_A.", "_B.")  # of an embedding A is 0
        if is_adapter and not (".lora_" in name and weight.any() and every[other].any()):
            continue
        numbers: torch.Tensor = getattr(weight, "qdata", weight)  # torchao's tensors have no views
        some = numbers.detach().flatten()[:: max(weight.numel() // 256, 1)]
        weights.update(some.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return {"model": weights.hexdigest(), "vocabulary": hashlib.sha256(tokens.encode()).hexdigest()}


def checksum(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def seal_of(folder: Path) -> str:
    """The content of `state.json.sha256`."""
    return f"{checksum(folder / STATE)}  {STATE}\n"


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars, which would break the run's."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


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
