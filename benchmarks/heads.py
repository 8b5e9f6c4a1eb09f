"""Frozen, adapted and quantised heads: time and memory of a loss, beside peft's own layer on logits.

    python -m benchmarks.heads --out results.json     # a minute on two cores

GRPO's loss, forward and backward, with a bf16 head that is frozen, one with LoRA of rank 16, and both on int8 and NF4
(groups of 64). peft's layer makes all logits. Gradients of H and A are compared before anything is timed: of the bf16
head with peft's, of a quantised one with those of the dense weight that it stands for. The bare products are those of a
frozen head, two. On a CPU without bf16 these and peft's layer take fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from peft import LoraConfig
from peft.tuners.lora import Linear
from torch import Tensor, nn

from benchmarks.exact import worst
from benchmarks.results import Device, Run, where
from benchmarks.side_by_side import CHUNK, SHAPES, gradients_of, scratch_bytes, step
from benchmarks.study import Section, main
from benchmarks.tables import mib, page
from benchmarks.timing import bare_dtype, bare_products, times_by_round, with_ratios
from grpo_fused import HeadAdapter, QuantizedWeight, fused_linear_grpo_loss
from grpo_fused.testing import frobenius_error

RANK = 16
LENGTH = 128
"""tokens of a sequence"""
NF4 = (
    -1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0,
)  # fmt: skip
"""of QLoRA (arXiv 2305.14314)"""
BARE = "bare products of a frozen head"


class Problem:
    """Hidden states [N, H] and a head [V, H] in bf16 and int8, with an adapter in fp32, as peft's models hold it."""

    def __init__(self, device: str) -> None:
        N, H, V = SHAPES[device]
        g = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(N // LENGTH, LENGTH, H, generator=g).to(device, torch.bfloat16).requires_grad_()
        weight = 0.03 * torch.randn(V, H, generator=g)
        scale = weight.abs().amax(1, keepdim=True) / 127
        halves = torch.randint(256, (V, H // 2), generator=g, dtype=torch.uint8)
        self.quantized = {
            "int8": QuantizedWeight((weight / scale).round().to(torch.int8).to(device), scale.to(device)),
            "NF4": QuantizedWeight(
                halves.to(device), torch.full((V, H // 64), 0.05, device=device), torch.tensor(NF4, device=device)
            ),
        }
        self.weight = weight.to(device, torch.bfloat16)
        self.library_weight = self.weight.to(bare_dtype(torch.bfloat16, device))
        base = nn.Linear(H, V, bias=False, device="meta")
        base.weight = nn.Parameter(self.library_weight, requires_grad=False)
        self.layer = Linear(base, "default", config=LoraConfig(r=RANK, lora_alpha=RANK), r=RANK, lora_alpha=RANK)
        for part in (self.layer.lora_A, self.layer.lora_B):  # a layer alone makes them in the dtype of its base
            part.float()
        with torch.no_grad():
            self.layer.lora_B["default"].weight.normal_(std=0.01)
        a, b = self.layer.lora_A["default"].weight, self.layer.lora_B["default"].weight
        self.adapter = HeadAdapter(a, b, float(self.layer.scaling["default"]))
        self.ids = torch.randint(V, self.hidden.shape[:2], generator=g).to(device)
        self.advantages = torch.randn(N // LENGTH, generator=g).to(device)

    def fused(self, weight: Tensor | QuantizedWeight, adapted: bool, max_scratch_bytes: int | None = None) -> Tensor:
        """Forward and backward."""
        out = fused_linear_grpo_loss(
            self.hidden, weight, self.ids, self.advantages, with_metrics=False,
            lm_head_adapter=(self.adapter,) if adapted else (), max_scratch_bytes=max_scratch_bytes,
        )  # fmt: skip
        return step(out.loss, self.hidden, self.adapter.a, self.adapter.b)

    def on_logits(self) -> Tensor:
        """The same loss (dapo, on-policy) on the logits of peft's layer."""
        total = torch.zeros((), device=self.hidden.device)
        rows = CHUNK // LENGTH
        parts = (x.split(rows) for x in (self.hidden, self.ids, self.advantages))
        for hidden, ids, advantages in zip(*parts, strict=True):
            log_p = self.layer(hidden.to(self.library_weight.dtype)).float().log_softmax(-1)
            logps = log_p.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
            loss = -(advantages[:, None] * (logps - logps.detach()).exp()).sum() / self.ids.numel()
            loss.backward()
            total += loss.detach()
        return step(total, self.hidden, self.adapter.a, self.adapter.b)

    def check(self) -> dict[str, float]:
        """The larger relative difference of dH and dA, by weight; logits of peft's layer are rounded to bf16."""
        calls: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "bf16": (partial(self.fused, self.weight, True), self.on_logits)
        }
        for name, weight in self.quantized.items():
            dense = weight.dequantize(torch.bfloat16)
            calls[name] = partial(self.fused, weight, True), partial(self.fused, dense, True)
        errors = {}
        for name, pair in calls.items():
            got, want = (gradients_of(call, self.hidden, self.adapter.a) for call in pair)
            errors[name] = worst(*map(frobenius_error, got, want))
            if not errors[name] < 5e-2:
                raise SystemExit(f"{name}: gradients of H and A differ by {errors[name]:.2%}: nothing is timed")
        return errors


def run(device: Device = "cpu", rounds: int = 5) -> Iterator[Section]:
    """The section `heads`."""
    N, H, V = SHAPES[device]
    problem = Problem(device)
    calls: dict[str, Callable[[], object]] = {}
    for name, weight in {"bf16": problem.weight, **problem.quantized}.items():
        calls |= {f"frozen {name}": partial(problem.fused, weight, False)}
        calls |= {f"LoRA on {name}": partial(problem.fused, weight, True)}
    room = 4 * N * V  # two bytes for each exponential, which take five eighths of scratch
    calls["LoRA on int8, all exponentials kept"] = partial(problem.fused, problem.quantized["int8"], True, room)
    errors = problem.check()
    of_adapter = problem.adapter.a.nbytes + problem.adapter.b.nbytes
    memory = scratch_bytes(
        calls, device, lambda name: problem.hidden.nbytes + (of_adapter if "LoRA" in name else 0)
    )  # fmt: skip
    one, of_hidden, _ = bare_products(N, H, V, torch.bfloat16, device)
    calls = {BARE: lambda: (one(), of_hidden()), **calls, "LoRA on bf16, peft's layer on logits": problem.on_logits}
    yield {
        "N": N, "H": H, "V": V, "rank": RANK, "chunk": CHUNK, "gradient_error": errors, "scratch_bytes": memory,
        "weight_bytes": {"bf16": problem.weight.nbytes} | {
            name: weight.values.nbytes + weight.scale.nbytes for name, weight in problem.quantized.items()
        },
        "calls": with_ratios(times_by_round(calls, device, rounds=rounds), BARE),
    }  # fmt: skip


def table(section: Section, run: Run) -> str:
    """Times, ratios to the bare products, and memory."""
    weights = ", ".join(f"{name} {mib(x)}" for name, x in section["weight_bytes"].items())
    sizes = f"N = {section['N']}, H = {section['H']}, V = {section['V']}, LoRA of rank {section['rank']}"
    error = section["gradient_error"]["bf16"]
    return (
        page(section, f"{sizes}. {where(run)}.", 2)
        + f"\nThe weight itself: {weights}. Gradients differ by {error:.2%} from those of peft's layer (bf16 logits)."
    )


if __name__ == "__main__":
    main("heads")
