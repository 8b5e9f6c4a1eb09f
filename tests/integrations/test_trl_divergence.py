"""TRL's distillation trainer on `fused_linear_divergence`: its function, and a training run."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("trl")

from integrations.trl_runs import build_tokenizer, dataset, save_small_model

from grpo_fused.integrations.trl.release import FUSED_HEAD, RELEASE

if RELEASE < FUSED_HEAD:
    pytest.skip("the function has its arguments since TRL 1.15", allow_module_level=True)

from trl.trainer import distillation_trainer
from trl.trainer.distillation_trainer import DistillationConfig, DistillationTrainer

from grpo_fused.integrations.context import holding
from grpo_fused.integrations.trl import FusedLogProbFunction, adapters, patch_trl, unpatch_trl, use_fused_head
from grpo_fused.integrations.trl.divergence import fused_divergence_loss


def arguments(beta: float, **options):
    g = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(3, 5, 16, generator=g), torch.randn(3, 5, 24, generator=g)
    weight, other = torch.randn(70, 16, generator=g), torch.randn(70, 24, generator=g)
    mask = (torch.rand(3, 5, generator=g) < 0.6).long()
    return (student.requires_grad_(), teacher, weight.requires_grad_(), other, mask, beta), options


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_items_in_batch": 40, "temperature": 0.8},
        {"num_items_in_batch": torch.tensor(40), "student_logit_scale": 0.5, "teacher_final_logit_softcapping": 4.0},
        {"teacher_logit_scale": 0.25, "student_final_logit_softcapping": 5.0},
        {"student_lm_head_bias": torch.arange(70) / 30, "teacher_lm_head_bias": -torch.arange(70) / 30},
    ],
    ids=["", "temperature", "student scale", "teacher scale", "biases"],
)
def test_equals_trl(beta, options):
    results = []
    for function in (distillation_trainer._chunked_divergence_loss, fused_divergence_loss):
        args, kwargs = arguments(beta, **options)
        loss, entropy_sum, active = function(*args, **kwargs)
        results.append([loss, entropy_sum, active, *torch.autograd.grad(loss, (args[0], args[2]))])
    for theirs, ours in zip(*results, strict=True):
        assert theirs.abs().max() > 0
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_nothing_active(beta):
    args, _ = arguments(beta)
    args[4].zero_()
    loss, entropy_sum, active = fused_divergence_loss(*args)
    assert loss == entropy_sum == active == 0
    loss.backward()
    assert not args[0].grad.any()


def test_the_scratch_reaches_the_divergence():
    args, _ = arguments(0.5)
    with pytest.raises(ValueError, match="max_scratch_bytes must be at least 1; got 0"):
        fused_divergence_loss(*args, max_scratch_bytes=0)


@pytest.mark.parametrize(("place", "name"), [(2, "student"), (3, "teacher")])
def test_partitioned_heads_are_refused(place, name, tmp_path):
    """By DeepSpeed ZeRO-3, and by FSDP2."""
    args = list(arguments(0.5)[0])
    args[place].ds_status = "NOT_AVAILABLE"
    with pytest.raises(ValueError, match=rf"the {name}'s head is partitioned .* call unpatch_trl\(\)"):
        fused_divergence_loss(*args)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/gloo", rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        args[place] = torch.distributed.tensor.distribute_tensor(args[place].detach(), mesh)
        with pytest.raises(ValueError, match=f"the {name}'s head is partitioned by FSDP2"):
            fused_divergence_loss(*args)
    finally:
        torch.distributed.destroy_process_group()


def run(folder, teacher, out, peft=None):
    torch.manual_seed(0)
    args = DistillationConfig(
        str(out), per_device_train_batch_size=4, max_completion_length=6, max_steps=2, learning_rate=0.01, optim="sgd",
        lr_scheduler_type="constant", logging_steps=1, report_to="none", use_cpu=True, bf16=False, save_strategy="no",
        disable_tqdm=True, seed=0, gradient_checkpointing=False, model_init_kwargs={"dtype": "float32"},
        teacher_model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip
    trainer = DistillationTrainer(
        model=str(folder),
        teacher_model=str(teacher),
        args=args,
        train_dataset=dataset(),
        processing_class=build_tokenizer(),
        peft_config=peft,
    )
    trainer.train()
    logs = [
        {k: v for k, v in log.items() if k in ("loss", "entropy", "grad_norm")} for log in trainer.state.log_history
    ]
    return logs, {name: x.detach().clone() for name, x in trainer.model.named_parameters()}


def test_training(tmp_path, monkeypatch):
    folder, teacher = save_small_model(tmp_path / "student"), save_small_model(tmp_path / "teacher", tied=True)
    logs, weights = run(folder, teacher, tmp_path / "stock")
    calls = []
    own = distillation_trainer._chunked_divergence_loss

    def counted(*args, **kwargs):
        calls.append(args)
        return fused_divergence_loss(*args, **kwargs)

    monkeypatch.setattr("grpo_fused.integrations.trl.head.fused_divergence_loss", counted)
    patch_trl()
    try:
        got_logs, got = run(folder, teacher, tmp_path / "patched")
        assert len(calls) >= 2
    finally:
        unpatch_trl()
    assert distillation_trainer._chunked_divergence_loss is own
    assert len(got_logs) == len(logs) >= 2
    for mine, theirs in zip(got_logs, logs, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)
    for name, value in weights.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-5)


def test_lora_on_the_head(tmp_path, monkeypatch):
    """The other run has the weight with the adapter folded in, and TRL's own function."""
    peft = pytest.importorskip("peft")
    folder, teacher = save_small_model(tmp_path / "student"), save_small_model(tmp_path / "teacher", tied=True)
    own, seen = distillation_trainer._chunked_divergence_loss, []

    def folded(student, other, weight, *args, max_scratch_bytes, **kwargs):
        seen.append(max_scratch_bytes)
        return own(student, other, weight + adapters.adapted.get().get_delta_weight("default"), *args, **kwargs)

    class Head(FusedLogProbFunction):
        max_scratch_bytes = 2**20

    results = []
    for name, function in (("folded", folded), ("fused", fused_divergence_loss)):
        monkeypatch.setattr("grpo_fused.integrations.trl.head.fused_divergence_loss", function)
        config = peft.LoraConfig(
            r=4, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM", init_lora_weights=False
        )
        patch_trl(Head)
        try:
            results.append(run(folder, teacher, tmp_path / name, config))
        finally:
            unpatch_trl()
    (want_logs, want), (logs, got) = results
    assert set(seen) == {2**20}
    assert len(logs) >= 2
    for mine, theirs in zip(logs, want_logs, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-5)


def test_a_bias_of_the_adapter():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 70))
    config = peft.LoraConfig(r=4, target_modules=["0"], lora_bias=True, init_lora_weights=False)
    (head,) = peft.inject_adapter_in_model(config, model)
    head.base_layer.requires_grad_(False)
    (student, teacher, _, other, mask, beta), _ = arguments(0.3)
    bias = head(torch.zeros(16))
    weight = (head(torch.eye(16)) - bias).T
    want = distillation_trainer._chunked_divergence_loss(
        student, teacher, weight, other, mask, beta, student_lm_head_bias=bias
    )
    with holding(adapters.adapted, head):
        got = fused_divergence_loss(
            student, teacher, head.weight, other, mask, beta, student_lm_head_bias=head.base_layer.bias
        )
    leaves = [student, *(x for x in head.parameters() if x.requires_grad)]
    assert len(leaves) == 4
    for x, y in zip(got[:2], want[:2], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    for x, y in zip(torch.autograd.grad(got[0], leaves), torch.autograd.grad(want[0], leaves), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-5)


def test_block():
    own = distillation_trainer._chunked_divergence_loss
    with use_fused_head():
        assert distillation_trainer._chunked_divergence_loss is not own
    assert distillation_trainer._chunked_divergence_loss is own
