"""A fault of each kind, put into the head kernel's PTX, fails the comparison with float64 or a check of the interpreter."""

from __future__ import annotations

import linecache
import os
import re
from pathlib import Path

import pytest

if os.environ.get("TRITON_INTERPRET") != "0":
    pytest.skip("needs TRITON_INTERPRET=0: see make emulate-nvidia", allow_module_level=True)
pytest.importorskip("triton")

import kernel_cases as cases

from tests.ptx import mutations
from tests.ptx.block import Options
from tests.ptx.driver import driver_of
from tests.ptx.text import PtxError

SOURCE = Path(cases.head_launch.__file__).with_name("head.py")


def swizzle(each):
    """Rows of 128 bytes lie as those of 64 do: in a descriptor, or in the pattern of an address."""
    *rest, last = each.operands or (None,)
    if each.opcode == "xor.b32" and last == "32":
        return each._replace(operands=(*rest, "64"))
    if each.opcode.endswith("64") and isinstance(last, str) and last.isdigit() and int(last) >> 61 == 2:
        return each._replace(operands=(*rest, str(int(last) ^ 3 << 62)))
    return each


def mask(each):
    """A row after the last one, too."""
    found = re.match(r"head\.py:(\d+)", each.source)
    line = linecache.getline(str(SOURCE), int(found[1])) if found else ""
    bounds = "< N" in line or "< num_rows" in line
    return each._replace(opcode="setp.le.s32") if each.opcode == "setp.lt.s32" and bounds else each


def fragment(each):
    """Two registers of a product's operand or result change places."""
    at = {"mma": 1, "wgmma": 0, "tcgen05": 0}.get(each.opcode.split(".")[0])
    if at is None or not re.match(r"mma\.sync|wgmma\.mma|tcgen05\.ld", each.opcode):
        return each
    first, second, third, *rest = each.operands[at]
    operands = list(each.operands)
    operands[at] = (third, second, first, *rest)
    return each._replace(operands=tuple(operands))


def without(kind):
    """No barrier, or no wait."""

    def edit(kernel):
        chosen = [place for place in mutations.places(kernel) if ("bar.sync" in place.opcode) == (kind == "barrier")]
        mutations.without(kernel.name, *[place for place in chosen if "fence" not in place.opcode])(kernel)

    return edit


def each_instruction(change):
    """An edit of a kernel."""

    def edit(kernel):
        kernel.instructions[:] = [change(each) for each in kernel.instructions]

    return edit


FAULTS = {
    "wait": without("wait"),
    "barrier": without("barrier"),
    "swizzle": each_instruction(swizzle),
    "mask": each_instruction(mask),
    "fragment": each_instruction(fragment),
}


@pytest.mark.gate(keep=lambda architecture, fault: architecture == "sm_90" and fault in ("swizzle", "mask", "fragment"))
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_a_fault_is_noticed(architecture, fault):
    changed = []

    def edit(kernel):
        if kernel.name == "head_fwd_kernel":
            before = list(kernel.instructions)
            FAULTS[fault](kernel)
            changed.append(before != kernel.instructions)

    with cases.launched_as(lambda: architecture):
        with (
            driver_of(architecture).active(Options(races=True), edit=edit),
            pytest.raises((PtxError, AssertionError)) as noticed,
        ):
            cases.training(cases.BF16, H=144)
        assert any(changed)
        assert "unknown instruction" not in str(noticed.value)
