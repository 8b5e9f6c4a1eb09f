"""Slices of the vocabulary on 2 and 4 ranks: loss, scores, metrics and gradients of one process."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from distributed.jobs import (
    refused_divergence,
    slices,
    summed_in_bf16,
    vocab_alternatives,
    vocab_differences,
    vocab_divergence,
    vocab_logprobs,
    vocab_loss,
    vocab_parts,
)
from helpers import PRECISION, config_id, make_case, make_config, with_sets

from grpo_fused import CandidateSets, QuantizedWeight, fused_linear_logprobs
from grpo_fused.call.calls import LMHead, Needs
from grpo_fused.engines.base import Tokens
from grpo_fused.engines.gradients import GradientSums

ENGINES = ["chunked", "native", "triton"]
CONFIGS = [
    make_config("dapo", beta=0.1),
    make_config("dapo", importance_sampling_level="sequence", beta=0.1, entropy_coef=0.05),
    make_config("cispo", top_entropy_quantile=0.5, entropy_coef=0.1),
    make_config("vespo"),
    make_config("gmpo", beta=0.1),
]
OPTIONS = {"temperature": 0.7, "lm_head_bias": torch.linspace(-2, 2, 29, dtype=torch.float64), "logit_scale": 1.3}


def close(got, want, tol: float, name: str) -> None:
    want = np.asarray(want)
    size = max(np.abs(want[np.isfinite(want)]).max(initial=0.0), 1e-3)
    np.testing.assert_allclose(got, want, rtol=0, atol=tol * size, err_msg=name)


def assert_is_one_process(results, want, sizes, tol) -> None:
    parts = slices(sizes)
    for rank, got in enumerate(results):
        close(got["loss"], want.out.loss.detach().numpy(), tol, "loss")
        close(got["logps"], want.out.per_token_logps.numpy(), tol, "logps")
        close(got["dhidden"], want.dhidden.numpy(), tol, "dhidden")
        close(got["dweight"], want.dweight[parts[rank]].numpy(), tol, f"dweight of rank {rank}")
        if want.dbias is not None:
            close(got["dbias"], want.dbias[parts[rank]].numpy(), tol, f"dbias of rank {rank}")
        for name, value in want.out.metrics.items():
            if name != "gradient_tokens":
                close(got[name], value.double().numpy(), max(tol, 1e-6), name)
    for got in results[1:]:  # ranks must take the same branches: the same bits
        assert np.array_equal(got["logps"], results[0]["logps"])
        assert np.array_equal(got["loss"], results[0]["loss"])


@pytest.mark.pairs
@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
@pytest.mark.parametrize("sizes", [[15, 14], [1, 3, 20, 5]], ids=str)
def test_loss_is_that_of_one_process(sizes, config, impl, workers):
    dtype, tol = PRECISION[impl]
    case = make_case(1, **OPTIONS).to(dtype)
    want = case.to(torch.float64).run(config, impl="reference")
    assert_is_one_process(workers.run(vocab_loss, len(sizes), case, config, impl, sizes, {}), want, sizes, tol)


@pytest.mark.parametrize("impl", ENGINES)
def test_several_chunks_and_no_compaction(impl, workers):
    dtype, tol = PRECISION[impl]
    case = make_case(2, **OPTIONS).to(dtype)
    config, sizes = make_config("dapo", beta=0.1, entropy_coef=0.1), [20, 9]
    want = case.to(torch.float64).run(config, impl="reference")
    scratch = {"chunked": 9000, "native": 1500, "triton": 2500}[impl]
    for options in ({"max_scratch_bytes": scratch}, {"compact": False}):
        assert_is_one_process(workers.run(vocab_loss, 2, case, config, impl, sizes, options), want, sizes, tol)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("impl", ENGINES)
def test_logprobs_are_those_of_one_process(impl, frozen, workers):
    dtype, tol = PRECISION[impl]
    case = make_case(3).to(dtype)
    sizes = [10, 12, 7]
    hidden, weight = case.hidden_states.double().requires_grad_(), case.lm_head_weight.double().requires_grad_()
    out = fused_linear_logprobs(
        hidden, weight, case.completion_ids, case.completion_mask, with_entropy=True, impl="reference"
    )
    (out.logps.sin().sum() + (out.entropies * 0.3).sum()).backward()
    for rank, got in enumerate(workers.run(vocab_logprobs, 3, case, impl, sizes, frozen)):
        close(got["logps"], out.logps.detach().numpy(), tol, "logps")
        close(got["entropies"], out.entropies.detach().numpy(), tol, "entropies")
        close(got["dhidden"], hidden.grad.numpy(), tol, "dhidden")
        if not frozen:
            close(got["dweight"], weight.grad[slices(sizes)[rank]].numpy(), tol, "dweight")


@pytest.mark.parametrize("impl", [name for name in ENGINES if name != "triton"])
@pytest.mark.parametrize("quantized", [None, "rows", "groups"])
def test_adapters_and_quantised_slices(quantized, impl, workers):
    case = make_case(5, H=64).to(torch.float32)
    sizes, generator = [10, 12, 7], torch.Generator().manual_seed(0)
    weight, scale = case.lm_head_weight.detach(), None
    if quantized:
        groups = weight.unflatten(1, (1 if quantized == "rows" else 2, -1))
        scale = groups.abs().amax(2) / 127
        weight = (groups / scale.unsqueeze(2)).flatten(1).round().to(torch.int8)
    tensors = {
        "hidden": case.hidden_states.detach(), "weight": weight, "ids": case.completion_ids,
        "mask": case.completion_mask, "a": torch.randn(3, 64, generator=generator),
        "b": torch.randn(sum(sizes), 3, generator=generator),
    }  # fmt: skip
    hidden, a, b = (tensors[name].double().requires_grad_() for name in ("hidden", "a", "b"))
    dense = (weight if scale is None else QuantizedWeight(weight, scale).dequantize()).double() + 0.7 * b @ a
    out = fused_linear_logprobs(
        hidden, dense, case.completion_ids, case.completion_mask, with_entropy=True, impl="reference"
    )
    (out.logps.sin().sum() + (out.entropies * 0.3).sum()).backward()
    for rank, got in enumerate(workers.run(vocab_parts, 3, tensors, scale, impl, sizes)):
        close(got["logps"], out.logps.detach().numpy(), 2e-5, "logps")
        close(got["entropies"], out.entropies.detach().numpy(), 2e-5, "entropies")
        for name, whole in (("dhidden", hidden.grad), ("da", a.grad), ("db", b.grad[slices(sizes)[rank]])):
            close(got[name], whole.numpy(), 2e-5, name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(dtype, workers):
    """dH is summed over the ranks in fp32."""
    case = make_case(4, B=4, T=12, H=32, V=120, dtype=dtype, logit_std=3.0)
    config, sizes = make_config("dapo"), [50, 70]
    want = case.to(torch.float64).run(config, impl="reference")
    eps = torch.finfo(dtype).eps
    for rank, got in enumerate(workers.run(vocab_loss, 2, case, config, "auto", sizes, {})):
        close(got["logps"], want.out.per_token_logps.numpy(), 1e-5, "logps")
        for name, full in (("dhidden", want.dhidden), ("dweight", want.dweight[slices(sizes)[rank]])):
            error = np.linalg.norm(got[name] - full.numpy()) / np.linalg.norm(full.numpy())
            assert error <= 2 * eps, name


def test_sums_are_rounded_once(workers):
    assert workers.run(summed_in_bf16, 4) == [True] * 4


def test_communication_is_counted(workers):
    """4 numbers a scored token in one collective a chunk, H a token with a gradient, and a handshake."""
    case = make_case(5).to(torch.float32)
    for impl, scratch, chunks in (("native", None, 1), ("chunked", 3000, None)):
        (got, _) = workers.run(vocab_loss, 2, case, make_config("dapo"), impl, [15, 14], {"max_scratch_bytes": scratch})
        active = int(case.completion_mask.sum())
        assert got["numbers"]["statistics"] == 4 * active
        assert got["numbers"]["hidden gradient"] == 12 * int(got["gradient_tokens"])
        assert got["calls"]["statistics"] == got["calls"]["hidden gradient"]
        if chunks is not None:
            assert got["calls"]["statistics"] == chunks
        else:
            assert got["calls"]["statistics"] > 1
        assert set(got["numbers"]) == {"statistics", "hidden gradient", "agreement", "sizes", "status"}


def test_chunks_fit_the_rank_with_the_largest_slice(workers):
    """All ranks take chunks of as many tokens as it has room for."""
    case, options = make_case(5).to(torch.float32), {"max_scratch_bytes": 9000}
    results = [
        workers.run(vocab_loss, 2, case, make_config("dapo"), "chunked", sizes, options)
        for sizes in ([15, 14], [25, 4])
    ]
    even, uneven = ([got["calls"]["statistics"] for got in result] for result in results)
    assert min(uneven) == max(uneven) > max(even)


class Slices:
    """A test double of the ranks: doubles its input, and counts the sums that have started and not ended."""

    def __init__(self) -> None:
        self.running = self.most = 0

    def start_sum(self, x):
        """As `VocabParallel.start_sum`."""
        self.running += 1
        self.most = max(self.most, self.running)

        def finish():
            self.running -= 1
            return 2 * x

        return finish


def test_one_chunk_waits_for_the_ranks_at_a_time():
    """Its fp32 dH is H numbers a token: those of all chunks would be as much as the hidden states, or twice."""
    slices, weight, hidden = Slices(), torch.randn(29, 12), torch.randn(20, 12)
    tokens = Tokens(hidden, torch.zeros(20, dtype=torch.int64), torch.ones(20, dtype=torch.bool), 1.0, slices)
    sums = GradientSums(LMHead(weight), tokens, Needs(True, True, False), torch.float32)
    dlogits = torch.randn(20, 29)
    for rows in torch.arange(20).split(4):
        sums.add(rows, hidden[rows], dlogits[rows], None)
    got = sums.result()
    assert (slices.most, slices.running) == (1, 0)
    torch.testing.assert_close(got.hidden, 2 * dlogits @ weight)
    torch.testing.assert_close(got.weight, dlogits.T @ hidden)


@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("how", ["sets", "bias"])
def test_a_vocabulary_in_one_slice(how, impl, workers):
    """Sets of half the vocabulary, or a bias of -inf for the rest: two of three ranks have nothing."""
    dtype, tol = PRECISION[impl]
    kept = torch.arange(29) < 15
    if how == "sets":
        case = make_case(1, **(OPTIONS | {"softcap": 4.0}))
        options = {"candidates": CandidateSets.from_mask(kept.repeat(case.completion_ids.numel(), 1))}
    else:
        case = make_case(1, **OPTIONS)
        options = {"lm_head_bias": OPTIONS["lm_head_bias"].masked_fill(~kept, -torch.inf)}
    ids = case.completion_ids % 15
    if how == "bias":
        ids[0, 0] = 20  # a token that is impossible
    case = replace(case, completion_ids=ids, options=case.options | options).to(dtype)
    config = make_config("dapo", entropy_coef=2.0)
    want = case.to(torch.float64).run(config, impl="reference")
    sizes = [15, 3, 11]
    assert_is_one_process(workers.run(vocab_loss, 3, case, config, impl, sizes, {}), want, sizes, tol)


@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("whole", [0.0, 0.3], ids=["sets", "mixed"])
@pytest.mark.parametrize("config", CONFIGS[:2], ids=config_id)
def test_candidate_sets_are_those_of_the_whole_vocabulary(config, whole, impl, workers):
    dtype, tol = PRECISION[impl]
    case = with_sets(make_case(1, **OPTIONS), whole=whole).to(dtype)
    want = case.to(torch.float64).run(config, impl="reference")
    sizes = [15, 3, 11]
    assert_is_one_process(workers.run(vocab_loss, 3, case, config, impl, sizes, {}), want, sizes, tol)


@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("whole", [None, 0.4], ids=["whole", "sets"])
def test_alternatives_are_those_of_the_whole_vocabulary(whole, impl, workers):
    """Global ids on every rank; a rank without one of them takes part in the sum."""
    dtype, tol = PRECISION[impl]
    case = make_case(12, extras=False, **{name: OPTIONS[name] for name in ("temperature", "lm_head_bias")})
    case = case if whole is None else with_sets(case, whole=whole)
    if whole is None:
        g = torch.Generator().manual_seed(0)
        sizes = torch.randint(0, 4, (case.completion_ids.numel(),), generator=g)
        ids = torch.randint(29, (int(sizes.sum()),), generator=g)
        others = CandidateSets(ids, torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]))
    else:
        others = case.options["candidates"]
    parts = [10, 16, 3]
    want = vocab_alternatives(0, None, case, "reference", [29], others)
    for rank, got in enumerate(workers.run(vocab_alternatives, 3, case.to(dtype), impl, parts, others)):
        for name, x in want.items():
            expected = x[slices(parts)[rank]] if name.startswith("dweight") else x
            close(got[name], expected, 2 * tol, f"{name} of rank {rank}")


@pytest.mark.parametrize("impl", ENGINES)
def test_rows_whose_gradient_is_of_another_slice(impl, workers):
    """The rank has neither target nor alternative, and the others cancel; it takes part in the sum of dH all the same.

    More rows than a panel of `native`, most of them of the first rank.
    """
    dtype, tol = PRECISION[impl]
    tokens = 40 if impl == "triton" else 160  # interpreted, a token takes its time
    case = make_case(12, B=4, T=tokens // 4, extras=False)
    case.completion_ids[:] = torch.arange(tokens).view(4, -1) % 9
    case.completion_ids[0, 0] = 20
    others = CandidateSets(case.completion_ids.reshape(-1) + 1, torch.arange(tokens + 1))
    parts = [12, 17]
    want = vocab_differences(0, None, case, "reference", [29], others)
    for rank, got in enumerate(workers.run(vocab_differences, 2, case.to(dtype), impl, parts, others)):
        for name, x in want.items():
            expected = x[slices(parts)[rank]] if name.startswith("dweight") else x
            close(got[name], expected, 2 * tol, f"{name} of rank {rank}")


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "jsd", "top-k"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_divergence_is_that_of_the_whole_vocabulary(kind, dtype, workers):
    """A confident token too: its derivative at the maximum is minus the sum of all others, on any rank."""
    case = make_case(13, extras=False, lm_head_bias=torch.zeros(29, dtype=torch.float64))
    case.options["lm_head_bias"][20] = 15.0  # most tokens are nearly sure of it, on the second rank
    assert_divergence_is_that_of_one_rank(workers, case, kind, dtype)


def test_a_largest_logit_on_two_ranks(workers):
    """Its derivative is minus the sum of all others on one of them."""
    case = make_case(13, extras=False, lm_head_bias=torch.zeros(29, dtype=torch.float64))
    case.lm_head_weight[3] = case.lm_head_weight[20]
    case.options["lm_head_bias"][[3, 20]] = 15.0
    assert_divergence_is_that_of_one_rank(workers, case, "reverse_kl", torch.float64)


def assert_divergence_is_that_of_one_rank(workers, case, kind, dtype):
    tol = {torch.float64: 1e-10, torch.float32: 2e-5}[dtype]
    g = torch.Generator().manual_seed(0)
    other = case.hidden_states + 0.1, case.lm_head_weight + 0.1 * torch.randn(29, 12, generator=g, dtype=torch.float64)
    options: dict = {"kind": kind, "weights": torch.randn(4, 7, generator=g, dtype=torch.float64)}
    if kind == "top-k":
        top = torch.randn(4, 7, 29, generator=g, dtype=torch.float64).log_softmax(-1).topk(5)
        options |= {"kind": "forward_kl", "other_ids": top.indices, "other_logprobs": top.values}
        other = None
    sizes = [10, 16, 3]
    want = vocab_divergence(0, None, case, [29], other, options)
    given = None if other is None else tuple(x.to(dtype) for x in other)
    for rank, got in enumerate(workers.run(vocab_divergence, 3, case.to(dtype), sizes, given, options)):
        for name, x in want.items():
            expected = x[slices(sizes)[rank]] if name == "dweight" else x
            np.testing.assert_allclose(
                got[name], expected, rtol=100 * tol, atol=tol * np.abs(expected).max(), err_msg=name
            )


def test_divergence_refuses_ranks_with_other_tokens(workers):
    for error in workers.run(refused_divergence, 2):
        assert error == "a divergence takes slices of the vocabulary only; got a group of ranks with other tokens"
