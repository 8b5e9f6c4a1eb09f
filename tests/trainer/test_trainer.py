"""The loop: its output, the effects of its options, and that it learns."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.utils._python_dispatch import TorchDispatchMode
from trainer.small_model import build_small_model
from trainer.small_trainer import by_position, make_trainer, scores_of
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from grpo_fused import GRPOLossConfig
from grpo_fused.rewards import exact_answer_reward, format_reward
from grpo_fused.rewards.calling import RewardError
from grpo_fused.rollouts.engine import pad_prompts
from grpo_fused.trainer import GRPOTrainerConfig, HuggingFaceEngine, Policy, Rollout, setup
from grpo_fused.trainer.policy import Reference
from grpo_fused.trainer.tiny import tiny_model, tiny_tokenizer


def test_reward_functions_get_their_columns(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]
) -> None:
    calls: list[dict[str, Any]] = []

    def spy(**columns: Any) -> list[float | None]:
        calls.append(columns)
        return [0.0, None] * 4

    metrics = make_trainer(model, tokenizer, rows, [spy, exact_answer_reward]).step()
    (call,) = calls
    assert set(call) == {"prompts", "completions", "completion_ids", "answer"}
    assert [tokenizer.decode(ids, skip_special_tokens=True) for ids in call["completion_ids"]] == call["completions"]
    assert len(call["completions"]) == 8
    right = {row["prompt"]: row["answer"] for row in rows}
    assert [right[prompt] for prompt in call["prompts"]] == call["answer"]
    assert call["prompts"] == [prompt for prompt in call["prompts"][::4] for _ in range(4)]  # contiguous groups
    assert metrics["rewards/spy"] == 0.0
    assert metrics["unjudged"] == 0  # the other function judged them all


def test_an_unjudged_sample_is_counted_and_has_no_effect(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]
) -> None:
    trainer = make_trainer(model, tokenizer, rows, [lambda **columns: [1.0] + [None] * 7])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    metrics = trainer.step()
    assert metrics["unjudged"] == 7
    assert metrics["loss"] == 0
    assert metrics["grad_norm"] == 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_metrics_of_rewards_are_of_what_was_judged(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]
) -> None:
    """Nobody judges the second group; in the first the weighted sums are 1, 0, 0 and 2."""

    def first(completions: list[str], **columns: object) -> list[float | None]:
        return [1.0, 0.0, 0.0, 0.0] + [None] * 4

    def second(completions: list[str], **columns: object) -> list[float | None]:
        return [None] * 3 + [4.0] + [None] * 4

    metrics = make_trainer(model, tokenizer, rows, [first, second], reward_weights=[1.0, 0.5]).step()
    assert metrics["reward"] == pytest.approx(0.75)
    assert metrics["reward_std"] == pytest.approx(torch.tensor([1.0, 0.0, 0.0, 2.0]).std().item())
    assert (metrics["rewards/first"], metrics["rewards/second"], metrics["unjudged"]) == (0.25, 4.0, 4.0)
    assert metrics["tokens_per_second"] * metrics["seconds"] == pytest.approx(8 * metrics["completion_length"])


def test_completions_are_printed_with_the_sum_of_what_was_judged(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[dict[str, str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    def silent(completions: list[str], **columns: object) -> list[None]:
        return [None] * len(completions)

    def ones(completions: list[str], **columns: object) -> list[float]:
        return [1.0] * len(completions)

    trainer = make_trainer(model, tokenizer, rows, [ones, silent], reward_weights=[0.5, 1.0], sample_steps=2, steps=3)
    trainer.train()
    lines = capsys.readouterr().out.splitlines()
    assert [x.partition(",")[0] for x in lines if "completions of step" in x] == [
        "completions of step 1", "completions of step 3",
    ]  # fmt: skip
    assert sum(line.startswith("reward 0.5  ") for line in lines) == 6
    assert sum("ones 1, silent not judged" in line for line in lines) == 6


def test_a_step_that_no_reward_judges_ends_the_run(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[dict[str, str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def silent(completions: list[str], **columns: object) -> list[None]:
        return [None] * len(completions)

    def stops(completions: list[str], **columns: object) -> list[float | None]:
        return [None if trainer.steps_done == 2 else len(text) / 2 for text in completions]

    trainer = make_trainer(model, tokenizer, rows, [silent, stops], output_dir=tmp_path, steps=4)
    with pytest.raises(RewardError, match="must judge some of the 8 completions of step 3; got None for all"):
        trainer.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-000002"]
    named = [line for line in capsys.readouterr().out.splitlines() if "judged no completion" in line]
    assert named == ["reward function 'silent' judged no completion of step 1: all are None"]


def test_metrics_are_written_one_line_a_step(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]], tmp_path: Path
) -> None:
    rewards = [format_reward, exact_answer_reward]
    loss = GRPOLossConfig(beta=0.01)
    options = {
        "num_iterations": 2,
        "loss": loss,
        "evaluate": lambda: {"accuracy": torch.tensor(0.5)},
        "eval_steps": 2,
        "steps": 3,
    }
    for _ in range(2):  # the second run starts the file again
        make_trainer(model, tokenizer, rows, rewards, output_dir=tmp_path, overwrite=True, **options).train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert [line["step"] for line in lines if "accuracy" in line] == [0, 2, 3]
    expected = {
        "reward", "rewards/format_reward", "rewards/exact_answer_reward", "kl", "entropy", "clip_ratio/region_mean",
        "completion_length", "loss", "grad_norm", "zero_std_groups", "seconds", "epoch",
    }  # fmt: skip
    assert all(expected <= set(line) for line in lines[1:])


def test_a_reference_exists_only_with_beta(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]
) -> None:
    assert make_trainer(model, tokenizer, rows).reference is None
    trainer = make_trainer(model, tokenizer, rows, loss=GRPOLossConfig(beta=0.1))
    assert trainer.reference is not None
    reference = trainer.reference.policy.unwrapped
    frozen = {name: value.clone() for name, value in reference.state_dict().items()}
    trainer.train()
    assert all(torch.equal(value, frozen[name]) for name, value in reference.state_dict().items())
    assert any(not torch.equal(value, frozen[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("adapter", [False, True], ids=["whole", "adapter"])
def test_a_teacher_is_frozen_and_has_no_dropout(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]], adapter: bool
) -> None:
    """It is the reference, also of a new adapter, without which the policy would be one."""
    from peft import LoraConfig, get_peft_model

    if adapter:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))  # type: ignore[arg-type, assignment]
    teacher = build_small_model(len(tokenizer), seed=1).train()
    trainer = make_trainer(model, tokenizer, rows, loss=GRPOLossConfig(beta=0.1), reference_model=teacher)
    assert trainer.reference is not None
    assert trainer.reference.policy.unwrapped is teacher
    assert not any(module.training for module in teacher.modules())
    assert not any(p.requires_grad for p in teacher.parameters())
    assert any(p.requires_grad for p in model.parameters())


def test_a_teacher_goes_to_the_device_also_where_accelerate_moves_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under FSDP; only a GPU would show it."""
    teacher, moved = build_small_model(32, seed=1), list[torch.device]()
    monkeypatch.setattr(teacher, "to", lambda device: moved.append(device) or teacher)
    accelerator = Accelerator(cpu=True, device_placement=False)
    policy = Policy(build_small_model(32), accelerator, GRPOTrainerConfig(loss=GRPOLossConfig(beta=0.1)))
    Reference(policy, teacher)
    assert moved == [accelerator.device]


@pytest.mark.parametrize(
    ("precision", "estimator", "engine"),
    [("no", "k3", "chunked"), ("bf16", "k3", "triton"), ("bf16", "exact", "chunked")],
)
def test_the_facts_name_the_engine_of_autocasts_dtype(precision: Any, estimator: Any, engine: str) -> None:
    """On an H200, of a policy in fp32."""
    pytest.importorskip("triton")
    from cuda_double import CUDA, cuda_double

    loss = GRPOLossConfig(beta=0.1, kl_estimator=estimator)
    config, model = GRPOTrainerConfig(mixed_precision=precision, loss=loss), build_small_model(32)
    with cuda_double((9, 0)):
        assert setup.engine_of_loss(config, model, CUDA) == engine


def test_the_loop_learns(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]
) -> None:
    """From about 0.2 ones in 4 tokens to nearly all; half of that is far above random."""
    options = {"steps": 40, "num_generations": 8, "learning_rate": 1e-2, "num_iterations": 2}
    history = make_trainer(model, tokenizer, rows, **options).train()
    assert history[0]["reward"] < 1.0
    assert history[-1]["reward"] > 2.0


def test_the_same_seed_gives_the_same_run(tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]) -> None:
    def run(seed: int) -> list[dict[str, float]]:
        trainer = make_trainer(build_small_model(len(tokenizer)), tokenizer, rows, seed=seed, steps=3)
        history = trainer.train()
        return [{name: value for name, value in line.items() if "second" not in name} for line in history]

    assert run(0) == run(0)
    assert run(0) != run(1)


@pytest.mark.parametrize("seed", [2**32 - 1, 2**32 - 3])
def test_the_largest_seeds_are_those_of_several_processes_too(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]],
    monkeypatch: pytest.MonkeyPatch, seed: int,
) -> None:  # fmt: skip
    seeds: list[int] = []
    trainer = make_trainer(model, tokenizer, rows, steps=1, seed=seed)
    monkeypatch.setattr("grpo_fused.trainer.loop.set_seed", lambda seed, **_: seeds.append(seed))
    monkeypatch.setattr(type(trainer.accelerator), "process_index", 2)
    monkeypatch.setattr(trainer, "step", lambda: pytest.fail("stops"))
    with pytest.raises(BaseException, match="stops"):
        trainer.train()
    assert seeds == [(seed + 2) % 2**32]


def test_a_run_that_goes_on_forgets_that_all_processes_failed(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]
) -> None:
    """With several, one that fails alone must not save: the others would not take part."""

    def fails(completions: list[str], **columns: object) -> list[float]:
        raise OSError("the judge is offline")

    def evaluate() -> dict[str, float]:
        failed.append(trainer.peers.all_failed)
        return {}

    failed: list[bool] = []
    trainer = make_trainer(model, tokenizer, rows, [fails], evaluate=evaluate)
    for _ in range(2):
        with pytest.raises(RewardError):
            trainer.train()
    assert failed == [False, False]
    assert trainer.peers.all_failed


def test_groups_with_equal_rewards_need_no_pass_of_the_model(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]
) -> None:
    """Two groups of four, one with equal rewards: four sequences pass through the model, not eight."""
    seen: list[int] = []
    trainer = make_trainer(model, tokenizer, rows, [lambda **columns: [1.0] * 4 + [1.0, 0.0] * 2])
    hidden_states = trainer.policy.hidden_states
    trainer.policy.hidden_states = lambda rollout: (seen.append(len(rollout.prompt_ids)), hidden_states(rollout))[1]  # type: ignore[method-assign]
    assert trainer.step()["zero_std_groups"] == 0.5
    assert seen == [4]
    trainer.reward_functions["<lambda>"] = lambda **columns: [1.0] * 8
    metrics = trainer.step()
    assert seen == [4]
    assert (metrics["zero_std_groups"], metrics["loss"], metrics["grad_norm"]) == (1.0, 0.0, 0.0)


def test_left_out_groups_do_not_change_the_update(
    tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]
) -> None:
    """A tiny KL term keeps all sequences in: the gradient is the same up to it, so the normaliser counts all."""
    rewards = [lambda **columns: [1.0] * 4 + [1.0, 0.0] * 2]
    norms = []
    for loss in (GRPOLossConfig(), GRPOLossConfig(beta=1e-9)):
        trainer = make_trainer(build_small_model(len(tokenizer)), tokenizer, rows, rewards, loss=loss)
        torch.manual_seed(0)
        norms.append(trainer.step()["grad_norm"])
    assert norms[0] > 0.01
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_on_policy_steps_score_nothing_twice(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither one iteration nor two need a scoring pass: the first pass gives the second its old log-probs."""
    trainer = make_trainer(model, tokenizer, rows, num_iterations=2)
    monkeypatch.setattr(trainer.policy, "score", None)
    trainer.step()


def test_dropout_is_off_in_every_module(tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]) -> None:
    from peft import LoraConfig, get_peft_model

    model = build_small_model(len(tokenizer))
    model.model.layers[0].self_attn.attention_dropout = 0.5
    model.model.layers[0].hidden_dropout = model.model.layerdrop = 0.5  # Bloom's, and OPT's
    peft_model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], lora_dropout=0.3))
    trainer = make_trainer(peft_model, tokenizer, rows, gradient_checkpointing=True)  # type: ignore[arg-type]
    ids = torch.tensor([tokenizer("1+2=").input_ids], device=trainer.accelerator.device)
    assert (model.model.layers[0].hidden_dropout, model.model.layerdrop) == (0, 0)
    for name, p in peft_model.named_parameters():
        if "lora_B" in name:  # at 0 it would hide what is dropped before it
            torch.nn.init.normal_(p)
    trainer.model.train()
    assert torch.equal(trainer.model(ids).logits, trainer.model(ids).logits)


def test_gradient_checkpointing_changes_no_update(
    tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]
) -> None:
    losses, recomputed = [], []
    for checkpointing in (False, True):
        model = build_small_model(len(tokenizer))
        trainer = make_trainer(model, tokenizer, rows, gradient_checkpointing=checkpointing, num_iterations=2)
        calls: list[None] = []
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *args, calls=calls: calls.append(None))
        rollout, _ = trainer.collect()
        calls.clear()
        torch.manual_seed(0)
        advantages = torch.linspace(-1, 1, 8, device=trainer.accelerator.device)
        losses.append([row["grad_norm"] for row in trainer.update(rollout, advantages)])
        assert not any(module.training for module in model.modules())  # rollouts and scores are of eval mode
        recomputed.append(len(calls))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert recomputed == [2, 4]  # two iterations of one micro-batch; with recomputation twice as many passes


def test_a_lora_reference_is_the_model_without_its_adapter(
    tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]
) -> None:
    from peft import LoraConfig, get_peft_model

    base = build_small_model(len(tokenizer))
    frozen = {name: value.clone() for name, value in base.state_dict().items()}
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    trainer = make_trainer(
        model,
        tokenizer,
        rows,
        loss=GRPOLossConfig(beta=0.05),
        learning_rate=1e-2,
        num_iterations=2,
        steps=3,  # type: ignore[arg-type]
    )
    assert trainer.reference is not None
    assert trainer.reference.policy is trainer.policy  # no copy
    rollout = trainer.collect()[0]
    pieces = trainer.policy.micro_batches(rollout, torch.arange(8))
    scores = trainer.reference.score(rollout, pieces)
    history = trainer.train()
    assert history[0]["kl"] < history[-1]["kl"]
    assert torch.equal(trainer.reference.score(rollout, pieces), scores)
    assert not torch.equal(trainer.policy.score(rollout, pieces), scores)
    merged = model.unload().state_dict()
    assert all(torch.equal(merged[name].cpu(), value) for name, value in frozen.items())


def test_the_reference_of_a_trained_adapter_has_it(
    tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]
) -> None:
    """The policy as it was before training, with a copy of what is trained alone."""
    from peft import LoraConfig, get_peft_model

    model: Any = get_peft_model(build_small_model(len(tokenizer)), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.5)
    trainer = make_trainer(model, tokenizer, rows, loss=GRPOLossConfig(beta=0.05), learning_rate=1e-2, steps=3)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    history = trainer.train()
    assert history[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert history[-1]["kl"] > 1e-4
    assert trainer.reference is not None
    for name, p in trainer.reference.policy.unwrapped.named_parameters():
        assert torch.equal(p, before[name])
        assert (p.data_ptr() == dict(model.named_parameters())[name].data_ptr()) == ("lora" not in name)


def test_the_reference_of_trained_biases_is_a_copy(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]
) -> None:
    """They are trained beside the adapter: without it the policy is not what it was."""
    from peft import LoraConfig, get_peft_model

    adapted: Any = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], bias="all"))
    trainer = make_trainer(adapted, tokenizer, rows, loss=GRPOLossConfig(beta=0.05))
    assert trainer.reference is not None
    assert trainer.reference.policy is not trainer.policy


def test_the_reference_of_a_new_adapter_has_the_frozen_one_below_it(
    tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]
) -> None:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=2, target_modules=["q_proj"])
    frozen = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model: Any = get_peft_model(build_small_model(len(tokenizer)), frozen, adapter_name="below")
    model.add_adapter("new", lora)
    model.base_model.set_adapter(["below", "new"])
    for name, p in model.named_parameters():
        p.requires_grad_(".new." in name)
    trainer = make_trainer(model, tokenizer, rows, loss=GRPOLossConfig(beta=0.05))
    assert trainer.step()["kl"] == pytest.approx(0.0, abs=1e-6)


def test_chat_prompts_get_chat_completions(rows: list[dict[str, str]]) -> None:
    tokenizer = tiny_tokenizer()
    seen: dict[str, Any] = {}

    def spy(**columns: Any) -> list[float]:
        seen.update(columns)
        return [0.0, 1.0] * 4

    chats: list[Any] = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    make_trainer(tiny_model(tokenizer), tokenizer, chats, [spy]).step()
    assert seen["prompts"][0] in [chat["prompt"] for chat in chats]
    assert [message["role"] for message in seen["completions"][0]] == ["assistant"]


def test_long_prompts_are_left_out_and_counted(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[dict[str, str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainer = make_trainer(model, tokenizer, rows, max_prompt_length=5)
    assert [row["prompt"] for row in trainer.batches.rows] == ["1+2=", "1+34=", "12+2="]
    assert "dropped 3 of 6" in capsys.readouterr().out
    with pytest.raises(ValueError, match="prompt"):
        make_trainer(model, tokenizer, rows, max_prompt_length=2)


def test_sampling_log_probs_correct_the_loss(tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]) -> None:
    """An engine whose probabilities are lower by a factor of e^0.1 a token: the truncated ratio scales the gradient."""

    class Shifted(HuggingFaceEngine):
        def generate(self, prompts: Any, sampling: Any) -> Any:
            generation = super().generate(prompts, sampling)
            padded = pad_prompts([p for p in prompts for _ in range(4)], 0)
            rollout = Rollout(*padded, generation.ids, generation.mask).to(trainer.accelerator.device)
            return generation._replace(sampling_logps=scores_of(trainer.policy, rollout) - 0.1)

    norms = {}
    for mode in (None, "token_truncate"):
        model = build_small_model(len(tokenizer))
        trainer = make_trainer(model, tokenizer, rows, [by_position], importance_sampling=mode)
        trainer.sampler.engine = Shifted(model, tokenizer)
        metrics = trainer.step()
        norms[mode] = metrics["grad_norm"]
    assert metrics["sampling/importance_sampling_ratio/mean"] == pytest.approx(math.exp(0.1), rel=1e-4)
    assert norms["token_truncate"] == pytest.approx(math.exp(0.1) * norms[None], rel=1e-3)


def test_sequences_that_are_left_out_do_not_dilute_the_sampling_metrics(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]
) -> None:
    trainer = make_trainer(model, tokenizer, rows, importance_sampling="sequence_truncate", max_completion_length=1)
    rollout, _ = trainer.collect()
    rollout = rollout._replace(sampling_logps=scores_of(trainer.policy, rollout) - 0.1)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0, 0.0, 0.0, 0.0])
    (metrics,) = trainer.update(rollout, advantages.to(trainer.accelerator.device))
    for kind in ("min", "mean", "max"):
        assert metrics[f"sampling/importance_sampling_ratio/{kind}"] == pytest.approx(math.exp(0.1), rel=1e-4)


def test_the_engine_gets_the_weights_first_and_whenever_they_are_new(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]
) -> None:
    events: list[str] = []

    class Spy(HuggingFaceEngine):
        def generate(self, prompts: Any, sampling: Any) -> Any:
            events.append("generate")
            return super().generate(prompts, sampling)

        def sync_weights(self, model: Any) -> None:
            events.append("sync")

    trainer = make_trainer(model, tokenizer, rows, [by_position], eval_dataset=rows[:1], eval_steps=1)
    trainer.sampler.engine = Spy(model, tokenizer)
    trainer.train()
    assert events == ["sync", "generate", "generate", "sync", "generate", "generate", "sync", "generate"]


def test_autocast_trains_fp32_weights(tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]) -> None:
    model = build_small_model(len(tokenizer))
    options = {"mixed_precision": "bf16", "num_iterations": 2, "max_completion_length": 12}  # so rewards differ
    history = make_trainer(model, tokenizer, rows, **options).train()
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert all(row["grad_norm"] > 0 for row in history)


def test_a_rollout_and_its_scores_cast_each_weight_once(
    tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]
) -> None:
    """Under autocast; a pass for each token, or for each micro-batch, must not cast them again."""

    class Casts(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            bf16 = (kwargs or {}).get("dtype") == torch.bfloat16
            self.count += bf16 and func is torch.ops.aten._to_copy.default and args[0] is weight
            return func(*args, **(kwargs or {}))

    model = build_small_model(len(tokenizer))
    weight = model.model.layers[0].self_attn.q_proj.weight
    trainer = make_trainer(model, tokenizer, rows, mixed_precision="bf16", micro_batch_tokens=20)
    passes: list[int] = []
    model.model.register_forward_hook(lambda *_: passes.append(1))
    with Casts() as casts:
        rollout, _ = trainer.collect()
    assert len(passes) >= 4
    assert casts.count == 1
    passes.clear()
    with Casts() as casts:
        scores_of(trainer.policy, rollout)
    assert len(passes) > 1
    assert casts.count == 1
