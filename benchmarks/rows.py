"""Only the row kernels: Triton against CUDA C++, into one JSON file.

    python -m benchmarks.rows --out rows.json             # on a GPU, about two minutes
    python -m benchmarks.rows --small --out rows.json     # the same program on few rows

An architecture with a ratio to Triton below 1 in the modes of training goes on the list in `engines/chunked.py`.
A kernel whose log-probs or gradient are wrong (against float64) is reported with its error and not timed. Logits are
restored before every call, outside the measured time, since the gradient overwrites them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from grpo_fused.kernels.configs import padded
from grpo_fused.kernels.row_types import Coefficients, Rows, Statistics, Transform
from torch import Tensor

from benchmarks.exact import worst
from benchmarks.measure import Small
from benchmarks.results import Device
from benchmarks.study import Section, main
from benchmarks.timing import Calls, copy_bandwidth, times_by_round, with_ratios
from grpo_fused import GRPOLossConfig
from grpo_fused.call.calls import LossInputs
from grpo_fused.call.layout import Layout
from grpo_fused.engines import cuda_rows
from grpo_fused.engines.rows import RowWork
from grpo_fused.engines.token_kernels import objective_numbers, token_inputs
from grpo_fused.objective.batch import TokenBatch
from grpo_fused.objective.formulas import evaluate
from grpo_fused.testing import frobenius_error

VOCABULARIES = (32000, 128256, 151936, 262208)
SMALL_VOCABULARIES = (300,)
SLAB_BYTES = 2 * 2**30
"""fp32 logits of a measurement: those of a chunk by the default scratch budget."""
BYTES_PER_LOGIT = {"statistics": 4, "gradient": 6, "loss": 6}
"""The minimum of memory traffic: fp32 logits read once, a bf16 gradient written once in their place."""
CONFIG = GRPOLossConfig()


class Problem:
    """Logits of R rows, padded as in the engine, with the inputs of the objective."""

    def __init__(self, vocab_size: int, slab_bytes: int, device: str) -> None:
        rows = max(slab_bytes // (4 * vocab_size) // 16 * 16, 16)
        g = torch.Generator(device).manual_seed(0)
        self.source = torch.randn(rows, padded(vocab_size), generator=g, device=device) * 4
        self.slab = torch.empty_like(self.source)
        self.logits = self.slab[:, :vocab_size]
        self.out = self.slab.view(torch.bfloat16)[:, :vocab_size]
        self.targets = torch.randint(0, vocab_size, (rows,), generator=g, device=device)
        self.dlogp = torch.randn(rows, generator=g, device=device)
        inputs = LossInputs(
            advantages=torch.randn(rows // 16, generator=g, device=device),
            old_per_token_logps=torch.full((rows // 16, 16), -12.0, device=device),
        )
        self.batch = TokenBatch.build(
            inputs, Layout(torch.Size((rows // 16, 16)), rows // 16, None), CONFIG, torch.float32
        )

    @property
    def rows(self) -> Rows:
        """The logits and their transform."""
        return Rows(self.logits, self.targets, Transform())

    def restore(self) -> None:
        """Restore the logits."""
        self.slab.copy_(self.source)

    def statistics(self, work: RowWork) -> Statistics:
        """Log-probs and entropies."""
        return work.statistics(self.rows, with_entropy=True)

    def gradient(self, work: RowWork, stats: Statistics) -> None:
        """The gradient from coefficients, in place."""
        work.gradient(self.rows, Coefficients(stats, self.dlogp, None), self.out)

    def loss(self, work: RowWork) -> Statistics:
        """Statistics, objective and gradient, in place."""
        inputs = token_inputs(self.batch, CONFIG)
        return work.loss(self.rows, inputs, objective_numbers(CONFIG), self.out, with_entropy=True).statistics

    def error(self, work: RowWork) -> float:
        """The largest error of log-probs (nats), and 1 % of that of gradients (relative), over the last rows."""
        last = slice(-8, None)
        log_p = self.source[last, : self.logits.shape[1]].double().log_softmax(1)
        onehot = torch.nn.functional.one_hot(self.targets[last], log_p.shape[1])

        def of(stats: Statistics, dlogp: Tensor) -> float:
            gradient = dlogp[last].double().unsqueeze(1) * (onehot - log_p.exp())
            logp_error = (stats.logp[last].double() - (log_p * onehot).sum(1)).abs().max()
            return worst(float(logp_error), frobenius_error(self.out[last], gradient) / 100)

        self.restore()
        stats = self.statistics(work)
        self.gradient(work, stats)
        of_two = of(stats, self.dlogp)
        self.restore()
        stats = self.loss(work)
        return worst(of_two, of(stats, evaluate(stats.logp, None, self.batch, CONFIG).derivatives().dlogp))


def candidates() -> dict[str, RowWork]:
    """Triton's row work, and CUDA C++ if it was built."""
    from grpo_fused.kernels.launch import TritonRows

    triton: dict[str, RowWork] = {"triton": TritonRows()}
    if (reason := cuda_rows.unavailable()) is not None:
        print(f"Triton only: the CUDA row kernel cannot run here: {reason}")
        return triton
    return triton | {"cuda": cuda_rows.CudaRows()}


def measure(problem: Problem, works: dict[str, RowWork], device: str, rounds: int) -> dict[str, Any]:
    """Errors of every candidate; its times by mode, and their ratios to those of the first one that is right."""
    errors = {name: problem.error(work) for name, work in works.items()}
    timed = {name: work for name, work in works.items() if errors[name] <= 1e-4}
    calls: dict[str, Calls] = {mode: {} for mode in BYTES_PER_LOGIT}
    for name, work in timed.items():
        problem.restore()
        calls["statistics"][name] = partial(problem.statistics, work)
        calls["gradient"][name] = partial(problem.gradient, work, problem.statistics(work))
        calls["loss"][name] = partial(problem.loss, work)
    modes = {}
    for mode, by_name in calls.items():
        times = times_by_round(by_name, device, rounds=rounds, warmup=0, before=problem.restore)
        modes[mode] = with_ratios(times, next(iter(times), ""))
        for row in modes[mode].values():
            row["tb_per_s"] = BYTES_PER_LOGIT[mode] * problem.logits.numel() / row["ms"]["median"] / 1e9
    return {"error": errors, "modes": modes}


def run(rounds: int = 9, small: Small = False, device: Device = "cuda") -> Iterator[Section]:
    """The section `rows`, after each vocabulary."""
    works = candidates()
    vocabularies, slab_bytes = (SMALL_VOCABULARIES, 2**16) if small else (VOCABULARIES, SLAB_BYTES)
    section: Section = {"copy_tb_per_s": copy_bandwidth(device, slab_bytes // 2), "vocabularies": []}
    for vocab_size in vocabularies:
        problem = Problem(vocab_size, slab_bytes, device)
        measured = measure(problem, works, device, rounds)
        section["vocabularies"].append({"V": vocab_size, "R": problem.logits.shape[0], **measured})
        yield section


if __name__ == "__main__":
    main("rows")
