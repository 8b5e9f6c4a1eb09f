"""Cases for row kernels and their exact answers in fp64: for the harness on a CPU, and for the kernels on a GPU."""

from __future__ import annotations

import torch
from grpo_fused.kernels.row_types import Transform
from torch import Tensor

PAD = 16
TRANSFORMS = ("plain", "temperature", "temperatures", "scale", "softcap", "bias", "all")


def make_transform(name: str, rows: int, vocab_size: int, device: str = "cpu") -> Transform:
    """One of `TRANSFORMS`."""
    g = torch.Generator().manual_seed(5)
    bias = torch.randn(vocab_size, generator=g).to(device)
    temperatures = (torch.rand(rows, generator=g) + 0.5).to(device)
    return {
        "plain": Transform(None, 1.0, None, 1.0),
        "temperature": Transform(None, 1.0, None, 0.7),
        "temperatures": Transform(None, 1.0, None, temperatures),
        "scale": Transform(None, 0.3, None, 1.0),
        "softcap": Transform(None, 1.0, 5.0, 1.0),
        "bias": Transform(bias, 1.0, None, 1.0),
        "all": Transform(bias, 1.3, 7.0, temperatures),
    }[name]


def make_rows(shape: tuple[int, int], std: float = 4.0) -> tuple[Tensor, Tensor]:
    """Logits [R, V] and targets [R], the first and the last column among them."""
    g = torch.Generator().manual_seed(shape[0] * 1000 + shape[1])
    targets = torch.randint(0, shape[1], shape[:1], generator=g)
    targets[0] = shape[1] - 1
    return torch.randn(shape, generator=g) * std, targets


def padded(values: Tensor, dtype: torch.dtype = torch.float32, pad: int = PAD) -> Tensor:
    """[R, V] view of rows padded to `pad` elements, whose padding is NaN."""
    rows, vocab_size = values.shape
    width = -(-vocab_size // pad) * pad
    slab = torch.full((rows, width), torch.nan, dtype=dtype, device=values.device)
    slab[:, :vocab_size] = values.to(dtype)
    return slab[:, :vocab_size]


def in_place(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """[R, V] view of `dtype` in the memory of the logits, row by row."""
    slab = logits.as_strided((logits.shape[0], logits.stride(0)), (logits.stride(0), 1))
    return slab.view(dtype)[:, : logits.shape[1]]


def exact(raw: Tensor, targets: Tensor, transform: Transform) -> tuple[Tensor, Tensor]:
    """fp64 log-probs of the targets and entropies."""
    z = raw if transform.bias is None else raw + transform.bias.double()
    z = z * transform.logit_scale
    if transform.softcap is not None:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    t = transform.temperature
    z = z / (t.double().unsqueeze(1) if isinstance(t, Tensor) else t)
    log_p = z.log_softmax(1)
    entropy = -(log_p.exp() * log_p.clamp(min=-1e4)).sum(1)
    return log_p.gather(1, targets.unsqueeze(1)).squeeze(1), entropy


def exact_gradient(
    values: Tensor, targets: Tensor, transform: Transform, dlogp: Tensor, dentropy: Tensor | None
) -> Tensor:
    """fp64 d(sum dlogp * logp + dentropy * H)/d(values) by autograd."""
    raw = values.double().requires_grad_()
    logp, entropy = exact(raw, targets, transform)
    total = (logp * dlogp.double()).sum()
    if dentropy is not None:
        total = total + (entropy * dentropy.double()).sum()
    total.backward()
    assert raw.grad is not None
    return raw.grad


def assert_gradient(got: Tensor, want: Tensor) -> None:
    """Within fp32 arithmetic of a row's largest element, and one rounding to the dtype of the result.

    p = exp(z - m - log_sum) has the absolute error of its exponent: half an ulp each of numbers up to 40 (2.4e-6), the
    same again for a fast exp and the entropy's coefficient.
    """
    rounding = 0.0 if got.dtype == torch.float32 else torch.finfo(got.dtype).eps / 2
    tiny = 2.0**-24 if got.dtype == torch.float16 else 0.0  # fp16's smallest step
    largest = want.abs().amax(1, keepdim=True)
    error = (got.double() - want).abs()
    allowed = 6e-6 * largest + rounding * want.abs() * 1.001 + tiny
    assert (error <= allowed).all(), f"the error exceeds its bound by {float((error - allowed).max()):.3g}"
