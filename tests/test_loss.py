"""`fused_linear_grpo_loss`: every engine against the reference over objective x option x layout x shape."""

from __future__ import annotations

import pytest
import torch
from grpo_fused.kernels.configs import padded
from helpers import (
    ENGINES,
    PRECISION,
    all_configs,
    assert_engine_matches,
    assert_same,
    config_id,
    covering_configs,
    frobenius_error,
    make_case,
    make_config,
    pack,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from grpo_fused import engines, fused_linear_grpo_loss, fused_linear_logprobs

SEVERAL_CHUNKS = {
    "chunked": 9000,
    "native": 1500,
    "triton": 1500,
}  # bytes of scratch for a few tokens of the small vocabulary

SEEN_BY_AN_ENGINE = [
    make_config("dapo"),
    make_config("dapo", importance_sampling_level="sequence", beta=0.1),
    make_config("dapo", importance_sampling_level="sequence_token", off_policy_mask_threshold=0.05),
    make_config("dapo", entropy_coef=0.05),
    make_config("cispo", top_entropy_quantile=0.5, entropy_coef=0.02),
    make_config("vespo"),
]
"""An engine gets coefficients, not objectives. These cover coefficients by token and by sequence, with and without
entropies, with and without known scores. A case takes 0.4 s in the interpreter: in the gate triton has these only."""


def seen_by_an_engine(config, layout, impl):
    return impl != "triton" or config == SEEN_BY_AN_ENGINE[0] or (config in SEEN_BY_AN_ENGINE and layout == "padded")


@pytest.mark.gate(keep=seen_by_an_engine)
@pytest.mark.pairs
@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("layout", ["padded", "packed", "per-token"])
@pytest.mark.parametrize("config", covering_configs(), ids=config_id)
def test_matches_reference(config, layout, impl):
    if layout == "per-token" and config.loss_type == "gmpo":
        pytest.skip("gmpo takes one advantage a sequence")
    case = make_case(1, per_token_advantages=layout == "per-token")
    case = pack(case) if layout == "packed" else case
    several = {"max_scratch_bytes": SEVERAL_CHUNKS[impl]}
    variants = [{}, several, {"compact": False}, several | {"frozen": True}]
    want = assert_engine_matches(impl, case, config, variants=variants)
    assert want.dhidden.norm() > 0


@pytest.mark.parametrize("impl", ["chunked", "triton"])
def test_a_frozen_head_whose_sequences_fit_no_chunk(impl, monkeypatch):
    """dlogp/dh is made with the scores: nothing is scored alone, or again."""
    case, config = make_case(1, B=2, T=40), make_config("dapo", importance_sampling_level="sequence")
    monkeypatch.delattr(type(engines.engine(impl)), "score")
    variant = {"max_scratch_bytes": SEVERAL_CHUNKS[impl], "frozen": True, "with_metrics": False}
    dtype, tol = PRECISION[impl]
    want = case.run(config, impl="reference")
    got = case.to(dtype).run(config, impl=impl, **variant)
    assert frobenius_error(got.dhidden, want.dhidden) <= tol
    torch.testing.assert_close(got.out.loss, want.out.loss, rtol=tol, atol=tol, check_dtype=False)


@pytest.mark.full
@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("config", list(all_configs()), ids=config_id)
def test_matches_reference_on_the_whole_grid(config, impl):
    for seed, layout in enumerate(("padded", "packed")):
        per_token = bool(seed) and config.loss_type != "gmpo"
        case = make_case(seed, per_token_advantages=per_token)
        case = pack(case) if layout == "packed" else case
        assert_engine_matches(impl, case, config, variants=[{"max_scratch_bytes": SEVERAL_CHUNKS[impl]}])


OF_A_CALL = {"num_items_in_batch", "importance_sampling_ratio"}  # which no engine gets


def head_option_seen(config, options, impl):
    return impl != "triton" or len(options) > 1 or (config.entropy_coef == 0.05 and not OF_A_CALL & options.keys())


@pytest.mark.pairs
@pytest.mark.gate(keep=head_option_seen)
@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"temperature": torch.tensor([0.5, 0.9, 1.3, 2.0])},
        {"temperature": torch.tensor([[0.5], [0.9], [1.3], [2.0]])},
        {"temperature": torch.linspace(0.4, 1.9, 28).view(4, 7)},
        {"temperature": torch.tensor(0.8)},
        {"logit_scale": 0.3},
        {"softcap": 1.5},
        {"lm_head_bias": torch.linspace(-2, 2, 29, dtype=torch.float64)},
        {
            "temperature": torch.linspace(0.4, 1.9, 28).view(4, 7),
            "logit_scale": 1.7,
            "softcap": 2.0,
            "lm_head_bias": torch.linspace(-2, 2, 29, dtype=torch.float64),
        },
        {"num_items_in_batch": 3.5},
        {"num_items_in_batch": torch.tensor(0.25)},
        {"importance_sampling_ratio": torch.linspace(0, 2, 28).view(4, 7)},
        {"importance_sampling_ratio": torch.linspace(0, 2, 4).view(4, 1)},
        {"old_per_token_logps": None},
    ],
    ids=lambda options: "+".join(f"{k}{tuple(v.shape) if hasattr(v, 'shape') else ''}" for k, v in options.items()),
)
@pytest.mark.parametrize(
    "config",
    [
        make_config("dapo", beta=0.1, entropy_coef=0.05),
        make_config("dapo", importance_sampling_level="sequence", beta=0.1),
        make_config("cispo", top_entropy_quantile=0.5, entropy_coef=0.1),
    ],
    ids=config_id,
)
def test_head_and_call_options(config, options, impl):
    case = make_case(2, **options)
    assert_engine_matches(impl, case, config, variants=[{}, {"max_scratch_bytes": SEVERAL_CHUNKS[impl]}])
    if "importance_sampling_ratio" not in options and not isinstance(options.get("temperature"), torch.Tensor):
        assert_engine_matches(impl, pack(case), config, variants=[{}])


@pytest.mark.gate(keep=lambda impl, level: impl != "triton" or level == "token")
@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_packed_options_for_each_sequence(level, impl):
    dtype, tol = PRECISION[impl]
    packed = pack(make_case(3)).to(dtype)
    count, tokens = packed.options["cu_seqlens"].numel() - 1, packed.completion_ids.numel()
    config = make_config("dapo", importance_sampling_level=level)
    for options in (
        {"temperature": torch.linspace(0.5, 2.0, count)},
        {"temperature": torch.linspace(0.5, 2.0, tokens)},
        {"importance_sampling_ratio": torch.linspace(0, 2, count).view(-1, 1)},
        {"importance_sampling_ratio": torch.linspace(0, 2, tokens)},
        {"cu_seqlens": packed.options["cu_seqlens"].int()},
    ):
        want = packed.to(torch.float64).run(config, impl="reference", **options)
        assert_same(packed.run(config, impl=impl, **options), want, tol=tol)


def test_a_ratio_of_0_is_not_a_factor_in_vespo():
    """It counts as log 1e-8 in the sequence's weight, whose tokens keep their gradient; other loss types drop it."""
    case = make_case(13, extras=False)
    case.options["importance_sampling_ratio"] = torch.ones(4, 7, dtype=torch.float64)
    case.options["importance_sampling_ratio"][0] = 0.0
    case.options["old_per_token_logps"][0] -= 18.4
    want, got = (case.run(make_config("vespo"), impl=impl) for impl in ("reference", "chunked"))
    assert want.dhidden[0].norm() > 1e-3 * want.dhidden.norm()
    assert_same(got, want, tol=1e-10)


@pytest.mark.parametrize("level", ["sequence", "sequence_token"])
def test_tokens_without_an_advantage_in_a_sequence_with_one(level):
    """They change the sequence's ratio: at sequence level they have a gradient through it."""
    case = make_case(14, per_token_advantages=True, extras=False)
    case.advantages[:, 1::2] = 0.0
    want, got = (
        case.run(make_config("grpo", importance_sampling_level=level), impl=impl) for impl in ("reference", "chunked")
    )
    neutral = case.completion_mask & (case.advantages == 0)
    assert want.dhidden[neutral].any() == (level == "sequence")
    assert_same(got, want, tol=1e-10)


def test_packed_equals_padded():
    for config in covering_configs():
        case = make_case(4)
        padded, packed = case.run(config), pack(case).run(config)
        torch.testing.assert_close(packed.out.loss, padded.out.loss, msg=config_id(config))
        assert frobenius_error(packed.dweight, padded.dweight) < 1e-12, config_id(config)
        for name, value in padded.out.metrics.items():
            torch.testing.assert_close(
                packed.out.metrics[name], value, equal_nan=True, msg=f"{config_id(config)} {name}"
            )


@pytest.mark.gate(keep=lambda impl, config, **_: impl != "triton" or config.loss_type == "dapo")
@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (1, 1, 3, 2), (3, 1, 5, 7), (2, 33, 8, 1), (5, 4, 1, 11), (1, 64, 16, 131)]
)
@pytest.mark.parametrize(
    "config", [make_config("dapo", beta=0.1), make_config("grpo", importance_sampling_level="sequence")], ids=config_id
)
def test_odd_shapes(config, shape, impl):
    B, T, H, V = shape
    case = make_case(5, B=B, T=T, H=H, V=V)
    assert_engine_matches(impl, case, config, variants=[{}])


@given(
    B=st.integers(1, 5),
    T=st.integers(1, 9),
    H=st.integers(1, 20),
    V=st.integers(1, 70),
    seed=st.integers(0, 10**6),
    drift=st.floats(0, 3),
    # between them the gradient of an entropy, p (log p + entropy), is a difference of nearly equal numbers
    logit_std=st.just(0.0) | st.floats(1e-4, 12),
    config=st.sampled_from(covering_configs()),
    scratch=st.integers(1, 60),
    packed=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_shapes_and_values(B, T, H, V, seed, drift, logit_std, config, scratch, packed):
    case = make_case(seed, B=B, T=T, H=H, V=V, drift=drift, logit_std=logit_std)
    case = pack(case) if packed else case
    want = case.run(config, impl="reference")
    # of equal logits, the gradient of an entropy is rounding: nothing to compare where the policy's is as small
    assume(all(not 0 < gradient.norm() < 1e-8 for gradient in want.gradients().values()))
    row = 8 * padded(V)
    got = case.run(config, max_scratch_bytes=4 * row + 24 * V * H + scratch * row)
    assert_same(got, want, tol=1e-9)


def test_tokens_of_all_chunks_are_counted():
    """Those whose gradient was computed: a few without one among many are not left out."""
    case = make_case(0, B=8, T=40)
    got = case.run(make_config("dapo"), impl="chunked", max_scratch_bytes=SEVERAL_CHUNKS["chunked"])
    needed = got.dhidden.any(-1).sum()
    assert needed <= got.out.metrics["gradient_tokens"] <= 8 / 7 * needed


@pytest.mark.parametrize("rows", [0, 3])
def test_sequences_without_tokens_do_not_count_in_the_lowest_clip_ratio(rows):
    """All tokens of the others are clipped from below; without a sequence there is no lowest, and nothing is clipped."""
    hidden, weight = torch.randn(rows, 4, 8), torch.randn(11, 8)
    ids, mask = torch.randint(11, (rows, 4)), torch.ones(rows, 4, dtype=torch.bool)
    mask[1:2] = False
    logps = fused_linear_logprobs(hidden, weight, token_ids=ids).logps
    metrics = fused_linear_grpo_loss(
        hidden, weight, ids, -torch.ones(rows), completion_mask=mask, old_per_token_logps=logps + 1,
        config=make_config("dapo", importance_sampling_level="sequence"),
    ).metrics  # fmt: skip
    assert metrics["clip_ratio/low_min"].item() == pytest.approx(1 if rows else torch.nan, nan_ok=True)
    assert metrics["clip_ratio/low_mean"].item() == pytest.approx(2 / 3 if rows else 0)
    assert (metrics["entropy"] == 0) == (rows == 0)
