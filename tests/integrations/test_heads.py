"""The heads of real models: lm_head_inputs gives the model's own log-probs, or it raises."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

pytest.importorskip("transformers")
from integrations.tiny import ARCHITECTURES, LinearLM, build, build_vision, fused, log_probs, token_ids

from grpo_fused import capture_head_input, check_head, fused_linear_logprobs, head_hidden_states, lm_head_inputs
from grpo_fused.heads.form import HeadForm, candidate_forms

TOL = 1e-4  # the contract while |z| <= 32


def assert_right(model: Any, ids: Tensor | None = None) -> None:
    """Fused log-probs of given tokens are those of the model's own logits, which are not near zero."""
    ids = token_ids() if ids is None else ids
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
        got = fused(model, ids)
    assert logits.dtype == torch.float32
    tol = TOL * max(1.0, float(logits.abs().max()) / 32)
    torch.testing.assert_close(got, log_probs(logits, ids), rtol=0, atol=tol)


@pytest.mark.gate(keep=lambda name: name in (*list(ARCHITECTURES)[::4], "gemma2", "cohere", "granite"))
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_log_probs_are_the_models_own(name: str) -> None:
    model, want = build(name), ARCHITECTURES[name]
    form = check_head(model)
    assert form.logit_scale == pytest.approx(want.logit_scale)
    assert (form.softcap, form.vocab_size) == (want.softcap, want.vocab_size)
    inputs = lm_head_inputs(model)
    assert (inputs["lm_head_bias"] is not None) == want.has_bias
    assert inputs["lm_head_weight"].shape[0] == want.vocab_size
    with torch.no_grad():
        peak = float(model(input_ids=token_ids(), use_cache=False).logits.abs().max())
    assert peak > 0.9 * (want.softcap or 5.0)  # large enough that a cap has an effect
    assert_right(model)


@pytest.mark.parametrize("name", ["gemma2", "cohere", "granite", "hyperclovax", "falcon_h1", "inkling2_text"])
def test_the_config_without_the_check(name: str) -> None:
    """Without the check, fields have their usual meaning, which depends on the model for logits_scaling."""
    model = build(name)
    unchecked, checked = lm_head_inputs(model, check=False), lm_head_inputs(model)
    for key in ("logit_scale", "softcap"):
        assert unchecked[key] == checked[key]
    assert unchecked["lm_head_weight"].shape == checked["lm_head_weight"].shape


@pytest.mark.parametrize("name", ["gemma2", "cohere", "granite", "recurrent_gemma", "falcon_h1", "phi"])
def test_the_cases_can_fail(name: str) -> None:
    """Without the scale, cap or bias that was found, the same comparison fails by nats."""
    model, ids = build(name), token_ids()
    inputs: Any = {**lm_head_inputs(model), "logit_scale": 1.0, "softcap": None, "lm_head_bias": None}
    with torch.no_grad():
        hidden_states = head_hidden_states(model, ids)
        got = fused_linear_logprobs(hidden_states[:, :-1], token_ids=ids[:, 1:], **inputs).logps
        want = log_probs(model(ids, use_cache=False).logits, ids)
    assert (got - want).abs().max() > 0.5


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("muse_glimmer", {"output_multiplier": 0.4, "final_logit_softcapping": 22.0}, (0.4, 22.0)),
        ("hyperclovax_vision_v2", {"logits_scaling": 0.5}, (0.5, None)),
        ("gemma3", {"final_logit_softcapping": 22.0}, (1.0, None)),  # the field exists, but this class does not cap
        ("qwen3_vl", {}, (1.0, None)),
    ],
    ids=["muse_glimmer", "hyperclovax_vision_v2", "gemma3", "qwen3_vl"],
)
def test_nested_configs(name: str, text: dict[str, float], expected: tuple[float, float | None]) -> None:
    model = build_vision(name, **text)
    assert check_head(model)[:2] == pytest.approx(expected)
    assert_right(model)


def test_a_transform_before_the_decoder_is_part_of_the_hidden_states() -> None:
    model, ids = build("modernbert-decoder"), token_ids()
    with torch.no_grad():
        of_backbone = model.model(ids).last_hidden_state[:, :-1]
        wrong = fused_linear_logprobs(of_backbone, token_ids=ids[:, 1:], **lm_head_inputs(model)).logps
        right = fused(model, ids)
    assert (wrong - right).abs().max() > 1.0


@pytest.mark.parametrize("multiple", [None, 64], ids=["odd", "padded"])
def test_a_resized_vocabulary(multiple: int | None) -> None:
    model = build("qwen2")
    check_head(model)
    model.resize_token_embeddings(131, pad_to_multiple_of=multiple)
    assert lm_head_inputs(model)["lm_head_weight"].shape[0] == (131 if multiple is None else 192)
    assert_right(model, token_ids(131))


def widen_head_input(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    return (args[0].float(),)


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "phi"])
def test_an_fp32_head_over_a_bf16_body(name: str) -> None:
    model = build(name, tie_word_embeddings=False).bfloat16()
    head = model.get_output_embeddings().float()
    assert lm_head_inputs(model)["lm_head_weight"].dtype == torch.float32
    assert head_hidden_states(model, token_ids()).dtype == torch.bfloat16
    bare = fused(model, token_ids())
    # the model itself cannot run this way: a trainer that creates such a head also widens its input
    head.register_forward_pre_hook(widen_head_input)
    torch.testing.assert_close(fused(model, token_ids()), bare, rtol=0, atol=0)
    assert_right(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["qwen2", "gemma2", "gpt2", "granite", "modernbert-decoder"])
def test_a_low_precision_model_is_scored_in_fp32(name: str, dtype: torch.dtype) -> None:
    """Against its own hidden states through its own head in float64."""
    model, ids = build(name).to(dtype), token_ids()
    inputs = lm_head_inputs(model)
    with torch.no_grad():
        hidden_states = head_hidden_states(model, ids)
        got = fused(model, ids)
        z = hidden_states.double() @ inputs["lm_head_weight"].double().T * inputs["logit_scale"]
        z = z if inputs["lm_head_bias"] is None else z + inputs["lm_head_bias"].double() * inputs["logit_scale"]
        z = z if inputs["softcap"] is None else inputs["softcap"] * (z / inputs["softcap"]).tanh()
    torch.testing.assert_close(got.double(), log_probs(z, ids), rtol=0, atol=TOL * max(1.0, float(z.abs().max()) / 32))


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "gpt2", "modernbert-decoder", "inkling2_text", "phi"])
def test_gradients_are_those_through_the_models_logits(name: str) -> None:
    """Of every parameter: a tied embedding gets both of its parts, a transform before the head its own."""
    ids = token_ids()
    gradients = []
    for own in (True, False):
        model = build(name)
        logps = log_probs(model(input_ids=ids, use_cache=False).logits, ids) if own else fused(model, ids)
        (logps * torch.linspace(-1, 1, logps.numel()).view_as(logps)).sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    want, got = gradients
    assert sum(g is not None for g in want.values()) > 5
    for parameter, gradient in want.items():
        if gradient is None:
            assert got[parameter] is None
            continue
        assert (
            torch.linalg.vector_norm(got[parameter] - gradient) <= 1e-4 * torch.linalg.vector_norm(gradient) + 1e-6
        ), parameter


def test_a_module_without_transformers() -> None:
    model = LinearLM()
    ids = torch.randint(40, (2, 6))
    torch.testing.assert_close(fused(model, ids), log_probs(model(ids).logits, ids))
    with pytest.raises(TypeError, match="one output head"):
        lm_head_inputs(nn.Linear(3, 3))
    with pytest.raises(TypeError, match="must be a torch.nn.Module; got dict"):
        lm_head_inputs({})  # type: ignore[arg-type]


def test_hidden_states_of_some_positions() -> None:
    model, ids = build("qwen2"), token_ids()
    whole = head_hidden_states(model, ids)
    assert whole.requires_grad
    mask = torch.ones_like(ids)
    torch.testing.assert_close(head_hidden_states(model, ids, mask, logits_to_keep=3), whole[:, -3:])
    with pytest.raises(TypeError, match="no labels"):
        head_hidden_states(model, ids, labels=ids)
    with pytest.raises(RuntimeError, match="it was called 0 times"), capture_head_input(model) as captured:
        _ = captured.hidden_states


@pytest.mark.parametrize(("given", "want"), [({}, False), ({"use_cache": True}, True)], ids=["default", "given"])
def test_the_cache_is_off_unless_it_is_asked_for(given: dict[str, bool], want: bool) -> None:
    model, seen = build("qwen2"), []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["use_cache"]), with_kwargs=True
    )
    head_hidden_states(model, token_ids(), **given)
    assert seen == [want]


@pytest.mark.full
def test_transformers_is_not_imported() -> None:
    code = "import sys, grpo_fused.heads; sys.exit(bool({'transformers', 'peft'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_head_with_weight_norm() -> None:
    model = build("qwen2", tie_word_embeddings=False)
    nn.utils.parametrizations.weight_norm(model.lm_head)
    assert_right(model)


def test_a_hook_after_the_check_is_seen() -> None:
    model = build("qwen2")
    lm_head_inputs(model)
    model.lm_head.register_forward_hook(lambda module, args, output: 0.5 * output)
    with pytest.raises(ValueError, match="differ by"):
        lm_head_inputs(model)


@pytest.mark.parametrize("call", [head_hidden_states, lambda model, ids: check_head(model, cached=False)],
                         ids=["states", "check"])  # fmt: skip
def test_threads_that_share_a_model_take_turns(call: Any) -> None:
    """Two that met in the middle of a pass would take each other's states, and leave each other's settings."""
    model, ids = build("qwen2").train(), token_ids()
    with torch.no_grad():
        want = [call(model, ids + k) for k in (0, 1)]
        logits = model(input_ids=ids).logits
    found: list[Any] = [None, None]
    within = threading.Barrier(2, timeout=0.5)

    def meet(module: nn.Module, args: Any) -> None:
        with suppress(threading.BrokenBarrierError):  # the other one waits for its turn
            within.wait()

    def run(k: int) -> None:
        with torch.no_grad():
            found[k] = call(model, ids + k)

    hook = model.get_decoder().register_forward_pre_hook(meet)
    threads = [threading.Thread(target=run, args=(k,)) for k in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hook.remove()
    assert within.broken, "both were in the middle of a pass"
    torch.testing.assert_close(found, want)
    assert all(module.training for module in model.modules())
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, logits)


@pytest.mark.filterwarnings("ignore")
def test_fsdp1_is_refused(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = FullyShardedDataParallel(build("qwen2"), device_id=torch.device("cpu"))
        with pytest.raises(ValueError, match=r"FSDP1.* use fully_shard \(FSDP2\)"):
            head_hidden_states(model, token_ids())
    finally:
        dist.destroy_process_group()


def test_logits_as_the_first_of_a_tuple() -> None:
    class Pair(LinearLM):
        def forward(self, input_ids: Tensor) -> Any:
            return super().forward(input_ids).logits, torch.zeros(1)

    model = Pair()
    assert lm_head_inputs(model)["lm_head_weight"] is model.lm_head.weight


def test_a_captured_input_is_taken_once() -> None:
    model = build("qwen2")
    with capture_head_input(model) as captured:
        for rows in (2, 1):
            model(input_ids=token_ids()[:rows])
            assert captured.take()[0].shape[0] == rows


def test_the_dtype_of_autocast_is_taken_with_the_input() -> None:
    model = LinearLM()
    for dtype in (None, torch.bfloat16):
        with capture_head_input(model) as captured, torch.autocast("cpu", dtype, enabled=dtype is not None):
            logits = model(token_ids() % 40).logits
        assert captured.take()[1] == dtype
        assert torch.equal(logits, torch.zeros(*token_ids().shape, 1))


def test_the_cache_is_off_in_a_forward_of_any_keywords() -> None:
    class Open(LinearLM):
        def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
            seen.append(kwargs)
            return super().forward(input_ids)

    seen: list[Any] = []
    head_hidden_states(Open(), token_ids() % 40)
    head_hidden_states(Open(), token_ids() % 40, labels=None)
    assert seen == [{"use_cache": False}, {"use_cache": False, "labels": None}]


@pytest.mark.parametrize("value", [True, -1.0, float("inf"), float("nan"), "a formula", None], ids=str)
def test_a_field_without_a_usable_number_is_not_read(value: Any) -> None:
    model = LinearLM()
    model.config = SimpleNamespace(final_logit_softcapping=value, unpadded_vocab_size=value)
    assert candidate_forms(model, 40) == [HeadForm(1.0, None, 40)]


def test_the_text_config_comes_before_the_outer_one() -> None:
    model = LinearLM()
    text = SimpleNamespace(logit_scale=2.0)
    model.config = SimpleNamespace(logit_scale=3.0, final_logit_softcapping=5.0, get_text_config=lambda: text)
    assert candidate_forms(model, 40)[0][:2] == (2.0, 5.0)


@pytest.mark.parametrize("field", ["logits_scaling", "final_logit_softcapping"])
def test_a_field_that_is_0_is_none(field: str) -> None:
    model = build("qwen2")
    setattr(model.config, field, 0.0)
    assert_right(model)
