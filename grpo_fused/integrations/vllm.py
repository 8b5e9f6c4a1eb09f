"""vLLM as the rollout engine, in the trainer's own process."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo_fused import CandidateSets
from grpo_fused.trainer.config import GRPOTrainerConfig
from grpo_fused.trainer.rollout import Generation, Sampling

MOST_CANDIDATES = 1024
"""Log-probs of a position that vLLM is asked for where top-p or min-p may keep any number of tokens."""


class VLLMEngine:
    """Samples with vLLM and returns the log-probs that it sampled with, which correct the loss.

    vLLM's kernels round otherwise than the trainer's, so that its probabilities are not quite the policy's: the trainer
    scores the rollout once more and weighs it by `importance_sampling_correction`.

    Args:
        model: Path or name of the policy that vLLM loads; its weights are replaced before each rollout.
        gpu_memory_utilization: Share of the GPU's memory that vLLM may take; the trainer needs the rest.
        **options: Further options of `vllm.LLM` (max_model_len, tensor_parallel_size, ...).

    Raises:
        ImportError: vllm is not installed.
    """

    def __init__(self, model: str, *, gpu_memory_utilization: float = 0.3, **options: Any) -> None:
        # the engine core in this process: weights are handed over as tensors
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        import vllm  # optional

        self.vllm = vllm
        self.llm = vllm.LLM(
            model=model,
            gpu_memory_utilization=gpu_memory_utilization,
            logprobs_mode="processed_logprobs",  # after temperature and truncation, as they sampled
            **({"max_logprobs": MOST_CANDIDATES} | options),
        )

    def sync_weights(self, model: PreTrainedModel) -> None:
        """Hands the policy's weights to vLLM, adapters merged in."""
        runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
        runner.model.load_weights(named_weights(model))
        self.llm.reset_prefix_cache()  # what it holds was computed with other weights

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Generation:
        """Samples completions of the prompts' token ids, with their log-probs."""
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts],
            sampling_params=[self._parameters(sampling, number) for number in range(len(prompts))],
            use_tqdm=False,
        )
        completions = [completion for output in outputs for completion in output.outputs]
        return Generation.of_lists(
            [list(completion.token_ids) for completion in completions],
            [sampled_logprobs(completion) for completion in completions],
            sampling.pad_token_id,
            [candidates_of(completion) for completion in completions] if sampling.truncates else None,
        )

    def _parameters(self, sampling: Sampling, prompt: int) -> Any:
        """vLLM gives the completions of a prompt seeds that follow each other; prompts must not share one."""
        seed = None if sampling.seed is None else (sampling.seed + prompt * sampling.num_generations) % 2**31
        return self.vllm.SamplingParams(
            n=sampling.num_generations,
            max_tokens=sampling.max_completion_length,
            temperature=0.0 if sampling.greedy else sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or -1,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            stop=list(sampling.stop_strings) or None,
            include_stop_str_in_output=True,
            stop_token_ids=list(sampling.eos_token_ids),
            seed=seed,
            # 0: of the sampled token only
            logprobs=(sampling.top_k or MOST_CANDIDATES) if sampling.truncates else 0,
            detokenize=bool(sampling.stop_strings),
        )


def check_options(config: GRPOTrainerConfig) -> None:
    """What cannot be trained on rollouts of vLLM, found before the first one.

    Raises:
        ValueError: Its log-probs would be compared with others than the policy's own, or correct a loss that takes no
            such correction.
    """
    mode, loss = config.importance_sampling, config.loss
    used = {"importance_sampling": mode, "loss.off_policy_mask_threshold": loss.off_policy_mask_threshold}
    uses = [name for name, value in used.items() if value is not None]
    if uses and config.repetition_penalty != 1:
        raise ValueError(
            f"{' and '.join(uses)} must be null with a repetition_penalty, which changes the log-probs that vLLM "
            f"samples with, but not the policy's; got repetition_penalty {config.repetition_penalty}"
        )
    by_sequence = mode is not None and mode.startswith("sequence")
    if (loss.loss_type == "gmpo" and mode is not None) or (loss.loss_type == "vespo" and by_sequence):
        raise ValueError(
            "importance_sampling must be null with loss_type gmpo, and by token (token_mask, token_truncate) or null "
            f"with vespo; got {mode} with {loss.loss_type}"
        )


def sampled_logprobs(completion: Any) -> list[float]:
    """The log-prob of each sampled token; vLLM gives a dictionary by token for each position."""
    return [position[token].logprob for token, position in zip(completion.token_ids, completion.logprobs, strict=True)]


def candidates_of(completion: Any) -> CandidateSets:
    """The tokens that could be sampled at each position: those of finite log-prob.

    Raises:
        RuntimeError: Their probabilities do not sum to 1 within 1e-3: vLLM returned only a part of them.
    """
    kept = [
        {token: x.logprob for token, x in position.items() if x.logprob > -math.inf} for position in completion.logprobs
    ]
    for index, position in enumerate(kept):
        total = math.fsum(math.exp(logprob) for logprob in position.values())
        if abs(total - 1.0) > 1e-3:
            raise RuntimeError(
                f"vLLM must return all tokens that could be sampled; the probabilities of {len(position)} at token "
                f"{index} of a completion sum to {total:.4f}. Set top_k (at most {MOST_CANDIDATES}), or a lower top_p"
            )
    ids = [token for position in kept for token in position]
    sizes = torch.tensor([len(position) for position in kept], dtype=torch.int64)
    return CandidateSets(torch.tensor(ids, dtype=torch.int64), torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]))


def named_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The weights under the names of the model without adapters, LoRA merged in while they are read."""
    adapted: Any = model if hasattr(model, "merge_adapter") else None
    if adapted is not None:
        adapted.merge_adapter()
    try:
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save.default" in name.replace("original_module", ""):
                continue
            plain = name.removeprefix("base_model.model.").replace(".base_layer", "").replace(".original_module", "")
            full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            yield plain, full.detach()
    finally:
        if adapted is not None:
            adapted.unmerge_adapter()
