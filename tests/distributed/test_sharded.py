"""Frameworks that shard or replicate the head: FSDP2, DTensor, DDP; accumulation and checkpointing; ranks that fail."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from distributed.jobs import (
    adapted_model,
    adapted_under_trl,
    both_in_one_group,
    checkpointed_and_accumulated,
    data_parallel,
    disagreeing,
    dtensor_among_slices,
    grid_loss,
    logprobs_of_one_fail,
    merged_of_shards,
    one_bias,
    one_fails,
    rows_of,
    sharded,
    sharded_weight,
    slices,
    small_model,
    token_loss,
    vocab_loss,
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


@pytest.mark.parametrize("own_group", [False, True], ids=["of the model", "of its own"])
def test_adapters_of_a_sharded_head_are_scored_in_trl(own_group, workers):
    """FSDP2 puts other parameters in the place of those that TRL's trainers have seen."""
    pytest.importorskip("peft")
    pytest.importorskip("trl")
    from grpo_fused.integrations.trl import release

    if release.RELEASE < release.FUSED_HEAD:
        pytest.skip("TRL has a fused head since 1.15")
    token_ids = torch.randint(29, (2, 3, 6))
    model = adapted_model()
    want = [model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1) for ids in token_ids]
    (sum(x.mean() for x in want) / 2).backward()
    for rank, got in enumerate(workers.run(adapted_under_trl, 2, token_ids, own_group)):
        close(got["logps"], want[rank].detach().numpy(), 1e-5, "logps")
        for name, p in model.named_parameters():
            if p.requires_grad:
                assert p.grad.any()
                close(got["gradients"][name], p.grad.numpy(), 1e-4, name)


def test_adapters_of_shards_are_merged_for_vllm(workers):
    pytest.importorskip("peft")
    vllm = pytest.importorskip("grpo_fused.rollouts.vllm")
    model = adapted_model(lora_bias=False)
    want = {name: x.detach().numpy() for name, x in vllm.named_weights(model)}
    base = model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight
    assert abs(want["model.layers.0.self_attn.q_proj.weight"] - base.detach().numpy()).max() > 0.1
    for got in workers.run(merged_of_shards, 2):
        assert got["same"]
        assert set(got["weights"]) == set(want)
        for name, x in want.items():
            close(got["weights"][name], x, 1e-6, name)


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
        assert "'epsilon': 0.3" in got
    longer = make_case(4, T=8).to(torch.float32)
    changes = {
        name: getattr(longer, name) for name in ("hidden_states", "completion_ids", "completion_mask", "options")
    }
    for got in workers.run(disagreeing, 2, case, [one, one], [{}, changes]):
        assert "must give the same tokens; got rank 0: 28, rank 1: 32" in got
    for got in workers.run(one_bias, 2, case):
        assert re.search("must give the same tensors; got rank 0: .*lm_head_bias.*, rank 1: ", got), got
    for got in workers.run(disagreeing, 2, case, [one, one], [{}, {}]):
        assert got == "no error"


FAILURES = {
    "keyword": "TypeError: fused_linear_grpo_loss() got an unexpected keyword argument 'compacted'",
    "dtype": "TypeError: completion_ids must have an integer dtype; got torch.float32",
    "id": "ValueError: token ids on active positions must lie in [0, 29)",
    "advantage": "ValueError: advantages must be finite",
    "states": "ValueError: hidden_states must be finite",
    "scratch": "ValueError: max_scratch_bytes=1 is too small",
    "score": "MemoryError: no room for the score",
    "gradient": "MemoryError: no room for the gradient",
    "metrics": "MemoryError: no room for the metrics",
}


@pytest.mark.parametrize("how", ["vocab", "tokens", "grid"])
@pytest.mark.parametrize("what", FAILURES)
def test_an_error_on_one_rank_is_raised_on_all(what, how, workers):
    """At once, with the rank and its reason; the group can be used again."""
    ranks = 4 if how == "grid" else 2
    got = workers.run(one_fails, ranks, make_case(5).to(torch.float32), how, what)
    assert got[1].startswith(FAILURES[what]), got
    for rank in set(range(ranks)) - {1}:
        assert got[rank].startswith("PeerError: rank "), got
        assert FAILURES[what] in got[rank], got
    case = make_case(5).to(torch.float32)
    assert workers.run(one_fails, ranks, case, how, "nothing") == ["no error"] * ranks


def test_a_reading_that_is_ambiguous_on_one_rank_is_refused_on_all(workers):
    """Packed, as many tokens as sequences on rank 1 only."""
    got = workers.run(one_fails, 2, make_case(5).to(torch.float32), "packed", "reading")
    reason = "could be one for each of 13 tokens or one for each of as many sequences"
    assert got[1].startswith("ValueError: advantages of shape (13,) "), got
    assert all(reason in message for message in got), got
    assert got[0].startswith("PeerError: rank 1 "), got


def test_an_error_in_log_probs_stays_on_one_rank_if_tokens_are_split(workers):
    got = workers.run(logprobs_of_one_fail, 2, make_case(5).to(torch.float32))
    assert got == ["no error", "token_ids must have an integer dtype; got torch.float32"]


def test_different_operators_are_named(workers):
    for got in workers.run(one_fails, 2, make_case(5).to(torch.float32), "vocab", "operator"):
        assert got.startswith("ValueError: all ranks of a process group must give the same "), got
        assert "operator; got rank 0: Loss, rank 1: Logprobs" in got, got


def test_ranks_with_other_tokens_have_one_hidden_size_and_one_normaliser(workers):
    for got in workers.run(one_fails, 2, make_case(5).to(torch.float32), "tokens", "hidden size"):
        assert "must give the same hidden size; got rank 0: 12, rank 1: 8" in got, got
    for got in workers.run(one_fails, 2, make_case(5).to(torch.float32), "tokens", "items"):
        assert "must give the same num_items; got rank 0: checksum " in got, got
    for got in workers.run(one_fails, 2, make_case(5).to(torch.float32), "tokens", "vocabulary"):
        assert "must give the same vocabulary; got rank 0: 29, rank 1: 30" in got, got
    for got in workers.run(one_fails, 2, make_case(5).to(torch.float32), "tokens", "split"):
        assert "must give the same split_sequences; got rank 0: 0, rank 1: 1" in got, got
    for got in workers.run(one_fails, 2, make_case(5).to(torch.float32), "tokens", "sequences"):
        assert "must have the same number of them; got rank 0: 2, rank 1: 1" in got, got


def test_wrong_groups_are_refused(workers):
    for got in workers.run(both_in_one_group, 2):
        assert got == "vocab and tokens must have one rank in common, this one; got [0, 1]"
    with pytest.raises(TypeError, match="vocab and tokens must be process groups .* or None; got 'tp'"):
        ParallelGroups(vocab="tp")
    case = make_case(6)
    with pytest.raises(
        TypeError, match="process_group must be a torch.distributed.ProcessGroup or ParallelGroups; got"
    ):
        case.run(make_config("dapo"), process_group="tp")
    with pytest.raises(ValueError, match="impl='reference' supports one process only; got a process_group"):
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


@pytest.mark.parametrize(("impl", "fits"), [("chunked", True), ("chunked", False), ("native", True), ("triton", True)])
def test_slices_and_batches_at_once(impl, fits, workers):
    """4 ranks: 2 slices of the vocabulary x 2 parts of the batch, of which the first may need more than one chunk."""
    dtype, tol = PRECISION[impl]
    case = make_case(8, B=6).to(dtype) if fits else make_case(8, B=6, T=30, masked=0.0).to(dtype)
    if not fits:
        case.completion_mask[2:, 4:] = False
    config = make_config("cispo", beta=0.1, top_entropy_quantile=0.6, entropy_coef=0.05)
    config = config if fits else make_config("grpo", importance_sampling_level="sequence")
    want = case.to(torch.float64).run(config, impl="reference")
    rows, columns = [slice(0, 2), slice(2, 6)], slices([16, 13])
    options = {} if fits else {"max_scratch_bytes": 9000}
    results = workers.run(grid_loss, 4, case, config, impl, rows, [16, 13], options)
    for rank, got in enumerate(results):
        close(got["loss"], want.out.loss.detach().numpy(), tol, "loss")
        close(got["logps"], want.out.per_token_logps[rows[rank // 2]].numpy(), tol, "logps")
        close(got["dhidden"], want.dhidden[rows[rank // 2]].numpy(), 10 * tol, "dhidden")
    for v in range(2):
        close(results[v]["dweight"] + results[2 + v]["dweight"], want.dweight[columns[v]].numpy(), tol, "dweight")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("temperature", {"temperature": 0.5}),
        ("softcap", {"softcap": 9.0}),
        ("logit_scale", {"logit_scale": 0.5}),
        ("tensors", {"num_items_in_batch": 3.0}),
        ("tensors", {"importance_sampling_ratio": torch.ones(4, 7)}),
        ("compact", {"compact": False}),
        ("completion_ids", {"completion_ids": torch.zeros(4, 7, dtype=torch.int64)}),
        ("completion_mask", {"completion_mask": torch.ones(4, 7, dtype=torch.bool)}),
        ("old_per_token_logps", {"old_per_token_logps": torch.zeros(4, 7)}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_every_difference_between_slices_is_named(name, change, workers):
    case = make_case(9).to(torch.float32)
    case.completion_mask[0] = False
    options = {**case.options, **change}
    fields = {key: options.pop(key) for key in list(options) if key in ("completion_ids", "completion_mask")}
    config = make_config("dapo")
    for got in workers.run(disagreeing, 2, case, [config, config], [{}, {**fields, "options": options}]):
        assert f"must give the same {name}; got rank 0: " in got, got


@pytest.mark.parametrize("impl", ["chunked", "triton"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_rank_whose_sequences_do_not_fit_a_chunk_scores_first(level, impl, workers):
    """One rank has a long sequence, one a short one, one none: the collectives are the same in both orders."""
    dtype, tol = PRECISION[impl]
    case = make_case(10, B=4, T=30, masked=0.0).to(dtype)
    case.completion_mask[1:, 4:] = False
    config = make_config("grpo", importance_sampling_level=level)
    want = case.to(torch.float64).run(config, impl="reference")
    parts = [slice(0, 1), slice(1, 4), slice(4, 4)]
    scratch = {"chunked": 9000, "triton": 2500}[impl]
    results = workers.run(token_loss, 3, case, config, impl, parts, "rows", {"max_scratch_bytes": scratch})
    close(sum(got["dweight"] for got in results), want.dweight.numpy(), tol, "dweight")
    for got in results:
        close(got["loss"], want.out.loss.detach().numpy(), tol, "loss")


def test_a_slice_without_a_possible_entry(workers):
    case = make_case(11).to(torch.float32)
    bias = torch.zeros(29)
    bias[15:] = -torch.inf
    case.options["lm_head_bias"] = bias
    case.completion_ids %= 15
    want = case.to(torch.float64).run(make_config("dapo", entropy_coef=0.1), impl="reference")
    for impl in ("chunked", "native", "triton"):
        for got in workers.run(vocab_loss, 2, case, make_config("dapo", entropy_coef=0.1), impl, [15, 14], {}):
            close(got["loss"], want.out.loss.detach().numpy(), 2e-5, impl)
            close(got["dhidden"], want.dhidden.numpy(), 2e-5, impl)
            assert np.isfinite(got["dweight"]).all()


@pytest.mark.parametrize("below", [200.0, math.inf], ids=str)
def test_a_target_in_a_slice_without_a_probable_entry(workers, below):
    """Its log-prob may be -inf; the statistics of a slice of -inf must not look like a NaN of the model."""
    case = make_case(14, extras=False).to(torch.float32)
    case.options["lm_head_bias"] = torch.where(torch.arange(29) < 15, 0.0, -below)
    case.completion_ids[:] %= 15
    case.completion_ids[0, 0] = 20
    want = case.to(torch.float64).run(make_config("dapo"), impl="reference")
    logps = want.out.per_token_logps
    assert logps[0, 0] <= -0.9 * below
    for impl in ("chunked", "native", "triton"):
        for got in workers.run(vocab_loss, 2, case, make_config("dapo"), impl, [15, 14], {}):
            np.testing.assert_allclose(got["logps"][0, 0], logps[0, 0], rtol=1e-6, err_msg=impl)
            close(got["logps"].flatten()[1:], logps.flatten()[1:].numpy(), 2e-5, impl)
            close(got["dhidden"], want.dhidden.numpy(), 2e-5, impl)


def test_a_column_of_a_rank_may_be_one_advantage_or_one_for_each_token(workers):
    case = make_case(12, per_token_advantages=True)
    want = case.run(make_config("dapo"), impl="reference")
    parts = [slice(0, 1), slice(1, 7)]
    results = workers.run(token_loss, 2, case, make_config("dapo"), "chunked", parts, "split", {})
    for got in results:
        close(got["loss"], want.out.loss.detach().numpy(), 1e-10, "loss")


def test_metrics_of_advantages_for_each_token_are_means_over_tokens(workers):
    case = make_case(12, per_token_advantages=True)
    want = case.run(make_config("vespo"), impl="reference").out.metrics["vespo/phi_seq_mean"]
    for got in workers.run(
        token_loss, 2, case, make_config("vespo"), "chunked", [slice(0, 1), slice(1, 4)], "rows", {}
    ):
        close(got["vespo/phi_seq_mean"], want.numpy(), 1e-10, "phi")


def test_a_dtensor_among_slices_of_the_vocabulary_is_refused(workers):
    case = make_case(13).to(torch.float32)
    for got in workers.run(dtensor_among_slices, 2, case):
        assert "must be this rank's slice as a plain tensor" in got
