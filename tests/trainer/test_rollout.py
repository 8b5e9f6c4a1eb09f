"""Rollouts: padding, the end of completions, the states that predict them, micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from trainer.small_trainer import scores_of
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    PreTrainedTokenizerFast,
    Qwen2ForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
    xLSTMConfig,
    xLSTMForCausalLM,
)

from grpo_fused import CandidateSets, head_hidden_states, lm_head_inputs
from grpo_fused.rollouts.engine import check_room, first_of_prompts, length_mask, pad_prompts
from grpo_fused.rollouts.errors import DivergedError, PromptError
from grpo_fused.rollouts.huggingface import _Ends, layer_kinds
from grpo_fused.rollouts.records import RecordedSets, ScoredSets
from grpo_fused.rollouts.sampling import BLOCK, draw
from grpo_fused.trainer import (
    Generation,
    GRPOTrainer,
    GRPOTrainerConfig,
    HuggingFaceEngine,
    Policy,
    Rollout,
    Sampling,
    roll_out,
)
from grpo_fused.trainer import policy as policies
from grpo_fused.trainer.policy import add_rows
from grpo_fused.trainer.rollout import ending_token_ids, micro_batches

EOS = 1


def test_an_engine_must_return_the_sets_of_a_truncation() -> None:
    class Ignores:
        def generate(self, prompts: Any, sampling: Sampling) -> Generation:
            return Generation.of_lists([[3]] * len(prompts), None, 0)

        def sync_weights(self, model: Any) -> None: ...

    options: dict[str, Any] = {"num_generations": 1, "max_completion_length": 3}
    assert roll_out(Ignores(), [[3], [4]], Sampling(**options)).candidates is None
    assert roll_out(Ignores(), [[3]], Sampling(**options, top_p=0.9, greedy=True)).candidates is None
    for truncation in ({"top_p": 0.9}, {"top_k": 2}, {"min_p": 0.1}):
        with pytest.raises(ValueError, match="must return the candidate sets of top_p, top_k or min_p, .*; got none"):
            roll_out(Ignores(), [[3]], Sampling(**options, **truncation))  # type: ignore[arg-type]


def sampling(tokenizer: PreTrainedTokenizerFast, **options: Any) -> Sampling:
    defaults = {"num_generations": 1, "max_completion_length": 6, "eos_token_ids": (EOS,)}
    return Sampling(**(defaults | {"pad_token_id": tokenizer.pad_token_id} | options))


def sampled(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    texts: list[str],
    batch_size: int | None = None,
    **options: Any,
) -> Rollout:
    prompts = [tokenizer(text).input_ids for text in texts]
    torch.manual_seed(0)
    engine = HuggingFaceEngine(model, tokenizer, batch_size=batch_size)
    return roll_out(engine, prompts, sampling(tokenizer, **options))


def bias_towards(model: Qwen2ForCausalLM, token: int, bias: float = 3.0) -> None:
    """Makes a token likely, so that lengths differ."""
    values = torch.zeros(model.config.vocab_size)
    values[token] = bias
    model.lm_head.bias = torch.nn.Parameter(values)


@pytest.mark.parametrize("pad_is_eos", [False, True], ids=["own-pad", "pad-is-eos"])
def test_sampled_masks(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, pad_is_eos: bool) -> None:
    pad = {"pad_token_id": EOS} if pad_is_eos else {}
    bias_towards(model, EOS)
    rollout = sampled(model, tokenizer, ["1+2=", "123+34="], num_generations=16, **pad)
    lengths = rollout.completion_mask.sum(1)
    assert {1, rollout.completion_ids.shape[1]} <= set(lengths.tolist())  # both ends occur
    for ids, length in zip(rollout.completions(), lengths.tolist(), strict=True):
        assert len(ids) == length
        assert EOS not in ids[:-1]
        assert ids[-1] == EOS or length == 6


def test_any_token_of_the_list_ends(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    other = tokenizer.convert_tokens_to_ids("7")
    bias_towards(model, other)
    rollout = sampled(model, tokenizer, ["1+2="], num_generations=16, eos_token_ids=(EOS, other))
    assert {ids[-1] for ids in rollout.completions() if len(ids) < 6} >= {other}
    assert all(other not in ids[:-1] for ids in rollout.completions())


@pytest.mark.parametrize("pad_is_eos", [False, True], ids=["own-pad", "pad-is-eos"])
def test_a_stop_string_ends_without_an_eos(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, pad_is_eos: bool
) -> None:
    """The padding of `generate` after it is not part of the completion, also if it is an EOS."""
    pad = {"pad_token_id": EOS} if pad_is_eos else {}
    bias_towards(model, tokenizer.convert_tokens_to_ids("7"), 6.0)
    rollout = sampled(
        model, tokenizer, ["17+2=", "177="], num_generations=16, temperature=3.0, stop_strings=("77",), **pad
    )
    texts = [tokenizer.decode(ids) for ids in rollout.completions()]
    stopped = [text for text in texts if text.endswith("77")]
    assert any(len(text) < 6 for text in stopped)
    assert all("77" not in text[:-1] for text in texts)  # nor does the prompt's own 77 end anything


def test_a_stop_string_is_not_begun_by_the_prompt(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    bias_towards(model, tokenizer.convert_tokens_to_ids("7"), 50.0)
    rollout = sampled(model, tokenizer, ["1+7", "77"], greedy=True, stop_strings=("77",))
    assert [tokenizer.decode(ids) for ids in rollout.completions()] == ["77", "77"]


def test_a_stop_string_may_begin_with_a_space_that_decoding_leaves_out() -> None:
    """SentencePiece drops the space of the first token: one token more than the stop string can have is decoded."""
    tokenizer: Any = SimpleNamespace(
        batch_decode=lambda rows: ["".join(" 7x"[i] for i in row).lstrip() for row in rows]
    )
    prompt = torch.zeros(1, 2, dtype=torch.int64)
    ends = _Ends(Sampling(num_generations=1, max_completion_length=9, stop_strings=(" 77",)), tokenizer, prompt)
    completion = torch.tensor([[2, 2, 2, 0, 1, 1]])
    done = [bool(ends(torch.cat([prompt, completion[:, :length]], 1), None)) for length in range(1, 7)]
    assert done == [False] * 5 + [True]
    assert ends.lengths.tolist() == [6]


def test_a_stop_string_may_take_a_token_for_each_of_its_bytes() -> None:
    tokenizer: Any = SimpleNamespace(batch_decode=lambda rows: [bytes(row).decode(errors="replace") for row in rows])
    prompt = torch.zeros(1, 2, dtype=torch.int64)
    ends = _Ends(
        Sampling(num_generations=1, max_completion_length=9, stop_strings=("\u65e5\u672c",)), tokenizer, prompt
    )
    completion = torch.tensor([list("x\u65e5\u672c".encode())])
    done = [bool(ends(torch.cat([prompt, completion[:, :length]], 1), None)) for length in range(1, 8)]
    assert done == [False] * 6 + [True]


def test_an_eos_ends_a_completion_also_with_stop_strings() -> None:
    tokenizer: Any = SimpleNamespace(batch_decode=lambda rows: [""] * len(rows))
    sampling = Sampling(num_generations=1, max_completion_length=9, stop_strings=("x",), eos_token_ids=(EOS,))
    ends = _Ends(sampling, tokenizer, torch.zeros(2, 1, dtype=torch.int64))
    assert ends(torch.tensor([[0, EOS], [0, 2]]), None).tolist() == [True, False]
    assert ends.lengths[0] == 1


def test_only_rows_that_run_are_searched_for_a_stop_string() -> None:
    decoded: list[list[list[int]]] = []

    def batch_decode(rows: torch.Tensor) -> list[str]:
        decoded.append(rows.tolist())
        return ["x" if 3 in row else "" for row in rows.tolist()]

    sampling = Sampling(num_generations=1, max_completion_length=9, stop_strings=("x",))
    ends = _Ends(sampling, SimpleNamespace(batch_decode=batch_decode), torch.zeros(3, 1, dtype=torch.int64))  # type: ignore[arg-type]
    assert ends(torch.tensor([[0, 1], [0, 3], [0, 1]]), None).tolist() == [False, True, False]
    assert ends(torch.tensor([[0, 1, 2], [0, 3, 9], [0, 1, 3]]), None).tolist() == [False, False, True]
    assert ends(torch.tensor([[0, 1, 2, 3], [0, 3, 9, 9], [0, 1, 3, 9]]), None).tolist() == [True, False, False]
    assert ends(torch.zeros(3, 5, dtype=torch.int64), None).tolist() == [False] * 3  # other processes go on
    assert ends.lengths.tolist() == [3, 1, 2]
    assert decoded == [[[1], [3], [1]], [[1, 2], [1, 3]], [[2, 3]], []]


def test_a_model_in_training_mode_samples_without_dropout_and_stays_in_it(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    options = {"num_generations": 8, "max_completion_length": 8}
    want = sampled(model, tokenizer, ["12+3="], **options).completions()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.9
    model.train()
    model.lm_head.eval()  # a part may be in another mode
    modes = [module.training for module in model.modules()]
    assert sampled(model, tokenizer, ["12+3="], **options).completions() == want
    assert [module.training for module in model.modules()] == modes


def test_sampling_keeps_no_graph_and_no_logits_of_a_prompt(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    seen: list[tuple[bool, int]] = []
    model.lm_head.register_forward_hook(lambda _m, args, out: seen.append((out.requires_grad, args[0].shape[1])))
    sampled(model, tokenizer, ["12+3=", "1+2="], num_generations=2)
    assert len(seen) > 2
    assert set(seen) == {(False, 1)}


def test_batches_of_generate_are_concatenated(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    bias_towards(model, EOS)
    rollout = sampled(model, tokenizer, ["1+2=", "123+34=", "7="], batch_size=4, num_generations=3, greedy=True)
    alone = [sampled(model, tokenizer, [text], num_generations=3, greedy=True) for text in ("1+2=", "123+34=", "7=")]
    assert rollout.completions() == [ids for one in alone for ids in one.completions()]


def test_prompts_are_padded_left_in_contiguous_groups(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.padding_side = "right"  # the trainer must not depend on it
    rollout = sampled(model, tokenizer, ["1+2=", "123+34="], num_generations=2, max_completion_length=3)
    short, long = tokenizer("1+2=").input_ids, tokenizer("123+34=").input_ids
    padded = [tokenizer.pad_token_id] * (len(long) - len(short)) + short
    assert rollout.prompt_ids.tolist() == [padded, padded, long, long]
    assert rollout.prompt_mask.sum(1).tolist() == [len(short)] * 2 + [len(long)] * 2
    assert rollout.prompt_mask[:, -1].all()


def test_the_models_own_generation_config_is_not_used(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Instruct models come with a top_p of 0.8 and a repetition penalty of 1.05: `generate` would take them silently."""
    plain = sampled(model, tokenizer, ["12+3="], num_generations=32)
    model.generation_config = GenerationConfig(
        top_k=1, top_p=0.1, repetition_penalty=3.0, temperature=0.1, suppress_tokens=[3, 4, 5, 6, 7], min_new_tokens=6
    )
    before = model.generation_config
    again = sampled(model, tokenizer, ["12+3="], num_generations=32)
    assert again.completions() == plain.completions()
    assert model.generation_config is before


def test_the_model_under_an_adapter_keeps_its_generation_config(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    """peft's `generate` sets it; merged, the model would end at no token."""
    from peft import LoraConfig, get_peft_model

    before = model.generation_config
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    sampled(adapted, tokenizer, ["12+3="])
    assert model.generation_config is before
    assert "generation_config" not in vars(adapted)


@pytest.mark.parametrize(
    "options",
    [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-4}],
    ids=["top-k", "top-p", "min-p", "temperature"],
)
def test_sampling_options_arrive(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, options: dict[str, float]
) -> None:
    """Each of these leaves only the most likely token."""
    greedy = sampled(model, tokenizer, ["12+3="], greedy=True).completions()
    assert sampled(model, tokenizer, ["12+3="], num_generations=4, **options).completions() == greedy * 4
    assert sampled(model, tokenizer, ["12+3="], num_generations=4).completions() != greedy * 4


def test_a_repetition_penalty_arrives(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    bias_towards(model, tokenizer.convert_tokens_to_ids("7"), 20.0)
    (plain,) = sampled(model, tokenizer, ["12+3="], greedy=True).completions()
    (other,) = sampled(model, tokenizer, ["12+3="], greedy=True, repetition_penalty=1e4).completions()
    assert len(set(plain)) < len(plain)
    assert len(set(other)) == len(other)


def test_one_autocast_is_around_all_batches(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    seen: list[str] = []

    @contextmanager
    def autocast() -> Iterator[None]:
        seen.append("begin")
        yield
        seen.append("end")

    model.register_forward_pre_hook(lambda module, args: seen.append("pass"))
    engine = HuggingFaceEngine(model, tokenizer, batch_size=1, autocast=autocast)
    engine.generate([[3], [4]], sampling(tokenizer, max_completion_length=1))
    assert seen == ["begin", "pass", "pass", "end"]


def test_completions_without_tokens_have_a_column_of_padding() -> None:
    generation = Generation.of_lists([[], []], [[], []], 7)
    assert (generation.ids.tolist(), generation.mask.tolist()) == ([[7], [7]], [[False], [False]])
    assert generation.sampling_logps is not None
    assert generation.sampling_logps.tolist() == [[0.0], [0.0]]


def test_a_prompt_and_its_completion_may_fill_the_context() -> None:
    check_room(3, 5, 8, "")
    with pytest.raises(PromptError, match="at most 7 tokens of a test; got a prompt of 3 and max_completion_length 5"):
        check_room(3, 5, 7, " of a test")


def test_the_eos_tokens_of_a_model(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    model.generation_config = GenerationConfig(eos_token_id=[5, EOS])
    assert ending_token_ids(model, tokenizer) == (EOS, 5)
    tokenizer.eos_token = None
    assert ending_token_ids(model, tokenizer) == (5, EOS)
    model.generation_config = GenerationConfig()
    with pytest.raises(ValueError, match="needs an EOS token"):
        ending_token_ids(model, tokenizer)


@pytest.mark.parametrize("size", [1, 5, BLOCK, BLOCK + 1, 1000])
def test_draws_have_their_probabilities(size: int) -> None:
    """Chi-square of 100,000 draws, within 6 sigma; 30 % of the tokens are impossible."""
    torch.manual_seed(0)
    p = torch.randn(size).mul(2).softmax(0)
    p[torch.rand(size) < 0.3] = 0.0
    p[-1] = p[-1] if p.count_nonzero() else 1.0
    counts = draw(p.expand(100_000, size)).bincount(minlength=size).double()
    assert len(counts) == size
    assert not counts[p == 0].any()
    expected = 1e5 * p.double() / p.double().sum()
    often = expected > 5
    chi_square = ((counts - expected)[often].square() / expected[often]).sum()
    freedom = max(int(often.sum()) - 1, 1)
    assert chi_square < freedom + 6 * (2 * freedom) ** 0.5


def test_a_draw_is_never_impossible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the random number is at an end of its range, or a sum is rounded."""
    for number in (0.0, 1 - 2.0**-53):
        monkeypatch.setattr(torch, "rand", lambda *shape, number=number, **_: torch.full(shape, number).double())
        for place in (0, 1, 127, 128, 500, 999):
            p = torch.zeros(1, 1000)
            p[0, place] = 0.3
            assert draw(p).item() == place
        p = torch.full((1, 1000), 1e-3)
        p[0, 990:] = p[0, :7] = 0.0
        assert draw(p).item() == (7 if number == 0 else 989)


def test_a_draw_at_a_rounded_end_of_a_block_is_never_impossible(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third block ends at 1 - 2^-53; the fourth, by its rounded end less its sum, would begin after it."""
    p = torch.zeros(1, 4 * BLOCK)
    p[0, BLOCK - 1 :: BLOCK] = torch.tensor([1 - 2.0**-24, 2.0**-24 - 2.0**-48, 31 * 2.0**-53, 4.2 * 2.0**-53])
    for steps in range(8):
        number = torch.full((1, 1), 1 - steps * 2.0**-53, dtype=torch.float64)
        monkeypatch.setattr(torch, "rand", lambda *shape, number=number, **_: number)
        assert draw(p).item() in (3 * BLOCK - 1, 4 * BLOCK - 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_a_draw_of_no_distribution_is_refused(value: float) -> None:
    p = torch.full((2, 300), 1 / 300)
    p[1] = value
    with pytest.raises(DivergedError, match="must be finite, with a sum > 0"):
        draw(p)


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_sampling_from_a_diverged_policy_is_refused(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, options: dict[str, float]
) -> None:
    model.model.norm.weight.data[0] = float("nan")
    with pytest.raises(DivergedError, match="the policy's logits are not"):
        sampled(model, tokenizer, ["1+2="], **options)


def test_one_diverged_row_is_refused() -> None:
    scores = torch.zeros(2, 5)
    scores[1] = float("nan")
    with pytest.raises(DivergedError, match="a token of each row must be kept"):
        RecordedSets(temperature=1.0, top_k=2, top_p=1.0, min_p=0.0)(torch.zeros(2, 1), scores)


def test_greedy_is_the_most_likely_token(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    rollout = sampled(model, tokenizer, ["12+3="], max_completion_length=1, greedy=True)
    logits = model(torch.tensor([tokenizer("12+3=").input_ids])).logits[0, -1]
    assert rollout.completion_ids.item() == logits.argmax().item()


@pytest.mark.parametrize("batch_size", [None, 3])
def test_a_prompt_is_computed_once_for_its_completions(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, batch_size: int | None
) -> None:
    """The same completions, greedy and sampled, and fewer prompt tokens through the model; groups may be cut."""
    texts, seen = ["1+2=", "123+34=", "5"], []
    model.model.register_forward_pre_hook(lambda _m, _a, kwargs: seen.append(kwargs), with_kwargs=True)
    for greedy in (True, False):
        found = []
        for patched in (False, True):
            if patched:
                monkeypatch.setattr(HuggingFaceEngine, "_prompt_cache", lambda *_: {})
            seen.clear()
            rollout = sampled(model, tokenizer, texts, batch_size, num_generations=4, greedy=greedy)
            states = [
                kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"]
                for kwargs in seen
            ]
            found.append((rollout.completion_ids, sum(x.shape[0] * x.shape[1] for x in states)))
            monkeypatch.undo()
        assert torch.equal(found[0][0], found[1][0])
        assert found[0][1] < found[1][1]


def test_a_model_with_learned_positions_samples_prompts_of_different_lengths(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """A masked column must have a position that the model has."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=16)
    rollout = sampled(GPT2LMHeadModel(config).eval(), tokenizer, ["1+2=", "123+34="], num_generations=2)
    assert rollout.completion_ids.shape[0] == 4


def test_a_model_without_a_cache_of_keys_and_values(tokenizer: PreTrainedTokenizerFast) -> None:
    torch.manual_seed(0)
    config = OpenAIGPTConfig(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=32)
    rollout = sampled(OpenAIGPTLMHeadModel(config).eval(), tokenizer, ["1+2="], num_generations=3)
    assert rollout.completion_ids.shape[0] == 3


def test_a_recurrent_model_has_no_cache_of_keys_and_values(tokenizer: PreTrainedTokenizerFast) -> None:
    torch.manual_seed(0)
    config = xLSTMConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_heads=2, num_hidden_layers=1, qk_dim_factor=1.0,
        chunkwise_kernel="chunkwise--native_autograd", sequence_kernel="native_sequence__native", step_kernel="native",
    )  # fmt: skip
    rollout = sampled(xLSTMForCausalLM(config).eval(), tokenizer, ["1+2="], num_generations=3)
    assert rollout.completion_ids.shape[0] == 3


@pytest.mark.parametrize(("window", "shared"), [(32, True), (9, True), (5, False)])
def test_a_prompt_within_a_sliding_window_is_computed_once(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, window: int, shared: bool
) -> None:
    """Gemma 3 has both kinds of layers; the completions leave the window of 9."""
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=2, head_dim=8,
            num_attention_heads=4, num_key_value_heads=2, sliding_window=window, initializer_range=0.3,
            layer_types=["sliding_attention", "full_attention"], pad_token_id=0, eos_token_id=1, bos_token_id=None,
        )
    ).eval()  # fmt: skip
    options = {"num_generations": 4, "max_completion_length": 12}
    caches: list[Any] = []
    compute = HuggingFaceEngine._prompt_cache
    monkeypatch.setattr(HuggingFaceEngine, "_prompt_cache", lambda *a: caches.append(compute(*a)) or caches[-1])
    found = sampled(model, tokenizer, ["12+3=", "123+34="], **options)
    monkeypatch.setattr(HuggingFaceEngine, "_prompt_cache", lambda *_: {})
    plain = sampled(model, tokenizer, ["12+3=", "123+34="], **options)
    assert [bool(cache) for cache in caches] == [shared]
    assert torch.equal(found.completion_ids, plain.completion_ids)


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({}, {"full_attention"}),
        ({"sliding_window": 8}, {"sliding_attention"}),
        ({"sliding_window": 8, "use_sliding_window": False}, {"full_attention"}),
        ({"sliding_window": 8, "layer_types": ["full_attention"]}, {"full_attention"}),
    ],
    ids=str,
)
def test_layers_are_those_of_the_text_config(options: dict[str, Any], kinds: set[str]) -> None:
    text = SimpleNamespace(**options)
    model: Any = SimpleNamespace(_is_stateful=False, config=SimpleNamespace(get_text_config=lambda: text))
    assert layer_kinds(model) == kinds


def test_batches_by_length_return_in_the_order_of_the_prompts(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    texts, widths = ["123+34=", "5", "77+88+99=", "1+2="], []
    model.model.register_forward_pre_hook(
        lambda _m, _a, kwargs: widths.append(kwargs["attention_mask"].shape[1]), with_kwargs=True
    )
    options = {"num_generations": 2, "greedy": True, "max_completion_length": 5}
    at_once = sampled(model, tokenizer, texts, **options).completions()
    widths.clear()
    assert sampled(model, tokenizer, texts, 4, **options).completions() == at_once
    longest = max(len(tokenizer(text).input_ids) for text in texts)
    assert longest in widths[:2]  # the longest prompts are in the first batch
    assert sorted(len(tokenizer(text).input_ids) for text in texts)[1] in widths  # and the second is narrow


def test_hidden_states_predict_the_completion(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Scores of a left-padded batch are those of each sequence alone, with the model's own head."""
    rollout = sampled(
        model, tokenizer, ["1+2=", "123+34="], num_generations=3, max_completion_length=5, temperature=0.7
    )
    policy = Policy(model, Accelerator(), GRPOTrainerConfig(temperature=0.7, micro_batch_tokens=40))
    scores = scores_of(policy, rollout)
    assert policy.hidden_states(rollout).shape == (*rollout.completion_ids.shape, model.config.hidden_size)
    for row in range(6):
        prompt = rollout.prompt_ids[row][rollout.prompt_mask[row]]
        completion = rollout.completion_ids[row][rollout.completion_mask[row]]
        with torch.no_grad():
            logits = model(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
        expected = (logits / 0.7).log_softmax(-1).gather(-1, completion[:, None])[:, 0]
        # Both are fp32 runs of the same model in other batch shapes: rounding of two layers, log-probs below 10.
        torch.testing.assert_close(scores[row][rollout.completion_mask[row]], expected, rtol=0, atol=1e-4)
    assert (scores[~rollout.completion_mask] == 0).all()


def test_a_completion_follows_its_prompt_without_a_gap(
    model: Qwen2ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model runs as many columns as the longest row has tokens, padding last; the states are those of each row."""
    seen: list[Tensor] = []
    monkeypatch.setattr(
        policies,
        "head_hidden_states",
        lambda model, ids, **x: (seen.append(ids), head_hidden_states(model, ids, **x))[1],
    )
    policy, lengths = Policy(model, Accelerator(), GRPOTrainerConfig()), [(1, 5), (4, 1), (7, 2)]
    rollout = rollout_of(lengths)
    rollout = rollout._replace(completion_ids=(rollout.completion_ids - 90).clamp(min=0))
    states = policy.hidden_states(rollout)
    assert states.shape[:2] == (3, 5)
    for row, (prompt, completion) in enumerate(lengths):
        ids = torch.tensor([[*range(1, prompt + 1), *range(11, 11 + completion)]])
        assert torch.equal(seen[0][row, : prompt + completion], ids[0])
        alone = head_hidden_states(model, ids)[0, prompt - 1 : -1]
        torch.testing.assert_close(states[row, :completion], alone, rtol=0, atol=1e-5)
    assert seen[0].shape == (3, 9)


def test_a_model_with_learned_positions_scores_prompts_of_different_lengths(tokenizer: PreTrainedTokenizerFast) -> None:
    """Padding must have a position that the model has."""
    config = OpenAIGPTConfig(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=16)
    policy = Policy(OpenAIGPTLMHeadModel(config).eval(), Accelerator(), GRPOTrainerConfig())
    rollout = rollout_of([(2, 3), (5, 3)])
    rollout = rollout._replace(completion_ids=rollout.completion_ids - 90)
    for row in torch.arange(2).split(1):
        alone = scores_of(policy, rollout.rows(row))
        torch.testing.assert_close(scores_of(policy, rollout)[row], alone, rtol=0, atol=1e-5)


def test_a_model_whose_own_positions_do_not_begin_at_0_scores_as_it_samples(tokenizer: PreTrainedTokenizerFast) -> None:
    config = RobertaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=32, is_decoder=True, initializer_range=1.0,
    )  # fmt: skip
    model: Any = RobertaForCausalLM(config).eval()
    rollout = sampled(model, tokenizer, ["1+2=", "12+34="], max_completion_length=4, records="sampled")
    assert rollout.sampling_logps is not None
    scores, mask = scores_of(Policy(model, Accelerator(), GRPOTrainerConfig()), rollout), rollout.completion_mask
    torch.testing.assert_close(scores[mask], rollout.sampling_logps[mask], rtol=0, atol=1e-4)


def test_what_padding_gives_may_be_nan_on_a_cpu(model: Qwen2ForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, rollout = Policy(model, Accelerator(), GRPOTrainerConfig()), rollout_of([(2, 3), (5, 1)])
    states = torch.ones(*rollout.completion_mask.shape, 32)
    monkeypatch.setattr(policy, "_separate_states", lambda _: states)
    states[~rollout.completion_mask] = torch.nan
    assert policy.hidden_states(rollout) is states
    states[0, 0, 0] = torch.nan
    with pytest.raises(DivergedError, match="must be finite"):
        policy.hidden_states(rollout)


@pytest.mark.parametrize(
    "other",
    [{}, {"lm_head_adapter": ("A B",)}, {"lm_head_weight": torch.ones(20, 32)}],
    ids=["plain", "adapter", "cut"],
)
def test_a_head_that_fsdp_shards_must_be_plain(
    model: Qwen2ForCausalLM, monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    monkeypatch.setattr(policies, "lm_head_inputs", lambda model: {**lm_head_inputs(model), **other})
    policy = Policy(model, Accelerator(), GRPOTrainerConfig(temperature=0.7))
    monkeypatch.setattr(policies, "DTensor", torch.nn.Parameter)  # as if it were sharded
    if not other:
        assert policy.head() == {**lm_head_inputs(model), "temperature": 0.7, "impl": "auto"}
        return
    with pytest.raises(ValueError, match="must not drop rows or carry an adapter"):
        policy.head()


def test_log_probs_are_fp32_by_any_default_dtype(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    options: dict[str, Any] = {"num_generations": 2, "max_completion_length": 3}
    torch.set_default_dtype(torch.bfloat16)
    try:
        rollout = sampled(model, tokenizer, ["1+2="], records="top_k", num_alternatives=2, **options)
        scores = scores_of(Policy(model, Accelerator(), GRPOTrainerConfig()), rollout)
    finally:
        torch.set_default_dtype(torch.float32)
    assert rollout.sampling_logps is not None
    assert rollout.alternatives is not None
    assert rollout.sampling_logps.dtype == rollout.alternatives.logps.dtype == scores.dtype == torch.float32
    torch.testing.assert_close(scores, rollout.sampling_logps, rtol=0, atol=1e-4)


def test_prompts_that_differ_by_padding_alone_are_two() -> None:
    """The pad may be a token of a prompt; what a masked column holds is no difference."""
    ids, mask = pad_prompts([[5, 7], [5, 7], [7], [5, 7]], 5)
    assert first_of_prompts(ids, mask).tolist() == [True, False, True, True]
    ids[2, 0] = 9
    assert first_of_prompts(ids[[2, 2]] + torch.tensor([[0, 0], [1, 0]]), mask[[2, 2]]).tolist() == [True, False]


class Recorded:
    """An engine that returns a given result."""

    def __init__(self, ids: Tensor, mask: Tensor, logps: Tensor | None = None, sets: CandidateSets | None = None):
        self.generation = Generation(ids, mask, logps, sets)

    def generate(self, prompts: Any, sampling: Any) -> Generation:
        return self.generation

    def sync_weights(self, model: Any) -> None:
        pass


IDS, MASK = torch.ones(2, 3, dtype=torch.int64), torch.tensor([[True, True, False], [True, True, True]])


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        pytest.param(Recorded(IDS[:1], MASK[:1]), r"ids of shape \(2, T\), torch.int64.*; got \(1, 3\)", id="rows"),
        pytest.param(Recorded(IDS.int(), MASK), r"int64.*; got \(2, 3\), torch.int32", id="dtype"),
        pytest.param(Recorded(IDS, MASK[:, :2]), r"mask of shape \(2, T\).*; got \(2, 2\)", id="mask"),
        pytest.param(
            Recorded(IDS, MASK, torch.zeros(2, 1)),
            r"sampling_logps of shape \(2, T\), with the same T for all tensors; got \(2, 1\)",
            id="log-probs",
        ),
        pytest.param(
            Recorded(IDS, MASK, None, CandidateSets(torch.tensor([1]), torch.tensor([0, 1]))),
            "a candidate set for each of 6 positions; got 1",
            id="sets",
        ),
        pytest.param(Recorded(IDS, MASK.flip(1)), "True up to each completion's end", id="holes"),
        pytest.param(Recorded(IDS, MASK & False), r"first token at least; got a mask of lengths \[0, 0\]", id="empty"),
    ],
)
def test_results_of_an_engine_are_checked(engine: Recorded, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        roll_out(engine, [[3], [4]], Sampling(num_generations=1, max_completion_length=3))


def test_a_row_of_an_engine_must_have_one_value_for_each_token() -> None:
    """A missing log-prob would be padded to 0, and a missing set would be the whole vocabulary."""
    ids, logps, one = [[3, 4], [5]], [[-1.0, -2.0], [-3.0]], CandidateSets(torch.tensor([5]), torch.tensor([0, 1]))
    assert Generation.of_lists(ids, logps, 0).sampling_logps is not None
    with pytest.raises(ValueError, match=r"logps must .* each token of each row, \[2, 1\]; got \[1, 1\]"):
        Generation.of_lists(ids, [[-1.0], [-3.0]], 0)
    with pytest.raises(ValueError, match=r"candidates must .*; got \[1, 1\]"):
        Generation.of_lists(ids, logps, 0, [one, one])
    with pytest.raises(ValueError, match=r"alternatives must .*; got \[1, 1\]"):
        Generation.of_lists(ids, logps, 0, None, [ScoredSets(one, torch.zeros(1))] * 2)


def rollout_of(lengths: list[tuple[int, int]]) -> Rollout:
    """Prompts and completions of the given lengths; ids number the tokens."""
    prompts = [list(range(1, p + 1)) for p, _ in lengths]
    generation = Generation.of_lists([list(range(101, 101 + c)) for _, c in lengths], None, 0)
    return Rollout(*pad_prompts(prompts, 0), generation.ids, generation.mask)


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 30)), min_size=1, max_size=20),
    budget=st.integers(1, 400),
)
def test_micro_batches_hold_every_row_once_and_the_budget(lengths: list[tuple[int, int]], budget: int) -> None:
    rollout = rollout_of(lengths)
    batches = micro_batches(rollout, torch.arange(len(lengths)), budget)
    assert sorted(torch.cat(batches).tolist()) == list(range(len(lengths)))
    for batch in batches:
        micro = rollout.rows(batch)
        widths = [max(sizes) for sizes in zip(*(lengths[row] for row in batch.tolist()), strict=True)]
        assert [micro.prompt_ids.shape[1], micro.completion_ids.shape[1]] == widths
        assert len(batch) == 1 or len(batch) * max(sum(lengths[row]) for row in batch.tolist()) <= budget
        for row, original in enumerate(batch.tolist()):  # only padding is removed
            prompt, completion = lengths[original]
            assert micro.prompt_ids[row][micro.prompt_mask[row]].tolist() == list(range(1, prompt + 1))
            assert micro.completions()[row] == list(range(101, 101 + completion))


def test_a_rollout_moves_with_its_sets() -> None:
    sets = CandidateSets(torch.tensor([1, 2]), torch.tensor([0, 1, 2]))
    moved = rollout_of([(1, 2)])._replace(alternatives=ScoredSets(sets, torch.zeros(2))).to(torch.device("meta"))
    assert moved.alternatives is not None
    assert {x.device.type for x in moved.tensors().values()} == {"meta"}


def test_a_masked_sequence_changes_no_row() -> None:
    table = torch.zeros(2, 3)
    for value in (-1.0, 0.0):
        add_rows(table, torch.tensor([1]), torch.full((1, 2), value))
    assert table.tolist() == [[0.0, 0.0, 0.0], [-1.0, -1.0, 0.0]]


def test_rows_have_the_width_of_their_longest_completion() -> None:
    rollout = rollout_of([(1, 5), (1, 2), (1, 1)])
    rollout = rollout._replace(sampling_logps=torch.arange(15.0).view(3, 5))
    part = rollout.rows(torch.tensor([1, 2]))
    assert part.completion_ids.shape == part.completion_mask.shape == (2, 2)
    assert part.sampling_logps is not None
    assert part.sampling_logps.tolist() == [[5.0, 6.0], [10.0, 11.0]]
    masked = rollout._replace(completion_mask=torch.zeros_like(rollout.completion_mask))
    assert masked.rows(slice(0, 2)).completion_ids.tolist() == [[101], [101]]  # the loss takes no empty ones


def test_micro_batches_of_similar_length_have_little_padding() -> None:
    rollout = rollout_of([(5, 1), (5, 100)] * 8)
    batches = micro_batches(rollout, torch.arange(16), 420)
    padded = sum(rollout.rows(batch).completion_ids.numel() for batch in batches)
    assert padded <= 1.1 * 8 * 101
    batches = micro_batches(rollout_of([(1, 30), (20, 1), (19, 1)]), torch.arange(3), 50)
    assert [batch.tolist() for batch in batches] == [[0], [1, 2]]  # the first one's 30 tokens are not counted again
    assert len(micro_batches(rollout_of([(1, 30), (29, 2)]), torch.arange(2), 62)) == 1  # no gap after the short prompt
    assert length_mask(torch.tensor([0, 2]), 2).tolist() == [[False, False], [True, True]]


def test_records_of_an_engine_go_to_the_device_of_its_ids() -> None:
    from cuda_double import CUDA, cuda_double

    class Mixed:
        def generate(self, prompts: Any, sampling: Sampling) -> Generation:
            sets = ScoredSets(CandidateSets(torch.tensor([1, 2]), torch.tensor([0, 1, 2])), torch.zeros(2))
            ids = torch.tensor([[1, 2]]).to(CUDA)
            return Generation(ids, ids > 0, torch.zeros(1, 2), None, sets)

        def sync_weights(self, model: Any) -> None: ...

    with cuda_double():
        sampling = Sampling(num_generations=1, max_completion_length=2, records="top_k", num_alternatives=1)
        rollout = roll_out(Mixed(), [[1]], sampling)
        assert {tensor.device.type for tensor in rollout.tensors().values()} == {"cuda"}


def test_an_engine_has_two_methods(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    class Half:
        def generate(self, *_: Any) -> None: ...

    def zero(completions: list[str], **_: Any) -> list[float]:
        return [0.0] * len(completions)

    with pytest.raises(TypeError, match=r"must have the methods generate and sync_weights .*; got Half"):
        GRPOTrainer(
            model, tokenizer, zero, [{"prompt": "1+1="}] * 8, config=GRPOTrainerConfig(), engine=Half()  # type: ignore[arg-type]
        )  # fmt: skip
