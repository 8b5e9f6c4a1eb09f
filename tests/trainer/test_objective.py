"""Training with an objective of `grpo_fused.objectives` in place of a loss type, and what a rollout records for it."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, save_file
from torch import Tensor
from trainer.small_model import build_small_model
from trainer.small_trainer import make_trainer
from trainer.test_candidates import logits_of
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from grpo_fused import CandidateSets, GRPOLossConfig
from grpo_fused.__main__ import main
from grpo_fused.rollouts.records import Records, ScoredSets
from grpo_fused.trainer import Generation, GRPOTrainerConfig, HuggingFaceEngine, Rollout, Sampling, roll_out
from grpo_fused.trainer.cli import read_recipe
from grpo_fused.trainer.config import check_for_vllm
from grpo_fused.trainer.dry_run import dry_run, every_other, report
from grpo_fused.trainer.objective import FACTORIES, ObjectiveOptions

CAP = 1.1
REFUSED = {"clip_cov", "kl_cov", "ref_kl", "topk_forward_kl", "topk_reverse_kl"}
RATE, DECAY = 1e-2, 0.1
MASK = ObjectiveOptions(name="score_centered_tis", options={"cap": CAP})
TOP = ObjectiveOptions(name="score_centered_tis", options={"support": "top_k", "cap": CAP}, num_alternatives=5)
PLAIN = ObjectiveOptions(name="reinforce", options={"high": CAP})


def rollout_of(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, batch_size: int | None = None, **options: Any
) -> Rollout:
    torch.manual_seed(0)
    sampling = Sampling(num_generations=8, max_completion_length=6, temperature=0.9, eos_token_ids=(1, 5),
                        pad_token_id=tokenizer.pad_token_id, **options)  # fmt: skip
    prompts = [tokenizer(text).input_ids for text in ("1+2=", "123+34=")]
    return roll_out(HuggingFaceEngine(model, tokenizer, batch_size=batch_size), prompts, sampling)


@pytest.mark.parametrize("batch_size", [None, 5])
@pytest.mark.parametrize(
    "options",
    [
        {"records": "sampled"},
        {"records": "mask", "top_k": 3},
        {"records": "mask", "top_p": 0.9},
        {"records": "mask", "min_p": 1e-9},
        {"records": "top_k", "num_alternatives": 4},
        {"records": "top_k", "num_alternatives": 10**6},
    ],
    ids=str,
)
def test_the_records_are_the_samplers_log_probs(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, batch_size: int | None, options: dict[str, Any]
) -> None:
    plain = {name: value for name, value in options.items() if name not in ("records", "num_alternatives")}
    rollout, unrecorded = (rollout_of(model, tokenizer, batch_size, **chosen) for chosen in (options, plain))
    assert torch.equal(rollout.completion_ids, unrecorded.completion_ids)
    assert unrecorded.sampling_logps is None
    assert unrecorded.alternatives is None
    mask, V = rollout.completion_mask, model.config.vocab_size
    assert not mask.all()  # some end early
    z = logits_of(model, rollout) / 0.9
    kept = CandidateSets.from_logits(z, **plain).to_mask(V).view(z.shape)
    want = z.masked_fill(~kept, -torch.inf).log_softmax(-1)
    got = rollout.sampling_logps
    assert got is not None
    torch.testing.assert_close(
        got[mask], want.gather(-1, rollout.completion_ids[..., None])[..., 0][mask], rtol=0, atol=2e-5
    )
    assert (got[~mask] == 0).all()
    if options["records"] == "sampled":
        assert rollout.alternatives is None
        return
    if options["records"] == "top_k":
        kept = torch.zeros_like(kept).scatter_(-1, want.topk(min(V, options["num_alternatives"])).indices, True)
    some = torch.tensor([3, 9, 1])
    for part, rows in ((rollout, slice(None)), (rollout.rows(some), some)):
        width, others = part.completion_ids.shape[1], part.alternatives
        assert others is not None
        active = part.completion_mask.reshape(-1)
        dense = torch.full((len(active), V), -torch.inf).index_put(
            (others.sets.positions, others.sets.ids), others.logps
        )
        expected = want.masked_fill(~kept, -torch.inf)[rows][:, :width].reshape(-1, V)
        torch.testing.assert_close(dense[active], expected[active], rtol=0, atol=2e-5)


def test_a_rollout_with_alternatives_is_saved(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    rollout = rollout_of(model, tokenizer, records="top_k", num_alternatives=2)
    save_file(rollout.tensors(), tmp_path / "rollout.safetensors")
    found = load_file(tmp_path / "rollout.safetensors")
    others = rollout.alternatives
    assert others is not None
    assert torch.equal(found["alternative_ids"], others.sets.ids)
    assert torch.equal(found["alternative_offsets"], others.sets.offsets)
    assert torch.equal(found["alternative_logps"], others.logps)


class Stale(HuggingFaceEngine):
    """Samples with the weights with which it was made: the policy moves away from it."""

    def __init__(self, model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__(copy.deepcopy(model), tokenizer)
        self.rollouts: list[Generation] = []

    def generate(self, prompts: Any, sampling: Sampling) -> Generation:
        generation = super().generate(prompts, sampling)
        self.rollouts.append(generation)
        return generation


def by_hand(
    model: Qwen2ForCausalLM, rollout: Rollout, advantages: Tensor, config: GRPOTrainerConfig, sampler: Qwen2ForCausalLM
) -> tuple[Tensor, dict[str, float]]:
    """The loss from all logits of policy and sampler, by the formula, and the means of log q - log p and of entropies."""
    ids, mask = rollout.completion_ids, rollout.completion_mask
    everything = torch.cat([rollout.prompt_ids, ids], 1)
    attention = torch.cat([rollout.prompt_mask, mask], 1).long()
    positions, start = (attention.cumsum(1) - 1).clamp(min=0), rollout.prompt_ids.shape[1] - 1
    z, z_q = (
        one(everything, attention_mask=attention, position_ids=positions).logits[:, start:-1] / config.temperature
        for one in (model, sampler)
    )
    z_q = z_q.detach()
    if config.truncates:
        kept = CandidateSets.from_logits(z_q, top_p=config.top_p).to_mask(z.shape[-1]).view(z.shape)
        z, z_q = z.masked_fill(~kept, -torch.inf), z_q.masked_fill(~kept, -torch.inf)
    log_p, log_q = z.log_softmax(-1), z_q.log_softmax(-1)
    p, q = log_p.detach().exp(), log_q.exp()
    weight = torch.where(q > 0, p / q, 0.0).clamp(max=CAP)
    sampled = ids.unsqueeze(-1)
    score = (weight * torch.where(q > 0, log_p, 0.0)).gather(-1, sampled)[..., 0]
    assert config.objective is not None
    if config.objective.name == "score_centered_tis":
        coefficient = q * weight
        if config.objective.records == "top_k":
            top = torch.zeros_like(q).scatter_(-1, q.topk(config.objective.num_alternatives).indices, 1.0)
            left, rest = 1 - (q * top).sum(-1, keepdim=True), 1 - (p * top).sum(-1, keepdim=True)
            alpha = left / rest * (rest / left).clamp(max=CAP)
            coefficient = top * (coefficient - alpha * p)
        score = score - (coefficient * torch.where(q > 0, log_p, 0.0)).sum(-1)
    values = {
        "sampler_kl": (log_q - log_p.detach()).gather(-1, sampled)[..., 0],
        "entropy": -torch.where(p > 0, p * log_p.detach(), 0.0).sum(-1),
    }
    means = {name: value[mask].mean().item() for name, value in values.items()}
    loss = -advantages[:, None] * score * mask
    if config.loss.loss_type == "grpo":
        return (loss.sum(1) / mask.sum(1)).mean(), means
    return loss.sum() / mask.sum(), means


@pytest.mark.parametrize("micro_batch_tokens", [10**6, 30], ids=["whole", "parts"])
@pytest.mark.parametrize(
    ("objective", "loss_type", "options"),
    [
        (MASK, "dapo", {"top_p": 0.8}),
        (MASK, "grpo", {"top_p": 0.8, "num_iterations": 2, "steps": 1}),
        (TOP, "dapo", {}),
        (TOP, "grpo", {"num_iterations": 2, "steps": 1}),
        (PLAIN, "dapo", {"num_iterations": 2, "steps": 1}),
        (PLAIN, "dapo", {"top_p": 0.8}),
    ],
    ids=["mask", "mask-mu2", "top_k", "top_k-mu2", "plain-mu2", "plain-mask"],
)
def test_two_steps_are_those_of_a_loop_on_logits(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[dict[str, str]],
    objective: ObjectiveOptions,
    loss_type: Any,
    options: dict[str, Any],
    micro_batch_tokens: int,
) -> None:
    """Two optimizer steps, on one rollout or on two of a sampler that keeps its weights."""
    hand = copy.deepcopy(model)
    trainer = make_trainer(
        model, tokenizer, rows, [every_other], objective=objective, temperature=0.9, learning_rate=RATE, weight_decay=DECAY,
        micro_batch_tokens=micro_batch_tokens, max_grad_norm=1e3, loss=GRPOLossConfig(loss_type=loss_type), **options,
    )  # fmt: skip
    engine = trainer.sampler.engine = Stale(model, tokenizer)
    seen: list[tuple[Rollout, Tensor]] = []
    update = trainer.update.__call__
    trainer.update = lambda *given: seen.append(given) or update(*given)  # type: ignore[assignment, func-returns-value]
    history = trainer.train()
    vectors = [p for p in hand.parameters() if p.dim() == 1]  # of biases and norms, which do not decay
    matrices = [p for p in hand.parameters() if p.dim() > 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE)
    found: list[dict[str, float]] = []
    for rollout, advantages in seen:
        assert advantages.any()
        for _ in range(options.get("num_iterations", 1)):
            optimizer.zero_grad()
            loss, means = by_hand(hand, rollout, advantages, trainer.config, engine.model)
            loss.backward()
            optimizer.step()
            found.append({"loss": loss.item()} | means)
    assert len(found) == 2
    assert found[1]["sampler_kl"] > 1e-3
    for name in found[0]:
        steps = [step[name] for step in found]
        wanted = [sum(steps) / 2] if len(seen) == 1 else steps
        assert [row[name] for row in history] == pytest.approx(wanted, abs=2e-5), name
    for name, want in hand.named_parameters():
        # AdamW moves a weight by RATE whatever its gradient: those whose gradient is rounding may go elsewhere
        got = dict(model.named_parameters())[name]
        moved = (want - got).abs() > 0.02 * RATE
        assert moved.float().mean() < 0.01, name


@pytest.mark.gate(keep=lambda loss_type, scope: scope == "token" or loss_type in ("grpo", "dapo"))
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "luspo"])
@pytest.mark.parametrize("scope", ["token", "sequence"])
def test_an_objective_that_is_a_loss_type_trains_as_it(
    tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]], loss_type: Any, scope: str
) -> None:
    """PPO's clipped loss, by the token and by the sequence: with old log-probs, micro-batches and each average."""
    length = {"max_completion_length": 7} if loss_type == "dr_grpo" else {}
    shared: dict[str, Any] = {"num_iterations": 3, "learning_rate": RATE, "micro_batch_tokens": 30, "steps": 1}
    if scope == "token":
        level, options = {}, {"name": "vanilla", "options": {"dual_clip": None}}
    else:
        level, options = {"importance_sampling_level": "sequence_token"}, {"name": "gspo", "options": {"epsilon": 0.2}}
        options["options"] |= {"epsilon_high": 0.2}
    weights = []
    for chosen in (
        {"loss": GRPOLossConfig(loss_type=loss_type, **length, **level)},
        {"loss": GRPOLossConfig(loss_type=loss_type, **length), "objective": ObjectiveOptions(**options)},
    ):
        AcceleratorState._reset_state(reset_partial_state=True)
        model = build_small_model(len(tokenizer))
        history = make_trainer(model, tokenizer, rows, [every_other], **shared, **chosen).train()
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
        assert history[0]["grad_norm"] > 0
    start = torch.cat([parameter.detach().flatten() for parameter in build_small_model(len(tokenizer)).parameters()])
    assert (weights[1] - weights[0]).norm() < 0.02 * (weights[0] - start).norm()


@pytest.mark.parametrize("name", ["icepop", "topr", "fipo", "kimi", "cross_entropy"])
def test_objectives_of_other_inputs_and_scopes_train(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]], name: str
) -> None:
    chosen = ObjectiveOptions(name=name)
    trainer = make_trainer(model, tokenizer, rows, [every_other], objective=chosen, num_iterations=2)
    assert all(row["grad_norm"] > 0 for row in trainer.train())


def test_an_objective_without_old_log_probs_has_no_pass_for_them(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = make_trainer(model, tokenizer, rows, objective=ObjectiveOptions(name="cross_entropy"))
    monkeypatch.setattr(trainer.policy, "score", None)
    assert trainer.step()["grad_norm"] > 0


def test_an_objective_gets_the_sequences_without_advantages(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]
) -> None:
    def equal(completions: list[str], **_: object) -> list[float]:
        return [1.0] * len(completions)

    trainer = make_trainer(model, tokenizer, rows, [equal], objective=ObjectiveOptions(name="cross_entropy"))
    assert all(row["grad_norm"] > 0 for row in trainer.train())


class Loses(HuggingFaceEngine):
    """Does not return a part of what it was asked for."""

    lost: dict[str, Any]

    def generate(self, prompts: Any, sampling: Sampling) -> Generation:
        return super().generate(prompts, sampling)._replace(**self.lost)


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ({"sampling_logps": None}, "what the objective reads: sampling_logps; got none"),
        ({"alternatives": None}, "alternatives for each of .* positions; got none"),
        (
            {"alternatives": ScoredSets(CandidateSets(torch.tensor([1]), torch.tensor([0, 1])), torch.zeros(1))},
            "alternatives for each of .* positions; got 1",
        ),
        ("empty", "alternatives of every token; 1 have none"),
    ],
    ids=["logps", "alternatives", "positions", "empty"],
)
def test_a_record_that_is_lost_is_an_error(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, lost: Any, message: str
) -> None:
    engine = Loses(model, tokenizer)
    sampling = Sampling(num_generations=1, max_completion_length=2, eos_token_ids=(), records="top_k",
                        num_alternatives=2)  # fmt: skip
    if lost == "empty":
        sets = CandidateSets(torch.tensor([1, 2]), torch.tensor([0, 2, 2]))
        lost = {"alternatives": ScoredSets(sets, torch.zeros(2))}
    engine.lost = lost
    with pytest.raises(ValueError, match=message):
        roll_out(engine, [[3, 4]], sampling)


def test_evaluation_records_nothing(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]
) -> None:
    seen: list[Records | None] = []

    class Spy(HuggingFaceEngine):
        def generate(self, prompts: Any, sampling: Sampling) -> Generation:
            seen.append(sampling.records)
            return super().generate(prompts, sampling)

    trainer = make_trainer(model, tokenizer, rows, objective=TOP, eval_dataset=rows[:1], eval_samples=2, steps=1)
    trainer.sampler.engine = Spy(model, tokenizer)
    trainer.train()
    assert seen == [None, None, "top_k", None, None]
    with pytest.raises(ValueError, match="records must be None with greedy"):
        replace(trainer.sampler.sampling, greedy=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "score_centred"}, "name must be one of cispo, clip_cov, .*; got 'score_centred'"),
        ({"name": "mixture"}, "name must be one of .*; got 'mixture'"),
        ({"name": "ref_kl"}, "whose inputs the trainer has .*; ref_kl needs ref_per_token_logps"),
        ({"name": "topk_forward_kl"}, "topk_forward_kl needs teacher_alternative_logps"),
        ({"name": "kl_cov"}, "scope token or sequence.*; got kl_cov, scope batch"),
        ({"name": "dro"}, "options must be those of dro: .*beta"),
        ({"name": "score_centered_tis", "options": {"caps": 2}}, "options must be those of score_centered_tis: .*caps"),
        ({"name": "score_centered_tis", "options": {"cap": -1}}, "score_centered_tis: cap must be > 0"),
        ({"name": "score_centered_tis", "options": {"support": "all"}}, "support must be one of mask, top_k"),
        ({"name": "score_centered_tis", "num_alternatives": 0}, "num_alternatives must be at least 1"),
        (
            {"name": "score_centered_tis", "num_alternatives": 9},
            "num_alternatives is only read with support top_k; got 9",
        ),
    ],
    ids=str,
)
def test_objectives_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ObjectiveOptions(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": GRPOLossConfig(epsilon=0.1)}, "no option of loss but loss_type and .*; got .*epsilon=0.1"),
        ({"loss": GRPOLossConfig(beta=0.1)}, "no option of loss but .*beta=0.1"),
        (
            {"loss": GRPOLossConfig(loss_type="sapo")},
            "averages .* by loss_type, which must be one of grpo, .*luspo; got 'sapo'",
        ),
        ({"importance_sampling": "token_mask"}, "no importance_sampling, .*; got token_mask"),
        ({"importance_sampling_clip": 2.0}, "no importance_sampling_clip, .*; got 2.0"),
        ({"repetition_penalty": 1.1}, "repetition_penalty 1 .*; got 1.1"),
        ({"objective": MASK}, "must come with top_p, top_k or min_p"),
        ({"top_p": 0.9}, "support top_k must come without top_p, .*; got 0.9, 0 and 0.0"),
        ({"min_p": 0.1}, "support top_k must come without .*; got 1.0, 0 and 0.1"),
    ],
    ids=str,
)
def test_options_that_do_not_go_with_an_objective(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^objective .*{message}"):
        GRPOTrainerConfig(**{"objective": TOP} | options)


@pytest.mark.parametrize("objective", [PLAIN, TOP, ObjectiveOptions(name="gpg")], ids=lambda o: o.name)
def test_vllm_records_what_an_objective_reads(objective: ObjectiveOptions) -> None:
    """And the corrections of a loss type are not asked for."""
    penalty = 1.0 if objective.records else 1.1
    check_for_vllm(GRPOTrainerConfig(objective=objective, repetition_penalty=penalty))


@pytest.mark.parametrize("name", sorted(FACTORIES.keys() - REFUSED))
def test_the_other_objectives_are_made(name: str) -> None:
    made = ObjectiveOptions(name=name, options={"beta": 0.1} if name == "dro" else {})
    assert made.objective.__name__.startswith(f"{name}(")


def test_a_recipe_with_an_objective(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = recipe.read_text().replace("loss: {beta: 0.04, epsilon: 0.3}", "loss: {loss_type: grpo}")
    recipe.write_text(text + "objective: {name: score_centered_tis, options: {support: top_k, cap: 1.5}}\n")
    found = read_recipe(["--config", str(recipe)])[0]
    assert found.objective == ObjectiveOptions(name="score_centered_tis", options={"support": "top_k", "cap": 1.5})
    assert found.loss_name == "score_centered_tis(support='top_k', cap=1.5) averaged as grpo"
    assert found.loss_name in report(found, dry_run(found))
    main(["train", "--config", str(recipe)])
    assert f"{found.loss_name}, engine" in capsys.readouterr().out
    for arguments, message in (
        (["--loss.beta", "0.1"], f"{recipe}:13: objective must come with no option of loss"),
        (["--objective.name", "chess"], "command line: objective.name must be one of"),
        (["--objective.options", "{caps: 2}"], "command line: objective.options must be those of"),
        (["--objective.cap", "2"], "command line: unknown option 'objective.cap'"),
        (["--objective", "score_centered_tis"], "objective must be a mapping of options or null"),
    ):
        with pytest.raises(SystemExit, match="2"):
            read_recipe(["--config", str(recipe), *arguments])
        assert message in capsys.readouterr().err
