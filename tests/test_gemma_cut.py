"""The cut of a vocabulary: which tokens stay, their new ids, and the same texts and logits as before."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig, GemmaTokenizer

from benchmarks import gemma_cut

LETTERS = "▁abcdexyz+=0123456789"
MERGES = [
    ("a", "b"), ("b", "c"), ("ab", "c"), ("a", "bc"), ("abc", "d"), ("x", "y"), ("y", "z"), ("xy", "z"), ("▁", "abc"),
    ("1", "2"), ("d", "e"),
]  # fmt: skip
SPECIAL = ["<mask>", "<pad>", "<eos>", "<bos>", "<unk>"]
UNUSED = [f"<unused{i}>" for i in range(40)]
TEXTS = [("abcd+1=", " abc"), ("bc+12=", "abé"), ("c+1=", "a"), ("2=", "b")]
"""`abcd` needs `ab` and `abc`, which are in no text as tokens."""


@pytest.fixture
def source(tmp_path):
    """A tiny Gemma 3 and its tokenizer: special tokens are neither the first ids nor in their usual order."""
    names = [*UNUSED, *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *LETTERS]
    names += list(dict.fromkeys(a + b for a, b in MERGES))
    vocab = {name: index for index, name in enumerate(names)}
    words = Tokenizer(models.BPE(vocab, MERGES, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    words.normalizer = normalizers.Replace(" ", "▁")
    words.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    words.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    words.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", vocab["<bos>"])])
    words.add_special_tokens([*SPECIAL, *UNUSED])
    tokenizer = GemmaTokenizer(
        tokenizer_object=words, vocab=vocab, merges=MERGES, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>",
        unk_token="<unk>", mask_token="<mask>",
    )  # fmt: skip
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=len(vocab), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
            num_key_value_heads=1, head_dim=16, pad_token_id=vocab["<pad>"], eos_token_id=vocab["<eos>"],
            bos_token_id=vocab["<bos>"], initializer_range=0.3, sliding_window=32,
        )
    )  # fmt: skip
    folder = tmp_path / "whole"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def few(monkeypatch):
    """Few sampled tokens, so that the vocabulary becomes smaller."""
    monkeypatch.setattr(gemma_cut, "SAMPLED", 2)
    monkeypatch.setattr(gemma_cut, "GENERATIONS", 1)
    monkeypatch.setattr(gemma_cut, "MASS", 1e-9)


def test_the_closure_has_every_token_that_merges_into_a_kept_one():
    assert gemma_cut.closure(MERGES, {"abcd", "z"}) == {"abcd", "abc", "ab", "bc", "a", "b", "c", "d", "z"}


def test_a_cut_tokenizer_has_new_ids_in_the_old_order(source):
    data = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = data["model"]["vocab"]
    cut, old = gemma_cut.cut_tokenizer(copy.deepcopy(data), {vocab[name] for name in ("<bos>", "<unk>", "abc", "y")})
    names = {"<bos>", "<unk>", "abc", "ab", "bc", "a", "b", "c", "y", *(f"<0x{byte:02X}>" for byte in range(256))}
    assert old == sorted(vocab[name] for name in names)
    assert cut["model"]["vocab"] == {name: old.index(vocab[name]) for name in names}
    assert [tuple(pair) for pair in cut["model"]["merges"]] == MERGES[:4]
    assert {token["content"]: token["id"] for token in cut["added_tokens"]} == {"<bos>": 0, "<unk>": 1}
    assert cut["post_processor"]["special_tokens"]["<bos>"]["ids"] == [0]


def test_the_cut_model_has_the_same_texts_and_logits(source, few, tmp_path):
    about = gemma_cut.cut(source, tmp_path / "cut", TEXTS, 3)
    whole, cut = (AutoTokenizer.from_pretrained(folder) for folder in (source, tmp_path / "cut"))
    model, small = (Gemma3ForCausalLM.from_pretrained(folder).eval() for folder in (source, tmp_path / "cut"))
    old = [whole.get_vocab()[name] for name, _ in sorted(cut.get_vocab().items(), key=lambda item: item[1])]
    assert about["tokens"] == len(old) == small.config.vocab_size < about["of"] == model.config.vocab_size
    assert about["of_the_task"] < about["tokens"]
    assert set(UNUSED) - cut.get_vocab().keys()
    for text in ("abcd+1= abc", "12", "bc+é", "a\u00fcb"):  # the last needs bytes that are in no text
        ids = cut(text).input_ids
        assert [old[i] for i in ids] == whole(text).input_ids
        assert cut.decode(ids, skip_special_tokens=True) == whole.decode(
            whole(text).input_ids, skip_special_tokens=True
        )
        with torch.no_grad():
            expected = model(torch.tensor([whole(text).input_ids])).logits[..., old]
            # the library may sum the products of a smaller head in another order; a wrong row would be off by 1
            torch.testing.assert_close(small(torch.tensor([ids])).logits, expected, rtol=1e-5, atol=1e-5)
    for config in (small.config, small.generation_config):
        assert [old[config.pad_token_id], old[config.eos_token_id], old[config.bos_token_id]] == [
            whole.pad_token_id, whole.eos_token_id, whole.bos_token_id,
        ]  # fmt: skip
    assert small.get_output_embeddings().weight is small.get_input_embeddings().weight
    assert json.loads((tmp_path / "cut" / "cut.json").read_text()) == about


def test_likely_tokens_and_the_lost_probability(source, monkeypatch):
    model = Gemma3ForCausalLM.from_pretrained(source).eval()
    texts = [([43, 301], [302, 303, 304]), ([43, 305, 306], [307])]
    with torch.no_grad():
        rows = torch.cat([
            model(torch.tensor([a + b])).logits[0, len(a) - 1 : -1].softmax(-1) for a, b in texts
        ])  # fmt: skip
    monkeypatch.setattr(gemma_cut, "MASS", 0.3)
    expected = {302, 303, 304, 307}
    for row in rows.tolist():
        total = 0.0
        for token in sorted(range(len(row)), key=row.__getitem__, reverse=True):
            expected.add(token)
            if (total := total + row[token]) >= 0.3:
                break
    assert len(expected) > 8
    assert gemma_cut.probable(model, texts) == expected
    kept = sorted(expected)
    masses = 1 - rows[:, kept].sum(-1)
    found = gemma_cut.lost(model, texts, kept)
    assert found == pytest.approx({"positions": 4, "mean": masses.mean().item(), "max": masses.max().item()}, abs=1e-6)


def test_nothing_is_lost_if_all_tokens_stay(source, few, tmp_path, monkeypatch):
    monkeypatch.setattr(gemma_cut, "MASS", 2.0)
    about = gemma_cut.cut(source, tmp_path / "cut", TEXTS, 3)
    assert about["tokens"] == about["of"]
    assert about["lost"]["max"] == pytest.approx(0.0, abs=1e-9)


def test_a_cut_without_the_closure_is_an_error(source, few, tmp_path, monkeypatch):
    monkeypatch.setattr(gemma_cut, "closure", lambda merges, kept: set(kept))
    with pytest.raises(RuntimeError, match=r"expected 'abcd\+1= abc' to be the tokens .*; got"):
        gemma_cut.cut(source, tmp_path / "cut", TEXTS, 1)


def test_rows_of_other_tokens_are_an_error(source, few, tmp_path, monkeypatch):
    cut_model = gemma_cut.cut_model

    def shifted(model, old):
        weight = model.get_input_embeddings().weight
        weight.data[old[-1]] += 1.0
        cut_model(model, old)

    monkeypatch.setattr(gemma_cut, "cut_model", shifted)
    with pytest.raises(RuntimeError, match="expected logits that differ by at most 0.0001; got"):
        gemma_cut.cut(source, tmp_path / "cut", TEXTS, 3)


def test_models_that_cannot_be_cut(source):
    model = Gemma3ForCausalLM.from_pretrained(source)
    with pytest.raises(ValueError, match=r"eos_token_id must be among the kept tokens; got \[42\]"):
        gemma_cut.cut_model(copy.deepcopy(model), [41, 43, 44])
    model.config.tie_word_embeddings = False
    with pytest.raises(ValueError, match="whose head is its embedding"):
        gemma_cut.cut_model(model, [0])
