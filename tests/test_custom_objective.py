"""`fused_linear_objective`: a custom function gives the same as over `fused_linear_logprobs` with autograd."""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
from helpers import PRECISION, frobenius_error, make_case, make_config, with_sets

from grpo_fused import (
    CandidateSets,
    GRPOLossConfig,
    check_objective,
    engines,
    fused_linear_grpo_loss,
    fused_linear_objective,
    objectives,
)
from grpo_fused.call.calls import CustomCall, named
from grpo_fused.engines import chunked, gradients

ENGINES = ["chunked", "native", "triton"]


def clipped(logps, entropies, *, advantages, old, weights):
    ratio = (logps - old).exp()
    loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return weights * (loss if entropies is None else loss - 0.1 * entropies)


def sequence_ratio(logps, entropies, *, advantages, old, weights, cu_seqlens):
    counts = cu_seqlens.diff()
    owner = torch.repeat_interleave(counts)
    log_ratio = logps - old
    mean = torch.zeros(len(counts), dtype=log_ratio.dtype).index_add(0, owner, log_ratio) / counts.clamp(min=1)
    return -weights * mean.exp()[owner] * advantages


def batch_mean(logps, entropies, *, advantages, old, weights, cu_seqlens):
    return -weights * (logps - logps.mean()) * advantages


OBJECTIVES = {"token": clipped, "sequence": sequence_ratio, "batch": batch_mean}


def inputs_of(case):
    shape, mask = case.completion_ids.shape, case.completion_mask
    return {
        "advantages": case.advantages.view(-1, 1).expand(shape),
        "old": case.options["old_per_token_logps"],
        "weights": mask.double() / mask.sum(),
    }


def run(case, scope, impl, *, upstream=1.0, freeze=False, **options):
    hidden = case.hidden_states.detach().requires_grad_()
    weight = case.lm_head_weight.detach().requires_grad_(not freeze)
    given = {n: x for n, x in case.options.items() if n in ("temperature", "lm_head_bias", "candidates")} | options
    out = fused_linear_objective(
        hidden, weight, case.completion_ids, OBJECTIVES[scope], case.completion_mask, inputs=inputs_of(case),
        scope=scope, impl=impl, **given,
    )  # fmt: skip
    (out.loss * upstream).backward()
    return out, hidden.grad, weight.grad


@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("scope", list(OBJECTIVES))
@pytest.mark.parametrize("options", [{}, {"max_scratch_bytes": 9000}, {"compact": False}, {"freeze": True},
                          {"freeze": True, "max_scratch_bytes": 9000, "compact": False}],
                         ids=lambda o: "+".join(o) or "plain")  # fmt: skip
def test_it_is_the_function_over_all_logits(scope, options, impl):
    dtype, tol = PRECISION[impl]
    case = make_case(0, temperature=0.7, extras=False)
    want = run(case, scope, "reference", with_entropy=scope == "token")
    got = run(case.to(dtype), scope, impl, with_entropy=scope == "token", **options)
    torch.testing.assert_close(got[0].loss.double(), want[0].loss, rtol=tol, atol=tol)
    torch.testing.assert_close(got[0].per_token_logps.double(), want[0].per_token_logps, rtol=tol, atol=10 * tol)
    assert frobenius_error(got[1], want[1]) <= 2 * tol
    if not options.get("freeze"):
        assert frobenius_error(got[2], want[2]) <= 2 * tol


@pytest.mark.parametrize("impl", ENGINES)
def test_a_frozen_head_is_not_scored_before(impl, monkeypatch):
    """dlogp/dh is made with the scores of a batch."""
    monkeypatch.delattr(type(engines.engine(impl)), "score")
    case = make_case(0, extras=False).to(PRECISION[impl].dtype)
    assert run(case, "batch", impl, freeze=True)[1].norm() > 0
    with pytest.raises(AttributeError):
        run(case, "batch", impl)


@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("scope", list(OBJECTIVES))
def test_candidate_sets(scope, impl):
    dtype, tol = PRECISION[impl]
    case = with_sets(make_case(1, extras=False), whole=0.3)
    want, got = run(case, scope, "reference"), run(case.to(dtype), scope, impl)
    torch.testing.assert_close(got[0].loss.double(), want[0].loss, rtol=tol, atol=tol)
    assert frobenius_error(got[1], want[1]) <= 2 * tol
    assert frobenius_error(got[2], want[2]) <= 2 * tol


@pytest.mark.parametrize("impl", ENGINES)
def test_dapo_written_by_hand_is_dapo(impl):
    dtype, tol = PRECISION[impl]
    case = make_case(2, B=6, T=9).to(dtype)
    config = make_config("dapo")
    want = case.run(config, impl=impl)

    def dapo(logps, entropies, *, advantages, old, weights):
        ratio = (logps - old).exp()
        return -weights * torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)

    hidden, weight = case.hidden_states.detach().requires_grad_(), case.lm_head_weight.detach().requires_grad_()
    out = fused_linear_objective(hidden, weight, case.completion_ids, dapo, case.completion_mask,
                                 inputs=inputs_of(case), impl=impl)  # fmt: skip
    out.loss.backward()
    torch.testing.assert_close(out.loss, want.out.loss, rtol=tol, atol=tol)
    assert frobenius_error(weight.grad, want.dweight) <= tol
    assert frobenius_error(hidden.grad, want.dhidden) <= tol


@pytest.mark.parametrize("scope", ["sequence", "batch"])
def test_packed_is_padded(scope):
    """With an empty sequence, which `cu_seqlens` keeps."""
    case = make_case(3, B=5, T=6, extras=False)
    keep = case.completion_mask
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), keep.sum(1).cumsum(0)])
    want = run(case, scope, "chunked")
    seen = []

    def objective(logps, entropies, **inputs):
        seen.append(inputs["cu_seqlens"].tolist())
        return OBJECTIVES[scope](logps, entropies, **inputs)

    hidden = case.hidden_states[keep].detach().requires_grad_()
    out = fused_linear_objective(
        hidden, case.lm_head_weight, case.completion_ids[keep], objective, cu_seqlens=offsets, scope=scope,
        inputs={name: x[keep] for name, x in inputs_of(case).items()}, impl="chunked",
    )  # fmt: skip
    out.loss.backward()
    torch.testing.assert_close(out.loss, want[0].loss)
    torch.testing.assert_close(hidden.grad, want[1][keep])
    assert [n for part in seen for n in torch.tensor(part).diff().tolist()] == keep.sum(1).tolist()
    assert 0 in keep.sum(1).tolist()


@pytest.mark.parametrize("scope", list(OBJECTIVES))
def test_products(scope, monkeypatch):
    """As many as `fused_linear_grpo_loss`: three if a chunk's coefficients depend on the chunk only."""
    calls = []
    products = {"logits_into": chunked, "hidden_gradient": gradients, "accumulate_weight_gradient": gradients}
    for name, module in products.items():
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, _n=name, _r=real, **k: (calls.append(_n), _r(*a, **k))[1])
    case = make_case(4, extras=False)
    run(case, scope, "chunked")
    assert len(calls) == {"token": 3, "sequence": 3, "batch": 4}[scope]
    calls.clear()
    level = {"token": {}, "sequence": {"importance_sampling_level": "sequence"}, "batch": {"top_entropy_quantile": 0.5}}
    case.run(make_config("dapo", **level[scope]), impl="chunked")
    assert len(calls) == {"token": 3, "sequence": 3, "batch": 4}[scope]


class TestMisbehaviour:
    """An invalid objective raises, and the error names what was expected."""

    def call(self, objective, impl="chunked", **options):
        case = make_case(5, dtype=torch.float32, extras=False)
        return fused_linear_objective(
            case.hidden_states.requires_grad_(), case.lm_head_weight, case.completion_ids, objective,
            case.completion_mask, impl=impl, **options,
        )  # fmt: skip

    @pytest.mark.parametrize("impl", ["chunked", "native", "reference"])
    @pytest.mark.parametrize(
        ("objective", "match"),
        [
            (
                lambda logps, entropies: logps.sum(),
                r"must return a real tensor \(\d+,\), as logps; got torch.float32 \(\)",
            ),
            (lambda logps, entropies: 1.0, "got float"),
            (lambda logps, entropies: logps[:, None], r"as logps; got torch.float32 \(\d+, 1\)"),
            (lambda logps, entropies: logps * 1j, r"must return a real tensor .* got torch.complex64 \(\d+,\)"),
            (lambda logps, entropies: logps.long(), r"must return a real tensor .* got torch.int64 \(\d+,\)"),
            (lambda logps, entropies: logps.detach(), "must depend on logps or entropies; got one without a gradient"),
            (lambda logps, entropies: logps * torch.nan, "value must be a number for every token; got"),
        ],
        ids=["sum", "number", "column", "complex", "integer", "detached", "nan"],
    )
    def test_results(self, objective, match, impl):
        with pytest.raises(ValueError, match=match):
            self.call(objective, impl)

    @pytest.mark.parametrize("impl", ["chunked", "native", "reference"])
    def test_a_gradient_that_is_nan(self, impl):
        def kink(x):
            return (x - x.detach()).abs().sqrt()

        with pytest.raises(ValueError, match="objective's gradient must be a number for every token"):
            self.call(lambda logps, _: kink(logps), impl).loss.backward()
        with pytest.raises(ValueError, match="objective's gradient by entropies must be a number for every token"):
            self.call(lambda logps, entropies: logps + kink(entropies), impl, with_entropy=True).loss.backward()

    @pytest.mark.parametrize("impl", ["chunked", "native", "reference"])
    @pytest.mark.parametrize("upstream", [torch.nan, torch.inf])
    def test_a_loss_whose_own_gradient_is_not_finite_is_no_fault_of_the_objective(self, impl, upstream):
        """0 times infinity is NaN."""
        (self.call(lambda logps, _: logps * (logps < -3), impl).loss * upstream).backward()

    def test_in_place(self):
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            self.call(lambda logps, entropies: logps.mul_(2))
        with pytest.raises(ValueError, match="must not change logps or entropies in place"):
            self.call(lambda logps, entropies: logps.mul_(2), "reference")
        with torch.no_grad(), pytest.raises(ValueError, match="must not change logps or entropies in place"):
            self.call(lambda logps, entropies: entropies.mul_(2), with_entropy=True)
        others = CandidateSets(torch.arange(28), torch.arange(29))
        with torch.no_grad(), pytest.raises(ValueError, match="must not change logps or entropies in place"):
            self.call(
                lambda logps, _, alternative_logps, **offsets: logps + 0 * alternative_logps.mul_(2).sum(),
                with_entropy=True,
                alternatives=others,
            )

    @pytest.mark.parametrize("impl", ["chunked", "native"])
    @pytest.mark.parametrize("scope", ["token", "batch"])
    @pytest.mark.parametrize("of", [lambda p: p, lambda p: (2 * p).exp()], ids=["leaf", "result"])
    def test_a_tensor_that_requires_grad(self, of, scope, impl):
        """Its gradient would be lost."""
        own = torch.ones((), requires_grad=True)
        for objective in (lambda logps, _, **kw: logps * of(own), lambda logps, _, **kw: of(own).expand(len(logps))):
            with pytest.raises(
                ValueError, match=r"a tensor of shape \(\) that requires grad, and its gradient would be"
            ):
                self.call(objective, impl, scope=scope)
        with torch.no_grad():
            self.call(lambda logps, _, **kw: logps * of(own), impl, scope=scope)
        self.call(lambda logps, _, **kw: logps * of(own.detach()), impl, scope=scope).loss.backward()
        self.call(lambda logps, _, **kw: logps * of(own), "reference", scope=scope).loss.backward()
        assert own.grad != 0

    @pytest.mark.parametrize("impl", ["chunked", "native"])
    def test_a_result_that_is_a_leaf(self, impl):
        with pytest.raises(
            ValueError, match=r"a tensor of shape \(\d+,\) that requires grad, and its gradient would be"
        ):
            self.call(lambda logps, _: torch.ones_like(logps, requires_grad=True), impl)

    def test_a_tensor_that_requires_grad_beside_frozen_heads(self):
        own, ids = torch.ones((), requires_grad=True), torch.zeros(1, 3, dtype=torch.int64)
        head = torch.randn(1, 3, 4), torch.randn(9, 4), ids
        with pytest.raises(ValueError, match="requires grad, and its gradient would be lost"):
            fused_linear_objective(*head, lambda logps, _: logps * own, impl="chunked")
        assert not fused_linear_objective(*head, lambda logps, _: 2 * logps, impl="chunked").loss.requires_grad
        assert not fused_linear_objective(*head, lambda logps, _: 2 * logps, impl="reference").loss.requires_grad

    @pytest.mark.parametrize(
        ("options", "error", "match"),
        [
            ({"inputs": {"x": torch.zeros(3)}}, ValueError, r"inputs\['x'\] must have shape \(4, 7\)"),
            (
                {"inputs": [torch.zeros(4, 7)]},
                TypeError,
                "inputs must be a mapping of names to tensors or None; got list",
            ),
            ({"inputs": {5: torch.zeros(4, 7)}}, ValueError, "must be valid argument names, .*; got 5"),
            ({"inputs": {"x": 3.0}}, TypeError, r"inputs\['x'\] must be a torch.Tensor; got float"),
            ({"inputs": {"x": torch.zeros(4, 7, requires_grad=True)}}, ValueError, "must be detached"),
            ({"inputs": {"cu_seqlens": torch.zeros(4, 7)}}, ValueError, "not cu_seqlens"),
            ({"scope": "tokens"}, ValueError, "scope must be one of token, sequence, batch; got 'tokens'"),
        ],
    )
    def test_arguments(self, options, error, match):
        with pytest.raises(error, match=match):
            self.call(lambda logps, entropies, x=None: logps, **options)


@pytest.mark.parametrize("what", ["loss", *(f"gradient by {x}" for x in ("logps", "entropies", "alternative_logps"))])
def test_check_objective_finds_what_alone_depends_on_the_part(what):
    def moved(x, weights):
        """Its value is that of each entry, its gradient is not."""
        return weights * (x - x.mean() + x.mean().detach())

    def objective(logps, entropies, *, weights, alternative_logps, alternative_offsets, q):
        owner = torch.repeat_interleave(alternative_offsets.diff())
        values = {
            "loss": logps + logps.detach().max(),
            "gradient by logps": moved(logps, weights),
            "gradient by entropies": logps + moved(entropies, weights),
            "gradient by alternative_logps": logps + torch.zeros_like(logps).index_add(0, owner, moved(alternative_logps, q)),
        }  # fmt: skip
        return values[what]

    given = {"weights": torch.linspace(1, 2, 12, dtype=torch.float64)}
    others = {"q": torch.linspace(1, 2, 24, dtype=torch.float64)}
    with pytest.raises(ValueError, match=f"the {what} of all and of parts differ by"):
        check_objective(objective, given, with_entropy=True, alternative_inputs=others)


@pytest.mark.parametrize(("coupling", "differs"), [(1e-7, True), (0.0, False)])
def test_check_objective_finds_a_weak_dependence(coupling, differs):
    def objective(logps, entropies):
        return logps + coupling * logps.detach().max()

    with pytest.raises(ValueError, match="of all and of parts differ") if differs else nullcontext():
        check_objective(objective)


def test_a_weight_that_is_nan_is_not_the_objectives_mistake():
    weight = torch.randn(9, 4).index_fill(0, torch.tensor([2]), torch.nan)
    head = torch.randn(1, 3, 4, requires_grad=True), weight, torch.zeros(1, 3, dtype=torch.int64)
    assert fused_linear_objective(*head, lambda logps, _: -logps, impl="chunked").loss.isnan()


def test_no_gradient_and_no_token():
    case = make_case(6, dtype=torch.float32, extras=False)
    given = {"inputs": inputs_of(case), "impl": "chunked"}
    want = run(case, "token", "reference")
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            out = fused_linear_objective(case.hidden_states, case.lm_head_weight, case.completion_ids, clipped,
                                         case.completion_mask, **given)  # fmt: skip
        torch.testing.assert_close(out.loss, want[0].loss.detach())
    nothing = torch.zeros_like(case.completion_mask)
    hidden = case.hidden_states.requires_grad_()
    out = fused_linear_objective(hidden, case.lm_head_weight, case.completion_ids, clipped, nothing, **given)
    out.loss.backward()
    assert out.loss == 0
    assert (hidden.grad == 0).all()


@pytest.mark.parametrize("impl", ["native", "chunked"])
@pytest.mark.parametrize("scope", ["token", "sequence", "batch", "candidates"])
def test_the_default_device_is_of_no_matter(scope, impl):
    hidden, weight, ids = torch.randn(2, 3, 8), torch.randn(40, 8), torch.zeros(2, 3, dtype=torch.int64)
    options = {"candidates": CandidateSets.from_padded(torch.arange(4).repeat(2, 3, 1))}
    options = options if scope == "candidates" else {"scope": scope}
    options["inputs"] = {"advantages": torch.randn(2, 3), "old_per_token_logps": -torch.ones(2, 3)}
    found = []
    for device in ("cpu", "meta"):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        objective = objectives.clip_cov(share=0.5, low=1e-9, high=9, generator=torch.Generator().manual_seed(0))
        objective = objective if scope == "batch" else lambda logps, _, **__: logps.square()
        with torch.device(device):
            out = fused_linear_objective(h, w, ids, objective, impl=impl, **options)
            out.loss.backward()
        found.append((out.loss, h.grad, w.grad))
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("impl", ["chunked", "reference"])
def test_impossible_tokens_have_no_gradient(impl):
    case = make_case(7, dtype=torch.float32, extras=False)
    bias = torch.zeros(29)
    bias[case.completion_ids[0, 0]] = -torch.inf

    def loss(hidden, mask):
        return fused_linear_objective(hidden, case.lm_head_weight, case.completion_ids, lambda logps, entropies: -logps,
                                      mask, lm_head_bias=bias, impl=impl).loss  # fmt: skip

    mask, hidden = case.completion_mask, case.hidden_states.requires_grad_()
    value = loss(hidden, mask)
    assert value.isfinite()
    torch.testing.assert_close(loss(hidden.detach(), mask), value.detach())  # where no gradient is wanted
    (got,) = torch.autograd.grad(value, hidden)
    (want,) = torch.autograd.grad(loss(hidden, mask & bias.isfinite()[case.completion_ids]), hidden)
    torch.testing.assert_close(got, want)


def test_an_objective_may_leave_out_entropies_or_log_probs():
    case = make_case(7, dtype=torch.float32, extras=False)
    hidden = case.hidden_states.requires_grad_()

    def gradient(objective, with_entropy):
        out = fused_linear_objective(hidden, case.lm_head_weight, case.completion_ids, objective, case.completion_mask,
                                     with_entropy=with_entropy, impl="chunked")  # fmt: skip
        return torch.autograd.grad(out.loss, hidden)[0]

    logps_alone = gradient(lambda logps, entropies: -logps, True)
    torch.testing.assert_close(logps_alone, gradient(lambda logps, entropies: -logps, False))
    both = gradient(lambda logps, entropies: entropies - logps, True)
    torch.testing.assert_close(gradient(lambda logps, entropies: entropies, True), both - logps_alone)


class Clipped(NamedTuple):
    """An objective that is a tuple, as a call and its parts are."""

    bounds: tuple[float, float]

    def __call__(self, logps, entropies, *, advantages, old, weights):
        ratio = (logps - old).exp()
        return -weights * torch.min(ratio * advantages, ratio.clamp(*self.bounds) * advantages)


def test_an_objective_may_be_a_tuple():
    case = make_case(7, dtype=torch.float32)
    losses = [
        fused_linear_objective(
            case.hidden_states, case.lm_head_weight, case.completion_ids, objective, case.completion_mask,
            inputs=inputs_of(case), with_entropy=False, impl="chunked",
        ).loss
        for objective in (Clipped((0.8, 1.2)), clipped)
    ]  # fmt: skip
    assert losses[0] == losses[1]


def test_an_input_may_have_the_name_of_an_argument():
    """It is an argument of the call, which ranks compare; the objective itself is none."""
    nothing = CustomCall._make([None] * len(CustomCall._fields))
    call = nothing._replace(objective=clipped, inputs={"objective": torch.ones(2)}, alternative_inputs={})
    assert dict(named(call))["inputs['objective']"] is call.inputs["objective"]


def test_under_autocast_checkpointing_and_compile():
    case = make_case(8, H=16, V=40, dtype=torch.float32, extras=False)
    given = inputs_of(case)

    def loss(hidden):
        return fused_linear_objective(hidden * 1.0, case.lm_head_weight, case.completion_ids, clipped,
                                      case.completion_mask, inputs=given, impl="chunked").loss  # fmt: skip

    hidden = case.hidden_states.requires_grad_()
    (want,) = torch.autograd.grad(loss(hidden), hidden)
    (again,) = torch.autograd.grad(torch.utils.checkpoint.checkpoint(loss, hidden, use_reentrant=False), hidden)
    assert torch.equal(again, want)
    (compiled,) = torch.autograd.grad(torch.compile(loss, backend="eager")(hidden), hidden)
    torch.testing.assert_close(compiled, want)
    with torch.autocast("cpu", torch.bfloat16):
        (rounded,) = torch.autograd.grad(loss(hidden), hidden)
    assert 1e-4 < frobenius_error(rounded, want) < 2e-2


@pytest.mark.parametrize("impl", ["reference", "chunked", "native"])
def test_an_objective_is_called_without_autocast(impl):
    case = make_case(8, H=16, V=40, dtype=torch.float32, extras=False)

    def summed(logps, entropies, **offsets):
        return logps @ torch.eye(len(logps))

    with torch.autocast("cpu", torch.bfloat16):
        tensors = case.hidden_states, case.lm_head_weight, case.completion_ids, summed
        out = fused_linear_objective(*tensors, case.completion_mask, scope="batch", impl=impl)
    want = out.per_token_logps.double().sum()
    torch.testing.assert_close(out.loss.double(), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("scope", ["token", "sequence", "batch"])
@pytest.mark.parametrize("impl", ["reference", "chunked", "native"])
def test_no_token_needs_no_gradient(impl, scope):
    case = make_case(8, H=16, V=40, dtype=torch.float32, extras=False)

    def objective(logps, entropies, **offsets):
        return -logps if len(logps) else logps.new_zeros(0)

    hidden, mask = case.hidden_states.requires_grad_(), torch.zeros_like(case.completion_mask)
    out = fused_linear_objective(
        hidden, case.lm_head_weight, case.completion_ids, objective, mask, scope=scope, impl=impl
    )
    (gradient,) = torch.autograd.grad(out.loss, hidden)
    assert out.loss == 0
    assert not gradient.any()


def test_check_objective():
    shape = (4, 9)
    inputs = {"advantages": torch.randn(shape), "old": -torch.rand(shape), "weights": torch.full(shape, 0.1)}
    for scope, objective in OBJECTIVES.items():
        check_objective(objective, inputs, scope)
    check_objective(clipped, inputs, "token", with_entropy=True)
    check_objective(lambda logps, *_, **__: logps * torch.rand(()), inputs, "batch")
    with torch.inference_mode(), torch.device("meta"):
        check_objective(lambda logps, _, alternative_logps, **__: logps * 2, alternative_inputs={})
    with pytest.raises(ValueError, match="scope 'token' must give each token the same .* differ by"):
        check_objective(lambda logps, entropies, **_: logps / len(logps), inputs)
    with pytest.raises(TypeError, match="objective must be a function; got str"):
        check_objective("gspo")
    with pytest.raises(ValueError, match="scope 'sequence' must give each sequence the same"):
        check_objective(batch_mean, inputs, "sequence")
    with pytest.raises(ValueError, match=r"two sequences or more; got \[1, 9\]"):
        check_objective(batch_mean, {"advantages": torch.randn(9)}, "sequence")
    with pytest.raises(ValueError, match="scope must be one of token, sequence, batch; got 'sequnce'"):
        check_objective(batch_mean, inputs, "sequnce")


def test_check_objective_of_two_tokens_and_of_another_seed():
    seen = []
    for seed in (0, 1, 1):
        check_objective(lambda logps, _, **__: seen.append(logps.tolist()) or logps, {"x": torch.ones(2)}, seed=seed)
    first, second, third = (seen[k : k + 3] for k in (0, 3, 6))  # the call on both and on each
    assert first != second == third


@pytest.mark.parametrize(("given", "count"), [({}, 64), ({"num_tokens": 16}, 16), ({"num_tokens": 17}, 24)])
def test_check_objective_calls_with_possible_numbers(given, count):
    """Of as many tokens as asked for, in eight sequences of one length."""
    seen = []

    def objective(logps, entropies, *, alternative_logps, alternative_offsets):
        seen.append((logps.detach(), entropies.detach(), alternative_logps.detach()))
        return logps + entropies

    check_objective(objective, with_entropy=True, alternative_inputs={}, **given)
    logps, entropies, alternative_logps = seen[0]
    assert (len(logps), len(entropies), len(alternative_logps)) == (count, count, 2 * count)
    assert logps.max() < 0 < entropies.min()
    assert alternative_logps.max() < 0


@pytest.mark.parametrize("size", [1e12, 0.0], ids=["large", "cancels"])
def test_check_objective_allows_for_rounding(size):
    """Of sums of large values, and of those that cancel."""
    weights = torch.tensor([1.0, -1.0]).double().repeat(32)

    def objective(logps, entropies, *, weights):
        return size * logps.sin() + weights * (logps - logps.detach() + 0.1)

    for seed in range(5):
        check_objective(objective, {"weights": weights}, seed=seed)


@pytest.mark.parametrize("scope", ["token", "batch"])
def test_large_losses_that_cancel_leave_the_others(scope):
    """The sum over tokens is in fp64."""
    weights = torch.tensor([[2.0**26, 1.0, -(2.0**26), 1.0, 1.0]])
    hidden, weight, ids = torch.randn(1, 5, 4, requires_grad=True), torch.randn(9, 4), torch.zeros(1, 5).long()

    def objective(logps, entropies, *, weights, **offsets):
        return weights * (1 + logps - logps.detach())

    out = fused_linear_objective(
        hidden, weight, ids, objective, inputs={"weights": weights}, scope=scope, impl="chunked"
    )
    assert out.loss == 3


def test_two_runs_are_bitwise_equal():
    case = make_case(9, B=8, T=16, H=32, V=500, dtype=torch.bfloat16, extras=False)
    first, second = (run(case, "token", "native") for _ in range(2))
    assert torch.equal(first[1], second[1])
    assert torch.equal(first[2], second[2])


def test_loss_scale_and_grpo_loss_agree_in_fp16():
    case = make_case(10, B=4, T=8, H=32, V=200, dtype=torch.float16, extras=False)
    exact = run(case.to(torch.float64), "token", "reference", upstream=4096.0)
    got = run(case, "token", "chunked", upstream=4096.0)
    assert frobenius_error(got[2], exact[2]) < 2e-3
    out = fused_linear_grpo_loss(case.hidden_states, case.lm_head_weight, case.completion_ids, case.advantages,
                                 case.completion_mask, config=GRPOLossConfig(), impl="chunked",
                                 old_per_token_logps=case.options["old_per_token_logps"])  # fmt: skip
    torch.testing.assert_close(out.loss, got[0].loss.detach(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("impl", ["reference", *ENGINES])
@pytest.mark.parametrize(
    ("objective", "config"),
    [
        (objectives.vanilla(dual_clip=None), make_config("dapo")),
        (objectives.sapo(), make_config("sapo")),
        (objectives.gspo(), make_config("dapo", importance_sampling_level="sequence")),
    ],
    ids=["vanilla", "sapo", "gspo"],
)
def test_objectives_of_the_package_are_its_loss_types(objective, config, impl):
    dtype, tol = PRECISION[impl]
    case = make_case(11, B=6, T=9).to(dtype)
    shape, mask = case.completion_ids.shape, case.completion_mask
    aggregation = "grpo" if config.loss_type == "sapo" else "dapo"
    inputs = {
        "advantages": case.advantages.view(-1, 1).expand(shape),
        "old_per_token_logps": case.options["old_per_token_logps"],
        "weights": objectives.token_weights(mask, aggregation),
    }
    if objective.__name__.startswith("gspo"):
        config = make_config("dapo", importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4)
    want = case.to(torch.float64).run(config, impl="reference")
    hidden, weight = case.hidden_states.detach().requires_grad_(), case.lm_head_weight.detach().requires_grad_()
    out = fused_linear_objective(hidden, weight, case.completion_ids, objective, mask, inputs=inputs,
                                 scope=objective.scope, impl=impl)  # fmt: skip
    out.loss.backward()
    tol = max(10 * tol, 1e-7)  # token_weights are fp32
    torch.testing.assert_close(out.loss.double(), want.out.loss.detach(), rtol=tol, atol=tol)
    assert frobenius_error(weight.grad, want.dweight) <= tol


def test_a_scope_that_is_too_narrow_is_refused():
    case = make_case(12, dtype=torch.float32, extras=False)
    with pytest.raises(ValueError, match="must be called with scope='sequence'; got 'token'"):
        fused_linear_objective(case.hidden_states, case.lm_head_weight, case.completion_ids, objectives.gspo())


def test_a_wider_scope_is_allowed():
    case = make_case(12, dtype=torch.float32, extras=False)
    inputs = inputs_of(case)
    inputs["old_per_token_logps"] = inputs.pop("old")
    token, sequence, batch = (
        fused_linear_objective(
            case.hidden_states, case.lm_head_weight, case.completion_ids, objectives.vanilla(), case.completion_mask,
            inputs=inputs, scope=scope,
        ).loss
        for scope in ("token", "sequence", "batch")
    )  # fmt: skip
    assert token == sequence == batch != 0


def test_empty_sequences_are_in_exactly_one_part():
    lengths, seen = [0, 2, 0, 3, 0, 0, 1, 0, 0], []
    hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(29, 8)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])

    def objective(logps, entropies, *, cu_seqlens):
        seen.append(cu_seqlens.diff().tolist())
        return -logps

    ids = torch.randint(0, 29, (6,))
    fused_linear_objective(
        hidden, weight, ids, objective, scope="sequence", cu_seqlens=offsets, impl="chunked", max_scratch_bytes=3700
    )
    assert len(seen) > 1
    assert sorted(length for part in seen for length in part) == sorted(lengths)
    assert [length for part in seen for length in part if length] == [2, 3, 1]
