"""Frameworks that shard or replicate the head: FSDP2, DTensor, DDP; accumulation and checkpointing; ranks that fail."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from distributed.jobs import (
    checkpointed_and_accumulated,
    data_parallel,
    disagreeing,
    grid_loss,
    one_fails,
    rows_of,
    sharded,
    sharded_weight,
    slices,
    small_model,
)
from distributed.test_vocab import close
from helpers import PRECISION, make_case, make_config

from grpo_fused import GRPOLossConfig, ParallelGroups, fused_linear_grpo_loss


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
@pytest.mark.parametrize("job", [sharded, data_parallel], ids=["fsdp2", "ddp"])
def test_gradients_are_averaged_over_ranks(job, tied, workers):
    case = make_case(1).to(torch.float32)
    case.completion_mask[:] = True
    model = small_model(tied)
    (sum(model(rows_of(case, slice(2 * rank, 2 * rank + 2))) for rank in range(2)) / 2).backward()
    for got in workers.run(job, 2, case, tied):
        assert set(got) == {name for name, _ in model.named_parameters()}
        for name, p in model.named_parameters():
            close(got[name], p.grad.numpy(), 1e-5, name)


def test_a_dtensor_weight_gets_its_gradient_in_its_own_sharding(workers):
    case = make_case(2).to(torch.float32)
    case.completion_mask[:] = True
    weight = case.lm_head_weight.clone().requires_grad_()
    losses = []
    for rank in range(2):
        some = rows_of(case, slice(2 * rank, 2 * rank + 2))
        losses.append(
            fused_linear_grpo_loss(
                some.hidden_states, weight, some.completion_ids, some.advantages, some.completion_mask,
                config=GRPOLossConfig(loss_type="grpo"),
            ).loss
        )  # fmt: skip
    (sum(losses) / 2).backward()
    for got in workers.run(sharded_weight, 2, case):
        assert got["placements"] == "(Shard(dim=0),)"
        close(got["dweight"], weight.grad.numpy(), 1e-5, "dweight")


def test_accumulation_and_checkpointing(workers):
    case = make_case(3).to(torch.float32)
    sizes = [20, 9]
    weight = case.lm_head_weight.double().requires_grad_()
    for part in (slice(0, 2), slice(2, 4)):
        some = rows_of(case.to(torch.float64), part)
        fused_linear_grpo_loss(
            some.hidden_states, weight, some.completion_ids, some.advantages, some.completion_mask,
            old_per_token_logps=some.options["old_per_token_logps"], num_items_in_batch=7.0,
        ).loss.backward()  # fmt: skip
    for rank, got in enumerate(workers.run(checkpointed_and_accumulated, 2, case, sizes)):
        close(got["dweight"], weight.grad[slices(sizes)[rank]].numpy(), 2e-5, "dweight")


def test_ranks_that_disagree_are_named(workers):
    case = make_case(4).to(torch.float32)
    one, other = make_config("dapo"), make_config("dapo", epsilon=0.3)
    for got in workers.run(disagreeing, 2, case, [one, other], [{}, {}]):
        assert "all ranks of a process group must give the same loss options; got rank 0: " in got
        assert "rank 1: " in got
        assert "('epsilon', 0.3)" in got
    longer = make_case(4, T=8).to(torch.float32)
    changes = {
        name: getattr(longer, name) for name in ("hidden_states", "completion_ids", "completion_mask", "options")
    }
    for got in workers.run(disagreeing, 2, case, [one, one], [{}, changes]):
        assert "must give the same tokens; got rank 0: 28, rank 1: 32" in got
    for got in workers.run(disagreeing, 2, case, [one, one], [{}, {}]):
        assert got == "no error"


def test_an_error_on_one_rank_does_not_hang_the_others(tmp_path):
    """They fail within the timeout of the group; in processes of their own, which such a failure leaves unusable."""
    from distributed.workers import Workers

    pair = Workers(2, tmp_path)
    try:
        assert pair.run(one_fails, 2, make_case(5).to(torch.float32)) == ["RuntimeError", "TypeError"]
    finally:
        pair.stop()


def test_wrong_groups_are_refused():
    case = make_case(6)
    with pytest.raises(
        TypeError, match="process_group must be a torch.distributed.ProcessGroup or ParallelGroups; got"
    ):
        case.run(make_config("dapo"), process_group="tp")
    with pytest.raises(ValueError, match="impl='reference' is of one process; got a process_group"):
        case.run(make_config("dapo"), process_group=ParallelGroups(), impl="reference")
    plain = case.run(make_config("dapo"))
    assert np.array_equal(case.run(make_config("dapo"), process_group=ParallelGroups()).dweight, plain.dweight)


def test_a_weight_that_zero_3_has_partitioned_is_refused():
    case = make_case(7)
    case.lm_head_weight = torch.nn.Parameter(torch.empty(0).double())
    case.lm_head_weight.ds_shape = torch.Size((29, 12))
    with pytest.raises(
        ValueError, match=r"ZeRO-3 has partitioned it \(\(29, 12\)\): enter deepspeed.zero.GatheredParameters"
    ):
        fused_linear_grpo_loss(case.hidden_states, case.lm_head_weight, case.completion_ids, case.advantages)


@pytest.mark.parametrize("impl", ["chunked", "native", "triton"])
def test_slices_and_batches_at_once(impl, workers):
    """4 ranks: 2 slices of the vocabulary x 2 halves of the batch."""
    dtype, tol = PRECISION[impl]
    case = make_case(8, B=6).to(dtype)
    config = make_config("cispo", beta=0.1, top_entropy_quantile=0.6, entropy_coef=0.05)
    want = case.to(torch.float64).run(config, impl="reference")
    rows, columns = [slice(0, 2), slice(2, 6)], slices([16, 13])
    results = workers.run(grid_loss, 4, case, config, impl, rows, [16, 13])
    for rank, got in enumerate(results):
        close(got["loss"], want.out.loss.detach().numpy(), tol, "loss")
        close(got["logps"], want.out.per_token_logps[rows[rank // 2]].numpy(), tol, "logps")
        close(got["dhidden"], want.dhidden[rows[rank // 2]].numpy(), 10 * tol, "dhidden")
    for v in range(2):
        close(results[v]["dweight"] + results[2 + v]["dweight"], want.dweight[columns[v]].numpy(), tol, "dweight")
