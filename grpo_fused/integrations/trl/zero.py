"""Models whose parameters DeepSpeed ZeRO-3 has partitioned, before an engine gathers them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from trl.trainer import utils

from grpo_fused.api.autograd import LinearLogprobs
from grpo_fused.call.calls import LogprobsCall, tensors_of
from grpo_fused.heads.patches import Patches


@contextmanager
def gathered(model: nn.Module, head: nn.Module) -> Iterator[None]:
    """The parameters of the head whole for a block, and those of any other module while its own forward runs.

    So the model can run in the block, in the memory of its head and one more layer. All ranks must enter it. Nothing
    happens to parameters that DeepSpeed has not partitioned.
    """
    of_head = set(head.modules())
    # TRL's forward gathers the head, and fails for a model that was made before DeepSpeed's configuration was read
    patches = Patches((utils, "maybe_gather_lm_head_ctx", lambda *parameters: nullcontext()))
    with patches, ExitStack() as stack:
        for module in model.modules():
            parameters = [p for p in module.parameters(recurse=False) if hasattr(p, "ds_status")]
            if parameters and module in of_head:
                stack.enter_context(whole(*parameters))
            elif parameters:
                patches.replace(module, "forward", _gathering(module.forward, parameters))
        yield


def _gathering(forward: Callable[..., Any], parameters: Sequence[nn.Parameter]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def gathering_forward(*args: Any, **kwargs: Any) -> Any:
        with whole(*parameters):
            return forward(*args, **kwargs)

    return gathering_forward


def whole(*parameters: Tensor | None) -> AbstractContextManager[Any]:
    """A block in which partitioned parameters are whole, as TRL's `maybe_gather_lm_head_ctx` (1.12) makes it."""
    partitioned: dict[int, Any] = {id(p): p for p in parameters if hasattr(p, "ds_status")}  # each once: tied ones
    if not partitioned:
        return nullcontext()
    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    apart = [p for p in partitioned.values() if p.ds_status != ZeroParamStatus.AVAILABLE]
    return deepspeed.zero.GatheredParameters(apart) if apart else nullcontext()


def logprobs_of(call: LogprobsCall) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies, whose backward gathers the head if it is partitioned again by then."""
    tensors = tensors_of(call)
    function = _GatheredLogprobs if any(hasattr(x, "ds_status") for x in tensors) else LinearLogprobs
    logps, entropies, _ = function.apply(*tensors, call)
    return logps, entropies


class _GatheredLogprobs(LinearLogprobs):
    """Keeps the parameters themselves, by which DeepSpeed gathers a head."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: LogprobsCall) -> Any:
        ctx.head = weight, bias
        return LinearLogprobs.forward(ctx, hidden, weight, bias, call)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> Any:
        with whole(*ctx.head):  # as TRL does in its own backward
            return LinearLogprobs.backward(ctx, *upstream)
