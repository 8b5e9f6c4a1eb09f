"""A whole GRPO training step with our loss, TRL's and eager logits on the same small model, and the head's share.

    python -m benchmarks.end_to_end --out results.json                     # under two minutes on two cores
    python -m benchmarks.end_to_end --device cuda --hidden 2048 --layers 16 --vocab 151936 --out results.json

The rollout is recorded (random ids, no generation): forward of the body, loss, backward, AdamW. Times are interleaved
in one process; memory is taken in a fresh process for each. The share of the head is the time of the loss and its
gradients with hidden states given. A small model with a large vocabulary is mostly head: `head_flop_share` has the
smaller share of larger models.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # idle threads that spin would take another call's time

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.memory import blocks_given_back, peak_bytes
from benchmarks.problem import EPSILON, clear, loss_from_logps, old_of
from benchmarks.providers import PROVIDERS, eager_logps
from benchmarks.results import machine, record
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
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=setting.vocab,
        hidden_size=setting.hidden,
        intermediate_size=4 * setting.hidden,
        num_hidden_layers=setting.layers,
        num_attention_heads=max(setting.hidden // 64, 1),
        num_key_value_heads=max(setting.hidden // 128, 1),
        max_position_embeddings=setting.prompt + setting.completion,
        tie_word_embeddings=True,
        pad_token_id=None,
        eos_token_id=None,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config).to(setting.device, getattr(torch, setting.dtype))


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


def ours_of_head(p: Problem) -> Tensor:
    return fused_linear_grpo_loss(
        p.hidden_states,
        p.lm_head_weight,
        p.completion_ids,
        p.advantages,
        p.completion_mask,
        old_per_token_logps=old_of(p),
    ).loss


def trl_of_model(model: nn.Module, rollout: Rollout) -> Tensor:
    return trl_of_head(rollout.problem(completion_states(model, rollout), model.lm_head.weight))


def trl_of_head(p: Problem) -> Tensor:
    return PROVIDERS["trl"].loss(p)


def eager_of_model(model: nn.Module, rollout: Rollout) -> Tensor:
    """The logits of the model's own forward, of the completion only."""
    T = rollout.mask.shape[1]
    logits = model(input_ids=rollout.ids, use_cache=False, logits_to_keep=T + 1).logits[:, :-1].float()
    logps = logits.log_softmax(-1).gather(-1, rollout.completion_ids.unsqueeze(-1)).squeeze(-1)
    return loss_from_logps(logps, rollout.problem(logits, logits))


def eager_of_head(p: Problem) -> Tensor:
    return loss_from_logps(eager_logps(p.hidden_states, p.lm_head_weight, p.completion_ids), p)


def providers() -> dict[str, Provider]:
    """The providers that are installed."""
    found = {"ours": Provider(ours_of_model, ours_of_head), "eager": Provider(eager_of_model, eager_of_head)}
    if PROVIDERS["trl"].unavailable("cpu") is None:
        found["TRL"] = Provider(trl_of_model, trl_of_head)
    return found


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
    found: dict[str, Any] = {}
    for name in chosen:
        found[name] = {"gradient_error": errors[name]}
        if name not in right:
            continue
        step, head = times[f"step {name}"], times[f"head {name}"]
        seconds = summary([1e-3 * ms for ms in step])
        found[name] |= {
            "step_seconds": seconds,
            "head_seconds": summary([1e-3 * ms for ms in head]),
            "tokens_per_second": setting.tokens / seconds["median"],
            "head_share": summary([h / s for h, s in zip(head, step, strict=True)])["median"],
        }
        if with_memory:
            found[name] |= memory_in_child(setting, name)
    return found


def _head_call(problem: Problem, provider: Provider) -> Callable[[], None]:
    def call() -> None:
        clear(problem)
        provider.of_head(problem).backward()

    return call


def memory_in_child(setting: Setting, name: str) -> dict[str, float]:
    """`memory` of one provider in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.end_to_end", "--child", json.dumps(asdict(setting) | {"name": name})]
    repository = Path(__file__).resolve().parents[1]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the memory of {name} could not be taken: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def memory(setting: Setting, name: str) -> dict[str, float]:
    """Bytes: peak of a step beyond weights and optimizer state, and these."""
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


def print_table(data: dict[str, Any]) -> None:
    for dtype, results in data["results"].items():
        for name, r in results.items():
            if "step_seconds" not in r:
                print(f"{dtype:9} {name:6} not timed: its gradient is off by {r['gradient_error']:.2g}")
                continue
            memory_text = f"{r['peak_bytes'] / 2**20:7.0f} MiB beyond weights and AdamW" if "peak_bytes" in r else ""
            print(
                f"{dtype:9} {name:6} {1e3 * r['step_seconds']['median']:8.1f} ms a step, head "
                f"{r['head_share']:4.0%}, {r['tokens_per_second']:7.0f} tokens/s {memory_text}  "
                f"gradient error {r['gradient_error']:.1e}"
            )
    shares = ", ".join(f"{name} {share:.0%}" for name, share in data["head_flop_share"].items())
    print(f"the head's share of the products: {shares}")


def main(argv: list[str] | None = None) -> None:
    """Run the study, print its table, write its section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Setting()
    for name in ("hidden", "layers", "vocab", "sequences", "prompt", "completion"):
        parser.add_argument(f"--{name}", type=int, default=getattr(default, name))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-memory", action="store_true", help="no fresh processes")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    given = vars(parser.parse_args(argv))
    child, out, rounds, dtypes = (given.pop(k) for k in ("child", "out", "rounds", "dtypes"))
    if child is not None:
        name = child.pop("name")
        print(json.dumps(memory(Setting(**child), name)))
        return
    if out is None:
        parser.error("--out is needed")
    with_memory = not given.pop("no_memory")
    machine(given["device"])  # reads the load before this program adds to it
    data = study([Setting(**given, dtype=dtype) for dtype in dtypes], rounds, with_memory=with_memory)
    print_table(data)
    record("end_to_end", data, out=out, device=given["device"])
    print(f"written to {out}")


if __name__ == "__main__":
    main()
