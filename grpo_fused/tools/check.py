"""A self-test of this installation: every engine that runs here against the eager reference in float64.

    python -m grpo_fused check            # about a minute on two cores
    python -m grpo_fused check --quick    # half a minute

Every engine x dtype x objective is run on padded, packed and poisoned inputs; log-probs and gradients must be within
the bounds of `grpo_fused.testing`. Engines whose scores are bitwise independent of the batch are tested for that.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_fused import GRPOLossConfig, __version__, engines
from grpo_fused.call.loss_types import LOSS_TYPES
from grpo_fused.testing import BATCH_BOUND, BITWISE, Problem, largest, make_problem

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_REQUIRED: dict[str, dict[str, Any]] = {"cispo": {"epsilon_high": 1.3}, "dr_grpo": {"max_completion_length": 11}}
OBJECTIVES: dict[str, dict[str, Any]] = {
    **{name: {"loss_type": name, **_REQUIRED.get(name, {})} for name in LOSS_TYPES},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "gspo-token": {"importance_sampling_level": "sequence_token"},
    "kl-k3": {"beta": 0.1},
    "kl-k1-uncorrected": {"beta": 0.1, "kl_estimator": "k1", "use_bias_correction_kl": False},
    "gspo-kl-k2": {"importance_sampling_level": "sequence", "beta": 0.1, "kl_estimator": "k2"},
    "entropy-bonus": {"entropy_coef": 0.05},
    "entropy-quantile": {"loss_type": "grpo", "top_entropy_quantile": 0.4},
    "delta": {"delta": 1.5, "epsilon_high": 0.28},
    "dual-clip": {"loss_type": "grpo", "dual_clip": 1.4},
    "off-policy-mask": {"off_policy_mask_threshold": 0.05},
}
"""Every loss type, level, estimator and option once: name in the output, and options."""


class Inputs(NamedTuple):
    """The inputs of a check."""

    options: dict[str, Any]
    """of `problem_of`"""
    objectives: tuple[str, ...]
    """names in `OBJECTIVES`"""
    quick: tuple[str, ...] = ("dapo",)
    """objectives of the quick check"""


_FEW = ("dapo", "gspo", "entropy-bonus")
INPUTS = {
    "": Inputs({}, tuple(OBJECTIVES), ("dapo", "gspo-kl-k2", "gmpo", "entropy-bonus")),
    "bias": Inputs({"lm_head_bias": torch.linspace(-2, 2, 1003)}, _FEW),
    "scale, softcap": Inputs({"logit_scale": 1.3, "softcap": 8.0}, _FEW),
    "temperatures": Inputs({"temperature": torch.linspace(0.6, 1.5, 4)}, _FEW),
    "packed": Inputs({"packed": True}, _FEW),
    "candidate sets": Inputs({"kept": 0.02}, _FEW),
    "nothing active": Inputs({"masked": 1.0}, ("dapo",)),
    "V = 32003": Inputs({"T": 16, "H": 256, "V": 32003, "logit_std": 4.8}, ("dapo",), ()),
}
"""Heads, layouts and sizes, by name in the output."""

PARTS = [1, 30, 64, 100, 165]
"""Numbers of tokens that are scored together, of 360."""


class Check(NamedTuple):
    """An error and its bound."""

    name: str
    errors: dict[str, tuple[float, float]]
    """(error, bound) of each comparison"""

    @property
    def passed(self) -> bool:
        """Whether every error is within its bound; NaN is not."""
        return all(error <= bound for error, bound in self.errors.values())

    def __str__(self) -> str:
        numbers = [
            f"{name} {e:.0e} ({bound:.0e})" if e or bound else f"{name} 0" for name, (e, bound) in self.errors.items()
        ]
        return f"{'ok  ' if self.passed else 'FAIL'}  {self.name:46} {'  '.join(numbers)}"


def main(argv: list[str] | None = None) -> None:
    """The command `check`: prints a line for each check, exits with 1 if one fails."""
    parser = argparse.ArgumentParser(
        prog="python -m grpo_fused check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few objectives in three dtypes, no large vocabulary")
    parser.add_argument("--engines", nargs="+", help="only these (default: all that run here)")
    given = parser.parse_args(argv)
    here = dict(_engines_here())
    if absent := [name for name in given.engines or () if name not in here]:
        sys.exit(
            f"--engines: {', '.join(absent)} does not run here, for a reason that grpo-fused doctor says; "
            f"these do: {', '.join(here)}"
        )
    start, checks = time.perf_counter(), []
    print(f"grpo_fused {__version__}, torch {torch.__version__}: errors against float64 (and their bounds)", flush=True)
    for check in run_checks(quick=given.quick, only=given.engines):
        print(check, flush=True)
        checks.append(check)
    if failed := [check.name for check in checks if not check.passed]:
        sys.exit(f"{len(failed)} of {len(checks)} checks failed: " + "; ".join(failed))
    print(f"all {len(checks)} checks passed ({time.perf_counter() - start:.0f} s)")


def run_checks(*, quick: bool = False, only: list[str] | None = None) -> Iterator[Check]:
    """All checks of the engines that run here, one after another."""
    for engine, device in _engines_here():
        if only is not None and engine not in only:
            continue
        try:
            yield from checks_of(engine, device, quick=quick)
        except Exception as error:  # a kernel that cannot be launched; the other engines may run
            traceback.print_exception(error)
            yield Check(f"{engine} on {device.type}", {type(error).__name__: (math.inf, 0.0)})


def checks_of(engine: Any, device: torch.device, *, quick: bool) -> Iterator[Check]:
    """Those of one engine."""
    dtypes = [dtype for dtype in DTYPES if engines.unavailable(engine, device, dtype) is None]
    for dtype in dtypes[-3:] if quick else dtypes:
        for name, inputs in INPUTS.items():
            for objective in inputs.quick if quick else inputs.objectives:
                words = (engine, "on", device.type, str(dtype).removeprefix("torch."), name, objective)
                problem, config = problem_of(dtype, **inputs.options), GRPOLossConfig(**OBJECTIVES[objective])
                errors = problem.compare(config, device=device, impl=engine)
                yield Check(" ".join(filter(None, words)), errors)
    for dtype in dtypes if engine in BITWISE else [torch.bfloat16]:
        yield batch_independence(engine, device, dtype)


def _engines_here() -> list[tuple[str, torch.device]]:
    """Engines and devices that run here; not `triton` with TRITON_INTERPRET, which does not run on the GPU."""
    known = [("native", "cpu"), ("chunked", "cpu")]
    known += [("chunked", "cuda"), ("cuda", "cuda")] if torch.cuda.is_available() else []
    known += [("triton", "cuda")] if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1" else []
    here = [(name, torch.device(kind)) for name, kind in known]
    return [(name, device) for name, device in here if engines.unavailable(name, device, torch.float32) is None]


def problem_of(dtype: torch.dtype, *, packed: bool = False, **options: Any) -> Problem:
    """Random tokens, one sequence empty, no ratio at a clip bound, masked positions poisoned."""
    sizes = {"T": 20, "H": 72, "V": 1003, "logit_std": 3.0, "drift": 0.3, "grid": 0.02, "masked": 0.25, **options}
    problem = make_problem(5, dtype=dtype, **sizes).poisoned()
    return problem.packed() if packed else problem


def batch_independence(engine: Any, device: torch.device, dtype: torch.dtype) -> Check:
    """How much a score changes with the other tokens of the batch and their order; if no change is allowed, also with
    the number of threads and in training, and how much results differ between two runs."""
    whole = problem_of(dtype, B=360, T=1, V=3001).to(dtype, device)  # sequences of one token can be taken apart

    def scores(rows: Tensor) -> Tensor:
        return whole.per_token(lambda x: x[rows]).score(engine).squeeze(1)

    rows = torch.arange(360, device=device)
    order = torch.randperm(360, generator=torch.Generator().manual_seed(0)).to(device)
    alone = scores(rows)
    apart = torch.cat([scores(part) for part in rows.split(PARTS)])
    same = {"in a batch": [(apart, alone), (scores(order), alone[order])]}
    if engine in BITWISE:
        if device.type == "cpu":
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            try:
                same["in a batch"].append((scores(rows), alone))
            finally:
                torch.set_num_threads(threads)
        config = GRPOLossConfig(entropy_coef=0.01)
        first, second = whole.run(config, impl=engine), whole.run(config, impl=engine)
        same["in training"] = [(first.out.per_token_logps.flatten(), alone)]
        gradients = zip(first.gradients().values(), second.gradients().values(), strict=True)
        same["twice"] = [(first.out.loss, second.out.loss), *gradients]
    bound = 0.0 if engine in BITWISE else BATCH_BOUND
    errors = {what: (max(largest(a - b) for a, b in pairs), bound) for what, pairs in same.items()}
    return Check(f"{engine} on {device.type} {str(dtype).removeprefix('torch.')} batch", errors)
