"""TRL's trainers on our head, compared with stock ones: losses, logged metrics and weights after several steps."""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import fields
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from integrations.trl_runs import WORDS, Run, build, save_small_model, train
from transformers import PhiConfig, PhiForCausalLM
from transformers.integrations.liger import apply_liger_kernel
from transformers.models.qwen2 import modeling_qwen2
from trl import GRPOConfig, GRPOTrainer

from grpo_fused.integrations import trl as ours
from grpo_fused.integrations.trl import adapters, prediction
from grpo_fused.integrations.trl.head import check_trl_reads_the_head
from grpo_fused.integrations.trl.release import FUSED_HEAD, GMPO, RELEASE, WINDOWS

EXACT = 1e-5
gmpo = pytest.mark.skipif(RELEASE < GMPO, reason="TRL 1.7 has GMPOTrainer")
fused_head = pytest.mark.skipif(RELEASE < FUSED_HEAD, reason="TRL 1.15 has the fused head")
TIMES = ("step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_small_model(tmp_path_factory.mktemp("model") / "small")


def assert_same_run(got: Run, want: Run, *, weights: float = EXACT) -> None:
    """Losses, every logged number and every weight; the run must have done something."""
    assert max(map(abs, want.losses)) > 1e-4
    torch.testing.assert_close(torch.tensor(got.losses), torch.tensor(want.losses), rtol=EXACT, atol=EXACT)
    assert len(got.logs) == len(want.logs)
    for mine, theirs in zip(got.logs, want.logs, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine.keys() - set(TIMES):
            if theirs[name] is None:
                assert mine[name] is None
                continue
            a, b = float(mine[name]), float(theirs[name])
            assert (math.isnan(a) and math.isnan(b)) or abs(a - b) <= EXACT * max(1.0, abs(b)), (name, a, b)
    assert got.weights.keys() == want.weights.keys()
    moved = max((want.weights[name] - want.initial[name]).abs().max() for name in want.weights)
    assert moved > 1e-4
    for name, weight in want.weights.items():
        difference = (got.weights[name] - weight).abs().max()
        assert difference <= weights * max(1.0, weight.abs().max()), (name, difference)
    # relative to how far they went, too: weights that hardly move would agree in any case
    apart = math.sqrt(sum((got.weights[n] - want.weights[n]).square().sum().item() for n in want.weights))
    length = math.sqrt(sum((want.weights[n] - want.initial[n]).square().sum().item() for n in want.weights))
    assert apart <= 10 * weights * length


def both(folder: Any, tmp_path: Any, *, ours_as: Any = ours.FusedGRPOTrainer, **options: Any) -> tuple[Run, Run]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return (
            train(ours_as, GRPOConfig, folder, tmp_path, **options),
            train(GRPOTrainer, GRPOConfig, folder, tmp_path, **options),
        )


LOSSES = {
    "grpo": {}, "bnpo": {}, "dr_grpo": {}, "dapo": {}, "luspo": {}, "cispo": {"epsilon_high": 1.2},
    "sapo": {"sapo_temperature_pos": 0.8, "sapo_temperature_neg": 1.3}, "vespo": {"vespo_k_pos": 1.5, "vespo_k_neg": 2.5},
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "accumulation": {"gradient_accumulation_steps": 2},
    "steps-per-generation": {"gradient_accumulation_steps": 2, "steps_per_generation": 4},
    "iterations": {"num_iterations": 2},
    "truncated-masked": {"mask_truncated_completions": True, "max_completion_length": 24},
    "entropy-quantile": {"top_entropy_quantile": 0.4, "num_iterations": 2},
    "entropy-bonus": {"entropy_coef": 0.05, "gradient_accumulation_steps": 2},
    "entropy-adaptive": {"use_adaptive_entropy": True, "entropy_target": 1.0, "entropy_coef": 0.02},
    "off-policy-mask": {"off_policy_mask_threshold": 0.001, "num_iterations": 3},
    "fp32-head": {"cast_lm_head_to_fp32": True},
    "checkpointing": {"gradient_checkpointing": True},
    "delta": {"delta": 1.1, "epsilon": 0.05, "epsilon_high": 0.3, "num_iterations": 2},
    "no-bias-correction": {"use_bias_correction_kl": False, "num_iterations": 2},
    "sync-ref": {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5},
    "temperature": {"temperature": 0.7, "num_iterations": 2},
}


OPTIONS = {field.name for field in fields(GRPOConfig)}
LOSSES = {name: options for name, options in LOSSES.items() if options.keys() <= OPTIONS}
SETTINGS = {name: options for name, options in SETTINGS.items() if options.keys() <= OPTIONS}  # those of this release


def covering_runs() -> list[tuple[str, str, float, str]]:
    """Every pair of (loss type, level), (loss type, beta), (loss type, setting), (level, setting), (beta, setting)."""
    wanted = set()
    factors = [list(LOSSES), ["token", "sequence"], [0.0, 0.1], list(SETTINGS)]
    for (i, first), (j, second) in itertools.combinations(enumerate(factors), 2):
        wanted |= {(i, a, j, b) for a in first for b in second}
    runs = []
    candidates = [c for c in itertools.product(*factors) if allowed(*c)]
    wanted &= {(i, c[i], j, c[j]) for c in candidates for i, j in itertools.combinations(range(4), 2)}
    while wanted:
        best = max(candidates, key=lambda c: len(pairs(c) & wanted))
        runs.append(best)
        wanted -= pairs(best)
    return runs


def pairs(run: tuple) -> set:
    return {(i, run[i], j, run[j]) for i, j in itertools.combinations(range(len(run)), 2)}


def allowed(loss: str, level: str, beta: float, setting: str) -> bool:
    if setting == "delta" and loss in ("cispo", "sapo", "vespo"):
        return False
    return not (setting in ("sync-ref", "no-bias-correction") and beta == 0.0)


def one_of_each(runs: list) -> list:
    """A run for each setting: the one that shows most loss types, and pairs of level and beta, for the first time."""
    seen, chosen = set(), []

    def shown(run: tuple) -> set:
        loss, level, beta, _ = run
        return {loss, (level, beta)}

    for setting in reversed(SETTINGS):  # the last ones go with few loss types and betas
        run = max((run for run in runs if run[3] == setting), key=lambda run: len(shown(run) - seen))
        chosen.append(run)
        seen |= shown(run)
    assert seen == {*LOSSES, *itertools.product(("token", "sequence"), (0.0, 0.1))}
    return chosen


RUNS = covering_runs()
GATE = one_of_each(RUNS)


def run_options(loss: str, level: str, beta: float, setting: str) -> dict[str, Any]:
    options = {"loss_type": loss, "importance_sampling_level": level, "beta": beta, **LOSSES[loss], **SETTINGS[setting]}
    if setting not in ("accumulation", "steps-per-generation"):
        options = {"num_iterations": 2, "max_steps": 4, **options}  # on-policy, the losses are 0
    if loss == "luspo" or (loss, level) == ("bnpo", "sequence"):
        # gradients in the hundreds: with larger steps the policy jumps by tens of nats, and rounding decides where to
        options["learning_rate"] = 3e-4
    elif loss == "sapo":
        # with larger steps sigmoids are 1 but for rounding, and TRL's derivative of them is that rounding
        options["learning_rate"] = 1e-3
    return options


@pytest.mark.parametrize(
    "run",
    [pytest.param(run, marks=[] if run in GATE else [pytest.mark.full]) for run in RUNS],
    ids=lambda run: "-".join(map(str, run)),
)
def test_fused_trainer_is_stock_trainer(run, folder, tmp_path):
    options = run_options(*run)
    got, want = both(folder, tmp_path, **options)
    assert_same_run(got, want)
    predicted = not (RELEASE < WINDOWS and "luspo" in run)
    counts = got.trainer.loss_counts
    assert (counts.fused, counts.recomputed > 0) == ((len(got.losses), False) if predicted else (0, True))


@pytest.mark.skipif("entropy_coef" not in OPTIONS, reason="this release has no entropy bonus")
def test_equal_rewards_with_an_entropy_bonus(folder, tmp_path, monkeypatch):
    """Nothing but the entropies has a gradient."""
    monkeypatch.setattr("integrations.trl_runs.reward", lambda completions, **_: [1.0] * len(completions))
    got, want = both(folder, tmp_path, entropy_coef=0.05)
    assert_same_run(got, want)
    assert any((got.weights[name] != x).any() for name, x in got.initial.items())
    assert (got.trainer.loss_counts.fused, got.trainer.loss_counts.recomputed) == (len(got.losses), 0)


def test_a_quantile_of_all_processes_is_not_known(folder, tmp_path, monkeypatch):
    trainer = build(ours.FusedGRPOTrainer, folder, tmp_path, top_entropy_quantile=0.5)
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", lambda *_: prediction.announced.get())
    batch = {name: torch.ones(8, 5) for name in ("completion_ids", "completion_mask")}
    batch |= {"advantages": torch.ones(8), "num_items_in_batch": torch.tensor(40)}
    trainer.current_gradient_accumulation_steps = 1
    assert trainer._compute_loss(None, batch) is not None
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    assert trainer._compute_loss(None, batch) is None
    assert "top_entropy_quantile is of the tokens of all processes" in trainer.why_unknown()
    trainer.top_entropy_quantile = 1.0
    assert trainer._compute_loss(None, batch) is not None


def test_tool_mask(folder, tmp_path):
    """Tokens that a tool wrote are in the completion and out of the loss."""

    def with_tool_mask(base: type) -> type:
        class Trainer(base):
            def _generate_and_score_completions(self, inputs):
                batch = super()._generate_and_score_completions(inputs)
                ids = batch["completion_ids"]
                batch["tool_mask"] = (ids % 3 != 0).to(batch["completion_mask"].dtype)
                batch["num_items_in_batch"] = (batch["tool_mask"] * batch["completion_mask"]).sum()
                return batch

        return Trainer

    for loss_type in ("dapo", "grpo"):
        options = run_options(loss_type, "token", 0.1, "iterations")
        got = train(with_tool_mask(ours.FusedGRPOTrainer), GRPOConfig, folder, tmp_path, **options)
        want = train(with_tool_mask(GRPOTrainer), GRPOConfig, folder, tmp_path, **options)
        assert_same_run(got, want)
        assert got.trainer.loss_counts.recomputed == 0


@pytest.mark.skipif("off-policy-mask" not in SETTINGS, reason="this release has no such mask")
def test_the_off_policy_mask_is_of_what_was_sampled(folder, tmp_path):
    """A batch has log-probs of a rollout engine where vLLM sampled, and TRL prefers them to the old policy's."""

    def sampled_elsewhere(base: type) -> type:
        class Trainer(base):
            def _generate_and_score_completions(self, inputs):
                batch = super()._generate_and_score_completions(inputs)
                away = 0.1 * torch.randn(8, 1, generator=torch.Generator().manual_seed(0))
                batch["sampling_per_token_logps"] = batch["old_per_token_logps"] + away
                return batch

        return Trainer

    options = {"off_policy_mask_threshold": 0.05, "num_iterations": 2, "max_steps": 2}
    got = train(sampled_elsewhere(ours.FusedGRPOTrainer), GRPOConfig, folder, tmp_path, **options)
    assert_same_run(got, train(sampled_elsewhere(GRPOTrainer), GRPOConfig, folder, tmp_path, **options))
    assert got.trainer.loss_counts.recomputed == 0


def test_tied_embeddings(tmp_path):
    folder = save_small_model(tmp_path / "tied", tied=True)
    got, want = both(folder, tmp_path, **run_options("dapo", "token", 0.1, "accumulation"))
    assert_same_run(got, want)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_lora(folder, tmp_path, beta):
    """A frozen head: one product of three is saved, and nothing of it moves."""
    peft = pytest.importorskip("peft")

    def config():
        return peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")

    options = run_options("dapo", "token", beta, "iterations") | {"learning_rate": 0.1}
    got = train(ours.FusedGRPOTrainer, GRPOConfig, folder, tmp_path, peft=config(), **options)
    want = train(GRPOTrainer, GRPOConfig, folder, tmp_path, peft=config(), **options)
    assert_same_run(got, want)
    assert not any("lm_head" in name for name in want.weights)


class OwnHead(ours.FusedLogProbFunction):
    """peft's layer itself, on all logits."""

    @classmethod
    def apply(cls, hidden, weight, bias, targets, temperature, *_):
        log_p = (adapters.adapted.get()(hidden).float() / temperature).log_softmax(-1)
        entropy, found = -(log_p.exp() * log_p).sum(-1), log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        return found, entropy, None, None, None


def test_lora_on_the_head(folder, tmp_path):
    """TRL's own head would not train it, so TRL refuses it from 1.15 on; there the other run has peft's layer."""
    peft = pytest.importorskip("peft")

    def config():
        return peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")

    options = run_options("dapo", "token", 0.1, "iterations") | {"learning_rate": 0.1}
    if RELEASE >= FUSED_HEAD:
        with ours.use_fused_head(), pytest.raises(ValueError, match="adapter to `lm_head` is not supported"):
            train(GRPOTrainer, GRPOConfig, folder, tmp_path, peft=config(), **options)
        ours.patch_trl(OwnHead)
    try:
        want = train(GRPOTrainer, GRPOConfig, folder, tmp_path, peft=config(), **options)
    finally:
        ours.unpatch_trl()
    got = train(ours.FusedGRPOTrainer, GRPOConfig, folder, tmp_path, peft=config(), **options)
    assert_same_run(got, want)
    assert any("lm_head" in name for name in want.weights)
    if RELEASE >= FUSED_HEAD:
        ours.patch_trl()
        try:
            assert_same_run(train(GRPOTrainer, GRPOConfig, folder, tmp_path, peft=config(), **options), want)
            with pytest.raises(ValueError, match="cast_lm_head_to_fp32=True` is not supported"):
                train(GRPOTrainer, GRPOConfig, folder, tmp_path, peft=config(), cast_lm_head_to_fp32=True, **options)
        finally:
            ours.unpatch_trl()


def test_mixture_of_experts(tmp_path):
    """The router's auxiliary loss joins the fused one."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=42, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, eos_token_id=1, pad_token_id=0,
        bos_token_id=None, router_aux_loss_coef=0.05,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(20.0)
    model.save_pretrained(tmp_path / "moe")
    got, want = both(tmp_path / "moe", tmp_path, **run_options("dapo", "token", 0.0, "iterations"))
    assert_same_run(got, want)
    assert RELEASE < GMPO or "aux_loss" in got.logs[0]  # 1.7 brought both


@gmpo
@pytest.mark.parametrize(
    "options",
    [
        {"beta": 0.0},
        {"beta": 0.1, "epsilon": 0.02, "epsilon_high": 0.08, "top_entropy_quantile": 0.6, "learning_rate": 3e-4},
    ],
    ids=["plain", "options"],
)
def test_gmpo_twin(options, folder, tmp_path):
    from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

    options = {"num_iterations": 2, "max_steps": 4, **options}
    got = train(ours.FusedGMPOTrainer, GMPOConfig, folder, tmp_path, **options)
    want = train(GMPOTrainer, GMPOConfig, folder, tmp_path, **options)
    assert_same_run(got, want)
    assert got.trainer.loss_counts.recomputed == 0


def test_a_loss_that_nobody_foresaw_is_exact_all_the_same(folder, tmp_path):
    """A subclass with a formula of its own: the prediction fails, the gradients are made again, and it is said."""

    def altered(base: type) -> type:
        class Trainer(base):
            def get_high_entropy_mask(self, entropies, mask, threshold):
                return (entropies > 0.5) & mask.bool()

        return Trainer

    options = run_options("dapo", "token", 0.1, "entropy-quantile")
    with pytest.warns(UserWarning, match=r"second pass .* so the training is right.* not the one expected from"):
        got = train(altered(ours.FusedGRPOTrainer), GRPOConfig, folder, tmp_path, **options)
    want = train(altered(GRPOTrainer), GRPOConfig, folder, tmp_path, **options)
    assert_same_run(got, want)
    assert got.trainer.loss_counts.recomputed > 0


@pytest.mark.parametrize("replaced", ["_compute_loss", "_get_per_token_logps_and_entropies"])
def test_a_subclass_that_replaces_what_makes_the_loss_is_told(replaced, folder, tmp_path):
    """Nothing is fused then; what it computes is TRL's."""

    class Trainer(ours.FusedGRPOTrainer):
        pass

    setattr(Trainer, replaced, getattr(GRPOTrainer, replaced))
    with pytest.warns(UserWarning, match=r"not computed from the log-probs .* must call super\(\)'s") as told:
        got = train(Trainer, GRPOConfig, folder, tmp_path, max_steps=2, num_iterations=2)
    assert sum("must call super" in str(warning.message) for warning in told) == 1
    assert (got.trainer.loss_counts.fused, got.trainer.loss_counts.recomputed) == (0, 2)


def default_settings(out: Any) -> dict[str, Any]:
    """What TRL's users run with: bf16 autocast, a reference that accelerate has prepared, clipped gradients."""
    defaults = GRPOConfig(str(out), use_cpu=True, report_to="none")
    assert defaults.bf16
    names = ("bf16", "gradient_checkpointing", "max_grad_norm", "model_init_kwargs")
    return {"beta": 0.1, "num_iterations": 2, "max_steps": 2, **{name: getattr(defaults, name) for name in names}}


def test_default_settings(folder, tmp_path):
    """TRL rounds its logits to bf16 and we do not: alike to bf16's 2^-8 in each of a few products."""
    got, want = both(folder, tmp_path, **default_settings(tmp_path))
    torch.testing.assert_close(torch.tensor(got.losses), torch.tensor(want.losses), rtol=2**-6, atol=2**-8)
    apart = math.sqrt(sum((got.weights[n] - want.weights[n]).square().sum().item() for n in want.weights))
    length = math.sqrt(sum((want.weights[n] - want.initial[n]).square().sum().item() for n in want.weights))
    # TRL 1.15 scores by Triton kernels, whose interpreter truncates to bf16 on a CPU; ours trains as under 1.16
    assert 0 < apart <= (2**-2 if RELEASE == (1, 15) else 2**-5) * length
    assert (got.trainer.loss_counts.fused, got.trainer.loss_counts.recomputed) == (2, 0)


@gmpo
def test_default_settings_of_gmpo(folder, tmp_path):
    from trl.experimental.gmpo import GMPOConfig

    got = train(ours.FusedGMPOTrainer, GMPOConfig, folder, tmp_path, **default_settings(tmp_path))
    assert (got.trainer.loss_counts.fused, got.trainer.loss_counts.recomputed) == (2, 0)


def test_liger_layers_on_the_cpu_are_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="use_liger_kernel must be False"):
        train(ours.FusedGRPOTrainer, GRPOConfig, folder, tmp_path, use_liger_kernel=True)
    config = GRPOConfig(str(tmp_path), use_cpu=True, report_to="none", use_liger_kernel=True)
    with pytest.raises(ValueError, match="use_liger_kernel must be False"):
        ours.FusedGRPOTrainer(str(folder), print, config)  # by position


@fused_head
def test_liger_layers_of_another_trainer_are_named(folder, tmp_path, monkeypatch):
    """A trainer that has trained with them leaves them in transformers' module, for every later model of the process."""
    pytest.importorskip("liger_kernel")
    for name, value in vars(modeling_qwen2).copy().items():
        monkeypatch.setattr(modeling_qwen2, name, value)  # put back after the test
    with pytest.warns(FutureWarning):
        stock = build(GRPOTrainer, folder, tmp_path, use_liger_kernel=True)
    apply_liger_kernel(stock.model, stock.args.liger_kernel_config)  # as `train` does, which needs a GPU from here
    with pytest.raises(ValueError, match="use_liger_kernel must be False on the CPU"):
        build(ours.FusedGRPOTrainer, folder, tmp_path, use_liger_kernel=True)
    with pytest.raises(RuntimeError, match="Qwen2ForCausalLM has layers of Liger's.* start a new process"):
        build(ours.FusedGRPOTrainer, folder, tmp_path)
    monkeypatch.undo()
    build(ours.FusedGRPOTrainer, folder, tmp_path)
    with pytest.raises(RuntimeError, match="Qwen2ForCausalLM has layers of Liger's"):
        check_trl_reads_the_head(stock.model)


def test_engine_and_scratch_can_be_chosen(folder, tmp_path):
    options = run_options("grpo", "sequence", 0.1, "iterations")
    got = train(
        ours.FusedGRPOTrainer, GRPOConfig, folder, tmp_path, impl="chunked", max_scratch_bytes=40_000, **options
    )
    assert_same_run(got, train(GRPOTrainer, GRPOConfig, folder, tmp_path, **options))
    with pytest.raises(ValueError, match="impl must be one of"):
        train(ours.FusedGRPOTrainer, GRPOConfig, folder, tmp_path, impl="fast", **options)

    with pytest.raises(ValueError, match="impl must be one of auto, chunked, cuda, triton, native; got 'reference'"):
        train(ours.FusedGRPOTrainer, GRPOConfig, folder, tmp_path, impl="reference", **options)


@pytest.mark.parametrize(
    "options", [{"epsilon_high": math.inf}, {"delta": math.inf, "beta": 0.1}, {"epsilon": 0.0}], ids=str
)
def test_values_that_only_trl_takes(options, folder, tmp_path):
    options |= {"max_steps": 2, "num_iterations": 2}
    with pytest.warns(UserWarning, match="second pass .* refuses an option: .* must be (> 0|finite)"):
        got = train(ours.FusedGRPOTrainer, GRPOConfig, folder, tmp_path, **options)
    assert_same_run(got, train(GRPOTrainer, GRPOConfig, folder, tmp_path, **options))
    assert (got.trainer.loss_counts.fused, got.trainer.loss_counts.recomputed) == (0, 2)


def test_answers_of_one_token(folder, tmp_path):
    options = {"max_completion_length": 1, "max_steps": 4, "num_iterations": 2, "beta": 0.1, "learning_rate": 0.02}
    got, want = both(folder, tmp_path, **options)
    assert_same_run(got, want)
    assert (got.trainer.loss_counts.fused, got.trainer.loss_counts.recomputed) == (4, 0)


@fused_head
def test_a_bias_of_the_head_is_trained(tmp_path):
    config = PhiConfig(
        vocab_size=len(WORDS) + 2, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        eos_token_id=1, pad_token_id=0, bos_token_id=None, resid_pdrop=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = PhiForCausalLM(config)
    model.lm_head.weight.data *= 25.0
    model.save_pretrained(tmp_path / "phi")
    options = {"loss_type": "grpo", "gradient_accumulation_steps": 2}  # TRL divides such a loss by the steps
    got, want = both(tmp_path / "phi", tmp_path, max_steps=2, num_iterations=2, **options)
    assert_same_run(got, want)
    assert (got.weights["lm_head.bias"] - got.initial["lm_head.bias"]).abs().max() > 1e-4
    assert got.trainer.loss_counts.fused == 4


def test_an_unknown_loss_type_is_named(folder, tmp_path):
    trainer = build(ours.FusedGRPOTrainer, folder, tmp_path, loss_type="dappo")
    with pytest.raises(ValueError, match="loss_type must be one of grpo, .* got 'dappo'"):
        trainer.train()


@pytest.mark.parametrize(
    ("trainer_class", "loss_type", "corrected", "kept"),
    [
        ("FusedGRPOTrainer", "dapo", True, True),
        ("FusedGRPOTrainer", "dapo", False, False),
        ("FusedGRPOTrainer", "vespo", False, True),
        pytest.param("FusedGMPOTrainer", "dapo", True, False, marks=gmpo),
    ],
    ids=["corrected", "not-corrected", "vespo", "gmpo"],
)
def test_losses_that_take_the_ratio_of_a_rollout_engine(trainer_class, loss_type, corrected, kept, folder, tmp_path):
    """As in TRL's `_compute_loss`; a batch has the ratio where vLLM sampled."""
    config_class = GRPOConfig
    if trainer_class == "FusedGMPOTrainer":
        from trl.experimental.gmpo import GMPOConfig as config_class
    trainer = build(getattr(ours, trainer_class), folder, tmp_path, config_class=config_class, loss_type=loss_type)
    trainer.use_vllm, trainer.vllm_importance_sampling_correction = True, corrected
    batch = {name: torch.ones(8, 5) for name in ("completion_ids", "completion_mask", "importance_sampling_ratio")}
    batch |= {"advantages": torch.ones(8), "num_items_in_batch": torch.tensor(40)}
    trainer.current_gradient_accumulation_steps = 1
    predicted = trainer.predict_loss(batch)
    assert (predicted.inputs.importance_sampling_ratio is not None) == kept
