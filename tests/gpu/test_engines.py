"""Both engines on a GPU: real sizes, tensor-core products, compiled Triton kernels, streams, graphs (make gpu)."""

from __future__ import annotations

import pytest
import torch
from helpers import Case, assert_same, config_id, covering_configs, frobenius_error, make_case, make_config
from torch.utils._pytree import tree_map_only

from grpo_fused import (
    GRPOLossConfig,
    HeadAdapter,
    QuantizedWeight,
    engines,
    fused_linear_grpo_loss,
    fused_linear_logprobs,
    selective_logprobs,
)
from grpo_fused.call.calls import LMHead

pytestmark = pytest.mark.gpu

ENGINES = ["chunked", "triton"]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
GRADIENT_TOLERANCE = {torch.bfloat16: 2 * 2**-8, torch.float16: 2 * 2**-11, torch.float32: 2e-5}


def logp_tolerance(width: int, dtype: torch.dtype) -> float:
    """Nats. Tensor cores may cut off low bits of partial sums, by 1e-4 in all at H = 4096 (docs/numerics.md)."""
    return 3e-4 if width >= 4096 and dtype != torch.float32 else 1e-4


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


def assert_close_to(want, got, dtype: torch.dtype, width: int) -> None:
    """Log-probs and gradients of a big case."""
    error = (got.out.per_token_logps - want.out.per_token_logps).abs().max()
    assert error <= logp_tolerance(width, dtype)
    for name, gradient in got.gradients().items():
        assert frobenius_error(gradient, want.gradients()[name]) <= GRADIENT_TOLERANCE[dtype], name


@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("config", covering_configs(), ids=config_id)
def test_matches_reference_in_fp32(config, impl):
    case = make_case(1, dtype=torch.float32)
    want = case.to(torch.float64).run(config, impl="reference")
    got = case.to(torch.float32, "cuda").run(config, impl=impl)
    assert_same(tree_map_only(torch.Tensor, torch.Tensor.cpu, got), want, tol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("H", "V"), [(896, 151936), (4096, 128256), (768, 50257), (900, 32000), (903, 1009)])
@pytest.mark.parametrize(
    "config",
    [make_config("dapo"), make_config("dapo", importance_sampling_level="sequence", entropy_coef=0.01)],
    ids=config_id,
)
def test_real_sizes_against_fp64(config, H, V, dtype):
    """Every way to load (903 is no multiple of 8: no descriptor), and to dlogits (a small budget scores first)."""
    case = big_case(512, H, V, dtype)
    want = case.to(torch.float64).run(config, impl="reference")  # once for all that is compared with it
    for impl in ENGINES:
        for scratch in (None, 64 * 4 * V):
            assert_close_to(want, case.run(config, impl=impl, max_scratch_bytes=scratch), dtype, H)


@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("options", [{"softcap": 30.0}, {"logit_scale": 0.5}, {"temperature": 0.7}], ids=str)
def test_head_options_at_real_size(options, impl):
    case = big_case(512, 896, 151936, torch.bfloat16, **options)
    bias = torch.randn(len(case.lm_head_weight), device="cuda", dtype=torch.bfloat16)
    config = make_config("dapo", entropy_coef=0.01)
    want = case.to(torch.float64).run(config, impl="reference", lm_head_bias=bias.double())
    assert_close_to(want, case.run(config, impl=impl, lm_head_bias=bias), torch.bfloat16, 896)


@pytest.mark.parametrize("form", ["plain", "int8", "fp8"])
def test_frozen_heads_with_an_adapter(form):
    """Log-probs, and gradients of hidden states, A and B, against the dense weight in fp64."""
    case = big_case(512, 896, 151936, torch.bfloat16)
    weight = case.lm_head_weight
    V, H = weight.shape
    if form != "plain":
        most, dtype = (127, torch.int8) if form == "int8" else (448, torch.float8_e4m3fn)
        scale = weight.float().abs().amax(1) / most
        values = weight.float() / scale.unsqueeze(1)
        weight = QuantizedWeight((values.round() if form == "int8" else values).to(dtype), scale)
    dense = weight.double() if form == "plain" else weight.dequantize(torch.float64)
    g = torch.Generator(device="cuda").manual_seed(1)
    a, b = (0.05 * torch.randn(size, generator=g, device="cuda") for size in ((16, H), (V, 16)))
    leaves = [x.clone().requires_grad_() for x in (case.hidden_states, a, b)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    want = fused_linear_logprobs(exact[0], dense + exact[2] @ exact[1], case.completion_ids, impl="reference").logps
    at = torch.randn(want.shape, generator=g, device="cuda")
    gradients = torch.autograd.grad((want * at).sum(), exact)
    for impl in ENGINES:
        adapter = HeadAdapter(leaves[1], leaves[2])
        got = fused_linear_logprobs(leaves[0], weight, case.completion_ids, lm_head_adapter=adapter, impl=impl).logps
        assert (got - want).abs().max() <= logp_tolerance(896, torch.bfloat16)
        for mine, theirs in zip(torch.autograd.grad((got * at).sum(), leaves), gradients, strict=True):
            assert frobenius_error(mine, theirs) <= GRADIENT_TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(("H", "V"), [(896, 151936), (903, 1009)])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_a_score_does_not_depend_on_the_batch(H, V, softcap):
    """Bitwise, by `triton`: its products are its own."""
    case = big_case(1024, H, V, torch.bfloat16)
    hidden, ids = case.hidden_states.flatten(0, 1), case.completion_ids.flatten()
    N = len(ids)

    def scores(rows, **options):
        return fused_linear_logprobs(
            hidden[rows], case.lm_head_weight, ids[rows], softcap=softcap, impl="triton", **options
        ).logps

    every = torch.arange(N, device="cuda")
    together = scores(every)
    order = torch.randperm(N, device="cuda")
    for rows in (order, every[:1], every[N - 1 :], every[N // 8 : N // 3], every[::3]):
        assert torch.equal(scores(rows), together[rows])
    assert torch.equal(scores(every, with_entropy=True), together)
    trained = fused_linear_grpo_loss(
        case.hidden_states.requires_grad_(), case.lm_head_weight, case.completion_ids, case.advantages,
        softcap=softcap, impl="triton",
    )  # fmt: skip
    assert torch.equal(trained.per_token_logps.reshape(-1), together)


@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("upstream", [1.0, 0.3])
def test_an_upstream_gradient(upstream, dtype, impl):
    case = big_case(256, 903, 32003, dtype)
    want = case.to(torch.float64).run(GRPOLossConfig(), impl="reference", upstream=upstream)
    assert_close_to(want, case.run(GRPOLossConfig(), impl=impl, upstream=upstream), dtype, 903)


@pytest.mark.parametrize("impl", ENGINES)
def test_confident_tokens_are_exact(impl):
    """Targets so likely that the others' share is 0 in fp32: their logit is summed like the maximum."""
    weight = torch.randn(151936, 896, device="cuda").bfloat16()
    ids = torch.randint(0, 151936, (512,), device="cuda")
    logps = fused_linear_logprobs(weight[ids] * 0.25, weight, ids, impl=impl).logps
    assert logps.eq(0.0).all()


@pytest.mark.parametrize("impl", ENGINES)
def test_beyond_two_to_the_31_logits(impl):
    """N = 65536 and N * V = 1e10: offsets of 64 bits, grids of any length."""
    case = big_case(65536, 896, 151936, torch.bfloat16)
    got = case.run(GRPOLossConfig(), impl=impl, max_scratch_bytes=8 * 2**30)
    rows = torch.randint(0, 65536, (64,), device="cuda")
    rows = rows[case.completion_mask.reshape(-1)[rows]]
    assert (got.out.per_token_logps.reshape(-1)[rows] - exact_rows(case, rows)).abs().max() <= 1e-4
    assert got.dhidden.isfinite().all()
    assert got.dweight.isfinite().all()


def test_selective_beyond_two_to_the_31_logits():
    logits = torch.randn(16384, 151936, device="cuda", dtype=torch.bfloat16)  # 2.5e9 elements
    ids = torch.randint(0, 151936, (16384,), device="cuda")
    last = selective_logprobs(logits, ids).logps[-8:]
    want = logits[-8:].double().log_softmax(-1).gather(1, ids[-8:].unsqueeze(1)).squeeze(1)
    assert (last - want).abs().max() <= 1e-4


@pytest.mark.parametrize("impl", ENGINES)
def test_two_runs_are_bitwise_equal(impl):
    case = big_case(2048, 896, 151936, torch.bfloat16)
    first, again = (case.run(GRPOLossConfig(), impl=impl) for _ in range(2))
    assert torch.equal(first.out.per_token_logps, again.out.per_token_logps)
    assert torch.equal(first.dhidden, again.dhidden)
    assert torch.equal(first.dweight, again.dweight)


@pytest.mark.parametrize("impl", ENGINES)
def test_side_stream(impl):
    case = big_case(512, 896, 32000, torch.bfloat16)
    want = case.run(GRPOLossConfig(), impl=impl)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = case.run(GRPOLossConfig(), impl=impl)
    torch.cuda.current_stream().wait_stream(stream)
    # the library has a workspace for each stream, and may split a sum differently
    assert (got.out.per_token_logps - want.out.per_token_logps).abs().max() <= 1e-5
    assert frobenius_error(got.dweight, want.dweight) <= 2**-8


class Step:
    """Forward and backward without a device synchronisation."""

    def __init__(self, impl: str) -> None:
        case = big_case(512, 896, 32000, torch.bfloat16)
        self.hidden, self.weight = case.hidden_states.requires_grad_(), case.lm_head_weight.requires_grad_()
        self.rest = (case.completion_ids, case.advantages, case.completion_mask)
        self.options = {"old_per_token_logps": case.options["old_per_token_logps"], "compact": False, "impl": impl}

    def __call__(self):
        """(log-probs, dhidden, dweight)"""
        self.hidden.grad = self.weight.grad = None
        out = fused_linear_grpo_loss(self.hidden, self.weight, *self.rest, **self.options)
        out.loss.backward()
        return out.per_token_logps, self.hidden.grad, self.weight.grad


@pytest.mark.parametrize("impl", ENGINES)
def test_no_synchronisation_without_compaction(impl):
    step = Step(impl)
    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("impl", ENGINES)
def test_in_a_graph(impl):
    """Captured once, replayed on other hidden states, advantages and masks."""
    step = Step(impl)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # kernels are compiled before the capture, the library makes its workspace
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    _, advantages, mask = step.rest
    with torch.no_grad():
        step.hidden.mul_(-0.5)
        advantages.neg_()
        mask.logical_not_()
    graph.replay()
    got = [x.clone() for x in captured]
    logps, *gradients = step()
    assert (got[0] - logps).abs().max() <= (0.0 if impl == "triton" else 1e-5)
    for mine, want in zip(got[1:], gradients, strict=True):
        assert frobenius_error(mine, want) <= 2**-8


@pytest.mark.parametrize("impl", ENGINES)
def test_largest_allocation_stays_within_the_budget(impl):
    case = big_case(4096, 896, 151936, torch.bfloat16)
    budget = 512 * 2**20
    case.run(GRPOLossConfig(), impl=impl, max_scratch_bytes=budget)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    got = case.run(GRPOLossConfig(), impl=impl, max_scratch_bytes=budget)
    peak = torch.cuda.max_memory_allocated() - before
    head = LMHead(case.lm_head_weight, compute_dtype=torch.bfloat16)
    cost = engines.engine(impl).cost(head, int(case.completion_mask.sum()), budget)
    assert cost.scratch_bytes <= budget
    # dW is converted to bf16 after the slab is freed
    most = cost.accumulator_bytes + max(cost.scratch_bytes, got.dweight.nbytes)
    assert peak <= most + 2 * got.dhidden.nbytes + 64 * 2**20


def test_scoring_takes_memory_of_the_tokens_only():
    """By `triton`: no logits."""
    case = big_case(8192, 896, 151936, torch.bfloat16)
    arguments = (case.hidden_states, case.lm_head_weight, case.completion_ids)
    fused_linear_logprobs(*arguments, impl="triton", with_entropy=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fused_linear_logprobs(*arguments, impl="triton", with_entropy=True)
    per_token = (torch.cuda.max_memory_allocated() - before) / 8192
    assert per_token <= 2 * 896 * 2 + 12 * 128 + 256, f"{per_token} bytes a token"
