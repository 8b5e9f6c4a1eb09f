"""The plugin of vLLM without vLLM: a runner, a head and a sampler with the interface that it uses."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from grpo_fused import CandidateSets, fused_linear_logprobs
from grpo_fused.rollouts.vllm_logprobs import ExactLogprobs

H, V, PADDED = 16, 40, 64


class LogitsProcessor(nn.Module):
    """The end of a model: hidden states in, logits out."""

    def __init__(self, scale: float = 1.0, soft_cap: float | None = None, logits_as_input: bool = False) -> None:
        super().__init__()
        self.scale, self.soft_cap, self.logits_as_input, self.org_vocab_size = scale, soft_cap, logits_as_input, V

    def forward(self, lm_head: Any, hidden_states: Tensor, embedding_bias: Tensor | None = None) -> None:
        """Nothing: the test has the table of the sampler."""


class Table(NamedTuple):
    logprob_token_ids: Tensor
    logprobs: Tensor
    selected_token_ranks: Tensor


class Worker(ExactLogprobs):
    """A worker whose sampler returns a given table."""

    def __init__(self, processor: LogitsProcessor | None = None, **options: Any) -> None:
        tensor_parallel = options.get("tensor_parallel_size", 1)
        self.processor = processor or LogitsProcessor()
        self.sampler = Sampler(options.get("logprobs_mode", "processed_logprobs"))
        self.model_runner = SimpleNamespace(
            vllm_config=SimpleNamespace(
                parallel_config=SimpleNamespace(tensor_parallel_size=tensor_parallel),
                speculative_config=options.get("speculative_config"),
            ),
            sampler=self.sampler,
            get_model=lambda: nn.Sequential(self.processor),
        )

    def step(self, table: Table | None, *head: Any) -> Any:
        """The end of a forward pass; the log-probs of the sampler's output."""
        self.processor(*head)
        sampled = torch.zeros(1, 1) if table is None else table.logprob_token_ids[:, :1]
        output = self.model_runner.sampler(SimpleNamespace(sampled_token_ids=sampled, logprobs_tensors=table))
        return output.logprobs_tensors


class Sampler:
    def __init__(self, logprobs_mode: str) -> None:
        self.logprobs_mode, self.states = logprobs_mode, "of requests"

    def __call__(self, output: Any) -> Any:
        return output


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "vllm.model_executor.layers.logits_processor"
    module = ModuleType(name)
    module.LogitsProcessor = LogitsProcessor  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)


def head(rows: int = PADDED, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Tensor]:
    """A head whose last rows are padding, and three hidden states."""
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, H, generator=g) / 2
    weight[V:] = 100.0  # would change every log-prob
    return SimpleNamespace(weight=weight.to(dtype)), torch.randn(3, H, generator=g).to(dtype)


def table_of(columns: list[list[int]], logprobs: list[list[float]]) -> Table:
    return Table(torch.tensor(columns, dtype=torch.int32), torch.tensor(logprobs), torch.zeros(3))


def test_sampled_tokens_get_exact_log_probs() -> None:
    worker, (lm_head, states) = Worker(LogitsProcessor(soft_cap=3.0)), head()
    worker.score_exactly(temperature=0.7)
    bias = torch.linspace(-1, 1, PADDED)
    # the sampled token comes first, and once more where it is one of the likeliest
    table = table_of([[5, 5, 6], [7, 8, 9], [0, 1, 0]], [[-1.0, -1.0, -2.0], [-4.0, -1.0, -2.0], [-2.0, -1.0, -2.0]])
    found = worker.step(table, lm_head, states, bias)
    exact = fused_linear_logprobs(
        states, lm_head.weight[:V], torch.tensor([5, 7, 0]), lm_head_bias=bias[:V], temperature=0.7, softcap=3.0
    ).logps.tolist()
    assert found.logprobs.tolist() == [[exact[0], exact[0], -2.0], [exact[1], -1.0, -2.0], [exact[2], -1.0, exact[2]]]
    assert found.selected_token_ranks is table.selected_token_ranks
    assert worker.model_runner.sampler.states == "of requests"
    assert worker.step(None, lm_head, states) is None  # no request asked for log-probs
    worker.score_as_vllm()
    assert worker.model_runner.sampler is worker.sampler
    assert not worker.processor._forward_pre_hooks
    assert worker.step(table, lm_head, states) is table


def test_log_probs_before_temperature_stay_before_it() -> None:
    worker, (lm_head, states) = Worker(LogitsProcessor(scale=0.5), logprobs_mode="raw_logprobs"), head(V)
    worker.score_exactly(temperature=0.7, truncated=True)
    worker.score_exactly(temperature=0.6, truncated=True)  # in place of the first
    found = worker.step(table_of([[5], [7], [0]], [[-1.0], [-1.0], [-1.0]]), lm_head, states)
    exact = fused_linear_logprobs(states, lm_head.weight[:V], torch.tensor([5, 7, 0]), logit_scale=0.5).logps
    assert torch.equal(found.logprobs[:, 0], exact)
    worker.score_as_vllm()
    assert worker.model_runner.sampler is worker.sampler


def test_truncated_log_probs_are_renormalised_over_what_was_kept() -> None:
    worker, (lm_head, states) = Worker(), head()
    worker.score_exactly(truncated=True)
    half, none = torch.tensor(0.5).log().item(), -torch.inf
    columns = [[5, 6, 5], [7, 7, 9], [0, 1, 2]]
    found = worker.step(table_of(columns, [[half, half, half], [0.0, 0.0, none], [half, -3.0, none]]), lm_head, states)
    sets = CandidateSets(torch.tensor([5, 6, 7, 0]), torch.tensor([0, 2, 3, 4]))
    exact = fused_linear_logprobs(states, lm_head.weight[:V], torch.tensor([5, 7, 0]), candidates=sets).logps
    assert found.logprobs[:2, 0].tolist() == exact[:2].tolist()
    assert found.logprobs[1].tolist() == [0.0, 0.0, none]
    assert found.logprobs[2, 0].isnan()  # the rest of its set was not returned
    found = worker.step(table_of(columns, [[half, 0.0, half], [0.0, 0.0, none], [0.0, none, none]]), lm_head, states)
    assert found.logprobs[:, 0].isnan().tolist() == [True, False, False]  # sums of 1.5, 1 and 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size 1; got 2"),
        ({"speculative_config": object()}, "without speculative decoding"),
        ({"logprobs_mode": "raw_logits"}, "got raw_logits"),
        ({"processor": LogitsProcessor(scale=2.0, soft_cap=3.0)}, "scale 2.0, soft_cap 3.0"),
        ({"processor": LogitsProcessor(logits_as_input=True)}, "logits_as_input True"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_scored_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Worker(**options).score_exactly()


@pytest.mark.parametrize("weight", [torch.empty(0), torch.ones(V - 1, H), torch.ones(V, H, dtype=torch.int8)], ids=str)
def test_a_head_that_is_packed_or_quantized_is_refused(weight: Tensor) -> None:
    worker, (_, states) = Worker(), head()
    worker.score_exactly()
    with pytest.raises(ValueError, match=r"weight of vLLM's head, \[40, H\] or longer, not quantized; got shape"):
        worker.step(table_of([[5], [7], [0]], [[-1.0]] * 3), SimpleNamespace(weight=weight), states)


def test_another_number_of_rows_is_refused() -> None:
    worker, (lm_head, states) = Worker(), head()
    worker.score_exactly()
    with pytest.raises(ValueError, match="a hidden state for each sampled token; got .* 2 states"):
        worker.step(table_of([[5], [7], [0]], [[-1.0]] * 3), lm_head, states[:2])
