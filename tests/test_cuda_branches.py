"""What the package does on a GPU, with numbers on a CPU: `cuda_double.py` says what is real and what is emulated."""

from __future__ import annotations

import pytest
import torch
from helpers import config_id, frobenius_error, make_case, make_config, pack
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from cuda_double import CudaTensor, cuda_double

from grpo_fused import (
    GRPOLossConfig,
    check_objective,
    engines,
    fused_linear_grpo_loss,
    fused_linear_logprobs,
    objectives,
)
from grpo_fused.api import autograd
from grpo_fused.call.calls import LMHead
from grpo_fused.engines import products

ENGINES = ["chunked", "triton"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CAPABILITIES = {"sm_75": (7, 5), "sm_80": (8, 0), "sm_90": (9, 0), "sm_100": (10, 0), "sm_120": (12, 0)}
CONFIGS = [
    make_config("dapo"),
    make_config("grpo", beta=0.1, entropy_coef=0.02),
    make_config("dapo", importance_sampling_level="sequence", beta=0.1),
    make_config("cispo", top_entropy_quantile=0.5),
]

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy


@pytest.fixture
def double():
    with cuda_double() as device:
        yield device


def small_case(dtype=torch.float32, **options):
    """Few rows, 20 ms each; V = 37 needs padding; no ratio is near a clip bound."""
    return make_case(0, **{"B": 3, "T": 4, "H": 16, "V": 37, "dtype": dtype, "grid": 0.02, **options})


def gpu_case(dtype=torch.float32, **options):
    """The same on the GPU."""
    return small_case(dtype, **options).to(dtype, "cuda")


def within(found):
    """Whether the errors that `Problem.compare` found are within their bounds."""
    beyond = {name: pair for name, pair in found.items() if not pair[0] <= pair[1]}
    assert beyond == {}, beyond
    return True


def test_the_double_refuses_what_a_gpu_refuses(double):
    a, host = torch.ones(3, 4, device="cuda"), torch.ones(3, 4)
    assert isinstance(a, CudaTensor)
    assert a.device == torch.device("cuda:0")
    for wrong in (lambda: a + host, lambda: a.mm(host.T), lambda: torch.add(host, a), lambda: a.index_copy_(
        0, torch.tensor([0]), a[:1])):  # fmt: skip
        with pytest.raises(RuntimeError, match="same device"):
            wrong()
    assert torch.equal((a * torch.tensor(2.0))[torch.tensor([1])].cpu(), 2 * host[:1])  # a number, an index
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(3, device="cuda", generator=torch.Generator())
    with pytest.raises(TypeError, match="numpy"):
        a.numpy()
    assert torch.empty(3, device="cuda").isnan().all()


def test_the_double_takes_fp32_products_as_pytorch_does():
    for capability, dtype, passes in (
        ((9, 0), torch.bfloat16, True), ((7, 5), torch.bfloat16, False), ((7, 5), torch.float16, True),
        ((9, 0), torch.float64, False),
    ):  # fmt: skip
        with cuda_double(capability):
            a, total = torch.randn(3, 4, device="cuda").to(dtype), torch.ones(3, 3, device="cuda")
            if not passes:
                with pytest.raises(RuntimeError, match=r"out_dtype|CUBLAS"):
                    torch.mm(a, a.T, out_dtype=torch.float32)
                continue
            want = a.float() @ a.float().T
            assert torch.equal(torch.mm(a, a.T, out_dtype=torch.float32), want)
            torch.addmm(total, a, a.T, out_dtype=torch.float32, out=total)
            assert torch.equal(total, want + 1)
            with pytest.raises(RuntimeError, match="input dtypes"):
                torch.mm(a, a.T.float(), out_dtype=torch.float32)
            with pytest.raises(RuntimeError, match="provided out"):
                torch.mm(a, a.T, out_dtype=torch.float32, out=torch.empty(3, 3, device="cuda", dtype=dtype))


WAITS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool((x > 0).all()),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "copy_": lambda x: torch.empty(3).copy_(x),
    "index": lambda x: x[torch.tensor([0])],
    "tensor": lambda x: x + torch.tensor([1.0, 2.0, 3.0], device="cuda"),
}


@pytest.mark.parametrize("call", WAITS.values(), ids=WAITS)
def test_the_double_sees_the_host_wait(double, call):
    x = torch.ones(3, device="cuda")
    assert double.waits.total() == 0
    call(x)
    assert double.waits.total() == 1
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="synchronizing"):
        call(x)


@pytest.mark.pairs
@pytest.mark.gate(keep=lambda capability, dtype, config, run, **_: (
    capability == (9, 0) if dtype == torch.bfloat16 else config == CONFIGS[0] and "max_scratch_bytes" in run
))  # fmt: skip
@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
@pytest.mark.parametrize("capability", CAPABILITIES.values(), ids=CAPABILITIES)
@pytest.mark.parametrize(
    "run", [{}, {"max_scratch_bytes": 1300}, {"compact": False}], ids=["one", "chunks", "all-rows"]
)
def test_loss_and_gradients(impl, dtype, config, capability, run):
    """Against float64; several chunks add to an fp32 dW."""
    case = small_case(dtype, masked=0.1, softcap=5.0, logit_scale=1.3)
    with cuda_double(capability) as double:
        assert within(case.compare(config, device="cuda", impl=impl, **run))
    if "max_scratch_bytes" in run:
        assert max(double.launches.values()) > 1


@pytest.mark.parametrize("impl", ENGINES)
def test_packed_with_a_bias_and_temperatures(impl, double):
    case = pack(small_case(torch.bfloat16))
    bias, temperature = torch.linspace(-1, 1, 37).bfloat16(), torch.linspace(0.5, 2, case.completion_ids.numel())
    case.options |= {"lm_head_bias": bias, "temperature": temperature}
    assert within(case.compare(CONFIGS[2], device="cuda", impl=impl))


@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_log_probs_and_their_gradients(impl, dtype, double):
    case = gpu_case(dtype)
    results = []
    for what, x in ((impl, case), ("reference", case.to(torch.float64))):
        hidden, weight = x.hidden_states.requires_grad_(), x.lm_head_weight.requires_grad_()
        out = fused_linear_logprobs(
            hidden, weight, x.completion_ids, x.completion_mask, temperature=0.7, with_entropy=True, impl=what
        )
        (out.logps.sum() + 0.3 * out.entropies.sum()).backward()
        results.append((out.logps.detach(), out.entropies.detach(), hidden.grad, weight.grad))
    for mine, want in zip(*results, strict=True):
        assert mine.device.type == "cuda"
        assert float(frobenius_error(mine, want)) <= (2e-5 if dtype == torch.float32 else 2**-7)


@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("upstream", [1e-30, 1024.0])
def test_fp16_gradients_far_from_its_range(impl, upstream, double):
    """dlogits of 1e-9 would be 0 in fp16; they are scaled, and the result once more by the upstream gradient."""
    case = gpu_case(torch.float16, masked=0.0, lm_head_bias=torch.linspace(-1, 1, 37))
    case.advantages *= 1e-7 if upstream > 1 else 1e27
    got = case.run(CONFIGS[0], impl=impl, upstream=upstream)
    want = case.to(torch.float64).run(CONFIGS[0], impl="reference", upstream=upstream)
    for name, gradient in got.gradients().items():
        # results near 1e-5 are subnormal in fp16: their spacing is 2^-24
        assert float((gradient.double() - want.gradients()[name]).abs().max()) <= 2**-24 + 2e-3 * float(
            want.gradients()[name].abs().max()
        ), name


@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("upstream", [1.0, 65536.0])
@pytest.mark.parametrize("where", ["fp16 accumulation", "AMD"])
def test_fp16_products_without_fp32_results(where, upstream, impl, double, monkeypatch):
    """Neither the power of two that lifts dlogits nor a loss scale fits fp16."""
    if where == "AMD":
        monkeypatch.setattr(torch.version, "hip", "6.4")
    else:
        monkeypatch.setattr(products, "has_fp32_output", lambda head: False)
    case = gpu_case(torch.float16, masked=0.0)
    case.advantages *= 1e-2 / upstream
    hidden = case.hidden_states.requires_grad_()
    got = case.run(CONFIGS[0], impl=impl, upstream=upstream)
    want = case.to(torch.float64).run(CONFIGS[0], impl="reference", upstream=upstream)
    for name, gradient in got.gradients().items():
        assert float(frobenius_error(gradient, want.gradients()[name])) <= 5e-3, name
    logps = [
        fused_linear_logprobs(x, w.detach(), case.completion_ids, impl=engine).logps
        for x, w, engine in ((hidden, case.lm_head_weight, impl), (hidden.double(), case.lm_head_weight.double(), "reference"))
    ]  # fmt: skip
    mine, exact = (torch.autograd.grad(upstream * (1e-3 / upstream) * x.sum(), hidden)[0] for x in logps)
    assert float(frobenius_error(mine, exact)) <= 5e-3


@pytest.mark.parametrize("impl", ENGINES)
def test_a_graph_that_is_kept_scales_to_the_same_bits(impl, double, monkeypatch):
    """A factor is not rounded to bf16; CUDA C++ as an engine takes no kernel of Triton for it."""
    case = gpu_case(torch.bfloat16)
    inputs = case.hidden_states.requires_grad_(), case.lm_head_weight.requires_grad_()

    def loss():
        return fused_linear_grpo_loss(*inputs, case.completion_ids, case.advantages, impl=impl).loss / 3

    kept, freed = torch.autograd.grad(loss(), inputs, retain_graph=True), torch.autograd.grad(loss(), inputs)
    assert all(torch.equal(x, y) for x, y in zip(kept, freed, strict=True))
    gradient, third = freed[1].detach(), torch.full((), 1 / 3, device="cuda")
    monkeypatch.setattr(autograd, "_takes_kernels", None)
    for dtype in (torch.float32, torch.bfloat16):
        narrow = gradient.to(dtype)
        found = autograd.scaled(narrow.clone(), third, dtype, "cuda")
        assert torch.equal(found, (narrow.float() * third).to(dtype))
        assert torch.equal(autograd.times(narrow, third), narrow.float() * third)  # as AMD's dH


@pytest.mark.parametrize("impl", ENGINES)
def test_inside_a_training_program(impl, double):
    """fp32 masters under autocast, activation checkpointing, two backward passes, a frozen head."""
    case = gpu_case()
    hidden, weight = case.hidden_states.requires_grad_(), case.lm_head_weight.requires_grad_()
    rest = (case.completion_ids, case.advantages, case.completion_mask)

    def loss(x, w):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return fused_linear_grpo_loss(x, w, *rest, impl=impl).loss

    once = torch.autograd.grad(loss(hidden, weight), (hidden, weight))
    assert [x.dtype for x in once] == [torch.float32] * 2
    exact = case.to(torch.float64).run(make_config("dapo"), impl="reference", old_per_token_logps=None)
    for mine, want in zip(once, (exact.dhidden, exact.dweight), strict=True):
        assert float(frobenius_error(mine, want)) <= 2**-6
    again = checkpoint(loss, hidden, weight, use_reentrant=False)
    first = torch.autograd.grad(again, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(2 * again, (hidden, weight))
    assert all(torch.equal(x, y) for x, y in zip(first, once, strict=True))
    assert all(torch.equal(x, 2 * y) for x, y in zip(second, once, strict=True))
    double.flop = 0
    loss(hidden, weight.detach()).backward()
    assert torch.equal(hidden.grad, once[0])
    assert "addmm" not in double.calls


LOSS, STATISTICS, GRADIENT = "row_loss_fwd_bwd_kernel", "row_statistics_fwd_kernel", "row_gradient_bwd_kernel"
HEAD, FINISH, FACTOR = "head_fwd_kernel", "finish_scores_fwd_kernel", "exponentials_factor_kernel"
PASS = "exponentials_bwd_kernel"


@pytest.mark.parametrize(
    ("impl", "config", "launches", "products"),
    [
        ("chunked", CONFIGS[0], {LOSS: 1}, 3),
        ("chunked", CONFIGS[2], {STATISTICS: 1, GRADIENT: 1}, 3),
        ("chunked", CONFIGS[3], {STATISTICS: 1, GRADIENT: 1}, 1 + 3 / 2),  # half of the rows have a gradient
        # the head kernel samples columns, then takes all
        ("triton", CONFIGS[0], {HEAD: 2, FINISH: 1, FACTOR: 1}, 2),
        ("triton", CONFIGS[1], {HEAD: 2, FINISH: 1, PASS: 1}, 2),  # with an entropy's gradient
        ("triton", CONFIGS[2], {HEAD: 2, FINISH: 1, FACTOR: 1}, 2),
        ("triton", CONFIGS[3], {HEAD: 2, FINISH: 1}, 2 / 2),
    ],
    ids=lambda x: config_id(x) if isinstance(x, GRPOLossConfig) else x if isinstance(x, str) else "",
)
def test_launches_and_products(impl, config, launches, products, double):
    """Of a call of one chunk: the head kernel is a product too, of those that docs/engines.md counts."""
    case = gpu_case(masked=0.0)
    case.completion_mask = None
    double.launches.clear()
    double.flop = 0
    case.run(config, impl=impl)
    assert double.launches == launches
    assert double.products(12, 16, 37) == products


@pytest.mark.gate(keep=lambda config, **_: config in (CONFIGS[0], CONFIGS[3]))
@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
def test_waits_for_the_device(impl, config, double):
    """One with compaction, two if scoring comes first, none without it: neither in the forward nor in the backward."""
    case = gpu_case()
    for x in (case, case.to(torch.float64)) if impl == "chunked" else (case,):  # in fp64 rows are torch operations
        for compact, waits in ((True, 1 + config.needs_batch), (False, 0)):
            double.waits.clear()
            x.run(config, impl=impl, compact=compact)
            assert double.waits.total() == waits, double.waits
    x = case.hidden_states.requires_grad_()
    out = fused_linear_logprobs(x, case.lm_head_weight, case.completion_ids, case.completion_mask, impl=impl,
                                compact=False)  # fmt: skip
    out.logps.sum().backward()
    assert double.waits.total() == 0


@pytest.mark.parametrize(
    ("impl", "config", "options", "most"),
    [
        ("triton", CONFIGS[0], {}, 101),
        ("triton", CONFIGS[0], {"with_metrics": False}, 78),
        ("triton", CONFIGS[2], {}, 145),
        ("chunked", CONFIGS[0], {}, 86),
        ("chunked", CONFIGS[2], {}, 141),
        ("triton", CONFIGS[0], {"compact": False}, 106),
    ],
    ids=["triton", "no metrics", "sequence level", "chunked", "chunked sequence level", "for a graph"],
)
def test_kernels_of_a_call(impl, config, options, most, double):
    """Torch's and ours, forward and backward: each takes the host 5 us or more, which bounds calls of few tokens."""
    case = gpu_case(torch.bfloat16)
    case.run(config, impl=impl, **options)
    double.kernels = 0
    double.launches.clear()
    case.run(config, impl=impl, **options)
    assert double.kernels + double.launches.total() <= most


@pytest.mark.parametrize("impl", ENGINES)
def test_a_captured_call_reads_new_values(impl, double):
    """Neither a Python number nor a branch of a call without compaction depends on values; the capture allows no wait."""
    case = gpu_case(torch.bfloat16)
    hidden, weight = case.hidden_states.requires_grad_(), case.lm_head_weight.requires_grad_()
    options = {"old_per_token_logps": case.options["old_per_token_logps"], "compact": False, "impl": impl}

    def step():
        out = fused_linear_grpo_loss(
            hidden, weight, case.completion_ids, case.advantages, case.completion_mask, **options
        )
        return out.per_token_logps, *torch.autograd.grad(out.loss, (hidden, weight))

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    before = [x.clone() for x in captured]
    with torch.no_grad():
        hidden.mul_(-0.5)
        case.advantages.neg_()
        case.completion_mask.logical_not_()
    graph.replay()
    for mine, old, want in zip(captured, before, step(), strict=True):
        assert torch.equal(mine, want)
        assert not torch.equal(mine, old)


@pytest.mark.pairs
@pytest.mark.gate(keep=lambda dtype, **_: dtype == torch.bfloat16)
@pytest.mark.parametrize("scratch", [None, 2**15], ids=["one-chunk", "chunks"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("impl", ENGINES)
def test_memory_is_within_the_engine_cost(impl, dtype, scratch, double):
    """Scratch, the fp32 sum of dW, the gradients; besides them vectors of V and of N, and copies of hidden states.

    At a width where no engine copies the weight.
    """
    H = 32
    case = gpu_case(dtype, B=4, H=H, V=1501, extras=False)
    head = LMHead(case.lm_head_weight, compute_dtype=dtype)
    cost = engines.engine(impl).cost(head, 16, scratch)
    double.forget()
    before = double.allocated
    got = case.run(CONFIGS[0], impl=impl, max_scratch_bytes=scratch, compact=False)
    seen = double.peak - before - cost.accumulator_bytes - got.dweight.nbytes
    assert seen <= cost.scratch_bytes + 4 * 1501 + 16 * (4 * H * 4 + 8 * 64)


def test_auto_takes_chunked_with_triton_rows(double):
    case = gpu_case()
    assert torch.equal(case.run(CONFIGS[0]).dweight, case.run(CONFIGS[0], impl="chunked").dweight)
    assert double.launches["row_loss_fwd_bwd_kernel"] == 2


def test_check_objective_takes_inputs_on_a_gpu(double):
    inputs = {name: -torch.rand(4, 3, device="cuda") for name in ("advantages", "sampling_per_token_logps")}
    others = {"sampling_alternative_logps": -torch.rand(24, device="cuda")}
    check_objective(objectives.score_centered_tis(), inputs, alternative_inputs=others)
