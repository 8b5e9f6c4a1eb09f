"""TRL's fused head replaced: same arguments, same five results, our kernels.

From 1.15 on TRL's trainers all score tokens through `trl.trainer.utils._ChunkedLogProbFunction.apply`, which they look
up at every call. Putting `FusedLogProbFunction` there switches every trainer at once, also those that exist already.
Before, GRPO, RLOO, DPO and KTO score by functions of logits; `logits` brings these here.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import Unpack

from grpo_fused import engines
from grpo_fused.api.custom_objective import eager
from grpo_fused.api.head import HeadOptions, early, head_of, needs_of
from grpo_fused.call.calls import LogprobsCall, tensors_of
from grpo_fused.call.candidates import may_need_whole_head
from grpo_fused.call.layout import Layout
from grpo_fused.call.options import check_choice
from grpo_fused.call.validation import is_alone_with
from grpo_fused.heads import head_hidden_states, lm_head_inputs
from grpo_fused.heads.check import undisturbed
from grpo_fused.heads.modules import adapters_beside, base_model, needs_a_gpu, output_head
from grpo_fused.heads.patches import Patches, Replacement, everywhere
from grpo_fused.integrations.context import holding
from grpo_fused.integrations.trl import logits
from grpo_fused.integrations.trl.adapters import accepting, adapted, with_adapters
from grpo_fused.integrations.trl.divergence import fused_divergence_loss
from grpo_fused.integrations.trl.prediction import PredictedLogprobs, announced
from grpo_fused.integrations.trl.release import FUSED_HEAD, RELEASE
from grpo_fused.integrations.trl.statistics import extra_statistics
from grpo_fused.integrations.trl.truncation import announced_candidates
from grpo_fused.integrations.trl.zero import gathered, logprobs_of

HeadImpl = Literal["auto", "chunked", "cuda", "triton", "native"]
"""The engines that do not hold all logits."""
OPTIONAL_OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


class FusedLogProbFunction:
    """Stands for `trl.kernels.ChunkedLogProbFunction`: arguments, results and differentiability are its."""

    impl: HeadImpl = "auto"
    max_scratch_bytes: int | None = None

    @classmethod
    def apply(
        cls,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = OPTIONAL_OUTPUTS,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Per-token log-probs and what else is asked for, each `[N]` fp32.

        Args:
            hidden: [N, H]
            weight: [V, H]
            bias: [V] or None
            targets: [N] int64
            temperature: what the logits are divided by
            chunk_size: TRL's width of a tile; ours have their own
            final_logit_softcapping: softcap, applied after the scale and before the temperature
            logit_scale: what the logits are multiplied by
            outputs: among `OPTIONAL_OUTPUTS`

        Returns:
            log-probs; entropy (differentiable too); log sum of squared probabilities, mean of the logits after scale,
            cap and temperature, and whether the target is the first maximum, which take one more head product if asked
            for. None for what is not.
        """
        bias, adapters = with_adapters(bias)
        call = cls.call(
            hidden, weight, targets, "entropy" in outputs, lm_head_bias=bias, lm_head_adapter=adapters,
            temperature=float(temperature), logit_scale=float(logit_scale), softcap=final_logit_softcapping,
        )  # fmt: skip
        prediction, packed = announced.get(), None
        if prediction is not None and not prediction.used and needs_of(*tensors_of(call)).any():
            if _may_add_rows(call):
                # sets cost little to score again, and a dense dW much: rows are added to the gradient that is there
                prediction.used, prediction.counts.fused = True, prediction.counts.fused + 1
                call = call._replace(run=call.run._replace(adds_to_grad=True, any_whole=False))
            else:
                packed = prediction.take(call.token_ids)
        if packed is None:
            logps, entropies = logprobs_of(early(call))
        else:
            logps, entropies = PredictedLogprobs.apply(*tensors_of(call), call, packed)
        extras = extra_statistics(call, [name for name in OPTIONAL_OUTPUTS[1:] if name in outputs])
        log_sum_sq_probs, mean_logits, is_top1 = map(extras.get, OPTIONAL_OUTPUTS[1:])
        return logps, entropies if call.with_entropy else None, log_sum_sq_probs, mean_logits, is_top1

    @classmethod
    def call(
        cls,
        hidden_states: Tensor,
        lm_head_weight: Tensor,
        token_ids: Tensor,
        with_entropy: bool,
        **options: Unpack[HeadOptions],
    ) -> LogprobsCall:
        """The scores of tokens as a call of this class: over the announced candidate sets, with its own options."""
        candidates, mask = announced_candidates(token_ids, lm_head_weight.shape[0])
        options |= {"impl": cls.impl, "max_scratch_bytes": cls.max_scratch_bytes}
        hidden, head, _, run = head_of(hidden_states, lm_head_weight, token_ids, mask, Layout.of(token_ids), options)
        return LogprobsCall(hidden, head, token_ids, mask, candidates, with_entropy, run)


def _may_add_rows(call: LogprobsCall) -> bool:
    """Whether all tokens have a candidate set, and no other process waits for the gradient of the weight."""
    sets, weight = call.candidates.sets, call.lm_head.weight
    if sets is None or not weight.requires_grad or not is_alone_with(weight):
        return False
    most = engines.largest_sparse_set(call.run.engine, call.lm_head.vocab_size)
    return not may_need_whole_head(sets, call.token_ids, call.mask, most)


_lock = threading.RLock()
_patches = Patches()  # none where neither `patch_trl` nor a block is in force
_patched: type[FusedLogProbFunction] | None = None  # by `patch_trl`
_blocks = 0  # of `use_fused_head` that are running, in all threads
trains_here: ContextVar[bool] = ContextVar("grpo_fused_trains_here", default=False)
"""whether the trainer that is being constructed also trains in a block of `use_fused_head`"""
_of_block: ContextVar[type[FusedLogProbFunction] | None] = ContextVar("grpo_fused_head", default=None)


def active_head() -> type[FusedLogProbFunction] | None:
    """That of the running block, else that of `patch_trl`; None in a thread that only shares TRL's modules."""
    return _of_block.get() or _patched


def patch_trl(head: type[FusedLogProbFunction] = FusedLogProbFunction) -> None:
    """Score tokens by our kernels in every trainer with TRL's fused head, until `unpatch_trl`; the last call counts.

    `DistillationTrainer` computes its divergence by `fused_linear_divergence`. TRL's other trainers compute all logits;
    there it changes nothing. Before TRL 1.15 it switches GRPO, RLOO, DPO and KTO, and not where they are told
    `use_liger_kernel=True`.

    Trainers made from now on also check, at construction, that the head which TRL (1.15) reads off the model's
    configuration is the model's (`RuntimeError` if not: TRL would be silently wrong). They train LoRA on the head,
    which TRL's own would ignore.

    Args:
        head: `FusedLogProbFunction`, or a subclass with another `impl`, which is that of log-probs, or
            `max_scratch_bytes`.

    Trainers that exist already are switched, too, but not checked. What counts is what is patched while `train` runs.

    Raises:
        TypeError: `head` is no such class.
        ValueError: Its `impl` is no engine.
    """
    global _patched
    _check_class(head)
    with _lock:
        _install()
        _patched = head


def _check_class(head: object) -> None:
    if not (isinstance(head, type) and issubclass(head, FusedLogProbFunction)):
        raise TypeError(f"head must be FusedLogProbFunction or a subclass of it; got {head!r}")
    check_choice(head.impl, "impl", HeadImpl)


def unpatch_trl() -> None:
    """Put TRL's own head back, but in running blocks of `use_fused_head`."""
    global _patched
    with _lock:
        _patched = None
        _restore()


@contextmanager
def use_fused_head(head: type[FusedLogProbFunction] = FusedLogProbFunction) -> Iterator[None]:
    """`patch_trl` for a block and its thread: `with use_fused_head(): trainer.train()`."""
    global _blocks
    _check_class(head)
    with _lock:
        _install()
        _blocks += 1
    try:
        with holding(_of_block, head):
            yield
    finally:
        with _lock:
            _blocks -= 1
            _restore()


def _install() -> None:
    global _patches
    if not _patches.names:
        _patches = Patches(*_replacements())


def _replacements() -> Iterator[Replacement]:
    if RELEASE < FUSED_HEAD:
        from trl import DPOTrainer, KTOTrainer
        from trl.trainer import grpo_trainer, rloo_trainer

        yield from logits.stop_at_the_head(grpo_trainer, grpo_trainer.GRPOTrainer, active_head)
        yield from logits.stop_at_the_head(rloo_trainer, rloo_trainer.RLOOTrainer, active_head)
        for trainer in (DPOTrainer, KTOTrainer):
            yield from logits.stop_the_loss_at_the_head(trainer, active_head)
        return
    from trl.trainer import distillation_trainer, utils

    if hasattr(distillation_trainer, "BaseTunerLayer"):  # where peft is installed
        # the other trainers with TRL's fused head, now: a later import would take peft's class
        from trl.trainer import dpo_trainer, grpo_trainer, kto_trainer, rloo_trainer, sft_trainer  # noqa: F401

        layers = accepting(distillation_trainer.BaseTunerLayer, lambda: _patched is not None or trains_here.get())
        yield from everywhere(distillation_trainer, "BaseTunerLayer", layers)
    distillation = distillation_trainer.DistillationTrainer
    yield distillation, "_compute_loss", _with_adapters_of_the_head(distillation._compute_loss, 1)
    for module, name, replaces in (
        (utils, "_ChunkedLogProbFunction", _head_in_place_of),
        (utils, "add_fused_lm_head", _checking),  # trainers that are imported later take it from `utils`
        (distillation_trainer, "_chunked_divergence_loss", _divergence_in_place_of),
    ):
        yield from everywhere(module, name, replaces(getattr(module, name)))


def _restore() -> None:
    if _patched is None and _blocks == 0:
        _patches.undo()


@functools.cache  # another class in each block would compile a compiled model again
def _head_in_place_of(chunked_logprob_function: Any) -> Any:
    class ActiveLogProbFunction:
        @staticmethod
        @eager  # what is announced for a block is no part of a compiled model
        def apply(*args: Any) -> Any:
            return (active_head() or chunked_logprob_function).apply(*args)

    return ActiveLogProbFunction


def _divergence_in_place_of(chunked_divergence_loss: Callable[..., Any]) -> Callable[..., Any]:
    def divergence_loss(*args: Any, **kwargs: Any) -> Any:
        head = active_head()
        if head is None:
            return chunked_divergence_loss(*args, **kwargs)
        return fused_divergence_loss(*args, **kwargs, max_scratch_bytes=head.max_scratch_bytes)

    return divergence_loss


def _checking(add_fused_lm_head: Callable[..., None]) -> Callable[..., None]:
    def add_checked_fused_lm_head(model: Any, *args: Any, **kwargs: Any) -> None:
        add_fused_lm_head(model, *args, **kwargs)
        if active_head():
            model.forward = MethodType(_with_adapters_of_the_head(model.forward.__func__, 0), model)
            check_trl_reads_the_head(model)

    return add_checked_fused_lm_head


def _with_adapters_of_the_head(function: Callable[..., Any], place: int) -> Callable[..., Any]:
    """A function of TRL's that scores tokens with the head that the model has then; `place`: of the model's argument.

    FSDP and peft replace the parameters of a head after the model was patched, and peft may replace the head.
    """

    @functools.wraps(function)
    def scoring(*args: Any, **kwargs: Any) -> Any:
        head = args[place].get_output_embeddings()
        if kwargs.get("fused_lm_head") and active_head() is None and adapters_beside(head, None) != (None, ()):
            raise RuntimeError(
                "the lm head has a LoRA adapter, which TRL's own head leaves out: patch_trl() must be in force "
                "wherever the trainer scores tokens"
            )
        with holding(adapted, head):
            return function(*args, **kwargs)

    return scoring


@torch.no_grad()
def check_trl_reads_the_head(model: Any) -> None:
    """Raise unless what TRL's fused forward makes of a model's head is the model's own.

    Where DeepSpeed ZeRO-3 has partitioned the model, all ranks must call this; they gather a layer at a time.

    Args:
        model: One that `add_fused_lm_head` has patched; its base, if it is peft's.

    Raises:
        RuntimeError: TRL takes another scale or softcap, other hidden states, or more rows of the weight than the model
            does. TRL 1.16 does so without a word (recurrent_gemma, modernbert-decoder, Inkling: off by several nats).
            Or the model is on the CPU, with Liger's layers.
        ValueError: The head is none that the fused form can express, see `grpo_fused.check_head`.
    """
    name = type(model).__name__
    module: Any = output_head(model)
    if needs_a_gpu(model):
        raise RuntimeError(
            f"{name} has layers of Liger's, whose Triton kernels run on a GPU only; the model is on the CPU. "
            "use_liger_kernel=True, in any trainer, puts them into transformers for the whole process: start a new "
            "process with use_liger_kernel=False"
        )
    base = base_model(model)
    with gathered(base, module):
        head = lm_head_inputs(model)
        rows, logits = module.weight.shape[0], head["lm_head_weight"].shape[0]
        ids = torch.arange(1, 5, device=module.weight.device).remainder(rows).unsqueeze(0)
        with undisturbed(base):
            theirs = _what_trl_takes(base, ids)
            hidden = head_hidden_states(base, ids)[0, :-1]

    def same(one: Tensor, other: Tensor) -> bool:
        return one.shape == other.shape and torch.allclose(one.float(), other.float(), rtol=1e-3, atol=1e-3)

    scaled = theirs["logit_scale"] * theirs["hidden"]
    if head["lm_head_bias"] is None and same(scaled, head["logit_scale"] * hidden):
        # MiniCPM3 divides its states where TRL scales the logits: without a bias these are the same
        theirs |= {"hidden": hidden, "logit_scale": head["logit_scale"]}
    misread = [
        f"{field}={theirs[field]} for {name}, whose own head has {head[field]}"  # type: ignore[literal-required]
        for field in ("logit_scale", "softcap")
        if theirs[field] != head[field]  # type: ignore[literal-required]
    ]
    if rows != logits:
        misread.append(f"all {rows} rows of the head of {name}, which has {logits} logits")
    if not same(theirs["hidden"], hidden):
        misread.append(f"the backbone's last hidden states, and {name} does something to them before its head")
    if misread:
        raise RuntimeError(f"TRL's fused head takes {'; and '.join(misread)}: its log-probs would be wrong")


def _what_trl_takes(model: Any, ids: Tensor) -> dict[str, Any]:
    """The hidden states `[T - 1, H]`, softcap and scale that TRL's forward hands its head for `ids` `[1, T]`."""
    taken: dict[str, Any] = {}

    class Recording(FusedLogProbFunction):
        @classmethod
        def apply(cls, *args: Any) -> Any:
            taken.update(hidden=args[0], softcap=args[6], logit_scale=float(args[7]))
            return super().apply(*args)

    with use_fused_head(Recording):
        model(input_ids=ids, labels=ids, fused_lm_head=True)
    return taken
