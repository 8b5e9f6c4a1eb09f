"""Loads, stores, moves, exchanges between lanes, barriers, the end of a thread."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from .forms import PARAMETER_GENERIC, PARAMETER_START, TYPES, Decoder, Execute, Read, form
from .memory import UNSIGNED, Space
from .numbers import U16, U32, U64, Array
from .text import Address, PtxError
from .warps import AGAIN, EXIT, LANES, Warps

CACHE = r"(?:\.(?:nc|ca|cg|cs|lu|cv|wb|wt|volatile|relaxed|weak|cta|gpu|L1::\w+|L2::\w+))*"
VALUE = r"(?:\.(?P<vector>v2|v4|v8))?\.(?P<type>[bsu](?:8|16|32|64)|f32|f64)"


@form(r"ld\.param(?:\.(?P<vector>v2|v4))?\.(?P<type>[bsu](?:8|16|32|64)|f32|f64)")
def load_parameter(d: Decoder, found: re.Match[str]) -> Execute:
    return _load(d, found, lambda warps: warps.block.parameters)


@form(rf"ld(?:\.volatile)?\.(?P<space>global|shared|shared::cta){CACHE}{VALUE}")
def load(d: Decoder, found: re.Match[str]) -> Execute:
    if found["space"] == "global":
        return _load(d, found, lambda warps: warps.block.memory)
    return _load(d, found, lambda warps: warps.block.shared)


@form(rf"st(?:\.volatile)?\.(?P<space>global|shared|shared::cta){CACHE}{VALUE}")
def store(d: Decoder, found: re.Match[str]) -> Execute:
    size, address, parts = _shape(d, found, d.operands[0], d.operands[1])
    unsigned = UNSIGNED[size]
    name = {1: "b8", 2: "b16", 4: "b32", 8: "b64"}[size]
    reads = [d.read(part, name) for part in parts]
    is_global = found["space"] == "global"

    def execute(warps: Warps, mask: Array | None) -> None:
        space = warps.block.memory if is_global else warps.block.shared
        places = address(warps) if mask is None else address(warps)[mask]
        values = [np.broadcast_to(read(warps), warps.size).astype(unsigned, copy=False) for read in reads]
        values = values if mask is None else [value[mask] for value in values]
        by = warps.warp if mask is None else warps.warp[mask]
        space.check(places, size * len(parts))
        if warps.block.races is None or is_global:
            note(warps, space, places, size * len(parts), by, write=True)
            for number, value in enumerate(values):
                space.store(places + number * size, value)
            return
        for warp in np.unique(by):  # one by one, to see which writes change nothing
            mine = by == warp
            to, parts_of_warp = places[mine], [value[mine] for value in values]
            same = np.ones(to.size, bool)
            for number, value in enumerate(parts_of_warp):
                same &= space.load(to + number * size, size) == value
            note(warps, space, to, size * len(parts), by[mine], write=True, same=same)
            for number, value in enumerate(parts_of_warp):
                space.store(to + number * size, value)

    return execute


def _shape(d: Decoder, found: re.Match[str], place: Any, values: Any) -> tuple[int, Read, tuple[str, ...]]:
    size = np.dtype(TYPES[found["type"]]).itemsize
    parts = d.vector(values)
    if len(parts) != int((found["vector"] or "v1")[1:]):
        raise PtxError(f"expected {found['vector'] or 'one value'}; got {len(parts)}")
    if isinstance(place, Address) and place.base in d.program.kernel.parameters:
        offset = PARAMETER_START + d.program.kernel.parameters[place.base].offset + place.offset
        return size, lambda warps: np.array([offset]), parts
    return size, d.address(place), parts


def _load(d: Decoder, found: re.Match[str], space_of: Any) -> Execute:
    size, address, parts = _shape(d, found, d.operands[1], d.operands[0])
    dtype = TYPES[found["type"]]
    puts = [d.write(part) for part in parts]

    def execute(warps: Warps, mask: Array | None) -> None:
        space = space_of(warps)
        places, lanes = _places(warps, space, address, size * len(parts), mask)
        for number, put in enumerate(puts):
            value = space.load(places + number * size if number else places, size).view(dtype)
            if lanes is not None:
                whole = np.zeros(warps.size, dtype)
                whole[lanes] = value
                value = whole
            put(warps, value, mask)

    return execute


def _places(warps: Warps, space: Space, address: Read, width: int, mask: Array | None) -> tuple[Array, Array | None]:
    """Addresses that lanes which take part load from, checked and counted, and the mask that chose them."""
    places = address(warps)
    if space is warps.block.parameters and places.size == 1:  # at a constant place
        return places, None
    if mask is not None:
        places = places[mask]
    space.check(places, width)
    note(warps, space, places, width, warps.warp if mask is None else warps.warp[mask], write=False)
    return places, mask


def note(
    warps: Warps, space: Space, places: Array, width: int, by: Array, *, write: bool, same: Array | None = None
) -> None:
    """Tell the profile and the race detector about accesses at places [n] by warps `by` [n]."""
    block = warps.block
    if not places.size:
        return
    if space is block.shared:
        if block.races is not None:
            block.races.access(places, width, by, warps.pc, write=write, same=same)
        if block.profile is not None:
            block.profile.shared_access(places, width, by)
    elif block.profile is not None and space is block.memory:
        block.profile.global_access(places, width, by, write=write)


@form(r"mov\.(?P<type>pred|[bsu](?:16|32|64)|f32|f64)")
def move(d: Decoder, found: re.Match[str]) -> Execute:
    """Also packs {low, high} into one register, and unpacks it, the four bytes of 32 bits too."""
    kind = found["type"]
    into, source = d.operands
    if isinstance(into, tuple):
        whole = d.read(source, kind)
        puts = [d.write(part) for part in into]
        each = {("b32", 2): U16, ("b64", 2): U32, ("b32", 4): np.uint8}.get((kind, len(puts)))
        if each is None:
            raise PtxError(f"{kind} does not have {len(puts)} parts")

        def unpack(warps: Warps, mask: Array | None) -> None:
            parts = np.ascontiguousarray(whole(warps)).view(each).reshape(-1, len(puts))
            for number, put in enumerate(puts):
                put(warps, np.ascontiguousarray(parts[:, number]), mask)

        return unpack
    put = d.write(into)
    if isinstance(source, tuple):
        name, dtype, bits = {"b32": ("b16", U32, 16), "b64": ("b32", U64, 32)}[kind]
        low, high = (d.read(part, name, poisoned=True) for part in source)  # half may be unused
        return lambda warps, mask: put(  # type: ignore[func-returns-value]
            warps, low(warps).astype(dtype) | high(warps).astype(dtype) << dtype(bits), mask
        )
    read = d.read(source, kind)
    return lambda warps, mask: put(warps, read(warps), mask)  # type: ignore[func-returns-value]


@form(r"cvta(?P<to>\.to)?\.(?P<space>global|param)\.u64")
def generic_address(d: Decoder, found: re.Match[str]) -> Execute:
    """Global addresses are generic addresses here; those of parameters are elsewhere."""
    offset = U64(PARAMETER_GENERIC if found["space"] == "param" else 0)
    return d.elementwise(lambda x: x - offset if found["to"] else x + offset, "b64")


@form(r"cvta(?:\.to)?\.shared\.u(?P<bits>32|64)")
def shared_address(d: Decoder, found: re.Match[str]) -> Execute:
    """Only for addresses that come back to shared memory: a generic access there is outside of global memory."""
    return d.elementwise(lambda x: x, f"b{found['bits']}")


@form(r"shfl\.sync\.(?P<mode>bfly|idx|up|down)\.b32")
def shuffle(d: Decoder, found: re.Match[str]) -> Execute:
    """A lane whose source is outside of its segment keeps its own value."""
    outputs = d.vector(d.operands[0])
    put, put_inside = d.write(outputs[0]), d.write(outputs[1]) if len(outputs) > 1 else None
    value, by, clamp, members = (d.read(operand, "b32") for operand in d.operands[1:])
    mode = found["mode"]

    def execute(warps: Warps, mask: Array | None) -> None:
        lane = warps.lane.astype(np.int64)
        move_by, limits = by(warps).astype(np.int64) & 31, clamp(warps).astype(np.int64)
        segment = (limits >> 8) & 31
        highest = (lane & segment) | (limits & 31 & ~segment)
        source = {"bfly": lane ^ move_by, "up": lane - move_by, "down": lane + move_by}.get(
            mode, (lane & segment) | (move_by & ~segment)
        )
        inside = source >= highest if mode == "up" else source <= highest
        source = np.where(inside, source, lane)
        at = np.arange(warps.size) // LANES * LANES + source
        _check_members(warps, members(warps), mask, at)
        put(warps, np.broadcast_to(value(warps), warps.size)[at], mask)
        if put_inside is not None:
            put_inside(warps, inside, mask)

    return execute


def _check_members(warps: Warps, members: Array, mask: Array | None, at: Array) -> None:
    named = (members >> warps.lane) & U32(1) == 1
    if mask is None:
        if not named.all():
            raise PtxError("a lane that is not in the member mask takes part")
        return
    if (mask & ~named).any():
        raise PtxError("a lane that is not in the member mask takes part")
    if (mask & ~mask[at]).any():
        raise PtxError("a lane takes the value of one that does not take part")


@form(r"redux\.sync\.(?P<op>min|max|add)\.(?P<type>[su]32)")
def reduce_lanes(d: Decoder, found: re.Match[str]) -> Execute:
    put, value = d.write(d.operands[0]), d.read(d.operands[1], found["type"])
    fn: Any = {"min": np.min, "max": np.max, "add": np.sum}[found["op"]]

    def execute(warps: Warps, mask: Array | None) -> None:
        warps.all_of_warps(mask, "redux.sync")
        by_warp = np.broadcast_to(value(warps), warps.size).reshape(-1, LANES)
        put(warps, np.repeat(fn(by_warp, axis=1).astype(by_warp.dtype), LANES), mask)

    return execute


@form(r"redux\.sync\.(?P<op>min|max)(?P<abs>\.abs)?(?P<nan>\.NaN)?\.f32")
def reduce_floats(d: Decoder, found: re.Match[str]) -> Execute:
    put, value = d.write(d.operands[0]), d.read(d.operands[1], "f32")
    names = {"min": (np.fmin, np.minimum), "max": (np.fmax, np.maximum)}[found["op"]]
    fn: Any = names[1] if found["nan"] else names[0]

    def execute(warps: Warps, mask: Array | None) -> None:
        warps.all_of_warps(mask, "redux.sync")
        by_warp = np.broadcast_to(value(warps), warps.size).reshape(-1, LANES)
        put(warps, np.repeat(fn.reduce(np.abs(by_warp) if found["abs"] else by_warp, axis=1), LANES), mask)

    return execute


@form(r"elect\.sync")
def elect(d: Decoder, found: re.Match[str]) -> Execute:
    """One lane of each warp: the first that takes part."""
    leader, chosen = (d.write(operand) for operand in d.vector(d.operands[0]))

    def execute(warps: Warps, mask: Array | None) -> None:
        present = np.ones(warps.size, bool) if mask is None else mask
        first = present.reshape(-1, LANES).argmax(1)
        leader(warps, np.repeat(first.astype(U32), LANES), mask)
        chosen(warps, warps.lane == np.repeat(first, LANES), mask)

    return execute


@form(r"(?:bar\.sync|barrier\.sync(?:\.aligned)?|bar\.cta\.sync|barrier\.cta\.sync(?:\.aligned)?)")
def barrier(d: Decoder, found: re.Match[str]) -> Execute:
    number = d.read(d.operands[0], "u32")
    count = d.read(d.operands[1], "u32") if len(d.operands) > 1 else None

    def execute(warps: Warps, mask: Array | None) -> Any:
        if mask is not None and not mask.any():
            return None
        warps.all_of_warps(mask, "a barrier")
        threads = warps.block.launch.threads if count is None else int(count(warps)[0])
        return warps.block.meet(int(number(warps)[0]), threads, warps, mask)

    return execute


@form(r"bar\.warp\.sync")
def warp_barrier(d: Decoder, found: re.Match[str]) -> Execute:
    """Lanes wait until all of their warp that the member mask names are here."""
    members = d.read(d.operands[0], "b32")

    def execute(warps: Warps, mask: Array | None) -> str | None:
        here = np.ones(warps.size, bool) if mask is None else mask
        named = (np.broadcast_to(members(warps), warps.size) >> warps.lane) & U32(1) == 1
        if (here & ~named).any():
            raise PtxError("a lane that is not in the member mask takes part")
        missing = (named & ~here).reshape(-1, LANES).any(1) & here.reshape(-1, LANES).any(1)
        if not missing.any():
            return None
        seen = warps.state.setdefault("warp barriers", {})
        if seen.get(warps.pc) != here.sum():
            seen[warps.pc] = here.sum()
            warps.block.events += 1
        return AGAIN

    return execute


@form(r"ret|exit")
def leave(d: Decoder, found: re.Match[str]) -> Execute:
    return lambda warps, mask: None if mask is not None and not mask.any() else EXIT
