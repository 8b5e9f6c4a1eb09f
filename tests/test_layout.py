"""How inputs for a sequence and for a token are told apart, and where values are read at all."""

from __future__ import annotations

import pytest
import torch

from grpo_fused import fused_linear_logprobs
from grpo_fused.call.layout import Layout, values_are_checked

PADDED = Layout.of(torch.zeros(2, 3))
PACKED = Layout.of(torch.zeros(5), torch.tensor([0, 2, 5]))
AS_MANY = Layout.of(torch.zeros(2), torch.tensor([0, 1, 2]))
EMPTY = Layout.of(torch.zeros(0), torch.tensor([0, 0, 0]))


@pytest.mark.parametrize(
    ("layout", "shape", "per_token", "reading"),
    [
        (PADDED, (2,), False, 0),
        (PADDED, (2, 1), False, 2),
        (PADDED, (2, 3), True, 1),
        (PACKED, (2,), False, 0),
        (PACKED, (2, 1), False, 0),
        (PACKED, (5,), True, 1),
        (AS_MANY, (2,), False, 2),
        (EMPTY, (2,), False, 2),
        (Layout.of(torch.zeros(2, 0)), (2, 0), True, 2),
    ],
)
def test_one_for_each_sequence_or_for_each_token(layout, shape, per_token, reading):
    assert (layout.is_per_token(torch.zeros(shape)), layout.reading(torch.zeros(shape))) == (per_token, reading)


@pytest.mark.parametrize(("setting", "read"), [(None, False), ("0", False), ("1", True)])
def test_values_on_a_gpu_are_checked_with_the_setting_alone(setting, read, monkeypatch):
    monkeypatch.delenv("GRPO_FUSED_DEBUG", raising=False)
    if setting is not None:
        monkeypatch.setenv("GRPO_FUSED_DEBUG", setting)
    assert values_are_checked(torch.device("cuda")) == read
    assert values_are_checked(torch.device("cpu"))


@pytest.mark.parametrize("impl", ["chunked", "reference"])
def test_a_temperature_gets_no_gradient(impl):
    hidden, temperature = torch.randn(2, 3, 8, requires_grad=True), torch.ones(2, requires_grad=True)
    out = fused_linear_logprobs(hidden, torch.randn(20, 8), torch.ones(2, 3).long(), temperature=temperature, impl=impl)
    out.logps.sum().backward()
    assert temperature.grad is None


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_temperatures_of_tokens_without_sequences(shape):
    hidden, weight, ids, temperature = torch.randn(4, 8), torch.randn(20, 8), torch.arange(4), torch.rand(4) + 0.5
    got = fused_linear_logprobs(hidden, weight, ids, temperature=temperature.view(shape)).logps
    want = [
        fused_linear_logprobs(hidden[n : n + 1], weight, ids[n : n + 1], temperature=float(temperature[n])).logps
        for n in range(4)
    ]
    torch.testing.assert_close(got, torch.cat(want))
