"""prime-rl's output layers, which cannot be installed here: against their formula in plain torch."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from grpo_fused.integrations import prime_rl

B, S, H, V = 2, 7, 16, 70
LAYERS = {
    "plain": (prime_rl.FusedOutputLinear, {}),
    "gemma": (prime_rl.GemmaFusedOutputLinear, {"softcap": 3.0}),
}


def problem(name, dtype=torch.float32):
    torch.manual_seed(0)
    kind, options = LAYERS[name]
    layer = kind(in_features=H, out_features=V, chunk_size=4, **options).to(dtype)
    torch.nn.init.normal_(layer.weight)
    hidden = torch.randn(B, S, H, dtype=dtype, requires_grad=True)
    return layer, hidden, torch.randint(0, V, (B, S)), torch.rand(B, S) + 0.5


def formula(layer, hidden, labels, temperature):
    """The results of prime-rl 0.8 without its chunks: one temperature for each token, after the cap."""
    logits = hidden @ layer.weight.T
    softcap = getattr(layer, "softcap", None)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    log_p = (logits / temperature.unsqueeze(-1)).log_softmax(-1)
    return log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("name", LAYERS)
def test_formula(name):
    layer, hidden, labels, temperature = problem(name)
    want = formula(layer, hidden, labels, temperature)
    got = layer(hidden, labels, temperature)
    assert list(got) == ["logprobs", "entropy"]
    c = torch.randn(2, B, S)
    for mine, theirs in zip(got.values(), want, strict=True):
        assert mine.dtype == torch.float32
        assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    gradients = (
        torch.autograd.grad((logps * c[0] + entropies * c[1]).sum(), (hidden, layer.weight), retain_graph=True)
        for logps, entropies in (tuple(got.values()), want)
    )
    for mine, theirs in zip(*gradients, strict=True):
        assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_bf16_is_fp32_exact(name):
    layer, hidden, labels, temperature = problem(name, torch.bfloat16)
    got = layer(hidden, labels, temperature)
    want = formula(layer.double(), hidden.double(), labels, temperature.double())
    for mine, exact in zip(got.values(), want, strict=True):
        assert_close(mine.double(), exact, rtol=0, atol=1e-4)


def test_bad_input():
    layer, hidden, labels, temperature = problem("plain")
    for error in (ValueError, AssertionError):  # prime-rl's own test expects the latter, and the text before "of shape"
        with pytest.raises(error, match=r"FusedOutputLinear requires labels of shape \[B, S\] = \(2, 7\); got None"):
            layer(hidden, labels=None, temperature=temperature)
    with pytest.raises(ValueError, match=r"requires temperature of shape \[B, S\] = \(2, 7\); got None"):
        layer(hidden, labels)
    with pytest.raises(ValueError, match=r"requires temperature of shape \[B, S\] = \(2, 7\); got \(2,\)"):
        layer(hidden, labels, temperature[:, 0])
    with pytest.raises(ValueError, match="temperature"):
        layer(hidden, labels, temperature * 0)
    with pytest.raises(ValueError, match=str(V)):
        layer(hidden, labels + V, temperature)
    with pytest.raises(ValueError, match=r"lm_head_weight must have shape \(V, 4\)"):
        layer(hidden[..., :4], labels, temperature)
    with pytest.raises(ValueError, match=r"requires sampling_mask of shape \[B, S, K\], .* \(2, 7\); got \(2, 6, 3\)"):
        layer(hidden, labels, temperature, torch.zeros(2, 6, 3, dtype=torch.int32))


@pytest.mark.parametrize("name", LAYERS)
def test_sampling_mask(name):
    """Log-probs over the tokens that were kept; entropies of the whole vocabulary."""
    layer, hidden, labels, temperature = problem(name)
    kept = torch.rand(B, S, V) < 0.1
    kept.scatter_(-1, labels.unsqueeze(-1), True)
    kept[0, 0, labels[0, 0]] = False  # lacks its label
    kept[0, 1] = False  # empty
    assert (kept.sum(-1) > 0).sum() == B * S - 1
    mask = torch.full((B, S, V), -1, dtype=torch.int32)
    for b in range(B):
        for s in range(S):
            ids = kept[b, s].nonzero().flatten()
            mask[b, s, : len(ids)] = ids.int()
    mask = mask[..., : kept.sum(-1).max()]
    got = layer(hidden, labels, temperature, sampling_mask=mask)
    logits = hidden @ layer.weight.T
    softcap = layer.softcap
    logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature.unsqueeze(-1)
    kept[0, :2] = True
    want = logits.masked_fill(~kept, -torch.inf).log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    plain = layer(hidden, labels, temperature)
    assert list(got) == ["logprobs", "entropy"]
    assert_close(got["logprobs"], want, rtol=1e-5, atol=1e-5)
    layer.return_mask_logprobs = True
    assert list(layer(hidden, labels, temperature)) == ["logprobs", "entropy"]
    of_mask = layer(hidden, labels, temperature, sampling_mask=mask)["mask_logprobs"]
    effective = (mask >= 0) & (torch.arange(B * S).view(B, S, 1) > 1)
    log_p = logits.masked_fill(~kept, -torch.inf).log_softmax(-1)
    every = log_p.gather(-1, mask.clamp(min=0).long()).masked_fill(~effective, 0.0)
    assert_close(of_mask, every, rtol=1e-5, atol=1e-5)
    weights = torch.randn(mask.shape)
    for mine, theirs in zip(
        torch.autograd.grad((of_mask * weights).sum(), (hidden, layer.weight)),
        torch.autograd.grad((every * weights).sum(), (hidden, layer.weight), retain_graph=True),
        strict=True,
    ):
        assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert torch.equal(got["entropy"], plain["entropy"])
    assert ((got["logprobs"] - plain["logprobs"]).abs() > 0.01).sum() == B * S - 2
    c = torch.randn(B, S)
    for mine, theirs in zip(
        torch.autograd.grad((got["logprobs"] * c).sum(), (hidden, layer.weight)),
        torch.autograd.grad((want * c).sum(), (hidden, layer.weight)),
        strict=True,
    ):
        assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
