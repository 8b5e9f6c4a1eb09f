"""Tests that need a GPU: real sizes, tensor-core products, compiled Triton kernels, streams, graphs (make gpu)."""

from __future__ import annotations

import pytest
import torch
from helpers import Case, assert_same, config_id, covering_configs, frobenius_error, make_case, make_config

from grpo_fused import GRPOLossConfig, engines, fused_linear_grpo_loss, fused_linear_logprobs, selective_logprobs
from grpo_fused.engines.products import Head

pytestmark = pytest.mark.gpu


def on_gpu(case: Case) -> Case:
    def move(x):
        return x.cuda() if isinstance(x, torch.Tensor) else x

    return Case(
        move(case.hidden_states), move(case.lm_head_weight), move(case.completion_ids), move(case.advantages),
        move(case.completion_mask), {name: move(value) for name, value in case.options.items()},
    )  # fmt: skip


def big_case(N: int, H: int, V: int, dtype: torch.dtype, **options) -> Case:
    """Created on the device; logits of standard deviation 4, old log-probs near the policy's."""
    g = torch.Generator(device="cuda").manual_seed(0)
    hidden = torch.randn(4, N // 4, H, generator=g, device="cuda").to(dtype)
    weight = (torch.randn(V, H, generator=g, device="cuda") * (4.0 / H**0.5)).to(dtype)
    ids = torch.randint(0, V, (4, N // 4), generator=g, device="cuda")
    scale = {k: v for k, v in options.items() if k in ("softcap", "logit_scale", "temperature")}
    with torch.no_grad():
        logps = fused_linear_logprobs(hidden, weight, ids, **scale).logps
    old = logps + 0.05 * torch.randn(logps.shape, generator=g, device="cuda")
    mask = torch.rand(ids.shape, generator=g, device="cuda") > 0.2
    return Case(
        hidden, weight, ids, torch.randn(4, generator=g, device="cuda"), mask, {"old_per_token_logps": old, **options}
    )


def exact_rows(case: Case, rows: torch.Tensor) -> torch.Tensor:
    """fp64 log-probs of some flat positions."""
    hidden = case.hidden_states.reshape(-1, case.hidden_states.shape[-1])[rows].double()
    logits = hidden @ case.lm_head_weight.double().T
    log_p = logits.log_softmax(-1)
    return log_p.gather(1, case.completion_ids.reshape(-1)[rows].unsqueeze(1)).squeeze(1)


@pytest.mark.parametrize("config", covering_configs(), ids=config_id)
def test_matches_reference_in_fp32(config):
    case = make_case(1, dtype=torch.float32)
    want = case.to(torch.float64).run(config, impl="reference")
    got = on_gpu(case).run(config)
    assert_same(on_cpu(got), want, tol=2e-5)


def on_cpu(result):
    out = result.out
    result.out = out._replace(
        loss=out.loss.cpu(), per_token_logps=out.per_token_logps.cpu(), entropies=out.entropies.cpu(),
        metrics={k: v.cpu() for k, v in out.metrics.items()},
    )  # fmt: skip
    for name in ("dhidden", "dweight", "dbias"):
        value = getattr(result, name)
        setattr(result, name, None if value is None else value.cpu())
    return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("H", "V"), [(896, 151936), (4096, 128256)])
@pytest.mark.parametrize(
    "config",
    [make_config("dapo"), make_config("dapo", importance_sampling_level="sequence", entropy_coef=0.01)],
    ids=config_id,
)
def test_real_sizes_against_fp64(config, H, V, dtype):
    case = big_case(1024, H, V, dtype)
    want = case.to(torch.float64).run(config, impl="reference")
    got = case.run(config)
    assert (got.out.per_token_logps - want.out.per_token_logps).abs().max() <= 1e-4
    eps = {torch.bfloat16: 2 * 2**-8, torch.float16: 2 * 2**-11, torch.float32: 2e-5}[dtype]
    for name, gradient in got.gradients().items():
        assert frobenius_error(gradient, want.gradients()[name]) <= eps, name


@pytest.mark.parametrize("options", [{"softcap": 30.0}, {"logit_scale": 0.5}, {"temperature": 0.7}], ids=str)
def test_head_options_at_real_size(options):
    case = big_case(512, 896, 151936, torch.bfloat16, **options)
    bias = torch.randn(151936, device="cuda", dtype=torch.bfloat16)
    config = make_config("dapo", entropy_coef=0.01)
    want = case.to(torch.float64).run(config, impl="reference", lm_head_bias=bias.double())
    got = case.run(config, lm_head_bias=bias)
    assert (got.out.per_token_logps - want.out.per_token_logps).abs().max() <= 1e-4
    for name, gradient in got.gradients().items():
        assert frobenius_error(gradient, want.gradients()[name]) <= 2 * 2**-8, name


def test_beyond_two_to_the_31_logits():
    """N = 65536 and N * V = 1e10: offsets of 64 bits, grids of any length."""
    case = big_case(65536, 896, 151936, torch.bfloat16)
    got = case.run(GRPOLossConfig())
    rows = torch.randint(0, 65536, (64,), device="cuda")
    rows = rows[case.completion_mask.reshape(-1)[rows]]
    assert (got.out.per_token_logps.reshape(-1)[rows] - exact_rows(case, rows)).abs().max() <= 1e-4
    assert got.dhidden.isfinite().all()
    assert got.dweight.isfinite().all()
    logits = torch.randn(16384, 151936, device="cuda", dtype=torch.bfloat16)  # 2.5e9 elements
    ids = torch.randint(0, 151936, (16384,), device="cuda")
    last = selective_logprobs(logits, ids).logps[-8:]
    want = logits[-8:].double().log_softmax(-1).gather(1, ids[-8:].unsqueeze(1)).squeeze(1)
    assert (last - want).abs().max() <= 1e-4


def test_two_runs_are_bitwise_equal():
    case = big_case(2048, 896, 151936, torch.bfloat16)
    first, again = case.run(GRPOLossConfig()), case.run(GRPOLossConfig())
    assert torch.equal(first.out.per_token_logps, again.out.per_token_logps)
    assert torch.equal(first.dweight, again.dweight)


def test_side_stream():
    case = big_case(512, 896, 32000, torch.bfloat16)
    want = case.run(GRPOLossConfig())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = case.run(GRPOLossConfig())
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(got.dweight, want.dweight)


def test_no_synchronisation_without_compaction():
    case = big_case(512, 896, 32000, torch.bfloat16)
    call = {"old_per_token_logps": case.options["old_per_token_logps"], "compact": False}
    hidden, weight = case.hidden_states.requires_grad_(), case.lm_head_weight.requires_grad_()
    arguments = (hidden, weight, case.completion_ids, case.advantages, case.completion_mask)
    fused_linear_grpo_loss(*arguments, **call).loss.backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fused_linear_grpo_loss(*arguments, **call).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_largest_allocation_stays_within_the_budget():
    case = big_case(4096, 896, 151936, torch.bfloat16)
    budget = 512 * 2**20
    case.run(GRPOLossConfig(), max_scratch_bytes=budget)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    got = case.run(GRPOLossConfig(), max_scratch_bytes=budget)
    peak = torch.cuda.max_memory_allocated() - before
    engine = engines.engine(engines.choose("auto", case.lm_head_weight.device, torch.bfloat16))
    head = Head(case.lm_head_weight, None, 1.0, None, torch.bfloat16)
    cost = engine.cost(head, int(case.completion_mask.sum()), budget)
    assert cost.scratch_bytes <= budget
    # dW is converted to bf16 after the slab is freed
    most = cost.accumulator_bytes + max(cost.scratch_bytes, got.dweight.nbytes)
    assert peak <= most + 2 * got.dhidden.nbytes + 64 * 2**20
