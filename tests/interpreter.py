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
    interpreter.TritonSemantic.binary_op_type_checking_impl = _operands
    tl.core.tensor.__init__ = _init_tensor
    tl.core.block_type.__init__ = _init_block_type
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


_convert_operands = interpreter.TritonSemantic.binary_op_type_checking_impl


def _operands(semantic: object, a: object, b: object, *options: object, **more: object) -> tuple[tl.tensor, tl.tensor]:
    """Those of one shape and of a dtype that is not promoted stay as they are; its own form takes ten calls to see it."""
    if isinstance(a, tl.tensor) and a.dtype.name in UNPROMOTED:
        if isinstance(b, tl.tensor) and a.type.name == b.type.name:
            return a, b
        if type(b) in (float, int) and a.dtype.name == "fp32" and a.type.is_block():
            return a, _constant(a.type, b or 0)
    return _convert_operands(semantic, a, b, *options, **more)


UNPROMOTED = ("fp32", "int32", "int64")


def _constant(kind: tl.block_type, value: float) -> tl.tensor:
    key = (kind.name, value)
    if key not in _constants:
        data = np.full(tuple(kind.shape), value, np.float32)
        _constants[key] = tl.tensor(interpreter.TensorHandle(data, tl.float32), kind)
    return _constants[key]


_constants: dict[tuple[str, float], tl.tensor] = {}


_init_tensor_anew = tl.core.tensor.__init__
_shapes_and_sizes: dict[str, tuple[tl.tuple, tl.constexpr]] = {}


def _init_tensor(tensor: tl.tensor, handle: object, kind: tl.dtype) -> None:
    """Its own form makes a constant of triton's for each dimension and for the size; a type's name says them all."""
    if kind.name not in _shapes_and_sizes:
        _init_tensor_anew(tensor, handle, kind)
        _shapes_and_sizes[kind.name] = tensor.shape, tensor.numel
    tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
    tensor.shape, tensor.numel = _shapes_and_sizes[kind.name]


_init_block_type_anew = tl.core.block_type.__init__
_fields_of_block_types: dict[tuple, dict[str, object]] = {}


def _init_block_type(kind: tl.block_type, element_ty: tl.dtype, shape: object) -> None:
    """Its own form checks the shape and writes the name for each result of an operation."""
    key = (element_ty.name, *[size.value if type(size) is tl.constexpr else size for size in shape])
    if key not in _fields_of_block_types:
        _init_block_type_anew(kind, element_ty, shape)
        _fields_of_block_types[key] = vars(kind)
    vars(kind).update(_fields_of_block_types[key])


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
