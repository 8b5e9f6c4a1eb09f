"""`impl="cuda"` from hidden states to gradients: its operators as `row_ops.cpp` declares and checks them, on a CPU.

The functions of the row kernels compute (`row_harness.cpp`); `cuda_double.py` is the device.
"""

from __future__ import annotations

import re

import pytest
import torch
from helpers import config_id, make_case, make_config

pytest.importorskip("triton")

from cuda_double import cuda_double
from grpo_fused.kernels.row_types import Transform
from native.building import CSRC
from native.harness import GRADIENT, LOSS, STATISTICS, Options

THREADS = 64
CONFIGS = [
    make_config("dapo"),
    make_config("grpo", beta=0.1, entropy_coef=0.02),
    make_config("dapo", importance_sampling_level="sequence", beta=0.1),
    make_config("cispo", top_entropy_quantile=0.5),
]


def schemas():
    """The declarations in row_ops.cpp: literals in a row."""
    text = (CSRC / "cuda" / "row_ops.cpp").read_text()
    return ["".join(re.findall(r'"([^"]*)"', found)) for found in re.findall(r"m\.def\((.*?)\);", text, re.DOTALL)]


def vectors(count, **given):
    """The conditions of row_ops.cpp on per-row tensors."""
    for name, x in given.items():
        assert x is None or (x.dtype == torch.float32 and x.shape == (count,) and x.is_contiguous()), name
    return given


def common(logits, targets, bias, temperatures, temperature, scale, softcap):
    assert logits.stride(1) == 1
    assert targets.dtype == torch.int64
    assert targets.shape == logits.shape[:1]
    assert targets.is_contiguous()
    vectors(logits.shape[1], bias=bias)
    vectors(logits.shape[0], temperatures=temperatures)
    return Transform(bias, scale, softcap or None, temperature if temperatures is None else temperatures)


@pytest.fixture
def double(row_functions, monkeypatch):
    """The device, with the three operators."""
    run = row_functions._run

    def row_statistics(logits, targets, *rest):
        *numbers, maximum, log_sum, logp, entropy = rest
        known = vectors(len(logits), max=maximum, log_sum=log_sum, logp=logp, entropy=entropy)
        run(STATISTICS, logits, logits, targets, common(logits, targets, *numbers), THREADS, **known)

    def row_gradient(logits, out, targets, *rest):
        *numbers, maximum, log_sum, logp, entropy, dlogp, dentropy = rest
        known = vectors(
            len(logits), max=maximum, log_sum=log_sum, logp=logp, entropy=entropy, dlogp=dlogp, dentropy=dentropy
        )
        run(GRADIENT, logits, out, targets, common(logits, targets, *numbers), THREADS, **known)

    def row_loss(logits, out, targets, *rest):
        numbers, (advantages, weight, old, ref, is_ratio, bonus), options = rest[:5], rest[5:11], rest[11:21]
        maximum, log_sum, logp, entropy, loss, dlogp = rest[21:]
        assert out.dtype != torch.float16
        known = vectors(
            len(logits), max=maximum, log_sum=log_sum, logp=logp, entropy=entropy, loss=loss, dlogp=dlogp,
            advantages=advantages, weight=weight, old_logp=old, ref_logp=ref, is_ratio=is_ratio,
        )  # fmt: skip
        assert bonus is None or entropy is not None
        policy, estimator, *others = options
        given = Options(policy, estimator, old is not None, ref is not None and options[-1] != 0.0, *others)
        run(LOSS, logits, out, targets, common(logits, targets, *numbers), THREADS, given, **known,
            **vectors(1, entropy_weight=bonus))  # fmt: skip

    # under another name, and in place of those of the CUDA extension, which another test may have loaded
    with torch.library._scoped_library("grpo_fused_emulated", "DEF") as library, cuda_double() as device:
        for schema, body in zip(schemas(), (row_statistics, row_gradient, row_loss), strict=True):
            library.define(schema)
            library.impl(body.__name__, body, "CompositeExplicitAutograd")
            operator = getattr(torch.ops.grpo_fused_emulated, body.__name__)
            monkeypatch.setitem(vars(torch.ops.grpo_fused_C), body.__name__, operator)
        yield device


@pytest.mark.pairs
@pytest.mark.gate(keep=lambda config, dtype, **_: dtype == torch.bfloat16 or config == CONFIGS[dtype == torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
@pytest.mark.parametrize(
    "run", [{}, {"max_scratch_bytes": 1300}, {"compact": False}], ids=["one", "chunks", "all-rows"]
)
def test_loss_and_gradients(config, dtype, run, double):
    case = make_case(0, B=3, T=6, H=16, V=37, dtype=dtype, grid=0.02, softcap=5.0, logit_scale=1.3)
    case.options["lm_head_bias"] = torch.linspace(-1, 1, 37).to(dtype)
    case.options["temperature"] = torch.linspace(0.5, 2, 3)
    double.calls.clear()
    found = case.compare(config, device="cuda", impl="cuda", **run)
    assert {name: pair for name, pair in found.items() if not pair[0] <= pair[1]} == {}
    one_launch = config.token_alone and dtype != torch.float16
    assert (double.calls["row_loss"] > 0) == one_launch
    assert (double.calls["row_gradient"] > 0) == (not one_launch)
    assert double.launches.total() == 0, "no Triton kernel"
