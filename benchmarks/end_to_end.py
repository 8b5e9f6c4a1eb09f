"""A whole GRPO training step with our loss, TRL's and eager logits on the same small model, and the head's share.

    python -m benchmarks.end_to_end --out results.json                     # under two minutes on two cores
    python -m benchmarks.end_to_end --device cuda --hidden 2048 --layers 16 --vocab 151936 --out results.json

The rollout is recorded (random ids, no generation): forward of the body, loss, backward, AdamW. Times are interleaved
in one process; memory is taken in a fresh process for each. The share of the head is the time of the loss and its
gradients with hidden states given. A small model with a large vocabulary is mostly head: `head_flop_share` has the
smaller share of larger models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.child import in_child
from benchmarks.memory import blocks_given_back, peak_bytes
from benchmarks.problem import EPSILON, clear, train, trainable
from benchmarks.providers import PROVIDERS, eager_logps, fused_loss
from benchmarks.qwen2 import small_qwen2
from benchmarks.results import Device
from benchmarks.study import Section, main
from benchmarks.timing import Calls, summary, times_by_round
from grpo_fused import GRPOLossConfig
from grpo_fused.heads import head_hidden_states
from grpo_fused.testing import Problem, frobenius_error

GRADIENT_TOLERANCE = 0.02
"""Relative Frobenius error of dL/dhidden above which a provider is reported as wrong and not timed: bf16 heads reach
5e-3 on these data."""

MODEL_CARDS = {
    "Qwen2.5-0.5B": (0.36e9, 896, 151936),
    "Qwen2.5-1.5B": (1.31e9, 1536, 151936),
    "Qwen2.5-3B": (2.77e9, 2048, 151936),
    "Qwen2.5-7B": (6.53e9, 3584, 152064),
}
"""Parameters without the embeddings, width, vocabulary: from their model cards and configs."""


@dataclass(frozen=True)
class Setting:
    """A model and a rollout."""

    hidden: int = 256
    layers: int = 4
    vocab: int = 32000
    sequences: int = 8
    prompt: int = 32
    completion: int = 128
    dtype: str = "bfloat16"
    device: str = "cpu"

    @property
    def tokens(self) -> int:
        """Completion tokens, those of the loss."""
        return self.sequences * self.completion


def build_model(setting: Setting) -> nn.Module:
    """Qwen2 with tied embeddings; the same weights each time."""
    length = setting.prompt + setting.completion
    model = small_qwen2(
        setting.vocab, setting.hidden, setting.layers, tie_word_embeddings=True, max_position_embeddings=length
    )
    return model.to(setting.device, getattr(torch, setting.dtype))


def build_rollout(setting: Setting, model: nn.Module) -> tuple[Tensor, Problem]:
    """Random ids [B, prompt + completion], and the loss of their completions; old log-probs are the model's with a
    noise of 0.05 nats."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, setting.vocab, (setting.sequences, setting.prompt + setting.completion), generator=g)
    shape, device = (setting.sequences, setting.completion), setting.device
    advantages, ids = torch.randn(shape[0], generator=g).to(device), ids.to(device)
    mask, weight = torch.ones(shape, dtype=torch.bool, device=device), model.lm_head.weight
    with torch.no_grad():
        states = completion_states(model, ids, setting.completion)
        logps = eager_logps(states, weight, ids[:, setting.prompt :])
    old = logps + 0.05 * torch.randn(shape, generator=g).to(device)
    return ids, Problem(states, weight, ids[:, setting.prompt :], advantages, mask, {"old_per_token_logps": old})


def completion_states(model: nn.Module, ids: Tensor, count: int) -> Tensor:
    """[B, count, H]: the states that predict the last ids; no logits are computed."""
    return head_hidden_states(model, ids)[:, -count - 1 : -1]


Loss = Callable[[Problem], Tensor]


def losses() -> dict[str, Loss]:
    """Those that are installed."""
    installed = {"ours": lambda p: fused_loss(p, "auto").loss, "eager": PROVIDERS["eager"].loss}
    return installed | ({"TRL": PROVIDERS["trl"].loss} if PROVIDERS["trl"].unavailable("cpu") is None else {})


class Step:
    """A training step with a loss, on a model of its own."""

    def __init__(self, setting: Setting, loss: Loss) -> None:
        self.model = build_model(setting).train()
        self.ids, self.problem = build_rollout(setting, self.model)
        self.loss = loss
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)

    def forward(self) -> Tensor:
        """The loss of the model."""
        states = completion_states(self.model, self.ids, self.problem.completion_ids.shape[1])
        return self.loss(replace(self.problem, hidden_states=states))

    def __call__(self) -> None:
        """Forward, loss, backward, AdamW; gradients are freed."""
        self.forward().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def gradient_error(problem: Problem, loss: Loss) -> float:
    """Relative Frobenius error of dL/dhidden against float64."""
    exact = problem.to(torch.float64).run(GRPOLossConfig(epsilon=EPSILON), impl="reference")
    train(problem, loss)
    return frobenius_error(problem.hidden_states.grad, exact.dhidden)


def measure(setting: Setting, rounds: int) -> dict[str, Any]:
    """Time, error and memory with every loss in one dtype."""
    steps = {name: Step(setting, loss) for name, loss in losses().items()}
    problem = trainable(steps["ours"].problem.map(lambda _, x: x.clone()))  # not those that AdamW writes to
    rows: dict[str, Any] = {name: {"gradient_error": gradient_error(problem, s.loss)} for name, s in steps.items()}
    clear(problem)
    right = [name for name in rows if rows[name]["gradient_error"] <= GRADIENT_TOLERANCE]
    calls: Calls = {f"step {name}": steps[name] for name in right}
    calls |= {f"head {name}": partial(train, problem, steps[name].loss) for name in right}
    times = times_by_round(calls, setting.device, rounds=rounds)
    for name, row in rows.items():
        if name not in right:
            print(f"{setting.dtype} {name} not timed: its gradient is off by {row['gradient_error']:.2g}")
            continue
        step, head = times[f"step {name}"], times[f"head {name}"]
        seconds = summary([1e-3 * ms for ms in step])
        row |= {
            "step_seconds": seconds,
            "head_seconds": summary([1e-3 * ms for ms in head]),
            "tokens_per_second": setting.tokens / seconds["median"],
            "head_share": summary([h / s for h, s in zip(head, step, strict=True)])["median"],
        }
        row |= in_child("benchmarks.end_to_end:memory", name, asdict(setting))
    return rows


def memory(name: str, fields: dict[str, Any]) -> dict[str, float]:
    """Bytes: peak of a provider's step beyond weights and optimizer state, and these; `fields` are a `Setting`'s."""
    setting = Setting(**fields)
    with blocks_given_back():
        step = Step(setting, losses()[name])
        peak = peak_bytes(step, setting.device)
    state = [v for values in step.optimizer.state.values() for v in values.values() if isinstance(v, Tensor)]
    return {"peak_bytes": peak, "standing_bytes": sum(x.nbytes for x in [*step.model.parameters(), *state])}


def head_flop_share(body: float, width: int, vocab: int) -> float:
    """The head's share of a dense model's products: V H of V H + the body's parameters. Without attention scores, whose
    share grows with the context, and without prompt tokens, which need no head."""
    return vocab * width / (vocab * width + body)


def study(settings: list[Setting], rounds: int) -> dict[str, Any]:
    """The section `end_to_end`."""
    model = build_model(settings[0])
    body = sum(p.numel() for p in model.parameters()) - model.lm_head.weight.numel()
    here = head_flop_share(body, settings[0].hidden, settings[0].vocab)
    return {
        "model": {k: v for k, v in asdict(settings[0]).items() if k != "dtype"} | {"body_parameters": body},
        "tokens": settings[0].tokens,
        "results": {s.dtype: measure(s, rounds) for s in settings},
        "head_flop_share": {"this model": here}
        | {name: head_flop_share(*numbers) for name, numbers in MODEL_CARDS.items()},
    }


def run(
    hidden: int = Setting.hidden,
    layers: int = Setting.layers,
    vocab: int = Setting.vocab,
    device: Device = "cpu",
    rounds: int = 5,
) -> Iterator[Section]:
    """The section `end_to_end`."""
    yield study(
        [Setting(hidden, layers, vocab, dtype=dtype, device=device) for dtype in ("bfloat16", "float32")], rounds
    )


if __name__ == "__main__":
    main("end_to_end")
