"""No vocab-sized tensor for the batch: the largest allocation of a call, and the peak of all."""

from __future__ import annotations

import pytest
import torch
from helpers import config_id, make_case, make_config
from recording import AllocationRecorder

from grpo_fused.api.operators import linear_grpo_loss
from grpo_fused.call.calls import Candidates, LMHead, LossCall, LossInputs, Needs, Run, flat
from grpo_fused.engines import scratch


def call_of(case, config, scratch):
    """The values of a call, as its operator takes them."""
    head = LMHead(case.lm_head_weight, softcap=20.0, compute_dtype=case.hidden_states.dtype)
    inputs = LossInputs(case.advantages, case.completion_mask, case.options["old_per_token_logps"])
    return flat(
        LossCall(
            case.hidden_states, head, case.completion_ids, inputs, None, Candidates(), config.encoded, True,
            Needs(True, True, False), Run("chunked", scratch),
        )
    )  # fmt: skip


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
    values = call_of(case, config, budget)
    with torch.no_grad(), AllocationRecorder() as recorded:
        # the operator's own body: a dispatch mode does not see inside an operator
        out = linear_grpo_loss._init_fn(*values)
    assert out[0].isfinite()
    assert out[5].norm() > 0
    gradients = out[4].nbytes + case.lm_head_weight.numel() * 4  # dW is accumulated in fp32
    assert recorded.largest <= budget
    tokens = 256 * 8 * 64  # per-token vectors: some dozens of [N]
    assert recorded.peak <= gradients + budget + tokens
    assert recorded.peak >= budget // 2, "the recorder must have counted the engine's memory"


def test_default_scratch_is_what_a_call_takes(monkeypatch):
    monkeypatch.setitem(scratch.DEFAULT_SCRATCH_BYTES, "cpu", 32 * 2**20)
    case = make_case(1, B=1, T=150, H=4, V=151936, dtype=torch.bfloat16, masked=0.0, extras=False)
    values = call_of(case, make_config("dapo"), None)
    with torch.no_grad(), AllocationRecorder() as recorded:
        linear_grpo_loss._init_fn(*values)
    assert 16 * 2**20 <= recorded.peak <= 40 * 2**20
    assert recorded.peak < 150 * 151936 * 4 / 2
