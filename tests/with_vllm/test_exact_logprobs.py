"""Log-probs of vLLM's hidden states by the trainer's own scorer: the same bits, of the right tokens, or refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from with_vllm import test_sync
from with_vllm.conftest import HAS_MASKS, OPTIONS
from with_vllm.models import build_policy, save
from with_vllm.test_training import RATIO, make_trainer

from grpo_fused import CandidateSets, fused_linear_logprobs, importance_sampling_correction, lm_head_inputs
from grpo_fused.rollouts import vllm as integration
from grpo_fused.rollouts import vllm_logprobs, vllm_outputs
from grpo_fused.trainer import Rollout, Sampling, VLLMEngine, roll_out

PROMPTS = [[72, 101, 108], [3, 4, 5, 6, 7, 8], [1, 2]]
SAMPLING = Sampling(num_generations=4, max_completion_length=12, seed=5)


class Call(NamedTuple):
    """What the plugin scored after one forward pass."""

    hidden_states: Tensor
    token_ids: Tensor
    candidates: CandidateSets | None
    logps: Tensor


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """The calls of the plugin in a test."""
    made: list[Call] = []

    def recorded(hidden_states: Tensor, *, token_ids: Tensor, candidates: Any, **head: Any) -> Any:
        scores = fused_linear_logprobs(hidden_states, token_ids=token_ids, candidates=candidates, **head)
        made.append(Call(hidden_states.clone(), token_ids.clone(), candidates, scores.logps.clone()))
        return scores

    monkeypatch.setattr(vllm_logprobs, "fused_linear_logprobs", recorded)
    return made


@pytest.fixture
def exact(engine_of: Callable[..., VLLMEngine], monkeypatch: pytest.MonkeyPatch) -> Callable[..., VLLMEngine]:
    """The shared engines, with exact log-probs for a test."""

    def switched_on(*kind: Any) -> VLLMEngine:
        engine = engine_of(*kind)
        monkeypatch.setattr(engine, "exact_logprobs", True)
        return engine

    return switched_on


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.7}, {"top_k": 5, "temperature": 1.3}, {"top_p": 0.8}],
    ids=lambda options: " ".join(options) or "all",
)
@pytest.mark.parametrize("autocast", [False, True], ids=["bf16-weights", "autocast"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_engines_scores_are_the_trainers_to_the_bit(
    exact: Callable[..., VLLMEngine], calls: list[Call], options: dict[str, float], autocast: bool, tied: bool
) -> None:
    """Of equal hidden states, in other batches: the ratio between rollout and trainer is 1 and nothing else."""
    engine = exact("bfloat16", tied)
    model = build_policy(3, tied=tied, dtype=torch.float32 if autocast else torch.bfloat16)
    engine.sync_weights(model)
    sampling = Sampling(**(vars(SAMPLING) | options))
    rollout = roll_out(engine, PROMPTS, sampling)
    assert rollout.sampling_logps is not None
    sets = [call.candidates for call in calls if call.candidates is not None]
    assert bool(sets) == sampling.truncates
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        trainers = fused_linear_logprobs(
            torch.cat([call.hidden_states for call in calls]),
            token_ids=torch.cat([call.token_ids for call in calls]),
            candidates=CandidateSets.cat(sets) if sets else None,
            temperature=sampling.temperature,
            **lm_head_inputs(model),
        ).logps
    engines = torch.cat([call.logps for call in calls])
    assert torch.equal(trainers, engines)
    ratio = importance_sampling_correction(trainers[None], engines[None], mode="token_truncate").ratio
    assert ratio.min() == ratio.max() == 1.0
    # and these are the log-probs of the rollout
    assert sorted(rollout.sampling_logps[rollout.completion_mask].tolist()) == sorted(engines.tolist())
    assert (rollout.sampling_logps < 0).any()


def test_vllms_own_log_probs_are_of_rounded_logits(exact: Callable[..., VLLMEngine]) -> None:
    engine, model = exact("bfloat16"), build_policy(3, dtype=torch.bfloat16)
    engine.sync_weights(model)
    scored = roll_out(engine, PROMPTS, SAMPLING)
    engine.exact_logprobs = False
    own = roll_out(engine, PROMPTS, SAMPLING)
    assert torch.equal(own.completion_ids, scored.completion_ids)  # sampling does not change
    assert own.sampling_logps is not None
    assert scored.sampling_logps is not None
    assert 1e-4 < (own.sampling_logps - scored.sampling_logps).abs().max() < 0.1


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_tokens_stay_aligned_when_prompts_are_chunked_and_requests_preempted(
    tmp_path: Path, calls: list[Call], monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """In fp32 a log-prob of another position would differ by nats.

    Without seeds: vLLM 0.32 for CPUs fails on a request with a seed whose prompt is chunked.
    """
    engine = crowded_engine(tmp_path)
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    preempt, preempted = scheduler._preempt_request, []

    def counted(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request)
        return preempt(request, *args, **kwargs)

    monkeypatch.setattr(scheduler, "_preempt_request", counted)
    rollouts: list[Rollout] = []
    monkeypatch.setattr(test_sync, "roll_out", lambda *given: rollouts.append(roll_out(*given)) or rollouts[-1])
    model = build_policy(4)
    engine.sync_weights(model)
    sampling = Sampling(num_generations=4, max_completion_length=40, temperature=temperature)
    assert test_sync.largest_difference(engine, model, sampling) < 1e-4
    assert preempted
    # the rows of unfinished prompts too, which are no tokens
    assert sum(len(call.token_ids) for call in calls) > rollouts[0].completion_mask.sum()


_crowded: list[VLLMEngine] = []
_kept: list[Any] = []
"""vLLM's end takes the process groups of all others with it, which the model runner V2 asks for."""


def crowded_engine(folder: Path) -> VLLMEngine:
    """An engine with room for few tokens: a step takes 5 of them, and the cache less than all sequences."""
    if not _crowded:
        limits = {"max_num_batched_tokens": 5, "max_num_seqs": 4, "block_size": 32, "num_gpu_blocks_override": 6}
        path = save(build_policy(), folder)
        _crowded.append(VLLMEngine(path, dtype="float32", exact_logprobs=True, **(OPTIONS | limits)))
    return _crowded[0]


@pytest.mark.parametrize("options", [{}, {"top_k": 8}, {"top_p": 0.8, "temperature": 0.7}], ids=str)
def test_the_importance_ratio_of_the_first_step_is_one(
    exact: Callable[..., VLLMEngine], options: dict[str, float]
) -> None:
    metrics = make_trainer(build_policy(1), exact("float32"), **options).step()
    assert metrics["grad_norm"] > 0
    for name in ("mean", "min", "max"):
        assert metrics[f"{RATIO}/{name}"] == pytest.approx(1, abs=1e-3)


def test_a_stale_head_is_noticed(exact: Callable[..., VLLMEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    """It samples with the packed copy, and the plugin scores with the other: the sync compares vLLM's own values."""
    engine = exact("float32", True)
    engine.sync_weights(build_policy(7, tied=True))
    with monkeypatch.context() as patch:
        patch.setattr(integration, "_pack_tied_head", lambda model: None)
        with pytest.raises(RuntimeError, match="differ by"):
            engine.sync_weights(build_policy(8, tied=True))


def test_sets_of_which_a_part_is_missing_are_refused(
    exact: Callable[..., VLLMEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = exact("float32")
    engine.sync_weights(build_policy(1))
    monkeypatch.setattr(vllm_outputs, "MOST_CANDIDATES", 4)
    if engine.masks:  # they are complete
        return
    with pytest.raises(RuntimeError, match="must return all tokens that could be sampled"):
        roll_out(engine, PROMPTS, Sampling(num_generations=4, max_completion_length=12, top_p=0.99))


@pytest.mark.skipif(not HAS_MASKS, reason="sampling masks are of the model runner V2")
def test_sets_that_vllm_returns_as_bits(
    exact: Callable[..., VLLMEngine], calls: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It returns the ids of a limited number of tokens for each row, 2048, and a bit of each token for larger sets."""
    from vllm.v1.worker.gpu.sample import output

    engine = exact("float32")
    engine.sync_weights(build_policy(1))
    sampling = Sampling(**(vars(SAMPLING) | {"top_p": 0.9}))
    ids = roll_out(engine, PROMPTS, sampling)
    monkeypatch.setattr(output, "MAX_COMPACT_SUPPORT", 3)
    bits = roll_out(engine, PROMPTS, sampling)
    assert ids.candidates is not None
    assert bits.candidates is not None
    assert (ids.candidates.sizes > 3).any()
    assert torch.equal(ids.candidates.ids, bits.candidates.ids)
    assert torch.equal(ids.candidates.offsets, bits.candidates.offsets)
    first, second = calls[: len(calls) // 2], calls[len(calls) // 2 :]
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.logps, other.logps)
        assert one.candidates is not None
        assert other.candidates is not None
        assert torch.equal(one.candidates.ids, other.candidates.ids)


def test_the_plugin_in_another_program(tmp_path: Path, calls: list[Call]) -> None:
    """With vLLM's default, log-probs before temperature and penalties."""
    import vllm

    model = build_policy(6)
    extension = f"{vllm_logprobs.__name__}.ExactLogprobs"
    llm = vllm.LLM(save(model, tmp_path), dtype="float32", worker_extension_cls=extension, **OPTIONS)
    _kept.append(llm)
    llm.collective_rpc("score_exactly", kwargs={"temperature": 0.5})
    parameters = vllm.SamplingParams(temperature=0.5, repetition_penalty=1.2, logprobs=2, max_tokens=8, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": PROMPTS[0]}], sampling_params=parameters, use_tqdm=False)
    ids = list(output.outputs[0].token_ids)
    with torch.no_grad():
        logps = model(torch.tensor([PROMPTS[0] + ids])).logits[0, len(PROMPTS[0]) - 1 : -1].log_softmax(-1)
    for position, (token, found) in enumerate(zip(ids, output.outputs[0].logprobs, strict=True)):
        assert found[token].logprob == calls[position].logps.item()
        assert len(found) in (2, 3)
        for other, entry in found.items():
            assert abs(entry.logprob - logps[position, other]) < 1e-4
