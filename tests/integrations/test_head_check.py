"""The self-check: it refuses heads that are not linear, can fail, runs once, and does not change the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

pytest.importorskip("transformers")
from integrations.tiny import LinearLM, build, sharpen
from transformers import (
    ChameleonConfig,
    ChameleonForConditionalGeneration,
    Qwen2ForCausalLM,
    Qwen2Model,
    T5Config,
    T5ForConditionalGeneration,
)

from grpo_fused import (
    LogprobOutput,
    capture_head_input,
    check_head,
    fused_linear_logprobs,
    head_hidden_states,
    lm_head_inputs,
)
from grpo_fused.heads import check
from grpo_fused.heads.check import ordinary_tokens

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers renames checkpointing


def scaled(z: Tensor) -> Tensor:
    return z * 1.001


def capped(z: Tensor) -> Tensor:
    return 50.0 * torch.tanh(z / 50.0)


def masked(z: Tensor) -> Tensor:
    z[..., 7] = torch.finfo(z.dtype).min
    return z


def biased(z: Tensor) -> Tensor:
    return z + torch.linspace(0, 0.01, z.shape[-1])


def permuted(z: Tensor) -> Tensor:
    return z.roll(1, -1)


def truncated(z: Tensor) -> Tensor:
    return z[..., :-3]


def widened(z: Tensor) -> Tensor:
    return torch.cat([z, z[..., :1]], -1)


def rounded(z: Tensor) -> Tensor:
    return z.bfloat16()


def broken(z: Tensor) -> Tensor:
    return z * float("nan")


TRANSFORMS = {
    scaled: "to 1.001 times",
    capped: "falling: a softcap",
    masked: r"nats, most at token 7\. ",
    biased: "log-probs differ by",
    permuted: "log-probs differ by",
    truncated: r"logits of shape \(8, 117\), expected \(8, 120\)",
    widened: r"logits of shape \(8, 121\), expected \(8, 120\)",
    rounded: r"its logits \(torch.bfloat16\) are",
    broken: "log-probs differ by nan nats",
}


class Undeclared(Qwen2ForCausalLM):
    """Transforms its logits in a way that its config does not name."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = self.transform(out.logits)
        return out


def test_few_checked_states_of_a_head_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may register a hook for each step."""
    monkeypatch.setattr(check, "KEPT_FORMS", 2)
    model = build("qwen2")
    for _ in range(4):
        hook = model.lm_head.register_forward_hook(lambda *_: None)
        lm_head_inputs(model)
        hook.remove()
    assert len(check._verified[model]) == 2


@pytest.mark.parametrize("sharp", [True, False], ids=["sharp", "as-initialised"])
@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda transform: transform.__name__)
def test_an_undeclared_transform_is_refused(transform: Any, sharp: bool) -> None:
    """On a freshly initialised model too, whose logits are too small to show a cap of 50."""
    torch.manual_seed(0)
    model = Undeclared(build("qwen2").config).eval()
    model.transform = lambda z: z
    if sharp:
        sharpen(model)
    check_head(model, cached=False)
    model.transform = transform
    with pytest.raises(ValueError, match=TRANSFORMS[transform]) as caught:
        check_head(model, cached=False)
    assert "Undeclared" in str(caught.value)
    assert "logit_scale=1, softcap=None, vocab_size=120 (no field of the config)" in str(caught.value)
    assert lm_head_inputs(model, check=False)["logit_scale"] == 1.0  # without the check the config is trusted


def test_the_message_names_fields_and_values() -> None:
    model = build("gemma2")
    answer, model.config.final_logit_softcapping = model.forward, 20.0
    model.forward = lambda *a, **k: _with_logits(answer(*a, **k), lambda z: z * 3)
    with pytest.raises(
        ValueError, match=r"config.final_logit_softcapping=20 caps.*at most (59.9|60).*1 other meanings"
    ):
        check_head(model)


def _with_logits(out: Any, change: Any) -> Any:
    out.logits = change(out.logits)
    return out


def test_a_head_module_that_computes_something_else_is_refused() -> None:
    class Doubling(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = LinearLM()
    model.lm_head = Doubling(16, 40, bias=False)
    with pytest.raises(ValueError, match="log-probs differ by .* 2 to 2 times h W"):
        lm_head_inputs(model)


def test_a_head_that_has_its_weight_twice_is_run_in_fp32() -> None:
    """Under both names: in bf16 one of them would multiply states of fp32."""

    class Shared(nn.Linear):
        def __init__(self) -> None:
            super().__init__(16, 40, bias=False)
            self.inner = nn.Linear(16, 40, bias=False)
            self.inner.weight = self.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    model = LinearLM()
    model.lm_head = Shared()
    assert check_head(model.bfloat16()).logit_scale == 1.0


def test_a_head_that_is_called_with_more_than_the_states_is_refused() -> None:
    class Told(LinearLM):
        def forward(self, input_ids: Tensor) -> Any:
            return SimpleNamespace(logits=self.lm_head(self.table(input_ids), scale=2.0))

    with pytest.raises(RuntimeError, match="must call its head with the hidden states alone; got 2 arguments"):
        lm_head_inputs(Told())


def test_a_head_outside_of_the_model_is_refused() -> None:
    class Elsewhere(LinearLM):
        def get_output_embeddings(self) -> nn.Module:
            return nn.Linear(16, 40)

    with pytest.raises(RuntimeError, match="the output head of Elsewhere must be one of its modules; it is not"):
        lm_head_inputs(Elsewhere())


def test_directions_that_no_state_takes_are_checked_too() -> None:
    """Half of the rows are random: eight tokens span only a small part of the state space."""

    class Crooked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 5 * x[..., :1] * torch.linspace(0, 1, 40)

    model = LinearLM()
    model.lm_head = Crooked(16, 40, bias=False)
    with torch.no_grad():
        model.table.weight[:, 0] = 0.0
    with pytest.raises(ValueError, match="log-probs differ by"):
        lm_head_inputs(model)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_states_without_information_are_replaced(value: float) -> None:
    model = LinearLM()
    torch.nn.init.constant_(model.table.weight, value)
    assert check_head(model).logit_scale == 1.0
    model.lm_head.register_forward_hook(lambda module, args, output: 2 * output)
    with pytest.raises(ValueError, match=r"are 2 to 2 times h W\^T"):  # of all rows
        check_head(model)


def test_a_head_of_zeros_is_not_scaled() -> None:
    model = LinearLM()
    torch.nn.init.zeros_(model.lm_head.weight)
    assert check_head(model).logit_scale == 1.0


def test_the_fused_function_itself_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(*args: Any, **kwargs: Any) -> LogprobOutput:
        out = fused_linear_logprobs(*args, **kwargs)
        return out._replace(logps=out.logps - 1e-3)

    monkeypatch.setattr("grpo_fused.heads.check.fused_linear_logprobs", off)
    with pytest.raises(ValueError, match=r"fused log-probs differ .* by 0\.001"):
        check_head(LinearLM())


def test_a_field_that_the_model_does_not_read_is_not_used() -> None:
    model = build("qwen2")
    model.config.final_logit_softcapping = 5.0
    model.config.logit_scale = 0.1
    assert lm_head_inputs(model)["softcap"] is None
    assert lm_head_inputs(model)["logit_scale"] == 1.0


@pytest.mark.parametrize("field", ["image_token_id", "image_token_index"])
def test_the_check_runs_without_tokens_that_the_config_names(field: str) -> None:
    seen: list[Tensor] = []
    for special in (None, 13):
        model = build("qwen2")
        setattr(model.config, field, special)
        model.get_input_embeddings().register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        check_head(model)
    assert [13 in ids for ids in seen] == [True, False]


def test_all_tokens_but_the_special_ones_may_be_taken() -> None:
    """Of a config that names the first 70."""
    model = LinearLM()
    model.config = SimpleNamespace(**{f"image_{i}_token_id": i for i in range(70)})
    assert ordinary_tokens(model, 1000) == list(range(70, 134))
    assert ordinary_tokens(model, 70) == [0]


def test_what_the_linear_form_cannot_express_is_refused() -> None:
    vq = {"embed_dim": 8, "num_embeddings": 4, "latent_channels": 8, "resolution": 8, "base_channels": 32,
          "channel_multiplier": [1], "num_res_blocks": 1, "attn_resolutions": []}  # fmt: skip
    vocabulary = {"<image>": 9, **{f"IMGIMG{c}Z": 10 + i for i, c in enumerate("ABCD")}}
    config = ChameleonConfig(vocab_size=120, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                             num_attention_heads=4, num_key_value_heads=2, vq_config=vq, vocabulary_map=vocabulary,
                             pad_token_id=0)  # fmt: skip
    with pytest.raises(ValueError, match="log-probs differ by .* most at token 1[0-3]"):
        lm_head_inputs(ChameleonForConditionalGeneration(config))
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4))
    with pytest.raises(ValueError, match="encoder-decoder"):
        lm_head_inputs(t5)
    with pytest.raises(TypeError, match="one output head"):
        lm_head_inputs(Qwen2Model(build("qwen2").config))
    several = LinearLM()
    several.lm_head = nn.ModuleList([several.lm_head])
    with pytest.raises(TypeError, match="one output head .* LinearLM gives ModuleList"):
        lm_head_inputs(several)


class Packed(nn.Parameter):
    """As in quantisation libraries: a subclass that reports a floating-point dtype."""


def test_weights_that_are_not_plain_are_refused() -> None:
    model = LinearLM()
    weight = model.lm_head.weight
    for bad, error, match in (
        (nn.Parameter(weight.to(torch.int8), requires_grad=False), TypeError, "quantised or packed"),
        (nn.Parameter(weight.to(torch.float8_e4m3fn), requires_grad=False), TypeError, "float8"),
        (weight.detach().as_subclass(Packed), TypeError, "Packed"),
        (nn.Parameter(torch.empty(0)), ValueError, r"shape \(0,\) on cpu: gather a sharded one"),
        (nn.Parameter(torch.empty(0, 16)), ValueError, r"shape \(0, 16\) on cpu: gather a sharded one"),
        (nn.Parameter(weight.flatten()), ValueError, r"must have a weight \[V, H\].*gather a sharded one"),
        (nn.Parameter(weight.to("meta")), ValueError, "on meta: .*load an offloaded one"),
    ):
        model.lm_head.weight = bad
        with pytest.raises(error, match=match):
            lm_head_inputs(model)


def test_a_bias_of_another_size_is_refused() -> None:
    model = LinearLM()
    model.lm_head.bias = nn.Parameter(torch.zeros(41))
    with pytest.raises(ValueError, match=r"the bias of an lm head must be \[40\]; got shape \(41,\)"):
        lm_head_inputs(model, check=False)


def test_an_unknown_adapter_is_refused_even_while_it_is_zero() -> None:
    model = LinearLM()
    model.lm_head.lora_B = nn.Parameter(torch.zeros(40, 2))
    with pytest.raises(ValueError, match="also has lora_B"):
        lm_head_inputs(model)


def test_the_forward_of_the_check_is_eager_and_in_ieee_fp32() -> None:
    compiled, precisions = CompileCounter(), []

    class Compiled(LinearLM):
        def forward(self, input_ids: Tensor) -> Any:
            precisions.append(torch.get_float32_matmul_precision())
            return SimpleNamespace(logits=self.lm_head(states(self.table(input_ids))))

    states = torch.compile(lambda x: x + 1, backend=compiled)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        check_head(Compiled())
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert (compiled.frame_count, precisions) == (0, ["highest"])


def test_a_check_that_draws_leaves_the_random_state() -> None:
    class Noisy(LinearLM):
        def forward(self, input_ids: Tensor) -> Any:
            torch.rand(1)
            return super().forward(input_ids)

    model, before = Noisy(), torch.get_rng_state()
    check_head(model)
    assert torch.equal(torch.get_rng_state(), before)


class Snapshot:
    """All state of a model that the check must not change."""

    def __init__(self, model: nn.Module) -> None:
        self.modes = [m.training for m in model.modules()]
        self.parameters = [(n, id(p), p.detach().clone()) for n, p in model.named_parameters()]
        self.buffers = [(n, id(b), b.clone()) for n, b in model.named_buffers()]
        self.hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), "forward" in vars(m)) for m in model.modules()]
        self.random = torch.get_rng_state()

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Snapshot)
        pairs = zip(self.parameters + self.buffers, other.parameters + other.buffers, strict=True)
        return (
            (self.modes, self.hooks) == (other.modes, other.hooks)
            and all(a[:2] == b[:2] and torch.equal(a[2], b[2]) for a, b in pairs)
            and torch.equal(self.random, other.random)
        )


@pytest.mark.parametrize("way_out", ["passes", "refuses", "raises"])
def test_the_model_is_not_changed(way_out: str) -> None:
    torch.manual_seed(0)
    model = Undeclared(build("qwen2", attention_dropout=0.5).config).bfloat16().train()
    model.model.layers[0].eval()
    model.gradient_checkpointing_enable()
    model.transform = {"passes": lambda z: z, "refuses": lambda z: z * 2, "raises": lambda z: z.no_such}[way_out]
    before = Snapshot(model)
    with torch.enable_grad():
        if way_out == "passes":
            check_head(model)
        else:
            with pytest.raises(ValueError if way_out == "refuses" else RuntimeError):
                check_head(model)
        assert torch.is_grad_enabled()
    assert Snapshot(model) == before
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(ZeroDivisionError), capture_head_input(model):
        raise ZeroDivisionError
    assert Snapshot(model) == before


def test_statistics_of_training_are_not_touched() -> None:
    class Normalised(LinearLM):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(16)

        def forward(self, input_ids: Tensor) -> Any:
            self.norm(self.table(input_ids).flatten(0, 1))
            return super().forward(input_ids)

    model = Normalised().train()
    before = Snapshot(model)
    check_head(model)
    assert Snapshot(model) == before


def test_the_check_runs_once() -> None:
    model = LinearLM()
    model.config = SimpleNamespace(final_logit_softcapping=None)
    lm_head_inputs(model)
    lm_head_inputs(model)
    assert model.calls == 1
    model.config.final_logit_softcapping = 9.0  # another config: two meanings to check
    lm_head_inputs(model)
    assert model.calls == 3
    model.lm_head = nn.Linear(16, 40)
    assert lm_head_inputs(model)["lm_head_bias"] is model.lm_head.bias
    assert model.calls == 5
    with torch.device("meta"):  # the device of new tensors, not of the model
        check_head(model, cached=False)
    assert model.calls == 7
    model.lm_head.weight.data = model.lm_head.weight.data.bfloat16()
    lm_head_inputs(model)
    assert model.calls == 9
    lm_head_inputs(LinearLM(), check=False)


def test_a_model_that_needs_other_inputs() -> None:
    class Spoken(LinearLM):
        def forward(self, input_ids: Tensor, language: int | None = None) -> Any:
            if language is None:
                raise ValueError("unknown language")
            return super().forward(input_ids)

    model = Spoken()
    with pytest.raises(RuntimeError, match=r"must run on input_ids .* ValueError: unknown language.*inputs=\.\.\."):
        lm_head_inputs(model)
    check_head(model, inputs={"input_ids": torch.arange(11)[None], "language": 1})
    assert lm_head_inputs(model)["lm_head_weight"] is model.lm_head.weight


def test_a_head_that_is_not_called_once_is_refused() -> None:
    class Direct(LinearLM):
        def forward(self, input_ids: Tensor) -> Any:
            return SimpleNamespace(logits=self.table(input_ids) @ self.lm_head.weight.T)

    class Twice(LinearLM):
        def forward(self, input_ids: Tensor) -> Any:
            self.lm_head(self.table(input_ids))
            return super().forward(input_ids)

    for model, times in ((Direct(), 0), (Twice(), 2)):
        with pytest.raises(RuntimeError, match=f"called {times} times"):
            lm_head_inputs(model)
        with pytest.raises(RuntimeError, match=f"called {times} times"):
            head_hidden_states(model, torch.tensor([[1, 2]]))
