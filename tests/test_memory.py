"""No vocab-sized tensor for the batch: the largest allocation of a call, and the peak of all."""

from __future__ import annotations

import pytest
import torch
from helpers import config_id, make_case, make_config
from recording import AllocationRecorder

from grpo_fused import engines, fused_linear_grpo_loss
from grpo_fused.api.operators import linear_grpo_loss
from grpo_fused.call.calls import LMHead, LossCall, LossInputs, Needs, Run, TokenSets
from grpo_fused.engines import libraries, native, scratch
from grpo_fused.engines.base import Tokens
from grpo_fused.tools.predictions import Shape


def call_of(case, config, scratch):
    head = LMHead(case.lm_head_weight, softcap=20.0, compute_dtype=case.hidden_states.dtype)
    inputs = LossInputs(case.advantages, case.completion_mask, case.options["old_per_token_logps"])
    return LossCall(
        case.hidden_states, head, case.completion_ids, inputs, None, TokenSets(), config.encoded, True,
        Needs(True, True, False), Run("chunked", scratch),
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
    call = call_of(case, config, budget)
    with torch.no_grad(), AllocationRecorder() as recorded:
        # the operator's own body: a dispatch mode does not see inside an operator
        out = linear_grpo_loss.body(call)
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
    call = call_of(case, make_config("dapo"), None)
    with torch.no_grad(), AllocationRecorder() as recorded:
        linear_grpo_loss.body(call)
    assert 16 * 2**20 <= recorded.peak <= 40 * 2**20
    assert recorded.peak < 150 * 151936 * 4 / 2


@pytest.mark.skipif(libraries.cpu_available() is not None, reason="not built")
@pytest.mark.parametrize("last", [True, False], ids=["all", "all but one"])
def test_native_does_not_copy_all_hidden_states(last, monkeypatch):
    case = make_case(0, B=4, T=16, H=32, V=200, dtype=torch.bfloat16, extras=False)
    mask = torch.ones(4, 16, dtype=torch.bool)
    mask[-1, -1] = last
    taken = []
    scores = native.cpu_library.head_scores
    monkeypatch.setattr(
        native.cpu_library,
        "head_scores",
        lambda inputs, *rest: taken.append(inputs.products.hidden) or scores(inputs, *rest),
    )
    hidden, weight = case.hidden_states.detach().requires_grad_(), case.lm_head_weight.detach().requires_grad_()
    fused_linear_grpo_loss(hidden, weight, case.completion_ids, torch.ones(4), mask, impl="native").loss.backward()
    assert [x.data_ptr() == hidden.data_ptr() for x in taken] == [last]


@pytest.mark.parametrize(
    ("rows", "only_active", "copied"),
    [([0, 1, 2], True, False), ([2, 1, 0], True, True), ([0, 2], True, True), ([0, 1, 2], False, True)],
    ids=["all", "another order", "some", "masked ones"],
)
def test_only_all_rows_in_their_order_are_not_copied(rows, only_active, copied):
    states, rows = torch.randn(3, 4), torch.tensor(rows)
    mask = torch.tensor([True, only_active, True])
    tokens = Tokens(states, torch.zeros(3, dtype=torch.int64), mask, 1.0, only_active=only_active)
    found = native._hidden(tokens, rows)
    assert (found is not states) == copied
    assert torch.equal(found, (states * mask.unsqueeze(1))[rows])


@pytest.mark.parametrize("impl", ["chunked", "triton"])
def test_only_a_call_of_several_chunks_sums_dw_in_fp32(impl):
    head, engine = Shape(640, 64, 1000, torch.bfloat16).head(torch.device("cpu")), engines.engine(impl)
    bytes_of = {scratch: engine.cost(head, 640, scratch).accumulator_bytes for scratch in (None, 1 << 20)}
    assert engine.chunk_rows(head, 640, 1 << 20) < 640 <= engine.chunk_rows(head, 640, None)
    assert bytes_of == {None: 0, 1 << 20: 4 * 1000 * 64}


def test_one_chunk_may_take_the_room_of_the_sum_that_it_saves():
    """By default only: 240 MB of logits and 64 MB of a sum of dW are no more than 256 MiB of logits with that sum."""
    engine = engines.engine("chunked")
    for dtype, rows in ((torch.bfloat16, 60000), (torch.float32, 50176)):  # fp32 sums need no memory of their own
        head = Shape(60000, 16384, 1000, dtype).head(torch.device("cpu"))
        assert engine.chunk_rows(head, 1 << 20, None) == 50176
        assert engine.chunk_rows(head, 60000, None) >= rows
        assert engine.chunk_rows(head, 60000, 1 << 28) == 50176
