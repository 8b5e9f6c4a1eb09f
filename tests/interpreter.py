"""Triton's interpreter, quicker and exact: what it spends most time on is done once or by numpy, with the same result."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable
from types import ModuleType

import numpy as np
from triton import language as tl
from triton.runtime import interpreter


def patch() -> None:
    """Changes the interpreter of this process."""
    interpreter.InterpretedFunction.__call__ = _call
    interpreter._get_np_dtype = _dtype_of
    interpreter.TritonSemantic.binary_op_sanitize_overflow_impl = _refuse_overflow
    interpreter.InterpreterBuilder.create_dot = _create_dot
    interpreter._patch_lang = _patch_language


_patch_by_inspection = interpreter._patch_lang
_of_languages: dict[frozenset[str], list[tuple[object, str, object]]] = {}


def _patch_language(function: Callable) -> interpreter._LangPatchScope:
    """Its own form looks through all of triton's language at each launch: what it sets is kept from the first."""
    seen = frozenset(x.__name__ for x in function.__globals__.values() if x is tl or x is tl.core)
    if seen not in _of_languages:
        scope = _patch_by_inspection(function)
        _of_languages[seen] = [(owner, name, vars(owner)[name]) for owner, name, _ in scope._changes]
        return scope
    scope = interpreter._LangPatchScope()
    for owner, name, value in _of_languages[seen]:
        scope.set_attr(owner, name, value)
    return scope


_call_and_patch = interpreter.InterpretedFunction.__call__


def _call(function: interpreter.InterpretedFunction, *args: object, **kwargs: object) -> object:
    """Calls a helper of a kernel; its own form patches triton's language at each call, which the kernel's start did."""
    if all(x.range.__module__ == interpreter.__name__ for x in _languages(function.fn)):
        return function.rewrite()(*args, **kwargs)
    return _call_and_patch(function, *args, **kwargs)


@functools.cache
def _languages(function: Callable) -> list[ModuleType]:
    return [x for x in vars(sys.modules[function.__module__]).values() if x is tl or x is tl.core]


_dtype_of_scalar = functools.cache(interpreter._get_np_dtype)


def _dtype_of(kind: tl.dtype) -> np.dtype:
    """Its own form builds the table of all dtypes at each call."""
    return _dtype_of_scalar(tl.uint64 if kind.scalar.is_ptr() else kind.scalar)


def _refuse_overflow(semantic: object, a: tl.tensor, b: tl.tensor, operation: Callable) -> None:
    """Of sums, differences and products of signed integers; its own form makes ten tensors of triton's."""
    kind = a.type.scalar
    if kind.int_bitwidth < 64 and kind.is_int_signed():  # unsigned ones wrap, in hashes of vLLM's
        exact = getattr(operator, operation.__name__)(a.handle.data.astype(np.int64), b.handle.data.astype(np.int64))
        fits = (exact >= kind.get_int_min_value()) & (exact <= kind.get_int_max_value())
        assert fits.all(), f"{kind} overflow in {operation.__name__}"


_create_dot_of_numpy = interpreter.InterpreterBuilder.create_dot


def _create_dot(builder: object, a: interpreter.TensorHandle, b: interpreter.TensorHandle,
                d: interpreter.TensorHandle, *options: object) -> interpreter.TensorHandle:  # fmt: skip
    """In fp64: numpy's fp32 product may round a row by its place in the tile, so that a score would depend on its batch.

    OpenBLAS's kernels for AVX2 do, from the sixth of 16 rows on.
    """
    if not a.data.dtype == b.data.dtype == d.data.dtype == np.float32:
        return _create_dot_of_numpy(builder, a, b, d, *options)
    product = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)
