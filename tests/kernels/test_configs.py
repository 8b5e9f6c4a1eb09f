"""The choice of a table by device."""

from __future__ import annotations

import pytest
import torch
from grpo_fused.kernels import configs, head_configs
from grpo_fused.kernels.configs import architecture
from grpo_fused.kernels.row_types import Extras, Transform

from grpo_fused.call.calls import LMHead
from grpo_fused.engines import products, triton
from grpo_fused.engines.chunked import Slab
from grpo_fused.engines.rows import TorchRows
from grpo_fused.engines.scratch import DEFAULT_SCRATCH_BYTES


@pytest.mark.parametrize(
    ("capability", "key"),
    [((7, 5), "sm_80"), ((8, 6), "sm_86"), ((9, 0), "sm_90"), ((10, 3), "sm_100"), ((12, 0), "sm_89")],
)
def test_the_nearest_older_architecture(capability, key, monkeypatch):
    """Consumer Blackwell (12.0) has less shared memory than the other (10.x)."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert architecture(torch.device("cuda")) == key


@pytest.mark.parametrize(("arch", "shared"), [("sm_90", True), ("interpreter", True), ("gfx942", False)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_narrow_gradients_share_memory_with_their_logits(arch, shared, dtype, monkeypatch):
    """Not on AMD's GPUs; those of the logits' own dtype do on all."""
    monkeypatch.setattr(configs, "architecture", lambda device: arch)
    monkeypatch.setattr(products, "has_products_in", lambda dtype, device: True)
    slab = Slab(LMHead(torch.empty(40, 16, dtype=dtype), compute_dtype=dtype), 2, 2, TorchRows())
    same = slab.dlogits(2).data_ptr() == slab._logits.data_ptr()
    assert same == (shared or dtype == torch.float32)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_a_frozen_weight_takes_smaller_tiles(arch, monkeypatch):
    """Those of its table, in the launch and where the engine reserves memory; in fp32 those of any weight."""
    monkeypatch.setattr(head_configs, "architecture", lambda device: arch)
    narrow, wide = torch.empty(0, dtype=torch.bfloat16), torch.empty(0)
    table, plain = head_configs.EXTRAS_CONFIGS[arch], head_configs.HEAD_CONFIGS[arch].plain
    for extras in (Extras(narrow), Extras(row_scale=wide)):
        assert head_configs.head_config(narrow, Transform(), has_extras=extras.any()) == table.plain != plain
        assert head_configs.head_config(narrow, Transform(), has_extras=True, gradient=True) == table.gradient
        assert head_configs.head_config(wide, Transform(), has_extras=True) == head_configs.FP32_CONFIGS[arch].plain
    weight, base = torch.empty(4096, 16), torch.empty(4096, 896, dtype=torch.bfloat16)
    head = LMHead(weight, compute_dtype=torch.bfloat16, base=base, terms=3)
    assert triton._config(head) == table.plain
    assert triton._config(head._replace(weight=weight[:, :0])) == plain
    assert triton._config(head._replace(weight=weight[:, :0], row_scale=wide)) == table.plain
    fits = DEFAULT_SCRATCH_BYTES["cpu"] // triton._row_bytes(head)
    assert triton.TritonEngine().chunk_rows(head, fits, None) < fits, "blocks of the weight are widened beside it"
    splits, _ = table.plain.splits(*base.shape)
    assert triton._statistics_bytes(head) == (12 * splits, 4 * 4096 // table.plain.block_v)
    of_columns = triton._copies_bytes(head) / triton._copies_bytes(head._replace(weight=weight[:, :0]))
    assert of_columns == (896 + 3 * 16) / 896
    made = triton._widened_bytes(head) - products.widened_bytes(head)
    assert made == 4096 * 3 * 16 * 2, "three terms of each column"


@pytest.mark.parametrize(
    ("version", "pipelined"), [("3.6.0", False), ("3.7.0+git1", False), ("3.7.1", True), ("3.10.0", True)]
)
def test_pipelines_without_a_fence_are_not_used(version, pipelined, monkeypatch):
    """Before triton 3.7.1 a product of bf16 may read what `cp.async` has not made visible to it."""
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton, "__version__", version)
    head_configs.fences_copies.cache_clear()
    try:
        finish = head_configs.finish_config(torch.device("cuda"), torch.bfloat16)
        assert ("num_stages" not in finish.options) == finish.pipelined == pipelined
        assert head_configs.finish_config(torch.device("cuda"), torch.float32).pipelined, "on the fp32 units"
    finally:
        head_configs.fences_copies.cache_clear()
