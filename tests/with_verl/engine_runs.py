"""verl's FSDP2 engine on CPU processes: a training step by its own logits, then by the patched fused forward.

    torchrun --nproc-per-node 2 tests/with_verl/engine_runs.py FOLDER

verl's workers know GPUs only: what they ask of a device is answered for the CPU.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from with_verl.ray_double import import_verl

import_verl("verl.utils.device")
from verl.utils import device


def nothing(*_: Any, **__: Any) -> None:
    pass


device.get_device_name = device.get_device_id = lambda: "cpu"
device.get_torch_device = lambda: SimpleNamespace(
    empty_cache=nothing, synchronize=nothing, current_device=device.get_device_id
)
import_verl("verl.workers.engine.fsdp.transformer_impl", "verl.workers.config", "verl.trainer.config")
from tensordict import TensorDict
from transformers import Qwen2Config, Qwen2ForCausalLM
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine.fsdp import transformer_impl

from grpo_fused import engines
from grpo_fused.integrations.verl import patch_verl

transformer_impl.log_gpu_memory_usage = nothing


def save_model(path: str) -> None:
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=83, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64,
        )
    )  # fmt: skip
    model.lm_head.weight.data.mul_(10)
    model.save_pretrained(path)


def batch(fused: bool, packed: bool) -> TensorDict:
    """Two sequences of uneven length, others on each rank."""
    ids = [torch.arange(3, 15) + dist.get_rank(), torch.arange(20, 27) + 2 * dist.get_rank()]
    fields = {
        "input_ids": ids,
        "position_ids": [torch.arange(len(x)) for x in ids],
        "loss_mask": [torch.ones(len(x)) for x in ids],
    }
    nested = {name: torch.nested.as_nested_tensor(xs, layout=torch.jagged) for name, xs in fields.items()}
    data = TensorDict(nested, batch_size=[2])
    tensordict_utils.assign_non_tensor(
        data, use_remove_padding=packed, use_fused_kernels=fused, calculate_entropy=True, temperature=0.7,
        use_dynamic_bsz=False, micro_batch_size_per_gpu=1,
    )  # fmt: skip
    return data


FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


def step(
    path: str, fused: bool, packed: bool, lora_rank: int, precision: dict | None = FP32
) -> tuple[list, float, dict]:
    """Log-probs and entropies of each micro-batch, the gradient norm, and the weights after the step."""
    engine = transformer_impl.FSDPEngineWithLMHead(
        HFModelConfig(
            path=path, load_tokenizer=False, override_config={"attn_implementation": "sdpa"}, use_remove_padding=packed,
            enable_gradient_checkpointing=True, use_fused_kernels=fused, fused_kernel_options={"impl_backend": "torch"},
            lora_rank=lora_rank,
        ),
        FSDPEngineConfig(
            strategy="fsdp2", model_dtype="fp32", use_torch_compile=False, mixed_precision=precision
        ),
        FSDPOptimizerConfig(optimizer="SGD", lr=0.01, weight_decay=0.0),
        CheckpointConfig(),
    )  # fmt: skip
    torch.manual_seed(0)
    engine.initialize()
    seen = []

    def loss(model_output: Any, data: Any, dp_group: Any = None) -> tuple[torch.Tensor, dict]:
        """The last token of a sequence has no next one."""
        scores = [model_output[name].values()[:-1] for name in ("log_probs", "entropy")]
        seen.append([x.detach().clone() for x in scores])
        coefficients = torch.linspace(-1, 1, len(scores[0]))
        return (coefficients * scores[0]).sum() + (coefficients.flip(0) * scores[1]).sum(), {}

    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(batch(fused, packed), loss, forward_only=False)
        norm = engine.optimizer_step()
    weights = {name: p.full_tensor().detach().clone() for name, p in engine.module.named_parameters()}
    return seen, float(norm), weights


def main(path: str) -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        save_model(path)
    dist.barrier()
    cases = [(True, 0), (False, 0), (True, 4)]  # packed, LoRA
    wants = [step(path, False, *case) for case in cases]  # first: verl's fused forward stays in the class of the model
    rounded = [
        step(path, False, True, rank, None) for rank in (0, 4)
    ]  # bf16 parameters, fp32 gradients: verl's default
    patch_verl()
    for rank, want in zip((0, 4), rounded, strict=True):
        scores, norm, weights = step(path, True, True, rank, None)
        torch.testing.assert_close(scores, want[0], rtol=0.0, atol=0.3, check_dtype=False)  # of bf16 logits
        torch.testing.assert_close(norm, want[1], rtol=0.02, atol=0.0)
        assert max((weights[name] - x).abs().max() for name, x in want[2].items()) < 0.02 * 0.01 * want[1]
    for impl in dict.fromkeys([engines.fastest(torch.device("cpu"), torch.float32, 64), "chunked"]):
        engines.fastest = lambda device, dtype, width, impl=impl: impl
        for case, want in zip(cases, wants, strict=True):
            got = step(path, True, *case)
            assert len(got[0]) == len(want[0]) == 2
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
            assert want[1] > 1
    print("the same")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
