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
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.child import in_child
from benchmarks.memory import blocks_given_back, peak_bytes
from benchmarks.problem import EPSILON, clear, loss_from_logps
from benchmarks.providers import PROVIDERS, eager_logps, fused_loss
from benchmarks.qwen2 import small_qwen2
from benchmarks.results import Device
from benchmarks.study import Section, main
from benchmarks.timing import summary, times_by_round
from grpo_fused import GRPOLossConfig, fused_linear_grpo_loss
from grpo_fused.heads import head_hidden_states, lm_head_inputs
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


class Rollout(NamedTuple):
    """The training data of a step."""

    ids: Tensor  # [B, prompt + completion]
    mask: Tensor  # [B, completion] bool
    advantages: Tensor  # [B]
    old: Tensor  # [B, completion] nats

    @property
    def completion_ids(self) -> Tensor:
        """[B, completion]"""
        return self.ids[:, -self.mask.shape[1] :]

    def problem(self, hidden: Tensor, weight: Tensor) -> Problem:
        """Without the prompts, as input of the loss."""
        options = {"old_per_token_logps": self.old}
        return Problem(hidden, weight, self.completion_ids, self.advantages, self.mask, options)


def build_model(setting: Setting) -> nn.Module:
    """Qwen2 with tied embeddings; the same weights each time."""
    length = setting.prompt + setting.completion
    model = small_qwen2(
        setting.vocab, setting.hidden, setting.layers, tie_word_embeddings=True, max_position_embeddings=length
    )
    return model.to(setting.device, getattr(torch, setting.dtype))


def build_rollout(setting: Setting, model: nn.Module) -> Rollout:
    """Random ids, and old log-probs: the model's with a noise of 0.05 nats."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, setting.vocab, (setting.sequences, setting.prompt + setting.completion), generator=g)
    shape = (setting.sequences, setting.completion)
    blank = torch.zeros(shape)
    rollout = Rollout(ids, torch.ones(shape, dtype=torch.bool), torch.randn(shape[0], generator=g), blank)
    rollout = Rollout(*(x.to(setting.device) for x in rollout))
    with torch.no_grad():
        logps = eager_logps(completion_states(model, rollout), model.lm_head.weight, rollout.completion_ids)
    return rollout._replace(old=logps + 0.05 * torch.randn(shape, generator=g).to(setting.device))


def completion_states(model: nn.Module, rollout: Rollout) -> Tensor:
    """[B, completion, H]: the states that predict the completion; no logits are computed."""
    return head_hidden_states(model, rollout.ids)[:, -rollout.mask.shape[1] - 1 : -1]


class Provider(NamedTuple):
    """A loss in two forms."""

    of_model: Callable[[nn.Module, Rollout], Tensor]
    """as a training step computes it"""
    of_head: Callable[[Problem], Tensor]
    """from given hidden states"""


def ours_of_model(model: nn.Module, rollout: Rollout) -> Tensor:
    return fused_linear_grpo_loss(
        completion_states(model, rollout),
        completion_ids=rollout.completion_ids,
        advantages=rollout.advantages,
        completion_mask=rollout.mask,
        old_per_token_logps=rollout.old,
        **_head_of(model),
    ).loss


def trl_of_model(model: nn.Module, rollout: Rollout) -> Tensor:
    return PROVIDERS["trl"].loss(rollout.problem(completion_states(model, rollout), model.lm_head.weight))


def eager_of_model(model: nn.Module, rollout: Rollout) -> Tensor:
    """The logits of the model's own forward, of the completion only."""
    T = rollout.mask.shape[1]
    logits = model(input_ids=rollout.ids, use_cache=False, logits_to_keep=T + 1).logits[:, :-1].float()
    logps = logits.log_softmax(-1).gather(-1, rollout.completion_ids.unsqueeze(-1)).squeeze(-1)
    return loss_from_logps(logps, rollout.problem(logits, logits))


def providers() -> dict[str, Provider]:
    """The providers that are installed."""
    installed = {
        "ours": Provider(ours_of_model, lambda p: fused_loss(p, "auto").loss),
        "eager": Provider(eager_of_model, PROVIDERS["eager"].loss),
    }
    if PROVIDERS["trl"].unavailable("cpu") is None:
        installed["TRL"] = Provider(trl_of_model, PROVIDERS["trl"].loss)
    return installed


def _head_of(model: nn.Module) -> dict[str, Any]:
    """`lm_head_inputs`, which checks the head against the model once and not in every step."""
    if not hasattr(model, "_checked_head"):
        object.__setattr__(model, "_checked_head", lm_head_inputs(model))
    return model._checked_head  # type: ignore[return-value]


class Step:
    """A training step of one provider on its own model."""

    def __init__(self, setting: Setting, provider: Provider) -> None:
        self.model = build_model(setting).train()
        self.rollout = build_rollout(setting, self.model)
        self.provider = provider
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)

    def __call__(self) -> None:
        """Forward, loss, backward, AdamW; gradients are freed."""
        self.provider.of_model(self.model, self.rollout).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def head_problem(self) -> Problem:
        """The loss with hidden states given."""
        with torch.no_grad():
            hidden = completion_states(self.model, self.rollout)
        weight = self.model.lm_head.weight.detach().clone()
        return self.rollout.problem(hidden.requires_grad_(), weight.requires_grad_())


def gradient_error(problem: Problem, provider: Provider) -> float:
    """Relative Frobenius error of dL/dhidden against float64."""
    exact = problem.to(torch.float64).run(GRPOLossConfig(epsilon=EPSILON), impl="reference")
    clear(problem)
    provider.of_head(problem).backward()
    assert problem.hidden_states.grad is not None
    assert exact.dhidden is not None
    error = frobenius_error(problem.hidden_states.grad, exact.dhidden)
    clear(problem)
    return error


def measure(setting: Setting, rounds: int, *, with_memory: bool = True) -> dict[str, Any]:
    """Time, error and memory of every provider in one dtype."""
    chosen = providers()
    steps = {name: Step(setting, provider) for name, provider in chosen.items()}
    problem = steps["ours"].head_problem()
    errors = {name: gradient_error(problem, provider) for name, provider in chosen.items()}
    right = [name for name in chosen if errors[name] <= GRADIENT_TOLERANCE]
    calls: dict[str, Callable[[], object]] = {f"step {name}": steps[name] for name in right}
    calls |= {f"head {name}": _head_call(problem, chosen[name]) for name in right}
    times = times_by_round(calls, setting.device, rounds=rounds)
    rows: dict[str, Any] = {}
    for name in chosen:
        rows[name] = {"gradient_error": errors[name]}
        if name not in right:
            print(f"{setting.dtype} {name} not timed: its gradient is off by {errors[name]:.2g}")
            continue
        step, head = times[f"step {name}"], times[f"head {name}"]
        seconds = summary([1e-3 * ms for ms in step])
        rows[name] |= {
            "step_seconds": seconds,
            "head_seconds": summary([1e-3 * ms for ms in head]),
            "tokens_per_second": setting.tokens / seconds["median"],
            "head_share": summary([h / s for h, s in zip(head, step, strict=True)])["median"],
        }
        if with_memory:
            rows[name] |= in_child("benchmarks.end_to_end:memory", name, asdict(setting))
    return rows


def _head_call(problem: Problem, provider: Provider) -> Callable[[], None]:
    def call() -> None:
        clear(problem)
        provider.of_head(problem).backward()

    return call


def memory(name: str, fields: dict[str, Any]) -> dict[str, float]:
    """Bytes: peak of a provider's step beyond weights and optimizer state, and these; `fields` are a `Setting`'s."""
    setting = Setting(**fields)
    with blocks_given_back():
        step = Step(setting, providers()[name])
        peak = peak_bytes(step, setting.device)
    state = [v for values in step.optimizer.state.values() for v in values.values() if isinstance(v, Tensor)]
    return {"peak_bytes": peak, "standing_bytes": sum(x.nbytes for x in [*step.model.parameters(), *state])}


def head_flop_share(body: float, width: int, vocab: int) -> float:
    """The head's share of a dense model's products: V H of V H + the body's parameters. Without attention scores, whose
    share grows with the context, and without prompt tokens, which need no head."""
    return vocab * width / (vocab * width + body)


def study(settings: list[Setting], rounds: int, *, with_memory: bool = True) -> dict[str, Any]:
    """The section `end_to_end`."""
    model = build_model(settings[0])
    body = sum(p.numel() for p in model.parameters()) - model.lm_head.weight.numel()
    here = head_flop_share(body, settings[0].hidden, settings[0].vocab)
    return {
        "model": {k: v for k, v in asdict(settings[0]).items() if k != "dtype"} | {"body_parameters": body},
        "tokens": settings[0].tokens,
        "results": {s.dtype: measure(s, rounds, with_memory=with_memory) for s in settings},
        "head_flop_share": {"this model": here}
        | {name: head_flop_share(*numbers) for name, numbers in MODEL_CARDS.items()},
    }


def run(
    hidden: int = Setting.hidden,
    layers: int = Setting.layers,
    vocab: int = Setting.vocab,
    sequences: int = Setting.sequences,
    prompt: int = Setting.prompt,
    completion: int = Setting.completion,
    device: Device = "cpu",
    dtypes: tuple[Literal["bfloat16", "float32"], ...] = ("bfloat16", "float32"),
    rounds: int = 5,
    memory: Annotated[bool, "peak memory, in fresh processes"] = True,
) -> Iterator[Section]:
    """The section `end_to_end`."""
    sizes = (hidden, layers, vocab, sequences, prompt, completion)
    yield study([Setting(*sizes, dtype, device) for dtype in dtypes], rounds, with_memory=memory)


if __name__ == "__main__":
    main("end_to_end")
