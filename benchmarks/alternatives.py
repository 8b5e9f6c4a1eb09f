"""Alternatives: what K more tokens of each position add to a loss, beside the same loss on logits.

    python -m benchmarks.alternatives --out results.json     # a minute on two cores

Score centering from the sampler's top K (`score_centered_tis`), forward and backward, with K = 20 and 128, beside
REINFORCE, which has no alternatives. On logits: as torchtitan and prime-rl compute it, by a log-softmax in fp32 and a
gather. Losses and dH are compared before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.exact import worst
from benchmarks.results import Device, Run, where
from benchmarks.side_by_side import CHUNK, SHAPES, engines_of, gradients_of, scratch_bytes, step
from benchmarks.study import Section, main
from benchmarks.tables import page, title
from benchmarks.timing import bare_gemms, times_by_round, with_ratios
from grpo_fused import CandidateSets, fused_linear_objective, objectives
from grpo_fused.testing import frobenius_error

COUNTS = (20, 128)


class Problem:
    """Hidden states [N, H] and a head [V, H] in bf16, tokens [N], and a sampler's K most likely tokens of each."""

    def __init__(self, device: str, K: int) -> None:
        N, H, V = SHAPES[device]
        g = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(N, H, generator=g).to(device, torch.bfloat16).requires_grad_()
        self.weight = (0.03 * torch.randn(V, H, generator=g)).to(device, torch.bfloat16).requires_grad_()
        self.targets = torch.randint(V, (N,), generator=g).to(device)
        self.advantages = torch.randn(N, generator=g).to(device)
        self.ids = torch.randint(V, (N, K), generator=g).to(device)
        self.sampling = torch.full((N,), -12.0, device=device)
        self.of_alternatives = -6.0 - torch.rand(N, K, generator=g).to(device)

    def inputs(self, rows: slice = slice(None)) -> dict[str, Tensor]:
        """Of the objective, for some of the tokens."""
        return {"advantages": self.advantages[rows], "sampling_per_token_logps": self.sampling[rows]}

    def fused(self, impl: str) -> Tensor:
        """Forward and backward."""
        N, K = self.ids.shape
        sets = CandidateSets(self.ids.reshape(-1), torch.arange(0, N * K + 1, K, device=self.ids.device))
        loss = fused_linear_objective(
            self.hidden, self.weight, self.targets, objectives.score_centered_tis("top_k"), inputs=self.inputs(),
            alternatives=sets, alternative_inputs={"sampling_alternative_logps": self.of_alternatives.reshape(-1)},
            impl=impl,
        ).loss  # fmt: skip
        return step(loss, self.hidden, self.weight)

    def reinforce(self, impl: str) -> Tensor:
        """The same without alternatives."""
        inputs = {"advantages": self.advantages}
        objective = objectives.gpg()
        found = fused_linear_objective(self.hidden, self.weight, self.targets, objective, inputs=inputs, impl=impl)
        return step(found.loss, self.hidden, self.weight)

    def on_logits(self) -> Tensor:
        """The loss on logits."""
        total = torch.zeros((), device=self.hidden.device)
        K = self.ids.shape[1]
        for start in range(0, len(self.targets), CHUNK):
            rows = slice(start, start + CHUNK)
            log_p = (self.hidden[rows] @ self.weight.T).float().log_softmax(1)
            loss = objectives.score_centered_tis("top_k")(
                log_p.gather(1, self.targets[rows].unsqueeze(1)).squeeze(1), None, **self.inputs(rows),
                alternative_logps=log_p.gather(1, self.ids[rows]).reshape(-1),
                alternative_offsets=torch.arange(0, self.ids[rows].numel() + 1, K, device=log_p.device),
                sampling_alternative_logps=self.of_alternatives[rows].reshape(-1),
            ).sum()  # fmt: skip
            loss.backward()
            total += loss.detach()
        return step(total, self.hidden, self.weight)

    def check(self, impl: str) -> float:
        """The larger relative difference of loss and dH from those on logits; bf16 logits are rounded, ours are not."""
        losses: list[float] = []
        calls = (lambda: losses.append(float(self.fused(impl))), lambda: losses.append(float(self.on_logits())))
        (dhidden,), (exact,) = (gradients_of(call, self.hidden) for call in calls)
        error = worst(abs(losses[0] - losses[1]) / max(abs(losses[1]), 1.0), frobenius_error(dhidden, exact))
        if not error < 5e-2:
            raise SystemExit(f"{impl}: loss and dH are off by {error:.2%} from those on logits: nothing is timed")
        return error


def run(device: Device = "cpu", rounds: int = 5) -> Iterator[Section]:
    """The section `alternatives`."""
    N, H, V = SHAPES[device]
    problems = {K: Problem(device, K) for K in COUNTS}
    calls: dict[str, Callable[[], object]] = {}
    errors = {}
    for impl in engines_of(device):
        calls[f"{impl}, no alternatives"] = partial(problems[COUNTS[0]].reinforce, impl)
        for K, problem in problems.items():
            errors[f"{impl}, K = {K}"] = problem.check(impl)
            calls[f"{impl}, K = {K}"] = partial(problem.fused, impl)
    memory = scratch_bytes(calls, device, lambda _: problem.hidden.nbytes + problem.weight.nbytes)
    calls = bare_gemms(N, H, V, torch.bfloat16, device) | calls
    calls[f"on logits, K = {COUNTS[-1]}"] = problems[COUNTS[-1]].on_logits
    yield {
        "N": N, "H": H, "V": V, "chunk": CHUNK, "errors": errors, "scratch_bytes": memory,
        "calls": with_ratios(times_by_round(calls, device, rounds=rounds), "bare-3"),
    }  # fmt: skip


def table(section: Section, run: Run) -> str:
    """Times, ratios to the bare products, and memory."""
    problem = title(section | {"dtype": "bf16"})
    return page(section, f"{problem}, K alternatives of each token. {where(run)}.", 3)


if __name__ == "__main__":
    main("alternatives")
