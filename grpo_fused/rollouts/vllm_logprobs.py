"""A plugin of vLLM: log-probs of sampled tokens as the trainer scores them, from vLLM's own hidden states.

    extension = "grpo_fused.rollouts.vllm_logprobs.ExactLogprobs"
    llm = vllm.LLM(model, worker_extension_cls=extension, logprobs_mode="processed_logprobs")
    llm.collective_rpc("score_exactly", kwargs={"temperature": 0.7})
    llm.generate(...)                        # the log-prob of each sampled token is exact

vLLM rounds its logits to the model's dtype, with eight bits in bf16. Here the sampled tokens are scored once more by
`fused_linear_logprobs`, in fp32 and without logits, and vLLM returns this value in place of its own. A token's
score does not depend on the batch (`native` and `triton`), so if trainer and vLLM had the same hidden states, the
importance ratio between them would be exactly 1.

vLLM's extension points are a class that workers inherit from (`worker_extension_cls`), and its two layers at the end of
a model: `LogitsProcessor`, whose inputs are the hidden states and the head, and the sampler. Rows and requests are
aligned by vLLM: the score replaces a number in the sampler's own output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_fused import CandidateSets, fused_linear_logprobs

KEPT_TOLERANCE = 1e-3
"""By how much the probabilities of a candidate set may differ from 1 in sum: vLLM's are in fp32."""


class ExactLogprobs:
    """What a worker of vLLM 0.32 inherits as its `worker_extension_cls`."""

    def score_exactly(self, temperature: float = 1.0, truncated: bool = False) -> None:
        """From now on the log-probs of sampled tokens are exact, those of other tokens vLLM's own.

        The weight is that of vLLM's head, in its dtype, as the last sync left it.

        Args:
            temperature: That of all requests, > 0, 1.0 for greedy ones. Not used with `logprobs_mode="raw_logprobs"`.
            truncated: All requests have top-k, top-p or min-p. The exact log-prob is renormalised over the tokens that
                these keep: those of vLLM's sampling masks (`vllm.LLM(..., return_sampling_mask=True)`), and without
                masks those of the returned log-probs, which requests then ask for. Only with
                `logprobs_mode="processed_logprobs"`.

        Under `truncated` and without masks, a log-prob is NaN if those that vLLM returned for its position do not sum
        to 1 within 1e-3.

        Requests must not have penalties, logit biases, allowed or bad words where log-probs are processed ones: their
        effect on the log-prob would be lost.

        Raises:
            ValueError: Parts of the vocabulary are in other processes, tokens are drafted by speculative decoding,
                vLLM returns logits, or its head is not one of `fused_linear_logprobs`.
        """
        self.score_as_vllm()
        runner: Any = self.model_runner  # type: ignore[attr-defined]  # of the worker
        config, mode = runner.vllm_config, runner.sampler.logprobs_mode
        if (ranks := config.parallel_config.tensor_parallel_size) != 1:
            raise ValueError(f"exact log-probs need tensor_parallel_size 1; got {ranks}")
        if config.speculative_config is not None:
            raise ValueError("exact log-probs need sampling without speculative decoding; got a speculative_config")
        if mode not in ("raw_logprobs", "processed_logprobs"):
            raise ValueError(f"exact log-probs need logprobs_mode raw_logprobs or processed_logprobs; got {mode}")
        raw = mode == "raw_logprobs"
        runner.sampler = _Sampler(
            runner.sampler, runner.get_model(), 1.0 if raw else temperature, truncated and not raw
        )

    def score_as_vllm(self) -> None:
        """Ends `score_exactly`."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        if isinstance(runner.sampler, _Sampler):
            for hook in runner.sampler.hooks:
                hook.remove()
            runner.sampler = runner.sampler.own


class _Sampler:
    """A sampler of vLLM (of either model runner) whose output has exact log-probs of the tokens that it sampled."""

    def __init__(self, own: Any, model: torch.nn.Module, temperature: float, truncated: bool) -> None:
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        self.own, self.temperature, self.truncated = own, temperature, truncated
        self.head_inputs: dict[str, Any] = {}
        processors = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
        for processor in processors:
            if processor.logits_as_input or (processor.soft_cap is not None and processor.scale != 1.0):
                raise ValueError(
                    "exact log-probs need logits softcap(logit_scale * (h W^T + b)); got a head of vLLM with scale "
                    f"{processor.scale}, soft_cap {processor.soft_cap}, logits_as_input {processor.logits_as_input}"
                )
        self.hooks = [module.register_forward_pre_hook(self._keep, with_kwargs=True) for module in processors]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def _keep(self, processor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(("lm_head", "hidden_states", "embedding_bias"), args, strict=False)) | kwargs
        weight, rows = given["lm_head"].weight, processor.org_vocab_size  # below them are padding rows
        if weight.dim() != 2 or len(weight) < rows or not weight.is_floating_point():
            raise ValueError(
                f"exact log-probs need the weight of vLLM's head, [{rows}, H] or longer, not quantized; got shape "
                f"{tuple(weight.shape)}, {weight.dtype}"
            )
        bias = given.get("embedding_bias")
        self.head_inputs = {
            "hidden_states": given["hidden_states"],
            "lm_head_weight": weight[:rows],
            "lm_head_bias": None if bias is None else bias[:rows],
            "logit_scale": processor.scale,
            "softcap": processor.soft_cap,
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.own(*args, **kwargs)
        if (table := output.logprobs_tensors) is not None:
            mask = getattr(output, "sampling_mask_tensors", None)  # of the model runner V2
            output.logprobs_tensors = table._replace(logprobs=self._exact(output.sampled_token_ids, table, mask))
        return output

    def _exact(self, sampled: Tensor, table: Any, mask: Any) -> Tensor:
        """The log-probs [n, K + 1] of a table whose first column is the sampled token; it may be there twice."""
        ids, logprobs = table.logprob_token_ids, table.logprobs
        if ids.shape != logprobs.shape or len(ids) != len(self.head_inputs["hidden_states"]):
            raise ValueError(
                "exact log-probs need requests with logprobs >= 0, and a hidden state for each sampled token; got "
                f"{tuple(ids.shape)} ids, {tuple(logprobs.shape)} log-probs and "
                f"{len(self.head_inputs['hidden_states'])} states"
            )
        candidates = None
        if self.truncated:
            candidates = _kept(ids, logprobs) if mask is None else sets_of_mask(mask)
        exact = fused_linear_logprobs(
            **self.head_inputs, token_ids=sampled[:, 0].long(), temperature=self.temperature, candidates=candidates
        ).logps
        if self.truncated and mask is None:
            total = logprobs.exp().sum(1) - logprobs[:, 0].exp() * (ids[:, 1:] == sampled).any(1)
            exact = exact.masked_fill((total - 1.0).abs() > KEPT_TOLERANCE, torch.nan)
        return torch.where(ids == sampled, exact[:, None], logprobs)


def _kept(ids: Tensor, logprobs: Tensor) -> CandidateSets:
    """The tokens of each row that could be sampled, the sampled one first."""
    repeated = ids == ids[:, :1]
    repeated[:, 0] = False
    return CandidateSets.from_padded(ids.long().masked_fill(repeated | (logprobs == -torch.inf), -1))


def sets_of_mask(mask: Any) -> CandidateSets:
    """The sets of vLLM's `SamplingMaskTensors`: ids of each row, and bits of the vocabulary for rows with more."""
    width = mask.token_ids.shape[1]
    if int(mask.counts.max()) <= width:
        beyond = torch.arange(width, device=mask.counts.device) >= mask.counts.unsqueeze(1)
        return CandidateSets.from_padded(mask.token_ids.long().masked_fill(beyond, -1))
    shifts = torch.arange(8, dtype=torch.uint8, device=mask.counts.device)
    bits = (mask.packed_mask.unsqueeze(-1) >> shifts & 1).flatten(1)[:, : mask.vocab_size] != 0
    return CandidateSets.from_mask(bits | (mask.counts == 0).unsqueeze(1))  # rows of unfinished prompts: any set
