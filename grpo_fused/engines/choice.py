"""Which engine `impl="auto"` takes on a GPU: `chunked`, or `triton` up to some width H of the hidden states.

`chunked` multiplies by the library and passes over the logits; `triton` keeps them in registers. A wide head hides the
pass behind its products, a narrow one does not. A measurement decides: `python -m benchmarks.choice` writes it to
`MEASURED_FILE`. Until there is one, an architecture takes `chunked`, unless it is in `UNMEASURED`.
"""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path

import torch

MEASURED_FILE = Path(__file__).with_name("measured.json")
"""Architecture to `{"widest": H, "source": name of a results file}`."""

UNMEASURED = {"gfx942": (torch.bfloat16, torch.float16)}
"""Architectures that take `triton` at every H in these dtypes: the library has no 16-bit product with an fp32 result
there, so `chunked` multiplies in fp32, at about a fifth of the rate."""


def on_gpu(architecture: str, dtype: torch.dtype, width: int) -> str:
    """`triton` or `chunked` for products in `dtype` of hidden states [N, H] with H = `width`.

    In fp32 the library's products are faster at every H; fp16 was not measured on NVIDIA GPUs.
    """
    widest = _measured().get(architecture, math.inf if architecture in UNMEASURED else 0)
    takes = dtype in UNMEASURED.get(architecture, (torch.bfloat16,)) and width <= widest
    return "triton" if takes else "chunked"


@cache
def _measured() -> dict[str, float]:
    found = json.loads(MEASURED_FILE.read_text()) if MEASURED_FILE.exists() else {}
    return {architecture: entry["widest"] for architecture, entry in found.items()}
