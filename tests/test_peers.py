"""The objective equals TRL 1.16's `_compute_loss` and Liger's `ppo_loss_fn` on the options that each has.

Known exceptions, with the reason next to each: beyond +-20 of log-ratio TRL overflows and we stay finite; an empty
sequence makes TRL's `clip_ratio` means NaN-free only by accident; Liger's luspo at token level multiplies each token by
its sequence's length instead of summing, refuses sequence level for cispo, sapo and vespo, and counts its clip metric
over tokens.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from helpers import config_id, make_case, make_config

from grpo_fused import grpo_loss

TRL_CONFIGS = [
    make_config(loss_type, importance_sampling_level=level, beta=beta, **extra)
    for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")
    for level in ("token", "sequence")
    for beta in (0.0, 0.1)
    for extra in (
        {},
        {"top_entropy_quantile": 0.5},
        {"entropy_coef": 0.05},
        {"off_policy_mask_threshold": 0.05},
        {"use_bias_correction_kl": False},
        {"delta": 1.3, "epsilon_high": 0.28},
    )
    if not ("delta" in extra and loss_type in ("cispo", "sapo", "vespo"))
    and not ("use_bias_correction_kl" in extra and beta == 0.0)
]


class _Accelerator:
    num_processes = 1
    sync_gradients = False

    def gather(self, x):
        return x.reshape(-1)

    gather_for_metrics = gather

    def reduce(self, x, reduction):
        return x

    def pad_across_processes(self, x, dim, pad_index):
        return x


def trl_loss(config, case, logps, entropies):
    """TRL's own arithmetic on given log-probs: its method, run on an object with the attributes that it reads."""
    grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer")
    trainer = grpo_trainer.GRPOTrainer
    this = SimpleNamespace(
        loss_type=config.loss_type,
        beta=config.beta,
        epsilon_low=config.epsilon,
        epsilon_high=config.epsilon_upper,
        importance_sampling_level=config.importance_sampling_level,
        top_entropy_quantile=config.top_entropy_quantile,
        off_policy_mask_threshold=config.off_policy_mask_threshold,
        max_completion_length=config.max_completion_length,
        entropy_coef=config.entropy_coef,
        _entropy_bonus_enabled=config.entropy_coef != 0.0,
        use_adaptive_entropy=False,
        aux_loss_enabled=False,
        use_vllm="importance_sampling_ratio" in case.options,
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        args=SimpleNamespace(
            delta=config.delta,
            use_bias_correction_kl=config.use_bias_correction_kl,
            steps_per_generation=1,
            sapo_temperature_pos=config.sapo_temperature_pos,
            sapo_temperature_neg=config.sapo_temperature_neg,
            vespo_k_pos=config.vespo_k_pos,
            vespo_lambda_pos=config.vespo_lambda_pos,
            vespo_k_neg=config.vespo_k_neg,
            vespo_lambda_neg=config.vespo_lambda_neg,
        ),
        model=SimpleNamespace(training=True),
        accelerator=_Accelerator(),
        _metrics={"train": defaultdict(list)},
        get_off_policy_mask=trainer.get_off_policy_mask,
        get_gamma_weights=trainer.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logps, entropies, None),
    )
    this.get_high_entropy_mask = lambda *args: trainer.get_high_entropy_mask(this, *args)
    mask = case.completion_mask.to(logps.dtype)
    inputs = {
        "prompt_ids": case.completion_ids[:, :1],
        "prompt_mask": mask[:, :1],
        "completion_ids": case.completion_ids,
        "completion_mask": mask,
        "advantages": case.advantages,
        "num_items_in_batch": mask.sum(),
        **case.options,
    }
    loss = trainer._compute_loss(this, None, inputs)
    return loss, {name: values[0] for name, values in this._metrics["train"].items()}


def peer_case(seed, per_token=False):
    case = make_case(seed, per_token_advantages=per_token)
    case.completion_mask[1, :2] = True  # TRL's means over an empty sequence are NaN
    old = case.options["old_per_token_logps"]
    logps = (old + 0.25 * torch.randn_like(old)).requires_grad_()
    entropies = (torch.rand_like(old) * 3).float().to(old.dtype).requires_grad_()  # TRL takes the quantile in fp32
    return case, logps, entropies


@pytest.mark.parametrize("config", TRL_CONFIGS, ids=config_id)
def test_trl(config):
    pytest.importorskip("trl")
    for seed in range(3):
        case, logps, entropies = peer_case(seed, per_token=seed == 2)
        if seed == 1:
            case.options["importance_sampling_ratio"] = torch.rand_like(logps) + 0.5
            # VESPO's sum over the ratios is not masked in TRL; a masked token's ratio is 1 there
            case.options["importance_sampling_ratio"][~case.completion_mask] = 1.0
        if config.off_policy_mask_threshold is None:
            case.options.pop("sampling_per_token_logps")
        want, want_metrics = trl_loss(config, case, logps, entropies)
        want.backward()
        want_dlogps, want_dentropies = logps.grad, entropies.grad
        logps.grad = entropies.grad = None
        if config.beta == 0.0:
            case.options.pop("ref_per_token_logps")
        out = grpo_loss(
            logps, case.advantages, case.completion_mask, entropies=entropies, config=config, **case.options
        )
        out.loss.backward()
        assert want_dlogps.abs().max() > 0
        # TRL rounds SAPO's temperatures to fp32, even here in fp64
        rtol, atol = (1e-6, 1e-8) if config.loss_type == "sapo" else (1e-10, 1e-12)
        torch.testing.assert_close(out.loss, want, rtol=rtol, atol=atol)
        torch.testing.assert_close(logps.grad, want_dlogps, rtol=rtol, atol=atol)
        if config.entropy_coef:
            torch.testing.assert_close(entropies.grad, want_dentropies, rtol=1e-9, atol=1e-12)
        for name, value in want_metrics.items():
            if name != "policy_loss" or config.entropy_coef:
                assert float(out.metrics[name]) == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_trl_gmpo(beta):
    """GMPO overrides `_compute_loss`; its loss is the same sum on our `gmpo`."""
    gmpo = pytest.importorskip("trl.experimental.gmpo.gmpo_trainer")
    config = make_config("gmpo", beta=beta)
    case, logps, entropies = peer_case(4)
    case.options.pop("sampling_per_token_logps")
    this = SimpleNamespace(
        beta=beta,
        epsilon_low=0.4,
        epsilon_high=0.4,
        top_entropy_quantile=1.0,
        current_gradient_accumulation_steps=1,
        model=SimpleNamespace(training=True),
        accelerator=_Accelerator(),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logps, entropies, None),
    )
    mask = case.completion_mask.to(logps.dtype)
    inputs = {
        "prompt_ids": case.completion_ids[:, :1],
        "prompt_mask": mask[:, :1],
        "completion_ids": case.completion_ids,
        "completion_mask": mask,
        "advantages": case.advantages,
        **case.options,
    }
    want = gmpo.GMPOTrainer._compute_loss(this, None, inputs)
    want.backward()
    want_dlogps, logps.grad = logps.grad, None
    if beta == 0.0:
        case.options.pop("ref_per_token_logps")
    out = grpo_loss(logps, case.advantages, case.completion_mask, entropies=entropies, config=config, **case.options)
    out.loss.backward()
    torch.testing.assert_close(out.loss, want, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(logps.grad, want_dlogps, rtol=1e-9, atol=1e-12)
    for name, values in this._metrics["train"].items():
        assert float(out.metrics[name]) == pytest.approx(values[0], rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("corrected", [False, True], ids=["plain-kl", "corrected-kl"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"])
def test_liger(loss_type, level, beta, corrected):
    liger = pytest.importorskip("liger_kernel.chunked_loss.grpo_loss")
    if level == "sequence" and loss_type in ("cispo", "sapo", "vespo"):
        pytest.skip("Liger refuses sequence level here")
    if loss_type == "luspo" and level == "token":
        pytest.skip("Liger's luspo at token level is another formula (see the module)")
    if loss_type == "luspo" and beta:
        pytest.skip("Liger's luspo divides its KL, one value a token, by the padded length")
    config = make_config(loss_type, importance_sampling_level=level, beta=beta, use_bias_correction_kl=corrected)
    case, logps, _ = peer_case(7)
    ref = case.options["ref_per_token_logps"]
    old = case.options["old_per_token_logps"]
    mask = case.completion_mask.to(logps.dtype)
    want, _metrics = liger.LigerFusedLinearGRPOFunction.ppo_loss_fn(
        logps, mask, case.advantages, mask, ref_per_token_logps=ref, old_per_token_logps=old,
        epsilon_low=config.epsilon, epsilon_high=config.epsilon_upper, beta=beta, loss_type=loss_type,
        max_completion_length=config.max_completion_length, importance_sampling_level=level,
        use_bias_correction_kl=corrected,
    )  # fmt: skip
    want.backward()
    want_dlogps, logps.grad = logps.grad, None
    out = grpo_loss(
        logps, case.advantages, case.completion_mask, old_per_token_logps=old, config=config,
        ref_per_token_logps=ref if beta else None,
    )  # fmt: skip
    out.loss.backward()
    assert want_dlogps.abs().max() > 0
    torch.testing.assert_close(out.loss, want, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(logps.grad, want_dlogps, rtol=1e-6, atol=1e-9)
