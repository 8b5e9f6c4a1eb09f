"""vLLM as the rollout engine, in the trainer's own process."""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from packaging.version import Version
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo_fused.ranks.parallel import whole
from grpo_fused.rollouts import vllm_outputs
from grpo_fused.rollouts.engine import Generation, Sampling, check_room
from grpo_fused.rollouts.errors import DivergedError
from grpo_fused.rollouts.vllm_logprobs import ExactLogprobs

OLDEST, NEWEST = "0.32", "0.33"
"""Of the releases of vLLM whose `reload_weights` takes tensors, the first and the last that were tested."""

LEAST_TEMPERATURE = 0.01
"""What vLLM's `SamplingParams` takes in place of lower ones."""

NO_MASKS = "sampling distribution replay"
"""In the message of vLLM's ValueError, where its model runner or an option excludes sampling masks."""

IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"

COMPARED_POSITIONS, COMPARED_RANKS = 8, 16
TOLERANCES = {torch.float64: 5e-4, torch.float32: 5e-4, torch.float16: 0.03, torch.bfloat16: 0.2}
"""Nats by which the log-probs of a sync may differ, on average, by the coarser dtype of vLLM and the policy.

With the same weights they differ by 1e-6 in fp32 and by 0.02 to 0.04 in bf16 (docs/vllm.md); fp16 has three bits
more. A head that is one step old at a learning rate of 1e-4 differs by 7e-4.
"""
COARSEST = 0.5
"""The same for other dtypes and for quantized weights."""


log = logging.getLogger(__name__)


class SyncError(RuntimeError):
    """vLLM does not sample with the weights of the policy."""


class VLLMEngine:
    """Samples with vLLM and returns the log-probs that it sampled with, which correct the loss.

    vLLM's kernels round otherwise than the trainer's, so that its probabilities are not quite the policy's: the trainer
    scores the rollout once more and weighs it by `importance_sampling_correction`.

    vLLM begins with random weights: all that it samples with has come from `sync_weights`, which compares its log-probs
    with the policy's.

    Where sampling is truncated, the candidate sets come from vLLM's sampling masks, which its model runner V2 has
    (`masks`). Elsewhere they are read from log-probs, of at most 1024 tokens for each position, as are the log-probs of
    other tokens than the sampled ones, where an objective reads them (`Sampling.records`).

    Args:
        model: Path or name of the policy, for its configuration and tokenizer.
        gpu_memory_utilization: Share of the GPU's memory that vLLM may take; the trainer needs the rest.
        max_logprob_difference: Nats by which vLLM's log-probs may differ from the policy's after a sync, mean over the
            likeliest tokens of a few positions. Default by dtype: 5e-4 in fp32, 0.03 in fp16, 0.2 in bf16, 0.5 if vLLM
            quantizes.
        exact_logprobs: Return the log-probs that `fused_linear_logprobs` gives vLLM's hidden states, not vLLM's own,
            which are of rounded logits. It takes one more product with the head for each sampled token.
        **options: Further options of `vllm.LLM` (max_model_len, dtype, enforce_eager, ...).

    Raises:
        ImportError: vllm is not installed, or older than 0.32.
        ValueError: Options ask for more than one worker: weights are handed over within the process. Or for a
            `worker_extension_cls` beside `exact_logprobs`, which is one. Or the environment's
            VLLM_ENABLE_V1_MULTIPROCESSING puts vLLM's engine into another process.
    """

    def __init__(
        self,
        model: str,
        *,
        gpu_memory_utilization: float = 0.3,
        max_logprob_difference: float | None = None,
        exact_logprobs: bool = False,
        **options: Any,
    ) -> None:
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
            if options.get(name, 1) != 1:
                raise ValueError(f"{name} must be 1: vLLM runs in the trainer's process; got {options[name]}")
        if exact_logprobs:
            if (other := options.get("worker_extension_cls")) is not None:
                raise ValueError(f"worker_extension_cls must not be set with exact_logprobs, which is one; got {other}")
            options |= {"worker_extension_cls": f"{ExactLogprobs.__module__}.{ExactLogprobs.__name__}"}
        if (given := os.environ.setdefault(IN_PROCESS, "0")) != "0":
            raise ValueError(
                f"{IN_PROCESS} must be 0 or unset: vLLM gets weights as tensors, within the trainer's process; got "
                f"{given!r}"
            )
        import vllm  # optional

        if Version(vllm.__version__) < Version(OLDEST):
            raise ImportError(f"vllm must be {OLDEST} or newer; got {vllm.__version__}")
        _warn_if_untested(vllm.__version__)
        self.vllm, self.max_logprob_difference, self.exact_logprobs = vllm, max_logprob_difference, exact_logprobs
        self.synced = False
        # vLLM makes a process group of one if there is none, and the trainer's processes would not find each other
        if PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU")).num_processes > 1:
            options = {"distributed_executor_backend": "external_launcher"} | options  # on the GPU of LOCAL_RANK
        self.llm = with_masks(
            vllm.LLM,
            model=model,
            gpu_memory_utilization=gpu_memory_utilization,
            logprobs_mode="processed_logprobs",  # after temperature and truncation, as they sampled
            **({"max_logprobs": vllm_outputs.MOST_CANDIDATES, "load_format": "dummy"} | options),
        )
        self.masks: bool = self.llm.model_config.return_sampling_mask
        self.vocab_size = self.llm.model_config.get_vocab_size()
        self.max_model_len: int = self.llm.model_config.max_model_len

    def sync_weights(self, model: PreTrainedModel) -> None:
        """Hands the policy's weights to vLLM, adapters merged in, and compares a few log-probs with the policy's.

        Raises:
            ValueError: The vocabulary is not that of vLLM's model, or adapters are not LoRA (`named_weights`).
            SyncError: vLLM's log-probs are not the policy's: some of its weights are not those of `model`.
            DivergedError: The policy's own are not finite.
        """
        self.synced = False
        if (size := model.config.get_text_config().vocab_size) != self.vocab_size:
            raise ValueError(
                f"the policy's vocabulary must be that of the files that vLLM began with, {self.vocab_size} tokens; "
                f"got {size}: save the resized model, and give VLLMEngine its folder"
            )
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named_weights(model)})
        self.llm.apply_model(_pack_tied_head)
        self.llm.reset_prefix_cache()  # what it holds was computed with other weights
        self._compare(model)
        self.synced = True

    @torch.no_grad()
    def _compare(self, model: PreTrainedModel) -> None:
        """Scores a short greedy completion once more with the policy: weights that did not arrive show there.

        The likeliest tokens of each position are compared: the first one alone may keep its log-prob.
        """
        prompt = [self.vocab_size * index // COMPARED_POSITIONS for index in range(COMPARED_POSITIONS)]
        ranks = min(COMPARED_RANKS, self.vocab_size)
        parameters = self.vllm.SamplingParams(
            temperature=0.0, max_tokens=COMPARED_POSITIONS, ignore_eos=True, logprobs=ranks
        )
        self._record_masks(False)
        completion = self._outputs([prompt], [parameters])[0].outputs[0]
        ids = torch.tensor([[*prompt, *completion.token_ids]], device=model.device)
        computed: list[torch.dtype] = []  # by the head: bf16 too if weights are in fp32 under autocast
        with model.get_output_embeddings().register_forward_hook(lambda *head: computed.append(head[-1].dtype)):
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
        expected = logits.log_softmax(-1).cpu()
        if expected.isnan().any():
            raise DivergedError("the policy's logits must be finite; got NaN or inf")
        theirs = [(place, *pair) for place, row in enumerate(completion.logprobs) for pair in row.items()]
        differences = [abs(entry.logprob - float(expected[place, token])) for place, token, entry in theirs]
        difference, allowed = math.fsum(differences) / len(differences), self._allowed(computed[0])
        if not difference <= allowed:
            raise SyncError(
                "vLLM must sample from the policy, but after its weights were handed over the log-probs of "
                f"{len(differences)} tokens differ by {difference:.3g} nats on average (at most {allowed:g}, "
                "max_logprob_difference). Some weights of vLLM are not those of the model, or it computes more "
                f"coarsely than its dtype (vLLM {self.vllm.__version__})"
            )

    def _allowed(self, computed: torch.dtype) -> float:
        """The bound of a sync: the user's, or that of the coarser dtype of vLLM and the policy's logits."""
        if self.max_logprob_difference is not None:
            return self.max_logprob_difference
        config = self.llm.model_config
        if config.quantization:
            return COARSEST
        return max(TOLERANCES.get(dtype, COARSEST) for dtype in (config.dtype, computed))

    def check_length(self, prompt: int, completion: int) -> None:
        """Raises PromptError if vLLM has no room for as many tokens: it would cut the completions, or fail."""
        check_room(prompt, completion, self.max_model_len, " in vLLM (max_model_len)")

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Generation:
        """Samples completions of the prompts' token ids, with their log-probs.

        Raises:
            RuntimeError: `sync_weights` was not called, or the last one failed: the weights are not the policy's.
            PromptError: A prompt is too long (`check_length`).
            ValueError: With `exact_logprobs` a repetition penalty, whose effect they do not have, or `records` of other
                tokens, of which they are not.
            RuntimeError: vLLM returned a part of the tokens that could be sampled, or of their log-probs.
        """
        if not self.synced:
            raise RuntimeError(
                "sync_weights must be called before generate, and succeed: vLLM has other weights than the policy"
            )
        self.check_length(max(map(len, prompts)), sampling.max_completion_length)
        self._record_masks(sampling.truncates)
        with self._scores(sampling):
            outputs = self._outputs(prompts, [self._parameters(sampling, number) for number in range(len(prompts))])
        completions = [completion for output in outputs for completion in output.outputs]
        sets, scores = None, None
        if sampling.truncates:
            sets = [vllm_outputs.candidates_of(completion, checked=self.exact_logprobs) for completion in completions]
        if sampling.records == "mask" and sets is not None:
            scores = [vllm_outputs.scores_of(*each) for each in zip(completions, sets, strict=True)]
        elif sampling.records == "top_k":
            scores = [vllm_outputs.most_likely(completion, sampling.num_alternatives) for completion in completions]
        return Generation.of_lists(
            [list(completion.token_ids) for completion in completions],
            [vllm_outputs.sampled_logprobs(completion) for completion in completions],
            sampling.pad_token_id,
            sets,
            scores,
        )

    def _outputs(self, prompts: Sequence[Sequence[int]], parameters: Sequence[Any]) -> Any:
        """vLLM's output for each prompt. Requests that an interrupted call left would come with them."""
        engine = self.llm.llm_engine
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return self.llm.generate(inputs, sampling_params=parameters, use_tqdm=False)

    def _record_masks(self, recorded: bool) -> None:
        if self.masks:
            record_masks(self.llm, recorded)

    @contextmanager
    def _scores(self, sampling: Sampling) -> Iterator[None]:
        """Within it log-probs are exact, if that is asked for. Not for the check of a sync: it is of vLLM's own."""
        if not self.exact_logprobs:
            yield
            return
        if sampling.repetition_penalty != 1:
            raise ValueError(
                "repetition_penalty must be 1 with exact_logprobs, which are without it; got "
                f"{sampling.repetition_penalty}"
            )
        if sampling.records in ("mask", "top_k"):
            raise ValueError(
                "exact_logprobs must be off where the objective reads log-probs of other tokens than the sampled ones, "
                f"which are vLLM's own; got records {sampling.records!r}"
            )
        temperature = 1.0 if sampling.greedy else sampling.temperature
        self.llm.collective_rpc("score_exactly", kwargs={"temperature": temperature, "truncated": sampling.truncates})
        try:
            yield
        finally:
            self.llm.collective_rpc("score_as_vllm")

    def _parameters(self, sampling: Sampling, prompt: int) -> Any:
        """vLLM gives the completions of a prompt seeds that follow each other; prompts must not share one."""
        if not sampling.greedy and sampling.temperature < LEAST_TEMPERATURE:
            raise ValueError(
                f"temperature must be at least {LEAST_TEMPERATURE} where vLLM samples, which raises it to that; got "
                f"{sampling.temperature}"
            )
        seed = None if sampling.seed is None else (sampling.seed + prompt * sampling.num_generations) % 2**31
        top_k, logprobs = sampling.top_k or -1, 0  # log-probs of the sampled token only
        if sampling.records == "top_k":
            logprobs = min(sampling.num_alternatives, self.vocab_size)
        if sampling.truncates and self.masks:
            top_k = sampling.top_k or self.vocab_size  # vLLM wants one
        if sampling.truncates and (sampling.records == "mask" or not self.masks):
            # top_k keeps all tokens that are as likely as the k-th: many, in bf16
            most = 2 * sampling.top_k + 16 if sampling.top_k else vllm_outputs.MOST_CANDIDATES
            logprobs = min(most, vllm_outputs.MOST_CANDIDATES, self.vocab_size)
        return self.vllm.SamplingParams(
            n=sampling.num_generations,
            max_tokens=sampling.max_completion_length,
            temperature=0.0 if sampling.greedy else sampling.temperature,
            top_p=sampling.top_p,
            top_k=top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            stop=list(sampling.stop_strings) or None,
            include_stop_str_in_output=True,
            stop_token_ids=list(sampling.eos_token_ids),
            seed=seed,
            logprobs=logprobs,
            detokenize=bool(sampling.stop_strings),
            skip_special_tokens=False,  # a stop string may be one
        )


@cache
def _warn_if_untested(version: str) -> None:
    """Once for a version."""
    if Version(version).release[:2] > Version(NEWEST).release:
        warnings.warn(
            f"vllm {OLDEST} to {NEWEST} were tested with grpo_fused; got {version}. A sync still compares its "
            "log-probs with the policy's",
            stacklevel=3,
        )


def with_masks(start: Callable[..., Any], **options: Any) -> Any:
    """The `vllm.LLM` of these options, with sampling masks where its model runner has them."""
    try:
        llm = start(**({"return_sampling_mask": True} | options))
    except ValueError as error:
        if NO_MASKS not in str(error):
            raise
        llm = start(**options)
    source = "sampling masks" if llm.model_config.return_sampling_mask else "log-probs, of at most 1024 tokens each"
    log.info("where sampling is truncated, candidate sets come from vLLM's %s", source)
    return llm


def record_masks(llm: Any, recorded: bool) -> None:
    """Whether an LLM with masks records them from now on.

    Where nothing is truncated a mask would have the whole vocabulary, for each token. While they are recorded vLLM
    refuses requests with a temperature or top_k of 0.
    """

    def switch(worker: Any) -> None:
        worker.model_runner.sampler.return_sampling_mask = recorded

    llm.collective_rpc(switch)
    llm.model_config.return_sampling_mask = recorded  # by which it checks requests


def named_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint of the model without adapters, LoRA merged into copies unless it is disabled.

    Tied weights come once, those that FSDP2 shards are gathered. The model stays as it is to the bit: nothing is added
    to its weights and subtracted again.

    Raises:
        ValueError: What is adapted cannot be written as weights of the model: a tied embedding and head of which one
            has an adapter or a copy, an adapter that is no LoRA, a disabled one that is merged.
    """
    # of layers that have it, a flag; the models of transformers have a method of this name
    disabled = any(getattr(module, "disable_adapters", False) is True for module in model.modules())
    if not disabled:
        _check_adapters(model)
    elif any(getattr(module, "merged_adapters", ()) for module in model.modules()):
        raise ValueError("adapters must not be merged where they are disabled: unmerge them (peft: unmerge_adapter)")
    seen: set[int] = set()
    # layers that are trained whole, beside LoRA
    saved = ".original_module." if disabled else f".modules_to_save.{getattr(model, 'active_adapter', None)}."
    for name, tensor in model.state_dict(keep_vars=True).items():
        plain = name.removeprefix("base_model.model.").replace(".base_layer", "").replace(saved, ".")
        if id(tensor) in seen or any(part in plain for part in (".lora_", ".original_module.", ".modules_to_save.")):
            continue
        seen.add(id(tensor))
        if ".base_layer." in name and not disabled:
            layer, own = name.split(".base_layer")[0], name.rpartition(".base_layer.")[2]
            yield plain, _merged(model.get_submodule(layer), own)
        else:
            yield plain, whole(tensor, None).detach()


def _check_adapters(model: PreTrainedModel) -> None:
    for name, module in model.named_modules():
        is_other = hasattr(module, "base_layer") and not hasattr(module, "lora_A")
        if is_other or name.startswith("prompt_encoder."):
            kind = f"{type(module).__module__}.{type(module).__name__}"
            raise ValueError(f"adapters must be LoRA where vLLM samples; {name} is a {kind}")
    ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    adapted = [end for end in ends if hasattr(end, "base_layer") or hasattr(end, "modules_to_save")]
    weights = [getattr(end, "original_module", end).weight for end in ends]  # an adapted layer gives that of its base
    if adapted and weights[0] is weights[1]:
        raise ValueError(
            "embedding and head are tied, and vLLM has one weight for both; got an adapter or a copy of "
            f"{len(adapted)} of them: leave both out, or untie them (tie_word_embeddings=False)"
        )


def _merged(layer: Any, name: str) -> Tensor:
    """A parameter of the base of an adapted layer, with the adapters in it; peft merges into its data."""
    own = [(module, key, x) for module in layer.modules() for key, x in module._parameters.items() if x is not None]
    data = [x.data for _, _, x in own]
    wrappers = [module for module in layer.modules() if hasattr(module, "merged_adapters")]  # the outermost first
    merged = [list(wrapper.merged_adapters) for wrapper in wrappers]
    try:
        for module, key, x in own:
            if hasattr(x, "full_tensor"):  # merging into its data would not reach the shard
                module._parameters[key] = nn.Parameter(whole(x, None), requires_grad=False)
        for wrapper in reversed(wrappers):
            if not wrapper.merged_adapters:  # else its forward has these alone
                wrapper.merge(safe_merge=True)
        return layer.get_base_layer().get_parameter(name).detach()
    finally:
        for (module, key, x), before in zip(own, data, strict=True):
            module._parameters[key] = x
            if not hasattr(x, "full_tensor"):
                x.data = before
        for wrapper, names in zip(wrappers, merged, strict=True):
            wrapper.merged_adapters[:] = names


def _pack_tied_head(model: Any) -> None:
    """On CPUs vLLM multiplies by a packed copy of the head, which `reload_weights` renews only if it is not tied."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        for module in model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)
