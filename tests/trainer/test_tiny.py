"""The tiny models of dry runs: a lossless tokenizer, and a folder that the Auto classes can load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from grpo_fused import check_head
from grpo_fused.trainer import HuggingFaceEngine, Sampling, roll_out
from grpo_fused.trainer.tiny import tiny_model, tiny_reward_model, tiny_tokenizer

TEXTS = [
    pytest.param("", id="empty"),
    pytest.param("What is 12 + 3?", id="ascii"),
    pytest.param("  two  spaces ,  and a comma . It 's right ? \r\n\t", id="white-space"),
    pytest.param("Größe, 数学, שלום, 👩‍🔬, e\u0301 and \u00e9", id="unicode"),
    pytest.param("".join(map(chr, range(256))), id="control-characters"),
    pytest.param("a<|im_end|>\n <|pad|>b", id="special-tokens"),
]


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_gives_the_text_back(text: str) -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_a_token_is_a_byte() -> None:
    tokenizer = tiny_tokenizer()
    assert len(tokenizer) == 259
    assert len(tokenizer("Größe").input_ids) == len("Größe".encode())
    assert len(tokenizer("<|im_start|>user<|im_end|>").input_ids) == 6
    assert tokenizer.decode(tokenizer("a<|im_end|>").input_ids, skip_special_tokens=True) == "a"
    assert tokenizer.eos_token_id != tokenizer.pad_token_id


def test_every_byte_has_its_own_token() -> None:
    tokenizer = tiny_tokenizer()
    text = "".join(map(chr, [*range(128), *range(0x80, 0x110000, 0x101)])).encode("utf-8", "ignore").decode()
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_weights_depend_on_the_seed_and_leave_the_global_generator() -> None:
    tokenizer = tiny_tokenizer()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, again, other = tiny_model(tokenizer), tiny_model(tokenizer), tiny_model(tokenizer, seed=1)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert sum(parameter.numel() for parameter in first.parameters()) < 100_000
    assert not first.training


def test_the_generators_of_gpus_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    tiny_model(tiny_tokenizer(), seed=3)
    assert not seeded


def test_samples_differ_and_the_loss_accepts_the_head() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer)
    check_head(model)
    torch.manual_seed(0)
    sampling = Sampling(num_generations=8, max_completion_length=6, eos_token_ids=(tokenizer.eos_token_id,))
    rollout = roll_out(HuggingFaceEngine(model, tokenizer), [tokenizer("1+1=").input_ids], sampling)
    assert len(set(map(tuple, rollout.completions()))) == 8
    with torch.no_grad():
        logps = model(rollout.prompt_ids[:1]).logits[0, -1].log_softmax(-1)
    assert logps.max() - logps.min() > 2  # nats: not a uniform distribution


def test_a_saved_folder_loads_unchanged(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer, seed=3)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded_model = AutoModelForCausalLM.from_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in ["What's 12 + 3?\n\n  Größe, 数", "a<|im_end|><|pad|><|im_start|>b"]:
        assert loaded(text).input_ids == tokenizer(text).input_ids
        assert loaded.decode(loaded(text).input_ids) == text
    assert (loaded.eos_token_id, loaded.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert len(loaded) == len(tokenizer)
    assert loaded.chat_template == tokenizer.chat_template
    assert loaded_model.dtype == torch.float32
    ids = torch.tensor([tokenizer("1+1=").input_ids])
    with torch.no_grad():
        torch.testing.assert_close(
            loaded_model(ids).logits, model(ids).logits, rtol=0, atol=1e-5
        )  # files are not aligned


def test_the_reward_model_gives_one_score(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    reward_model = tiny_reward_model(tokenizer)
    batch = tokenizer(["1+1=2", "1+1=no idea"], padding=True, padding_side="right", return_tensors="pt")
    with torch.no_grad():
        scores = reward_model(**batch).logits
        alone = reward_model(**tokenizer(["1+1=2"], return_tensors="pt")).logits
    assert scores.shape == (2, 1)
    assert scores[0] != scores[1]
    torch.testing.assert_close(scores[:1], alone, rtol=0, atol=1e-4)  # the padding is not scored
    reward_model.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch).logits, scores, rtol=0, atol=1e-6)  # files are not aligned
