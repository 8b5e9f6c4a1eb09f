"""Programs that time several calls of one problem, in a tiny form: they run, and a wrong result is not timed."""

from __future__ import annotations

import math
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft")

from benchmarks import alternatives, candidates, divergence, heads, tables
from benchmarks.results import Run
from grpo_fused import QuantizedWeight

TINY = {"cpu": (128, 64, 2048)}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    for module in (alternatives, candidates, heads):
        monkeypatch.setattr(module, "SHAPES", TINY)


ABOUT = {"device": "cpu", "name": "a chip", "commit": "c0", "dirty": False, "date": "2026-11-26"}
RUN = Run(Path(), ABOUT, {})


def test_heads():
    (section,) = heads.run(rounds=1)
    assert section["gradient_error"].keys() == {"bf16", "int8", "NF4"}
    assert max(section["gradient_error"].values()) < 0.05
    assert section["calls"].keys() - section["scratch_bytes"].keys() == {
        heads.BARE, "LoRA on bf16, peft's layer on logits",
    }  # fmt: skip
    table = heads.table(section, RUN)
    assert "Calls on logits take 1024 tokens at a time." in table
    assert f"Gradients differ by {section['gradient_error']['bf16']:.2%} from those of peft's layer" in table


def test_an_adapter_whose_gradient_is_nan_is_not_timed(monkeypatch):
    """Though that of the hidden states is right."""
    problem = heads.Problem("cpu")
    problem.adapter.a.register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(SystemExit, match="bf16: gradients of H and A differ by nan%: nothing is timed"):
        problem.check()


@pytest.mark.parametrize("name", ["bf16", "int8", "NF4"])
def test_a_wrong_gradient_of_a_head_is_not_timed(name, monkeypatch):
    problem = heads.Problem("cpu")
    if name == "bf16":
        problem.weight = problem.weight.flip(0)
    else:
        problem.quantized = {name: problem.quantized[name]}
        dense = problem.quantized[name].dequantize(torch.float32).flip(0)
        monkeypatch.setattr(QuantizedWeight, "dequantize", lambda *_: dense)
    with pytest.raises(SystemExit, match=f"{name}: gradients of H and A differ by .*: nothing is timed"):
        problem.check()


def test_alternatives(monkeypatch):
    (section,) = alternatives.run(rounds=1)
    impls = candidates.engines_of("cpu")
    assert section["errors"].keys() == {f"{impl}, K = {K}" for impl in impls for K in alternatives.COUNTS}
    assert max(section["errors"].values()) < 0.05
    assert section["scratch_bytes"][f"{impls[0]}, K = 20"] > 0
    lines = alternatives.table(section, RUN).splitlines()
    assert sum(line.startswith("| ") for line in lines) == 1 + len(section["calls"])
    assert any(line.startswith("| on logits, K = 128 |") for line in lines)
    on_logits = alternatives.Problem.on_logits

    def wrong(problem: Any, factor: float) -> torch.Tensor:
        hook = problem.hidden.register_hook(lambda gradient: factor * gradient)
        loss = on_logits(problem)
        hook.remove()
        return loss

    for factor in (1.1, math.nan):
        monkeypatch.setattr(alternatives.Problem, "on_logits", partialmethod(wrong, factor))
        with pytest.raises(SystemExit, match="loss and dH are off by .*: nothing is timed"):
            next(alternatives.run(rounds=1))


def test_candidates(monkeypatch):
    impls = candidates.engines_of("cpu")
    published = candidates.published("cpu", impls, 1)
    window = candidates.window("cpu", impls[0], 1)
    table = tables.candidates({"published": published, "window": window}, RUN)
    assert "| masked dense loss |" in table
    assert "A micro-batch whose rows are added to a gradient that is there takes" in table
    for value in (0.0, math.nan):
        monkeypatch.setattr(candidates.Problem, "score", lambda self, _, x=value: torch.full(self.targets.shape, x))
        with pytest.raises(SystemExit, match="log-probs are off by .*: nothing is timed"):
            candidates.published("cpu", impls, 1)


def test_divergence(monkeypatch):
    pytest.importorskip("trl", minversion="1.15")
    pytest.importorskip("liger_kernel")
    monkeypatch.setattr(divergence, "QUICK", TINY["cpu"])
    (section,) = divergence.run(kinds=("reverse_kl",), rounds=1, quick=True)
    assert "| reverse_kl, grpo_fused |" in tables.divergence(section, RUN)
    for factor in (1.1, math.nan):
        monkeypatch.setitem(divergence.IMPLEMENTATIONS, "grpo_fused", lambda *a, x=factor: x * divergence.ours(*a))
        with pytest.raises(SystemExit, match="grpo_fused reverse_kl is wrong: .*; nothing is timed"):
            next(divergence.run(kinds=("reverse_kl",), rounds=1, quick=True))
