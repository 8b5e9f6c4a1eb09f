"""Failures seen in other GRPO losses, each ruled out by design: every test here names one."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import PRECISION, Case, Result, assert_engine_matches, assert_same, make_case, make_config, pack

from grpo_fused import GRPOLossConfig, fused_linear_grpo_loss, fused_linear_logprobs, grpo_loss
from grpo_fused.call import validation

IMPLS = ["reference", "chunked", "native", "triton"]
ENGINES = IMPLS[1:]
LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo", "gmpo"]


def cases_of(impls: list[str]) -> list[tuple[str, str]]:
    """(impl, loss type). The triton engine gets coefficients, not loss types: one by token, one by sequence."""
    return [(impl, t) for impl in impls for t in LOSS_TYPES if impl != "triton" or t in ("dapo", "vespo")]


def assert_finite_and_right(impl: str, case: Case, config: GRPOLossConfig) -> Result:
    """Gradients of the float64 reference, all finite and not 0."""
    want = assert_engine_matches(impl, case, config, variants=[{}])
    assert want.out.loss.isfinite()
    for name, gradient in want.gradients().items():
        assert gradient.isfinite().all(), name
        assert gradient.any(), name
    return want


@pytest.mark.pairs
@pytest.mark.gate(keep=lambda impl, level, **_: impl != "triton" or level == "token")
@pytest.mark.parametrize(("impl", "loss_type"), cases_of(ENGINES))
@pytest.mark.parametrize("sign", [-1.0, 0.0, 1.0], ids=["bad", "neutral", "good"])
@pytest.mark.parametrize("shift", [-1e4, 1e4], ids=["overflow", "underflow"])
@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token"])
def test_overflowing_ratio_of_an_active_token(loss_type, level, shift, sign, impl):
    """A clipped active token whose ratio overflows gives a NaN gradient elsewhere, A = 0 a NaN loss."""
    if loss_type == "gmpo" and level != "token":
        pytest.skip("gmpo has no levels")
    case = make_case(0).to(PRECISION[impl].dtype)
    case.advantages = torch.full_like(case.advantages, sign)
    case.options["old_per_token_logps"][2, 1:3] += shift
    config = make_config(loss_type, importance_sampling_level=level, beta=0.1)
    assert_finite_and_right(impl, case, config)
    if sign == 0.0:  # only the KL pulls, and a policy term of 0 is exactly 0
        without = make_config(loss_type, importance_sampling_level=level)
        zero = case.run(without, impl=impl)
        assert zero.out.loss == 0
        assert all(gradient.eq(0).all() for gradient in zero.gradients().values())


@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_reference_far_above_the_policy(estimator, impl):
    """Clamping only the exponent of k3 would flip the gradient's sign beyond q = 20: descent must raise the log-prob."""
    case = make_case(1).to(PRECISION[impl].dtype)
    case.options["ref_per_token_logps"] = case.options["ref_per_token_logps"] + 500.0
    config = make_config("dapo", beta=0.1, kl_estimator=estimator, use_bias_correction_kl=False)
    assert_finite_and_right(impl, case, config)
    logps = torch.tensor([[-600.0]], requires_grad=True)
    out = grpo_loss(logps, torch.zeros(1), ref_per_token_logps=torch.tensor([[-1.0]]), config=config)
    out.loss.backward()
    slope = {"k1": 1.0, "k2": -599.0, "k3": 1.0 - math.exp(20.0)}[estimator]
    assert logps.grad.item() == pytest.approx(0.1 * slope)


@pytest.mark.pairs
@pytest.mark.parametrize(("impl", "loss_type"), cases_of(IMPLS))
@pytest.mark.parametrize("compact", [True, False], ids=["compact", "dense"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_masked_positions_may_have_any_values(loss_type, layout, compact, impl):
    """NaN and inf in states, log-probs, advantages and ratios, ids of -100 and beyond V: exactly no effect."""
    per_token = loss_type != "gmpo"
    config = make_config(loss_type, beta=0.1, entropy_coef=0.01)
    clean = make_case(2, per_token_advantages=per_token).to(PRECISION[impl].dtype)
    poisoned = poison(clean)
    if layout == "packed":
        clean, poisoned = pack(clean), pack(poisoned)
    want = clean.run(config, impl=impl, compact=compact)
    got = poisoned.run(config, impl=impl, compact=compact)
    mask = clean.completion_mask
    assert torch.equal(got.out.loss, want.out.loss)
    assert torch.equal(got.dweight, want.dweight)
    assert torch.equal(got.dhidden, want.dhidden)
    assert got.dhidden[~mask].eq(0).all()
    assert got.out.per_token_logps[~mask].eq(0).all()
    assert got.out.entropies[~mask].eq(0).all()
    assert got.dhidden[mask].ne(0).any()
    for name, value in want.out.metrics.items():
        assert torch.equal(got.out.metrics[name], value), name


def poison(case: Case) -> Case:
    """The same case with NaN and inf in every masked position."""
    hole = ~case.completion_mask
    poisoned = Case(
        case.hidden_states.clone(),
        case.lm_head_weight,
        case.completion_ids.clone(),
        case.advantages.clone(),
        case.completion_mask,
        {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in case.options.items()},
    )
    poisoned.hidden_states[hole] = torch.nan
    poisoned.hidden_states[0][hole[0]] = torch.inf
    poisoned.completion_ids[hole] = -100
    poisoned.completion_ids[0][hole[0]] = 10**9
    if poisoned.advantages.dim() == 2:
        poisoned.advantages[hole] = torch.nan
    for value in poisoned.options.values():
        if isinstance(value, torch.Tensor) and value.shape == hole.shape:
            value[hole] = torch.nan
            value[2][hole[2]] = -torch.inf
    return poisoned


@pytest.mark.parametrize(("impl", "loss_type"), cases_of(IMPLS))
@pytest.mark.parametrize("compact", [True, False], ids=["compact", "dense"])
def test_batch_without_an_active_token(loss_type, compact, impl):
    """The loss is 0 and still differentiable."""
    config = make_config(loss_type, beta=0.1, entropy_coef=0.1)
    case = make_case(3).to(PRECISION[impl].dtype)
    case.completion_mask[:] = False
    result = case.run(config, impl=impl, compact=compact)
    assert result.out.loss == 0
    assert result.dhidden.eq(0).all()
    assert result.dweight.eq(0).all()
    for name, value in result.out.metrics.items():
        if name in ("clip_ratio/low_min", "clip_ratio/high_max"):
            assert value.isnan(), name
        else:
            assert value.isfinite(), name


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape", [(0, 5), (3, 0)], ids=str)
def test_batch_of_nothing(shape, impl):
    hidden = torch.zeros(*shape, 4, requires_grad=True)
    weight = torch.randn(7, 4, requires_grad=True)
    ids = torch.zeros(shape, dtype=torch.int64)
    for config in (
        make_config("dapo", entropy_coef=0.1, top_entropy_quantile=0.5),
        make_config("grpo"),
        make_config("vespo"),
    ):
        out = fused_linear_grpo_loss(hidden, weight, ids, torch.zeros(shape[0]), config=config, impl=impl)
        out.loss.backward()
        assert out.loss == 0
        assert weight.grad.eq(0).all()


def test_all_advantages_zero_costs_no_gradient_work():
    case = make_case(4)
    case.advantages = torch.zeros_like(case.advantages)
    for level in ("token", "sequence"):
        result = case.run(make_config("dapo", importance_sampling_level=level))
        assert result.out.loss == 0
        assert result.out.metrics["gradient_tokens"] == 0
        assert result.dweight.eq(0).all()
        assert result.out.per_token_logps[case.completion_mask].ne(0).all(), "their metrics are still computed"
        assert result.out.metrics["entropy"] > 0


def test_rows_without_gradient_are_skipped_exactly():
    """Tokens with advantage 0 or importance-sampling ratio 0, and clipped ones, need no gradient work."""
    case = make_case(5, B=4, T=20, drift=0.5, masked=0.2)
    case.advantages[2] = 0.0
    ratio = torch.ones(4, 20, dtype=torch.float64)
    ratio[3, ::2] = 0.0
    case.options["importance_sampling_ratio"] = ratio
    config = make_config("dapo")
    result = case.run(config)
    want = case.run(config, impl="reference")
    r = (want.out.per_token_logps - case.options["old_per_token_logps"]).exp()
    A = case.advantages.unsqueeze(1)
    live = torch.where(A > 0, r <= 1.2, r >= 0.8) & (A != 0) & (ratio != 0) & case.completion_mask
    assert 0 < live.sum() < case.completion_mask.sum()
    assert result.out.metrics["gradient_tokens"] == live.sum()
    assert torch.allclose(result.dweight, want.dweight, atol=1e-13)


def test_skipping_rows_without_metrics():
    case = make_case(6)
    case.advantages[2] = 0.0
    full, lean = case.run(make_config("dapo")), case.run(make_config("dapo"), with_metrics=False)
    assert torch.equal(full.out.loss, lean.out.loss)
    assert torch.equal(full.dweight, lean.dweight)
    assert lean.out.entropies is None
    assert lean.out.metrics.keys() == {"policy_loss", "active_tokens", "gradient_tokens"}
    assert lean.out.per_token_logps[2].eq(0).all()


def test_entropy_quantile_without_metrics():
    """It is taken over all active tokens: those that cannot have a gradient are scored for it, also without metrics."""
    case = make_case(6)
    case.advantages[2] = 0.0
    config = make_config("dapo", top_entropy_quantile=0.4)
    want, lean = case.run(config, impl="reference"), case.run(config, with_metrics=False)
    torch.testing.assert_close(lean.out.loss, want.out.loss)
    torch.testing.assert_close(lean.dweight, want.dweight)
    assert lean.out.entropies[2][case.completion_mask[2]].ne(0).all()


@pytest.mark.parametrize("coef", [0.1, -0.1])
def test_entropy_bonus_without_metrics(coef):
    """Entropies are computed for it, also where it is a penalty."""
    case, config = make_case(6), make_config("dapo", entropy_coef=coef)
    want, lean = case.run(config, impl="reference"), case.run(config, with_metrics=False)
    torch.testing.assert_close(lean.out.loss, want.out.loss)
    torch.testing.assert_close(lean.dweight, want.dweight)


def test_token_level_luspo_gradient():
    """Wrong by 63-84 % in other losses: each token's loss must be summed over its sequence, not multiplied by its length."""
    case = make_case(7, extras=False)
    config = make_config("luspo")
    logps = case.options["old_per_token_logps"].clone().requires_grad_()
    grpo_loss(
        logps, case.advantages, case.completion_mask, old_per_token_logps=logps.detach(), config=config
    ).loss.backward()
    expected = -case.advantages.unsqueeze(1) * case.completion_mask / case.advantages.shape[0]
    torch.testing.assert_close(logps.grad, expected)


def test_per_token_advantages_where_sequences_share_a_chunk():
    """Silently wrong in other losses: [B, T] advantages must stay with their tokens."""
    case = make_case(8, per_token_advantages=True)
    result = case.run(make_config("dapo"))
    parts = []
    total = case.completion_mask.sum()
    for b in range(4):
        one = Case(
            case.hidden_states[b : b + 1], case.lm_head_weight, case.completion_ids[b : b + 1],
            case.advantages[b : b + 1], case.completion_mask[b : b + 1],
            {"old_per_token_logps": case.options["old_per_token_logps"][b : b + 1], "num_items_in_batch": total},
        )  # fmt: skip
        parts.append(one.run(make_config("dapo")))
    torch.testing.assert_close(sum(part.out.loss for part in parts), result.out.loss)
    torch.testing.assert_close(sum(part.dweight for part in parts), result.dweight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logprobs_never_above_zero(dtype):
    """A certain token's log-prob is slightly below 0, not 1e-7: its exponential is a probability."""
    hidden = torch.eye(8, dtype=dtype).unsqueeze(0) * 60
    weight = torch.eye(8, dtype=dtype)
    logps = fused_linear_logprobs(hidden, weight, torch.arange(8).unsqueeze(0)).logps
    assert (logps < 0).all()
    torch.testing.assert_close(logps, torch.full_like(logps, -7 * math.exp(-60)), rtol=1e-5, atol=0)


def test_65536_tokens_and_more():
    """The limit of a CUDA grid's second dimension crashes other losses."""
    n = 65536 + 3
    case = make_case(9, B=3, T=n // 3, H=2, V=3, dtype=torch.float32, masked=0.0)
    result, want = case.run(GRPOLossConfig()), case.to(torch.float64).run(GRPOLossConfig(), impl="reference")
    assert result.out.metrics["active_tokens"] == (n // 3) * 2
    assert_same(result, want, tol=2e-5)


@pytest.mark.parametrize("impl", ENGINES)
def test_impossible_tokens(impl):
    """-inf logits (a masked vocabulary entry): 0 * -inf counts 0 in entropy and gradient."""
    case = make_case(10, V=11).to(PRECISION[impl].dtype)
    bias = torch.zeros(11, dtype=torch.float64)
    bias[3] = -torch.inf
    case.completion_ids[case.completion_ids == 3] = 4
    case.options["lm_head_bias"] = bias
    want = assert_finite_and_right(impl, case, make_config("dapo", entropy_coef=0.3))
    assert want.out.entropies.isfinite().all()
    result = case.run(make_config("dapo", entropy_coef=0.3), impl=impl)
    assert result.dweight[3].eq(0).all()


@pytest.mark.pairs
@pytest.mark.gate(keep=lambda impl, level, estimator: impl != "triton" or level == "token")
@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_active_token_of_probability_zero(level, estimator, impl):
    """Its log-prob is -inf, for the policy or the reference: no gradient of its own, and nothing becomes NaN."""
    case = make_case(11, V=11).to(PRECISION[impl].dtype)
    bias = torch.zeros(11, dtype=torch.float64)
    bias[3] = -torch.inf
    case.completion_ids[2, :] = 3
    case.completion_mask[2, :] = True
    case.options["ref_per_token_logps"][3, 0] = -torch.inf
    case.options["lm_head_bias"] = bias
    for _, loss_type in cases_of([impl]):
        if loss_type == "gmpo" and level != "token":
            continue
        config = make_config(loss_type, beta=0.1, importance_sampling_level=level, kl_estimator=estimator)
        want = assert_finite_and_right(impl, case, config)
        assert want.out.per_token_logps[2].eq(-torch.inf).all()


@pytest.mark.parametrize(("impl", "loss_type"), cases_of(IMPLS))
@pytest.mark.parametrize("on_policy", [True, False])
def test_nan_in_an_active_state_propagates(loss_type, on_policy, impl, monkeypatch):
    """As on a GPU, where values are not checked: loss and gradient are NaN together, so training stops."""
    monkeypatch.setattr(validation, "values_are_checked", lambda device: False)
    case = make_case(12).to(PRECISION[impl].dtype)
    case.hidden_states[2][case.completion_mask[2]] = torch.nan
    if on_policy:
        case.options["old_per_token_logps"] = None
    result = case.run(make_config(loss_type), impl=impl)
    assert result.out.loss.isnan()
    assert result.dweight.isnan().any()


@pytest.mark.parametrize("reentrant", [None, True, False], ids=["no_grad", "reentrant", "non-reentrant"])
def test_loss_without_metrics_needs_no_gradient_to_be_right(reentrant):
    case = make_case(13)
    case.advantages[2] = 0.0
    want = case.run(make_config("dapo")).out.loss

    def loss(hidden):
        return fused_linear_grpo_loss(
            hidden, case.lm_head_weight, case.completion_ids, case.advantages, case.completion_mask,
            old_per_token_logps=case.options["old_per_token_logps"], with_metrics=False,
        ).loss  # fmt: skip

    if reentrant is None:
        with torch.no_grad():
            assert torch.equal(loss(case.hidden_states), want)
    else:
        from torch.utils.checkpoint import checkpoint

        got = checkpoint(loss, case.hidden_states.requires_grad_(), use_reentrant=reentrant)
        assert torch.equal(got.detach(), want.detach())


def test_tiny_fp16_gradients_are_rounded_after_the_loss_scale():
    """Mean over 2e5 tokens: fp16 gradients underflow unless the loss scale is multiplied in before they are rounded."""
    case = make_case(14, B=4, T=16, H=32, V=64, dtype=torch.float16)
    tiny = {"num_items_in_batch": 2e5}
    want = case.to(torch.float64).run(make_config("dapo"), impl="reference", upstream=65536.0, **tiny)
    got = case.run(make_config("dapo"), upstream=65536.0, **tiny)
    for name, gradient in got.gradients().items():
        assert (gradient.double() - want.gradients()[name]).norm() <= 2e-3 * want.gradients()[name].norm(), name
    old = case.options["old_per_token_logps"].half()
    logps = (old + 0.05).requires_grad_()
    out = grpo_loss(logps, case.advantages, case.completion_mask, old_per_token_logps=old, num_items_in_batch=1e9)
    (out.loss * 2.0**30).backward()
    assert logps.grad[case.completion_mask].ne(0).any()


def test_fp32_bias_on_a_bf16_head_is_not_rounded():
    case = make_case(15, dtype=torch.bfloat16)
    bias = torch.randn(29) * 8
    got = case.run(make_config("dapo"), lm_head_bias=bias)
    want = case.to(torch.float64).run(make_config("dapo"), impl="reference", lm_head_bias=bias.double())
    assert (got.out.per_token_logps - want.out.per_token_logps).abs().max() <= 1e-4


def test_vespo_bounds_a_tiny_correction():
    """log IS has the lower bound log 1e-8, not -20."""
    case = make_case(16)
    case.options["importance_sampling_ratio"] = torch.full((4, 7), 1e-12, dtype=torch.float64)
    case.options["old_per_token_logps"] = case.options["old_per_token_logps"] - 18.0
    config = make_config("vespo")
    want, got = case.run(config, impl="reference"), case.run(config)
    assert want.dweight.norm() > 0
    torch.testing.assert_close(got.dweight, want.dweight)
    torch.testing.assert_close(got.out.metrics["vespo/phi_seq_mean"], want.out.metrics["vespo/phi_seq_mean"])


def test_gmpo_beyond_its_bound_has_no_gradient():
    """A < 0 and a mean log-ratio above 20: the value is exp(20), the derivative 0."""
    logps = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
    old = torch.full((1, 3), -25.0, dtype=torch.float64)
    for impl in ("auto", "reference"):
        logps.grad = None
        out = grpo_loss(logps, -torch.ones(1).double(), old_per_token_logps=old, config=make_config("gmpo"), impl=impl)
        out.loss.backward()
        torch.testing.assert_close(out.loss, torch.tensor(20.0).double().exp())
        assert logps.grad.eq(0).all()


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_missing_sampling_log_probs_count_as_no_difference(impl):
    """NaN sampling log-probs count as a difference of 0, so that they cannot drop a sequence, nor keep it."""
    logps = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)
    sampling = torch.tensor([[torch.nan, 0.3, 0.3, torch.nan]], dtype=torch.float64)  # mean 0.15
    for threshold, dropped in ((0.1, True), (0.2, False)):
        logps.grad = None
        config = make_config("dapo", off_policy_mask_threshold=threshold)
        out = grpo_loss(logps, -torch.ones(1).double(), sampling_per_token_logps=sampling, config=config, impl=impl)
        out.loss.backward()
        assert logps.grad.eq(0).all() == dropped


def test_more_than_two_to_the_31_logits():
    """32-bit offsets overflow here in other losses: the last token of 2.15e9 logits is as exact as the first."""
    hidden, weight = torch.randn(1, 16400, 2), torch.randn(131072, 2)
    ids = torch.randint(0, 131072, (1, 16400))
    assert ids.numel() * weight.shape[0] > 2**31
    logps = fused_linear_logprobs(hidden, weight, ids).logps[0]
    for rows in (slice(0, 4), slice(-4, None)):
        log_p = (hidden[0, rows].double() @ weight.double().T).log_softmax(-1)
        want = log_p.gather(1, ids[0, rows].unsqueeze(1)).squeeze(1)
        assert (logps[rows] - want).abs().max() <= 1e-4


@pytest.mark.parametrize("impl", IMPLS)
def test_a_packed_batch_of_nothing_is_differentiable(impl):
    hidden, weight = torch.zeros(0, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    for offsets in (torch.tensor([0]), torch.tensor([0, 0])):
        out = fused_linear_grpo_loss(
            hidden, weight, torch.zeros(0, dtype=torch.int64), torch.zeros(len(offsets) - 1, 1), cu_seqlens=offsets,
            impl=impl,
        )  # fmt: skip
        out.loss.backward()
        assert out.loss == 0
        assert hidden.grad.shape == (0, 4)


@pytest.mark.parametrize("impl", IMPLS)
def test_as_many_tokens_as_packed_sequences(impl):
    """With an empty sequence among them a 1-d tensor could be one a token or one a sequence: nothing is guessed."""
    hidden, weight = torch.randn(3, 8), torch.randn(11, 8)
    ids, offsets = torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3, 3])
    each, one_each = torch.tensor([0.5, 1.0, 2.0]), torch.ones(3, 1)

    def logps(advantages=one_each, cu_seqlens=offsets, **options):
        return fused_linear_grpo_loss(
            hidden, weight, ids, advantages, cu_seqlens=cu_seqlens, impl=impl, **options
        ).per_token_logps

    for name, call in {
        "temperature": lambda: logps(temperature=each),
        "advantages": lambda: logps(advantages=each),
    }.items():
        with pytest.raises(
            ValueError, match=rf"{name} of shape \(3,\) could be one for each of 3 tokens or one for each"
        ):
            call()

    def exact(temperature):
        return (hidden @ weight.T / temperature.unsqueeze(1)).log_softmax(1)[torch.arange(3), ids]

    torch.testing.assert_close(logps(temperature=each.unsqueeze(1)), exact(each[[0, 0, 1]]))
    torch.testing.assert_close(logps(temperature=each, cu_seqlens=torch.tensor([0, 1, 2, 3])), exact(each))
    torch.testing.assert_close(logps(torch.ones(2), torch.tensor([0, 2, 3]), temperature=each), exact(each))
