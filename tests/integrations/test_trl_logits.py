"""`HeadLogits`, which stand for the logits of trainers before TRL 1.15. `make trl` runs those trainers themselves."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from integrations.tiny import build
from integrations.trl_runs import save_small_model
from transformers import Qwen2ForCausalLM

from grpo_fused.integrations.trl import FusedLogProbFunction, logits

IDS = torch.tensor([[0, 5, 6, 7, 8, 9], [3, 4, 5, 1, 0, 0]])
MASK = torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
KEEP = 3


@pytest.fixture
def model(tmp_path):
    return Qwen2ForCausalLM.from_pretrained(save_small_model(tmp_path / "small")).eval()


@pytest.fixture
def dense(model):
    """Log-probs and entropies [B, KEEP] of the last tokens, by the model's own logits over 0.5."""
    log_p = (model(input_ids=IDS, attention_mask=MASK).logits[:, :-1][:, -KEEP:].double() / 0.5).log_softmax(-1)
    return log_p.gather(-1, IDS[:, -KEEP:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def stopped(model: Any, use: Any, *, keep: int | None = None, loss_type: str = "dapo", **kwargs: Any) -> Any:
    """What `use` makes of the model's logits in a scoring method."""

    def method(trainer: Any, model: Any, **_: Any) -> Any:
        options = {} if keep is None else {"logits_to_keep": keep + 1}
        return use(model(input_ids=IDS, attention_mask=MASK, **options).logits)

    score = logits.stopping_at_the_head(method, lambda: FusedLogProbFunction)
    return score(SimpleNamespace(loss_type=loss_type), model, **kwargs)


def last(z: Any) -> Any:
    return z[:, :-1, :][:, -KEEP:, :]


@pytest.mark.parametrize("keep", [None, KEEP])
def test_log_probs_and_entropies(keep, model, dense):
    def use(z: Any) -> Any:
        scored = last(z).div_(0.25).div_(2.0)
        log_p = logits.selective_log_softmax(scored, IDS[:, -KEEP:])
        with torch.no_grad():
            return log_p, logits.entropy_from_logits(scored)

    found = stopped(model, use, keep=keep, compute_entropy=True)
    counts = MASK[:, -KEEP:] != 0
    for mine, want in zip(found, dense, strict=True):
        torch.testing.assert_close(mine, want.masked_fill(~counts, 0.0).float(), rtol=1e-5, atol=1e-5)
    assert found[0].requires_grad
    assert not found[1].requires_grad
    assert torch.is_tensor(model(input_ids=IDS).logits)  # as before


def test_one_function_for_both(model, dense):
    """TRL 1.14's, which divides by the temperature itself and has a mask."""
    row_mask = torch.tensor([[1, 0, 1], [1, 1, 1]])
    for graph in (True, False):

        def use(z: Any, graph: bool = graph) -> Any:
            return logits.selective_log_softmax_and_entropy(last(z), IDS[:, -KEEP:], graph, 0.5, row_mask)

        found = stopped(model, use)
        for mine, want in zip(found, dense, strict=True):
            counts = (MASK[:, -KEEP:] * row_mask) != 0
            torch.testing.assert_close(mine, want.masked_fill(~counts, 0.0).float(), rtol=1e-5, atol=1e-5)
        assert found[1].requires_grad == graph
        one = stopped(model, lambda z: logits.selective_log_softmax(last(z), IDS[:, -KEEP:], 0.5, row_mask))
        assert torch.equal(one, found[0])


def test_entropies_without_log_probs(model, dense):
    found = stopped(model, lambda z: logits.entropy_from_logits(last(z) / 0.5))
    torch.testing.assert_close(found, dense[1].masked_fill(MASK[:, -KEEP:] == 0, 0.0).float(), rtol=1e-5, atol=1e-5)


def test_gradients_are_those_of_the_logits(model, dense):
    g = torch.randn(2, KEEP, generator=torch.Generator().manual_seed(0)) * MASK[:, -KEEP:]
    want = torch.autograd.grad((dense[0] * g).sum(), list(model.parameters()))
    mine = stopped(model, lambda z: logits.selective_log_softmax(last(z) / 0.5, IDS[:, -KEEP:]))
    for a, b in zip(torch.autograd.grad((mine * g).sum(), list(model.parameters())), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_under_ddp_that_looks_for_unused_parameters(model, tmp_path):
    """transformers asks for it without activation checkpointing, and with peft. It follows what has a history."""
    want = torch.autograd.grad(model(input_ids=IDS).logits[:, :-1].log_softmax(-1)[..., 3].sum(), model.lm_head.weight)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/gloo", rank=0, world_size=1)
    try:
        parallel = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)

        def method(trainer: Any, model: Any) -> Any:
            z = model(input_ids=IDS, attention_mask=torch.ones_like(MASK)).logits[:, :-1, :]
            return logits.selective_log_softmax(z, torch.full_like(IDS[:, 1:], 3))

        for _ in range(2):
            model.zero_grad()
            logits.stopping_at_the_head(method, lambda: FusedLogProbFunction)(
                SimpleNamespace(), parallel
            ).sum().backward()
            torch.testing.assert_close(model.lm_head.weight.grad, want[0], rtol=1e-4, atol=1e-5)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("seen", "keep"), [(4, 3), (8, None)])
def test_positions_that_the_mask_does_not_know_are_refused(seen, keep):
    with pytest.raises(ValueError, match=f"must see all 6 positions .* it saw {seen}"):
        logits._check_length(seen, 6, keep)
    logits._check_length(6, 6, keep)
    logits._check_length(3, 6, 3)


def test_ligers_loss_is_told(model):
    score = logits.stopping_at_the_head(lambda trainer, model: None, lambda: FusedLogProbFunction)
    with pytest.warns(UserWarning, match="use_liger_kernel=True this release of TRL makes the loss from log-probs of"):
        score(SimpleNamespace(use_liger_kernel=True), model)


def test_padding_is_scored_where_the_loss_counts_it(model, dense, monkeypatch):
    for release, loss_type, everywhere in (((1, 9), "luspo", True), ((1, 10), "luspo", False), ((1, 9), "dapo", False)):
        monkeypatch.setattr(logits, "RELEASE", release)
        found = stopped(
            model, lambda z: logits.selective_log_softmax(last(z) / 0.5, IDS[:, -KEEP:]), loss_type=loss_type
        )
        want = dense[0] if everywhere else dense[0].masked_fill(MASK[:, -KEEP:] == 0, 0.0)
        torch.testing.assert_close(found, want.float(), rtol=1e-5, atol=1e-5)


def test_autocast_of_the_head(model):
    """It ends with the model's forward, and TRL calls its functions after it."""

    class Recording(FusedLogProbFunction):
        @classmethod
        def apply(cls, *args: Any) -> Any:
            seen.append(torch.is_autocast_enabled("cpu"))
            return super().apply(*args)

    def method(trainer: Any, model: Any, on: bool) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            z = model(input_ids=IDS, attention_mask=torch.ones_like(MASK)).logits
        states, weight = (x.bfloat16() if on else x for x in (z.hidden_states.view(2, 6, -1), model.lm_head.weight))
        want = (states.double() @ weight.double().T).mean(-1)
        torch.testing.assert_close(z.mean(-1)[:, :-1].double(), want[:, :-1], rtol=0, atol=1e-5)
        return logits.selective_log_softmax(z[:, :-1, :], IDS[:, 1:])

    seen: list[bool] = []
    for on in (True, False):
        logits.stopping_at_the_head(method, lambda: Recording)(SimpleNamespace(), model, on)
    assert seen == [True, False]


def test_several_passes(model):
    """TRL scores a batch in parts, within one call of its method."""

    def method(trainer: Any, model: Any) -> Any:
        parts = [model(input_ids=IDS[i : i + 1], attention_mask=MASK[i : i + 1]).logits for i in range(2)]
        return torch.cat([logits.selective_log_softmax(z[:, :-1, :], IDS[i : i + 1, 1:]) for i, z in enumerate(parts)])

    found = logits.stopping_at_the_head(method, lambda: FusedLogProbFunction)(SimpleNamespace(), model)
    log_p = model(input_ids=IDS, attention_mask=MASK).logits[:, :-1].log_softmax(-1)
    want = log_p.gather(-1, IDS[:, 1:, None]).squeeze(-1).masked_fill(MASK[:, 1:] == 0, 0.0)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


def test_packed_sequences(model):
    """ms-swift's form: no mask, and one row."""

    def method(trainer: Any, model: Any) -> Any:
        z = model(input_ids=IDS[:1]).logits[:, :-1, :]
        with pytest.raises(TypeError, match="only their first dimension to divide; got dim=1"):
            z.squeeze(1)
        return logits.selective_log_softmax(z.squeeze(0), IDS[0, 1:])

    found = logits.stopping_at_the_head(method, lambda: FusedLogProbFunction)(SimpleNamespace(), model)
    want = model(input_ids=IDS[:1]).logits[0, :-1].log_softmax(-1).gather(-1, IDS[0, 1:, None]).squeeze(-1)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("index", [0, (0, 1), (slice(None), slice(None), 0), (..., None)], ids=str)
def test_other_uses_are_refused(index, model):
    with pytest.raises(TypeError, match="logits that were not computed can be sliced"):
        stopped(model, lambda z: z[index])


def test_statistics(model):
    """What DPO and KTO log: of completions, of sequences, and of all that a pass saw."""
    z = model(input_ids=IDS, attention_mask=MASK).logits.detach()
    counts = MASK[:, 1:] != 0
    mask = counts & torch.tensor([[1, 0, 1, 1, 1], [0, 1, 1, 1, 1]]).bool()

    def use(found: Any) -> None:
        assert (found.shape, found.size(0), found.device) == (z.shape, 2, z.device)
        shifted = found[..., :-1, :].contiguous().detach()
        torch.testing.assert_close(shifted[mask].mean(-1), z[:, :-1][mask].mean(-1), rtol=1e-5, atol=1e-5)
        means = z[:, :-1].mean(-1).masked_fill(~counts, 0.0)
        torch.testing.assert_close(shifted.mean(2), means, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close((shifted / 0.5).mean(-1), means / 0.5, rtol=1e-5, atol=1e-5)
        tokens = z[:, :-1].argmax(-1).masked_fill(~counts, 0)
        for i, part in enumerate(shifted.chunk(2, dim=0)):
            assert torch.equal(part.argmax(dim=-1), tokens[i : i + 1])
        second = shifted.index_select(0, torch.tensor([1]))
        assert torch.equal(second.argmax(-1), tokens[1:])
        none = found.index_select(0, torch.tensor([], dtype=torch.int64))
        assert none.nansum() == 0
        assert none[:, :-1, :].mean(-1).shape == (0, 5)
        assert none.argmax(-1).dtype == torch.int64
        torch.testing.assert_close(found.nansum(), z.sum(), rtol=1e-5, atol=1e-3)  # padding included

    stopped(model, use)


def test_cross_entropy(model):
    mask = MASK[:, 1:] != 0
    loss = torch.nn.functional.cross_entropy
    want = loss(model(input_ids=IDS, attention_mask=MASK).logits[:, :-1][mask], IDS[:, 1:][mask])
    gradients = torch.autograd.grad(want, list(model.parameters()))
    mine = stopped(model, lambda z: loss(z[:, :-1, :][mask], IDS[:, 1:][mask]))
    torch.testing.assert_close(mine, want, rtol=1e-5, atol=1e-5)
    for a, b in zip(torch.autograd.grad(mine, list(model.parameters())), gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for options in ({"reduction": "sum"}, {"ignore_index": 5}, {"label_smoothing": 0.1}, {"weight": torch.ones(42)}):
        with pytest.raises(TypeError, match="no implementation found"):
            stopped(model, lambda z, options=options: loss(z[:, :-1, :], IDS[:, 1:], **options))
    with pytest.raises(TypeError, match="dispatch failed for 'torch.logsumexp'"):
        stopped(model, lambda z: torch.logsumexp(z, dim=-1))


def test_entropies_belong_to_their_positions(model, dense):
    def use(z: Any) -> Any:
        scored = last(z) / 0.5
        logits.selective_log_softmax(scored, IDS[:, -KEEP:])
        whole = logits.entropy_from_logits(scored.detach())
        return whole, torch.cat([logits.entropy_from_logits(part) for part in scored.chunk(2)])

    whole, parts = stopped(model, use, compute_entropy=True)
    assert not whole.requires_grad
    assert torch.equal(whole, parts)
    torch.testing.assert_close(whole, dense[1].masked_fill(MASK[:, -KEEP:] == 0, 0.0).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head", ["plain", "bias", "lora"])
def test_reference_pass_has_no_history(head, model):
    """TRL leaves `torch.no_grad` before it makes log-probs of a reference's logits."""
    if head == "bias":
        model = build("phi")
    elif head == "lora":
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False))

    def method(trainer: Any, model: Any, graph: bool) -> Any:
        with torch.set_grad_enabled(graph):
            z = model(input_ids=IDS, attention_mask=MASK).logits
        return logits.selective_log_softmax(z[:, :-1, :], IDS[:, 1:])

    log_p = model(input_ids=IDS, attention_mask=MASK).logits[:, :-1].log_softmax(-1)
    want = log_p.gather(-1, IDS[:, 1:, None]).squeeze(-1).masked_fill(MASK[:, 1:] == 0, 0.0)
    score = logits.stopping_at_the_head(method, lambda: FusedLogProbFunction)
    for graph in (False, True):
        found = score(SimpleNamespace(), model, graph)
        assert found.requires_grad == graph
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-4)


def test_entropies_of_a_policy_take_no_second_pass(model):
    class Counting(FusedLogProbFunction):
        @classmethod
        def apply(cls, *args: Any) -> Any:
            calls.append(args)
            return super().apply(*args)

    def method(trainer: Any, model: Any, inputs: Any) -> Any:
        z = model(input_ids=IDS, attention_mask=MASK).logits[..., :-1, :]
        logits.selective_log_softmax(z, IDS[:, 1:])
        return logits.entropy_from_logits(z.detach())

    calls: list[Any] = []
    assert (logits.stopping_the_loss(method, SimpleNamespace, lambda: Counting)(trainer_of(model), model, {}) > 0).any()
    assert len(calls) == 1


def trainer_of(model: Any, **options: Any) -> Any:
    return SimpleNamespace(model=model, ref_model=None, args=SimpleNamespace(use_liger_kernel=False), **options)


def test_a_reference_stops_at_its_head_too(model):
    """And brings no entropies."""

    def method(trainer: Any, *_: Any) -> Any:
        return [each(input_ids=IDS).logits for each in (trainer.model, trainer.ref_model)]

    trainer = trainer_of(model)
    trainer.ref_model = copy.deepcopy(model)
    head: Any = FusedLogProbFunction
    found = logits.stopping_the_loss(method, SimpleNamespace, lambda: head)(trainer, model, {})
    assert [z.with_entropy for z in found] == [True, False]


def test_losses_that_stay_trls(model):
    """Where logits are asked for; and with a warning where TRL makes more of them, or none."""

    def method(trainer: Any, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        return type(model(input_ids=IDS).logits)

    head: Any = FusedLogProbFunction
    compute = logits.stopping_the_loss(method, SimpleNamespace, lambda: head)
    assert compute(trainer_of(model), model, {}) is logits.HeadLogits
    assert compute(trainer_of(model), model, {}, False) is logits.HeadLogits
    assert compute(trainer_of(model), model, {}, True) is torch.Tensor
    assert compute(trainer_of(model), model, {}, return_outputs=True) is torch.Tensor
    with pytest.warns(UserWarning, match="leaves the loss to the trainer's own logits"):
        assert compute(trainer_of(model, use_weighting=True), model, {}) is torch.Tensor
    trainer = trainer_of(model)
    trainer.args.use_liger_kernel = True
    with pytest.warns(UserWarning, match="leaves the loss to the trainer's own logits"):
        assert compute(trainer, model, {}) is torch.Tensor
    for name in ("forward", "get_batch_logps", "_compute_kl_logps"):
        subclass = type("Trainer", (SimpleNamespace,), {name: lambda self: None})
        with pytest.warns(UserWarning, match=rf"subclasses that do not replace .*{name}"):
            assert compute(subclass(**vars(trainer_of(model))), model, {}) is torch.Tensor
    head = None
    assert compute(trainer_of(model), model, {}) is torch.Tensor


@pytest.mark.parametrize("use", [lambda z: z.chunk(2, dim=1), lambda z: z.index_select(2, torch.tensor([0])),
                                 lambda z: z.mean(0), lambda z: z.argmax(1), lambda z: z[MASK != 0][0],
                                 lambda z: z[torch.tensor([True, False])]])  # fmt: skip
def test_other_dimensions_are_refused(use, model):
    with pytest.raises(TypeError, match="logits that were not computed"):
        stopped(model, use)


def test_trls_functions_still_take_tensors():
    z, ids = torch.randn(2, 3, 5), torch.randint(0, 5, (2, 3))
    function = logits.taking_head_logits(lambda z, ids: z.sum(), logits.selective_log_softmax)
    assert function(z, ids) == z.sum()


def test_without_an_active_head_the_model_makes_logits(model):
    score = logits.stopping_at_the_head(lambda trainer, model: model(input_ids=IDS).logits, lambda: None)
    assert score(SimpleNamespace(), model).shape == (2, 6, 42)
