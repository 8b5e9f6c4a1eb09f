"""TRL up to 1.14, whose GRPO, RLOO, DPO and KTO trainers score tokens by functions of `model(...).logits`.

While such a trainer scores, its models stop at their heads and return `HeadLogits` as their logits. The trainer slices
them, divides them by the temperature and hands them to TRL's functions, which then score by our head. DPO and KTO also
log means of logits and the most likely tokens, which are statistics of the head.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from grpo_fused.call.head_parts import QuantizedWeight
from grpo_fused.heads import HeadForm, capture_head_input, check_head
from grpo_fused.heads.check import LMHeadInputs, inputs_of
from grpo_fused.heads.modules import head_parts, output_head, unwrap
from grpo_fused.heads.patches import Replacement
from grpo_fused.integrations.context import holding
from grpo_fused.integrations.trl.adapters import adapted
from grpo_fused.integrations.trl.release import RELEASE, WINDOWS
from grpo_fused.integrations.trl.statistics import extra_statistics

type_of_head = Any  # a `FusedLogProbFunction`, see `head`
ActiveHead = Callable[[], type_of_head]
"""The head that scores in this thread, or None."""
_CROSS_ENTROPY = {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0}
"""Options that torch passes on, as they are by default."""


@dataclass
class HeadLogits:
    """Stands for the logits `[..., V]` of a pass of a model, of which log-probs, entropies and statistics are wanted.

    It can be indexed in all but its last dimension, and divided; what it does not have of a tensor raises. A dataclass,
    so that DistributedDataParallel finds the tensors that the loss depends on; it follows those that are no leaves.
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

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Cross-entropy is a mean of log-probs; torch refuses the rest, with the function's name."""
        is_plain = all(x in (None, _CROSS_ENTROPY.get(name)) for name, x in (kwargs or {}).items())
        if function is not nn.functional.cross_entropy or not is_plain:
            return NotImplemented
        logits, token_ids = args
        return -logits.scores(token_ids, with_entropy=False)[0].mean()

    def __getitem__(self, index: Any) -> HeadLogits:
        is_mask = isinstance(index, Tensor) and index.dtype == torch.bool and index.shape == self.rows.shape[:-1]
        rows = self.rows[index]
        if not is_mask and (not isinstance(index, tuple) or rows.dim() != self.rows.dim() or rows.shape[-1] != 1):
            raise TypeError(
                "logits that were not computed can be sliced, as [:, a:b, :], or indexed by a mask of all positions; "
                f"got the index {index}"
            )
        return self._of(rows)

    def _of(self, rows: Tensor) -> HeadLogits:
        return replace(self, rows=rows, entropies=None)

    def __truediv__(self, divisor: float) -> HeadLogits:
        return replace(self, temperature=self.temperature * divisor)

    def div_(self, divisor: float) -> HeadLogits:
        """Divides in place, as a tensor's."""
        self.temperature *= divisor
        return self

    def contiguous(self) -> HeadLogits:
        """Itself."""
        return self

    def detach(self) -> HeadLogits:
        """States without a history, and known entropies without theirs; the head keeps its own."""
        entropies = None if self.entropies is None else self.entropies.detach()
        return replace(self, hidden_states=self.hidden_states.detach(), entropies=entropies)

    def squeeze(self, dim: int) -> HeadLogits:
        """Without a first dimension of size 1, which packed sequences have."""
        return self._of(self.rows.squeeze(_first(dim)))

    def chunk(self, chunks: int, dim: int = 0) -> tuple[HeadLogits, ...]:
        """Parts of the batch."""
        return tuple(self._of(rows) for rows in self.rows.chunk(chunks, _first(dim)))

    def index_select(self, dim: int, index: Tensor) -> HeadLogits:
        """Sequences of the batch."""
        return self._of(self.rows.index_select(_first(dim), index))

    @property
    def shape(self) -> torch.Size:
        """`[..., V]`"""
        return torch.Size((*self.rows.shape[:-1], self.lm_head["lm_head_weight"].shape[0]))

    def size(self, dim: int) -> int:
        """Of one dimension."""
        return self.shape[dim]

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.hidden_states.device

    def mean(self, dim: int) -> Tensor:
        """The mean logit of each position that counts, `[...]` fp32; 0 at the others, as in what follows."""
        return self._statistic("mean_logits", dim)

    def argmax(self, dim: int) -> Tensor:
        """The first of the tokens with the largest logit, `[...]` int64."""
        return self._statistic("argmax", dim)

    def nansum(self) -> Tensor:
        """The sum of all logits, also of positions that do not count, which KTO logs up to TRL 1.8."""
        everywhere = replace(self, scored=torch.ones_like(self.scored))
        return everywhere.mean(-1).nansum() * self.shape[-1]

    def scores(
        self, token_ids: Tensor, row_mask: Tensor | None = None, *, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs and entropies (if asked for) of tokens, `[...]` fp32 each, 0 at positions that do not count."""
        counts = self._counts() if row_mask is None else self._counts() & (row_mask != 0)
        head, outputs = self.lm_head, ("entropy",) if with_entropy else ()
        with self._autocast(), holding(adapted, head["lm_head_adapter"]):
            logps, entropies, *_ = self.head.apply(
                self._states(counts), head["lm_head_weight"], head["lm_head_bias"], token_ids[counts],
                self.temperature, 0, head["softcap"], head["logit_scale"], outputs,
            )  # fmt: skip
        return _spread(logps, counts), None if entropies is None else _spread(entropies, counts)

    def _counts(self) -> Tensor:
        return self.scored[self.rows.squeeze(-1)]

    @torch.no_grad()
    def _statistic(self, name: str, dim: int) -> Tensor:
        if dim not in (-1, len(self.shape) - 1):
            raise TypeError(f"logits that were not computed have {name} over their last dimension only; got dim={dim}")
        counts = self._counts()
        token_ids = torch.zeros_like(counts, dtype=torch.int64)
        options: Any = {**self.lm_head, "token_ids": token_ids[counts], "temperature": self.temperature}
        with self._autocast():
            call = self.head.call(self._states(counts), with_entropy=False, **options)
        return _spread(extra_statistics(call, (name,))[name], counts)

    def _states(self, counts: Tensor) -> Tensor:
        return self.hidden_states.index_select(0, self.rows.squeeze(-1)[counts])

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.autocast or torch.bfloat16, enabled=self.autocast is not None)


def _first(dim: int) -> int:
    if dim != 0:
        raise TypeError(f"logits that were not computed have only their first dimension to divide; got dim={dim}")
    return dim


def _spread(values: Tensor, counts: Tensor) -> Tensor:
    """`[...]`: values where a position counts, 0 elsewhere."""
    return values.new_zeros(counts.shape).masked_scatter(counts, values)


def selective_log_softmax(
    logits: HeadLogits, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
) -> Tensor:
    """TRL's, of logits that were not computed."""
    logps, logits.entropies = (logits / temperature).scores(index, row_mask, with_entropy=logits.with_entropy)
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
LEFT = (
    "grpo_fused leaves the loss to the trainer's own logits: before trl 1.15, DPO and KTO are scored by our head "
    "without use_liger_kernel and use_weighting, and in subclasses that do not replace forward, get_batch_logps and "
    "_compute_kl_logps"
)
FUNCTIONS: tuple[Callable[..., Any], ...] = (
    selective_log_softmax, entropy_from_logits, selective_log_softmax_and_entropy,
)  # fmt: skip
"""Of `trl.trainer.utils`, by the same names; the last one is new in 1.14."""
LOSSES = ("_compute_loss", "get_batch_loss_metrics", "compute_ref_log_probs", "compute_reference_log_probs")
"""Methods of the DPO and KTO trainers that call their models; the second up to 1.4, the last up to 1.5."""

READERS = ("forward", "get_batch_logps", "_compute_kl_logps")
"""Further methods of KTO trainers that read logits. ms-swift has its own, which do more with them."""


def stop_at_the_head(module: ModuleType, trainer: type, active_head: ActiveHead) -> Iterator[Replacement]:
    """What makes the GRPO or RLOO trainer of a module score by our head where one is active."""
    yield from _take_head_logits(module)
    name = "_get_per_token_logps_and_entropies"
    yield trainer, name, stopping_at_the_head(getattr(trainer, name), active_head)


def stop_the_loss_at_the_head(trainer: type, active_head: ActiveHead) -> Iterator[Replacement]:
    """The same for a DPO or KTO trainer. Up to 1.7, `trl.KTOTrainer` only derives from the one that is meant."""
    (owner,) = (kind for kind in trainer.__mro__ if LOSSES[0] in vars(kind) or LOSSES[1] in vars(kind))
    yield from _take_head_logits(sys.modules[owner.__module__])
    for name in LOSSES:
        if method := vars(owner).get(name):
            yield owner, name, stopping_the_loss(method, owner, active_head)


def _take_head_logits(module: ModuleType) -> Iterator[Replacement]:
    """The functions are replaced as a trainer's module has them.

    axolotl puts others into `trl.trainer.utils`, before or after the module is imported.
    """
    for function in FUNCTIONS:
        if original := vars(module).get(function.__name__):
            yield module, function.__name__, taking_head_logits(original, function)


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


def stopping_the_loss(method: Callable[..., Any], owner: type, active_head: ActiveHead) -> Callable[..., Any]:
    """One of `LOSSES` of a class; its models compute no logits where a head of ours is active, unless asked for."""

    @functools.wraps(method)
    def compute(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        head = active_head()
        returns_outputs = kwargs.get("return_outputs", len(args) > 2 and args[2])  # with logits, for a metric
        if head is None or returns_outputs:
            return method(trainer, *args, **kwargs)
        reads_itself = any(getattr(type(trainer), name, None) is not getattr(owner, name, None) for name in READERS)
        if reads_itself or trainer.args.use_liger_kernel or getattr(trainer, "use_weighting", False):
            warnings.warn(LEFT, stacklevel=2)  # shown once
            return method(trainer, *args, **kwargs)
        with ExitStack() as stack:
            for model, with_entropy in ((trainer.model, True), (trainer.ref_model, False)):
                if model is not None:
                    stack.enter_context(_head_logits(model, head, with_entropy, everywhere=False))
            return method(trainer, *args, **kwargs)

    return compute


@contextmanager
def _head_logits(model: nn.Module, head: type_of_head, with_entropy: bool, everywhere: bool) -> Iterator[None]:
    """`model(...)` returns `HeadLogits` in the block."""
    form, inner = check_head(model), unwrap(model)
    with capture_head_input(inner) as captured:

        def put(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
            mask, (hidden_states, autocast) = kwargs.get("attention_mask"), captured.take()
            batch, length, width = hidden_states.shape
            rows = torch.arange(batch * length, device=hidden_states.device).view(batch, length, 1)
            scored = torch.ones_like(rows, dtype=torch.bool)
            if mask is not None:
                _check_length(length, mask.shape[1], kwargs.get("logits_to_keep"))
                if not everywhere:  # a position scores the next token
                    scored = nn.functional.pad(mask[:, 1:], (0, 1))[:, -length:] != 0
            states, lm_head = hidden_states.reshape(-1, width), _of_this_pass(form, inner)
            output["logits"] = HeadLogits(states, lm_head, scored.reshape(-1), rows, head, autocast, with_entropy)
            return output

        hook = inner.register_forward_hook(put, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()


def _of_this_pass(form: HeadForm, model: nn.Module) -> LMHeadInputs:
    """The head with the adapters that are active now: a reference may be the model without them, or with others."""
    lm_head = inputs_of(form, head_parts(output_head(model)))
    weight, bias, adapters = lm_head["lm_head_weight"], lm_head["lm_head_bias"], lm_head["lm_head_adapter"]
    if isinstance(weight, QuantizedWeight):
        raise TypeError("TRL's scores take a floating-point head; got a quantised one: dequantise it first")
    lm_head["lm_head_weight"] = _seen(weight)
    lm_head["lm_head_bias"] = None if bias is None else _seen(bias)
    lm_head["lm_head_adapter"] = tuple(replace(x, a=_seen(x.a), b=_seen(x.b)) for x in adapters)
    return lm_head


def _seen(parameter: Tensor) -> Tensor:
    """In the graph of the pass, or in none: the scores of a reference may be made where gradients are on again."""
    return parameter.view_as(parameter) if torch.is_grad_enabled() else parameter.detach()


def _check_length(length: int, width: int, kept: Any) -> None:
    """Raise where the mask does not say which positions the head saw."""
    if length not in (width, kept):
        raise ValueError(
            f"the head must see all {width} positions of the attention mask"
            f"{f' or the last {kept}' if isinstance(kept, int) and kept else ''}; it saw {length} (virtual tokens of "
            "prompt tuning, or a sequence that is divided over devices?)"
        )
