"""The analytic objective against the autograd reference, hand-computed values, and gradcheck."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers import all_configs, config_id, covering_configs, make_case, make_config, pack

from grpo_fused import GRPOLossConfig, grpo_loss


def scores(seed: int, per_token: bool = False, packed: bool = False):
    """Log-probs, entropies and options of a case."""
    case = make_case(seed, per_token_advantages=per_token)
    case = pack(case) if packed else case
    g = torch.Generator().manual_seed(seed + 100)
    old = case.options["old_per_token_logps"]
    logps = old + 0.25 * torch.randn(old.shape, generator=g, dtype=torch.float64)
    entropies = torch.rand(old.shape, generator=g, dtype=torch.float64) * 3
    return case, logps, entropies


def run(config: GRPOLossConfig, case, logps, entropies, impl):
    logps, entropies = logps.clone().requires_grad_(), entropies.clone().requires_grad_()
    options = dict(case.options)
    if config.off_policy_mask_threshold is None:
        options.pop("sampling_per_token_logps")
    out = grpo_loss(
        logps, case.advantages, case.completion_mask, entropies=entropies, config=config, impl=impl, **options
    )
    (3.0 * out.loss).backward()
    entropy_gradient = torch.zeros_like(entropies) if entropies.grad is None else entropies.grad
    return out, logps.grad, entropy_gradient


def assert_matches_reference(config, case, logps, entropies):
    out, dlogps, dentropies = run(config, case, logps, entropies, "auto")
    want, want_dlogps, want_dentropies = run(config, case, logps, entropies, "reference")
    assert want_dlogps.abs().max() > 0
    torch.testing.assert_close(out.loss, want.loss, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(dlogps, want_dlogps, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(dentropies, want_dentropies, rtol=1e-10, atol=1e-13)
    assert out.metrics.keys() == want.metrics.keys()
    for name, value in want.metrics.items():
        torch.testing.assert_close(out.metrics[name], value, msg=name, equal_nan=True)


@pytest.mark.parametrize("layout", ["padded", "packed", "per-token"])
@pytest.mark.parametrize("config", covering_configs(), ids=config_id)
def test_objective_matches_reference(config, layout):
    if layout == "per-token" and config.loss_type == "gmpo":
        pytest.skip("gmpo takes one advantage a sequence")
    for seed in range(3):
        case, logps, entropies = scores(seed, layout == "per-token", layout == "packed")
        assert_matches_reference(config, case, logps, entropies)


@pytest.mark.full
@pytest.mark.parametrize("config", list(all_configs()), ids=config_id)
def test_objective_matches_reference_on_the_whole_grid(config):
    for seed in range(2):
        per_token = bool(seed) and config.loss_type != "gmpo"
        assert_matches_reference(config, *scores(seed, per_token, packed=bool(seed)))


@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "sapo", "grpo"])
def test_importance_sampling_ratio_and_normaliser(loss_type):
    for level in ("token", "sequence"):
        config = make_config(loss_type, importance_sampling_level=level, beta=0.1)
        for shape in ((4, 7), (4, 1)):
            case, logps, entropies = scores(5)
            ratio = torch.rand(shape, dtype=torch.float64) * 2
            ratio[0] = 0.0
            case.options["importance_sampling_ratio"] = ratio
            if loss_type in ("dapo", "cispo"):
                case.options["num_items_in_batch"] = 0.37
            assert_matches_reference(config, case, logps, entropies)


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_a_column_of_advantages_is_one_for_each_sequence(packed, impl):
    case, logps, entropies = scores(7, packed=packed)
    config = make_config("grpo", importance_sampling_level="sequence")
    column = replace(case, advantages=case.advantages.reshape(-1, 1))
    row = replace(case, advantages=case.advantages.reshape(-1))
    (got, gradient, _), (want, want_gradient, _) = (run(config, x, logps, entropies, impl) for x in (column, row))
    assert torch.equal(gradient, want_gradient)
    assert gradient.any()
    for name, value in want.metrics.items():
        torch.testing.assert_close(got.metrics[name], value, msg=name, equal_nan=True)


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_gmpo_never_corrects_its_kl(impl):
    case, logps, entropies = scores(7)
    case.options["ref_per_token_logps"] = logps.detach() + 0.3 * torch.randn(logps.shape, dtype=logps.dtype)
    configs = [make_config("gmpo", beta=0.5, use_bias_correction_kl=corrected) for corrected in (True, False)]
    (with_it, gradient, _), (without, want, _) = (run(config, case, logps, entropies, impl) for config in configs)
    assert with_it.loss == without.loss
    assert torch.equal(gradient, want)


def test_vespo_takes_its_ratio_inside_phi():
    case, logps, entropies = scores(6)
    case.options["importance_sampling_ratio"] = torch.rand(4, 7, dtype=torch.float64) * 2
    assert_matches_reference(make_config("vespo"), case, logps, entropies)


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_hand_computed_tokens(impl):
    """Two good tokens (ratio 1.1 live, 1.5 clipped at 1.2), two bad ones (0.9 live, 0.5 clipped at 0.8)."""
    ratio = torch.tensor([[1.1, 1.5], [0.9, 0.5]], dtype=torch.float64)
    logps = ratio.log().requires_grad_()
    out = grpo_loss(
        logps, torch.tensor([2.0, -1.0]).double(), old_per_token_logps=torch.zeros(2, 2).double(), impl=impl
    )
    torch.testing.assert_close(out.loss, torch.tensor((-2.2 - 2.4 + 0.9 + 0.8) / 4).double())
    out.loss.backward()
    torch.testing.assert_close(logps.grad, torch.tensor([[-2.2, 0.0], [0.9, 0.0]]).double() / 4)
    assert float(out.metrics["clip_ratio/low_mean"]) == 0.25
    assert float(out.metrics["clip_ratio/high_mean"]) == 0.25
    assert float(out.metrics["clip_ratio/low_min"]) == 0.0
    assert float(out.metrics["clip_ratio/high_max"]) == 0.5


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("options", [{}, {"delta": 4.0}, {"dual_clip": 4.0}], ids=["", "delta", "dual_clip"])
def test_a_ratio_at_its_bound_has_a_gradient(options, impl):
    """1.5 with A > 0 and 0.5 with A < 0 at epsilon = 0.5, as autograd has it in TRL."""
    logps = torch.tensor([[1.5], [0.5]], dtype=torch.float64).log().requires_grad_()
    out = grpo_loss(
        logps,
        torch.tensor([1.0, -1.0]).double(),
        old_per_token_logps=torch.zeros(2, 1).double(),
        config=make_config("dapo", epsilon=0.5, **options),
        impl=impl,
    )
    out.loss.backward()
    torch.testing.assert_close(logps.grad, torch.tensor([[-0.75], [0.25]]).double())
    assert out.metrics["clip_ratio/region_mean"] == 0


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_a_ratio_of_delta_has_a_gradient(impl):
    logps = torch.tensor([[4.0]], dtype=torch.float64).log().requires_grad_()
    old, bad = torch.zeros(1, 1).double(), torch.tensor([-1.0]).double()
    config = make_config("dapo", delta=math.exp(logps.item()))
    grpo_loss(logps, bad, old_per_token_logps=old, config=config, impl=impl).loss.backward()
    torch.testing.assert_close(logps.grad, torch.tensor([[4.0]]).double())


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_a_log_ratio_at_the_bounds_of_gmpo_has_a_gradient(impl):
    logps = torch.tensor([[0.25], [-0.25]], dtype=torch.float64, requires_grad=True)
    old, advantages = torch.zeros(2, 1).double(), torch.tensor([1.0, -1.0]).double()
    out = grpo_loss(logps, advantages, old_per_token_logps=old, config=make_config("gmpo", epsilon=0.25), impl=impl)
    out.loss.backward()
    want = torch.tensor([[-math.exp(0.25)], [math.exp(-0.25)]]).double() / 2
    torch.testing.assert_close(logps.grad, want)
    assert out.metrics["clip_ratio/region_mean"] == 0


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_cispo_clips_ratios_above_its_bound_of_good_tokens(impl):
    logps = torch.tensor([[2.0, 1.5]] * 3, dtype=torch.float64).log()
    advantages = torch.tensor([1.0, 0.0, -1.0]).double()
    config = make_config("cispo", epsilon_high=1.5)
    out = grpo_loss(logps, advantages, old_per_token_logps=torch.zeros(3, 2).double(), config=config, impl=impl)
    assert float(out.metrics["cispo_clip_ratio"]) == pytest.approx(1 / 6)


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_two_sided_bounds(impl):
    """epsilon below, epsilon_high above: a ratio between the two distances is live above 1 and clipped below it."""
    logps = torch.tensor([[1.2], [0.8]], dtype=torch.float64).log().requires_grad_()
    old, advantages = torch.zeros(2, 1).double(), torch.tensor([1.0, -1.0]).double()
    config = make_config("dapo", epsilon=0.1, epsilon_high=0.3)
    out = grpo_loss(logps, advantages, old_per_token_logps=old, config=config, impl=impl)
    out.loss.backward()
    torch.testing.assert_close(out.loss, torch.tensor((-1.2 + 0.9) / 2).double())
    torch.testing.assert_close(logps.grad, torch.tensor([[-1.2], [0.0]]).double() / 2)


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_hand_computed_kl(impl):
    """k3 at q = ln 2: 2 - ln 2 - 1, derivative 1 - 2; on-policy, so that the bias correction adds its own derivative."""
    logps = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    ref = torch.full((1, 1), math.log(2.0), dtype=torch.float64)
    for corrected, slope in ((False, -1.0), (True, -1.0 + 1 - math.log(2))):
        config = GRPOLossConfig(beta=0.5, use_bias_correction_kl=corrected)
        logps.grad = None
        out = grpo_loss(logps, torch.zeros(1).double(), ref_per_token_logps=ref, config=config, impl=impl)
        out.loss.backward()
        torch.testing.assert_close(out.loss, torch.tensor(0.5 * (1 - math.log(2.0))).double())
        torch.testing.assert_close(logps.grad, torch.full((1, 1), 0.5 * slope).double())
        torch.testing.assert_close(out.metrics["kl"], torch.tensor(1 - math.log(2.0)))


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("bound", [0.0, -1.0])
def test_vespo_s_rate_has_a_floor(bound, impl):
    """A rate below 1e-4 counts as 1e-4, which bounds phi at log w = 10: w = 22026."""
    logps = torch.zeros(2, 1, dtype=torch.float64, requires_grad=True)
    old = torch.full((2, 1), -10.0, dtype=torch.float64)
    config = make_config("vespo", vespo_lambda_pos=bound, vespo_lambda_neg=bound)
    advantages = torch.tensor([1.0, -1.0], dtype=torch.float64)
    grpo_loss(logps, advantages, old_per_token_logps=old, config=config, impl=impl).loss.backward()
    phi = [math.exp(1e-4 + k * 10.0 - 1e-4 * math.exp(10.0)) for k in (2.0, 3.0)]
    torch.testing.assert_close(logps.grad, torch.tensor([[-phi[0] / 2], [phi[1] / 2]]).double())


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_vespo_s_advantage_of_zero_is_a_good_one(impl):
    """Only the metric shows it: phi at a ratio of e^0.5, by k and rate of A >= 0."""
    config = GRPOLossConfig(loss_type="vespo", vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=1.0)
    old = torch.full((1, 1), -0.5)
    out = grpo_loss(torch.zeros(1, 1), torch.zeros(1), old_per_token_logps=old, config=config, impl=impl)
    want = math.exp(3.0 + 2.0 * 0.5 - 3.0 * math.exp(0.5))
    assert float(out.metrics["vespo/phi_seq_mean"]) == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_vespo_s_phi_is_zero_where_it_overflows(impl):
    """e^100 in fp32, as in TRL."""
    logps, old = torch.zeros(1, 1, requires_grad=True), torch.full((1, 1), -5.0)
    config = make_config("vespo", vespo_k_pos=20.0, vespo_lambda_pos=1e-4)
    out = grpo_loss(logps, torch.ones(1), old_per_token_logps=old, config=config, impl=impl)
    assert out.loss == 0
    assert torch.autograd.grad(out.loss, logps)[0] == 0


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize(("log_ratios", "log_w"), [
    ((-15.0, -15.0), math.log(1e-8)), ((-30.0, 15.0), -5.0), ((30.0, -15.0), 5.0),
], ids=["sequence", "token-low", "token-high"])  # fmt: skip
def test_vespo_s_log_ratios_are_bounded(log_ratios, log_w, impl):
    """That of a token at +-20 and that of a sequence at log 1e-8, which a small k shows."""
    logps = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    old = -torch.tensor([log_ratios], dtype=torch.float64)
    config = make_config("vespo", vespo_k_pos=0.1, vespo_lambda_pos=2.0)
    grpo_loss(logps, torch.ones(1).double(), old_per_token_logps=old, config=config, impl=impl).loss.backward()
    phi = math.exp(2.0 + 0.1 * log_w - 2.0 * math.exp(log_w))
    torch.testing.assert_close(logps.grad, torch.full_like(logps, -phi / 2), rtol=1e-10, atol=0)


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_vespo_s_ratio_of_the_sampler_is_bounded(impl):
    """e^28 counts as e^20, before the ratio e^-15 of the policy."""
    logps = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    given = {"old_per_token_logps": torch.tensor([[15.0]]).double()}
    given["importance_sampling_ratio"] = torch.tensor([[28.0]]).double().exp()
    config = make_config("vespo", vespo_k_pos=0.1, vespo_lambda_pos=2.0)
    grpo_loss(logps, torch.ones(1).double(), config=config, impl=impl, **given).loss.backward()
    phi = math.exp(2.0 + 0.1 * 5.0 - 2.0 * math.exp(5.0))
    torch.testing.assert_close(logps.grad, torch.full_like(logps, -phi), rtol=1e-10, atol=0)


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token"])
def test_derivative_beyond_the_bounds_of_the_log_ratio(level, impl):
    """The ratio is a constant beyond +-20, except for a token's own derivative factor."""
    logps = torch.zeros(2, 1, dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[25.0], [-25.0]], dtype=torch.float64)  # ratios of e^-20, A > 0, and e^20, A < 0: both live
    config = make_config("dapo", importance_sampling_level=level)
    advantages = torch.tensor([1.0, -1.0], dtype=torch.float64)
    grpo_loss(logps, advantages, old_per_token_logps=old, config=config, impl=impl).loss.backward()
    want = torch.tensor([[-math.exp(-20.0)], [math.exp(20.0)]], dtype=torch.float64) / 2
    torch.testing.assert_close(
        logps.grad, want if level == "sequence_token" else torch.zeros_like(want), atol=0, rtol=1e-12
    )


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize(("loss_type", "level"), [("dapo", "token"), ("dapo", "sequence"), ("gmpo", "token")])
@pytest.mark.parametrize(("log_ratio", "slope"), [(20.0, math.exp(20.0)), (20.5, 0.0)])
def test_derivative_at_the_bound_of_the_log_ratio(log_ratio, slope, loss_type, level, impl):
    """The ratio of a bad answer is one number only beyond 20."""
    logps = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    old, bad = torch.full_like(logps, -log_ratio), torch.tensor([-1.0]).double()
    config = make_config(loss_type, importance_sampling_level=level)
    out = grpo_loss(logps, bad, old_per_token_logps=old.detach(), config=config, impl=impl)
    (got,) = torch.autograd.grad(out.loss, logps)
    assert out.loss.item() == pytest.approx(math.exp(20.0), rel=1e-12)
    torch.testing.assert_close(got, torch.full_like(got, slope), rtol=1e-12, atol=0)


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize(("threshold", "kept"), [(0.25, 1.0), (0.2, 0.0)])
def test_a_drift_equal_to_the_threshold_keeps_a_sequence(threshold, kept, impl):
    logps = torch.full((1, 2), -1.0, dtype=torch.float64, requires_grad=True)
    sampling, bad = torch.tensor([[-0.5, -1.0]]).double(), torch.tensor([-1.0]).double()
    config = make_config("dapo", off_policy_mask_threshold=threshold)
    grpo_loss(logps, bad, sampling_per_token_logps=sampling, config=config, impl=impl).loss.backward()
    torch.testing.assert_close(logps.grad, torch.full_like(logps, 0.5 * kept))


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_worked_example_of_eight_answers(impl):
    """One group of 8 answers with 4 correct, one token each, all ratios 1.4: the good half is clipped at 1.2."""
    from grpo_fused import group_advantages

    advantages = group_advantages([1, 0, 0, 1, 1, 0, 1, 0], 8).advantages
    logps = torch.full((8, 1), math.log(0.7), requires_grad=True)
    old = torch.full((8, 1), math.log(0.5))
    out = grpo_loss(logps, advantages, old_per_token_logps=old, impl=impl)
    out.loss.backward()
    torch.testing.assert_close(out.loss, torch.tensor(0.9352 * (1.4 - 1.2) / 2), atol=2e-5, rtol=0)
    good = advantages > 0
    assert logps.grad[good].eq(0).all()
    torch.testing.assert_close(logps.grad[~good].flatten(), torch.full((4,), 1.4 * 0.9352 / 8), atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    "config",
    [c for c in covering_configs() if c.off_policy_mask_threshold is None and c.top_entropy_quantile == 1.0],
    ids=config_id,
)
def test_gradcheck(config):
    """Finite differences in fp64. They do not apply to stop-gradients and masks, so those are left out."""
    if config.loss_type in ("cispo", "vespo") or config.importance_sampling_level == "sequence_token":
        pytest.skip("stop-gradients: the coefficient is not the derivative of the value")
    case, logps, entropies = scores(1)
    options = {k: v for k, v in case.options.items() if k != "sampling_per_token_logps"}

    def loss(x, h):
        return grpo_loss(x, case.advantages, case.completion_mask, entropies=h, config=config, **options).loss

    assert torch.autograd.gradcheck(
        loss, (logps.requires_grad_(), entropies.requires_grad_()), eps=1e-7, atol=1e-6, fast_mode=True
    )


@pytest.mark.parametrize("q", [0.01, 5.0, 14.0, 19.9, 25.0])
@pytest.mark.parametrize("level", ["token", "sequence_token"])
def test_bias_corrected_kl_is_accurate_in_fp32(level, q):
    """c (k3 + k3') is -c q: taken as a difference of exponentials, fp32 has no digit of it left at q = 17.

    Beyond 20 k3 is its tangent there.
    """
    config = GRPOLossConfig(beta=1.0, importance_sampling_level=level)
    logps = torch.zeros(1, 1, requires_grad=True)
    ref, old = torch.full((1, 1), q), torch.full((1, 1), 0.1)
    want = -q if q <= 20.0 else (math.exp(20.0) - 1) * (q - 20.0) - 20.0
    grpo_loss(logps, torch.zeros(1), old_per_token_logps=old, ref_per_token_logps=ref, config=config).loss.backward()
    torch.testing.assert_close(logps.grad, torch.full((1, 1), want * math.exp(-0.1)), rtol=1e-5, atol=0)


@pytest.mark.parametrize("term", ["policy", "kl", "entropy"])
def test_large_terms_leave_the_small_ones(term):
    """Sums over tokens are in fp64: in fp32 nothing but the large terms is left."""
    zeros, large = torch.zeros(1, 5), torch.tensor([[1.0, 2.0**-26, -1.0, 2.0**-26, 2.0**-26]])
    if term == "policy":
        out = grpo_loss(zeros, large * 2.0**26, config=GRPOLossConfig(loss_type="luspo"))
    elif term == "kl":
        config = GRPOLossConfig(loss_type="luspo", beta=1.0, kl_estimator="k1", use_bias_correction_kl=False)
        out = grpo_loss(large * 2.0**12, zeros, ref_per_token_logps=zeros, config=config)
    else:
        config = GRPOLossConfig(loss_type="luspo", entropy_coef=5.0)
        out = grpo_loss(zeros, zeros, entropies=large * 2.0**26, config=config)
    assert float(out.loss) == {"policy": -3.0, "kl": 3 * 2.0**-14, "entropy": -3.0}[term]


def test_log_ratios_of_a_sequence_are_summed_with_the_accuracy_of_fp32():
    """9000 + 4e-4 - 9000, of which an fp32 sum has nothing left."""
    logps = torch.tensor([[-1.0, -1.0, -9001.0]])
    old = torch.tensor([[-9001.0, -1.0004, -1.0]])
    config = GRPOLossConfig(importance_sampling_level="sequence")
    out = grpo_loss(logps, torch.ones(1), old_per_token_logps=old, config=config)
    assert float(out.loss) == pytest.approx(-math.exp(4e-4 / 3), abs=3e-7)


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("options", [{"loss_type": "luspo", "importance_sampling_level": "sequence_token"},
                                     {"loss_type": "dr_grpo", "max_completion_length": 4}], ids=["luspo", "dr_grpo"])  # fmt: skip
def test_no_sequences(options, impl):
    logps = torch.zeros(0, 3, requires_grad=True)
    out = grpo_loss(logps, torch.zeros(0), config=GRPOLossConfig(**options), impl=impl)
    assert out.loss == 0
    assert torch.autograd.grad(out.loss, logps)[0].shape == (0, 3)


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize(
    "config", [make_config("vespo"), make_config("dapo", importance_sampling_level="sequence")], ids=config_id
)
@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_metrics_are_on_the_device_of_the_log_probs(impl, config, empty):
    logps = torch.full((2, 3), -1.0)
    mask = torch.full((2, 3), not empty)
    advantages = torch.ones(2)
    with torch.device("meta"):  # another one than the default
        metrics = grpo_loss(logps, advantages, mask, config=config, impl=impl).metrics
    assert {x.device.type for x in metrics.values()} == {"cpu"}


def test_quantile_matches_torch():
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        entropies = torch.rand(3, 11, generator=g).round(decimals=1)  # with ties
        mask = torch.rand(3, 11, generator=g) > 0.3
        share = float(torch.rand((), generator=g))
        config = GRPOLossConfig(top_entropy_quantile=share)
        logps = torch.zeros(3, 11, requires_grad=True)
        grpo_loss(logps, torch.ones(3), mask, entropies=entropies, config=config).loss.backward()
        threshold = torch.quantile(entropies[mask].double(), 1 - share).float()
        assert torch.equal(logps.grad != 0, mask & (entropies >= threshold))


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_the_only_token_has_the_highest_entropy(impl):
    logps, mask = torch.zeros(1, 3, requires_grad=True), torch.tensor([[False, True, False]])
    config = GRPOLossConfig(top_entropy_quantile=0.5)
    grpo_loss(logps, torch.ones(1), mask, entropies=torch.ones(1, 3), config=config, impl=impl).loss.backward()
    assert torch.equal(logps.grad != 0, mask)


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize(("count", "coef"), [(0, 0.3), (2, 0.3), (2, -0.3)])
def test_entropies_of_zero_are_averaged_over_active_tokens(count, coef, impl):
    logps, mask = torch.zeros(1, 5), (torch.arange(5) < count).unsqueeze(0)
    entropies = torch.zeros(1, 5, requires_grad=True)
    config = GRPOLossConfig(top_entropy_quantile=0.5, entropy_coef=coef)
    out = grpo_loss(logps, torch.zeros(1), mask, entropies=entropies, config=config, impl=impl)
    (gradient,) = torch.autograd.grad(out.loss, entropies)
    torch.testing.assert_close(gradient, -coef / max(count, 1) * mask)
    assert out.loss == 0


@pytest.mark.parametrize("loss_type", ["dapo", "sapo"])
def test_a_token_counts_only_if_no_mask_leaves_it_out(loss_type):
    config = make_config(loss_type, off_policy_mask_threshold=0.05, top_entropy_quantile=0.5)
    for seed in range(3):
        case, logps, entropies = scores(seed)
        case.options["importance_sampling_ratio"] = torch.rand(4, 7, dtype=torch.float64) * 2
        assert_matches_reference(config, case, logps, entropies)


@pytest.mark.full
def test_quantile_beyond_the_limit_of_torch_quantile():
    n = 2**24 + 1000
    entropies = torch.arange(n, dtype=torch.float32).flip(0).view(1, n) / n
    logps = torch.zeros(1, n, requires_grad=True)
    config = GRPOLossConfig(top_entropy_quantile=0.25)
    grpo_loss(logps, torch.ones(1), entropies=entropies, config=config).loss.backward()
    kept = logps.grad.count_nonzero().item()
    assert abs(kept - n / 4) <= 2
    assert logps.grad[0, : n // 4 - 2].ne(0).all()


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_the_gate_of_sapo_keeps_its_digits_where_it_is_open(impl):
    """1 - sigmoid(x) as a difference has none left at x = 36."""
    logps = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)
    ratio = torch.tensor([[1.0, 5.0, 20.0, 36.0]], dtype=torch.float64)
    out = grpo_loss(logps, torch.ones(1), old_per_token_logps=-ratio.log(), config=make_config("sapo"), impl=impl)
    (got,) = torch.autograd.grad(out.loss, logps)
    x = (ratio - 1).exp()
    torch.testing.assert_close(got, -(4 / 4) * ratio * x / (1 + x).square(), rtol=1e-12, atol=0)
