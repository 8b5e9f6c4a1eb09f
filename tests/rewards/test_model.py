"""Reward models: tiny classifiers with random weights, scored in batches and one by one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)

from grpo_fused.rewards import RewardModel
from grpo_fused.trainer.scoring import reward_names, score_completions

WORDS = ["<pad>", "<eos>", "<cls>", "<unk>", "user:", "assistant:", "good", "bad", "a", "b", "c", "d"]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}<eos>"
PROMPTS = ["a b", "c", "a a a d", "b", "d c b a b"]
COMPLETIONS = ["good c", "bad", "good good good", "", "bad a"]


def make_tokenizer(*, template: str | None = None, cls: bool = False) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if cls:
        tokenizer.post_processor = processors.TemplateProcessing(single="<cls> $A", special_tokens=[("<cls>", 2)])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", cls_token="<cls>")
    made.chat_template = template
    return made


def make_decoder(pad_token_id: int | None = None, num_labels: int = 1) -> Qwen2ForSequenceClassification:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.5, num_labels=num_labels,
        pad_token_id=pad_token_id, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return Qwen2ForSequenceClassification(config)


def make_encoder() -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, initializer_range=0.5, num_labels=1, pad_token_id=0,
    )  # fmt: skip
    return BertForSequenceClassification(config)


MODELS = [
    pytest.param(make_decoder, False, id="decoder-without-pad"),
    pytest.param(lambda: make_decoder(pad_token_id=0), False, id="decoder-with-pad"),
    pytest.param(lambda: make_decoder(pad_token_id=1), False, id="decoder-padded-with-eos"),
    pytest.param(make_encoder, True, id="encoder"),
]


@pytest.mark.parametrize(("make", "cls"), MODELS)
@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_batches_equal_single_calls_of_the_model(make: Any, cls: bool, batch_size: int) -> None:
    model, tokenizer = make(), make_tokenizer(cls=cls)
    expected = []
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        ids = tokenizer(prompt + " " + completion, return_tensors="pt").input_ids
        assert (ids[0, 0] == 2) == cls
        expected.append(model.eval()(input_ids=ids).logits[0, 0].item())
    assert len({round(value, 4) for value in expected}) == len(expected)  # weights that give the texts different scores
    pad = model.config.pad_token_id
    reward = RewardModel(model.train(), tokenizer, batch_size=batch_size)
    assert not model.training
    completions = [" " + completion for completion in COMPLETIONS]
    assert reward(prompts=PROMPTS, completions=completions, answer=PROMPTS) == pytest.approx(expected, abs=1e-5)
    assert model.config.pad_token_id == pad


def test_texts_that_end_with_eos_are_read_to_their_end() -> None:
    """Padded with EOS, as is usual, a batch would read one token earlier than the model alone."""
    model, tokenizer = make_decoder(), make_tokenizer()
    texts = ["a <eos>", "b <unk> d <cls>", "a <pad>"]  # the first four tokens: none is free as the pad
    alone = [model.eval()(input_ids=tokenizer(t, return_tensors="pt").input_ids).logits.item() for t in texts]
    assert RewardModel(model, tokenizer)(["", "", ""], texts) == pytest.approx(alone, abs=1e-5)


def test_chat_goes_through_the_models_own_template() -> None:
    model, tokenizer = make_decoder(), make_tokenizer(template=TEMPLATE, cls=True)
    reward = RewardModel(model, tokenizer)
    expected = reward([""], ["user: a b assistant: good <eos>"])  # with <cls> in front, which a template does not add
    ids = tokenizer("user: a b assistant: good <eos>", add_special_tokens=False, return_tensors="pt").input_ids
    alone = model(input_ids=ids).logits.item()
    assert expected != pytest.approx([alone], abs=1e-4)
    user, assistant = [{"role": "user", "content": "a b"}], [{"role": "assistant", "content": "good"}]
    assert reward([user], [assistant]) == pytest.approx([alone], abs=1e-5)
    assert reward([user], ["good"]) == pytest.approx([alone], abs=1e-5)
    assert reward(["a b"], [assistant]) == pytest.approx([alone], abs=1e-5)
    begun = [*user, {"role": "assistant", "content": "go"}]
    assert reward([begun], [[{"role": "assistant", "content": "od"}]]) == pytest.approx([alone], abs=1e-5)


def test_max_length_keeps_the_completion() -> None:
    tokenizer = make_tokenizer()
    reward = RewardModel(make_decoder(), tokenizer, max_length=3)
    assert reward(["a b c d"], [" good bad"]) == pytest.approx(reward(["d"], [" good bad"]), abs=1e-5)
    assert tokenizer.truncation_side == "right", "the caller's stays as it is"


def test_scores_keep_no_graph() -> None:
    model, recorded = make_decoder(), []
    model.register_forward_hook(lambda *_: recorded.append(torch.is_grad_enabled()))
    RewardModel(model, make_tokenizer())(["a"], ["b"])
    assert recorded == [False]


def test_a_path_gives_model_tokenizer_and_name(tmp_path: Path) -> None:
    path = tmp_path / "my-judge"
    model = make_decoder()
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    loaded = RewardModel(str(path)).to("cpu")
    assert loaded.__name__ == "my-judge"
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert loaded(PROMPTS, COMPLETIONS) == RewardModel(model, tokenizer)(PROMPTS, COMPLETIONS)
    given = RewardModel(path, make_tokenizer(), name="judge")
    assert given.__name__ == "judge"
    assert given(PROMPTS, COMPLETIONS) == RewardModel(model, make_tokenizer())(PROMPTS, COMPLETIONS)


def test_a_path_keeps_the_dtype_of_its_weights(tmp_path: Path) -> None:
    make_decoder().to(torch.bfloat16).save_pretrained(tmp_path)
    reward = RewardModel(tmp_path, make_tokenizer())
    assert reward.model.dtype == torch.bfloat16
    assert all(isinstance(value, float) for value in reward(PROMPTS, COMPLETIONS))


def test_with_other_reward_functions() -> None:
    def relative_length(completions: list[str], **_: Any) -> list[float]:
        return [len(c) / sum(map(len, completions)) for c in completions]

    functions = [relative_length, RewardModel(make_decoder(), make_tokenizer())]
    names = reward_names(functions)
    assert names == ["relative_length", "Qwen2ForSequenceClassification"]
    rows = [{"prompt": prompt, "answer": "x"} for prompt in PROMPTS]
    rewards = score_completions(dict(zip(names, functions, strict=True)), rows, COMPLETIONS, [[1]] * 5)
    assert rewards.shape == (5, 2)
    assert rewards.isfinite().all()


def test_wrong_models_say_what_was_expected(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    with pytest.raises(ValueError, match="must have 1 label, the reward; got 2 labels"):
        RewardModel(make_decoder(num_labels=2), tokenizer)
    with pytest.raises(ValueError, match="as object needs its tokenizer; got None"):
        RewardModel(make_decoder())
    with pytest.raises(TypeError, match="tokenizer must be the object, not its path; got 'judge'"):
        RewardModel(tmp_path, "judge")  # type: ignore[arg-type]
    for name in ("batch_size", "max_length"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1; got 0"):
            RewardModel(make_decoder(), tokenizer, **{name: 0})  # type: ignore[arg-type]
    causal = Qwen2ForCausalLM(make_decoder().config)
    with pytest.raises(ValueError, match=r"logits of shape \(1, 1\), .* got \(1, 2, 12\): is it a sequence-class"):
        RewardModel(causal, tokenizer)(["a"], [" b"])
    causal.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no weights for score.weight, which would be random"):
        RewardModel(tmp_path)


def test_wrong_texts_say_what_was_expected() -> None:
    reward = RewardModel(make_decoder(), make_tokenizer(), name="judge")
    with pytest.raises(ValueError, match="'judge' got chat messages, and its tokenizer has no chat template"):
        reward([[{"role": "user", "content": "a"}]], ["b"])
    with pytest.raises(ValueError, match="at least one token; got none from ''"):
        reward([""], [""])
    with pytest.raises(ValueError, match="one of 'prompts' for each of 2 completions; got 1"):
        reward(["a"], ["b", "c"])


@pytest.mark.full
def test_the_package_imports_without_transformers() -> None:
    program = "import sys; sys.modules['transformers'] = None; from grpo_fused.rewards import RewardModel, built_in"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
