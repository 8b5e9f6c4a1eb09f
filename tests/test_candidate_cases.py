"""Random calls with candidate sets, each option drawn anew, against a dense masked softmax in float64."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import PRECISION, Case, all_configs, assert_same, config_id, frobenius_error, make_case, set_scores

from grpo_fused import CandidateSets, GRPOLossConfig
from grpo_fused.engines import candidates as engine_of_sets

CONFIGS = list(all_configs())
CASES = {"native": 3000, "chunked": 3000, "triton": 120}
"""of each engine, 20 at a time; the gate has the first 20, and 5 of triton's"""


def draw_sets(g: random.Random, ids: torch.Tensor, V: int) -> CandidateSets:
    """Sets of one, two, some, V - 1 or V tokens, or none; in any order, with the target first, last or anywhere.

    Half of the calls draw from a few ids only, which then recur at many tokens.
    """
    kinds = g.choice([(1,), (2,), (V,), (1, 2), (0, 1, 2, 5), (2, 5, V), (0,), (0, 1, 2, max(V // 8, 1), V - 1, V)])
    pool = g.sample(range(V), min(V, 6)) if g.random() < 0.5 else list(range(V))
    sets = []
    for target in ids.tolist():
        size = min(g.choice(kinds), V)
        others = [j for j in (pool if size <= len(pool) else range(V)) if j != target]
        own = g.sample(others, min(size - 1, len(others))) if size else []
        if size:
            own.insert(g.choice([0, len(own), g.randint(0, len(own))]), target)
        sets.append(own)
    offsets = torch.tensor([0, *[len(own) for own in sets]]).cumsum(0)
    dtype = g.choice([torch.int32, torch.int64])
    return CandidateSets(torch.tensor([j for own in sets for j in own], dtype=dtype), offsets)


def draw_head(g: random.Random, B: int, T: int, V: int) -> dict[str, Any]:
    """Options of the head."""
    t = torch.Generator().manual_seed(g.randrange(2**31))
    temperature = g.choice([
        1.0, 0.7, 0.5 + torch.rand(B, 1, generator=t, dtype=torch.float64), 0.5 + torch.rand(B, T, generator=t)
    ])  # fmt: skip
    head: dict[str, Any] = {"temperature": temperature, "logit_scale": g.choice([1.0, 0.7])}
    if g.random() < 0.3:
        head["softcap"] = 4.0
    if g.random() < 0.4:
        head["lm_head_bias"] = torch.randn(V, generator=t, dtype=torch.float64)
    return head


def draw_case(seed: int) -> tuple[Case, GRPOLossConfig, dict[str, Any], random.Random]:
    """A call and its objective; then options that change no result."""
    g = random.Random(seed)
    B, T, H = g.choice([1, 2, 3, 6]), g.choice([1, 2, 7, 12]), g.choice([1, 3, 16, 40, 70])
    V, config = g.choice([2, 3, 29, 64, 130]), g.choice(CONFIGS)
    per_token = g.random() < 0.2 and config.loss_type != "gmpo"
    case = make_case(
        seed, B=B, T=T, H=H, V=V, grid=0.02, per_token_advantages=per_token, masked=g.choice([0.0, 0.3, 0.9]),
        logit_std=g.choice([0.5, 1.5, 6.0]), **draw_head(g, B, T, V),
    )  # fmt: skip
    sets = draw_sets(g, case.completion_ids.reshape(-1), V)
    case = replace(case, options={**case.options, "candidates": sets})
    logp = set_scores(case, "reference").double()
    alone = (sets.sizes == 1).view(logp.shape) & case.completion_mask
    t = torch.Generator().manual_seed(seed)
    for name in [name for name in case.options if name.endswith("_logps")]:
        # log-ratios 0.02 apart, and at no clip bound
        drift = -0.02 * ((12 * torch.randn(logp.shape, generator=t, dtype=torch.float64)).round() + 0.35)
        case.options[name] = torch.where(alone, 0.0, logp + drift)
    run: dict[str, Any] = {"compact": g.random() < 0.8, "upstream": g.choice([1.0, -3.0])}
    if g.random() < 0.2:
        run["max_scratch_bytes"] = 2**17
    keep = case.completion_mask.clone()
    keep[::2] = True  # as `packed` does
    if g.random() < 0.3 and int(keep.sum()) != B:  # [B] would look like one for each token
        packed = case.packed()
        packed.options["candidates"] = sets.select(keep.reshape(-1).nonzero().squeeze(1))
        return packed, config, run, g
    return case.poisoned(), config, run, g


def move(case: Case, by: float) -> Case:
    """With inputs off by rounding: a gradient that is a small difference changes as much by that of ours."""
    t = torch.Generator().manual_seed(0)

    def moved(name: str, x: torch.Tensor) -> torch.Tensor:
        if name.endswith("_logps"):
            return x + by * (4.0 + x.abs())
        if name == "hidden_states":
            return x + by * x * torch.randn(x.shape, generator=t, dtype=x.dtype)
        return x

    return case.map(moved)


@pytest.mark.gate(keep=lambda impl, part: part == 0)
@pytest.mark.parametrize(
    ("impl", "part"), [(impl, part) for impl, count in CASES.items() for part in range(count // 20)]
)
def test_random_calls(impl, part, monkeypatch):
    dtype, tol = PRECISION[impl]
    for seed in range(20 * part, 20 * part + (20 if impl != "triton" or part else 5)):
        case, config, run, g = draw_case(seed)
        monkeypatch.setattr(engine_of_sets, "_BLOCK_CANDIDATES", g.choice([3, 2**18]))
        exact = case.to(dtype)
        want, moved = (
            move(exact.to(torch.float64), by).run(config, impl="reference", upstream=run["upstream"])
            for by in (0.0, 4 * torch.finfo(dtype).eps)
        )
        change = max(frobenius_error(x, want.gradients()[name]) for name, x in moved.gradients().items())
        try:
            assert_same(exact.run(config, impl=impl, **run), want, tol=tol, scale=1.0 + change / tol)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {config_id(config)}, {run}: {error}") from error
