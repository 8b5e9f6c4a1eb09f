"""The Triton head kernel on a GPU: real sizes, tensor-core products, bitwise scores in any batch (make gpu)."""

from __future__ import annotations

import pytest
import torch
from gpu.test_engines import big_case, exact_rows, on_cpu, on_gpu
from helpers import assert_same, config_id, covering_configs, frobenius_error, make_case, make_config

from grpo_fused import GRPOLossConfig, fused_linear_grpo_loss, fused_linear_logprobs

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("config", covering_configs(), ids=config_id)
def test_matches_reference_in_fp32(config):
    case = make_case(1, dtype=torch.float32)
    want = case.to(torch.float64).run(config, impl="reference")
    assert_same(on_cpu(on_gpu(case).run(config, impl="triton")), want, tol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("H", "V"), [(896, 151936), (4096, 128256), (768, 50257), (900, 32000), (903, 1009)])
@pytest.mark.parametrize(
    "config",
    [make_config("dapo"), make_config("dapo", importance_sampling_level="sequence", entropy_coef=0.01)],
    ids=config_id,
)
def test_real_sizes_against_fp64(config, H, V, dtype):
    """Every way to load (903 is no multiple of 8: no descriptor), both ways to dlogits (a small budget scores first)."""
    case = big_case(512, H, V, dtype)
    want = case.to(torch.float64).run(config, impl="reference")
    eps = {torch.bfloat16: 2 * 2**-8, torch.float16: 2 * 2**-11, torch.float32: 2e-5}[dtype]
    for scratch in (None, 64 * 4 * V):
        got = case.run(config, impl="triton", max_scratch_bytes=scratch)
        assert (got.out.per_token_logps - want.out.per_token_logps).abs().max() <= 1e-4
        for name, gradient in got.gradients().items():
            assert frobenius_error(gradient, want.gradients()[name]) <= eps, name


@pytest.mark.parametrize("options", [{"softcap": 30.0}, {"logit_scale": 0.5}, {"temperature": 0.7}], ids=str)
def test_head_options_at_real_size(options):
    case = big_case(512, 896, 151936, torch.bfloat16, **options)
    bias = torch.randn(151936, device="cuda", dtype=torch.bfloat16)
    config = make_config("dapo", entropy_coef=0.01)
    want = case.to(torch.float64).run(config, impl="reference", lm_head_bias=bias.double())
    got = case.run(config, impl="triton", lm_head_bias=bias)
    assert (got.out.per_token_logps - want.out.per_token_logps).abs().max() <= 1e-4
    for name, gradient in got.gradients().items():
        assert frobenius_error(gradient, want.gradients()[name]) <= 2 * 2**-8, name


@pytest.mark.parametrize(("H", "V"), [(896, 151936), (903, 1009)])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_a_score_does_not_depend_on_the_batch(H, V, softcap):
    case = big_case(1024, H, V, torch.bfloat16)
    hidden, ids = case.hidden_states.reshape(1024, H), case.completion_ids.reshape(1024)

    def scores(rows, **options):
        return fused_linear_logprobs(
            hidden[rows], case.lm_head_weight, ids[rows], softcap=softcap, impl="triton", **options
        ).logps

    every = torch.arange(1024, device="cuda")
    together = scores(every)
    order = torch.randperm(1024, device="cuda")
    for rows in (order, every[:1], every[777:778], every[100:300], every[::3]):
        assert torch.equal(scores(rows), together[rows])
    assert torch.equal(scores(every, with_entropy=True), together)
    trained = fused_linear_grpo_loss(
        hidden.view(4, 256, H).requires_grad_(), case.lm_head_weight, ids.view(4, 256), case.advantages,
        softcap=softcap, impl="triton",
    )  # fmt: skip
    assert torch.equal(trained.per_token_logps.reshape(-1), together)


def test_confident_tokens_are_exact():
    """Targets whose probability rounds to 1 in fp32: their logit is summed like the maximum: both are equal."""
    weight = torch.randn(151936, 896, device="cuda").bfloat16()
    ids = torch.randint(0, 151936, (512,), device="cuda")
    logps = fused_linear_logprobs(weight[ids] * 0.25, weight, ids, impl="triton").logps
    assert logps.eq(0.0).all()


def test_scoring_takes_memory_of_the_tokens_only():
    case = big_case(8192, 896, 151936, torch.bfloat16)
    arguments = (case.hidden_states, case.lm_head_weight, case.completion_ids)
    fused_linear_logprobs(*arguments, impl="triton", with_entropy=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fused_linear_logprobs(*arguments, impl="triton", with_entropy=True)
    per_token = (torch.cuda.max_memory_allocated() - before) / 8192
    assert per_token <= 2 * 896 * 2 + 12 * 128 + 256, f"{per_token} bytes a token"


def test_beyond_two_to_the_31_logits():
    case = big_case(65536, 896, 151936, torch.bfloat16)
    got = case.run(GRPOLossConfig(), impl="triton", max_scratch_bytes=8 * 2**30)
    rows = torch.randint(0, 65536, (64,), device="cuda")
    rows = rows[case.completion_mask.reshape(-1)[rows]]
    assert (got.out.per_token_logps.reshape(-1)[rows] - exact_rows(case, rows)).abs().max() <= 1e-4
    assert got.dhidden.isfinite().all()
    assert got.dweight.isfinite().all()


def test_two_runs_are_bitwise_equal():
    case = big_case(2048, 896, 151936, torch.bfloat16)
    first, again = (case.run(GRPOLossConfig(), impl="triton") for _ in range(2))
    assert torch.equal(first.dhidden, again.dhidden)
    assert torch.equal(first.dweight, again.dweight)


def test_no_synchronisation_without_compaction():
    case = big_case(512, 896, 32000, torch.bfloat16)
    call = {"old_per_token_logps": case.options["old_per_token_logps"], "compact": False, "impl": "triton"}
    hidden, weight = case.hidden_states.requires_grad_(), case.lm_head_weight.requires_grad_()
    arguments = (hidden, weight, case.completion_ids, case.advantages, case.completion_mask)
    fused_linear_grpo_loss(*arguments, **call).loss.backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fused_linear_grpo_loss(*arguments, **call).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
