"""Checkpoints: a run that was stopped, killed or failed resumes bit-exactly."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from trainer import runs
from trainer.runs import OPTIONS, ROWS, count_ones, make
from trainer.small_model import build_small_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.arithmetic.model import build_tokenizer
from grpo_fused import GRPOLossConfig
from grpo_fused.rewards import RewardError
from grpo_fused.rollouts.errors import DivergedError
from grpo_fused.trainer import (
    CheckpointError,
    GRPOTrainer,
    GRPOTrainerConfig,
    NonFiniteError,
    Sampling,
    checkpointer,
)
from grpo_fused.trainer.checkpoint import OPTIMIZER, checkpoints, flat, load_moments, publish
from grpo_fused.trainer.metrics import read_jsonl

EMBEDDED = ["q_proj", "embed_tokens"]
TIMES = {"seconds", "tokens_per_second"}


def outcome(trainer: GRPOTrainer, folder: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Final weights, and the run's metrics without times."""
    rows = [{k: v for k, v in row.items() if k not in TIMES} for row in read_jsonl(folder / "metrics.jsonl")]
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}, rows


def same(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    """Bit-exact equality."""
    assert one[1] == other[1]
    assert one[0].keys() == other[0].keys()
    for name, value in one[0].items():
        assert torch.equal(value, other[0][name]), name


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    AcceleratorState._reset_state(reset_partial_state=True)  # a module's fixture runs before a test's own
    folder = tmp_path_factory.mktemp("unbroken")
    trainer = make(folder)
    trainer.train()
    return outcome(trainer, folder)


@pytest.mark.parametrize("stop", [1, 4])
def test_a_stopped_run_resumes_bit_exactly(tmp_path: Path, unbroken: tuple[Any, Any], stop: int) -> None:
    """Ctrl-C after some step: the run ends after it, with a checkpoint; the resumed run equals an uninterrupted one."""
    trainer = make(tmp_path)
    step, done = trainer.step, []

    def interrupted() -> dict[str, float]:
        done.append(None)
        if len(done) == stop:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    trainer.step = interrupted  # type: ignore[method-assign]
    assert len(trainer.train()) == stop
    assert [path.name for path in checkpoints(tmp_path)] == [f"checkpoint-{stop:06d}"]
    for generator in (torch.manual_seed, random.seed, np.random.seed):  # the resumed process is another one
        generator(99)
    resumed = make(tmp_path, resume=True)
    assert resumed.steps_done == stop
    resumed.train()
    same(outcome(resumed, tmp_path), unbroken)


@pytest.mark.full
def test_a_run_that_was_killed_during_a_save_resumes_bit_exactly(
    tmp_path: Path, unbroken: tuple[Any, Any], repo_root: Path
) -> None:
    """kill -9 with half of checkpoint 4 on the disk: the run resumes from 3."""
    command = [sys.executable, "-m", "trainer.runs", "killed_while_saving", str(tmp_path), "4"]
    path = os.pathsep.join([str(repo_root), str(repo_root / "tests")])
    done = subprocess.run(
        command, cwd=repo_root, env={**os.environ, "PYTHONPATH": path}, capture_output=True, timeout=300
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-000002", "checkpoint-000003"]
    assert list(tmp_path.glob(".unfinished-*"))  # its partial checkpoint
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 4  # step 4 was already written
    resumed = make(tmp_path, resume=True, save_steps=1)
    assert resumed.steps_done == 3
    resumed.train()
    same(outcome(resumed, tmp_path), unbroken)
    assert not list(tmp_path.glob(".unfinished-*"))


@pytest.mark.parametrize(
    "options",
    [{"adapter": True}, {"tied": True}, {"gradient_checkpointing": True}],
    ids=["lora", "tied", "checkpointing"],
)
def test_every_kind_of_model_resumes_bit_exactly(tmp_path: Path, options: dict[str, Any]) -> None:
    whole = make(tmp_path / "whole", steps=4, **options)
    whole.train()
    first = make(tmp_path / "parts", steps=4, save_steps=2, save_total_limit=None, **options)
    first.train()
    for path in checkpoints(tmp_path / "parts")[1:]:
        path.rename(tmp_path / path.name)  # as if it had ended after step 2
    resumed = make(tmp_path / "parts", steps=4, resume=True, **options)
    assert resumed.steps_done == 2
    resumed.train()
    same(outcome(resumed, tmp_path / "parts"), outcome(whole, tmp_path / "whole"))


def test_an_adapter_with_embeddings_in_its_file_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peft writes them, too, if an adapter is on them."""
    from peft import LoraConfig

    monkeypatch.setattr("peft.LoraConfig", lambda **options: LoraConfig(**(options | {"target_modules": EMBEDDED})))
    first = make(tmp_path, steps=1, adapter=True)
    first.train()
    newest = checkpoints(tmp_path)[-1]
    assert any(name.endswith("base_layer.weight") for name in load_file(newest / "adapter_model.safetensors"))
    resumed = make(tmp_path, steps=1, adapter=True, resume=True)
    same(outcome(resumed, tmp_path), outcome(first, tmp_path))


def test_moments_are_restored_in_the_memory_order_of_their_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused AdamW reads both in the order of memory; a weight may be the transpose of another tensor."""

    def transposed(vocab_size: int, **options: Any) -> Any:
        model = build_small_model(vocab_size, **options)
        weight = model.model.layers[0].self_attn.k_proj.weight
        weight.data = weight.data.T.contiguous().T
        return model

    monkeypatch.setattr(runs, "build_small_model", transposed)
    first = make(tmp_path, steps=1)
    first.train()
    states = [x.update.optimizer.optimizer.state for x in (first, make(tmp_path, steps=1, resume=True))]
    for was, now in zip(*(state.values() for state in states), strict=True):
        for name, moment in was.items():
            assert torch.equal(now[name], moment)
            assert now[name].stride() == moment.stride()


def test_a_parameter_that_no_pass_reached_has_no_moments(tmp_path: Path) -> None:
    """As those of an image tower in a run on texts; its first step may come later."""

    def made() -> tuple[torch.nn.ModuleDict, torch.optim.AdamW]:
        torch.manual_seed(0)
        model = torch.nn.ModuleDict({name: torch.nn.Linear(3, 2) for name in ("text", "image")})
        return model, torch.optim.AdamW(model.parameters(), fused=True)

    def step(model: torch.nn.ModuleDict, optimizer: torch.optim.AdamW, *names: str) -> None:
        optimizer.zero_grad()
        sum(model[name](torch.ones(3)).sum() for name in names).backward()
        optimizer.step()

    both = [made(), made()]
    step(*both[0], "text")
    moments = flat(get_optimizer_state_dict(*both[0]))
    save_file(moments, tmp_path / OPTIMIZER)
    both[1][0].load_state_dict(both[0][0].state_dict())
    load_moments(tmp_path, {"files": {OPTIMIZER: ""}, "moments": len(moments)}, *both[1])
    assert flat(get_optimizer_state_dict(*both[1])).keys() == moments.keys()
    for run in both:
        step(*run, "text", "image")
    for ours, theirs in zip(*(model.parameters() for model, _ in both), strict=True):
        assert torch.equal(ours, theirs)


def test_a_checkpoint_is_a_model_folder_without_pickles(tmp_path: Path) -> None:
    trainer = make(tmp_path, steps=2)
    trainer.train()
    newest = checkpoints(tmp_path)[-1]
    assert {path.suffix for path in newest.iterdir()} <= {".safetensors", ".json", ".jinja", ".sha256"}
    model, tokenizer = AutoModelForCausalLM.from_pretrained(newest), AutoTokenizer.from_pretrained(newest)
    ids = torch.tensor([tokenizer("1+2=").input_ids])
    torch.testing.assert_close(model(ids).logits, trainer.model(ids).logits, rtol=0, atol=1e-5)  # other alignment


def test_the_newest_are_kept(tmp_path: Path) -> None:
    make(tmp_path, steps=5, save_steps=1, save_total_limit=2).train()
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-000004", "checkpoint-000005"]


def test_they_are_in_the_order_of_their_steps(tmp_path: Path) -> None:
    """The names of long runs have more digits."""
    names = [f"checkpoint-{step}" for step in ("000050", "999999", "1000000")]
    for name in (*reversed(names), "checkpoint-best"):
        (tmp_path / name).mkdir()
    assert [path.name for path in checkpoints(tmp_path)] == names


def test_one_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    for text in ("first", "second"):
        publish(tmp_path / "checkpoint-000001", lambda folder, text=text: (folder / text).touch(), None)  # type: ignore[misc]
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == [
        "checkpoint-000001", "checkpoint-000001/second",
    ]  # fmt: skip


def test_a_full_disk_is_named_and_the_older_checkpoint_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, tried = checkpointer.save_file, []

    def full(tensors: Any, path: Path) -> None:
        if "000002" in str(path):
            tried.append(1)
            raise OSError(28, "No space left on device")
        whole(tensors, path)

    monkeypatch.setattr(checkpointer, "save_file", full)
    with pytest.raises(
        CheckpointError,
        match=r"could not write .*checkpoint-000002 \(older checkpoints are unchanged\): .*No space left",
    ):
        make(tmp_path, steps=3, save_steps=1).train()
    assert [path.name for path in tmp_path.iterdir() if "checkpoint" in path.name] == ["checkpoint-000001"]
    assert tried == [1]  # and not once more after the failure


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("state.json", b"{"),
        ("optimizer.safetensors", b"short"),
        ("model.safetensors", b"short"),
        ("config.json", None),
    ],
    ids=["state", "optimizer", "weights", "no-config"],
)
def test_a_damaged_checkpoint_is_named(tmp_path: Path, file: str, content: bytes | None) -> None:
    make(tmp_path, steps=2, save_steps=1).train()
    newest = checkpoints(tmp_path)[-1]
    if content is None:
        (newest / file).unlink()
    else:
        (newest / file).write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"cannot resume from .*checkpoint-000002 \(an older one exists: checkpoint-000001\): "
    ):
        make(tmp_path, steps=3, resume=True)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, steps=1).train()
    monkeypatch.setattr(runs, "build_small_model", lambda size, **options: build_small_model(size + 8, **options))
    with pytest.raises(CheckpointError, match="expected the weights of this model; got others .*embed_tokens.*29, 32"):
        make(tmp_path, resume=True)


def test_the_batch_of_a_loss_that_is_not_finite_is_kept_where_there_is_no_folder_yet(tmp_path: Path) -> None:
    """As on a second machine: the main process makes the folder on its own disk."""
    trainer = make(tmp_path / "run")
    rollout, rewards = trainer.collect()
    shutil.rmtree(tmp_path / "run")
    said = "in step 3; its batch is in .*failed-step-3-process-0.safetensors"
    with pytest.raises(NonFiniteError, match=said), trainer.checkpointer.keeping_batch(3, rollout, rewards):
        raise NonFiniteError("the loss is NaN")
    assert list((tmp_path / "run").iterdir()) == [tmp_path / "run" / "failed-step-3-process-0.safetensors"]


def test_the_batch_of_each_process_has_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the memory order of an engine's tensors is, and where they share memory."""
    trainer = make(tmp_path)
    rollout, rewards = trainer.collect()
    rollout = rollout._replace(completion_ids=rollout.completion_ids.T.contiguous().T)
    rollout = rollout._replace(prompt_mask=rollout.completion_mask)
    for process in (0, 1):
        monkeypatch.setattr(type(trainer.accelerator), "process_index", process)
        said = f"failed-step-1-process-{process}.safetensors"
        with pytest.raises(NonFiniteError, match=said), trainer.checkpointer.keeping_batch(1, rollout, rewards):
            raise NonFiniteError("the loss is NaN")
    for path in (tmp_path / f"failed-step-1-process-{process}.safetensors" for process in (0, 1)):
        assert torch.equal(load_file(path)["completion_ids"], rollout.completion_ids)


def test_other_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, steps=1).train()
    trainer = make(tmp_path / "new", steps=2)
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    trainer.checkpointer.output_dir = tmp_path
    with pytest.raises(CheckpointError, match="1 processes wrote it, .*; got 2"):
        trainer.checkpointer._go_on_from(tmp_path / "checkpoint-000001")


def test_a_run_resumes_without_its_metrics(tmp_path: Path) -> None:
    make(tmp_path, steps=1).train()
    (tmp_path / "metrics.jsonl").unlink()
    make(tmp_path, steps=2, resume=True).train()
    assert [line["step"] for line in read_jsonl(tmp_path / "metrics.jsonl")] == [2]


def test_a_reward_function_that_takes_too_long_ends_the_run(tmp_path: Path) -> None:
    trainer = make(tmp_path, reward_timeout=0.05)
    trainer.reward_functions["count_ones"] = lambda **columns: time.sleep(5)
    with pytest.raises(RewardError, match="0.05"):
        trainer.train()


def test_other_rows_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, steps=1).train()
    monkeypatch.setattr(runs, "ROWS", runs.ROWS[:-1])
    with pytest.raises(CheckpointError, match="a place in a data set of 5 rows with seed 0; got .*'length': 6"):
        make(tmp_path, steps=2, resume=True)
    monkeypatch.setattr(runs, "ROWS", [*runs.ROWS, {"prompt": "1+1=", "answer": "2"}])
    with pytest.raises(CheckpointError, match="must have the prompts that the run began with; got 6 others"):
        make(tmp_path, steps=2, resume=True)


def test_a_folder_with_a_run_is_not_overwritten_silently(tmp_path: Path) -> None:
    make(tmp_path, steps=1).train()
    with pytest.raises(ValueError, match="must not hold a run; got .*: resume or overwrite it"):
        make(tmp_path, steps=1)
    (tmp_path / "failed-step-2-process-0.safetensors").touch()
    make(tmp_path, steps=2, overwrite=True).train()
    assert not list(tmp_path.glob("failed-step-*"))
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-000002"]
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2]
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match="must not hold a run; got .*: resume or overwrite it"):
        make(tmp_path / "early", steps=1)
    with pytest.raises(ValueError, match="resume needs the output_dir"):
        make(None, resume=True)
    assert make(tmp_path / "new", resume=True).steps_done == 0  # no run yet: a job that may be restarted


def test_a_folder_of_a_trainer_that_took_no_step_holds_no_run(tmp_path: Path) -> None:
    for _ in range(2):
        assert make(tmp_path, steps=1).steps_done == 0


def test_a_failing_step_loses_nothing(
    tmp_path: Path, unbroken: tuple[Any, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """The reward function breaks in step 3: there is a checkpoint of step 2, from which the run resumes bit-exactly."""
    trainer = make(tmp_path)
    whole, calls = trainer.reward_functions["count_ones"], []

    def breaks(**columns: Any) -> list[float]:
        calls.append(None)
        if len(calls) == 3:
            raise ConnectionError("the judge is offline")
        return whole(**columns)

    trainer.reward_functions["count_ones"] = breaks
    with pytest.raises(RuntimeError, match="count_ones.*the judge is offline"):
        trainer.train()
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-000002"]
    assert capsys.readouterr().out.rstrip().endswith(f"saved the training so far in {tmp_path / 'checkpoint-000002'}")
    resumed = make(tmp_path, resume=True)
    resumed.train()
    same(outcome(resumed, tmp_path), unbroken)


def test_a_failing_step_is_the_reason_also_if_the_save_after_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(**columns: Any) -> list[float]:
        raise ConnectionError("the judge is offline")

    def full(steps_done: int) -> None:
        raise CheckpointError("No space left on device")

    trainer = make(tmp_path)
    trainer.reward_functions["count_ones"] = breaks
    monkeypatch.setattr(trainer.checkpointer, "save", full)
    with pytest.raises(RuntimeError, match="count_ones.*the judge is offline"):
        trainer.train()
    assert "No space left on device" in capsys.readouterr().out


def test_a_resumed_run_that_fails_in_its_first_step_names_the_reason(tmp_path: Path) -> None:
    make(tmp_path, steps=1).train()
    resumed = make(tmp_path, steps=2, resume=True)
    place = resumed.batches.place

    def breaks(**columns: Any) -> list[float]:
        raise ConnectionError("the judge is offline")

    resumed.reward_functions["count_ones"] = breaks
    with pytest.raises(RuntimeError, match=r"count_ones.*the judge is offline"):
        resumed.train()
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-000001"]
    assert resumed.batches.place == place


def test_a_loss_that_is_not_finite_stops_the_run_with_its_batch(tmp_path: Path) -> None:
    trainer = make(tmp_path, save_steps=1)
    whole = trainer.reward_functions["count_ones"]

    def poisons(**columns: Any) -> list[float]:
        if trainer.steps_done == 2:
            with torch.no_grad():
                trainer.model.model.norm.weight[0] = float("nan")
        return whole(**columns)

    trainer.reward_functions["count_ones"] = poisons
    said = r"^diverged at step 3: .*must be finite.* in step 3; its batch is in .*failed-step-3-process-0.*; "
    with pytest.raises(DivergedError, match=rf"{said}.*checkpoint-000002 is kept$"):
        trainer.train()
    (dump,) = tmp_path.glob("failed-step-3*.safetensors")
    tensors = load_file(dump)
    assert {"prompt_ids", "completion_ids", "completion_mask", "advantages"} <= set(tensors)
    assert tensors["advantages"].shape == (OPTIONS["prompts_per_step"] * OPTIONS["num_generations"],)


def test_a_diverged_policy_whose_batch_cannot_be_written_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(tmp_path)
    whole, save_file = trainer.reward_functions["count_ones"], checkpointer.save_file

    def poisons(**columns: Any) -> list[float]:
        if trainer.steps_done == 1:
            with torch.no_grad():
                trainer.model.model.norm.weight[0] = float("nan")
        return whole(**columns)

    def full(tensors: Any, path: Path) -> None:
        if "failed-step" in path.name:
            raise OSError("No space left on device")
        save_file(tensors, path)

    trainer.reward_functions["count_ones"] = poisons
    monkeypatch.setattr(checkpointer, "save_file", full)
    with pytest.raises(DivergedError, match=r"could not be written to .*: No space left on device; there is no check"):
        trainer.train()
    assert not checkpoints(tmp_path)


def test_a_loss_that_is_not_finite_without_a_folder() -> None:
    trainer = make(None, steps=1)

    def poisons(completions: list[str]) -> list[float]:
        with torch.no_grad():
            trainer.model.model.norm.weight[0] = float("nan")
        return [float(i) for i in range(len(completions))]

    trainer.reward_functions["count_ones"] = poisons
    with pytest.raises(DivergedError, match="^diverged at step 1: .*must be finite"):
        trainer.train()


@pytest.mark.parametrize("error", [OSError, SystemExit, KeyboardInterrupt], ids=lambda error: error.__name__)
def test_a_failing_evaluation_loses_nothing(tmp_path: Path, unbroken: tuple[Any, Any], error: type) -> None:
    """It runs after the weights of its step have changed, and before the step is saved or written."""

    def fails() -> dict[str, float]:
        if trainer.steps_done == 3:
            raise error("the held-out judge is offline")
        return {}

    trainer = make(tmp_path, eval_steps=3, evaluate=fails)
    with pytest.raises(error):
        trainer.train()
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-000003"]
    resumed = make(tmp_path, resume=True)
    resumed.train()
    same(outcome(resumed, tmp_path), unbroken)


def test_a_policy_that_has_diverged_is_not_saved(tmp_path: Path) -> None:
    """Weights that give NaN are of no use: no checkpoint of them takes the place of an older one."""
    with pytest.raises(
        DivergedError, match="^diverged at step 1: .* states must be finite; .*; there is no checkpoint$"
    ):
        make(tmp_path / "at_once", learning_rate=1e30, warmup_steps=0).train()
    options = {"save_steps": 2, "save_total_limit": 1, "num_iterations": 1, "lr_scheduler_type": "constant"}
    trainer = make(tmp_path / "late", **options)
    whole = trainer.reward_functions["count_ones"]

    def explodes(**columns: Any) -> list[float]:
        if trainer.steps_done == 2:
            for group in trainer.update.optimizer.param_groups:
                group["weight_decay"] = 1e30
        return whole(**columns)

    trainer.reward_functions["count_ones"] = explodes
    with pytest.raises(DivergedError, match="^diverged at step 4: .*logits are not; .*checkpoint-000002 is kept$"):
        trainer.train()
    assert [path.name for path in checkpoints(tmp_path / "late")] == ["checkpoint-000002"]


def test_a_failing_second_iteration_loses_no_earlier_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make(tmp_path)
    step, calls = trainer.update.step_optimizer, []

    def fails(loss: float) -> dict[str, float]:
        calls.append(None)
        return step(loss if len(calls) < 6 else float("nan"))

    monkeypatch.setattr(trainer.update, "step_optimizer", fails)
    with pytest.raises(NonFiniteError, match="^diverged at step 3: the loss must be .*checkpoint-000002 is kept$"):
        trainer.train()
    assert "the step that failed had changed the weights, and will be repeated from them" in capsys.readouterr().out
    resumed = make(tmp_path, resume=True)
    assert (resumed.steps_done, resumed.update.optimizer_steps) == (2, 4)
    resumed.train()


def test_a_resumed_run_says_that_the_step_that_failed_had_changed_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path, steps=1).train()
    resumed = make(tmp_path, steps=3, resume=True)
    step, calls = resumed.update.step_optimizer, []

    def fails(loss: float) -> dict[str, float]:
        calls.append(None)
        return step(loss if len(calls) < 4 else float("nan"))

    monkeypatch.setattr(resumed.update, "step_optimizer", fails)
    with pytest.raises(NonFiniteError, match="^diverged at step 3: "):
        resumed.train()
    assert "the step that failed had changed the weights, and will be repeated from them" in capsys.readouterr().out


def test_a_step_that_is_repeated_samples_with_the_weights_that_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(tmp_path)
    engine, step, calls, stale = trainer.sampler.engine, trainer.update.step_optimizer, [], []

    class Elsewhere:
        """Has a copy of the weights."""

        head: Any = None

        def sync_weights(self, model: Any) -> None:
            self.head = model.lm_head.weight.detach().clone()

        def generate(self, prompts: Any, sampling: Any) -> Any:
            stale.append(not torch.equal(self.head, trainer.model.lm_head.weight))
            return engine.generate(prompts, sampling)

    def stopped(loss: float) -> Any:
        calls.append(None)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return step(loss)

    trainer.sampler.engine = Elsewhere()
    monkeypatch.setattr(trainer.update, "step_optimizer", stopped)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train()
    assert len(stale) > 3
    assert not any(stale)


def test_saving_before_the_first_optimizer_step_changes_nothing(tmp_path: Path) -> None:
    """A first rollout with equal rewards leaves the optimizer without moments; a resumed run has none either."""

    def trained(name: str, **options: Any) -> GRPOTrainer:
        trainer = make(tmp_path / name, steps=3, loss=GRPOLossConfig(), **options)
        whole = trainer.reward_functions["count_ones"]
        trainer.reward_functions["count_ones"] = lambda completions: (
            whole(completions) if trainer.steps_done else [0.0] * len(completions)
        )
        trainer.train()
        return trainer

    never = trained("never")
    always = trained("always", save_steps=1, save_total_limit=None)
    for path in checkpoints(tmp_path / "always")[1:]:
        path.rename(tmp_path / path.name)
    resumed = trained("always", resume=True)
    for name, value in never.model.state_dict().items():
        assert torch.equal(value, always.model.state_dict()[name]), name
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_the_loss_scale_of_fp16_is_restored(tmp_path: Path) -> None:
    """accelerate makes a scaler on a GPU only: here it is set."""

    def with_scaler(init_scale: float, **options: Any) -> GRPOTrainer:
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
        return make(tmp_path, accelerator=accelerator, **options)

    first = with_scaler(128.0, steps=1)
    first.train()
    scaler = with_scaler(1.0, steps=2, resume=True).accelerator.scaler
    assert scaler.get_scale() == 128.0
    AcceleratorState._reset_state(reset_partial_state=True)
    make(tmp_path, steps=2, overwrite=True).train()
    scaler = with_scaler(64.0, steps=3, resume=True).accelerator.scaler  # of a run that had none
    assert scaler.get_scale() == 64.0
    grown = with_scaler(128.0, steps=1, overwrite=True)
    grown.accelerator.scaler.set_growth_interval(1)
    grown.train()
    state = grown.accelerator.scaler.state_dict()
    assert state["_growth_tracker"] == 0  # as after each change of the scale
    assert with_scaler(1.0, steps=2, resume=True).accelerator.scaler.state_dict() == state


def test_options_of_the_optimizer_are_those_of_the_resumed_run(tmp_path: Path) -> None:
    make(tmp_path, steps=1).train()
    resumed = make(tmp_path, steps=2, resume=True, weight_decay=0.5, adam_betas=(0.8, 0.9))
    assert [group["weight_decay"] for group in resumed.update.optimizer.param_groups] == [0.5, 0.0]
    assert all(tuple(group["betas"]) == (0.8, 0.9) for group in resumed.update.optimizer.param_groups)


def test_adapters_with_names_of_their_own_are_resumed(tmp_path: Path) -> None:
    """peft saves each in a folder of that name."""
    from peft import LoraConfig, get_peft_model

    def made(steps: int, resume: bool) -> GRPOTrainer:
        tokenizer = build_tokenizer()
        torch.manual_seed(1)
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        model: Any = get_peft_model(build_small_model(len(tokenizer)), lora, adapter_name="policy")
        model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
        model.base_model.set_adapter(["policy", "second"])
        config = GRPOTrainerConfig(**(OPTIONS | {"steps": steps}))
        return GRPOTrainer(model, tokenizer, [count_ones], ROWS, config, output_dir=tmp_path, resume=resume)

    first = made(1, False)
    first.train()
    trained = {name: p for name, p in first.model.named_parameters() if "lora_B" in name}
    assert all(p.any() for p in trained.values())
    resumed = dict(made(2, True).model.named_parameters())
    assert all(torch.equal(resumed[name], p) for name, p in trained.items())


def test_resume_and_overwrite_contradict_each_other(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give one of them; got both"):
        make(tmp_path, resume=True, overwrite=True)


def test_training_continues_in_the_same_process(tmp_path: Path, unbroken: tuple[Any, Any]) -> None:
    """In a notebook: Ctrl-C, then `train()` again. It does not set the seed again, nor evaluate as step 0."""
    trainer = make(tmp_path)
    whole = trainer.reward_functions["count_ones"]

    def interrupts(**columns: Any) -> list[float]:
        if trainer.steps_done == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return whole(**columns)

    trainer.reward_functions["count_ones"] = interrupts
    assert len(trainer.train()) == 3
    trainer.evaluate_too = lambda: {"seen": 1.0} if trainer.steps_done == 3 else {}
    assert len(trainer.train()) == 3
    same(outcome(trainer, tmp_path), unbroken)


def test_the_evaluation_before_training_is_made_once(tmp_path: Path) -> None:
    """Also if the first step fails and `train()` is called again."""
    trainer = make(tmp_path)
    trainer.evaluate_too = lambda: {"seen": 1.0}
    whole = trainer.reward_functions["count_ones"]
    trainer.reward_functions["count_ones"] = lambda **columns: [None] * len(columns["completions"])
    with pytest.raises(RewardError, match="step 1"):
        trainer.train()
    trainer.reward_functions["count_ones"] = whole
    history = trainer.train()
    assert [line["step"] for line in read_jsonl(tmp_path / "metrics.jsonl")] == list(range(7))
    assert [line["step"] for line in history] == list(range(7))


def test_stop_outside_of_the_main_thread(tmp_path: Path, unbroken: tuple[Any, Any]) -> None:
    """Where no signal arrives: the run ends after its step, and can go on."""
    trainer = make(tmp_path)
    whole = trainer.reward_functions["count_ones"]

    def stops(**columns: Any) -> list[float]:
        if trainer.steps_done == 2:
            trainer.stop()
        return whole(**columns)

    trainer.reward_functions["count_ones"] = stops
    with ThreadPoolExecutor(max_workers=1) as pool:
        assert len(pool.submit(trainer.train).result()) == 3
        assert trainer.stopped_by == signal.SIGTERM
        assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-000003"]
        assert len(pool.submit(trainer.train).result()) == 3
        assert trainer.stopped_by is None
    same(outcome(trainer, tmp_path), unbroken)


def test_a_tokenizer_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizers library raises a bare Exception on a full disk."""
    trainer = make(tmp_path, steps=1)

    def full(*args: Any, **options: Any) -> None:
        raise Exception("No space left on device (os error 28)")

    monkeypatch.setattr(trainer.tokenizer, "save_pretrained", full)
    with pytest.raises(CheckpointError, match=r"could not write .*checkpoint-000001 .*: No space left"):
        trainer.train()


def test_random_numbers_depend_on_the_seed_and_the_step(tmp_path: Path) -> None:
    """Those of torch, Python and NumPy, whatever was drawn before, and the seed of a rollout engine."""

    def drawn(**options: Any) -> list[list[float]]:
        seen: list[list[float]] = []
        trainer = make(None, steps=2, **options)
        sample = trainer.sampler.sample

        def draws(rows: Any, sampling: Sampling) -> Any:
            seen.append([sampling.seed, torch.rand(()).item(), random.random(), np.random.rand()])
            return sample(rows, sampling)

        trainer.sampler.sample = draws  # type: ignore[method-assign]
        trainer.train()
        return seen

    first, second = drawn()
    assert all(one != other for one, other in zip(first, second, strict=True))
    assert drawn() == [first, second]
    assert first not in drawn(seed=1)


def test_each_process_draws_random_numbers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else two processes with the same prompt would sample the same completions."""

    def collect() -> None:
        raise ZeroDivisionError(torch.rand(()).item())

    def drawn(process: int) -> float:
        trainer = make(None)
        monkeypatch.setattr(type(trainer.accelerator), "process_index", process)
        monkeypatch.setattr(trainer, "collect", collect)
        with pytest.raises(ZeroDivisionError) as raised:
            trainer.step()
        return raised.value.args[0]

    assert drawn(0) == drawn(0) != drawn(1)


def test_states_survive_json(tmp_path: Path) -> None:
    make(tmp_path, steps=1).train()
    newest = checkpoints(tmp_path)[-1]
    state = json.loads((newest / "state.json").read_text())
    assert state["step"] == 1
    assert state["optimizer_steps"] == 2
    assert state["files"].keys() >= {"model.safetensors", "optimizer.safetensors", "config.json"}
