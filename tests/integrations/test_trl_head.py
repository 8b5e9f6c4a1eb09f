"""`FusedLogProbFunction` in the place of TRL's: its five results, its gradients, and every trainer that uses them."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from integrations.tiny import build
from integrations.trl_runs import build_tokenizer, dataset, reward, save_small_model

from grpo_fused.integrations.trl.release import FUSED_HEAD, RELEASE

if RELEASE < FUSED_HEAD:
    pytest.skip("TRL 1.15 has the fused head", allow_module_level=True)

from trl.kernels import ChunkedLogProbFunction
from trl.trainer import utils

from grpo_fused import engines
from grpo_fused.api import operators
from grpo_fused.integrations.context import holding
from grpo_fused.integrations.trl import (
    FusedGRPOTrainer,
    FusedLogProbFunction,
    head,
    patch_trl,
    unpatch_trl,
    use_fused_head,
)
from grpo_fused.integrations.trl.adapters import adapted, with_adapters
from grpo_fused.integrations.trl.head import check_trl_reads_the_head


@pytest.mark.parametrize("patch", [patch_trl, lambda head: use_fused_head(head).__enter__()], ids=["all", "block"])
def test_another_class_is_refused(patch):
    with pytest.raises(TypeError, match="head must be FusedLogProbFunction or a subclass of it; got <class 'int'>"):
        patch(int)
    assert head.active_head() is None


def test_options_are_checked_before_anything_is_made():
    with pytest.raises(ValueError, match="impl must be one of auto, .*; got 'fast'"):
        FusedGRPOTrainer(impl="fast")
    with pytest.raises(TypeError, match="max_scratch_bytes must be an int; got '1GB'"):
        FusedGRPOTrainer(max_scratch_bytes="1GB")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [(1.0, None, 1.0), (0.7, None, 0.5), (1.3, 5.0, 1.0)], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_five_results(options, with_bias, dtype):
    temperature, softcap, scale = options
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(37, 24, generator=g).to(dtype)
    weight = torch.randn(83, 24, generator=g).to(dtype)
    weight[50] = weight[7]  # a tie: only the first of the two is the top
    hidden[3] = weight[7] * 2
    hidden[4] = weight[7] * 2
    targets = torch.randint(0, 83, (37,), generator=g)
    targets[3], targets[4] = 7, 50
    bias = torch.randn(83, generator=g).to(dtype) if with_bias else None
    if bias is not None:
        bias[50] = bias[7]
    call = (targets, temperature, 16, softcap, scale)
    got = FusedLogProbFunction.apply(hidden, weight, bias, *call)
    wide = [None if x is None else x.double() for x in (hidden, weight, bias)]
    z = wide[0] @ wide[1].T + (0 if bias is None else wide[2])
    z = z * scale
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
    log_p = z.log_softmax(1)
    want = [
        log_p.gather(1, targets.unsqueeze(1)).squeeze(1), -(log_p.exp() * log_p).sum(1),
        (2 * log_p).logsumexp(1), z.mean(1), z.argmax(1) == targets,
    ]  # fmt: skip
    for mine, exact in zip(got[:4], want[:4], strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-5)
    assert torch.equal(got[4], want[4])
    assert got[4][3]
    assert not got[4][4]
    theirs = ChunkedLogProbFunction.apply(hidden, weight, bias, *call)
    assert [x.dtype for x in got] == [x.dtype for x in theirs]
    assert [x.shape for x in got] == [x.shape for x in theirs]
    by_rows = type("ByRows", (FusedLogProbFunction,), {"impl": "chunked", "max_scratch_bytes": 26_000})
    run = by_rows.call(hidden, weight, targets, False).run
    assert (run.engine, run.max_scratch_bytes) == ("chunked", 26_000)
    for part, whole in zip(by_rows.apply(hidden, weight, bias, *call), got, strict=True):
        torch.testing.assert_close(part, whole, rtol=1e-5, atol=1e-5)
    only = FusedLogProbFunction.apply(hidden, weight, bias, *call, ("log_probs", "is_top1"))
    assert [x is None for x in only] == [False, True, True, True, False]


@pytest.mark.parametrize("used", ["logps", "entropies", "both"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_gradients_are_trls(frozen, used, monkeypatch):
    """Through log-probs and entropies, in fp32. A frozen head's log-probs take no product in the backward."""
    g = torch.Generator().manual_seed(1)
    hidden, weight, bias = (
        torch.randn(19, 24, generator=g),
        torch.randn(83, 24, generator=g),
        torch.randn(83, generator=g),
    )
    targets = torch.randint(0, 83, (19,), generator=g)
    a, b = torch.randn(2, 19, generator=g)
    grads = []
    for function in (FusedLogProbFunction, ChunkedLogProbFunction):
        leaves = [x.clone().requires_grad_(x is hidden or not frozen) for x in (hidden, weight, bias)]
        out = function.apply(*leaves, targets, 0.8, 16, 4.0, 1.2, ("entropy",))
        with monkeypatch.context() as patch:
            if frozen and used == "logps":
                patch.delattr(operators, "linear_logprobs_gradient")
            parts = {"logps": [(out[0], a)], "entropies": [(out[1], b)], "both": [(out[0], a), (out[1], b)]}
            torch.stack([(x * factor).sum() for x, factor in parts[used]]).sum().backward()
        grads.append([x.grad for x in leaves])
    for mine, theirs in zip(*grads, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_around_the_scores():
    g = torch.Generator().manual_seed(1)
    hidden, weight = (
        torch.randn(19, 24, generator=g).requires_grad_(),
        torch.randn(83, 24, generator=g).requires_grad_(),
    )

    def score(hidden, weight):
        return FusedLogProbFunction.apply(hidden, weight, None, torch.arange(19), 1.0, 16)[0].sum()

    want = torch.autograd.grad(score(hidden, weight), (hidden, weight))
    again = torch.utils.checkpoint.checkpoint(score, hidden, weight, use_reentrant=False)
    for mine, exact in zip(torch.autograd.grad(again, (hidden, weight)), want, strict=True):
        assert torch.equal(mine, exact)


def test_nothing_is_made_without_a_gradient(monkeypatch):
    hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(30, 8)
    monkeypatch.delattr(type(engines.engine("native")), "fused")
    monkeypatch.delattr(type(engines.engine("chunked")), "fused")
    call = hidden, weight, None, torch.arange(5), 1.0, 16
    with torch.no_grad():
        FusedLogProbFunction.apply(*call)
    with pytest.raises(AttributeError):
        FusedLogProbFunction.apply(*call)


def test_bf16_autocast_is_closer_to_float64_than_trl():
    g = torch.Generator().manual_seed(2)
    hidden = torch.randn(64, 128, generator=g)
    weight = torch.randn(3000, 128, generator=g) * (4.8 / 128**0.5)
    targets = torch.randint(0, 3000, (64,), generator=g)
    exact = (hidden.bfloat16().double() @ weight.bfloat16().double().T).log_softmax(1)
    exact = exact.gather(1, targets.unsqueeze(1)).squeeze(1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mine = FusedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 512, None, 1.0, ())[0]
        theirs = ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 512, None, 1.0, ())[0]
    ours_off, trl_off = ((x.double() - exact).abs().max().item() for x in (mine, theirs))
    assert ours_off < 1e-4
    assert trl_off > 1e-2


def test_statistics_under_autocast_are_of_its_operands():
    g = torch.Generator().manual_seed(3)
    hidden, weight, bias = (torch.randn(size, generator=g) for size in ((9, 24), (83, 24), (83,)))
    z = hidden.bfloat16().double() @ weight.bfloat16().double().T + bias.bfloat16().double()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = FusedLogProbFunction.apply(hidden, weight, bias, torch.arange(9), 1.0, 512)
    torch.testing.assert_close(got[2].double(), (2 * z.log_softmax(1)).logsumexp(1), rtol=0, atol=1e-4)


def test_patch_and_unpatch():
    before = utils._ChunkedLogProbFunction, utils.add_fused_lm_head
    patch_trl()
    patch_trl()
    assert utils._ChunkedLogProbFunction is not before[0]
    unpatch_trl()
    assert (utils._ChunkedLogProbFunction, utils.add_fused_lm_head) == before
    unpatch_trl()
    with use_fused_head():
        assert utils._ChunkedLogProbFunction is not before[0]
    assert (utils._ChunkedLogProbFunction, utils.add_fused_lm_head) == before
    with pytest.raises(ZeroDivisionError), use_fused_head():
        1 / 0  # noqa: B018
    assert (utils._ChunkedLogProbFunction, utils.add_fused_lm_head) == before


def test_a_failed_patch_leaves_nothing(monkeypatch):
    """As where a release that is not known has moved a function."""
    from trl.trainer import distillation_trainer

    before = utils._ChunkedLogProbFunction, utils.add_fused_lm_head
    own = distillation_trainer._chunked_divergence_loss
    monkeypatch.delattr(distillation_trainer, "_chunked_divergence_loss")
    for patch in (patch_trl, use_fused_head().__enter__):
        with pytest.raises(AttributeError):
            patch()
        assert (utils._ChunkedLogProbFunction, utils.add_fused_lm_head) == before
        assert head.active_head() is None
    monkeypatch.setattr(distillation_trainer, "_chunked_divergence_loss", own, raising=False)
    with use_fused_head():
        assert utils._ChunkedLogProbFunction is not before[0]
    assert (utils._ChunkedLogProbFunction, utils.add_fused_lm_head) == before


def check_fused_head_of(model: Any) -> None:
    utils.add_fused_lm_head(model)
    check_trl_reads_the_head(model)


def test_models_whose_head_trl_misreads_are_refused(tmp_path):
    """recurrent_gemma: another name for the softcap. modernbert-decoder: a transform before the head."""
    from transformers import (
        ModernBertDecoderConfig,
        ModernBertDecoderForCausalLM,
        RecurrentGemmaConfig,
        RecurrentGemmaForCausalLM,
    )  # fmt: skip

    torch.manual_seed(0)
    gemma = RecurrentGemmaForCausalLM(
        RecurrentGemmaConfig(
            vocab_size=42, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
            lru_width=32, logits_soft_cap=5.0, attention_window_size=16,
        )
    )  # fmt: skip
    with pytest.raises(
        RuntimeError, match="TRL's fused head takes softcap=None for RecurrentGemma.*, whose own head has 5.0"
    ):
        check_fused_head_of(gemma)
    bert = ModernBertDecoderForCausalLM(
        ModernBertDecoderConfig(
            vocab_size=42, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            pad_token_id=0, bos_token_id=1, eos_token_id=1, cls_token_id=1, sep_token_id=1, max_position_embeddings=64,
        )
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="does something to them before its head"):
        check_fused_head_of(bert)
    with use_fused_head(), pytest.raises(RuntimeError, match="softcap"):
        utils.add_fused_lm_head(gemma)


def test_rows_of_the_head_that_the_model_cuts_off():
    model = build("inkling_text", logits_mup_width_multiplier=1.0)
    with pytest.raises(RuntimeError, match="TRL's fused head takes all 120 rows .* has 101 logits: its log-probs"):
        check_fused_head_of(model)


def test_a_model_that_divides_its_states_where_trl_scales_the_logits():
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "MiniCPM3Config"):
        pytest.skip("transformers has MiniCPM3 since 5.10")
    torch.manual_seed(0)
    config = transformers.MiniCPM3Config(
        vocab_size=42, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=8,
    )  # fmt: skip
    model, ids = transformers.MiniCPM3ForCausalLM(config), torch.arange(5).unsqueeze(0)
    want = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
    with use_fused_head():
        utils.add_fused_lm_head(model)
        got = model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs[0]
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
        model.lm_head.bias = torch.nn.Parameter(torch.randn(42))  # which the states' division does not divide
        with pytest.raises(RuntimeError, match="takes logit_scale=8.0 for MiniCPM3ForCausalLM, whose own head has 1"):
            check_trl_reads_the_head(model)


def test_async_grpo_checks_the_head(tmp_path, monkeypatch):
    """Its model attends by a GPU kernel to rows that the trainer packs, which the check must do without."""
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    folder = save_small_model(tmp_path / "small")
    checked = []

    def check(model: Any) -> None:
        check_trl_reads_the_head(model)
        checked.append(model)
        raise StopIteration  # what follows needs a GPU and a vLLM server

    monkeypatch.setattr(head, "check_trl_reads_the_head", check)
    with use_fused_head(), pytest.raises(StopIteration):
        AsyncGRPOTrainer(
            str(folder), reward, AsyncGRPOConfig(str(tmp_path), use_cpu=True, report_to="none"), dataset(),
            build_tokenizer(),
        )  # fmt: skip
    assert checked[0].config._attn_implementation not in ("eager", "sdpa")


def test_an_adapter_on_the_head_is_trained(tmp_path):
    """TRL passes the weight under it, which is all that its own head multiplies by."""
    peft = pytest.importorskip("peft")
    folder = save_small_model(tmp_path / "small")
    from transformers import Qwen2ForCausalLM

    config = peft.LoraConfig(r=2, target_modules=["lm_head", "q_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(Qwen2ForCausalLM.from_pretrained(folder, tie_word_embeddings=False), config)
    head = model.get_output_embeddings()
    with torch.no_grad():
        head.lora_B["default"].weight.normal_()
    score = FusedLogProbFunction.apply
    hidden, targets = torch.randn(7, head.weight.shape[1], requires_grad=True), torch.arange(7)
    want = head(hidden).log_softmax(-1)
    entropy = -(want.exp() * want).sum(-1)
    with holding(adapted, head):
        got = score(hidden, head.weight, None, targets, 1.0, 16)
    torch.testing.assert_close(got[0], want.gather(1, targets.unsqueeze(1)).squeeze(1), rtol=0, atol=1e-4)
    torch.testing.assert_close(got[1], entropy, rtol=0, atol=1e-4)
    torch.testing.assert_close(got[4].bool(), want.argmax(-1) == targets)
    leaves = [hidden, head.lora_A["default"].weight, head.lora_B["default"].weight]
    wanted = want.gather(1, targets.unsqueeze(1)).sum()
    for x, y in zip(torch.autograd.grad(got[0].sum(), leaves), torch.autograd.grad(wanted, leaves), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)
    with model.disable_adapter(), holding(adapted, head):
        base = score(hidden, head.weight, None, targets, 1.0, 16)[0]
        torch.testing.assert_close(
            base, head(hidden).log_softmax(-1).gather(1, targets.unsqueeze(1)).squeeze(1), rtol=0, atol=1e-4
        )
    assert (base - got[0]).abs().max() > 0.05


def test_adapters_are_those_of_the_head_in_use(tmp_path):
    """One that was unloaded has none, and a weight that is trained too is refused."""
    peft = pytest.importorskip("peft")
    from transformers import Qwen2ForCausalLM

    config = peft.LoraConfig(r=4, target_modules=["lm_head"])
    model = peft.get_peft_model(Qwen2ForCausalLM.from_pretrained(save_small_model(tmp_path / "small")), config)
    head = model.get_output_embeddings()
    torch.nn.init.normal_(head.lora_B["default"].weight)
    weight, ids = head.weight, torch.arange(4).unsqueeze(0)
    with use_fused_head():
        utils.add_fused_lm_head(model.get_base_model())
        copied = copy.deepcopy(model)
        torch.nn.init.zeros_(copied.get_output_embeddings().lora_B["default"].weight)

        def score(model):
            return model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs[0]

        want = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
        torch.testing.assert_close(score(model), want, rtol=0, atol=1e-4)
        plain = model.unload()
        assert plain.lm_head.weight is weight
        torch.testing.assert_close(score(plain), score(copied), rtol=0, atol=1e-5)
    assert with_adapters(None) == (None, ())
    weight.requires_grad_(True)
    with (
        holding(adapted, head),
        pytest.raises(ValueError, match="lm_head_weight must be frozen beside lm_head_adapter"),
    ):
        FusedLogProbFunction.apply(torch.randn(3, weight.shape[1]), weight, None, torch.arange(3), 1.0, 16)


def test_trls_own_head_leaves_no_adapter_out(tmp_path):
    """A trainer that was made with our head is told, where it scores without."""
    peft = pytest.importorskip("peft")
    from transformers import Qwen2ForCausalLM

    config = peft.LoraConfig(r=4, target_modules=["lm_head"])
    model = peft.get_peft_model(Qwen2ForCausalLM.from_pretrained(save_small_model(tmp_path / "small")), config)
    ids = torch.arange(4).unsqueeze(0)
    with use_fused_head():
        utils.add_fused_lm_head(model.get_base_model())
    model(ids)  # as in `generate`
    with pytest.raises(RuntimeError, match="which TRL's own head leaves out: patch_trl"):
        model(input_ids=ids, labels=ids, fused_lm_head=True)
    with model.disable_adapter():
        model(input_ids=ids, labels=ids, fused_lm_head=True)


def test_a_compiled_model_is_compiled_once(tmp_path):
    """`FusedGRPOTrainer` enters a block for each batch."""
    from torch._dynamo.testing import CompileCounter
    from transformers import Qwen2ForCausalLM

    model, ids = Qwen2ForCausalLM.from_pretrained(save_small_model(tmp_path / "small")), torch.arange(8).view(2, 4)
    with use_fused_head():
        utils.add_fused_lm_head(model)
    counter = CompileCounter()
    compiled, counts = torch.compile(model, backend=counter), []
    for _ in range(2):
        with use_fused_head():
            compiled(input_ids=ids, labels=ids, fused_lm_head=True)
        counts.append(counter.frame_count)
    assert counts[0] == counts[-1] > 0


def test_a_thread_without_a_block_keeps_what_is_trls(tmp_path, monkeypatch):
    """It shares the modules with a thread that has one."""
    from transformers import Qwen2ForCausalLM
    from trl.trainer import distillation_trainer

    model, called = Qwen2ForCausalLM.from_pretrained(save_small_model(tmp_path / "small")), []
    monkeypatch.setattr(head, "check_trl_reads_the_head", called.append)
    monkeypatch.setattr(head, "fused_divergence_loss", lambda *args, **_: called.append(args) or (args[0].sum(),))
    states, weight = torch.randn(1, 3, 4), torch.randn(5, 4)

    def use() -> None:
        utils.add_fused_lm_head(model)
        distillation_trainer._chunked_divergence_loss(states, states, weight, weight, torch.ones(1, 3), 0.5)

    with use_fused_head(), ThreadPoolExecutor(1) as pool:
        pool.submit(use).result()
        assert not called
        use()
        assert len(called) == 2


def test_threads_and_nested_blocks_keep_their_own_head():
    import threading

    before = utils._ChunkedLogProbFunction
    seen: dict[str, str] = {}
    arguments = (torch.randn(3, 4), torch.randn(5, 4), None, torch.tensor([0, 1, 2]), 1.0, 16, None, 1.0, ())
    started, go_on = threading.Event(), threading.Event()

    def named(name: str) -> type[FusedLogProbFunction]:
        class Named(FusedLogProbFunction):
            @classmethod
            def apply(cls, *args: Any) -> Any:
                seen[threading.current_thread().name] = name
                return super().apply(*args)

        return Named

    def other() -> None:
        with use_fused_head(named("other")):
            started.set()
            go_on.wait()
            utils._ChunkedLogProbFunction.apply(*arguments)

    thread = threading.Thread(target=other, name="second")
    patch_trl(named("first"))
    patch_trl(named("patched"))
    with use_fused_head(named("block")):
        thread.start()
        started.wait()
        utils._ChunkedLogProbFunction.apply(*arguments)
        assert seen["MainThread"] == "block"
    utils._ChunkedLogProbFunction.apply(*arguments)
    assert seen["MainThread"] == "patched"
    unpatch_trl()
    utils._ChunkedLogProbFunction.apply(*arguments)  # TRL's own here, ours still in the other thread's block
    assert seen["MainThread"] == "patched"
    go_on.set()
    thread.join()
    assert seen["second"] == "other"
    assert utils._ChunkedLogProbFunction is before
