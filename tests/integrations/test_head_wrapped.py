"""Heads of wrapped models: compilation, parallelism, mixed precision, fused attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

pytest.importorskip("transformers")
from integrations.tiny import build, fused, token_ids

from grpo_fused import check_head, head_hidden_states, lm_head_inputs


@pytest.mark.full
def test_a_compiled_model() -> None:
    """Captured inputs and logits in turn: the placeholder must not be compiled into the model."""
    model, ids = build("gemma2"), token_ids()
    with torch.no_grad():
        want, logits = fused(model, ids), model(input_ids=ids, use_cache=False).logits
        compiled = torch.compile(model, backend="eager")
        for _ in range(2):
            torch.testing.assert_close(fused(compiled, ids), want, rtol=0, atol=0)
            torch.testing.assert_close(compiled(input_ids=ids, use_cache=False).logits, logits)
    assert check_head(compiled).softcap == 20.0


@pytest.mark.full
def test_a_compiled_head() -> None:
    model, ids = build("qwen2"), token_ids()
    want, logits = fused(model, ids), model(input_ids=ids, use_cache=False).logits
    model.lm_head.compile(backend="eager")
    for _ in range(2):
        torch.testing.assert_close(fused(model, ids), want, rtol=0, atol=0)
        torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, logits)


def test_the_weight_of_a_wrapped_head_cannot_be_read() -> None:
    model: Any = build("qwen2")
    model.lm_head = torch.compile(model.lm_head, backend="eager")
    with pytest.raises(TypeError, match=r"compile the model, or call head.compile\(\)"):
        lm_head_inputs(model)
    ids = token_ids()
    torch.testing.assert_close(head_hidden_states(model, ids), head_hidden_states(build("qwen2"), ids))


def test_a_data_parallel_model(tmp_path: Path) -> None:
    model, alone, ids = build("gemma2"), build("gemma2"), token_ids()
    torch.testing.assert_close(fused(nn.DataParallel(model), ids), fused(alone, ids), rtol=0, atol=0)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(model)
        for _ in range(2):
            fused(parallel, ids).sum().backward()
            fused(alone, ids).sum().backward()
        for option in ("static_graph", "find_unused_parameters"):
            other = nn.parallel.DistributedDataParallel(build("gemma2"), **{option: True})
            with pytest.raises(ValueError, match=f"must have {option}=False; got True"):
                fused(torch.compile(other, backend="eager"), ids)
            with torch.no_grad():
                fused(other, ids)
    finally:
        torch.distributed.destroy_process_group()
    for got, want in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=0, atol=0)


def test_a_model_that_fsdp2_shards(tmp_path: Path) -> None:
    """It averages where the backward reaches an output of what it shards: the logits are none of a loss."""
    alone, ids = build("qwen2"), token_ids()
    head_hidden_states(alone, ids).sum().backward()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for parts in ((), ("lm_head",), ("model.layers.0",)):
            model = build("qwen2")
            for name in parts:
                fully_shard(model.get_submodule(name), mesh=mesh)
            fully_shard(model, mesh=mesh)
            with torch.no_grad():
                head_hidden_states(model, ids)
            if parts != ("model.layers.0",):
                with pytest.raises(ValueError, match="must also be called on a trained part before the head"):
                    head_hidden_states(model, ids)
                continue
            head_hidden_states(model, ids).sum().backward()
            for got, want in zip(model.parameters(), alone.parameters(), strict=True):
                if want is not alone.lm_head.weight:
                    torch.testing.assert_close(got.grad.full_tensor(), want.grad)
            model.model.requires_grad_(False)
            with pytest.raises(ValueError, match="must also be called on a trained part before the head"):
                head_hidden_states(model, ids)
            model.requires_grad_(False)  # as a reference is
            head_hidden_states(model, ids)
    finally:
        torch.distributed.destroy_process_group()


def test_the_check_is_in_fp32_under_autocast_and_fast_products() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")  # bf16 products, where the processor has them
        with torch.autocast("cpu", torch.bfloat16):
            assert check_head(build("gemma2")).softcap == 20.0
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.fixture
def accelerator() -> Any:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # other tests have other precisions
    yield accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_a_model_that_accelerate_has_prepared(accelerator: Any) -> None:
    """Its forward turns autocast on, also outside of an autocast block."""
    model = accelerator.prepare_model(build("gemma2"), evaluation_mode=True)
    given = lm_head_inputs(model)
    assert given["softcap"] == 20.0
    assert given["lm_head_weight"] is model.lm_head.weight
    wrong = build("gemma2")
    wrong.lm_head.register_forward_hook(lambda module, args, output: output * 1.001)
    with pytest.raises(ValueError, match="log-probs differ by"):
        check_head(accelerator.prepare_model(wrong, evaluation_mode=True))


def test_attention_that_cannot_run_here() -> None:
    """The head does not depend on it."""

    def needs_packed_rows(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    from transformers import AttentionInterface

    AttentionInterface.register("needs_packed_rows", needs_packed_rows)
    model = build("qwen2")
    model.config._attn_implementation = "needs_packed_rows"
    check_head(model)
    assert model.config._attn_implementation == "needs_packed_rows"
