"""The policy: hidden states that predict a rollout's completions, and their log-probabilities."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from grpo_fused import fused_linear_logprobs, head_hidden_states, lm_head_inputs
from grpo_fused.call.head_parts import dense_weight
from grpo_fused.call.validation import is_alone_with
from grpo_fused.heads.hidden import accepts
from grpo_fused.rollouts.errors import DivergedError
from grpo_fused.trainer.config import GRPOTrainerConfig
from grpo_fused.trainer.rollout import Rollout, micro_batches
from grpo_fused.trainer.shared_prompts import check_shared_prompts, shared_prompt_states

Piece = tuple[Tensor, Rollout]
"""A micro-batch: the indices of its sequences in the rollout, and the sequences."""


class Policy:
    """A causal LM as input of the loss: hidden states that predict each token, and the head that multiplies them.

    Args:
        model: Hugging Face causal LM, not yet wrapped or sharded: its head is checked now.
        accelerator: For its autocast and processes. `model` of this class is what `prepare` makes of it.
        config: The options of the run.

    Raises:
        TypeError, ValueError: The fused loss cannot express the model's head (`check_head`).
        ValueError: `config.share_prompts` would change the model's states.
    """

    def __init__(self, model: PreTrainedModel, accelerator: Accelerator, config: GRPOTrainerConfig) -> None:
        self.accelerator, self.config = accelerator, config
        self.unwrapped = model
        self.model: nn.Module = model
        self._form = lm_head_inputs(model)
        is_whole = self._form["lm_head_weight"] is model.get_output_embeddings().weight
        self._is_plain = is_whole and not self._form["lm_head_adapter"]
        if config.share_prompts:
            check_shared_prompts(model, self._separate_states)

    def prepare(self, optimizer: Optimizer) -> AcceleratedOptimizer:
        """Shares the model among the processes for training; the optimizer of the shared weights."""
        self.model, prepared = self.accelerator.prepare(self.unwrapped, optimizer)
        self.model.eval()
        return prepared

    def trained_head(self) -> dict[str, Any]:
        """`head` of a loss: rows of candidates are added to the gradient of a weight that no other process shares."""
        head = self.head()
        return head | {"add_to_weight_grad": is_alone_with(head["lm_head_weight"])}

    def head(self) -> dict[str, Any]:
        """Keywords of the fused functions: the head and how it is run.

        Call it for each pass: an adapter may have been switched.
        """
        head = self.unwrapped.get_output_embeddings()
        run = {"temperature": self.config.temperature, "impl": self.config.impl}
        if not isinstance(head.weight, DTensor):
            return {**lm_head_inputs(self.unwrapped), **run}
        if not self._is_plain:
            raise ValueError("FSDP shards the head: it must not drop rows or carry an adapter; this one does")
        bias = getattr(head, "bias", None)
        return {**self._form, "lm_head_weight": head.weight, "lm_head_bias": bias, **run}

    def hidden_states(self, rollout: Rollout) -> Tensor:
        """[B, T, H]: position t holds the state that predicts `completion_ids[:, t]`.

        Runs the model up to its head, so no logits are computed. The state of the last prompt token predicts the first
        completion token, hence the shift by one. With `config.share_prompts` each prompt is computed once.

        Raises:
            DivergedError: On a CPU, where the loss takes none that are not finite. Elsewhere the loss becomes NaN, on
                all processes.
        """
        shared = self.config.share_prompts
        states = shared_prompt_states(self.model, rollout) if shared else self._separate_states(rollout)
        if states.device.type == "cpu" and not states[rollout.completion_mask].isfinite().all():
            raise DivergedError("the policy's hidden states must be finite; got NaN or inf")
        return states

    def _separate_states(self, rollout: Rollout) -> Tensor:
        """Each completion follows its prompt; padding comes last, where no token of a causal model sees it.

        Positions are given, as by `generate`: RoBERTa's own begin after that of its padding.
        """
        both = torch.cat([rollout.prompt_ids, rollout.completion_ids], dim=1)  # [B, P + T]
        prompts, completions = rollout.prompt_mask.sum(1, keepdim=True), rollout.completion_mask.sum(1, keepdim=True)
        width = int((prompts + completions).max())
        columns = torch.arange(both.shape[1], device=both.device)
        places = (rollout.prompt_ids.shape[1] - prompts + columns[:width]).clamp(max=both.shape[1] - 1)
        options = {"position_ids": columns[:width].expand(len(both), -1)} if accepts(self.model, "position_ids") else {}
        states = head_hidden_states(self.model, both.gather(1, places), **options)  # [B, width, H]
        before = (prompts - 1 + columns[: rollout.completion_ids.shape[1]]).clamp(max=width - 1)  # [B, T]
        starts = width * torch.arange(len(both), device=both.device).unsqueeze(1)
        return states.flatten(0, 1).index_select(0, (starts + before).flatten()).unflatten(0, before.shape)

    @torch.no_grad()
    def score(self, rollout: Rollout, pieces: list[Piece]) -> Tensor:
        """Log-probs [B, T], fp32, of its `micro_batches`, without gradient; 0 elsewhere and where masked."""
        logps = torch.zeros(rollout.completion_ids.shape, dtype=torch.float32, device=rollout.completion_ids.device)
        with self.accelerator.autocast():  # around all passes: weights are cast once
            for rows, micro in pieces:
                scores = fused_linear_logprobs(
                    self.hidden_states(micro),
                    token_ids=micro.completion_ids,
                    mask=micro.completion_mask,
                    candidates=micro.candidates,
                    **self.head(),
                )
                add_rows(logps, rows, scores.logps)
        return logps

    def micro_batches(self, rollout: Rollout, rows: Tensor) -> list[Piece]:
        """`rows` of the rollout in micro-batches, as many as the process with most of them has.

        Processes that share weights or gradients run in step. Added micro-batches are the first sequence,
        completely masked: it passes through the model and changes nothing. A quantile over all tokens needs one batch.
        """
        whole = self.config.loss.top_entropy_quantile < 1
        limit = sys.maxsize if whole else self.config.micro_batch_tokens
        batches = micro_batches(rollout, rows, limit, share_prompts=self.config.share_prompts)
        most = len(batches)
        if self.accelerator.num_processes > 1:  # a GPU waits for it
            most = int(self.accelerator.gather(torch.tensor([most], device=self.accelerator.device)).max())
        pieces = [(batch, rollout.rows(batch)) for batch in batches]
        if most == len(pieces):
            return pieces
        first = rollout.rows(slice(0, 1))
        idle = first._replace(completion_mask=torch.zeros_like(first.completion_mask))
        return pieces + [(rollout.completion_ids.new_zeros(1), idle)] * (most - len(pieces))


def add_rows(table: Tensor, rows: Tensor, values: Tensor) -> None:
    """Adds log-probs [n, t] to rows of a table [B, T], t <= T; those of a masked sequence are 0 and change nothing."""
    table[rows, : values.shape[1]] += values


class Reference:
    """What the KL is towards: the policy as it was before training, or another model with its tokens.

    With new adapters alone, which change nothing yet, the former is the policy without them, which costs no memory;
    else a copy of what is trained.
    """

    def __init__(self, policy: Policy, model: PreTrainedModel | None = None) -> None:
        self.policy, self._frozen = policy, nullcontext
        if model is None and _adapters_change_nothing(policy.unwrapped):
            self._frozen = partial(_without_adapters, policy.unwrapped)  # type: ignore[assignment]
            return
        if model is None:
            shared = {id(p): p for p in policy.unwrapped.parameters() if not p.requires_grad}
            model = copy.deepcopy(policy.unwrapped, shared)
        frozen = model.requires_grad_(False).eval()
        self.policy = Policy(frozen, policy.accelerator, policy.config)
        ours, theirs = policy.head(), self.policy.head()
        if (shapes := [head["lm_head_weight"].shape[0] for head in (ours, theirs)])[0] != shapes[1]:
            raise ValueError(f"policy and reference_model must have the same vocabulary; got {shapes} rows")
        if policy.config.loss.kl_estimator == "exact":
            forms = [{name: head[name] for name in ("logit_scale", "softcap")} for head in (ours, theirs)]
            if forms[0] != forms[1]:
                raise ValueError(f"kl_estimator='exact' needs heads with the same scale and softcap; got {forms}")
        # under FSDP accelerate moves no model by itself
        self.policy.model = policy.accelerator.prepare_model(frozen, device_placement=True, evaluation_mode=True)

    def score(self, rollout: Rollout, pieces: list[Piece]) -> Tensor:
        """See `Policy.score`."""
        with self._frozen():
            return self.policy.score(rollout, pieces)

    @torch.no_grad()
    def states(self, rollout: Rollout) -> dict[str, Any]:
        """Hidden states and head, as keywords of the loss with the exact KL."""
        with self._frozen():
            head = self.policy.head()
            weight = dense_weight(head["lm_head_weight"], head.get("lm_head_adapter", ()))
            states, bias = self.policy.hidden_states(rollout), head.get("lm_head_bias")
        if bias is None and self.policy.head().get("lm_head_bias") is not None:  # that of an adapter alone
            bias = weight.new_zeros(weight.shape[0])
        return {
            "ref_hidden_states": states,
            "ref_lm_head_weight": weight,
            "ref_lm_head_bias": None if bias is None else bias.detach(),
        }


@contextmanager
def _without_adapters(model: Any) -> Iterator[None]:
    """A PeftModel without its adapters. On leaving, peft alone would let all of their parameters be trained."""
    trained = [(p, p.requires_grad) for p in model.parameters()]
    try:
        with model.disable_adapter():
            yield
    finally:
        for parameter, requires in trained:
            parameter.requires_grad_(requires)


def _adapters_change_nothing(model: nn.Module) -> bool:
    """Whether all that is trained or a part of an active adapter is LoRA as it begins, with B = 0."""
    if not hasattr(model, "disable_adapter"):
        return False
    active = set(cast(Any, model).active_adapters)
    ours = {x: p for x, p in model.named_parameters() if p.requires_grad or active.intersection(x.split("."))}
    is_lora = all(".lora_A." in x or ".lora_B." in x for x in ours)
    return is_lora and not any(p.any() for x, p in ours.items() if ".lora_B." in x)


def disable_dropout(model: nn.Module) -> None:
    """Sets every dropout of a model to 0, also in attention and in its config."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for holder in (module, getattr(module, "config", None)):  # Falcon and Persimmon read their config in each pass
            for name, value in list(getattr(holder, "__dict__", {}).items()):
                if "drop" in name and isinstance(value, float):  # hidden_dropout, resid_pdrop, layerdrop, ...
                    setattr(holder, name, 0.0)
