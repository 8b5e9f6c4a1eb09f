"""Which engine `impl="auto"` takes on a GPU, as data by architecture.

`chunked` multiplies by the library and passes over the logits; `triton` keeps them in registers. A wide head hides the
pass behind its products, a narrow one does not: so `triton` is taken up to some width H of the hidden states. A
measurement decides: `python -m benchmarks.choice` writes it to `MEASURED_FILE`. Until there is one, an architecture
takes `chunked`, unless its model leaves no doubt.
"""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

MEASURED_FILE = Path(__file__).with_name("measured.json")
"""Architecture to `{"widest": H, "source": name of a results file}`."""


class Choice(NamedTuple):
    """The rule of an architecture, from a model (`benchmarks.cost`)."""

    widest: float
    """`triton` up to this H, `chunked` beyond"""
    certain: bool
    """whether it is taken without a measurement"""
    reason: str
    """times are ms of forward + backward in bf16, for N/H/V"""
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    """of products; in others it is `chunked`"""


_UNKNOWN = Choice(0, False, "not modelled")

MODELLED: dict[str, Choice] = {
    "sm_80": Choice(1024, False, "at large H its smaller tile loses more than the pass of chunked costs"),
    "sm_86": _UNKNOWN,
    "sm_89": _UNKNOWN,
    "sm_90": Choice(2048, False, "H200, 8192/896/151936: 12 to 14, chunked 14 to 17; 8192/4096/131072: 39 to 43, 41"),
    "sm_100": Choice(0, False, "its products wait for the epilogue: chunked at every H"),
    "gfx942": Choice(
        math.inf, True, "MI300: chunked has no 16-bit product with an fp32 result: 80 in fp32, 15 in bf16",
        (torch.bfloat16, torch.float16),
    ),
}  # fmt: skip
"""In fp32 the library's products are faster at every H; fp16 is not modelled on NVIDIA GPUs."""


def widest_triton(architecture: str) -> float:
    """The largest H at which `auto` takes `triton`."""
    measured = _measured().get(architecture)
    if measured is not None:
        return measured
    modelled = MODELLED[architecture]
    return modelled.widest if modelled.certain else 0


def on_gpu(architecture: str, dtype: torch.dtype, width: int) -> str:
    """`triton` or `chunked` for products in `dtype` of hidden states [N, H] with H = `width`."""
    takes = dtype in MODELLED[architecture].dtypes and width <= widest_triton(architecture)
    return "triton" if takes else "chunked"


@cache
def _measured() -> dict[str, float]:
    found = json.loads(MEASURED_FILE.read_text()) if MEASURED_FILE.exists() else {}
    return {architecture: entry["widest"] for architecture, entry in found.items()}
