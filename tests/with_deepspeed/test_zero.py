"""TRL's GRPO on our kernels under DeepSpeed ZeRO-2 and ZeRO-3: `make deepspeed`."""

from __future__ import annotations

import importlib.util
import math
import os
import re
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("deepspeed is not installed (make deepspeed)", allow_module_level=True)
os.environ["DS_ACCELERATOR"] = "cpu"

from processes import ROOT, torchrun
from with_deepspeed.zero_runs import ON_THE_HEAD, OURS, Case, run, save_models

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models, and what every case left behind on two processes."""
    folder = tmp_path_factory.mktemp("zero")
    save_models(folder)
    launch(ROOT / "tests/with_deepspeed/zero_runs.py", folder)
    return folder


def launch(program: Path, *arguments: object) -> str:
    """What a program prints that runs on two processes."""
    done = torchrun(program, *arguments, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


def assert_same(got: dict, want: dict) -> None:
    """Losses, gradient norms, further metrics, and every weight, also relative to how far the weights went."""
    for name, values in want["logs"].items():
        torch.testing.assert_close(torch.tensor(got["logs"][name]), torch.tensor(values), **CLOSE)
    assert min(want["logs"]["grad_norm"]) > 0.1
    assert got["after"].keys() == want["after"].keys()
    for name, weight in want["after"].items():
        torch.testing.assert_close(got["before"][name], want["before"][name], rtol=0, atol=0)
        torch.testing.assert_close(got["after"][name], weight, **CLOSE)
    assert distance(got["after"], want["after"]) <= 1e-4 * distance(want["before"], want["after"])


def distance(a: dict, b: dict) -> float:
    return math.sqrt(sum((a[name] - b[name]).square().sum().item() for name in b))


@pytest.mark.parametrize("case", OURS, ids=str)
def test_stock_trl_under_zero3(case, folder):
    got = torch.load(folder / f"{case}.pt")
    stock = "stock-altered" if case.program == "recomputed" else "stock"
    assert_same(got, torch.load(folder / f"{Case(3, stock, case.model.replace('object', 'untied'))}.pt"))
    assert got["counts"] == {"patched": None, "fused": (3, 0), "recomputed": (0, 3)}[case.program]


@pytest.mark.parametrize("model", ["untied", "tied", "lora"])
@pytest.mark.parametrize("stage", [2, 3])
def test_one_process(stage, model, folder):
    """Two processes and one make the same of the same completions."""
    want = run(Case(0, "stock", model), folder)
    assert_same(torch.load(folder / f"{Case(stage, 'fused', model)}.pt"), want)


@pytest.mark.parametrize("case", ON_THE_HEAD, ids=str)
def test_lora_on_the_head(case, folder):
    """Two processes and one, which needs no DeepSpeed, train the same adapters."""
    want = run(Case(0, "fused", "lora-head"), folder)
    of_head = [name for name in want["after"] if "lm_head" in name]
    assert len(of_head) == 2
    assert all((want["after"][name] - want["before"][name]).abs().max() > 1e-5 for name in of_head)
    got = torch.load(folder / f"{case}.pt")
    assert_same(got, want)
    # far from the reference the KL's rounding exceeds what a prediction allows, in one process too
    assert got["counts"] == (None if case.program == "patched" else want["counts"])


def test_core_functions_as_documented(tmp_path):
    """The program of docs/scaling.md, and the weights of a plain model after the same two steps."""
    page = (ROOT / "docs/scaling.md").read_text()
    program = next(
        block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "import deepspeed" in block
    )
    (tmp_path / "program.py").write_text(program + AGAINST_PLAIN)
    assert launch(tmp_path / "program.py").count("the same") == 2


AGAINST_PLAIN = """
torch.manual_seed(0)
plain = Policy()
optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    plain(x, ids, advantages).backward()
    optimizer.step()
initial = (torch.manual_seed(0), Policy())[1].state_dict()
with deepspeed.zero.GatheredParameters(list(policy.parameters())):
    for name, weight in plain.named_parameters():
        torch.testing.assert_close(policy.get_parameter(name).data, weight.data, rtol=1e-6, atol=1e-7)
        assert (weight - initial[name]).abs().max() > 1e-3
try:
    fused_linear_grpo_loss(hidden.detach(), policy.lm_head.weight, ids, advantages)
except ValueError as error:
    assert "GatheredParameters around the call and its backward" in str(error)
    print("the same")
"""


def test_lm_head_inputs_of_an_engine(tmp_path):
    (tmp_path / "program.py").write_text(READ_THE_HEAD)
    save_models(tmp_path)
    assert launch(tmp_path / "program.py", tmp_path).count("the same") == 2


READ_THE_HEAD = """
import sys
import deepspeed
import torch
from transformers import AutoModelForCausalLM
from grpo_fused import check_head, fused_linear_logprobs, head_hidden_states, lm_head_inputs

ids = torch.arange(12).view(2, 6)
for name in ("untied", "tied"):
    model = AutoModelForCausalLM.from_pretrained(f"{sys.argv[1]}/{name}")
    with torch.no_grad():
        want = model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    check_head(model)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    hidden = head_hidden_states(engine, ids)
    with deepspeed.zero.GatheredParameters([model.lm_head.weight]):
        head = lm_head_inputs(engine, check=False)
        got = fused_linear_logprobs(hidden[:, :-1], token_ids=ids[:, 1:], **head).logps
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
print("the same")
"""


def test_partitioned_models_are_checked_a_layer_at_a_time(tmp_path):
    """A model whose head TRL misreads is refused, and one that it reads right is never whole."""
    from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    (tmp_path / "program.py").write_text(CHECK)
    save_models(tmp_path)
    config = RecurrentGemmaConfig(
        vocab_size=42, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, lru_width=32,
        logits_soft_cap=5.0, attention_window_size=16,
    )  # fmt: skip
    RecurrentGemmaForCausalLM(config).save_pretrained(tmp_path / "gemma")
    assert launch(tmp_path / "program.py", tmp_path).count("refused") == 2


CHECK = """
import sys
import torch
from transformers import AutoModelForCausalLM, TrainingArguments
from trl.trainer.utils import add_fused_lm_head
from grpo_fused.integrations.trl.head import check_trl_reads_the_head
from with_deepspeed.zero_runs import configuration

folder = sys.argv[1]
arguments = TrainingArguments(folder, use_cpu=True, deepspeed=configuration(3))


def whole(model):
    return {name for name, p in model.named_parameters() if p.numel()}


for name, expected in (("untied", {"lm_head.weight"}), ("tied", {"model.embed_tokens.weight", "lm_head.weight"})):
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/{name}")
    assert not whole(model)
    layer, seen = "model.layers.0.self_attn.q_proj", []
    model.get_submodule(layer).register_forward_pre_hook(lambda *_: seen.append(whole(model)))
    add_fused_lm_head(model)
    check_trl_reads_the_head(model)
    assert seen
    assert all(names <= expected | {layer + ".weight", layer + ".bias"} for names in seen), seen
    assert not whole(model)
model = AutoModelForCausalLM.from_pretrained(f"{folder}/gemma")
add_fused_lm_head(model)
try:
    check_trl_reads_the_head(model)
except RuntimeError as error:
    assert "takes softcap=None for RecurrentGemmaForCausalLM, whose own head has 5.0" in str(error), error
    assert not whole(model)
    print("refused")
"""
