"""TRL up to 1.14, whose GRPO and RLOO trainers score tokens by functions of `model(...).logits`.

While such a trainer scores, its model stops at its head and returns `HeadLogits` as its logits. The trainer slices
them, divides them by the temperature and hands them to TRL's functions, which then score by our head.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from grpo_fused.call.head_parts import QuantizedWeight
from grpo_fused.heads import CapturedHeadInput, capture_head_input, lm_head_inputs
from grpo_fused.heads.check import LMHeadInputs
from grpo_fused.heads.modules import unwrap
from grpo_fused.heads.patches import Patches
from grpo_fused.integrations.trl.adapters import scored_with
from grpo_fused.integrations.trl.release import RELEASE, WINDOWS

type_of_head = Any  # a `FusedLogProbFunction`, see `head`
ActiveHead = Callable[[], type_of_head]
"""The head that scores in this thread, or None."""


@dataclass
class HeadLogits:
    """Stands for the logits `[..., V]` of a pass of a model, of which only log-probs and entropies are wanted.

    It can be sliced in all but its last dimension, and divided. A dataclass, so that DistributedDataParallel finds the
    tensors that the loss depends on; it follows those that are no leaves.
    """

    hidden_states: Tensor
    """[N, H]: of all positions of the pass"""
    lm_head: LMHeadInputs
    scored: Tensor
    """[N] bool: positions whose scores count; the others get 0"""
    rows: Tensor
    """[..., 1]: which of the N positions these logits are of"""
    head: type_of_head
    autocast: torch.dtype | None
    """of the block in which the model called its head"""
    with_entropy: bool
    """whether log-probs bring entropies, in the same pass"""
    temperature: float = 1.0
    entropies: Tensor | None = None

    def __getitem__(self, index: Any) -> HeadLogits:
        rows = self.rows[index]
        if not isinstance(index, tuple) or rows.dim() != self.rows.dim() or rows.shape[-1] != 1:
            raise TypeError(f"logits that were not computed can be sliced, as [:, a:b, :]; got the index {index}")
        return replace(self, rows=rows)

    def __truediv__(self, divisor: float) -> HeadLogits:
        return replace(self, temperature=self.temperature * divisor)

    def div_(self, divisor: float) -> HeadLogits:
        """Divides in place, as a tensor's."""
        self.temperature *= divisor
        return self

    def squeeze(self, dim: int) -> HeadLogits:
        """Without a first dimension of size 1, which packed sequences have."""
        if dim != 0:
            raise TypeError(f"logits that were not computed have only their first dimension to squeeze; got {dim}")
        return replace(self, rows=self.rows.squeeze(0))

    def scores(
        self, token_ids: Tensor, row_mask: Tensor | None = None, *, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs and entropies (if asked for) of tokens, `[...]` fp32 each, 0 at positions that do not count."""
        rows = self.rows.squeeze(-1)
        counts = self.scored[rows] if row_mask is None else self.scored[rows] & (row_mask != 0)
        head, device = self.lm_head, self.hidden_states.device.type
        autocast = torch.autocast(device, self.autocast or torch.bfloat16, enabled=self.autocast is not None)
        with autocast, scored_with(head["lm_head_adapter"]):
            scores = self.head.apply(
                self.hidden_states.index_select(0, rows[counts]),
                head["lm_head_weight"], head["lm_head_bias"], token_ids[counts], self.temperature, 0,
                head["softcap"], head["logit_scale"], ("entropy",) if with_entropy else (),
            )[:2]  # fmt: skip
        logps, entropies = (None if x is None else x.new_zeros(rows.shape).masked_scatter(counts, x) for x in scores)
        assert logps is not None
        return logps, entropies


def selective_log_softmax(
    logits: HeadLogits, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
) -> Tensor:
    """TRL's, of logits that were not computed."""
    scores = (logits / temperature).scores(index, row_mask, with_entropy=logits.with_entropy)
    logps, logits.entropies = scores
    return logps


def entropy_from_logits(logits: HeadLogits, chunk_size: int = 128) -> Tensor:
    """TRL's; with the entropies of the log-probs, if those brought them."""
    entropies = logits.entropies
    if entropies is None:
        entropies = logits.scores(logits.rows.new_zeros(logits.rows.shape[:-1]), with_entropy=True)[1]
    assert entropies is not None
    return entropies if torch.is_grad_enabled() else entropies.detach()


def selective_log_softmax_and_entropy(
    logits: HeadLogits,
    index: Tensor,
    entropy_requires_grad: bool = True,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """TRL's (1.14)."""
    logps, entropies = (logits / temperature).scores(index, row_mask, with_entropy=True)
    assert entropies is not None
    return logps, entropies if entropy_requires_grad else entropies.detach()


LIGER = (
    "grpo_fused scores the log-probs of the old policy and of the reference; with use_liger_kernel=True this release "
    "of TRL makes the loss from log-probs of its own: set it to False"
)
FUNCTIONS: tuple[Callable[..., Any], ...] = (
    selective_log_softmax, entropy_from_logits, selective_log_softmax_and_entropy,
)  # fmt: skip
"""Of `trl.trainer.utils`, by the same names; the last one is new in 1.14."""


def stop_at_the_head(patches: Patches, module: ModuleType, trainer: type, active_head: ActiveHead) -> None:
    """The trainer of a module scores by our head where one is active.

    The functions are replaced as its module has them: axolotl puts others into `trl.trainer.utils`, before or after the
    module is imported.
    """
    for function in FUNCTIONS:
        if original := vars(module).get(function.__name__):
            patches.replace(module, function.__name__, taking_head_logits(original, function))
    name = "_get_per_token_logps_and_entropies"
    patches.replace(trainer, name, stopping_at_the_head(getattr(trainer, name), active_head))


def taking_head_logits(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """One of TRL's functions of logits, and ours for `HeadLogits`."""

    @functools.wraps(original)
    def function(logits: Any, *args: Any, **kwargs: Any) -> Any:
        return (ours if isinstance(logits, HeadLogits) else original)(logits, *args, **kwargs)

    return function


def stopping_at_the_head(scoring_method: Callable[..., Any], active_head: ActiveHead) -> Callable[..., Any]:
    """A trainer's `_get_per_token_logps_and_entropies`; its model computes no logits where a head of ours is active."""

    @functools.wraps(scoring_method)
    def score(trainer: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        head = active_head()
        if head is None:
            return scoring_method(trainer, model, *args, **kwargs)
        if getattr(trainer, "use_liger_kernel", False):
            warnings.warn(LIGER, stacklevel=2)  # shown once
        counts_padding = RELEASE < WINDOWS and getattr(trainer, "loss_type", None) == "luspo"
        with _head_logits(model, head, kwargs.get("compute_entropy", False), counts_padding):
            return scoring_method(trainer, model, *args, **kwargs)

    return score


@contextmanager
def _head_logits(model: nn.Module, head: type_of_head, with_entropy: bool, everywhere: bool) -> Iterator[None]:
    """`model(...)` returns `HeadLogits` in the block."""
    lm_head = lm_head_inputs(model)
    weight, adapters = lm_head["lm_head_weight"], lm_head["lm_head_adapter"]
    if isinstance(weight, QuantizedWeight):
        raise TypeError("TRL's scores take a floating-point head; got a quantised one: dequantise it first")
    lm_head["lm_head_weight"] = weight.view_as(weight)
    lm_head["lm_head_adapter"] = tuple(replace(x, a=x.a.view_as(x.a), b=x.b.view_as(x.b)) for x in adapters)
    if lm_head["lm_head_bias"] is not None:
        lm_head["lm_head_bias"] = lm_head["lm_head_bias"].view_as(lm_head["lm_head_bias"])
    with capture_head_input(model) as captured:

        def put(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
            mask = kwargs.get("attention_mask")
            output["logits"] = _of_pass(captured, mask, lm_head, head, with_entropy, everywhere)
            if mask is not None:
                _check_length(output["logits"].rows.shape[1], mask.shape[1], kwargs.get("logits_to_keep"))
            return output

        hook = unwrap(model).register_forward_hook(put, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()


def _check_length(length: int, width: int, kept: Any) -> None:
    """Raise where the mask does not say which positions the head saw."""
    if length not in (width, kept):
        raise ValueError(
            f"the head must see all {width} positions of the attention mask"
            f"{f' or the last {kept}' if isinstance(kept, int) and kept else ''}; it saw {length} (virtual tokens of "
            "prompt tuning, or a sequence that is divided over devices?)"
        )


def _of_pass(
    captured: CapturedHeadInput,
    attention_mask: Tensor | None,
    lm_head: LMHeadInputs,
    head: type_of_head,
    with_entropy: bool,
    everywhere: bool,
) -> HeadLogits:
    hidden_states, autocast = captured.take()
    batch, length, width = hidden_states.shape
    rows = torch.arange(batch * length, device=hidden_states.device).view(batch, length, 1)
    scored = torch.ones_like(rows, dtype=torch.bool)
    if attention_mask is not None and not everywhere:  # a position scores the next token
        scored = nn.functional.pad(attention_mask[:, 1:], (0, 1))[:, -length:] != 0
    return HeadLogits(hidden_states.reshape(-1, width), lm_head, scored.reshape(-1), rows, head, autocast, with_entropy)
