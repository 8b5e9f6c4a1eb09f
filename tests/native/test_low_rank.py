"""A low-rank product beside a frozen weight: scores and gradients of the library, of any rank."""

from __future__ import annotations

import pytest
import torch
from helpers import frobenius_error

from grpo_fused.engines import cpu_library

pytestmark = [pytest.mark.usefixtures("cpu_extension"), pytest.mark.usefixtures("isa")]

N, H, V = 130, 40, 701
NOTHING = torch.empty(0)


class Problem:
    """Products of a low-rank weight [V, R] beside a frozen one, which has a scale for each row, or none."""

    def __init__(self, rank: int, dtype: torch.dtype, *, scaled: bool, tokens: int = N) -> None:
        g = torch.Generator().manual_seed(rank)
        self.hidden = torch.randn(tokens, H + 3, generator=g).to(dtype)[:, :H]  # with gaps between rows
        self.weight = (torch.randn(V, H, generator=g) / H**0.5).to(dtype)
        self.low_hidden = torch.randn(tokens, rank, generator=g)
        self.low_weight = torch.randn(V, rank, generator=g) / rank**0.5
        self.row_scale = 0.5 + torch.rand(V, generator=g) if scaled else None
        self.bias = torch.randn(V, generator=g)
        self.ids = torch.randint(V, (tokens,), generator=g)
        self.dlogp = torch.randn(tokens, generator=g)

    @property
    def inputs(self) -> cpu_library.HeadInputs:
        products = cpu_library.HeadProducts(
            self.hidden, self.weight, self.row_scale, low_hidden=self.low_hidden, low_weight=self.low_weight
        )
        return cpu_library.HeadInputs(products, self.ids, torch.ones(len(self.ids)), bias=self.bias)

    def found(self, rows, *, by_sums, kept=True):
        """(log-probs, dH, dlow_hidden, dlow_weight, dbias); dlow_weight is added to a number."""
        bytes_of = 2 if self.hidden.dtype == torch.bfloat16 else 4
        spill = torch.empty(V * 64 * -(-len(self.ids) // 64) * bytes_of * int(kept), dtype=torch.uint8)
        offset = self.exact()[0].amax(1).float() + 1 if by_sums else None
        table, offsets, sums = cpu_library.head_scores(self.inputs, False, NOTHING, spill, offset)
        dweight = torch.full(self.low_weight.shape, 0.25)
        dhidden, dbias = cpu_library.head_gradient(
            self.inputs, table, offsets, rows, self.dlogp, None, None, dweight, spill, sums, True, True
        )
        return table[2], dhidden[:, :H], dhidden[:, H:], dweight - 0.25, dbias

    def exact(self):
        """z in float64."""
        scale = 1.0 if self.row_scale is None else self.row_scale.double()
        leaves = [x.double().requires_grad_() for x in (self.hidden, self.low_hidden, self.low_weight, self.bias)]
        hidden, low_hidden, low_weight, bias = leaves
        return hidden @ self.weight.double().T * scale + low_hidden @ low_weight.T + bias, leaves

    def want(self, rows):
        z, leaves = self.exact()
        logp = z.log_softmax(1)[torch.arange(len(self.ids)), self.ids]
        dhidden, dlow_hidden, *others = torch.autograd.grad(logp[rows], leaves, self.dlogp[rows].double())
        return logp.detach(), dhidden[rows], dlow_hidden[rows], *others


@pytest.mark.parametrize("by_sums", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank", [1, 15, 16, 17, 32, 33, 48, 49, 64, 65, 130])
def test_gradients_are_those_of_float64(rank, dtype, scaled, by_sums):
    """In bf16 dz, B and u are rounded once, but not in the targets' part, which is most of it."""
    problem = Problem(rank, dtype, scaled=scaled)
    for rows in (torch.arange(N), torch.arange(0, N, 2)):
        logp, *found = problem.found(rows, by_sums=by_sums)
        want_logp, *want = problem.want(rows)
        torch.testing.assert_close(logp.double(), want_logp, rtol=0, atol=1e-5)
        bounds = [2e-5] * 4 if dtype == torch.float32 else [1.3e-3] * 4
        for x, y, bound in zip(found, want, bounds, strict=True):
            assert frobenius_error(x, y) < bound


@pytest.mark.parametrize("by_sums", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_products_in_fp32_do_not_round_the_low_rank_part(scaled, by_sums):
    """As on a processor without products of bf16."""
    cpu_library.use_isa("avx2")
    problem, rows = Problem(17, torch.bfloat16, scaled=scaled), torch.arange(N)
    _, _, *found = problem.found(rows, by_sums=by_sums)
    want = problem.want(rows)[2:]
    for x, y in zip(found, want, strict=True):
        assert frobenius_error(x, y) < 2.5e-4  # exponentials are kept in bf16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank", [5, 70])
def test_chunks_of_tokens_and_exponentials_that_are_computed_again(rank, dtype):
    """dz of 512 or 1024 tokens is multiplied at a time; the low-rank gradient waits for the last chunk."""
    problem = Problem(rank, dtype, scaled=True, tokens=1100)
    rows = torch.arange(1100)
    _, *found = problem.found(rows, by_sums=False, kept=False)
    for x, y in zip(found, problem.want(rows)[1:], strict=True):
        assert frobenius_error(x, y) < (2e-5 if dtype == torch.float32 else 1.3e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_low_rank_weight_of_any_dtype_in_a_view(dtype):
    problem = Problem(5, torch.float32, scaled=False)
    wide = torch.full((V, 9), torch.nan, dtype=dtype)
    wide[:, 2:7] = problem.low_weight.to(dtype)
    problem.low_weight = wide[:, 2:7].float()
    want, problem.low_weight = problem.found(torch.arange(N), by_sums=True), wide[:, 2:7]
    got = problem.found(torch.arange(N), by_sums=True)
    for x, y in zip(got[:3], want[:3], strict=True):
        assert torch.equal(x, y)
