"""Megatron-Core's GPTModel on CPU processes, and what it computes from its own logits.

With gloo and the local spec (no Transformer Engine) these things are replaced: the random states of CUDA, which dropout
would use; `torch.cuda.current_device` and `synchronize`, and the device "cuda" of a tensor in the pipeline's schedule;
and the norm, for which Megatron takes torch's without sequence parallelism only.
"""

from __future__ import annotations

import contextlib
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.overrides import TorchFunctionMode

pytest.importorskip("megatron.core.models.gpt.gpt_model")

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

B, S, V, TEMPERATURE = 3, 8, 64, 0.7


class NoCuda(TorchFunctionMode):
    """Tensors for the device "cuda" are made on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") == "cuda":
            kwargs = kwargs | {"device": "cpu"}
        return function(*args, **kwargs)


def on_a_cpu() -> None:
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda device=None: None
    CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    WrappedTorchNorm.__new__ = lambda cls, config, hidden_size, eps=1e-5, **_: torch.nn.LayerNorm(hidden_size, eps)


def model_of(tensor: int, pipeline: int = 1, *, tied: bool = False, **options: Any) -> GPTModel:
    torch.manual_seed(0)
    if tensor == 1:
        options.pop("sequence_parallel", None)  # Megatron wants a group for it
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, use_cpu_initialization=True, attention_dropout=0.0,
        hidden_dropout=0.0, tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline,
        bias_dropout_fusion=False, masked_softmax_fusion=False, gradient_accumulation_fusion=False, init_method_std=0.2,
        pipeline_dtype=torch.float32, **options,
    )  # fmt: skip
    stage = parallel_state.get_pipeline_model_parallel_rank()
    return GPTModel(
        config, get_gpt_layer_local_spec(), vocab_size=V, max_sequence_length=S, position_embedding_type="rope",
        share_embeddings_and_output_weights=tied, pre_process=stage == 0, post_process=stage == pipeline - 1,
    )  # fmt: skip


def batch() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, V, (B, S + 1), generator=g)
    return {
        "input_ids": ids[:, :-1], "labels": ids[:, 1:], "position_ids": torch.arange(S).expand(B, S),
        "attention_mask": torch.triu(torch.ones(1, 1, S, S, dtype=torch.bool), 1),
        "loss_mask": (torch.rand(B, S, generator=g) < 0.7).float(),
    }  # fmt: skip


def gradients(model: GPTModel, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


def own_scores(model: GPTModel) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [B, S] by the model's logits, gathered."""
    given = batch()
    labels, mask = given.pop("labels"), given.pop("loss_mask") != 0
    logits = gather_from_tensor_model_parallel_region(model(**given)).double()
    log_p = (logits / TEMPERATURE).log_softmax(-1)
    logps = log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return logps.masked_fill(~mask, 0.0), (-(log_p.exp() * log_p).sum(-1)).masked_fill(~mask, 0.0)


def _process(rank: int, port: int, tensor: int, pipeline: int, check: Callable[[int], None], failed: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(tensor * pipeline))
    torch.set_num_threads(1)
    try:
        on_a_cpu()
        torch.distributed.init_process_group("gloo")
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline
        )
        with NoCuda():
            check(tensor)
    except BaseException:
        failed.put(traceback.format_exc())
        raise
    finally:
        torch.distributed.destroy_process_group()


def run(check: Callable[[int], None], tensor: int, pipeline: int = 1) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    failed = context.SimpleQueue()
    processes = [
        context.Process(target=_process, args=(rank, port, tensor, pipeline, check, failed))
        for rank in range(tensor * pipeline)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(200)
    for process in processes:
        process.kill()
    assert failed.empty(), failed.get()
    assert [process.exitcode for process in processes] == [0] * len(processes)
