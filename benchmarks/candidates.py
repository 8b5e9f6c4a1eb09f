"""Candidate sets: the cost of a loss that reads only the kept rows of the weight, compared with dense losses.

    python -m benchmarks.candidates --out results.json                  # about two minutes on two cores
    python -m benchmarks.candidates --device cuda --out results.json

Four parts. `published`: set sizes drawn as measured in a rollout with top_p = 0.97 (46 % of one token, median 2,
mean 8, p99 82 to 100; prime-rl pull request 2979), with the bare products, the dense loss, the masked dense loss that
frameworks use (all logits, those outside the set at -inf), and filling a fresh dW. Our dW is of huge pages, which the
system clears when they are first written to; the rows of these sets lie in all of them.
`window`: an optimizer step of `published`: 8 micro-batches, a clipped norm, AdamW and zeroing, with a new dW for each
micro-batch, and with `add_to_weight_grad`; and one more micro-batch where there is a gradient.
`growth`: all sets of one size, which shows from which size on the dense loss is faster. `recorded`: the hidden states,
head and sets of rollouts with top_p = 0.9 that the small policy of `examples.small` samples here, on the CPU.

Log-probs are compared with float64 before anything is timed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.accuracy import quantiles
from benchmarks.results import Device
from benchmarks.side_by_side import CHUNK, SHAPES, engines_of, scratch_bytes, step
from benchmarks.study import Section, main
from benchmarks.timing import bare_gemms, times_by_round, with_ratios
from examples.small.prepare import make_puzzles, prepare
from grpo_fused import CandidateSets, fused_linear_grpo_loss, fused_linear_logprobs
from grpo_fused.trainer import GRPOTrainerConfig, HuggingFaceEngine, Policy, Sampling, roll_out
from grpo_fused.trainer.rollout import ending_token_ids

SIZES = (1, 2, 8, 32, 128, 512, 2048, 8192, 18992, 75968)
GROWTH_TOKENS = {"cpu": 256, "cuda": 2048}
TOP_P = 0.9
MICRO_BATCHES = 8


class Problem:
    """Hidden states [N, H] and a head [V, H], in bf16, with targets [N] and their sets."""

    def __init__(self, hidden: Tensor, weight: Tensor, targets: Tensor, sets: CandidateSets, device: str) -> None:
        self.hidden = hidden.unsqueeze(0).to(device, torch.bfloat16).requires_grad_()
        self.weight = weight.to(device, torch.bfloat16).requires_grad_()
        self.targets, self.sets = targets.unsqueeze(0).to(device), sets.to(device)
        self.advantages = torch.randn(1, generator=torch.Generator().manual_seed(0)).to(device)

    @classmethod
    def drawn(cls, sizes: Tensor, H: int, V: int, device: str) -> Problem:
        """With sets of these sizes, ascending, as of `CandidateSets.from_mask`; the first token is the target."""
        g = torch.Generator().manual_seed(0)
        hidden, weight = torch.randn(len(sizes), H, generator=g), 0.03 * torch.randn(V, H, generator=g)
        ids = torch.cat([torch.randperm(V, generator=g)[:size].sort().values for size in sizes.tolist()])
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
        return cls(hidden, weight, ids[offsets[:-1]], CandidateSets(ids, offsets), device)

    @property
    def set_sizes(self) -> dict[str, float]:
        """Mean and quantiles of the sizes, and the share of tokens that are alone; an empty set has all V."""
        sizes = self.sets.sizes.double()
        sizes = torch.where(sizes == 0, float(self.weight.shape[0]), sizes)
        return quantiles(sizes) | {"alone": (sizes == 1).double().mean().item()}

    def loss(self, impl: str, *, sets: bool = True, frozen: bool = False) -> None:
        """Forward and backward."""
        weight = self.weight.detach() if frozen else self.weight
        out = fused_linear_grpo_loss(
            self.hidden, weight, self.targets, self.advantages, candidates=self.sets if sets else None, impl=impl
        )
        step(out.loss, self.hidden, self.weight)

    @torch.no_grad()
    def score(self, impl: str) -> Tensor:
        """Log-probs."""
        return fused_linear_logprobs(self.hidden, self.weight, self.targets, candidates=self.sets, impl=impl).logps

    def masked_dense(self) -> None:
        """As in frameworks: logits, a mask, a log-softmax in fp32."""
        N = self.targets.shape[1]
        for start in range(0, N, CHUNK):
            rows = torch.arange(start, min(start + CHUNK, N), device=self.hidden.device)
            logits = (self.hidden[0, rows] @ self.weight.T).float()
            logits = logits.masked_fill(~self.sets.select(rows).to_mask(logits.shape[1]), -torch.inf)
            logps = logits.log_softmax(-1).gather(1, self.targets[0, rows].unsqueeze(1))
            (-(logps - logps.detach()).exp() * self.advantages / N).sum().backward()
        self.hidden.grad = self.weight.grad = None

    @torch.no_grad()
    def check(self, impl: str, tokens: int = 64) -> float:
        """Largest error of log-probs against float64, of some tokens."""
        rows = torch.arange(min(tokens, self.targets.shape[1]), device=self.hidden.device)
        hidden, weight = self.hidden[:, rows].double(), self.weight.double()
        exact = fused_linear_logprobs(
            hidden, weight, self.targets[:, rows], candidates=self.sets.select(rows), impl="reference"
        ).logps
        error = float((self.score(impl)[:, rows] - exact).abs().max())
        if not error <= 1e-4:
            raise SystemExit(f"{impl}: log-probs are off by {error}: nothing is timed")
        return error


def published_sizes(N: int) -> Tensor:
    """[N]: drawn from the measured distribution of a rollout."""
    g = torch.Generator().manual_seed(1)
    alone = torch.rand(N, generator=g) < 0.46
    others = torch.exp(1.25 * torch.randn(N, generator=g) + 1.75).clamp(2, 512)
    return torch.where(alone, torch.ones(N), others).to(torch.int64)


def published(device: str, impls: list[str], rounds: int) -> dict[str, Any]:
    """Times, ratios to the bare products, errors and memory at the published set sizes."""
    N, H, V = SHAPES[device]
    problem = Problem.drawn(published_sizes(N), H, V, device)
    errors = {impl: problem.check(impl) for impl in impls}
    memory = scratch_bytes(
        {impl: partial(problem.loss, impl) for impl in impls}, device,
        lambda _: problem.hidden.nbytes + problem.weight.nbytes,
    )  # fmt: skip
    calls: dict[str, Callable[[], object]] = dict(bare_gemms(N, H, V, torch.bfloat16, device))
    calls["fill dW"] = lambda: torch.full((V, H), 1.0, dtype=torch.bfloat16, device=device)
    for impl in impls:
        calls[f"{impl} loss"] = partial(problem.loss, impl)
        calls[f"{impl} loss, frozen head"] = partial(problem.loss, impl, frozen=True)
        calls[f"{impl} scoring"] = partial(problem.score, impl)
    calls[f"{impls[0]} dense loss"] = partial(problem.loss, impls[0], sets=False)
    calls["masked dense loss"] = problem.masked_dense
    return {
        "N": N, "H": H, "V": V, "chunk": CHUNK,
        "set_sizes": problem.set_sizes, "logp_error": errors, "scratch_bytes": memory,
        "calls": with_ratios(times_by_round(calls, device, rounds=rounds), "bare-3"),
    }  # fmt: skip


def window(device: str, impl: str, rounds: int) -> dict[str, Any]:
    """Times of whole windows, and of single micro-batches to whose gradient rows are added."""
    N, H, V = SHAPES[device]
    problem = Problem.drawn(published_sizes(N), H, V, device)
    weight, optimizer = problem.weight, torch.optim.AdamW([problem.weight], lr=1e-6, fused=True)

    def micro_batch(adds: bool) -> None:
        fused_linear_grpo_loss(
            problem.hidden, weight, problem.targets, problem.advantages, candidates=problem.sets, impl=impl,
            add_to_weight_grad=adds,
        ).loss.backward()  # fmt: skip
        problem.hidden.grad = None

    def whole(adds: bool) -> None:
        for _ in range(MICRO_BATCHES):
            micro_batch(adds)
        torch.nn.utils.clip_grad_norm_([weight], 1.0)
        optimizer.step()
        weight.grad = None

    calls = {"new dW": partial(whole, False), "rows added": partial(whole, True)}
    times = times_by_round({**bare_gemms(N, H, V, torch.bfloat16, device), **calls}, device, rounds=rounds)
    micro_batch(True)
    several = {f"{MICRO_BATCHES} more": lambda: [micro_batch(True) for _ in range(MICRO_BATCHES)]}
    more = times_by_round({**bare_gemms(N, H, V, torch.bfloat16, device), **several}, device, rounds=rounds)
    return {"micro_batches": MICRO_BATCHES, "calls": with_ratios(times, "bare-3"), "more": with_ratios(more, "bare-3")}


def growth(device: str, impl: str, rounds: int) -> list[dict[str, Any]]:
    """Forward and backward with all sets of one size, and of the dense loss, with a frozen head."""
    _, H, V = SHAPES[device]
    N = GROWTH_TOKENS[device]
    points = []
    for size in SIZES:
        problem = Problem.drawn(torch.full((N,), size), H, V, device)
        problem.check(impl, tokens=4)
        calls = {"sets": partial(problem.loss, impl, frozen=True)}
        calls["dense"] = partial(problem.loss, impl, sets=False, frozen=True)
        points.append({"size": size, **with_ratios(times_by_round(calls, device, rounds=rounds), "dense")})
    return points


@torch.no_grad()
def rollout_problem(device: str, *, warmup_steps: int = 200, prompts: int = 32) -> Problem:
    """All tokens of a rollout of the small policy after its supervised warm-up, 8 completions of each prompt."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name, torch.enable_grad():
        prepare(Path(name), warmup_steps=warmup_steps)
        model = AutoModelForCausalLM.from_pretrained(Path(name) / "policy")
        tokenizer = AutoTokenizer.from_pretrained(Path(name) / "policy")
    sampling = Sampling(
        num_generations=8, max_completion_length=24, top_p=TOP_P, pad_token_id=tokenizer.pad_token_id,
        eos_token_ids=ending_token_ids(model, tokenizer),
    )  # fmt: skip
    texts = [puzzle["prompt"] for puzzle in make_puzzles()[:prompts]]
    rollout = roll_out(HuggingFaceEngine(model, tokenizer), [tokenizer(text).input_ids for text in texts], sampling)
    policy = Policy(model, Accelerator(cpu=True), GRPOTrainerConfig(top_p=TOP_P))
    active = rollout.completion_mask
    hidden = policy.hidden_states(rollout)[active]
    sets = rollout.candidates.select(active.reshape(-1).nonzero().squeeze(1))
    weight = policy.head()["lm_head_weight"].detach()
    return Problem(hidden, weight, rollout.completion_ids[active], sets, device)


def recorded(device: str, impls: list[str], rounds: int) -> dict[str, Any]:
    """Set sizes of a rollout, and times of exactly its loss and scores beside those of dense ones."""
    problem = rollout_problem(device)
    calls: dict[str, Callable[[], object]] = {}
    for impl in impls:
        calls[f"{impl} loss"] = partial(problem.loss, impl)
        calls[f"{impl} scoring"] = partial(problem.score, impl)
        calls[f"{impl} dense loss"] = partial(problem.loss, impl, sets=False)
    calls["masked dense loss"] = problem.masked_dense
    V, H = problem.weight.shape
    return {
        "N": problem.targets.shape[1], "H": H, "V": V, "top_p": TOP_P, "set_sizes": problem.set_sizes,
        "logp_error": {impl: problem.check(impl) for impl in impls},
        "calls": with_ratios(times_by_round(calls, device, rounds=rounds), f"{impls[0]} dense loss"),
    }  # fmt: skip


def run(device: Device = "cpu", rounds: int = 5) -> Iterator[Section]:
    """The section `candidates`."""
    impls = engines_of(device)
    yield {
        "recorded": recorded(device, impls, rounds), "published": published(device, impls, rounds),
        "growth": growth(device, impls[0], 3), "window": window(device, impls[0], rounds),
    }  # fmt: skip


if __name__ == "__main__":
    main("candidates")
