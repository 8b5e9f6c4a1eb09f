"""The hidden states that a head multiplies, taken from the model's own forward without computing its logits."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grpo_fused.api.custom_objective import eager
from grpo_fused.heads.modules import base_model, output_head, unwrap
from grpo_fused.heads.patches import Patches, turn


class CapturedHeadInput:
    """The value of `capture_head_input`: the head's input, after the model has run."""

    def __init__(self) -> None:
        self._inputs: list[Tensor] = []
        self._autocast: torch.dtype | None = None

    @property
    def hidden_states(self) -> Tensor:
        """`[B, T, H]`, in the graph of the forward pass.

        Raises:
            RuntimeError: The model has not run, has run without calling its head, or has called it more than once.
        """
        return only_one(self._inputs)

    def take(self) -> tuple[Tensor, torch.dtype | None]:
        """The same, and the dtype of autocast where the head was called (None without); then the model may run again.

        Raises:
            RuntimeError: As `hidden_states`.
        """
        hidden_states = self.hidden_states
        self._inputs.clear()
        return hidden_states, self._autocast


def only_one(inputs: list[Tensor]) -> Tensor:
    """The head's input, if it was called once."""
    if len(inputs) != 1:
        raise RuntimeError(
            f"the model must call its output head once for each pass; it was called {len(inputs)} times. A model that "
            "multiplies by the head's weight itself, or has several heads, is not supported"
        )
    return inputs[0]


@contextmanager
def capture_head_input(model: nn.Module) -> Iterator[CapturedHeadInput]:
    """Makes `model(...)` stop at its head: no logits are computed, and the head's input is kept.

    The input is what the head's matrix multiplies, after the final norm and all other steps of the model (a
    prediction head in ModernBERT-decoder, a division by a width multiplier in Inkling). `get_decoder()`'s output would
    miss these. As logits the model then returns a placeholder of zeros, `[B, T, 1]`.

    Args:
        model: Causal LM. One pass within the `with`, or one before each `take()`; wrappers (DDP, torch.compile, peft)
            may be called.

    Yields:
        `CapturedHeadInput`; its `hidden_states` are `[B, T, H]` in the dtype of the body.

    Raises:
        TypeError, ValueError: The model is not a causal LM with one head.
        ValueError: A gradient is wanted, and the model is in a DistributedDataParallel with `static_graph` or
            `find_unused_parameters`, or FSDP2 shards no trained part apart from the head. They follow outputs of their
            modules: gradients would not be averaged.

    Example::

        with capture_head_input(model) as captured:
            model(input_ids=input_ids, attention_mask=attention_mask)
        out = fused_linear_logprobs(captured.hidden_states[:, :-1], token_ids=input_ids[:, 1:], **lm_head_inputs(model))
    """
    head = output_head(unwrap(model))
    if torch.is_grad_enabled() and dist.is_available() and dist.is_initialized():
        _check_averaging(model, head)
    captured = CapturedHeadInput()

    def keep(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("adapter_names") is not None:  # peft passes it to layers that have adapters
            raise ValueError("adapter_names must not be given where the head has adapters: all rows get the same")
        captured._inputs.append(hidden_states)
        device = hidden_states.device.type
        captured._autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return hidden_states.new_zeros((*hidden_states.shape[:-1], 1))

    with turn(head), Patches((head, "forward", keep)):  # its forward hooks run as always
        yield captured


def _check_averaging(model: nn.Module, head: nn.Module) -> None:
    """Refuse wrappers that average gradients only where the loss comes from the model's outputs."""
    shards: list[nn.Module] = []
    for module in model.modules():
        for option in ("static_graph", "find_unused_parameters"):
            if isinstance(module, nn.parallel.DistributedDataParallel) and getattr(module, option):
                raise ValueError(
                    f"DistributedDataParallel must have {option}=False; got True. It then follows the outputs of the "
                    "model, which are no part of a loss from the head's input: gradients would not be averaged. "
                    "Or wrap a module whose forward returns the loss"
                )
        if any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__):
            raise ValueError(
                "FullyShardedDataParallel (FSDP1) starts its backward at the model's outputs, which are no part of a "
                "loss from the head's input: use fully_shard (FSDP2), or wrap a module whose forward returns the loss"
            )
        if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
            shards.append(module)
    before = [part for part in shards if all(module is not head for module in part.modules())]
    if not shards or any(p.requires_grad for part in before for p in part.parameters()):
        return
    if any(p.requires_grad for p in model.parameters()):
        raise ValueError(
            "fully_shard (FSDP2) must also be called on a trained part before the head, such as each layer; got no "
            "such part. It follows the outputs of what it shards, and the model's are no part of a loss from the "
            "head's input: gradients would not be averaged. Or shard a module whose forward returns the loss"
        )


@eager  # the head's forward is replaced for the pass, which a compiled caller cannot follow
def head_hidden_states(
    model: nn.Module, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
) -> Tensor:
    """The states that the model's head would multiply, from the model's own forward; no logits are computed.

    Position t predicts token t + 1, so that with `hidden = head_hidden_states(model, ids)` the log-probs of
    `ids[:, 1:]` are `fused_linear_logprobs(hidden[:, :-1], token_ids=ids[:, 1:], **lm_head_inputs(model)).logps`.

    Args:
        model: Causal LM (`capture_head_input` says which).
        input_ids: `[B, T]` integers.
        attention_mask: `[B, T]`, or None.
        **kwargs: Further arguments of the model (`position_ids`, `pixel_values`, `logits_to_keep`, ...). `use_cache` is
            False unless given. With padding on the left, a model with learned positions needs `position_ids`.

    Returns:
        `[B, T, H]` (fewer positions with `logits_to_keep`), in the dtype of the body and its autograd graph.

    Raises:
        TypeError: `labels` are given: there are no logits for a loss.
        RuntimeError: The head is not called exactly once, or gets other positions than those of `input_ids`.

    Equivalent: the input of `model.get_output_embeddings()` in `model(input_ids, attention_mask, **kwargs)`.
    """
    if kwargs.get("labels") is not None:
        raise TypeError("head_hidden_states takes no labels: without logits the model cannot make a loss")
    if attention_mask is not None:
        kwargs["attention_mask"] = attention_mask
    if accepts(model, "use_cache"):
        kwargs.setdefault("use_cache", False)
    with capture_head_input(model) as captured:
        model(input_ids=input_ids, **kwargs)
    hidden_states = captured.hidden_states
    if kwargs.get("logits_to_keep") is None and hidden_states.shape[:-1] != input_ids.shape:
        raise RuntimeError(
            f"the head must see one state for each of input_ids, {tuple(input_ids.shape)}; it saw "
            f"{tuple(hidden_states.shape[:-1])} (virtual tokens of prompt tuning, or images?). Use capture_head_input "
            "and pick the positions"
        )
    return hidden_states


def accepts(model: nn.Module, name: str) -> bool:
    """Whether the model's forward takes the keyword."""
    parameters = forward_parameters(model)
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def forward_parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """What the model's own forward takes."""
    return inspect.signature(base_model(model).forward).parameters
