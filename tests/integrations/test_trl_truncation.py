"""`exact_truncation`: TRL's trainers on the distribution that top-k, top-p and min-p left, against dense masked logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from integrations.trl_runs import build, sampled_from, save_small_model, train
from peft import LoraConfig
from transformers import AutoModelForCausalLM, GenerationConfig, ProcessorMixin
from trl import GRPOConfig, GRPOTrainer

import grpo_fused.integrations.trl as ours
from grpo_fused.api import operators
from grpo_fused.integrations.trl import head
from grpo_fused.integrations.trl.release import CONTINUOUS_BATCHING, FUSED_HEAD, GMPO, RELEASE
from grpo_fused.integrations.trl.truncation import _recording
from grpo_fused.rollouts.engine import padded_sets

BATCHING = CONTINUOUS_BATCHING[RELEASE < GMPO]  # renamed in that release
TRUNCATED: dict[str, dict[str, Any]] = {
    "top_p": {"top_p": 0.8, "temperature": 0.9},
    "top_k": {"top_k": 4},
    "min_p": {"min_p": 0.1, "temperature": 1.3},
    "all": {"top_k": 9, "top_p": 0.9, "min_p": 0.02},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_small_model(tmp_path_factory.mktemp("model"))


def masked(base: type) -> type:
    """Every score from all logits, in fp32, with those outside the set at -inf, by autograd."""

    class Trainer(base):
        def _get_per_token_logps_and_entropies(
            self, model, input_ids, attention_mask, logits_to_keep, *args: Any, **kwargs: Any
        ):
            T = logits_to_keep
            logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, -T - 1 : -1].float()
            logits = logits / self.temperature
            kept = padded_sets(self._sets, T).to_mask(logits.shape[-1]).view(logits.shape)
            log_p = logits.masked_fill(~kept, -torch.inf).log_softmax(-1)
            entropies = -(log_p.exp() * log_p.masked_fill(~kept, 0.0)).sum(-1)
            ids = input_ids[:, -T:]
            mask = attention_mask[:, -T:] != 0
            # a masked token may be outside its set
            logps = log_p.gather(-1, ids.unsqueeze(-1)).squeeze(-1).masked_fill(~mask, 0.0)
            scores = (logps, entropies.masked_fill(~mask, 0.0), None)
            return scores[: 2 if RELEASE < GMPO else 3]  # 1.7 brought the auxiliary loss, too

    return Trainer


SETTINGS: dict[str, dict[str, Any]] = {
    "accumulation": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "beta": 0.1},
    "steps-per-generation": {"steps_per_generation": 2, "per_device_train_batch_size": 4, "beta": 0.1},
    "iterations": {"num_iterations": 2, "max_steps": 4, "loss_type": "grpo"},
    "masked": {"mask_truncated_completions": True, "num_iterations": 2, "beta": 0.1},
    "sequence": {"importance_sampling_level": "sequence", "num_iterations": 2},
    "entropy": {"top_entropy_quantile": 0.5, "num_iterations": 2},
    "default": {"bf16": True, "num_iterations": 2, "max_steps": 2, "beta": 0.1, "gradient_checkpointing": True},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.* not computed from the log-probs")
@pytest.mark.gate(keep=lambda truncated, setting: setting in ("accumulation", "default") or truncated == "all")
@pytest.mark.parametrize(
    ("truncated", "setting"),
    [("top_p", name) for name in SETTINGS] + [(name, "iterations") for name in TRUNCATED if name != "top_p"],
)
def test_a_run_is_that_of_dense_masked_logits(truncated, setting, folder, tmp_path, monkeypatch):
    """By the predicted loss as with several processes; with accumulation by rows that are added to the gradient."""
    monkeypatch.setattr(head, "is_alone_with", lambda weight: setting == "accumulation")
    options = {**TRUNCATED[truncated], **SETTINGS[setting], "exact_truncation": True}
    got = train(ours.FusedGRPOTrainer, GRPOConfig, folder, tmp_path, **options)
    want = train(masked(ours.FusedGRPOTrainer), GRPOConfig, folder, tmp_path, **options)
    moved = {name: x - want.initial[name] for name, x in want.weights.items()}
    size = torch.cat([x.flatten() for x in moved.values()]).norm()
    apart = torch.cat([(x - want.weights[name]).flatten() for name, x in got.weights.items()]).norm()
    assert size > 0
    assert apart <= (2**-4 if setting == "default" else 1e-4) * size
    if setting != "default":
        torch.testing.assert_close(torch.tensor(got.losses), torch.tensor(want.losses), rtol=1e-4, atol=1e-5)
    assert got.trainer.loss_counts.recomputed == 0, "the loss was not the predicted one"
    assert got.trainer.loss_counts.fused > 0


@pytest.mark.parametrize("alone", [True, False], ids=["one process", "others wait for gradients"])
def test_micro_batches_add_rows_to_the_gradient(alone, folder, tmp_path, monkeypatch):
    """The first of a window makes a dense dW; where other processes share it, each does.

    Each does before TRL 1.15, too: DDP follows the head there, so that what is scored is no parameter.
    """
    operator, added = operators.linear_logprobs_gradient, []
    real = operator.body
    monkeypatch.setattr(operator, "body", lambda call, to=None: (added.append(to), real(call, to))[1])
    if not alone:
        monkeypatch.setattr(head, "is_alone_with", lambda weight: False)
    options = {"exact_truncation": True, "top_k": 4, "gradient_accumulation_steps": 4, "per_device_train_batch_size": 2}
    got = train(ours.FusedGRPOTrainer, GRPOConfig, folder, tmp_path, max_steps=2, **options)
    adds = alone and RELEASE >= FUSED_HEAD
    assert [x is not None for x in added] == (2 * [False, True, True, True] if adds else [])
    assert (got.trainer.loss_counts.fused, got.trainer.loss_counts.recomputed) == (8, 0)


@pytest.mark.parametrize("exact", [True, False], ids=["a token without a set", "no sets"])
def test_a_whole_head_adds_no_rows(exact, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(head, "may_need_whole_head", lambda *_: exact)
    monkeypatch.setattr(operators.linear_logprobs_gradient, "body", None)
    options = {
        "exact_truncation": exact,
        "top_k": 4,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 4,
    }
    got = train(ours.FusedGRPOTrainer, GRPOConfig, folder, tmp_path, max_steps=1, **options)
    assert got.trainer.loss_counts.recomputed == 0


@pytest.mark.gate(keep=lambda truncated: truncated in ("top_p", "all"))
@pytest.mark.parametrize("truncated", TRUNCATED)
def test_ratios_to_what_was_sampled_are_1(truncated, folder, tmp_path):
    """Old log-probs are those of the sampler with `exact_truncation`, and of another distribution without."""
    options = TRUNCATED[truncated]
    warpers = {name: x for name, x in options.items() if name != "temperature"}
    sampled = []
    for exact in (True, False):

        class Trainer(ours.FusedGRPOTrainer):
            def _generate_and_score_completions(self, inputs):
                batch = super()._generate_and_score_completions(inputs)
                self.batches.append((batch, *sampled_from(self, batch, **warpers)))
                return batch

        Trainer.batches = []
        run = train(Trainer, GRPOConfig, folder, tmp_path, max_steps=2, num_iterations=2, exact_truncation=exact,
                    **options)  # fmt: skip
        batch, kept, log_q = Trainer.batches[0]
        mask = batch["completion_mask"] != 0
        assert kept.sum(-1)[mask].float().mean() < kept.shape[-1] / 2
        ratio = (batch["old_per_token_logps"] - log_q)[mask].exp()
        assert bool(((ratio - 1).abs() < 1e-4).all()) == exact
        if exact:
            recorded = padded_sets(batch["candidates"], kept.shape[1]).to_mask(kept.shape[-1]).view(kept.shape)
            assert torch.equal(recorded[mask], kept[mask])
            first = run.logs[0]
            assert first["clip_ratio/region_mean"] == 0
        else:
            assert "candidates" not in batch
        sampled.append(batch["completion_ids"])
    assert torch.equal(*sampled)  # what is sampled is not changed


def test_the_first_ratios_are_bitwise_1(folder, tmp_path):
    """Old and new scores of the same policy, in another order and in parts: the sets went with their sequences."""
    seen = []

    class Trainer(ours.FusedGRPOTrainer):
        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            seen.append(found[0].detach())
            return found

        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            self.ratios.append((seen[-1] - inputs["old_per_token_logps"])[inputs["completion_mask"] != 0].exp())
            return loss

    Trainer.ratios = []
    train(Trainer, GRPOConfig, folder, tmp_path, exact_truncation=True, top_p=0.8, num_iterations=2, max_steps=2)
    assert (Trainer.ratios[0] == 1).all()
    assert (Trainer.ratios[1] != 1).any()


def test_evaluation_has_its_own_sets(folder, tmp_path):
    class Trainer(ours.FusedGRPOTrainer):
        def prediction_step(self, *args, **kwargs):
            loss = super().prediction_step(*args, **kwargs)
            assert self._sets is not None
            self.evaluated = True
            return loss

    run = train(Trainer, GRPOConfig, folder, tmp_path, exact_truncation=True, top_p=0.8, max_steps=1)
    run.trainer.evaluate(run.trainer.train_dataset.select(range(8)))
    assert run.trainer.evaluated


@pytest.mark.skipif(RELEASE < GMPO, reason="TRL 1.7 has GMPOTrainer")
def test_gmpo(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(head, "is_alone_with", lambda weight: False)  # else nothing is predicted
    from trl.experimental.gmpo import GMPOConfig

    gmpo = train(ours.FusedGMPOTrainer, GMPOConfig, folder, tmp_path, exact_truncation=True, top_p=0.8,
                 num_iterations=2)  # fmt: skip
    assert (gmpo.trainer.loss_counts.fused, gmpo.trainer.loss_counts.recomputed) == (3, 0)


def test_lora(folder, tmp_path):
    options = {"exact_truncation": True, "top_p": 0.8, "num_iterations": 2, "beta": 0.1}
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    run = train(ours.FusedGRPOTrainer, GRPOConfig, folder, tmp_path, peft=lora, **options)
    want = train(masked(ours.FusedGRPOTrainer), GRPOConfig, folder, tmp_path, peft=lora, **options)
    for name, x in run.weights.items():
        torch.testing.assert_close(x, want.weights[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("min_p", [0.02, 0.0])
def test_the_models_own_config_truncates_nothing_else(min_p, folder):
    """`generate` takes what is None from it."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.generation_config = GenerationConfig(top_k=2, top_p=0.3, min_p=0.9, temperature=0.2)
    config = GenerationConfig(max_new_tokens=3, do_sample=True, temperature=1.5, top_k=20, top_p=0.98, min_p=min_p)
    with _recording(model, 1.5) as recorders:
        out = model.generate(torch.arange(16).view(8, 2), generation_config=config, return_dict_in_generate=True,
                             output_scores=True)  # fmt: skip
    for sets, scores in zip(recorders[0].steps, out.scores, strict=True):
        assert sets.sizes.max() > 2
        assert torch.equal(sets.to_mask(scores.shape[1]), scores > -torch.inf)


def test_a_missing_top_k_is_the_one_of_transformers(folder):
    """50, where neither config has one; a missing number of new tokens is no matter of what could be sampled."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(96)
    config = GenerationConfig(max_length=5, do_sample=True, temperature=1.0, top_k=None, top_p=1.0)
    with _recording(model, 1.0) as recorders:
        out = model.generate(torch.arange(16).view(8, 2), generation_config=config, return_dict_in_generate=True,
                             output_scores=True)  # fmt: skip
    for sets, scores in zip(recorders[0].steps, out.scores, strict=True):
        assert (sets.sizes == 50).all()
        assert torch.equal(sets.to_mask(scores.shape[1]), scores > -torch.inf)


def test_an_option_of_the_models_own_config_is_refused(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.generation_config = GenerationConfig(typical_p=0.9)
    config = GenerationConfig(max_new_tokens=3, do_sample=True, temperature=1.0, top_p=0.9)
    with _recording(model, 1.0), pytest.raises(ValueError, match=r"generate also has typical_p=0\.9"):
        model.generate(torch.arange(8).view(4, 2), generation_config=config)


def test_without_truncation_nothing_changes(folder, tmp_path):
    options = {"num_iterations": 2, "max_steps": 2}
    got = train(ours.FusedGRPOTrainer, GRPOConfig, folder, tmp_path, exact_truncation=True, **options)
    want = train(GRPOTrainer, GRPOConfig, folder, tmp_path, **options)
    assert got.trainer._sets is None
    torch.testing.assert_close(torch.tensor(got.losses), torch.tensor(want.losses), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"generation_kwargs": {"typical_p": 0.9}}, "generate also has typical_p"),
        ({"generation_kwargs": {"do_sample": False}}, "generate also has do_sample=False"),
        (
            {"generation_kwargs": {"no_repeat_ngram_size": 2, "max_new_tokens": None}},
            "generate also has no_repeat_ngram_size",
        ),
        ({"repetition_penalty": 2.0}, "generate also has repetition_penalty=2.0"),
        ({"generation_kwargs": {"repetition_penalty": 2.0}}, "generate also has repetition_penalty=2.0"),
        ({"generation_kwargs": {"temperature": 0.5}}, "temperature of GRPOConfig, 1.0; generate samples at 0.5"),
        ({"generation_kwargs": {"min_new_tokens": 3}}, "generate also has min_new_tokens=3"),
        ({BATCHING: True}, f"cannot be used with {BATCHING}"),
    ],
    ids=lambda x: "-".join([*x, *x.get("generation_kwargs", {})]) if isinstance(x, dict) else "",
)
@pytest.mark.parametrize("truncated", [{}, {"top_p": 0.8}], ids=["not-truncated", "top_p"])
def test_what_cannot_be_recorded_is_refused(truncated, options, match, folder, tmp_path):
    """Also where all tokens can be sampled: training would score another distribution than was sampled."""
    with pytest.raises(ValueError, match=match):
        build(ours.FusedGRPOTrainer, folder, tmp_path, exact_truncation=True, **truncated, **options)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"use_vllm": True, "vllm_mode": "server"}, "a vLLM server"),
        (
            {"use_vllm": True, "vllm_mode": "colocate", "vllm_tensor_parallel_size": 2},
            "vllm_tensor_parallel_size above 1",
        ),
        ({"tools": [len]}, "tools or environments"),
        ({"environments": [object()]}, "tools or environments"),
        ({"environment_factories": [len]}, "tools or environments"),
        ({"rollout_func": len}, "rollout_func"),
        ({"processing_class": ProcessorMixin()}, "a vision-language model"),
    ],
    ids=["server", "tensor-parallel", "tools", "environments", "factories", "rollout_func", "vision"],
)
def test_samplers_that_are_not_recorded_are_refused(changed, named, folder, tmp_path):
    """As they stand in a trainer that TRL has made; these need vLLM, a chat model or one that sees to be made."""
    trainer = build(ours.FusedGRPOTrainer, folder, tmp_path)
    trainer._check_truncation()
    for name, value in changed.items():
        setattr(trainer, name, value)
    with pytest.raises(ValueError, match=f"it cannot be used with {named}$"):
        trainer._check_truncation()


def test_a_text_is_no_flag(folder, tmp_path):
    with pytest.raises(TypeError, match="exact_truncation must be True or False; got 'false'"):
        train(ours.FusedGRPOTrainer, GRPOConfig, folder, tmp_path, exact_truncation="false", top_k=3)


def test_what_changes_later_is_refused_when_it_is_used(folder, tmp_path):
    trainer = build(ours.FusedGRPOTrainer, folder, tmp_path, exact_truncation=True)
    trainer.generation_config.repetition_penalty = 2.0
    with pytest.raises(ValueError, match="generate also has repetition_penalty=2.0"):
        trainer.train()
