"""What the kernels do, counted in their PTX, may not grow: against the newest file of results."""

from __future__ import annotations

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "0":
    pytest.skip("needs TRITON_INTERPRET=0: see make emulate-nvidia", allow_module_level=True)
triton = pytest.importorskip("triton")

from benchmarks import ptx_profile, results

QUICK = (
    ("sm_90", "exponentials bf16, odd V"),
    ("sm_80", "row gradient fp32 to bf16"),
    ("sm_80", "pair products bf16"),
)
"""What the gate counts."""


@pytest.mark.gate(keep=lambda case, architecture: (architecture, case) in QUICK)
@pytest.mark.parametrize("case", ptx_profile.CASES)
@pytest.mark.parametrize("architecture", ptx_profile.ARCHITECTURES)
def test_counts_do_not_grow(architecture, case):
    """After a change for the better, or one with a reason: `python -m benchmarks.ptx_profile --out FILE`."""
    run = results.latest("ptx", results.all_runs())
    assert run is not None
    if run.sections["ptx"]["triton"] != triton.__version__:
        pytest.skip(f"the counts are of triton {run.sections['ptx']['triton']}")
    limits = run.sections["ptx"]["kernels"][f"{architecture} {case}"]
    found = ptx_profile.count(architecture, case)
    assert found.keys() == limits.keys()
    grown = {name: (limits[name], value) for name, value in found.items() if value > limits[name]}
    assert not grown, f"(before, now): {grown}"
    assert found["float"] > 1
