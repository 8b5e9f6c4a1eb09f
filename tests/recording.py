"""The cost of a call, counted in torch's dispatcher: memory, products, operators. The same on every machine and run.

A dispatch mode does not see the operations inside a `torch.library` operator, so the tests call the operator's body.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from grpo_fused.engines import cpu_library


class AllocationRecorder(TorchDispatchMode):
    """Bytes of every new storage that an operator returns: the largest, and the largest sum at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.peak = 0
        self._alive: dict[int, tuple[Any, int]] = {}
        self._sum = 0  # of these, which may include freed ones

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.record(func, args, out)
        return out

    def record(self, func: Any, args: Any, out: Any) -> None:
        """Count an operator's result."""
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                self.largest = max(self.largest, storage.nbytes())
                self._sum -= self._alive[storage._cdata][1] if storage._cdata in self._alive else 0
                self._sum += storage.nbytes()
                self._alive[storage._cdata] = (
                    torch.multiprocessing.reductions.StorageWeakRef(storage),
                    storage.nbytes(),
                )
        if self._sum > self.peak:  # only then the freed ones must be removed
            self._drop_freed()
            self.peak = max(self.peak, self._sum)

    @property
    def allocated(self) -> int:
        """Bytes that are alive now."""
        self._drop_freed()
        return self._sum

    def forget(self) -> None:
        """Count from what is alive now."""
        self._drop_freed()
        self.largest, self.peak = 0, self._sum

    def _drop_freed(self) -> None:
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self._sum = sum(size for _, size in self._alive.values())


def allocated_peak(call: Callable[[], object]) -> int:
    """Bytes of torch's allocator at the peak of a call, operators of `torch.library` too; not of other C++ code."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profiler:
        call()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())), default=0)


class CostRecorder(AllocationRecorder):
    """The same, and every operator with the FLOP of its products, and those of the CPU library."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.kernels = 0
        """operators that would launch a kernel on a GPU: those that write memory"""
        self.flop = 0
        self._patches = ExitStack()

    def __enter__(self):
        for name in _FLOP:
            if hasattr(cpu_library, name):
                self._patches.enter_context(
                    patch.object(cpu_library, name, self._counted(name, getattr(cpu_library, name)))
                )
        return super().__enter__()

    def __exit__(self, *error):
        self._patches.close()
        return super().__exit__(*error)

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args, **options):
            self.calls[name] += 1
            with _disable_current_modes():
                self.flop += _FLOP[name](*args)
            return function(*args, **options)

        return call

    def record(self, func: Any, args: Any, out: Any) -> None:
        """Count an operator, its result, and its products."""
        name = func.overloadpacket.__name__
        self.calls[name] += 1
        self.kernels += not name.startswith(("empty", "new_empty")) and _writes(func, args, out)
        if name in _FLOP:
            self.flop += _FLOP[name](*args)
        super().record(func, args, out)

    def products(self, tokens: int, width: int, vocab: int) -> float:
        """FLOP in head products of so many tokens."""
        return self.flop / (2 * tokens * width * vocab)


def _writes(func: Any, args: Any, out: Any) -> bool:
    """Whether an operator changes an argument, or returns memory that is none of its arguments'."""
    given, made = (
        {x.untyped_storage()._cdata for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)}
        for tree in (args, out)
    )
    return func._schema.is_mutable or bool(made - given)


def _mm(a: Tensor, b: Tensor, *_: Any) -> int:
    return 2 * a.shape[0] * a.shape[1] * b.shape[1]


def _addmm(_c: Tensor, a: Tensor, b: Tensor, *_: Any) -> int:
    return _mm(a, b)


def _head_products(products: cpu_library.HeadProducts, *_: Any) -> int:
    low_rank = 0 if products.low_hidden is None else products.low_hidden.numel()
    return 2 * (products.hidden.numel() + low_rank) * len(products.weight)


def _head_scores(inputs: cpu_library.HeadInputs, *rest: Any) -> int:
    with_sums = len(rest) > 3 and rest[3] is not None
    return (2 if with_sums else 1) * _head_products(inputs.products)


def _head_gradient(inputs: cpu_library.HeadInputs, *rest: Any) -> int:
    offsets, rows, dweight, need_hidden = rest[1], rest[2], rest[6], rest[9] and rest[8] is None  # rest[8]: sums
    if not need_hidden and dweight.numel() == 0 and not rest[10]:
        return 0
    made_again = int((rows >= offsets.shape[1]).sum())  # their exponentials were not kept
    vocab_size, width, rank = inputs.shape
    width += rank
    for_weight = dweight.shape[1] if dweight.numel() > 0 else 0
    return 2 * vocab_size * (rows.shape[0] * (for_weight + width * int(need_hidden)) + width * made_again)


_FLOP = {
    "mm": _mm,
    "addmm": _addmm,
    "head_scores": _head_scores,
    "head_products": _head_products,
    "head_gradient": _head_gradient,
}
