"""`GRPOLossConfig`: TRL's defaults, and every unsupported option is refused by name."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest

from grpo_fused import GRPOLossConfig


def test_defaults_follow_trl():
    trl = pytest.importorskip("trl")
    theirs = {f.name: f.default for f in dataclasses.fields(trl.GRPOConfig)}
    ours_alone = {"dual_clip", "kl_estimator", "max_completion_length"}
    for f in dataclasses.fields(GRPOLossConfig):
        if f.name not in ours_alone:
            assert f.default == theirs[f.name], f.name


def test_gmpo_has_its_own_epsilon():
    assert GRPOLossConfig(loss_type="gmpo").epsilon == 0.4
    assert GRPOLossConfig(loss_type="gmpo", epsilon=0.2).epsilon == 0.2
    assert GRPOLossConfig().epsilon == 0.2
    assert dataclasses.replace(GRPOLossConfig(), loss_type="gmpo").epsilon == 0.4
    assert dataclasses.replace(GRPOLossConfig(loss_type="gmpo"), loss_type="grpo").epsilon == 0.2
    assert dataclasses.replace(GRPOLossConfig(loss_type="gmpo", epsilon=float("0.3")), loss_type="grpo").epsilon == 0.3


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_a_copy_knows_whether_epsilon_was_set(copied):
    for config, epsilon in ((GRPOLossConfig(beta=0.1), 0.4), (GRPOLossConfig(epsilon=float("0.2")), 0.2)):
        same = copied(config)
        assert same == config
        assert dataclasses.replace(same, loss_type="gmpo", beta=0.0).epsilon == epsilon
    gmpo = copied(GRPOLossConfig(loss_type="gmpo"))
    assert dataclasses.replace(gmpo, loss_type="grpo").epsilon == 0.2


def test_survives_encoding():
    config = GRPOLossConfig(loss_type="cispo", epsilon_high=5.0, beta=0.04, entropy_coef=1e-3)
    assert GRPOLossConfig.decode(config.encoded) == config


def test_accepts_types_that_equal_a_number_or_a_name():
    """NumPy numbers, string enumerations, and the dictionary of another configuration."""
    import enum

    import numpy as np

    class Loss(str, enum.Enum):
        CISPO = "cispo"

    config = GRPOLossConfig(loss_type=Loss.CISPO, epsilon_high=np.float64(2.0), beta=np.float32(0.5))
    assert GRPOLossConfig.decode(config.encoded) == config
    assert GRPOLossConfig(**dataclasses.asdict(config)) == config
    assert type(config.loss_type) is str


@pytest.mark.parametrize(
    ("options", "batch", "sequence", "entropy"),
    [
        ({}, False, False, False),
        ({"importance_sampling_level": "sequence"}, False, True, False),
        ({"importance_sampling_level": "sequence_token"}, False, True, False),
        ({"loss_type": "vespo"}, False, True, False),
        ({"loss_type": "gmpo"}, False, True, False),
        ({"off_policy_mask_threshold": 0.1}, False, True, False),
        ({"top_entropy_quantile": 0.5}, True, False, True),
        ({"entropy_coef": -0.1}, False, False, True),
    ],
    ids=str,
)
def test_what_the_gradient_of_a_token_needs(options, batch, sequence, entropy):
    config = GRPOLossConfig(**options)
    assert (config.needs_batch, config.needs_sequence, config.needs_entropy) == (batch, sequence, entropy)
    assert config.token_alone == (not batch and not sequence)


def test_which_metrics_are_means_over_sequences():
    levels = ("token", "sequence", "sequence_token")
    configs = [GRPOLossConfig(importance_sampling_level=level) for level in levels]
    assert [config.has_one_value_a_sequence for config in configs] == [False, True, False]
    assert GRPOLossConfig(loss_type="vespo").has_one_value_a_sequence


def test_is_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        GRPOLossConfig().beta = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        GRPOLossConfig("grpo")  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "ppo"}, "loss_type must be one of grpo, .*; got 'ppo'"),
        ({"importance_sampling_level": "group"}, "importance_sampling_level must be one of token, .*; got 'group'"),
        ({"kl_estimator": "k4"}, "kl_estimator must be one of k1, k2, k3, exact; got 'k4'"),
        ({"beta": -0.1}, "beta must be at least 0; got -0.1"),
        ({"epsilon": 0.0}, "epsilon must be > 0; got 0.0"),
        ({"epsilon_high": -1.0}, "epsilon_high must be > 0; got -1.0"),
        ({"delta": 0.0}, "delta must be > 0; got 0.0"),
        ({"dual_clip": 1.0}, "dual_clip must be > 1; got 1.0"),
        ({"dual_clip": 3.0, "delta": 2.0}, r"dual_clip \(3.0\) and delta \(2.0\) exclude each other"),
        (
            {"loss_type": "sapo", "sapo_temperature_pos": 0.0},
            "sapo_temperature_pos must be > 0; got 0.0",
        ),
        (
            {"loss_type": "sapo", "sapo_temperature_neg": -1.0},
            "sapo_temperature_neg must be > 0; got -1.0",
        ),
        ({"top_entropy_quantile": 1.5}, r"top_entropy_quantile must be in \[0, 1\]; got 1.5"),
        ({"entropy_coef": float("nan")}, "entropy_coef must be finite; got nan"),
        ({"loss_type": "dr_grpo"}, "loss_type='dr_grpo' requires max_completion_length"),
        (
            {"loss_type": "dr_grpo", "max_completion_length": 0},
            "max_completion_length must be > 0; got 0",
        ),
        ({"loss_type": "cispo"}, "loss_type='cispo' requires epsilon_high"),
        ({"loss_type": "sapo", "epsilon": 0.1}, "epsilon=0.1 is not used by loss_type='sapo'"),
        ({"loss_type": "cispo", "epsilon_high": 2.0, "delta": 3.0}, "delta=3.0 is not used by loss_type='cispo'"),
        ({"loss_type": "vespo", "dual_clip": 3.0}, "dual_clip=3.0 is not used by loss_type='vespo'"),
        ({"vespo_k_pos": 1.0}, "vespo_k_pos=1.0 is not used by loss_type='dapo'"),
        ({"max_completion_length": 8}, "max_completion_length=8 is not used by loss_type='dapo'"),
        (
            {"loss_type": "gmpo", "importance_sampling_level": "sequence"},
            "importance_sampling_level='sequence' is not used by loss_type='gmpo'",
        ),
        (
            {"loss_type": "gmpo", "off_policy_mask_threshold": 0.1},
            "off_policy_mask_threshold=0.1 is not used by loss_type='gmpo'",
        ),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        GRPOLossConfig(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": "0.1"}, "beta must be a number; got '0.1'"),
        ({"beta": None}, "beta must be a number; got None"),
        ({"use_bias_correction_kl": 1}, "use_bias_correction_kl must be true or false; got 1"),
        (
            {"loss_type": "dr_grpo", "max_completion_length": 2.5},
            "max_completion_length must be an integer; got 2.5",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_refuses_types(options, message):
    with pytest.raises(TypeError, match=message):
        GRPOLossConfig(**options)


def test_its_text_shows_what_is_not_the_default():
    assert repr(GRPOLossConfig()) == "GRPOLossConfig()"
    assert repr(GRPOLossConfig(loss_type="gmpo")) == "GRPOLossConfig(loss_type='gmpo', epsilon=0.4)"
    assert eval(repr(GRPOLossConfig(beta=0.1, delta=2.0))) == GRPOLossConfig(beta=0.1, delta=2.0)


def test_the_package_shows_public_names():
    import grpo_fused

    assert {"fused_linear_grpo_loss", "objectives", "engines"} <= set(dir(grpo_fused))
    assert not {"api", "call", "ranks", "annotations"} & set(dir(grpo_fused))
    assert all(hasattr(grpo_fused, name) or name in ("integrations", "rewards", "testing", "trainer")
               for name in dir(grpo_fused))  # fmt: skip
