"""The CUDA C++ row kernels, compiled to PTX by nvcc and interpreted, against float64."""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from tests.ptx.block import Block, Launch, Options, run
from tests.ptx.driver import memory_of
from tests.ptx.forms import Program
from tests.ptx.text import parse

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc"),
]
CUDA = Path(__file__).resolve().parents[2] / "csrc" / "cuda"
MODES = {"statistics": 0, "gradient": 1, "loss": 2}
TYPES = {torch.float32: "f", torch.bfloat16: "13__nv_bfloat16", torch.float16: "6__half"}

_POINTERS = ("targets", "bias", "temperatures")
_OUTPUTS = ("max", "log_sum", "logp", "entropy", "loss", "dlogp", "dentropy", "advantages", "weight", "old_logp",
            "ref_logp", "is_ratio", "entropy_weight")  # fmt: skip


class Arguments(ctypes.Structure):
    """`RowArguments` of csrc/row_steps.h."""

    _fields_ = [
        ("logits", ctypes.c_void_p), ("out", ctypes.c_void_p), ("stride_logits", ctypes.c_int64),
        ("stride_out", ctypes.c_int64), ("rows", ctypes.c_int64), ("vocab_size", ctypes.c_int),
        ("wide_logits", ctypes.c_bool), ("wide_out", ctypes.c_bool), ("stores_land_ahead", ctypes.c_bool),
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("temperature", ctypes.c_float), ("logit_scale", ctypes.c_float), ("softcap", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in _OUTPUTS),
        ("policy", ctypes.c_int), ("kl_estimator", ctypes.c_int), ("has_old", ctypes.c_bool),
        ("has_kl", ctypes.c_bool), ("bias_correction", ctypes.c_bool),
        *((name, ctypes.c_float) for name in ("epsilon", "epsilon_high", "delta", "dual_clip", "tau_pos", "tau_neg", "beta")),
    ]  # fmt: skip


@functools.cache
def compiled(architecture: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.ptx"
        subprocess.run(
            ["nvcc", "-std=c++17", f"-arch={architecture}", "-lineinfo", "--ptx", f"-I{CUDA.parent}", "-o", str(file),
             str(CUDA / "row_kernel.cu")], capture_output=True, text=True, check=True,
        )  # fmt: skip
        return file.read_text()


@functools.cache
def program(architecture: str, mode: str, logits: torch.dtype, out: torch.dtype) -> Program:
    text = compiled(architecture)
    names = re.findall(r"\.entry\s+([\w$]+)", text)
    types = TYPES[logits] + (TYPES[out] if out != logits or logits == torch.float32 else "S2_")
    wanted = re.compile(rf"row_kernelILNS_7RowModeE{MODES[mode]}E{types}EEv")
    return Program(parse(text, next(name for name in names if wanted.search(name))))


def launch(program: Program, threads: int, tensors: dict[str, torch.Tensor], options: Options, **values):
    """Run a row kernel: a block for each row."""
    logits, out = tensors["logits"], tensors["out"]
    given = Arguments(
        rows=len(logits), vocab_size=logits.shape[1], stride_logits=logits.stride(0), stride_out=out.stride(0),
        wide_logits=logits.data_ptr() % 16 == 0 and logits.stride(0) * logits.itemsize % 16 == 0,
        wide_out=out.data_ptr() % 16 == 0 and out.stride(0) * out.itemsize % 16 == 0,
        **{name: tensor.data_ptr() for name, tensor in tensors.items()}, **values,
    )  # fmt: skip
    (parameter,) = program.kernel.parameters.values()
    assert parameter.size == ctypes.sizeof(given), "the layout of RowArguments"
    what = Launch(program, memory_of(list(tensors.values())), bytes(given), {}, threads, 0, options)
    for row in range(len(logits)):
        run(Block(what, {"ctaid.x": row, "nctaid.x": len(logits)}))


@pytest.mark.parametrize("way", [Options(), Options(together=False, backwards=True)], ids=["in step", "backwards"])
@pytest.mark.parametrize("vocab_size", [37, 1501])
@pytest.mark.parametrize(
    ("dtype", "out_dtype"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_rows(architecture, dtype, out_dtype, vocab_size, way):
    """Statistics, gradient, and both with an objective, with bias, scale, softcap and temperatures."""
    pytest.importorskip("triton")
    from grpo_fused.kernels.row_types import Transform
    from kernel_cases import GRADIENT, Exact, frobenius_error

    g = torch.Generator().manual_seed(vocab_size)
    width = -(-vocab_size // 32) * 32
    logits = (3 * torch.randn(2, width, generator=g)).to(dtype)[:, :vocab_size]
    bias, temperatures = torch.randn(vocab_size, generator=g), torch.tensor([0.7, 1.3])
    targets = torch.randint(0, vocab_size, (2,), generator=g)
    exact = Exact(logits, targets, Transform(bias, 1.2, 9.0, temperatures))
    given = {"logits": logits, "targets": targets, "bias": bias, "temperatures": temperatures}
    numbers = {"temperature": 1.0, "logit_scale": 1.2, "softcap": 9.0}
    stats = {name: torch.full((2,), torch.nan) for name in ("max", "log_sum", "logp", "entropy")}
    out = torch.full((2, width), torch.nan, dtype=out_dtype)[:, :vocab_size]
    dlogp, dentropy = torch.randn(2, 2, generator=g)

    def go(mode: str, kind: torch.dtype, **more: torch.Tensor) -> None:
        launch(
            program(architecture, mode, dtype, kind),
            64,
            {**given, **stats, "out": out, **more},
            way,
            **numbers,
            **options,
        )

    options: dict = {}
    go("statistics", dtype)
    for key, want in exact.statistics._asdict().items():
        torch.testing.assert_close(stats[key].double(), want.detach(), rtol=1e-5, atol=1e-5)
    go("gradient", out_dtype, dlogp=dlogp, dentropy=dentropy)
    assert frobenius_error(out, exact.dlogits(dlogp, dentropy)) < GRADIENT[out_dtype]
    if dtype != torch.float32:
        return
    # the clipped objective of PPO: one row is inside of the clip, one outside
    advantages, weight = torch.tensor([1.5, 0.5]), torch.tensor([0.3, 0.7])
    old = exact.statistics.logp.detach().float() - torch.tensor([0.1, 0.9])
    loss, coefficient = torch.full((2, 2), torch.nan)
    options = {"policy": 0, "kl_estimator": 3, "has_old": True, "epsilon": 0.2, "epsilon_high": 0.2,
               "delta": float("inf"), "dual_clip": float("inf"), "tau_pos": 1.0, "tau_neg": 1.0}  # fmt: skip
    for tensor in stats.values():
        tensor.fill_(torch.nan)
    out.fill_(torch.nan)
    go("loss", out_dtype, loss=loss, dlogp=coefficient, advantages=advantages, weight=weight, old_logp=old)
    ratio = (exact.statistics.logp.detach() - old).exp()
    torch.testing.assert_close(
        loss.double(), -weight * torch.minimum(ratio, ratio.clamp(0.8, 1.2)) * advantages, rtol=1e-5, atol=1e-6
    )
    want = -weight * advantages * ratio * torch.tensor([1.0, 0.0])
    torch.testing.assert_close(coefficient.double(), want.double(), rtol=1e-5, atol=1e-6)
    assert frobenius_error(out, exact.dlogits(want, None)) < GRADIENT[out_dtype]
