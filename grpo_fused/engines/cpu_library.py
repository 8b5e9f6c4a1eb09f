"""The functions of the CPU library (csrc/cpu/api.cpp) on torch tensors.

The library is plain C and knows nothing of torch: one build serves every version. It checks all arguments before it
uses a pointer; a call that it refuses raises RuntimeError with the reason. Callers allocate its results.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

_SCALARS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int64: 3, torch.uint8: 4, torch.int8: 5,
            torch.float8_e4m3fn: 6, torch.int32: 7}  # fmt: skip
_FUNCTIONS = (
    "missing", "instruction_set", "head_layout", "scratch_plan", "head_products", "head_scores", "head_gradient",
    "logit_statistics", "logit_divergence", "set_scores", "set_derivatives", "add_segment_sums",
)  # fmt: skip
"""those that return a text, or NULL"""

BASE_COLUMNS = 32
"""The columns of a quantised weight are a multiple of it, and so are those of a weight beside an adapter."""

SIGNATURE = "8c0f04ff"
"""A hash of the declarations in csrc/cpu/api.cpp (tests/native/test_api.py computes it), which a library must have."""

_library: Any = None


def load(path: Path) -> None:
    """Load the library. Raises OSError if the system cannot, AttributeError if it is of another version."""
    global _library
    library = ctypes.CDLL(str(path))
    library.grpo_signature.restype = ctypes.c_char_p
    if (found := library.grpo_signature().decode()) != SIGNATURE:
        raise AttributeError(f"it was built from other sources (functions {found}, expected {SIGNATURE})")
    for name in _FUNCTIONS:
        getattr(library, f"grpo_{name}").restype = ctypes.c_char_p
    library.grpo_use_threads.argtypes = [ctypes.c_int64]
    _library = library


def missing() -> str:
    """Why this machine cannot run the library; empty if it can."""
    return _library.grpo_missing().decode()


def instruction_set() -> str:
    """What multiplies bf16; the environment variable `GRPO_FUSED_ISA` can choose another."""
    return _library.grpo_instruction_set().decode()


def use_isa(name: str, group: int = 0) -> None:
    """For tests: take another instruction set (`avx2`, `avx512`, `avx512f` without bf16, `amx`), or the best (empty).

    `group`: vocabulary blocks of one product of dH; 0: as many as the instruction set has.
    """
    _library.grpo_use_isa(name.encode(), ctypes.c_int64(group))


def call(name: str, *arguments: Any) -> None:
    """Call a function of csrc/cpu/api.cpp: tensors, numbers and None, in its order; it writes to its results.

    Raises:
        RuntimeError: It refuses an argument, or is not loaded.
    """
    if _library is None:
        raise RuntimeError("the CPU library is not loaded")
    _library.grpo_use_threads(torch.get_num_threads())
    refusal = getattr(_library, f"grpo_{name}")(*map(_argument, arguments))
    if refusal is not None:
        raise RuntimeError(refusal.decode())


HeadShape = tuple[int, int, int]
"""V, H, and the rank of what is added to the weight, or 0"""


class HeadLayout(NamedTuple):
    """How a head is worked on."""

    block_rows: int
    """vocabulary rows of a block"""
    blocks: int
    panel_tokens: int
    """tokens of a panel: exponentials are stored for whole panels"""
    kept_panels: int
    """panels whose exponentials fit the memory that was named"""


def head_layout(
    head_shape: HeadShape, compute: torch.dtype, tokens: int = 0, kept: Tensor | None = None, spill_bytes: int = 0
) -> HeadLayout:
    """In a compute dtype; `kept` is dW's storage or empty."""
    return HeadLayout(*_of_head("head_layout", 4, head_shape, compute, tokens, kept, spill_bytes))


class ScratchPlan(NamedTuple):
    """How the scratch budget of a call is spent."""

    spill_bytes: int
    """for exponentials of tokens that do not fit dW's storage"""
    fixed_bytes: int
    """bytes of everything else, independent of the budget"""
    kept_tokens: int
    """tokens whose exponentials are kept; those of others are computed again"""


def scratch_plan(head_shape: HeadShape, compute: torch.dtype, tokens: int, kept: Tensor, budget: int) -> ScratchPlan:
    """For scores and gradient of so many tokens, with torch's number of threads."""
    return ScratchPlan(*_of_head("scratch_plan", 3, head_shape, compute, tokens, kept, budget))


def scalar(dtype: torch.dtype) -> int:
    """The library's name of a dtype; -1: it has none."""
    return _SCALARS.get(dtype, -1)


class HeadProducts(NamedTuple):
    """hidden @ weight^T * row_scale + low_hidden @ low_weight^T for N tokens."""

    hidden: Tensor
    """[N, H] in the compute dtype"""
    weight: Tensor
    """[V, H], perhaps in int8 or fp8; [V, H / 2] bytes with `codes`"""
    row_scale: Tensor | None = None
    """[V] fp32"""
    group_scale: Tensor | None = None
    """[V, G] fp32: what groups of H / G columns of the weight are multiplied by"""
    codes: Tensor | None = None
    """[16] fp32: what half a byte of the weight stands for"""
    rounded: int = 0
    """`scalar` of the dtype to which numbers, or their products with scales, are rounded first"""
    low_hidden: Tensor | None = None
    """[N, R] fp32"""
    low_weight: Tensor | None = None
    """[V, R]: then `weight` has no gradient"""

    def of_tokens(self, part: slice) -> HeadProducts:
        """Those of some tokens."""
        low_hidden = None if self.low_hidden is None else self.low_hidden[part]
        return self._replace(hidden=self.hidden[part], low_hidden=low_hidden)

    def of_every_row(self, step: int) -> HeadProducts:
        """Those of every `step`-th row of the weight."""
        row_scale, group_scale = (
            None if x is None else x[::step].contiguous() for x in (self.row_scale, self.group_scale)
        )
        low_weight = None if self.low_weight is None else self.low_weight[::step]
        return self._replace(
            weight=self.weight[::step], row_scale=row_scale, group_scale=group_scale, low_weight=low_weight
        )


def head_products(products: HeadProducts, out: Tensor) -> None:
    """out [N, V] fp32"""
    call("head_products", *products, out)


class HeadInputs(NamedTuple):
    """What scores and gradient of N tokens read."""

    products: HeadProducts
    targets: Tensor
    """[N] int64; -1: another rank's"""
    temperature: Tensor
    """[N] fp32"""
    scale: float = 1.0
    softcap: float = 0.0
    """0: none"""
    bias: Tensor | None = None
    """[V] fp32"""
    set_ids: Tensor | None = None
    """[K] int64: candidate sets, ascending within each"""
    set_ranges: Tensor | None = None
    """[N, 2] int64: from where to where in `set_ids`; from -1 where a token has none"""

    def of_tokens(self, part: slice) -> HeadInputs:
        """Those of some tokens."""
        ranges = None if self.set_ranges is None else self.set_ranges[part]
        return self._replace(
            products=self.products.of_tokens(part), targets=self.targets[part], temperature=self.temperature[part],
            set_ranges=ranges,
        )  # fmt: skip

    def of_every_row(self, step: int) -> HeadInputs:
        """With every `step`-th row of the weight; targets are left as they are."""
        bias = None if self.bias is None else self.bias[::step].contiguous()
        return self._replace(products=self.products.of_every_row(step), bias=bias)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """As the library takes them."""
        return (*self.products, *self[1:])

    @property
    def shape(self) -> HeadShape:
        """That of the head."""
        hidden, weight, *_, low_weight = self.products
        return len(weight), hidden.shape[-1], 0 if low_weight is None else low_weight.shape[-1]


class HeadSums(NamedTuple):
    """What dH is made of once the derivatives are known, for tokens whose maximum is not above the offset."""

    offset: Tensor
    """[N] fp32"""
    values: Tensor
    """[N, H + R] fp32: sums over the vocabulary, without the target's row, of exp(z - offset) dz/d(product) W"""


def head_scores(
    inputs: HeadInputs, with_entropy: bool, kept: Tensor, spill: Tensor, sum_offset: Tensor | None = None
) -> tuple[Tensor, Tensor, HeadSums | None]:
    """Statistics [4, N], offsets of the exponentials that go to `kept` and `spill`, and sums if they have an offset.

    One product, two with sums.
    """
    hidden, (_, width, rank) = inputs.products.hidden, inputs.shape
    layout = head_layout(inputs.shape, hidden.dtype, len(hidden), kept, spill.numel())
    statistics = hidden.new_zeros((4, len(hidden)), dtype=torch.float32)
    offsets = statistics.new_empty((layout.blocks, layout.kept_panels * layout.panel_tokens))
    sums = None if sum_offset is None else HeadSums(sum_offset, statistics.new_empty((len(hidden), width + rank)))
    call("head_scores", *inputs.arguments, with_entropy, kept, spill, statistics, offsets, *(sums or (None, None)))
    return statistics, offsets, sums


def head_gradient(
    inputs: HeadInputs, statistics: Tensor, offsets: Tensor, rows: Tensor, dlogp: Tensor, dentropy: Tensor | None,
    entries: tuple[Tensor, Tensor, Tensor] | None, dweight: Tensor, spill: Tensor, sums: HeadSums | None,
    need_hidden: bool, need_bias: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """(dH [rows, H + R], db [V]) fp32, None where not needed; dW goes to `dweight`. A product for each of dH and dW.

    `entries` are places in `rows` and ids in int32, and dL/d(product) in fp32, in the order of the blocks of ids, then
    of places. With `sums` dH takes no product.
    """
    vocab, width, rank = inputs.shape
    dhidden = statistics.new_empty((len(rows), width + rank)) if need_hidden else None
    dbias = statistics.new_empty(vocab) if need_bias else None
    call(
        "head_gradient", *inputs.arguments, statistics, offsets, rows, dlogp, dentropy,
        *(entries or (None, None, None)), dweight, spill, *(sums or (None, None)), dhidden, dbias,
    )  # fmt: skip
    return dhidden, dbias


class _View(ctypes.Structure):
    """`grpo::Tensor` of csrc/cpu/arguments.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("scalar", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("sizes", 2 * ctypes.c_int64),
        ("strides", 2 * ctypes.c_int64),
    )


def _argument(x: Any) -> Any:
    if isinstance(x, Tensor):
        if x.device.type != "cpu":
            raise RuntimeError(f"all tensors must be on the CPU; got one on {x.device}")
        view = _View(x.data_ptr(), scalar(x.dtype), x.dim(), x.shape[:2], x.stride()[:2])
        return ctypes.byref(view)
    if x is None or isinstance(x, ctypes.Array):
        return x
    return ctypes.c_double(x) if isinstance(x, float) else ctypes.c_int64(x)


def _of_head(
    name: str, count: int, head_shape: HeadShape, compute: torch.dtype, tokens: int, kept: Tensor | None, memory: int,
) -> list[int]:  # fmt: skip
    """So many numbers, which a function has for a head."""
    row_bytes = 0 if kept is None or kept.numel() == 0 else kept.shape[1] * kept.element_size()
    out = (count * ctypes.c_int64)()
    call(name, *head_shape, compute == torch.bfloat16, tokens, row_bytes, memory, out)
    return list(out)
