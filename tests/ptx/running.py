"""Runs a few lines of PTX: for tests of single instructions."""

from __future__ import annotations

import struct

import numpy as np

from tests.ptx.block import Block, Launch, Options, TensorMap, run
from tests.ptx.forms import Program
from tests.ptx.memory import Space
from tests.ptx.profile import Profile
from tests.ptx.text import parse

BASE = 1 << 32
IN_STEP = Options()

HEAD = """.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry k({parameters})
.reqntid {threads}
{{
.reg .pred %p<32>;
.reg .b16 %rs<64>;
.reg .b32 %r<512>;
.reg .b64 %rd<64>;
{body}
ret;
}}
.file 1 "/a/folder/kernel.py"
"""


def run_ptx(
    body: str, *arrays: np.ndarray, threads: int = 32, shared: int = 1024, options: Options = IN_STEP,
    profile: Profile | None = None, maps: tuple[TensorMap, ...] = (),
) -> Block:  # fmt: skip
    """Run one block. Array i is at the address of parameter p<i>, which %rd<i> holds; m<i> are tensor maps.

    Lane numbers are in %r0, lane * 4 in %rd50.
    """
    memory, addresses = Space("global"), []
    for number, array in enumerate(arrays):
        addresses.append(BASE + number * 2**24)
        memory.add(addresses[-1], array.reshape(-1).view(np.uint8))
    names = [f".param .u64 p{i}" for i in range(len(arrays))]
    names += [f".param .align 64 .b8 m{i}[128]" for i in range(len(maps))]
    start = "".join(f"ld.param.b64 %rd{i}, [p{i}];\n" for i in range(len(arrays)))
    start += "mov.u32 %r0, %tid.x;\nmul.wide.u32 %rd50, %r0, 4;\n"
    kernel = parse(HEAD.format(parameters=", ".join(names), threads=threads, body=start + body))
    packed = bytearray(kernel.parameter_bytes)
    struct.pack_into(f"<{len(addresses)}Q", packed, 0, *addresses)
    found = {kernel.parameters[f"m{i}"].offset: m for i, m in enumerate(maps)}
    launch = Launch(Program(kernel), memory, bytes(packed), found, threads, shared, options, profile)
    block = Block(launch, {"ctaid.x": 0, "nctaid.x": 1})
    run(block)
    return block


WIDE = {"b32": "%r", "b64": "%rd", "b16": "%rs", "pred": "%p"}


def apply(instruction: str, *inputs: np.ndarray, out: type = np.uint32, options: Options = IN_STEP) -> np.ndarray:
    """An instruction with {d} and {0}, {1}, ... on arrays of one length: each element is a lane's."""
    size = len(inputs[0])
    padded = -(-size // 32) * 32
    lines, names, arrays = [], [], []
    for number, values in enumerate(inputs):
        full = np.zeros(padded, values.dtype)
        full[:size] = values
        arrays.append(full)
        item = values.dtype.itemsize
        name = f"{WIDE[f'b{8 * item}']}{10 + number}"
        names.append(name)
        lines.append(f"mad.wide.u32 %rd20, %r0, {item}, %rd{number};\nld.global.b{8 * item} {name}, [%rd20];")
    result = np.zeros(padded, out)
    item = result.dtype.itemsize
    target = f"{WIDE[f'b{8 * item}']}30"
    lines.append(instruction.format(*names, d=target) + ";")
    lines.append(f"mad.wide.u32 %rd21, %r0, {item}, %rd{len(inputs)};\nst.global.b{8 * item} [%rd21], {target};")
    run_ptx("\n".join(lines), *arrays, result, threads=padded, options=options)
    return result[:size]
