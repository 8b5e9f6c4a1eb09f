"""Kernels without one of their barriers, waits or fences: which of them does a run miss?"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from .text import Instruction, Kernel

_ORDER = re.compile(
    r"bar\.sync|cp\.async(\.bulk)?\.wait_group(\.read)?|wgmma\.(wait_group|fence)\..*|mbarrier\.try_wait\..*|fence\.proxy.*"
    r"|tcgen05\.wait::(ld|st)\..*"
)
"""Opcodes that put accesses in order."""


class Place(NamedTuple):
    """One of a kernel's barriers, waits or fences."""

    index: int
    """among its instructions"""
    number: int
    """among those of its opcode"""
    opcode: str
    source: str

    def __str__(self) -> str:
        return f"{self.opcode.split('.sync.aligned')[0]} {self.number} ({self.source})"


def places(kernel: Kernel) -> list[Place]:
    """Everything in a kernel that puts accesses in order."""
    found: list[Place] = []
    for index, each in enumerate(kernel.instructions):
        if _ORDER.fullmatch(each.opcode):
            number = sum(place.opcode == each.opcode for place in found)
            found.append(Place(index, number, each.opcode, each.source))
    return found


def without(name: str, *removed: Place) -> Callable[[Kernel], None]:
    """An edit that removes them from the kernel of that name: a wait that asks is told that all is there."""

    def edit(kernel: Kernel) -> None:
        if kernel.name != name:
            return
        for place in removed:
            old = kernel.instructions[place.index]
            if old.opcode != place.opcode:
                raise ValueError(f"{place} is of another kernel: there is {old}")
            new = Instruction(None, False, "membar.cta", (), old.line, old.source)
            if "try_wait" in old.opcode:
                new = old._replace(opcode="mov.pred", operands=(old.operands[0], "-1"))
            kernel.instructions[place.index] = new

    return edit
