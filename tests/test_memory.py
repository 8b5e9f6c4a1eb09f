"""No vocab-sized tensor for the batch: the largest allocation of a call, and all that is alive at a time."""

from __future__ import annotations

import pytest
import torch
from helpers import config_id, make_case, make_config
from recording import AllocationRecorder

from grpo_fused import _ops


def arguments(case, config, scratch):
    inputs = {
        "completion_ids": case.completion_ids, "advantages": case.advantages, "completion_mask": case.completion_mask,
        "old_per_token_logps": case.options["old_per_token_logps"],
        "ref_per_token_logps": None, "sampling_per_token_logps": None, "importance_sampling_ratio": None,
        "num_items_in_batch": None, "cu_seqlens": None, "temperatures": None, "temperature": 1.0, "logit_scale": 1.0,
        "softcap": 20.0, "config": config.encoded, "impl": "chunked", "compute_dtype": case.hidden_states.dtype,
        "max_scratch_bytes": scratch, "compact": True, "groups": "", "with_metrics": True, "need_hidden": True,
        "need_weight": True, "need_bias": False,
    }  # fmt: skip
    return (case.hidden_states, case.lm_head_weight, None), inputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "config",
    [
        make_config("dapo", entropy_coef=0.01),
        make_config("grpo", importance_sampling_level="sequence"),
        make_config("dapo", top_entropy_quantile=0.5),
    ],
    ids=config_id,
)
def test_scratch_stays_within_the_budget(config, dtype):
    """N = 256, V = 8192: fp32 logits of the batch would be 8 MiB; 1.5 MiB of scratch suffice."""
    budget = 3 * 2**19
    case = make_case(0, B=16, T=16, H=8, V=8192, dtype=dtype, masked=0.0, extras=False)
    inputs, options = arguments(case, config, budget)
    with torch.no_grad(), AllocationRecorder() as recorded:
        # the operator's own body: a dispatch mode does not see inside an operator
        out = _ops.linear_grpo_loss._init_fn(*inputs, **options)
    assert out[0].isfinite()
    assert out[5].norm() > 0
    gradients = out[4].nbytes + case.lm_head_weight.numel() * 4  # dW is accumulated in fp32
    assert recorded.largest <= budget
    tokens = 256 * 8 * 64  # per-token vectors: some dozens of [N]
    assert recorded.peak <= gradients + budget + tokens
    assert recorded.peak >= budget // 2, "the recorder must have seen the engine at work"


def test_default_scratch_is_a_fraction_of_the_logits():
    case = make_case(1, B=1, T=600, H=4, V=151936, dtype=torch.bfloat16, masked=0.0, extras=False)
    inputs, options = arguments(case, make_config("dapo"), None)
    with torch.no_grad(), AllocationRecorder() as recorded:
        _ops.linear_grpo_loss._init_fn(*inputs, **options)
    assert recorded.peak <= 160 * 2**20
    assert recorded.peak < 600 * 151936 * 4 / 2
