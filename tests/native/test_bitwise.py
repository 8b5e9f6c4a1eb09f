"""Bits of the native engine that do not depend on the batch, the threads, copies of the weight, or the library."""

from __future__ import annotations

import pytest
import torch
from helpers import frobenius_error, make_case, make_config

from grpo_fused import CandidateSets, fused_linear_logprobs
from grpo_fused.engines import cpu_library

pytestmark = pytest.mark.usefixtures("cpu_extension")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_products_of_the_library_in_between(dtype):
    """On a processor with AMX both configure the tiles: use of the other's configuration is an illegal instruction."""
    hidden, weight = torch.randn(200, 96, dtype=dtype), torch.randn(320, 96, dtype=dtype)
    ids = torch.randint(0, 320, (200,))
    first = fused_linear_logprobs(hidden, weight, ids, impl="native").logps
    for _ in range(3):
        product = hidden @ weight.T
        assert torch.equal(fused_linear_logprobs(hidden, weight, ids, impl="native").logps, first)
        assert torch.equal(hidden @ weight.T, product)


def test_targets_in_the_first_row_of_a_block(threads):
    """Two threads work on neighbouring blocks: the one that is later must not write the other's target."""
    threads(2)
    rows = cpu_library.head_layout((2**20, 16, 0), torch.float32).block_rows
    targets = torch.arange(3 * 96) * rows  # 96 parts of the vocabulary, three blocks each
    hidden, weight = torch.randn(len(targets), 16), torch.randn(len(targets) * rows, 16)
    want = (hidden * weight[targets]).sum(1) - (hidden @ weight.T).logsumexp(1)
    for _ in range(3):  # it depends on their speed
        got = fused_linear_logprobs(hidden, weight, targets, impl="native").logps
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_score_does_not_depend_on_the_batch_or_the_threads(dtype, threads):
    case = make_case(12, B=1, T=333, H=100, V=3001, dtype=dtype, masked=0.0, extras=False)
    hidden, ids = case.hidden_states[0], case.completion_ids[0]

    def score(rows):
        out = fused_linear_logprobs(hidden[rows], case.lm_head_weight, ids[rows], with_entropy=True, impl="native")
        return torch.stack(out[:2])

    everything = torch.arange(333)
    whole = score(everything)
    order = torch.randperm(333)
    assert torch.equal(score(order), whole[:, order])
    for part in everything.split([1, 31, 64, 100, 137]):
        assert torch.equal(score(part), whole[:, part])
    trained = case.run(make_config("dapo"), impl="native").out
    assert torch.equal(trained.per_token_logps[0], whole[0])
    threads(1)
    assert torch.equal(score(everything), whole)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("scratch", [None, 1], ids=["kept", "recomputed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_alternatives_do_not_depend_on_the_threads(dtype, scratch, threads):
    """Several blocks of the vocabulary and panels of tokens, some without a gradient."""
    case = make_case(14, B=2, T=150, H=60, V=2000, dtype=dtype, extras=False)
    ids = torch.randint(2000, (300 * 7,))
    found = []
    for count in (1, 2, 5):
        threads(count)
        hidden, weight = case.hidden_states.detach().requires_grad_(), case.lm_head_weight.detach().requires_grad_()
        out = fused_linear_logprobs(
            hidden, weight, case.completion_ids, case.completion_mask, impl="native", max_scratch_bytes=scratch,
            alternatives=CandidateSets(ids, torch.arange(0, len(ids) + 1, 7)),
        )  # fmt: skip
        (out.alternative_logps.sin().sum() + out.logps[0].sum()).backward()
        found.append((out.alternative_logps.detach(), hidden.grad, weight.grad))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, found[0], strict=True))
    want = case.to(torch.float64)
    hidden, weight = want.hidden_states.detach().requires_grad_(), want.lm_head_weight.detach().requires_grad_()
    out = fused_linear_logprobs(
        hidden, weight, case.completion_ids, case.completion_mask, impl="reference",
        alternatives=CandidateSets(ids, torch.arange(0, len(ids) + 1, 7)),
    )  # fmt: skip
    (out.alternative_logps.sin().sum() + out.logps[0].sum()).backward()
    bound = 2e-5 if dtype == torch.float32 else 1e-2
    assert frobenius_error(found[0][1], hidden.grad) < bound
    assert frobenius_error(found[0][2], weight.grad) < bound


@pytest.mark.usefixtures("isa")
@pytest.mark.pairs
@pytest.mark.parametrize("scratch", [None, 1], ids=["kept", "recomputed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_do_not_depend_on_the_threads(dtype, scratch, threads):
    case = make_case(13, B=4, T=80, H=100, V=9001, dtype=dtype, extras=False)
    config = make_config("dapo", entropy_coef=0.01)

    def run(count):
        threads(count)
        return case.run(config, impl="native", max_scratch_bytes=scratch).gradients()

    first = run(1)
    for count in (1, 2, 5):
        for name, gradient in run(count).items():
            assert torch.equal(gradient, first[name]), (name, count)


@pytest.mark.usefixtures("isa")
def test_chunks_of_tokens_add_to_the_same_gradients(threads):
    """1200 tokens are three chunks in fp32; with 40 blocks some share a sum of dH."""
    hidden, weight, bias = torch.randn(1200, 8), torch.randn(10001, 8), torch.randn(10001)
    inputs = [x.requires_grad_() for x in (hidden, weight, bias)]
    ids, factor = torch.randint(0, 10001, (1200,)), torch.randn(1200)
    logps = (hidden.double() @ weight.double().T + bias.double()).log_softmax(1)
    want = torch.autograd.grad(logps[torch.arange(1200), ids] @ factor.double(), inputs)
    first = None
    for count in (1, 2, 5):
        threads(count)
        out = fused_linear_logprobs(hidden, weight, ids, lm_head_bias=bias, impl="native")
        found = torch.autograd.grad(out.logps @ factor, inputs)
        first = first or found
        for got, same, exact in zip(found, first, want, strict=True):
            assert torch.equal(got, same)
            assert frobenius_error(got, exact) < 2e-5


@pytest.mark.usefixtures("isa")
@pytest.mark.pairs
@pytest.mark.parametrize("scratch", [None, 1], ids=["kept", "recomputed"])
@pytest.mark.parametrize("vocab", [512, 3001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_weight_that_is_read_in_place_is_as_its_copy(dtype, vocab, scratch, threads):
    """Rows of whole cache lines are not packed; those with gaps are. Both with one thread and two."""
    case = make_case(14, B=2, T=70, H=96, V=vocab, dtype=dtype, extras=False)
    config = make_config("dapo", entropy_coef=0.01)
    packed, in_place = torch.empty(vocab, 99, dtype=dtype)[:, :96], case.lm_head_weight
    packed.copy_(in_place)
    found = []
    for weight, count in ((in_place, 1), (in_place, 2), (packed, 2)):
        threads(count)
        case.lm_head_weight = weight
        found.append(case.run(config, impl="native", max_scratch_bytes=scratch))
    for other in found[1:]:
        assert torch.equal(other.out.per_token_logps, found[0].out.per_token_logps)
        for name, gradient in other.gradients().items():
            assert torch.equal(gradient, found[0].gradients()[name]), name


def test_on_policy_ratios_are_exactly_one():
    case = make_case(14, B=4, T=40, H=64, V=900, dtype=torch.bfloat16, masked=0.0, extras=False)
    old = fused_linear_logprobs(
        case.hidden_states, case.lm_head_weight, case.completion_ids, case.completion_mask, impl="native"
    ).logps
    case.options["old_per_token_logps"] = old
    out = case.run(make_config("dapo"), impl="native").out
    assert torch.equal(out.per_token_logps, old)
