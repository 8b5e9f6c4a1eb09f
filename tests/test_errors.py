"""A wrong call raises before any work and names what was expected and what came."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from helpers import make_config
from torch.distributed.tensor import DTensor

from grpo_fused import (
    GRPOLossConfig,
    HeadAdapter,
    fused_linear_grpo_loss,
    fused_linear_logprobs,
    fused_linear_objective,
    grpo_loss,
    selective_logprobs,
)
from grpo_fused.call.calls import LogitsCall
from grpo_fused.call.validation import check_devices
from grpo_fused.objectives import gpg

B, T, H, V = 2, 3, 4, 5


def loss(**changes):
    arguments = {
        "hidden_states": torch.randn(B, T, H),
        "lm_head_weight": torch.randn(V, H),
        "completion_ids": torch.zeros(B, T, dtype=torch.int64),
        "advantages": torch.ones(B),
        "completion_mask": torch.ones(B, T),
    }
    return fused_linear_grpo_loss(**{**arguments, **changes})


def packed(**changes):
    arguments = {
        "hidden_states": torch.randn(5, H),
        "completion_ids": torch.zeros(5, dtype=torch.int64),
        "completion_mask": None,
        "cu_seqlens": torch.tensor([0, 2, 5]),
    }
    return loss(**{**arguments, **changes})


def nan_at(*shape):
    x = torch.zeros(shape)
    x.view(-1)[1] = torch.nan
    return x


def marked(x, name, value):
    """As DeepSpeed and bitsandbytes mark their parameters."""
    setattr(x, name, value)
    return x


class _Adapter(torch.nn.Linear):
    lora_A = None


def _quantised_weight():
    return torch.quantize_per_tensor(torch.randn(V, H), 0.1, 0, torch.qint8)


VALUE_ERRORS = {
    "hidden-rank": (r"hidden_states must have shape \(2, 3, H\) to go with completion_ids; got \(2, 4\)", lambda: loss(hidden_states=torch.randn(B, H))),
    "hidden-length": (r"hidden_states must have shape \(2, 3, H\).*got \(2, 2, 4\)", lambda: loss(hidden_states=torch.randn(2, 2, 4))),
    "weight-width": (r"lm_head_weight must have shape \(V, 4\).*got \(5, 6\)", lambda: loss(lm_head_weight=torch.randn(V, 6))),
    "weight-transposed": (r"lm_head_weight must have shape \(V, 4\).*got \(4, 5\): pass its transpose", lambda: loss(lm_head_weight=torch.randn(H, V))),
    "logits-for-states": ("or the states before the head if these are logits", lambda: loss(hidden_states=torch.randn(B, T, V))),
    "weight-number": (r"lm_head_weight must have shape \(V, 4\).*got \(\)$", lambda: loss(lm_head_weight=torch.tensor(1.0))),
    "weight-rank": (r"lm_head_weight must have shape \(V, 4\).*got \(4,\)", lambda: loss(lm_head_weight=torch.randn(H))),
    "weight-without-columns": (r"V >= 1 and H >= 1; got \(5, 0\)", lambda: loss(hidden_states=torch.randn(B, T, 0), lm_head_weight=torch.randn(V, 0))),
    "weight-empty": (r"V >= 1 and H >= 1; got \(0, 4\)", lambda: loss(lm_head_weight=torch.randn(0, H))),
    "bias-shape": (r"lm_head_bias must have shape \(5,\); got \(4,\)", lambda: loss(lm_head_bias=torch.zeros(4))),
    "ids-rank": (r"completion_ids must be \[B, T\]", lambda: loss(completion_ids=torch.zeros(2, 3, 1, dtype=torch.int64))),
    "ids-packed-without-offsets": ("packed .* together with cu_seqlens", lambda: packed(cu_seqlens=None)),
    "ids-range": (r"token ids on active positions must lie in \[0, 5\); got 0 to 5",
                  lambda: loss(completion_ids=torch.tensor([[0, 1, 5], [0, 0, 0]]))),
    "ids-negative": (r"must lie in \[0, 5\); got -1 to 0$", lambda: loss(completion_ids=torch.tensor([[0, 0, -1]] * 2))),
    "ids-of-labels": (r"must lie in \[0, 5\); got -100 to 0: mask the positions that are -100", lambda: loss(completion_ids=torch.tensor([[0, 0, -100]] * 2))),
    "mask-shape": (r"completion_mask must have shape \(2, 3\); got \(2, 4\)", lambda: loss(completion_mask=torch.ones(2, 4))),
    "mask-values": ("a mask must hold only 0 and 1", lambda: loss(completion_mask=torch.full((B, T), 0.5))),
    "advantages-shape": (r"advantages must have shape \(2,\) or \(2, 1\) or \(2, 3\); got \(3,\)",
                         lambda: loss(advantages=torch.ones(3))),
    "advantages-nan": (r"advantages must be finite, not NaN, on active tokens; got others at 3 of 6, the first at token 3 \(counted", lambda: loss(advantages=nan_at(B))),
    "advantages-inf": ("advantages must be finite, not NaN, on active tokens; got others at 3", lambda: loss(advantages=torch.tensor([torch.inf, 0.0]))),
    "advantages-packed-ambiguous": (r"advantages of shape \(3,\) could be one for each of 3 tokens", lambda: packed(
        hidden_states=torch.randn(3, H), completion_ids=torch.zeros(3, dtype=torch.int64), advantages=torch.ones(3),
        cu_seqlens=torch.tensor([0, 2, 2, 3]))),
    "ratio-inf": ("importance_sampling_ratio must be finite", lambda: loss(importance_sampling_ratio=torch.full((B, T), torch.inf))),
    "entropies-nan": ("entropies must be finite, not NaN, on active tokens; got others at 1", lambda: grpo_loss(
        torch.zeros(B, T), torch.ones(B), entropies=nan_at(B, T))),
    "offsets-with-temperatures": ("cu_seqlens must rise", lambda: packed(
        cu_seqlens=torch.tensor([0, 2, 4]), temperature=torch.ones(2))),
    "old-shape": (r"old_per_token_logps must have shape \(2, 3\); got \(2,\)",
                  lambda: loss(old_per_token_logps=torch.zeros(2))),
    "old-nan": ("old_per_token_logps must not be NaN or .inf on active tokens; got others at 1",
                lambda: loss(old_per_token_logps=nan_at(B, T))),
    "ref-missing": (r"beta=0.1 needs ref_per_token_logps \(2, 3\); got None",
                    lambda: loss(config=GRPOLossConfig(beta=0.1))),
    "ref-nan": ("ref_per_token_logps must not be NaN",
                lambda: loss(config=GRPOLossConfig(beta=0.1), ref_per_token_logps=nan_at(B, T))),
    "sampling-unused": ("sampling_per_token_logps is only used with off_policy_mask_threshold",
                        lambda: loss(sampling_per_token_logps=torch.zeros(B, T))),
    "ratio-shape": (r"importance_sampling_ratio must have shape \(2, 3\) or \(2, 1\); got \(2,\)",
                    lambda: loss(importance_sampling_ratio=torch.ones(B))),
    "ratio-negative": ("importance_sampling_ratio must be finite and >= 0 on active tokens; got others at 6", lambda: loss(importance_sampling_ratio=-torch.ones(B, T))),
    "ratio-vespo": (r"importance_sampling_ratio must have shape \(2, 3\); got \(2, 1\)",
                    lambda: loss(importance_sampling_ratio=torch.ones(B, 1), config=make_config("vespo"))),
    "ratio-gmpo": ("importance_sampling_ratio is not used by loss_type='gmpo'",
                   lambda: loss(importance_sampling_ratio=torch.ones(B, T), config=make_config("gmpo"))),
    "gmpo-token-advantages": (r"loss_type='gmpo' needs one advantage a sequence, \[2\]; got shape \(2, 3\)",
                              lambda: loss(advantages=torch.ones(B, T), config=make_config("gmpo"))),
    "items-zero": ("num_items_in_batch must be > 0; got 0", lambda: loss(num_items_in_batch=0)),
    "items-tensor-negative": ("num_items_in_batch must be > 0 and finite; got -1.0", lambda: loss(num_items_in_batch=torch.tensor(-1.0))),
    "items-tensor-zero": ("num_items_in_batch must be > 0 and finite; got 0.0", lambda: loss(num_items_in_batch=torch.tensor(0.0))),
    "old-infinite": (r"old_per_token_logps must not be NaN or \+inf on active tokens; got others at 6",
                     lambda: loss(old_per_token_logps=torch.full((B, T), torch.inf))),
    "items-tensor-infinite": ("num_items_in_batch must be > 0 and finite; got inf", lambda: loss(num_items_in_batch=torch.tensor(torch.inf))),
    "items-shape": (r"num_items_in_batch must have shape \(\); got \(1,\)",
                    lambda: loss(num_items_in_batch=torch.ones(1))),
    "items-unused": ("num_items_in_batch is not used by loss_type='grpo'",
                     lambda: loss(num_items_in_batch=4.0, config=make_config("grpo"))),
    "temperature-zero": ("temperature must be > 0; got 0", lambda: loss(temperature=0)),
    "temperature-tensor": ("temperature must be > 0 and finite on active tokens; got others at 3 of 6, the first at token 3 ", lambda: loss(temperature=torch.tensor([1.0, 0.0]))),
    "temperature-tensor-nan": ("temperature must be > 0 and finite on active tokens; got others at 3", lambda: loss(temperature=torch.tensor([1.0, torch.nan]))),
    "temperature-tensor-inf": ("temperature must be > 0 and finite on active tokens; got others at 3", lambda: loss(temperature=torch.tensor([1.0, torch.inf]))),
    "temperature-nan": ("temperature must be finite; got nan", lambda: loss(temperature=float("nan"))),
    "temperature-shape": (r"temperature must have shape \(2,\) or \(2, 1\) or \(2, 3\); got \(5,\)",
                          lambda: loss(temperature=torch.ones(5))),
    "softcap": (r"softcap must be in \(0, 400\]; got -1.0", lambda: loss(softcap=-1.0)),
    "softcap-large": (r"softcap must be in \(0, 400\]; got 401", lambda: loss(softcap=401)),
    "scale": ("logit_scale must be finite; got inf", lambda: loss(logit_scale=float("inf"))),
    "impl": ("impl must be one of auto, reference, .*; got 'metal'", lambda: loss(impl="metal")),
    "scratch": ("max_scratch_bytes=1 is too small: one token of a vocabulary of 5", lambda: loss(max_scratch_bytes=1, impl="chunked")),
    "rank-0": (r"lm_head_adapter.a must be \[r, H\] with r >= 1; got a rank of 0",
               lambda: loss(lm_head_adapter=HeadAdapter(torch.ones(0, 4), torch.ones(5, 0)))),
    "scratch-zero": ("max_scratch_bytes must be at least 1; got 0", lambda: loss(max_scratch_bytes=0)),
    "offsets-end": (r"cu_seqlens must rise from 0 to the number of tokens, 5; got \[0, 2, 4\]",
                    lambda: packed(cu_seqlens=torch.tensor([0, 2, 4]))),
    "offsets-start": (r"cu_seqlens must rise from 0 .*got \[1, 2, 5\]", lambda: packed(cu_seqlens=torch.tensor([1, 2, 5]))),
    "entropies-nan-reference": ("entropies must be finite", lambda: grpo_loss(
        torch.zeros(B, T), torch.ones(B), entropies=nan_at(B, T), impl="reference")),
    "offsets-order": (r"cu_seqlens must rise .*got \[0, 4, 2, 5\]",
                      lambda: packed(cu_seqlens=torch.tensor([0, 4, 2, 5]), advantages=torch.ones(3))),
    "offsets-padded": (r"completion_ids must be \[B, T\], or packed \[N\] .*got \(2, 3\) with cu_seqlens", lambda: loss(cu_seqlens=torch.tensor([0, 3, 6]))),
    "offsets-rank": (r"cu_seqlens must have shape \(S \+ 1,\); got \(\)", lambda: packed(cu_seqlens=torch.tensor(5))),
    "entropies-missing": (r"entropy_coef=0.1 needs entropies \(2, 3\); got None",
                          lambda: grpo_loss(torch.zeros(B, T), torch.ones(B), config=GRPOLossConfig(entropy_coef=0.1))),
    "logits-shape": (r"logits must have shape \(2, 3, V\); got \(2, 2, 5\)",
                     lambda: selective_logprobs(torch.randn(2, 2, 5), torch.zeros(2, 3, dtype=torch.int64))),
    "logits-empty": (r"logits must have V >= 1; got shape \(2, 3, 0\)",
                     lambda: selective_logprobs(torch.randn(B, T, 0), torch.zeros(B, T, dtype=torch.int64))),
    "hidden-nan": ("^hidden_states must be finite on active tokens; got others at 1", lambda: loss(hidden_states=nan_at(B, T, H))),
    "adapter-a-nan": ("^hidden_states, also times the A of lm_head_adapter, must be finite on active tokens; got others at 6", lambda: loss(
        lm_head_weight=torch.randn(V, H), lm_head_adapter=HeadAdapter(nan_at(1, H), torch.ones(V, 1)))),
    "hidden-inf-softcap": ("hidden_states must be finite on active tokens; got others at 6", lambda: fused_linear_logprobs(
        torch.full((B, T, H), torch.inf), torch.randn(V, H), torch.zeros(B, T, dtype=torch.int64), softcap=5.0)),
    "hidden-minus-inf": ("hidden_states must be finite on active tokens; got others at 1", lambda: loss(
        hidden_states=torch.zeros(B, T, H).index_fill_(2, torch.tensor(1), -torch.inf), advantages=torch.zeros(B),
        completion_mask=torch.arange(B * T).view(B, T) == 4)),
    "logprobs-ids-range": (r"must lie in \[0, 5\)", lambda: fused_linear_logprobs(
        torch.randn(B, T, H), torch.randn(V, H), torch.full((B, T), 7))),
    "selective-ids-range": (r"must lie in \[0, 5\)", lambda: selective_logprobs(
        torch.randn(B, T, V), torch.full((B, T), 7))),
}  # fmt: skip

TYPE_ERRORS = {
    "hidden-int": ("hidden_states must be fp16, bf16, fp32 or fp64; got torch.int64",
                   lambda: loss(hidden_states=torch.zeros(B, T, H, dtype=torch.int64))),
    "hidden-list": ("hidden_states must be a torch.Tensor; got list", lambda: loss(hidden_states=[1.0])),
    "hidden-nested": ("hidden_states must be a dense tensor; got one that is nested: pass its values",
                      lambda: loss(hidden_states=torch.nested.nested_tensor([torch.randn(T, H)] * B, layout=torch.jagged))),
    "hidden-nested-strided": ("got one that is nested", lambda: loss(hidden_states=torch.nested.nested_tensor([torch.randn(T, H)] * B))),
    "ids-sparse": ("completion_ids must be a dense tensor; got one that is torch.sparse_coo",
                   lambda: loss(completion_ids=torch.ones(B, T, dtype=torch.int64).to_sparse())),
    "adapter": ("lm_head_adapter must be HeadAdapter or a sequence of them; got int", lambda: loss(lm_head_adapter=8)),
    "objective-uncalled": (r"objective must be what gpg\(...\) returns; got the function gpg itself", lambda: fused_linear_objective(
        torch.randn(B, T, H), torch.randn(V, H), torch.zeros(B, T, dtype=torch.int64), gpg)),
    "ids-float": ("completion_ids must have an integer dtype; got torch.float32",
                  lambda: loss(completion_ids=torch.zeros(B, T))),
    "weight-packed": ("lm_head_weight must be a plain floating-point tensor.*quantised, packed or sparse one.*torch.uint8",
                      lambda: loss(lm_head_weight=torch.zeros(V, H, dtype=torch.uint8))),
    "weight-quantised": ("quantised, packed or sparse one", lambda: loss(lm_head_weight=_quantised_weight())),
    "weight-sparse": ("quantised, packed or sparse one", lambda: loss(lm_head_weight=torch.eye(V, H).to_sparse())),
    "weight-of-bytes-stored-as-bf16": ("quantised, packed or sparse one",
                                       lambda: loss(lm_head_weight=marked(torch.randn(V, H), "quant_state", object()))),
    "weight-module": ("got a module Linear: pass .* or the .weight .* of a plain head", lambda: loss(lm_head_weight=torch.nn.Linear(H, V))),
    "weight-adapter": ("with lm_head_adapter for a low-rank change of it",
                       lambda: loss(lm_head_weight=_Adapter(H, V))),
    "advantages-list": ("advantages must be a torch.Tensor; got list", lambda: loss(advantages=[1.0, 2.0])),
    "advantages-int": ("advantages must be fp16, bf16, fp32 or fp64; got torch.int64",
                       lambda: loss(advantages=torch.ones(B, dtype=torch.int64))),
    "mask-complex": ("completion_mask must be bool, integer or floating point 0/1; got torch.complex64",
                     lambda: loss(completion_mask=torch.ones(B, T, dtype=torch.complex64))),
    "config": ("config must be a GRPOLossConfig; got dict", lambda: loss(config={"beta": 0.1})),
    "temperature": ("temperature must be a number; got '1'", lambda: loss(temperature="1")),
    "items": ("num_items_in_batch must be a number; got 'all'", lambda: loss(num_items_in_batch="all")),
    "offsets": ("cu_seqlens must be int32 or int64; got torch.float32",
                lambda: packed(cu_seqlens=torch.tensor([0.0, 2.0, 5.0]))),
    "compact": ("compact must be True or False; got 'no'", lambda: loss(compact="no")),
    "adds": ("add_to_weight_grad must be True or False; got 0", lambda: loss(add_to_weight_grad=0)),
    "metrics": ("with_metrics must be True or False; got 'no'", lambda: loss(with_metrics="no")),
    "entropy": ("with_entropy must be True or False; got 'no'", lambda: fused_linear_logprobs(
        torch.randn(B, T, H), torch.randn(V, H), torch.zeros(B, T, dtype=torch.int64), with_entropy="no")),
    "objective-entropy": ("with_entropy must be True or False; got 'no'", lambda: fused_linear_objective(
        torch.randn(B, T, H), torch.randn(V, H), torch.zeros(B, T, dtype=torch.int64), gpg(), with_entropy="no")),
    "selective-entropy": ("with_entropy must be True or False; got 'no'", lambda: selective_logprobs(
        torch.randn(B, T, V), torch.zeros(B, T, dtype=torch.int64), with_entropy="no")),
    "scratch": ("max_scratch_bytes must be an int; got 1.5", lambda: loss(max_scratch_bytes=1.5)),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUE_ERRORS)
def test_value_errors(name):
    message, call = VALUE_ERRORS[name]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("name", TYPE_ERRORS)
@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor.*:UserWarning", "ignore::DeprecationWarning")
def test_type_errors(name):
    message, call = TYPE_ERRORS[name]
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize(
    ("impl", "reason"),
    [
        ("triton", "it takes float32, bfloat16 and float16, not float64"),
        ("native", ".*float64"),
        ("cuda", "its row kernels run on CUDA devices, the tensors are on cpu"),
    ],
)
def test_named_engine_that_cannot_run(impl, reason):
    with pytest.raises(RuntimeError, match=f"impl='{impl}' cannot run on cpu: {reason}"):
        loss(impl=impl, hidden_states=torch.randn(2, 3, 4).double(), lm_head_weight=torch.randn(11, 4).double())


def test_devices_that_differ():
    with pytest.raises(ValueError, match="lm_head_weight must be in memory; got a tensor on meta, which has no values"):
        loss(lm_head_weight=torch.empty(V, H, device="meta"))
    elsewhere = torch.empty(1, device="meta")
    for value, name in ((elsewhere, "mask"), ({"x": elsewhere}, r"mask\['x'\]")):  # objectives have named inputs
        call = LogitsCall(torch.empty(1, 2), torch.empty(1), value, None, 1.0, False)
        with pytest.raises(ValueError, match=f"all tensors must be on one device; got .*, {name} on meta"):
            check_devices(call)


def test_same_errors_from_the_reference():
    for name in ("ids-range", "hidden-nan", "advantages-nan", "mask-values", "offsets-end", "ref-missing"):
        message, _ = VALUE_ERRORS[name]
        changes = {
            "ids-range": {"completion_ids": torch.tensor([[0, 1, 5], [0, 0, 0]])},
            "advantages-nan": {"advantages": nan_at(B)},
            "hidden-nan": {"hidden_states": nan_at(B, T, H)},
            "mask-values": {"completion_mask": torch.full((B, T), 0.5)},
            "ref-missing": {"config": GRPOLossConfig(beta=0.1)},
            "offsets-end": {"cu_seqlens": torch.tensor([0, 2, 4])},
        }[name]
        with pytest.raises(ValueError, match=message):
            (packed if name == "offsets-end" else loss)(impl="reference", **changes)


def test_nan_sampling_logprobs_are_allowed():
    config = GRPOLossConfig(off_policy_mask_threshold=0.1)
    out = loss(sampling_per_token_logps=nan_at(B, T), old_per_token_logps=torch.zeros(B, T), config=config)
    assert out.loss.isfinite()


def test_values_that_the_objective_alone_reads():
    """A mask of 0.5 is no weight; a sampler's log-prob may be missing (NaN), but not infinite."""
    logps, advantages = -torch.rand(2, 3) - 1, torch.ones(2)
    for wrong in (0.5, 2.0, float("nan"), -1.0):
        for impl in ("auto", "reference"):
            with pytest.raises(ValueError, match="mask must hold only 0 and 1"):
                grpo_loss(logps, advantages, torch.full((2, 3), wrong), impl=impl)
    for wrong in (float("inf"), -float("inf")):
        sampled = logps.clone()
        sampled[0, 1] = wrong
        given = {"config": GRPOLossConfig(off_policy_mask_threshold=0.1), "sampling_per_token_logps": sampled}
        with pytest.raises(ValueError, match="sampling_per_token_logps must be finite, or NaN where there is none"):
            grpo_loss(logps, advantages, **given)
        assert grpo_loss(logps, advantages, sampled != wrong, **given).loss.isfinite()


def test_wrong_values_raise_before_any_gradient():
    weight = torch.randn(V, H, requires_grad=True)
    with pytest.raises(ValueError, match="advantages must be finite"):
        loss(lm_head_weight=weight, advantages=nan_at(B))
    assert weight.grad is None


def test_sharded_inputs_are_refused():
    dist.init_process_group("fake", rank=0, world_size=1)
    try:
        states = DTensor.from_local(torch.randn(B, T, H), dist.init_device_mesh("cpu", (1,)))
        with pytest.raises(TypeError, match="hidden_states must be a plain tensor, as full_tensor"):
            loss(hidden_states=states)
    finally:
        dist.destroy_process_group()


def test_one_value_a_sequence_is_never_ambiguous():
    out = loss(
        hidden_states=torch.randn(3, H), completion_ids=torch.zeros(3, dtype=torch.int64), completion_mask=None,
        cu_seqlens=torch.tensor([0, 2, 2, 3]), advantages=torch.ones(3, 1),
    )  # fmt: skip
    assert out.loss.isfinite()


@pytest.mark.parametrize("impl", ["chunked", "triton"])
def test_the_smallest_scratch_is_what_the_error_says(impl):
    with pytest.raises(ValueError, match="too small") as refused:
        loss(max_scratch_bytes=1, impl=impl)
    least = int(re.search(r"takes (\d+) bytes", str(refused.value))[1])
    loss(max_scratch_bytes=least, impl=impl)
    with pytest.raises(ValueError, match="too small"):
        loss(max_scratch_bytes=least - 1, impl=impl)
