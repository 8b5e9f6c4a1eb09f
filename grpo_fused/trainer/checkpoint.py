"""Checkpoints: complete or not there, read without executing anything, and enough to go on as if nothing had happened.

checkpoint-000050/
    model.safetensors, config.json, ...   what `save_pretrained` writes: a model (or adapter) to load anywhere
    optimizer.safetensors                 AdamW's moments
    rng-0.safetensors, ...                random states of each process
    state.json                            step, position in the data, hyperparameters of the optimizer
"""

from __future__ import annotations

import json
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
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.optim import Optimizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

PREFIX, UNFINISHED = "checkpoint-", ".unfinished"
FORMAT = 1


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read."""


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
    moments: dict[str, Any] = {"state": {}, "param_groups": []}
    if optimizer.state:
        moments = dcp.get_optimizer_state_dict(model, optimizer, options=options)
    random_states = gather_random_states(accelerator)
    failure = [""]
    if accelerator.is_main_process:
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            unwrapped: PreTrainedModel = accelerator.unwrap_model(model)
            with _quiet():
                unwrapped.save_pretrained(unfinished, state_dict=weights)
            tokenizer.save_pretrained(unfinished)
            save_file(_flat(moments["state"]), unfinished / "optimizer.safetensors")
            for rank, tensors in enumerate(random_states):
                save_file(tensors, unfinished / f"rng-{rank}.safetensors")
            about = {"format": FORMAT, "step": step, "processes": accelerator.num_processes, **state}
            about["param_groups"] = moments["param_groups"]
            (unfinished / "state.json").write_text(json.dumps(about, indent=1), encoding="utf-8")
            _to_disk(unfinished)
            shutil.rmtree(final, ignore_errors=True)
            unfinished.rename(final)
            _sync(folder)
        except Exception as error:  # an OSError, or what safetensors and tokenizers make of it
            shutil.rmtree(unfinished, ignore_errors=True)
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
        CheckpointError: Something is missing or damaged, or another number of processes wrote it.
    """
    try:
        state: dict[str, Any] = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
        if state.get("format") != FORMAT:
            raise CheckpointError(f"expected format {FORMAT}; got {state.get('format')}")
        if state["processes"] != accelerator.num_processes:
            raise CheckpointError(
                f"{state['processes']} processes wrote it, each with a random state of its own; "
                f"got {accelerator.num_processes}"
            )
        moments = _nested(load_file(checkpoint / "optimizer.safetensors"))
        load_weights(checkpoint, accelerator.unwrap_model(model), model)
        options = dcp.StateDictOptions(full_state_dict=True)
        restored: dict[str, Any] = {"state": moments, "param_groups": state.pop("param_groups")}
        if moments:
            dcp.set_optimizer_state_dict(model, optimizer, restored, options=options)
        set_random_states(load_file(checkpoint / f"rng-{accelerator.process_index}.safetensors"))
    except CheckpointError as error:
        raise CheckpointError(f"cannot resume from {checkpoint}: {error}{_alternatives(checkpoint)}") from None
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot resume from {checkpoint}: {type(error).__name__}: {error}{_alternatives(checkpoint)}"
        ) from error
    return state


def load_weights(checkpoint: Path, unwrapped: PreTrainedModel, model: nn.Module) -> None:
    """The weights of a checkpoint, adapter or whole model, into a model that exists."""
    options = dcp.StateDictOptions(full_state_dict=True, strict=False)
    if hasattr(unwrapped, "peft_config"):
        from peft import set_peft_model_state_dict

        result: Any = set_peft_model_state_dict(unwrapped, load_file(checkpoint / "adapter_model.safetensors"))
        if result.unexpected_keys:
            raise CheckpointError(f"its adapter has other weights: {result.unexpected_keys[:3]}")
        return
    # by the library, which knows how it renames weights on the way to a file; fp32 holds those of any lower precision
    with _quiet():
        loaded = type(unwrapped).from_pretrained(checkpoint, dtype=torch.float32).state_dict()
    wanted = unwrapped.state_dict()
    different = {name for name in wanted if name not in loaded or wanted[name].shape != loaded[name].shape}
    if different:
        raise CheckpointError(f"its weights are not those of this model: {sorted(different)[:3]}")
    dcp.set_model_state_dict(model, loaded, options=options)


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, the oldest first."""
    found = [path for path in folder.glob(f"{PREFIX}*") if path.name[len(PREFIX) :].isdigit()]
    return sorted(
        (path for path in found if (path / "state.json").exists()), key=lambda path: int(path.name[len(PREFIX) :])
    )


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint in a folder."""
    found = checkpoints(folder)
    return found[-1] if found else None


def remove_old(folder: Path, keep: int | None) -> None:
    """All checkpoints but the newest `keep`, and what a process that died while it wrote has left."""
    for path in folder.glob(f"{UNFINISHED}-*"):
        shutil.rmtree(path, ignore_errors=True)
    if keep is None:
        return
    for path in checkpoints(folder)[:-keep]:
        hidden = path.with_name(f"{UNFINISHED}-{path.name}")  # half a checkpoint must not look like one
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def random_states() -> dict[str, Tensor]:
    """The states of torch's, Python's and NumPy's global generators."""
    version, numbers, gauss = random.getstate()
    _name, keys, position, has_gauss, cached = cast("tuple[str, Any, int, int, float]", np.random.get_state())
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *numbers]),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
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
    gauss = states["python_gauss"].tolist()
    random.setstate((version, tuple(numbers), gauss[0] if gauss else None))
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


def _flat(state: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """{"exp_avg/model.embed.weight": tensor}: names of parameters hold dots, those of moments no slash."""
    return {
        f"{moment}/{parameter}": torch.as_tensor(tensor).contiguous()
        for parameter, moments in state.items()
        for moment, tensor in moments.items()
    }


def _nested(flat: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The inverse of `_flat`."""
    state: dict[str, dict[str, Tensor]] = {}
    for name, tensor in flat.items():
        moment, parameter = name.split("/", 1)
        state.setdefault(parameter, {})[moment] = tensor
    return state


def _alternatives(checkpoint: Path) -> str:
    older = [path.name for path in checkpoints(checkpoint.parent) if path.name < checkpoint.name]
    return f" (an older one is there: {older[-1]})" if older else ""


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' own progress bars, which would break the run's."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


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
