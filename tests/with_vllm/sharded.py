"""A program for two processes: a policy that FSDP2 shards, with LoRA and without, handed to a vLLM in each of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from with_vllm.models import build_policy

from grpo_fused.trainer import VLLMEngine


def main(model: str, folder: str) -> None:
    """`sync_weights` compares the log-probs; each process says that it got there."""
    engine = VLLMEngine(model, dtype="float32", max_logprob_difference=1e-4, enforce_eager=True, max_model_len=64)
    mesh = init_device_mesh("cpu", (2,))
    for adapted in (False, True):
        base = policy = build_policy(1)
        if adapted:
            policy = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
        for layer in base.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(policy, mesh=mesh)
        assert isinstance(base.lm_head.weight, DTensor)
        engine.sync_weights(policy)
    Path(folder, f"synced-{mesh.get_rank()}").touch()
    torch.distributed.barrier()
    os._exit(0)  # gloo was seen to wait for ever in its destructors


if __name__ == "__main__":
    main(*sys.argv[1:])
