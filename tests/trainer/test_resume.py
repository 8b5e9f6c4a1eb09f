"""What `resume` says: the step, changed options; and what it refuses: another model or vocabulary, fewer steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from trainer import runs
from trainer.runs import make
from trainer.small_model import build_small_model
from transformers import PreTrainedTokenizerFast

from examples.arithmetic.model import build_tokenizer
from grpo_fused import GRPOLossConfig
from grpo_fused.trainer import CheckpointError, checkpoint
from grpo_fused.trainer.checkpoint import changes, identity, options_of
from grpo_fused.trainer.recipe import LoRA, Recipe, Reward

Said = Callable[[], list[str]]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    return lambda: capsys.readouterr().out.splitlines()


def test_it_says_from_which_step(tmp_path: Path, said: Said) -> None:
    make(tmp_path, steps=2, save_steps=1).train()
    said()
    make(tmp_path, steps=2, save_steps=1, resume=True).train()
    assert said()[0] == f"resumed from {tmp_path / 'checkpoint-000002'}, 2 of 2 steps done: nothing is left to do"
    make(tmp_path, steps=3, save_steps=1, resume=True)
    assert said()[0] == f"resumed from {tmp_path / 'checkpoint-000002'}, 2 of 3 steps done"


def test_a_step_is_saved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither again when the run ends, nor when it is resumed and nothing is left to do."""
    publish, written = checkpoint.publish, []

    def recording(final: Path, *arguments: Any) -> None:
        written.append(final.name)
        publish(final, *arguments)

    monkeypatch.setattr(checkpoint, "publish", recording)
    make(tmp_path, steps=2, save_steps=1).train()
    make(tmp_path, steps=2, save_steps=1, resume=True).train()
    assert written == ["checkpoint-000001", "checkpoint-000002"]


def test_it_lists_the_options_that_changed(tmp_path: Path, said: Said) -> None:
    make(tmp_path, steps=1).train()
    said()
    make(tmp_path, steps=1, resume=True)
    assert len(said()) == 1
    make(tmp_path, steps=2, resume=True, num_generations=2, learning_rate=5.0, loss=GRPOLossConfig(beta=0.04))
    assert said()[1:] == [
        "options that are not those of the checkpoint:",
        "  steps: 1 -> 2",
        "  num_generations: 4 -> 2",
        "  learning_rate: 0.01 -> 5.0",
        "  loss.beta: 0.02 -> 0.04",
    ]


def test_it_says_that_the_teacher_is_another_one(
    tmp_path: Path, said: Said, tokenizer: PreTrainedTokenizerFast
) -> None:
    teacher, other = (build_small_model(len(tokenizer), seed=seed) for seed in (1, 2))
    make(tmp_path, steps=1, reference_model=teacher).train()
    said()
    make(tmp_path, steps=1, reference_model=teacher, resume=True)
    assert len(said()) == 1
    was, now = (identity(model, tokenizer)["model"][:16] for model in (teacher, other))
    make(tmp_path, steps=1, reference_model=other, resume=True)
    assert said()[1:] == [
        "options that are not those of the checkpoint:",
        f"  weights of reference_model: {was} -> {now}",
    ]
    make(tmp_path, steps=1, resume=True)
    assert said()[2:] == [f"  weights of reference_model: {was} -> None"]


def test_options_of_recipes_are_compared_inside() -> None:
    recipe = Recipe(model="m", dataset="d", rewards=(Reward(name="length", options={"by": Path("x")}),), rollout="vllm")
    other = replace(recipe, model="n", rewards=(Reward(name="format"),), lora=LoRA(), vllm_options={"a": 1})
    assert changes(options_of(recipe), options_of(recipe)) == []
    assert [line.partition(":")[0] for line in changes(options_of(recipe), options_of(other))] == [
        "model", "rewards", "lora", "vllm_options.a",
    ]  # fmt: skip


def test_without_a_checkpoint_it_says_so(tmp_path: Path, said: Said) -> None:
    assert make(tmp_path, steps=1, resume=True).steps_done == 0
    assert said() == [f"no checkpoint in {tmp_path} to resume from: the run starts at step 1"]


def test_fewer_steps_are_refused(tmp_path: Path) -> None:
    make(tmp_path, steps=2).train()
    with pytest.raises(
        CheckpointError, match="checkpoint-000002: steps must be at least 2, those that are done; got 1"
    ):
        make(tmp_path, steps=1, resume=True)


@pytest.mark.parametrize("adapter", [False, True], ids=["whole", "adapter"])
def test_another_model_of_the_same_shape_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapter: bool
) -> None:
    make(tmp_path, steps=1, adapter=adapter).train()
    monkeypatch.setattr(runs, "build_small_model", lambda size, **options: build_small_model(size, 1, **options))
    with pytest.raises(CheckpointError, match="expected the model that the run began with; got another one"):
        make(tmp_path, steps=2, resume=True, adapter=adapter)


def renamed() -> PreTrainedTokenizerFast:
    """As many tokens as that of the runs, one of them another text."""
    tokenizer = build_tokenizer()
    text = tokenizer.backend_tokenizer.to_str()
    assert '"7":' in text
    tokenizer._tokenizer = Tokenizer.from_str(text.replace('"7":', '"x":'))
    return tokenizer


def test_another_vocabulary_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, steps=1).train()
    monkeypatch.setattr(runs, "build_tokenizer", renamed)
    with pytest.raises(CheckpointError, match="expected the vocabulary that the run began with; got another one"):
        make(tmp_path, steps=2, resume=True)


@pytest.mark.parametrize("layer", ["q_proj", "embed_tokens"])
def test_a_model_is_the_same_in_another_dtype_and_with_another_new_adapter(layer: str) -> None:
    from peft import LoraConfig, get_peft_model

    def of(change: Callable[[Any], Any]) -> str:
        return identity(change(build_small_model(21)), build_tokenizer())["model"]

    def adapted(model: Any, is_new: bool = True) -> Any:
        torch.manual_seed(len(seen))
        return get_peft_model(model, LoraConfig(r=2, target_modules=[layer], init_lora_weights=is_new))

    seen = [of(lambda model: model)]
    assert of(lambda model: model.bfloat16()) == seen[0]
    seen.append(of(adapted))
    assert of(adapted) == seen[1]
    seen.append(of(partial(adapted, is_new=False)))
    assert of(partial(adapted, is_new=False)) not in seen  # those that were trained before


def test_another_trained_adapter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import peft

    seeds = iter(range(9))

    def trained(model: Any, config: Any) -> Any:
        adapted = adapt(model, config)
        torch.manual_seed(next(seeds))
        torch.nn.init.normal_(adapted.get_parameter(name))
        return adapted

    adapt, name = peft.get_peft_model, "base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight"
    monkeypatch.setattr("peft.get_peft_model", trained)
    make(tmp_path, steps=1, adapter=True).train()
    with pytest.raises(CheckpointError, match="expected the model that the run began with; got another one"):
        make(tmp_path, steps=2, resume=True, adapter=True)
    seeds = iter(range(9))
    assert make(tmp_path, steps=2, resume=True, adapter=True).steps_done == 1
