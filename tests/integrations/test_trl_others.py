"""`patch_trl` in TRL's other trainers: the same logs and weights as without."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from datasets import load_from_disk
from integrations.tiny import build
from integrations.trl_runs import (
    assert_same_training,
    of_dpo,
    of_kto,
    of_rloo,
    of_sft,
    save_small_model,
    train_any,
)
from transformers import AutoModelForCausalLM

from grpo_fused.integrations.trl import FusedLogProbFunction, use_fused_head
from grpo_fused.integrations.trl.release import FUSED_HEAD, RELEASE


@pytest.fixture
def folder(tmp_path):
    return save_small_model(tmp_path / "small")


@pytest.fixture
def counting():
    """Our head, and how often it scored."""

    class Counting(FusedLogProbFunction):
        calls = 0

        @classmethod
        def apply(cls, *args: Any) -> Any:
            Counting.calls += 1
            return super().apply(*args)

    return Counting


@pytest.mark.parametrize("which", [of_rloo, of_dpo, of_kto, of_sft], ids=["rloo", "dpo", "kto", "sft"])
def test_other_trainers_run_on_our_head(which, folder, counting, tmp_path):
    """The same logs and weights as with TRL's head, and ours was really called where the release lets it."""
    want = train_any(which, folder, tmp_path)
    with use_fused_head(counting):
        got = train_any(which, folder, tmp_path)
    assert bool(counting.calls) == (RELEASE >= FUSED_HEAD or which is not of_sft)  # made in the model before
    assert_same_training(got, want)


PLAIN = ("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
         "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm")  # fmt: skip
PREFERENCES: dict[str, tuple[Any, dict[str, Any]]] = {
    **{
        f"dpo-{name}": (
            of_dpo,
            {"loss_type": [name], "beta": 0.5, "label_smoothing": 0.1 * (name in ("exo_pair", "robust"))},
        )
        for name in PLAIN
    },
    "dpo-mixed": (of_dpo, {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}),
    "dpo-ld_alpha": (of_dpo, {"ld_alpha": 0.5}),
    **{
        f"dpo-{name}": (of_dpo, {"f_divergence_type": name})
        for name in ("forward_kl", "js_divergence", "alpha_divergence")
    },
    "dpo-precomputed": (of_dpo, {"precompute_ref_log_probs": True}),
    "dpo-checkpointed": (of_dpo, {"gradient_checkpointing": True}),
    "dpo-accumulated": (of_dpo, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}),
    "kto-kto": (of_kto, {"beta": 0.5, "desirable_weight": 1.5}),
    "kto-apo_zero_unpaired": (of_kto, {"loss_type": "apo_zero_unpaired", "beta": 0.5}),
    "kto-precomputed": (of_kto, {"precompute_ref_log_probs": True}),
    "kto-one-label": (of_kto, {"per_device_train_batch_size": 2}),  # some batches have no chosen completion
}


@pytest.mark.gate(keep=lambda name: name in ("dpo-mixed", "dpo-precomputed", "kto-apo_zero_unpaired", "kto-one-label"))
@pytest.mark.parametrize("name", PREFERENCES)
def test_options_of_dpo_and_kto(name, folder, counting, tmp_path):
    which, options = PREFERENCES[name]
    if (
        name == "dpo-sigmoid_norm"
        and "sigmoid_norm" not in {f.name: f for f in fields(which()[1])}["loss_type"].metadata["help"]
    ):
        pytest.skip("this release has no such loss")

    def run(out: Any) -> Any:
        train_dataset = which()[2]["train_dataset"]
        train_dataset.save_to_disk(out)  # a cache of its own for what TRL computes once
        ref_model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
        with torch.no_grad():
            ref_model.lm_head.weight.mul_(0.9)  # so that no reward is only rounding
        given = {"ref_model": ref_model, "train_dataset": load_from_disk(out)}
        return train_any(which, folder, out, given=given, **options)

    want = run(tmp_path / "stock")
    with use_fused_head(counting):
        got = run(tmp_path / "ours")
    if options.keys() <= {"precompute_ref_log_probs"}:  # two steps; KTO also scores other completions, for a KL
        assert counting.calls == (4 if which is of_dpo else 8)
    assert counting.calls
    assert_same_training(got, want)


@pytest.mark.gate(keep=lambda which, head: head and which is of_dpo)
@pytest.mark.parametrize("head", [False, True], ids=["", "head"])
@pytest.mark.parametrize("which", [of_dpo, of_kto], ids=["dpo", "kto"])
def test_reference_is_the_model_without_its_adapters(which, head, folder, counting, tmp_path):
    """They do not start at zero, so the reference is another model, with another head."""
    peft = pytest.importorskip("peft")
    if head and RELEASE >= FUSED_HEAD:
        pytest.skip("TRL's own head refuses adapters")

    def run() -> Any:
        modules = ["q_proj", *["lm_head"] * head]
        config = peft.LoraConfig(r=4, target_modules=modules, task_type="CAUSAL_LM", init_lora_weights=False)
        return train_any(which, folder, tmp_path, given={"peft_config": config})

    want = run()
    with use_fused_head(counting):
        got = run()
    assert counting.calls
    assert_same_training(got, want)


def test_softcapped_head(counting, tmp_path):
    """Means are of capped logits."""
    folder = tmp_path / "gemma2"
    build("gemma2", eos_token_id=1).save_pretrained(folder)
    want = train_any(of_dpo, folder, tmp_path)
    with use_fused_head(counting):
        got = train_any(of_dpo, folder, tmp_path)
    assert counting.calls
    assert_same_training(got, want)


@pytest.mark.gate(keep=lambda which: which is of_dpo)
@pytest.mark.parametrize("which", [of_dpo, of_kto], ids=["dpo", "kto"])
def test_evaluation(which, folder, tmp_path):
    """A metric of the user's gets logits: where it wants them, they are computed."""
    seen = []

    def metric(predictions: Any) -> dict[str, float]:
        seen.append(predictions.predictions)
        return {}

    def run(given: dict[str, Any]) -> Any:
        given = {"eval_dataset": which()[2]["train_dataset"], **given}
        return train_any(which, folder, tmp_path, given=given, eval_strategy="steps", eval_steps=1)

    for given in ({}, {"compute_metrics": metric}):
        want = run(given)
        with use_fused_head():
            got = run(given)
        assert_same_training(got, want)
    assert len(seen) == 4
    for theirs, mine in zip(seen[:2], seen[2:], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-4)


@pytest.mark.skipif(RELEASE >= FUSED_HEAD, reason="TRL's head has what it needs")
def test_what_needs_logits_keeps_them(folder, counting, tmp_path):
    want = train_any(of_dpo, folder, tmp_path, use_weighting=True)
    with use_fused_head(counting):
        got = train_any(of_dpo, folder, tmp_path, use_weighting=True)
    assert not counting.calls
    assert_same_training(got, want)
