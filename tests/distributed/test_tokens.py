"""Tokens of one batch on 2 and 4 ranks: loss, normalisers, quantiles and every metric are those of one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from distributed.jobs import columns_of, custom_loss, other_inputs, rows_of, token_loss
from distributed.test_vocab import close
from helpers import PRECISION, config_id, make_case, make_config

from grpo_fused.ranks import parallel

ENGINES = ["chunked", "native", "triton"]
CONFIGS = [
    make_config("dapo", beta=0.1),
    make_config("grpo", importance_sampling_level="sequence", beta=0.1, entropy_coef=0.05),
    make_config("bnpo", off_policy_mask_threshold=0.05),
    make_config("cispo", top_entropy_quantile=0.5, entropy_coef=0.1),
    make_config("dr_grpo"),
    make_config("luspo", importance_sampling_level="sequence"),
    make_config("sapo"),
    make_config("vespo"),
    make_config("gmpo", beta=0.1),
]
ROWS = [[slice(0, 1), slice(1, 6)], [slice(0, 2), slice(2, 2), slice(2, 3), slice(3, 6)]]  # one rank has nothing
COLUMNS = [[slice(0, 3), slice(3, 7)], [slice(0, 1), slice(1, 4), slice(4, 5), slice(5, 7)]]


def assert_is_one_process(results, want, part_of, tol) -> None:
    """`part_of(rank, x)`: a rank's part of a per-token tensor of the whole batch."""
    total = sum(got["dweight"] for got in results)
    close(total, want.dweight.numpy(), tol, "dweight")
    worked = {float(got["gradient_tokens"]) for got in results}
    assert len(worked) == 1, "the rows of all ranks together"
    assert 0 < worked.pop() <= want.out.metrics["active_tokens"]
    for rank, got in enumerate(results):
        close(got["loss"], want.out.loss.detach().numpy(), tol, "loss")
        close(got["logps"], part_of(rank, want.out.per_token_logps).numpy(), tol, "logps")
        close(got["dhidden"], part_of(rank, want.dhidden).numpy(), tol * 10, "dhidden")
        for name, value in want.out.metrics.items():
            if name != "gradient_tokens":
                close(got[name], value.double().numpy(), max(tol, 1e-6), name)


@pytest.mark.pairs
@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
@pytest.mark.parametrize("parts", ROWS, ids=["2-ranks", "4-ranks-one-empty"])
def test_sequences_on_several_ranks(parts, config, impl, workers):
    if impl == "triton" and len(parts) == 4:
        pytest.skip("as on 2 ranks")
    dtype, tol = PRECISION[impl]
    case = make_case(1, B=6).to(dtype)
    want = case.to(torch.float64).run(config, impl="reference")
    results = workers.run(token_loss, len(parts), case, config, impl, parts, "rows", {})
    assert_is_one_process(results, want, lambda rank, x: x[parts[rank]], tol)


@pytest.mark.pairs
@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
@pytest.mark.parametrize("parts", COLUMNS, ids=["2-ranks", "4-ranks"])
def test_positions_on_several_ranks(parts, config, impl, workers):
    """Context parallelism: ratios, means and masks cover the whole sequence."""
    if impl == "triton" and len(parts) == 4:
        pytest.skip("as on 2 ranks")
    dtype, tol = PRECISION[impl]
    case = make_case(2, B=5).to(dtype)
    want = case.to(torch.float64).run(config, impl="reference")
    results = workers.run(token_loss, len(parts), case, config, impl, parts, "split", {})
    assert_is_one_process(results, want, lambda rank, x: x[:, parts[rank]], tol)


@pytest.mark.parametrize("impl", ENGINES)
def test_positions_of_a_frozen_head_on_several_ranks(impl, workers):
    """A ratio needs the scores of all ranks: dlogp/dh is made before."""
    dtype, tol = PRECISION[impl]
    case, config, parts = make_case(2, B=5).to(dtype), make_config("vespo"), COLUMNS[0]
    want = case.to(torch.float64).run(config, impl="reference")
    for rank, got in enumerate(workers.run(token_loss, 2, case, config, impl, parts, "split", {"frozen": True})):
        close(got["dhidden"], want.dhidden[:, parts[rank]].numpy(), tol * 10, "dhidden")


def test_packed_sequences_and_small_budgets(workers):
    case = make_case(3, B=6)
    for config in CONFIGS[:2]:
        want = case.run(config, impl="reference")
        for options in ({"max_scratch_bytes": 9000}, {"compact": False}):
            results = workers.run(token_loss, 2, case, config, "chunked", ROWS[0], "packed", options)
            close(sum(got["dweight"] for got in results), want.dweight.numpy(), 1e-10, "dweight")
            for got in results:
                close(got["loss"], want.out.loss.detach().numpy(), 1e-10, "loss")


def test_helpers_split_the_batch():
    case = make_case(4, B=6)
    assert torch.equal(rows_of(case, slice(1, 3)).completion_ids, case.completion_ids[1:3])
    assert torch.equal(columns_of(case, slice(1, 3)).hidden_states, case.hidden_states[:, 1:3])


def test_communication_is_counted(workers):
    """At most 8 numbers a position before the loss, 2 after it, padded to the rank that has most."""
    case = make_case(5, B=6)
    (_, got) = workers.run(token_loss, 2, case, make_config("dapo", beta=0.1), "chunked", ROWS[0], "rows", {})
    fields = 5  # mask, sequence, advantage, old, ref
    assert got["numbers"]["objective"] == 5 * 7 * fields + 5 * 7 * 2
    assert got["calls"]["objective"] == 2
    assert np.isfinite(got["loss"])


@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("how", ["vocab", "tokens"])
def test_a_custom_objective(how, impl, workers):
    dtype, tol = PRECISION[impl]
    case = make_case(4, B=6, extras=False).to(dtype)
    want = custom_loss(0, None, make_case(4, B=6, extras=False), "reference", "vocab", [slice(None)])
    parts = [slice(0, 2), slice(2, 6)] if how == "tokens" else [slice(0, 15), slice(15, 29)]
    results = workers.run(custom_loss, 2, case, impl, how, parts)
    for part, got in zip(parts, results, strict=True):
        close(got["loss"], want["loss"], tol, "loss")
        close(got["dhidden"], want["dhidden"][part] if how == "tokens" else want["dhidden"], 2 * tol, "dhidden")
        if how == "vocab":
            close(got["dweight"], want["dweight"][part], tol, "dweight")
    if how == "tokens":
        close(sum(got["dweight"] for got in results), want["dweight"], tol, "dweight")


@pytest.mark.parametrize("name", ["advantages", "mask", "base"])
def test_inputs_of_a_custom_objective_are_compared(workers, name):
    """Of any name, also that of an argument."""
    for error in workers.run(other_inputs, 2, make_case(5).to(torch.float32), name):
        assert error.startswith(f"all ranks of a process group must give the same inputs['{name}']; got rank 0: "), (
            error
        )


def test_inputs_that_are_no_mapping_on_one_rank_raise_on_all(workers):
    for error in workers.run(other_inputs, 2, make_case(5).to(torch.float32), None):
        assert "inputs must be a mapping of names to tensors or None; got list" in error


def test_ranks_agree_on_what_an_advantage_is_for(monkeypatch):
    """A rank with one token a sequence may mean either."""
    monkeypatch.setattr(parallel.dist, "get_rank", lambda group: 1)
    monkeypatch.setattr(parallel, "device_of", lambda group: torch.device("cpu"))

    def ranks(*kinds):
        return parallel.TokenParallel(None, [[4, 2, kind] for kind in kinds], split=False)

    assert [ranks(*kinds).advantage_per_token for kinds in ((1, 2), (0, 2), (2, 2))] == [True, False, False]
    with pytest.raises(ValueError, match="on all ranks; got rank 0: sequence, rank 1: token, rank 2: either"):
        ranks(0, 1, 2)
