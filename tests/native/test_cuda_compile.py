"""The CUDA row kernels, compiled without a GPU: their machine code, and what their operators refuse.

Bulk copies, barriers and launches, which do not run on a CPU, are checked in the machine code; tests/gpu runs them.
"""

from __future__ import annotations

import pytest
import torch
from helpers import make_config

pytest.importorskip("triton")

from grpo_fused.kernels.row_types import Coefficients, Rows, Statistics, Transform
from native.building import shared_library
from native.rows import in_place, make_rows, padded

from benchmarks import aot_rows
from grpo_fused.call.calls import LossInputs
from grpo_fused.call.layout import Layout
from grpo_fused.engines.cuda_rows import CudaRows
from grpo_fused.engines.token_kernels import objective_numbers, token_inputs
from grpo_fused.objective.batch import TokenBatch

# torch's CPU wheel has no such function, and a library with a missing one cannot be loaded
STREAM_STUB = 'extern "C" int aoti_torch_get_current_cuda_stream(int, void**) { return 1; }\n'


@pytest.fixture(scope="session")
def architectures(request):
    """The gate compiles for one architecture, which has all kernels."""
    return list(aot_rows.CUDA_ARCHITECTURES) if request.config.getoption("--full") else ["sm_90"]


@pytest.fixture(scope="session")
def library(architectures, tmp_path_factory):
    """All sources, once: some 10 s for each architecture."""
    if reason := aot_rows.missing_tools():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("cuda")
    (folder / "stub.cpp").write_text(STREAM_STUB)
    shared_library(folder / "libstub.so", folder / "stub.cpp")
    stub = [f"-L{folder}", "-lstub", "-Xlinker", f"-rpath={folder}"]
    return aot_rows.compile_library(folder / "rows.so", [] if torch.cuda.is_available() else stub, architectures)


@pytest.fixture(scope="session")
def evidence(library):
    return aot_rows.inspect_library(library)


def test_every_kernel_exists(evidence, architectures):
    assert {e.arch for e in evidence} == set(architectures)
    assert len(evidence) == 10 * len(architectures), "10 combinations of mode and dtypes"


def test_no_spill_and_registers_for_two_blocks(evidence):
    for e in evidence:
        assert e.stack == e.local == 0, e
        assert e.registers <= 64, e


def test_accesses_are_16_bytes_wide(evidence):
    for e in evidence:
        assert e.wide_loads >= 1, e
        assert e.wide_stores >= 1 or e.mode == "statistics", e


def test_shared_memory(evidence):
    for e in evidence:
        assert e.static_shared <= 16 * 16 + 1024, f"more than a `Partial` for each warp and the system's: {e}"


@pytest.fixture
def operators(library):
    """The operators without a GPU: all their checks come before the check of the device."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: tests/gpu runs the operators")
    if not hasattr(torch.ops.grpo_fused_C, "row_loss"):
        torch.ops.load_library(str(library))
    return torch.ops.grpo_fused_C


ROWS, COLUMNS = 4, 37
PLAIN = Transform(None, 1.0, None, 1.0)


def statistics_call(**changes):
    logits, targets = make_rows((ROWS, COLUMNS))
    row = torch.zeros(ROWS)
    call = {
        "logits": padded(logits), "targets": targets, "bias": None, "temperatures": None, "temperature": 1.0,
        "logit_scale": 1.0, "softcap": 0.0, "max": row, "log_sum": row.clone(), "logp": row.clone(), "entropy": None,
    }  # fmt: skip
    return {**call, **changes}


def gradient_call(**changes):
    call = statistics_call(dlogp=torch.zeros(ROWS), dentropy=None)
    return {**call, "out": in_place(call["logits"], torch.bfloat16), **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.zeros(ROWS)}, r"logits must be \[R, V\]; got 1 dimensions"),
        ({"logits": torch.zeros(ROWS, COLUMNS).double()}, "logits must be float32, bfloat16 or float16"),
        ({"logits": torch.zeros(COLUMNS, ROWS).T}, "rows of logits must have unit stride; got 4"),
        ({"logits": torch.zeros(ROWS, 0)}, "logits must have between 1 and 2\\^30 columns; got 0"),
        ({"targets": torch.zeros(ROWS, dtype=torch.int32)}, "targets must be int64"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, r"targets must be \[4\]; got 1 dimensions and 3 elements"),
        ({"bias": torch.zeros(COLUMNS - 1)}, r"bias must be \[37\]; got 1 dimensions and 36 elements"),
        ({"bias": torch.zeros(COLUMNS).bfloat16()}, "bias must be float32"),
        ({"temperatures": torch.zeros(2 * ROWS)[::2]}, "temperatures must be contiguous"),
        ({"temperature": 0.0}, "temperature must be positive; got 0"),
        ({"softcap": -1.0}, "softcap must be positive, or 0 for none; got -1"),
        ({"logp": torch.zeros(ROWS, 1)}, r"logp must be \[4\]; got 2 dimensions"),
        ({}, "logits must be on a CUDA device"),
    ],
)
def test_statistics_refuse_wrong_inputs(operators, changes, message):
    with pytest.raises(RuntimeError, match=message):
        operators.row_statistics(**statistics_call(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out": torch.zeros(ROWS, COLUMNS + 1)}, r"out must be \[4, 37\] as logits; got \[4, 38\]"),
        ({"out": torch.zeros(1, COLUMNS).expand(ROWS, -1)}, "rows of out must not overlap; got a stride of 0"),
        ({"out": torch.zeros(ROWS, COLUMNS, dtype=torch.int32)}, "out must be float32, bfloat16 or float16"),
        ({"dentropy": torch.zeros(ROWS)}, "dentropy needs entropy"),
        ({"dlogp": torch.zeros(1)}, r"dlogp must be \[4\]"),
        ({}, "logits must be on a CUDA device"),
    ],
)
def test_gradient_refuses_wrong_inputs(operators, changes, message):
    with pytest.raises(RuntimeError, match=message):
        operators.row_gradient(**gradient_call(**changes))


def test_gradient_refuses_memory_that_it_would_overwrite_too_early(operators):
    logits = padded(make_rows((ROWS, COLUMNS))[0])
    slab = logits.as_strided((ROWS * logits.stride(0),), (1,))
    packed = slab.view(torch.bfloat16)[: ROWS * COLUMNS].view(ROWS, COLUMNS)  # row 1 is written to row 0
    shifted = slab.view(torch.bfloat16)[2:][: 3 * 96].view(3, 96)[:, :COLUMNS]
    for rows, out in ((ROWS, packed), (3, shifted)):
        call = gradient_call(logits=logits[:rows], out=out)
        for name in ("targets", "max", "log_sum", "logp", "dlogp"):
            call[name] = call[name][:rows]
        with pytest.raises(RuntimeError, match="out may share the memory of logits only row by row"):
            operators.row_gradient(**call)


def test_wider_gradients_of_narrow_logits_are_refused(operators):
    logits = torch.zeros(ROWS, 48, dtype=torch.bfloat16)[:, :COLUMNS]
    with pytest.raises(RuntimeError, match="out must have the dtype of logits that are not float32"):
        operators.row_gradient(**gradient_call(logits=logits, out=torch.zeros(ROWS, COLUMNS)))


def one_token_batch(config):
    inputs = LossInputs(
        advantages=torch.ones(2),
        completion_mask=torch.ones(2, 2),
        old_per_token_logps=-torch.ones(2, 2),
        ref_per_token_logps=-torch.ones(2, 2),
        importance_sampling_ratio=torch.ones(2, 1),
    )
    return TokenBatch.build(inputs, Layout(torch.Size((2, 2)), 2, None), config, torch.float32)


def test_calls_of_the_engine_pass_every_check_but_the_device(operators):
    """The arguments that CudaRows builds are those that the operators take."""
    work = CudaRows()
    logits, targets = make_rows((ROWS, COLUMNS))
    logits = padded(logits)
    temperatures = torch.ones(ROWS, dtype=torch.float64)
    refused = pytest.raises(RuntimeError, match="logits must be on a CUDA device")
    row = torch.zeros(ROWS)

    def loss(rows, config, out):
        return work.loss(
            rows, token_inputs(one_token_batch(config), config), objective_numbers(config), out, with_entropy=False
        )

    for transform in (PLAIN, Transform(torch.zeros(COLUMNS), 2.0, 30.0, temperatures)):
        with refused:
            work.statistics(Rows(logits, targets, transform), with_entropy=True)
        with refused:
            out = in_place(logits, torch.bfloat16)
            stats = Statistics(row, row, row, row)
            work.gradient(Rows(logits, targets, transform), Coefficients(stats, row, row), out)
        for config in (make_config("dapo", beta=0.1, entropy_coef=0.1), make_config("cispo", beta=0.1)):
            with refused:
                loss(Rows(logits, targets, transform), config, logits)
    config, out = make_config("dapo"), in_place(logits, torch.float16)
    with pytest.raises(RuntimeError, match="a loss in one launch cannot scale a float16 gradient"):
        loss(Rows(logits, targets, PLAIN), config, out)
    with pytest.raises(ValueError, match="takes all rows of a chunk"):
        work.gradient(Rows(logits, targets, PLAIN), Coefficients(stats, row, None), logits, picked=targets)


def test_schemas_name_written_arguments(operators):
    written = {
        "row_statistics": {"max", "log_sum", "logp", "entropy"},
        "row_gradient": {"out"},
        "row_loss": {"out", "max", "log_sum", "logp", "entropy", "loss", "dlogp"},
    }
    for name, expected in written.items():
        schema = getattr(operators, name).default._schema
        got = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        assert got == expected
