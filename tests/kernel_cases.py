"""What compiled kernels must compute, for programs that run machine code on a CPU: each case against float64.

`tests/with_emulator` runs them as an MI300, `tests/with_ptx` as NVIDIA GPUs. A case launches kernels on CPU tensors and
compares; the caller has installed the driver, and the launch configurations of the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from grpo_fused.kernels import configs, head_configs, head_launch
from grpo_fused.kernels.candidates import pair_products, segment_sums
from grpo_fused.kernels.launch import TritonRows
from grpo_fused.kernels.row_types import (
    Coefficients,
    Extras,
    ObjectiveNumbers,
    Rows,
    Statistics,
    TokenInputs,
    Transform,
)
from grpo_fused.kernels.scale import scale
from helpers import assert_same, frobenius_error, make_case, make_config, with_sets

from grpo_fused import engines
from grpo_fused.engines.chunked import ChunkedEngine

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CUDA = torch.device("cuda")
GRADIENT = {BF16: 2**-8, FP16: 2**-11, FP32: 2e-5}
"""Relative error of dlogits; of narrow dtypes, which are rounded once or twice, the largest of one rounding."""


@contextmanager
def launched_as(architecture: Callable[[], str]) -> Iterator[None]:
    """CPU tensors take the kernels, and their launch configurations, of a GPU."""
    finish, pass_config = head_configs.finish_config, head_configs.pass_config
    with pytest.MonkeyPatch.context() as patch:
        for module in (configs, head_configs):
            patch.setattr(module, "architecture", lambda device: architecture())
        patch.setattr(head_launch, "finish_config", lambda device, dtype: finish(CUDA, dtype))
        patch.setattr(head_launch, "pass_config", lambda device, block_v: pass_config(CUDA, block_v))
        patch.setattr(head_launch, "_interprets", lambda x: False)
        patch.setattr(engines.triton, "unavailable", lambda device, dtype: None)
        patch.setitem(engines._ENGINES, "chunked", ChunkedEngine(lambda device, dtype: TritonRows()))
        yield


def transform_of(name: str, rows: int, vocab_size: int) -> Transform:
    g = torch.Generator().manual_seed(5)
    bias, temperatures = torch.randn(vocab_size, generator=g), torch.rand(rows, generator=g) + 0.5
    return {
        "plain": Transform(),
        "temperature": Transform(temperature=0.7),
        "temperatures": Transform(temperature=temperatures),
        "negative-scale": Transform(logit_scale=-1.2),
        "bias+scale": Transform(bias, logit_scale=1.3),
        "softcap": Transform(softcap=5.0),
        "all": Transform(bias, 1.3, 7.0, temperatures),
    }[name]


class Exact:
    """Statistics and gradients of rows of logits, by autograd in float64."""

    def __init__(self, raw, targets, transform):
        self.raw = raw.double().requires_grad_()
        z = self.raw if transform.bias is None else self.raw + transform.bias.double()
        z = z * transform.logit_scale
        if transform.softcap is not None:
            z = transform.softcap * torch.tanh(z / transform.softcap)
        t = transform.temperature
        self.z = z / (t.double().unsqueeze(1) if isinstance(t, torch.Tensor) else t)
        log_p = self.z.log_softmax(1)
        m = self.z.amax(1)
        logp = log_p.gather(1, targets.unsqueeze(1)).squeeze(1)
        self.statistics = Statistics(m, self.z.logsumexp(1) - m, logp, -(log_p.exp() * log_p).sum(1))

    def dlogits(self, dlogp, dentropy):
        stats = self.statistics
        loss = (stats.logp * dlogp).sum() + (0.0 if dentropy is None else (stats.entropy * dentropy).sum())
        return torch.autograd.grad(loss, self.raw, retain_graph=True)[0]

    def assert_close(self, got, tol=1e-5):
        for name, mine, want in zip(Statistics._fields, got, self.statistics, strict=True):
            if mine is not None:
                torch.testing.assert_close(mine.double(), want, rtol=tol, atol=tol, msg=lambda m, n=name: f"{n}: {m}")


def head_of(N, H, V, dtype):
    g = torch.Generator().manual_seed(N + H + V)
    hidden = torch.randn(N, H, generator=g).to(dtype)
    weight = (torch.randn(V, H, generator=g) * 3.0 / H**0.5).to(dtype)
    return hidden, weight, torch.randint(0, V, (N,), generator=g), torch.randn(2, N, generator=g)


HEADS = [(BF16, name) for name in ("plain", "temperatures", "negative-scale", "bias+scale", "softcap", "all")]
HEADS += [(dtype, name) for dtype in (FP16, FP32) for name in ("plain", "all")]


def head(dtype, name, N=21, H=80, V=300):
    """Scores, exponentials, the gradient in their place, by a factor and by a second product; operands of odd widths
    get columns of 0, as the engine gives them."""
    hidden, weight, targets, (dlogp, dentropy) = head_of(N, H, V, dtype)
    transform = transform_of(name, N, V)
    exact = Exact(hidden.double() @ weight.double().T, targets, transform)
    if H % 2:
        hidden, weight = head_launch.aligned(hidden), head_launch.aligned(weight)
    _ways_to_dlogits(exact, hidden, weight, Extras(), targets, transform, dlogp, dentropy)


FROZEN = [
    (BF16, "int8"),
    (BF16, "fp8"),
    (BF16, "int8-adapter"),
    (BF16, "adapter"),
    (FP16, "adapter"),
    (FP32, "adapter"),
]


def frozen_head(dtype, form, name="bias+scale", N=21, H=96, V=300, C=48):
    """As `head`, with a weight of bytes, an adapter's columns beside it, or both."""
    hidden, weight, targets, (dlogp, dentropy) = head_of(N, H + C * ("adapter" in form), V, dtype)
    transform = transform_of(name, N, V)
    base, more, scale = weight[:, :H], weight[:, H:] if "adapter" in form else None, None
    if form != "adapter":
        scale = 0.02 * (1.0 + torch.rand(V, generator=torch.Generator().manual_seed(6)))
        kind = torch.float8_e4m3fn if form == "fp8" else torch.int8
        base = (base.float() * 20.0).round().clamp(-127, 127).to(kind)
    hidden, base, more = (None if x is None else head_launch.aligned(x) for x in (hidden, base, more))
    dense = torch.cat([x.double() for x in (base, more) if x is not None], dim=1)
    dense = dense if scale is None else dense * scale.double().unsqueeze(1)
    exact = Exact(hidden.double() @ dense.T, targets, transform)
    _ways_to_dlogits(exact, hidden, base, Extras(more, scale), targets, transform, dlogp, dentropy)


def _ways_to_dlogits(exact, hidden, weight, extras, targets, transform, dlogp, dentropy):
    (N, V), dtype = exact.z.shape, hidden.dtype
    options = {"with_entropy": True, "extras": extras}
    stats = head_launch.head_scores(hidden, weight, targets, transform, **options)
    exact.assert_close(stats)

    config = head_configs.head_config(hidden, transform, has_extras=extras.any())
    room = head_launch.Exponentials.empty(N, weight, dtype, config)
    again = head_launch.head_scores(hidden, weight, targets, transform, exponentials=room, **options)
    for mine, other in zip(again, stats, strict=True):
        assert torch.equal(mine, other), "a token's scores are the same in both modes"
    width = configs.padded(V)
    if transform.softcap is None:
        for coefficient in (None, dentropy):
            values = room.values.as_strided((N, width), (width, 1)).clone()[:, :V]
            copy = room._replace(values=values)
            head_launch.exponentials_to_dlogits(copy, targets, Coefficients(stats, dlogp, coefficient), transform)
            assert frobenius_error(copy.values, exact.dlogits(dlogp, coefficient)) < GRADIENT[dtype]
    if transform.softcap is None and dtype != FP16:
        _factors(room, targets, Coefficients(stats, dlogp, None), transform, exact)
    for coefficient in (None, dentropy):
        out = torch.full((N, width), torch.nan, dtype=dtype)[:, :V]
        coefficients = Coefficients(stats, dlogp, coefficient)
        head_launch.head_dlogits(hidden, weight, targets, coefficients, transform, out, extras=extras)
        assert frobenius_error(out, exact.dlogits(dlogp, coefficient)) < GRADIENT[dtype]


def _factors(room, targets, coefficients, transform, exact):
    factor = head_launch.exponentials_factor(room, targets, coefficients, transform)
    found = room.values.double() * factor.double().unsqueeze(1)
    assert frobenius_error(found, exact.dlogits(coefficients.dlogp, None)) < GRADIENT[room.values.dtype]


def training(dtype, N=5, H=136, V=300):
    """A plain head's scores, and its gradient as exponentials with a factor for each row."""
    hidden, weight, targets, (dlogp, _) = head_of(N, H, V, dtype)
    exact = Exact(hidden.double() @ weight.double().T, targets, Transform())
    room = head_launch.Exponentials.empty(N, weight, dtype, head_configs.head_config(weight, Transform()))
    stats = head_launch.head_scores(hidden, weight, targets, Transform(), with_entropy=False, exponentials=room)
    exact.assert_close(stats)
    _factors(room, targets, Coefficients(stats, dlogp, None), Transform(), exact)


def panels_and_splits(V=300):
    """Two panels of tokens, several splits of the vocabulary; a token's scores do not depend on its batch."""
    hidden, weight, targets, _ = head_of(150, 64, V, BF16)
    config = head_configs.head_config(weight, Transform())._replace(steps_per_split=1)
    assert config.splits(V, 64)[0] >= 3
    stats = head_launch.head_scores(hidden, weight, targets, Transform(), with_entropy=True, config=config)
    Exact(hidden.double() @ weight.double().T, targets, Transform()).assert_close(stats)
    some = slice(130, 137)
    alone = head_launch.head_scores(
        hidden[some], weight, targets[some], Transform(), with_entropy=False, config=config
    )  # fmt: skip
    assert torch.equal(alone.logp, stats.logp[some])


def first_rows(count, dtype=BF16, N=300, H=64, V=300):
    """A number on the device says how many rows are scored: those get the same bits, panels after them are left."""
    hidden, weight, targets, _ = head_of(N, H, V, dtype)
    config = head_configs.head_config(weight, Transform())
    rooms = [head_launch.Exponentials.empty(N, weight, dtype, config) for _ in range(2)]
    for room in rooms:
        room.values.fill_(7.0)
    options = {"with_entropy": True, "config": config}
    want = head_launch.head_scores(hidden, weight, targets, Transform(), exponentials=rooms[0], **options)
    hidden[count:], targets[count:] = torch.nan, -100
    arguments = hidden, weight, targets, Transform()
    number = torch.tensor(count)
    got = head_launch.head_scores(*arguments, exponentials=rooms[1], count=number, **options)
    scored = head_launch.head_scores(*arguments, count=number, **options)
    for one, two, other in zip(got, scored, want, strict=True):
        assert torch.equal(one[:count], other[:count])
        assert torch.equal(two[:count], other[:count])
    for mine, other in zip(rooms[1][:2], rooms[0][:2], strict=True):
        assert torch.equal(mine[:count], other[:count])
    after = -(-count // config.block_n) * config.block_n
    assert rooms[1].values[after:].eq(7.0).all()


def results_of_all(dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    """What every kernel writes, for comparisons of two ways to run them."""
    hidden, weight, targets, (dlogp, dentropy) = head_of(21, 80, 300, dtype)
    transform = transform_of("bias+scale", 21, 300)
    logits = torch.randn(2, 1056, generator=torch.Generator().manual_seed(1))
    room = head_launch.Exponentials.empty(21, weight, dtype, head_configs.head_config(weight, transform))
    stats = head_launch.head_scores(hidden, weight, targets, transform, with_entropy=True, exponentials=room)
    out = torch.empty(21, configs.padded(300), dtype=dtype)[:, :300]
    head_launch.head_dlogits(hidden, weight, targets, Coefficients(stats, dlogp, dentropy), transform, out)
    head_launch.exponentials_to_dlogits(room, targets, Coefficients(stats, dlogp, dentropy), transform)
    rows = TritonRows().statistics(Rows(logits, targets[:2], Transform()), with_entropy=True)
    return [*stats, out, room.values, *rows]


def rows(vocab_size, dtype, out_dtype, name):
    """Statistics and gradients of given logits: one block of one wave, of eight, and two blocks."""
    g = torch.Generator().manual_seed(vocab_size)
    width = configs.padded(vocab_size)
    logits = (4.0 * torch.randn(3, width, generator=g)).to(dtype)
    logits[:, vocab_size:] = torch.nan
    targets = torch.randint(0, vocab_size, (3,), generator=g)
    rows = Rows(logits[:, :vocab_size], targets, transform_of(name, 3, vocab_size))
    exact = Exact(rows.raw, targets, rows.transform)
    stats = TritonRows().statistics(rows, with_entropy=True)
    exact.assert_close(stats)
    dlogp, dentropy = torch.randn(2, 3, generator=g)
    for coefficient in (None, dentropy):
        out = torch.full((3, width), torch.nan, dtype=out_dtype)
        TritonRows().gradient(rows, Coefficients(stats, dlogp, coefficient), out[:, :vocab_size])
        assert frobenius_error(out[:, :vocab_size], exact.dlogits(dlogp, coefficient)) < GRADIENT[out_dtype]
        assert out[:, vocab_size:].eq(0).all(), "the padding of a row"


ROWS = [(FP32, FP32), (FP32, BF16), (BF16, BF16)]
"""dtype of logits and of their gradient"""

CONFIGS = [
    make_config("dapo"),
    make_config("grpo", beta=0.1, entropy_coef=0.05, delta=1.3),
    make_config("dapo", beta=0.1, kl_estimator="k1"),
    make_config("dapo", beta=0.1, kl_estimator="k2", dual_clip=1.4),
    make_config("dapo", beta=0.1, kl_estimator="k3", use_bias_correction_kl=True),
    make_config("cispo", beta=0.1),
    make_config("sapo"),
    make_config("grpo", importance_sampling_level="sequence", beta=0.1),
]


def loss_in_the_row_kernel(config):
    """Statistics, objective and gradient in one launch, from products by the library."""
    case = make_case(0, dtype=FP32)
    assert_same(case.run(config, impl="chunked"), case.to(torch.float64).run(config, impl="reference"), tol=2e-5)


def loss_of_a_token_outside_of_the_vocabulary():
    """NaN, not a bound that a minimum takes in its place."""
    for dual_clip in (float("inf"), 3.0):
        objective = ObjectiveNumbers(0, "k3", True, 0.2, 0.2, float("inf"), dual_clip, 1.0, 1.0, 0.0)
        rows = Rows(torch.zeros(2, 64), torch.tensor([1, 69]), Transform())
        inputs = TokenInputs(-torch.ones(2), torch.ones(2), torch.full((2,), -4.0), None, None, None)
        found = TritonRows().loss(rows, inputs, objective, torch.zeros(2, 64), with_entropy=False)
        assert found.loss.isnan().tolist() == [False, True]


def loss_of_a_large_vocabulary():
    case = make_case(1, B=2, T=3, H=8, V=4500, dtype=FP32, softcap=3.0, logit_scale=0.8, temperature=0.7)
    config = make_config("dapo", beta=0.1, entropy_coef=0.05)
    assert_same(case.run(config, impl="chunked"), case.to(torch.float64).run(config, impl="reference"), tol=2e-5)


def loss_in_the_head_kernel(config, sets):
    """From hidden states to gradients; with candidate sets for some of the tokens."""
    case = make_case(0, dtype=FP32)
    case = with_sets(case, whole=0.3) if sets else case
    assert_same(case.run(config, impl="triton"), case.to(torch.float64).run(config, impl="reference"), tol=2e-5)


def masked_rows(config, engine):
    """All rows are taken, a sequence without an active token too: values of masked ones are NaN, ids invalid. H is odd."""
    case = make_case(0, H=13, dtype=FP32, masked=0.5)
    got = case.poisoned().run(config, impl=engine, compact=False)
    assert_same(got, case.to(torch.float64).run(config, impl="reference"), tol=2e-5)


def candidate_kernels(dtype, H=200):
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(7, H, generator=g).to(dtype), torch.randn(9, H, generator=g).to(dtype)
    i, j = torch.randint(0, 7, (37,), generator=g), torch.randint(0, 9, (37,), generator=g)
    want = (a.double()[i] * b.double()[j]).sum(1)
    torch.testing.assert_close(pair_products(a, b, i, j).double(), want, rtol=1e-5, atol=1e-5)
    factor, offsets = torch.randn(37, generator=g), torch.tensor([0, 5, 5, 30, 37])
    parts = (factor.double()[:, None] * a.double()[i]).split(offsets.diff().tolist())
    want = torch.stack([part.sum(0) for part in parts])
    torch.testing.assert_close(segment_sums(a, i, factor, offsets).double(), want, rtol=1e-5, atol=1e-5)


def scaling(dtype, factor, count, rtol=0.0):
    """As torch does it, in fp32; and nothing beside them is written."""
    g = torch.Generator().manual_seed(0)
    memory = torch.randn(count + 2, generator=g).to(dtype)
    want = memory.clone()
    want[:count] = (memory[:count].float() * factor.float()).to(dtype)
    scale(memory[:count], factor)
    torch.testing.assert_close(memory, want, rtol=rtol, atol=0, equal_nan=True)


def assert_all_equal(one: list[Any], other: list[Any]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert torch.equal(mine, theirs)
