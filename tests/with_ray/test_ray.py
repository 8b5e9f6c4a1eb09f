"""The trainer in a Ray `TorchTrainer` on two CPU processes: `make ray`."""

from __future__ import annotations

import importlib.util
import json
import time
from functools import cache
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed (make ray)", allow_module_level=True)

import processes
import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from with_ray.loops import example, loop

from grpo_fused import engines
from grpo_fused.trainer.checkpoint import checkpoints


@pytest.fixture(scope="module")
def cluster():
    workers = {"env_vars": processes.ENVIRONMENT}
    ray.init(num_cpus=4, include_dashboard=False, _node_ip_address="127.0.0.1", runtime_env=workers)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def torchrun_on(tmp_path_factory):
    """The folder of the same run under torchrun, on an engine."""

    @cache
    def run(impl: str) -> Path:
        folder = tmp_path_factory.mktemp("torchrun")
        done = processes.torchrun("-m", "with_ray.loops", folder, impl)
        assert done.returncode == 0, done.stderr[-3000:]
        return folder

    return run


@pytest.fixture
def torchrun(torchrun_on):
    return torchrun_on(engines.fastest(torch.device("cpu"), torch.float32, 64))


def fit(folder: Path, function=loop, **options):
    return TorchTrainer(
        function,
        train_loop_config={"steps": 4, "output_dir": str(folder / "output"), **options},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="ray", storage_path=str(folder),
            failure_config=FailureConfig(max_failures=int(options.get("what") == "kill")),
        ),
    ).fit()  # fmt: skip


def rows(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if "second" not in k} for line in lines]


def assert_same_run(got: Path, want: Path) -> None:
    assert rows(got) == rows(want)
    assert len(rows(want)) == 4
    weights, expected = (load_file(checkpoints(folder)[-1] / "model.safetensors") for folder in (got, want))
    assert weights.keys() == expected.keys()
    assert all(weights[name].equal(value) for name, value in expected.items())


@pytest.mark.parametrize("impl", ["native", "chunked"])
def test_the_run_of_torchrun(cluster, torchrun_on, tmp_path, impl):
    torchrun = torchrun_on(impl)
    result = fit(tmp_path, example, impl=impl)
    assert_same_run(tmp_path / "output", torchrun)
    assert result.metrics["step"] == 4
    assert result.metrics["reward"] == rows(torchrun)[-1]["reward"]
    reported = Path(result.checkpoint.path)
    assert AutoModelForCausalLM.from_pretrained(reported).num_parameters() > 0
    weights, expected = (load_file(path / "model.safetensors") for path in (reported, checkpoints(torchrun)[-1]))
    assert all(weights[name].equal(value) for name, value in expected.items())


def test_a_killed_worker_is_replaced_and_the_run_goes_on(cluster, torchrun, tmp_path):
    result = fit(tmp_path, what="kill")
    assert (tmp_path / "output" / "happened").exists()
    assert_same_run(tmp_path / "output", torchrun)
    assert result.metrics["step"] == 4


def test_a_worker_that_raises_ends_the_run_with_its_reason(cluster, tmp_path):
    with pytest.raises(ray.train.TrainingFailedError) as failure:
        fit(tmp_path, what="raise")
    reason = "RewardError: reward function 'digits' raised ConnectionError: the judge is offline"
    assert reason in str(failure.value)
    assert [path.name for path in checkpoints(tmp_path / "output")] == ["checkpoint-000001", "checkpoint-000002"]


def test_a_worker_that_raises_alone_ends_the_others(cluster, tmp_path):
    """They wait for it in a collective, and its process lives on."""
    with pytest.raises(ray.train.TrainingFailedError, match="MemoryError: no room for the activations"):
        fit(tmp_path, what="update")
    assert time.time() - (tmp_path / "output" / "happened").stat().st_mtime < 60  # 3 s on two cores


def test_stop_outside_of_the_main_thread(cluster, torchrun, tmp_path):
    result = fit(tmp_path, what="stop")
    assert result.metrics["step"] == 3
    assert checkpoints(tmp_path / "output")[-1].name == "checkpoint-000003"
    assert rows(tmp_path / "output") == rows(torchrun)[:3]
