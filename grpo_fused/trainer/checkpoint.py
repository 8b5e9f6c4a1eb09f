"""Checkpoints: complete or not there, read without executing anything, and enough to go on as if nothing had happened.

checkpoint-000050/
    model.safetensors, config.json, ...   what `save_pretrained` writes: a model (or adapter) to load anywhere
    optimizer.safetensors                 AdamW's moments
    rng-0.safetensors, ...                random states of each process
    state.json                            step, position in the data, SHA-256 of every file above
    state.json.sha256                     its own
"""

from __future__ import annotations

import math
import os
import random
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.optim import Optimizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from grpo_fused.trainer.checkpoint_files import (
    STATE,
    CheckpointError,
    check_listed,
    check_names,
    check_tensors,
    read_state,
    read_tensors,
    write_state,
)

PREFIX, UNFINISHED = "checkpoint-", ".unfinished"
OPTIMIZER, WEIGHTS, ADAPTER = "optimizer.safetensors", "model.safetensors", "adapter_model.safetensors"


def save_checkpoint(
    folder: Path,
    step: int,
    *,
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    tokenizer: PreTrainedTokenizerBase,
    state: Mapping[str, Any],
    keep: int | None,
) -> Path:
    """Writes `folder/checkpoint-<step>`; all processes call it.

    It is written beside its place and renamed into it, after everything is on the disk: a process that dies on the way
    leaves the older ones as they were. Then all but the newest `keep` are removed.

    Raises:
        CheckpointError: It could not be written (a full disk, say); the older ones are still there.
    """
    final = folder / f"{PREFIX}{step:06d}"
    unfinished = folder / f"{UNFINISHED}-{final.name}"
    options = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = dcp.get_model_state_dict(model, options=options)  # collective where the model is sharded
    # of an optimizer that has not stepped, torch would make moments by a step with zero gradients, which counts
    optimizer_state: dict[str, Any] = {"state": {}}
    if optimizer.state:
        optimizer_state = dcp.get_optimizer_state_dict(model, optimizer, options=options)
    random_states = gather_random_states(accelerator)
    failure = [""]
    if accelerator.is_main_process:
        try:
            _delete(unfinished)
            unfinished.mkdir(parents=True)
            unwrapped: PreTrainedModel = accelerator.unwrap_model(model)
            with _quiet():
                unwrapped.save_pretrained(unfinished, state_dict=weights)
            tokenizer.save_pretrained(unfinished)
            moments = _flat(optimizer_state)
            save_file(moments, unfinished / OPTIMIZER)
            for rank, tensors in enumerate(random_states):
                save_file(tensors, unfinished / _rng_file(rank))
            about = {"step": step, "processes": accelerator.num_processes, "moments": len(moments)}
            write_state(unfinished, about | dict(state))
            _to_disk(unfinished)
            if final.exists():
                remove(final)
            unfinished.rename(final)
            _sync(folder)
        except Exception as error:  # an OSError, or what safetensors and tokenizers make of it
            _delete(unfinished)
            failure[0] = f"could not write {final}: {error}"
    if accelerator.num_processes > 1:
        torch.distributed.broadcast_object_list(failure)
    if failure[0]:
        kept = latest_checkpoint(folder)
        raise CheckpointError(f"{failure[0]}; the newest complete checkpoint is {kept.name if kept else 'none'}")
    if accelerator.is_main_process:
        remove_old(folder, keep)
    return final


def load_checkpoint(
    checkpoint: Path, *, accelerator: Accelerator, model: nn.Module, optimizer: Optimizer
) -> dict[str, Any]:
    """Puts weights, optimizer and random states back; returns the rest of the state, "step" among it.

    Raises:
        CheckpointError: A file is missing, damaged or of another run, or another number of processes wrote it.
    """
    try:
        state = read_state(checkpoint)
        if checkpoint.name != f"{PREFIX}{state['step']:06d}":
            raise CheckpointError(f"{STATE}: expected the step of the folder's name; got {state['step']}")
        if state["optimizer_steps"] < state["step"]:
            raise CheckpointError(
                f"{STATE}: expected an optimizer step or more for each of {state['step']} steps; "
                f"got {state['optimizer_steps']}"
            )
        if state["processes"] != accelerator.num_processes:
            raise CheckpointError(
                f"{state['processes']} processes wrote it, each with a random state of its own; "
                f"got {accelerator.num_processes}"
            )
        unwrapped = accelerator.unwrap_model(model)
        (load_adapter if hasattr(unwrapped, "peft_config") else load_weights)(checkpoint, state, unwrapped, model)
        load_moments(checkpoint, state, model, optimizer)
        load_random_states(checkpoint, state, accelerator.process_index)
    except Exception as error:  # what transformers, peft and torch make of files of another run has many types
        raise cannot_resume(checkpoint, error) from error
    return state


def cannot_resume(checkpoint: Path, error: Exception) -> CheckpointError:
    """The error with the name of the checkpoint, and of an older one if there is one."""
    what = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    older = [path.name for path in checkpoints(checkpoint.parent) if path.name < checkpoint.name]
    where = f" (an older one is there: {older[-1]})" if older else ""
    return CheckpointError(f"cannot resume from {checkpoint}: {what}{where}")


def load_weights(checkpoint: Path, state: Mapping[str, Any], unwrapped: PreTrainedModel, model: nn.Module) -> None:
    """The weights of a whole model into one that exists."""
    index = f"{WEIGHTS}.index.json"  # of a model in several files
    check_listed(index if index in state["files"] else WEIGHTS, state)
    wanted = unwrapped.state_dict()
    for file in sorted(name for name in state["files"] if name.startswith("model") and name.endswith(".safetensors")):
        _check_dtypes(checkpoint / file, wanted)
    # by the library, which knows how it renames weights on the way to a file; fp32 holds those of any lower precision
    with _quiet():
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
    weights = loaded.state_dict()
    check_names(WEIGHTS, set(weights), set(wanted))
    dcp.set_model_state_dict(model, weights, options=dcp.StateDictOptions(full_state_dict=True))


def load_adapter(checkpoint: Path, state: Mapping[str, Any], unwrapped: PreTrainedModel, model: nn.Module) -> None:
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
    check_tensors(OPTIMIZER, moments, _flat(fresh))
    for name, tensor in moments.items():
        if name.startswith("step/") and not (tensor >= 1 and tensor == tensor.floor() and tensor < math.inf):
            raise CheckpointError(f"{OPTIMIZER}: expected {name} to count steps; got {tensor.item()}")
    restored: Any = {"state": _nested(moments), "param_groups": fresh["param_groups"]}
    dcp.set_optimizer_state_dict(model, optimizer, restored, options=dcp.StateDictOptions(full_state_dict=True))


def load_random_states(checkpoint: Path, state: Mapping[str, Any], rank: int) -> None:
    """The random states of a process; that of a GPU only where both have one."""
    file = _rng_file(rank)
    states, expected = read_tensors(checkpoint, file, state), random_states()
    for one, other in ((states, expected), (expected, states)):
        if "cuda" not in other:
            one.pop("cuda", None)
    check_tensors(file, states, expected)
    position, has_gauss = states["numpy_position"].tolist()
    if not 0 <= position <= len(states["numpy"]) or has_gauss not in (0, 1):  # NumPy does not look
        raise CheckpointError(f"{file}: expected a place in NumPy's random state; got {position}, {has_gauss}")
    try:
        set_random_states(states)
    except (ValueError, OverflowError, RuntimeError) as error:
        raise CheckpointError(f"{file}: expected random states; got {error}") from error


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the oldest first. None is half written: they are renamed into their place."""
    found = [path for path in folder.glob(f"{PREFIX}*") if path.name[len(PREFIX) :].isdecimal()]
    return sorted(found, key=lambda path: int(path.name[len(PREFIX) :]))


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint in a folder."""
    found = checkpoints(folder)
    return found[-1] if found else None


def remove_old(folder: Path, keep: int | None) -> None:
    """All checkpoints but the newest `keep`, and what a process that died while it wrote has left."""
    for path in folder.glob(f"{UNFINISHED}-*"):
        _delete(path)
    if keep is None:
        return
    for path in checkpoints(folder)[:-keep]:
        remove(path)


def remove(path: Path) -> None:
    """Removes a checkpoint; half of one must not look like one, so it is renamed first."""
    hidden = path.with_name(f"{UNFINISHED}-old-{path.name}")
    _delete(hidden)
    path.rename(hidden)
    _delete(hidden)


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
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: Mapping[str, Tensor]) -> None:
    """Puts back what `random_states` gave."""
    torch.set_rng_state(states["torch"])
    version, *numbers = states["python"].tolist()
    gauss = states["python_gauss"].item()
    random.setstate((version, tuple(numbers), None if math.isnan(gauss) else gauss))
    position, has_gauss = states["numpy_position"].tolist()
    keys = states["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, states["numpy_gauss"].item()))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def gather_random_states(accelerator: Accelerator) -> list[dict[str, Tensor]]:
    """Those of all processes, in their order."""
    mine = random_states()
    if accelerator.num_processes == 1:
        return [mine]
    gathered: list[dict[str, Tensor]] = [{} for _ in range(accelerator.num_processes)]
    torch.distributed.all_gather_object(gathered, mine)
    return gathered


def _flat(optimizer_state: Mapping[str, Any]) -> dict[str, Tensor]:
    """{"exp_avg/model.embed.weight": tensor}: names of parameters hold dots, those of moments no slash."""
    return {
        f"{moment}/{parameter}": torch.as_tensor(tensor).contiguous()
        for parameter, moments in optimizer_state["state"].items()
        for moment, tensor in moments.items()
    }


def _nested(flat: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The inverse of `_flat`."""
    state: dict[str, dict[str, Tensor]] = {}
    for name, tensor in flat.items():
        moment, parameter = name.split("/", 1)
        state.setdefault(parameter, {})[moment] = tensor
    return state


def _rng_file(rank: int) -> str:
    return f"rng-{rank}.safetensors"


def _check_dtypes(path: Path, wanted: Mapping[str, Tensor]) -> None:
    """Loading converts: a weight of another dtype would be another weight. Renamed ones cannot be compared."""
    with safe_open(path, framework="pt") as file:
        for name in sorted(wanted.keys() & set(file.keys())):
            stored = file.get_slice(name)
            dtype = (stored[:0] if stored.get_shape() else file.get_tensor(name)).dtype
            if dtype != wanted[name].dtype:
                raise CheckpointError(f"{path.name}: expected {name} in {wanted[name].dtype}; got {dtype}")


@contextmanager
def _quiet() -> Iterator[None]:
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


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _to_disk(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    """Waits until a file or a folder's entries have reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
