"""A test double of CUDA: tensors that say `cuda:0`, hold their data on the CPU, and refuse what a GPU refuses.

Inside `cuda_double()` the package takes its GPU branches, with numbers: library products run by the CPU, Triton kernels
in its interpreter with a GPU's launch configurations. Other than on a CPU,

- tensors of two devices do not mix, except as PyTorch allows (0-d CPU tensors, indices, copies);
- products with fp32 output take what cuBLAS takes (ATen/native/cuda/Blas.cpp and CUDABlas.cpp of PyTorch 2.10 to 2.13);
- new memory holds NaN;
- a 0-d operand of a pointwise operator has the digits of the dtype that it is computed in (Loops.cuh; the CPU's kernels
  read a number of fp32 as it is);
- operators that wait for the device are counted by name, or refused under `torch.cuda.set_sync_debug_mode("error")`;
- kernels are counted by name, and take CUDA tensors only.

C++ sees CPU tensors: an operator made of others that reads the device there must be added to `_Devices`, as `one_hot`.
It cannot show what the compiled kernels, their speed, streams or graphs do.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton.language as tl
from grpo_fused.kernels import head_launch
from recording import CostRecorder
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle
from triton.tools.tensor_descriptor import TensorDescriptor

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)


class CudaTensor(torch.Tensor):
    """A tensor on `cuda:0` whose data are in the CPU tensor `data_on_cpu`."""

    data_on_cpu: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, x: Tensor) -> CudaTensor:
        # autograd runs it as a CPU tensor: a build without CUDA has no queue for devices
        made = torch.Tensor._make_wrapper_subclass(
            cls, x.shape, strides=x.stride(), storage_offset=x.storage_offset(), dtype=x.dtype, device="cpu"
        )
        made.data_on_cpu = x
        return made

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        return self.data_on_cpu.data_ptr()

    def untyped_storage(self) -> Any:
        return self.data_on_cpu.untyped_storage()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def __repr__(self, **_: Any) -> str:
        return f"CudaTensor({self.data_on_cpu})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func} on a tensor of a CUDA double that has ended")


class CudaGenerator(torch.Generator):
    """A generator of a CUDA device, where one of the CPU is refused; in place of `torch.Generator` it makes both."""

    def __new__(cls, device: Any = "cpu") -> torch.Generator:
        return super().__new__(cls if torch.device(device).type == "cuda" else cls.__base__)


class CudaDouble(CostRecorder):
    """The device: operators, products and bytes as `CostRecorder` counts them; also waits and kernel launches."""

    def __init__(self, capability: tuple[int, int], multiprocessors: int) -> None:
        super().__init__()
        self.capability = capability
        self.properties = SimpleNamespace(
            name="CUDA double", major=capability[0], minor=capability[1], multi_processor_count=multiprocessors,
            L2_cache_size=2**20, total_memory=2**34,
        )  # fmt: skip
        self.waits: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self.sync_debug_mode = "default"
        self.graph: _Graph | None = None

    def wait(self, what: str) -> None:
        """The host waits for the device."""
        self.waits[what] += 1
        if self.sync_debug_mode == "error" or self.graph is not None:
            raise RuntimeError(f"called a synchronizing CUDA operation: {what}")

    def copy(self, x: Tensor, device: torch.device) -> Tensor:
        """A copy of `x` on another device."""
        self.wait(f"copy to {device.type}")
        if device.type == "cpu":
            return x.data_on_cpu.clone()
        made = x.detach().clone()
        self.record(aten.clone.default, (), made)
        return CudaTensor(made)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        device = kwargs.get("device")
        if device is not None and device.type == "cuda":
            kwargs["device"] = torch.device("cpu")
        elif not any(isinstance(x, CudaTensor) for x in tensors):
            return func(*args, **kwargs)
        if func.namespace == "grpo_fused":  # its body sees CUDA tensors
            with active(self):
                return OPDEFS[func._schema.name]._init_fn(*args, **kwargs)
        if name == "copy_" and len({type(x) for x in tensors}) > 1:
            self.wait("copy_")
        elif any(x.dim() > 0 and not isinstance(x, CudaTensor) for x in _on_one_device(name, args, tensors)):
            raise RuntimeError(f"Expected all tensors to be on the same device, but found cuda:0 and cpu in {func}")
        if name in WAITS or (name in INDEXES and any(_is_waited_for(x) for x in args[1])):
            self.wait(name)
        mine = {id(x.data_on_cpu if isinstance(x, CudaTensor) else x): x for x in tensors}
        given, options = tree_map_only(CudaTensor, lambda x: x.data_on_cpu, (args, kwargs))
        if torch.Tag.pointwise in func.tags and len(given) > 1 and all(isinstance(x, Tensor) for x in args[:2]):
            given = (*_as_computed(args[0], args[1]), *given[2:])
        body = self._fp32_product if func in FP32_PRODUCTS else func
        out = body(*given, **options)
        if self.graph is not None:
            self.graph.steps.append(lambda: _overwrite(out, body(*given, **options)))
        if name.startswith(("empty", "new_empty")) and out.is_floating_point():
            out.fill_(torch.nan)
        self.record(func, given, out)
        # what was written to is the same tensor as before
        return tree_map_only(Tensor, lambda x: mine[id(x)] if id(x) in mine else CudaTensor(x), out)

    def _fp32_product(self, *args: Any, out: Tensor | None = None, beta: float = 1, alpha: float = 1) -> Tensor:
        """`mm` and `addmm` with `out_dtype`, under the conditions of PyTorch's own."""
        *given, a, b, out_dtype = args
        added = given[0] if given else None
        narrow = (torch.float16, torch.bfloat16)
        _require(a.dim() == b.dim() == 2 and a.shape[1] == b.shape[0], "mat1 and mat2 shapes cannot be multiplied")
        _require(a.dtype == b.dtype, "input dtypes must be the same")
        _require(out is None or out.dtype == out_dtype, "out_dtype must be the dtype of the provided out tensor")
        _require(
            out_dtype == a.dtype or (out_dtype == torch.float32 and a.dtype in narrow),
            "out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs",
        )
        _require(added is None or added.dtype in (out_dtype, a.dtype), "self dtype must match out_dtype or mat1 dtype")
        if a.dtype == torch.bfloat16:
            _require(self.capability >= (8, 0), "CUBLAS_STATUS_NOT_SUPPORTED: bf16 before compute capability 8.0")
        if a.dtype == torch.float16:
            _require(
                not torch.backends.cuda.matmul.allow_fp16_accumulation,
                "gemm input type at::Half and output type float is not supported with allowFP16AccumulationCuBLAS",
            )
        product = torch.mm(a.to(out_dtype), b.to(out_dtype)) * alpha
        if added is not None and beta != 0:
            product = product + added.to(out_dtype) * beta
        return product if out is None else out.copy_(product)


FP32_PRODUCTS = {aten.mm.dtype, aten.mm.dtype_out, aten.addmm.dtype, aten.addmm.dtype_out}

WAITS = {
    "_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique", "_unique2", "unique_dim",
    "unique_consecutive", "bincount", "repeat_interleave",
}  # fmt: skip
"""Operators whose result's shape, or Python value, depends on values."""

INDEXES = {"index", "index_put", "index_put_", "_index_put_impl_"}


def _is_waited_for(index: Tensor | None) -> bool:
    """Whether an index is a mask, whose positions are counted on the device, or has to be copied there."""
    return index is not None and (index.dtype in (torch.bool, torch.uint8) or not isinstance(index, CudaTensor))


def _on_one_device(name: str, args: Any, tensors: list[Tensor]) -> list[Tensor]:
    """The arguments that must be on the same device; indices may be on the CPU."""
    indices = [id(x) for x in args[1] if x is not None] if name in INDEXES else []
    return [x for x in tensors if id(x) not in indices]


def _as_computed(*operands: Tensor) -> list[Tensor]:
    """Their data; a 0-d tensor of the GPU is rounded to the dtype that it is promoted to beside the other."""
    data = [x.data_on_cpu if isinstance(x, CudaTensor) else x for x in operands]
    dtype = torch.result_type(*data)
    rounds = [isinstance(x, CudaTensor) and x.dim() == 0 and x.is_floating_point() for x in operands]
    return [x.to(dtype) if here and dtype.is_floating_point else x for x, here in zip(data, rounds, strict=True)]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


class _Devices(TorchFunctionMode):
    """What a build without CUDA refuses before an operator is dispatched."""

    def __init__(self, double: CudaDouble) -> None:
        super().__init__()
        self.double = double

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        generator, device = kwargs.get("generator"), kwargs.get("device")
        if generator is not None and isinstance(generator, CudaGenerator) != ("cuda" in str(device)):
            raise RuntimeError(f"Expected a generator of the device {device or 'cpu'}")
        if func in (torch.tensor, torch.as_tensor):
            kwargs.pop("device", None)
            made = func(*args, **kwargs)
            return made if device is None else self._move(made, torch.device(device))
        if func is Tensor.cuda or func is Tensor.cpu:
            return self._move(args[0], torch.device(func.__name__))
        if func is Tensor.to:
            x, *rest = args
            copies = kwargs.pop("copy", False)
            device, dtype, *_ = torch._C._nn._parse_to(*rest, **kwargs)
            moved = x if device is None else self._move(x, device)
            moved = moved if dtype is None else func(moved, dtype)
            return moved.clone() if copies and moved is x else moved
        # it makes a tensor on the device that C++ sees
        if func is torch.nn.functional.one_hot and isinstance(args[0], CudaTensor):
            return CudaTensor(func(args[0].data_on_cpu, *args[1:], **kwargs))
        return func(*args, **kwargs)

    def _move(self, x: Tensor, device: torch.device) -> Tensor:
        return x if x.device.type == device.type else _Copy.apply(x, device, self.double)


class _Copy(torch.autograd.Function):
    """A copy on another device, and of its gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, device: torch.device, double: CudaDouble) -> Tensor:
        ctx.device, ctx.double = x.device, double
        return double.copy(x, device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.double.copy(gradient, ctx.device), None, None


@contextmanager
def active(double: CudaDouble) -> Iterator[None]:
    """Its two modes."""
    with double, _Devices(double):
        yield


class _Graph:
    """A CUDA graph: operators and launches are captured with their tensors, and called again on what these then hold."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], None]] = []

    def replay(self) -> None:
        with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
            for step in self.steps:
                step()


def _overwrite(old: Any, new: Any) -> None:
    """The result of an operator that is called again goes where its first result is."""
    for was, x in zip(tree_leaves(old), tree_leaves(new), strict=True):
        if isinstance(was, Tensor) and was is not x and was.data_ptr() != x.data_ptr():
            was.copy_(x)


class _Stream:
    """A stream: everything is done at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, other: _Stream) -> None:
        pass

    synchronize = wait_stream


class _Event:
    """A CUDA event: the time of the host."""

    def __init__(self, **_: Any) -> None:
        self.at = 0.0

    def record(self, *_: Any) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        return 1e3 * (end.at - self.at)


def _counting(double: CudaDouble, launch: Callable[..., Any]) -> Callable[..., Any]:
    """Triton's launch in the interpreter, counted; it takes the data of CUDA tensors, and no tensor of the CPU."""

    def data(x: Any) -> Any:
        if isinstance(x, TensorDescriptor):
            return TensorDescriptor(data(x.base), x.shape, x.strides, x.block_shape, x.padding)
        if isinstance(x, Tensor) and not isinstance(x, CudaTensor):
            raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        return x.data_on_cpu if isinstance(x, CudaTensor) else x

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        double.launches[self.fn.__name__] += 1
        given = [data(x) for x in args], {name: data(x) for name, x in kwargs.items()}

        def step() -> None:
            launch(self, *given[0], **given[1])

        if double.graph is not None:
            double.graph.steps.append(step)
        with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
            step()

    return launched


_INTERPRETERS_CAST = InterpreterBuilder.cast_impl


def _cast(self: Any, x: Any, dtype: Any) -> Any:
    """The interpreter's cast between fp32 and bf16, rounded to nearest as on a GPU, where its own cuts off."""
    if {x.dtype.scalar, dtype.scalar} != {tl.float32, tl.bfloat16}:
        return _INTERPRETERS_CAST(self, x, dtype)
    data = torch.from_numpy(x.data)
    if dtype.scalar == tl.float32:
        return TensorHandle(data.view(torch.bfloat16).float().numpy(), tl.float32)
    return TensorHandle(data.bfloat16().view(torch.uint16).numpy(), tl.bfloat16)


@contextmanager
def cuda_double(capability: tuple[int, int] = (9, 0), multiprocessors: int = 2) -> Iterator[CudaDouble]:
    """One device `cuda:0` for `torch.cuda` and the package; few multiprocessors, so that persistent programs loop."""
    double = CudaDouble(capability, multiprocessors)

    @contextmanager
    def capture(graph: _Graph, **_: Any) -> Iterator[None]:
        double.graph = graph
        try:
            yield
        finally:
            double.graph = None

    torch_cuda = {
        "is_available": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "device": lambda device: nullcontext(),
        "get_device_capability": lambda device=None: double.capability,
        "get_device_properties": lambda device=None: double.properties,
        "get_device_name": lambda device=None: double.properties.name,
        "synchronize": lambda device=None: double.wait("synchronize"),
        "empty_cache": lambda: None,
        "memory_allocated": lambda device=None: double.allocated,
        "max_memory_allocated": lambda device=None: double.peak,
        "reset_peak_memory_stats": lambda device=None: double.forget(),
        "set_sync_debug_mode": lambda mode: setattr(double, "sync_debug_mode", mode),
        "Event": _Event,
        "Stream": _Stream,
        "current_stream": lambda device=None: _Stream(),
        "stream": lambda stream: nullcontext(),
        "CUDAGraph": _Graph,
        "graph": capture,
    }
    with ExitStack() as stack:
        for name, value in torch_cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(torch, "Generator", CudaGenerator))
        stack.enter_context(mock.patch.object(GridExecutor, "__call__", _counting(double, GridExecutor.__call__)))
        stack.enter_context(mock.patch.object(InterpreterBuilder, "cast_impl", _cast))
        # the interpreter multiplies bf16 as bit patterns, whatever the device is called
        stack.enter_context(mock.patch.object(head_launch, "_interprets", return_value=True))
        stack.enter_context(active(double))
        yield double
