"""The loss inside a training program: autograd, autocast, checkpointing, compilation, operators."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import pytest
import torch
import torch._dynamo.testing
from helpers import Case, frobenius_error, make_case, make_config
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from grpo_fused import (
    CandidateSets,
    GRPOLossConfig,
    fused_linear_divergence,
    fused_linear_grpo_loss,
    fused_linear_logprobs,
    fused_linear_objective,
    grpo_loss,
    selective_logprobs,
)
from grpo_fused.api import autograd, operators
from grpo_fused.call.calls import (
    LMHead,
    LogitsCall,
    LogitsGradientCall,
    LogprobsCall,
    LogprobsGradientCall,
    LossCall,
    LossInputs,
    Needs,
    ObjectiveCall,
    Run,
    Scores,
    TokenSets,
    attach,
    detach,
    fields_of,
    flat,
    named,
)

CONFIG = GRPOLossConfig(entropy_coef=0.02)


def call(case: Case, hidden, weight, config=CONFIG, **options):
    return fused_linear_grpo_loss(
        hidden, weight, case.completion_ids, case.advantages, case.completion_mask,
        old_per_token_logps=case.options["old_per_token_logps"], config=config, **options,
    )  # fmt: skip


@pytest.mark.parametrize("upstream", [0.0, -2.5, 1e-3, 1024.0])
@pytest.mark.parametrize("scratch", [None, 9000], ids=["one-chunk", "chunks"])
def test_upstream_gradient(upstream, scratch):
    case = make_case(0)
    one = case.run(CONFIG, max_scratch_bytes=scratch)
    scaled = case.run(CONFIG, max_scratch_bytes=scratch, upstream=upstream)
    for name, gradient in one.gradients().items():
        torch.testing.assert_close(scaled.gradients()[name], gradient * upstream, msg=name)


def test_an_upstream_gradient_without_a_value_is_not_read(monkeypatch):
    monkeypatch.setattr(autograd, "_graph_is_freed", lambda: True)
    with FakeTensorMode():
        assert autograd.scaled(torch.empty(4, 3), torch.ones(()), torch.bfloat16, "native").dtype == torch.bfloat16


def test_two_backward_passes_with_retain_graph():
    case = make_case(1)
    hidden, weight = case.hidden_states.requires_grad_(), case.lm_head_weight.requires_grad_()
    loss = call(case, hidden, weight).loss
    (3 * loss).backward(retain_graph=True)
    once = weight.grad.clone(), hidden.grad.clone()
    loss.backward()
    torch.testing.assert_close(weight.grad, once[0] * 4 / 3)
    torch.testing.assert_close(hidden.grad, once[1] * 4 / 3)


def test_second_use_of_the_same_inputs():
    case = make_case(2)
    hidden, weight = case.hidden_states.requires_grad_(), case.lm_head_weight.requires_grad_()
    other = GRPOLossConfig(loss_type="grpo")
    (call(case, hidden, weight).loss + call(case, hidden, weight, other).loss).backward()
    both = weight.grad
    weight.grad = None
    call(case, hidden, weight).loss.backward()
    call(case, hidden, weight, other).loss.backward()
    torch.testing.assert_close(weight.grad, both)


def test_double_backward_is_refused():
    case = make_case(3)
    hidden, factor = case.hidden_states.requires_grad_(), torch.ones((), dtype=torch.float64, requires_grad=True)
    loss = factor * call(case, hidden, case.lm_head_weight).loss
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        gradient.sum().backward()


def test_transforms_of_functions_are_refused():
    hidden, weight, ids = torch.randn(2, 3, 4), torch.randn(9, 4), torch.zeros(2, 3, dtype=torch.int64)

    def logps(x):
        return fused_linear_logprobs(x, weight, ids[: len(x)] if x.dim() == 3 else ids[0]).logps

    for transform in (torch.func.vmap(logps), torch.func.grad(lambda x: logps(x).sum())):
        with pytest.raises(RuntimeError, match="functorch transforms"):
            transform(hidden)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        logps(torch.autograd.forward_ad.make_dual(hidden, hidden))


def _twice(name, hidden, weight, impl):
    """A loss of hidden states [B, T, H] and weight, by one of the public functions."""
    ids, mask = torch.zeros(hidden.shape[:2], dtype=torch.int64), torch.ones(hidden.shape[:2])
    if name == "loss":
        return fused_linear_grpo_loss(hidden, weight, ids, mask, impl=impl).loss
    if name == "objective":
        return fused_linear_objective(hidden, weight, ids, lambda logps, _: logps.square(), impl=impl).loss
    if name == "logprobs":
        return fused_linear_logprobs(hidden, weight, ids, impl=impl).logps.square().sum()
    if name == "candidates":
        sets = CandidateSets.from_padded(torch.arange(4).repeat(*hidden.shape[:2], 1))
        return fused_linear_logprobs(hidden, weight, ids, candidates=sets, impl=impl).logps.sum()
    if name == "divergence":
        return fused_linear_divergence(hidden, weight, hidden.detach() + 1, weight.detach()).loss
    logits = hidden @ weight.T
    if name == "selective":
        return selective_logprobs(logits, ids).logps.sum()
    return grpo_loss(logits.log_softmax(-1)[..., 0], mask).loss


FUNCTIONS = ["loss", "objective", "logprobs", "candidates", "divergence", "selective", "grpo_loss"]


@pytest.mark.parametrize("impl", ["native", "chunked"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_second_backward_is_never_dropped(name, impl):
    """Also where no upstream gradient requires grad; `create_graph=True` alone passes, since libraries set it."""
    hidden, weight = torch.randn(2, 3, 4, requires_grad=True), torch.randn(40, 4, requires_grad=True)
    loss = _twice(name, hidden, weight, impl)
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    torch.testing.assert_close(gradient.detach(), torch.autograd.grad(_twice(name, hidden, weight, impl), hidden)[0])
    total = loss + 3 * gradient.square().sum()
    with pytest.raises(RuntimeError, match="no second derivatives"):
        (total - loss).backward(retain_graph=True)
    for inputs in (hidden, weight):
        with pytest.raises(RuntimeError, match="no second derivatives"):
            torch.autograd.grad(total, inputs, retain_graph=True, allow_unused=True)


@pytest.mark.parametrize("impl", ["native", "chunked"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_graph_of_gradients_reads_what_is_saved_once(name, impl):
    """Checkpointing unpacks it a single time, and a dW that was scaled in place is not what was saved."""
    hidden, weight = torch.randn(2, 3, 4, requires_grad=True), torch.randn(40, 4, requires_grad=True)
    inputs = (hidden, weight)
    want = torch.autograd.grad(3 * _twice(name, *inputs, impl), inputs)
    saved = checkpoint(lambda *given: 3 * _twice(name, *given, impl), *inputs, use_reentrant=False)
    freed = 3 * _twice(name, *inputs, impl)
    for loss, options in ((saved, {}), (freed, {"retain_graph": False})):
        for mine, x in zip(torch.autograd.grad(loss, inputs, create_graph=True, **options), want, strict=True):
            torch.testing.assert_close(mine.detach(), x)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_gradient_is_constant_in_no_input(name):
    """The factor of a loss, and what the hidden states were made of, are found by `torch.autograd.grad`."""
    factor, body = torch.tensor(2.0, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    hidden = torch.randn(2, 3, 4) @ body
    loss = factor * _twice(name, hidden, torch.randn(40, 4), "auto")
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    for inputs in (factor, body):
        with pytest.raises(RuntimeError, match="no second derivatives"):
            torch.autograd.grad(gradient.sum(), inputs, retain_graph=True, allow_unused=True)


@pytest.mark.parametrize("needs", list(itertools.product([True, False], repeat=3)), ids=str)
def test_frozen_parts(needs):
    case = make_case(4, lm_head_bias=torch.randn(29, dtype=torch.float64))
    want = case.run(CONFIG, impl="reference").gradients()
    tensors = {
        "dhidden": case.hidden_states.detach(),
        "dweight": case.lm_head_weight.detach(),
        "dbias": case.options["lm_head_bias"].detach(),
    }
    for need, x in zip(needs, tensors.values(), strict=True):
        x.requires_grad_(need)
    out = call(case, tensors["dhidden"], tensors["dweight"], lm_head_bias=tensors["dbias"])
    assert out.loss.requires_grad == any(needs)
    if any(needs):
        out.loss.backward()
    for need, (name, x) in zip(needs, tensors.items(), strict=True):
        assert (x.grad is not None) == need
        if need:
            torch.testing.assert_close(x.grad, want[name])


def test_no_grad_makes_no_gradients():
    case = make_case(5)
    with torch.no_grad():
        out = call(case, case.hidden_states.requires_grad_(), case.lm_head_weight)
    assert not out.loss.requires_grad
    assert out.metrics["gradient_tokens"] == 0


def test_results_besides_the_loss_are_detached():
    case = make_case(6)
    out = call(case, case.hidden_states.requires_grad_(), case.lm_head_weight)
    assert out.loss.requires_grad
    assert not out.per_token_logps.requires_grad
    assert not out.entropies.requires_grad
    assert not any(value.requires_grad for value in out.metrics.values())


def test_tied_embeddings():
    """One parameter is both the embedding and the head: its gradients add up."""
    case = make_case(7, V=29, H=12)
    grads = []
    for impl in ("reference", "chunked"):
        embedding = torch.nn.Embedding(29, 12, dtype=torch.float64)
        with torch.no_grad():
            embedding.weight.copy_(case.lm_head_weight)
        hidden = torch.tanh(embedding(case.completion_ids.roll(1, dims=1)))
        call(case, hidden, embedding.weight, impl=impl).loss.backward()
        grads.append(embedding.weight.grad)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("make", [
    lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    lambda x: torch.cat([x, x], dim=1)[:, : x.shape[1]],
    lambda x: torch.stack([x, x], dim=-1)[..., 0],
], ids=["transposed", "sliced", "strided"])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_inputs_that_are_not_contiguous(make, dtype):
    case = make_case(8, dtype=dtype)
    config = make_config("dapo", beta=0.1)
    want = case.run(config, impl="chunked")
    odd = Case(
        make(case.hidden_states), case.lm_head_weight.T.contiguous().T, make(case.completion_ids), case.advantages,
        make(case.completion_mask), {k: make(v) for k, v in case.options.items()},
    )  # fmt: skip
    assert not odd.hidden_states.is_contiguous()
    got = odd.run(config, impl="chunked")
    torch.testing.assert_close(got.out.loss, want.out.loss)
    torch.testing.assert_close(got.dhidden, want.dhidden)
    torch.testing.assert_close(got.dweight, want.dweight)


def test_inputs_are_not_changed():
    case = make_case(9)
    before = [case.hidden_states.clone(), case.lm_head_weight.clone()]
    case.run(CONFIG, softcap=2.0, temperature=0.5)
    assert torch.equal(case.hidden_states, before[0])
    assert torch.equal(case.lm_head_weight, before[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scratch", [None, 60_000], ids=["one-chunk", "chunks"])
def test_autocast_with_fp32_master_weights(dtype, scratch):
    """The computation is that of the cast inputs, with fp32-exact log-probs; gradients come back in fp32."""
    case = make_case(10, B=3, T=8, H=32, V=97, dtype=torch.float32, extras=False)
    exact = case.to(dtype).to(torch.float64)
    want = exact.run(CONFIG, impl="reference")
    with torch.autocast("cpu", dtype=dtype):
        got = case.run(CONFIG, max_scratch_bytes=scratch)
        scores = fused_linear_logprobs(case.hidden_states, case.lm_head_weight, case.completion_ids)
    mask = case.completion_mask
    assert (got.out.per_token_logps.double() - want.out.per_token_logps).abs().max() < 1e-5
    assert (scores.logps - got.out.per_token_logps)[mask].abs().max() < 1e-5
    for name, gradient in got.gradients().items():
        assert gradient.dtype == torch.float32
        assert frobenius_error(gradient, want.gradients()[name]) < torch.finfo(dtype).eps, name


@pytest.mark.parametrize("impl", ["chunked", "reference"])
def test_autocast_leaves_float64(impl):
    case = make_case(0)
    want = case.run(CONFIG, impl=impl)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = case.run(CONFIG, impl=impl)
    assert torch.equal(got.out.loss, want.out.loss)
    assert torch.equal(got.dweight, want.dweight)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant):
    case = make_case(11)
    grads = []
    for wrap in (False, True):
        hidden, weight = case.hidden_states.detach().requires_grad_(), case.lm_head_weight.detach().requires_grad_()

        def step(h, hidden_weight=weight):
            return call(case, torch.tanh(h), hidden_weight).loss

        loss = checkpoint(step, hidden, use_reentrant=reentrant) if wrap else step(hidden)
        loss.backward()
        grads.append((loss.detach(), hidden.grad, weight.grad))
    for plain, recomputed in zip(*grads, strict=True):
        torch.testing.assert_close(recomputed, plain)


def _programs(case: Case, weight):
    mask, old = case.completion_mask, case.options["old_per_token_logps"]

    def fused(h):
        out = call(case, torch.tanh(h), weight, temperature=0.9)
        return out.loss * 2 + 0 * out.metrics["entropy"]

    def logprobs(h):
        out = fused_linear_logprobs(torch.tanh(h), weight, case.completion_ids, mask, with_entropy=True)
        return (out.logps * old).sum() + out.entropies.sum()

    def alternatives(h):
        ids = case.completion_ids.reshape(-1)
        sets = CandidateSets(ids.repeat_interleave(2) % 7, torch.arange(0, 2 * ids.numel() + 1, 2))
        out = fused_linear_logprobs(torch.tanh(h), weight, case.completion_ids, mask, alternatives=sets)
        return out.logps.sum() + out.alternative_logps.sin().sum()

    def from_logps(h):
        out = fused_linear_logprobs(torch.tanh(h), weight, case.completion_ids, mask)
        return grpo_loss(out.logps, case.advantages, mask, old_per_token_logps=old, config=GRPOLossConfig()).loss

    def from_logits(h):
        return selective_logprobs(torch.tanh(h) @ weight.T, case.completion_ids, mask).logps.sum()

    return {f.__name__: f for f in (fused, logprobs, alternatives, from_logps, from_logits)}


@pytest.mark.parametrize("name", ["fused", "logprobs", "alternatives", "from_logps", "from_logits"])
def test_torch_compile_of_a_caller(name):
    """One graph, no break, the same numbers."""
    case = make_case(12, dtype=torch.float32)
    results = []
    for compiled in (False, True):
        torch._dynamo.reset()
        weight = torch.nn.Parameter(case.lm_head_weight.detach().clone())
        hidden = case.hidden_states.detach().requires_grad_()
        program = _programs(case, weight)[name]
        if compiled:
            program = torch.compile(program, fullgraph=True, backend="aot_eager")
        loss = program(hidden)
        loss.backward()
        results.append((loss.detach(), hidden.grad, weight.grad))
    for eager, graph in zip(*results, strict=True):
        torch.testing.assert_close(graph, eager)


@pytest.mark.gate(keep=lambda impl, dtype: dtype == {"chunked": torch.float32, "native": torch.bfloat16}[impl])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("impl", ["chunked", "native"])
def test_log_probs_of_a_frozen_head_are_one_graph(impl, dtype):
    torch._dynamo.reset()
    hidden, weight = torch.randn(2, 3, 32, dtype=dtype), torch.randn(50, 32, dtype=dtype)
    ids = torch.randint(50, (2, 3))

    def program(h):
        return fused_linear_logprobs(h, weight, ids, impl=impl).logps.sum()

    found = []
    for function in (program, torch.compile(program, fullgraph=True, backend="aot_eager")):
        h = hidden.clone().requires_grad_()
        found.append(torch.autograd.grad(function(h), h)[0])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_compiled_caller_does_not_recompile_for_each_length():
    torch._dynamo.reset()
    frames = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    weight = torch.randn(29, 12, requires_grad=True)

    @torch.compile(backend=frames, fullgraph=True, dynamic=True)
    def program(hidden, ids, advantages, mask):
        return fused_linear_grpo_loss(hidden, weight, ids, advantages, mask).loss

    for length in (5, 6, 9, 17):
        case = make_case(13, T=length, dtype=torch.float32)
        hidden = case.hidden_states.requires_grad_()
        got = program(hidden, case.completion_ids, case.advantages, case.completion_mask)
        want = fused_linear_grpo_loss(hidden, weight, case.completion_ids, case.advantages, case.completion_mask).loss
        torch.testing.assert_close(got, want)
    assert frames.frame_count <= 2


def _operator_calls():
    case = make_case(14, dtype=torch.float32)
    h, w, ids, mask = case.hidden_states, case.lm_head_weight, case.completion_ids, case.completion_mask
    old, ref = case.options["old_per_token_logps"].float(), case.options["ref_per_token_logps"].float()
    config = GRPOLossConfig(beta=0.1, entropy_coef=0.1).encoded
    head, run, sets = LMHead(w, temperature=0.9), Run("chunked"), TokenSets()
    inputs, needs = LossInputs(case.advantages.float(), mask, old, ref), Needs(True, True, False)
    scored, logits = LogprobsCall(h, head, ids, mask, sets, True, run), LogitsCall(h @ w.T, ids, mask, None, 0.9, True)
    flat_old = old.flatten()
    yield operators.linear_grpo_loss, LossCall(h, head, ids, inputs, None, sets, config, True, needs, run)
    exact = GRPOLossConfig(beta=0.1, kl_estimator="exact").encoded
    other = h + 0.1, LMHead(w)
    no_ref = inputs._replace(ref_per_token_logps=None)
    yield operators.linear_grpo_loss, LossCall(h, head, ids, no_ref, None, sets, exact, True, needs, run, *other)
    with_others = scored._replace(alternatives=TokenSets(ids.reshape(-1), torch.arange(ids.numel() + 1)))
    narrow = LMHead(w.bfloat16(), compute_dtype=torch.bfloat16)
    yield operators.linear_logprobs, scored._replace(hidden_states=h.bfloat16(), lm_head=narrow, with_dhidden=True)
    for score, others in ((scored, None), (with_others, flat_old)):
        yield operators.linear_logprobs, score
        nothing = old.new_empty(0)
        scores = Scores(old, old.abs(), flat_old, flat_old, nothing if others is None else others, nothing)
        gradient = LogprobsGradientCall(score, scores, old, None, others, needs)
        yield operators.linear_logprobs_gradient, gradient._replace(scores=None, dalternative_logps=None)
        yield operators.linear_logprobs_gradient, gradient
    yield operators.grpo_objective, ObjectiveCall(old * 1.01, old.abs(), inputs, None, config)
    yield operators.selective_logprobs, logits
    yield operators.selective_logprobs_gradient, LogitsGradientCall(logits, old, None)


@pytest.mark.parametrize("operator", list(_operator_calls()), ids=lambda pair: pair[0].body.__name__)
def test_opcheck(operator):
    op, call = operator
    torch.library.opcheck(op.traced, tuple(flat(call)))


def test_a_call_survives_flat_and_detach():
    for _, call in _operator_calls():
        bare, tensors = detach(call)
        assert not any(isinstance(value, torch.Tensor) for value in flat(bare))
        again = attach(bare, tensors)
        assert type(again) is type(call)
        assert all(a is b for a, b in zip(flat(again), flat(call), strict=True))
        assert [name for name, _ in named(call)] == list(fields_of(type(call)))


def test_fp16_gradient_operands_are_scaled_against_underflow(monkeypatch):
    """On CUDA fp16 dlogits feed the tensor cores; here the same code runs on CPU products."""
    from grpo_fused.engines import chunked, gradients, products

    case = make_case(15, B=2, T=16, H=32, V=97, dtype=torch.float16)
    tiny = {"num_items_in_batch": 3e8}  # dlogits around 1e-9: all 0 in unscaled fp16
    exact = case.to(torch.float64).run(GRPOLossConfig(), impl="reference", **tiny, upstream=1e6)
    for module in (chunked, gradients, products):
        monkeypatch.setattr(module, "gradient_dtype", lambda head: torch.float16)
    for scratch in (None, 60_000):
        got = case.run(GRPOLossConfig(), impl="chunked", max_scratch_bytes=scratch, **tiny, upstream=1e6)
        assert frobenius_error(got.dweight, exact.dweight) < 2e-3


@pytest.mark.parametrize("impl", ["chunked", "native"])
def test_several_upstream_gradients_at_once(impl):
    case = make_case(0).to(torch.float32)
    hidden, weight = case.hidden_states.requires_grad_(), case.lm_head_weight.requires_grad_()
    options = {**case.options, "impl": impl}
    for name in ("ref_per_token_logps", "sampling_per_token_logps"):
        options.pop(name)
    call = fused_linear_grpo_loss(hidden, weight, case.completion_ids, case.advantages, case.completion_mask, **options)
    upstream = torch.tensor([1.0, -2.0, 0.0])
    batched = torch.autograd.grad(call.loss, (hidden, weight), upstream, is_grads_batched=True, retain_graph=True)
    single = torch.autograd.grad(call.loss, (hidden, weight))
    for several, one in zip(batched, single, strict=True):
        torch.testing.assert_close(several, torch.stack([one * u for u in upstream]))


@pytest.mark.parametrize("impl", ["chunked", "native"])
def test_several_upstream_gradients_of_logprobs_at_once(impl):
    case = make_case(0).to(torch.float32)
    leaves = case.hidden_states.requires_grad_(), case.lm_head_weight.requires_grad_()
    logps = fused_linear_logprobs(*leaves, case.completion_ids, case.completion_mask, impl=impl).logps
    upstream = torch.randn(3, *logps.shape)
    batched = torch.autograd.grad(logps, leaves, upstream, is_grads_batched=True, retain_graph=True)
    single = [torch.autograd.grad(logps, leaves, one, retain_graph=True) for one in upstream]
    for several, ones in zip(batched, zip(*single, strict=True), strict=True):
        torch.testing.assert_close(several, torch.stack(ones))


class Subclass(torch.Tensor):
    """Any."""


class Mode(TorchDispatchMode):
    """Any mode that sees operators."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("where", "made", "count"),
    [
        (nullcontext, torch.clone, 0),
        (nullcontext, torch.nn.Parameter, 0),
        (nullcontext, lambda weight: weight.as_subclass(Subclass), 1),
        (Mode, torch.clone, 1),
        (lambda: torch.device("meta"), torch.clone, 1),
    ],
    ids=["eager", "a parameter", "a subclass", "a mode of dispatch", "a default device"],
)
def test_an_operator_is_called_where_it_is_seen(where, made, count, monkeypatch):
    """Elsewhere its body is, which is quicker; the result is the same."""
    case, seen, traced = make_case(3, dtype=torch.float32), [], operators.linear_logprobs.traced
    given = case.hidden_states, made(case.lm_head_weight), case.completion_ids, case.completion_mask
    want = fused_linear_logprobs(*given).logps
    monkeypatch.setattr(operators.linear_logprobs, "traced", lambda *values: (seen.append(values), traced(*values))[1])
    with where():
        got = fused_linear_logprobs(*given).logps
    assert len(seen) == count
    assert torch.equal(got, want)


def test_operators_are_left_out_of_cuda_graphs():
    """They wait for the device, which `torch.compile(mode="reduce-overhead")` would capture."""
    names = [name for name in OPDEFS if name.startswith("grpo_fused::")]
    assert len(names) > 5
    for name in names:
        operator = getattr(torch.ops.grpo_fused, name.removeprefix("grpo_fused::")).default
        assert torch.Tag.cudagraph_unsafe in operator.tags, name
